"""Every verb with bad input: one line, exit code 2, no traceback, no files left behind.

Run in this process, through the entry point; the tests read stderr as a user would see it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from fledge.cli import main
from fledge.core.files import atomic_file
from train.tiny import make_chats, make_target, recipe_for


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, chats, a recipe, a draft, and many corrupted versions of them."""
    import torch

    from fledge import HFEagle3TargetModel
    from fledge.data.vocab import select_vocabulary
    from fledge.training.setup import make_draft

    root = tmp_path_factory.mktemp("hostile")
    target, chats = make_target(root / "target"), make_chats(root / "chats.jsonl")
    recipe = recipe_for(target, chats, root / "run")
    (root / "recipe.yaml").write_text(recipe.to_yaml())
    backend = HFEagle3TargetModel.from_pretrained(target, aux_layer_ids=[0, 1, 2])
    counts = torch.arange(400).numpy()
    vocabulary = select_vocabulary(counts, 128, special_ids=[0, 1])
    draft = make_draft(recipe, backend, vocabulary, backend.tokenizer, torch.device("cpu"))
    draft.save_pretrained(root / "draft")
    for name, content in {
        "empty": b"", "binary": b"\xff\xfe\x00" * 99, "list": b"[1]", "broken": b"{\n[\n",
        "object": b"{}",
        "half": b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n',
    }.items():  # fmt: skip
        for suffix in ("jsonl", "json", "yaml"):
            (root / f"{name}.{suffix}").write_bytes(content)
        for kind in ("target", "draft"):
            for file in ("config.json", "model.safetensors"):
                spoiled = root / f"{kind}-{name}-{file.partition('.')[0]}"
                shutil.copytree(root / kind, spoiled)
                (spoiled / file).write_bytes(content)
    (root / "directory").mkdir()
    (root / "loop").symlink_to("loop")
    other = root / "target-with-more-layers"
    shutil.copytree(target, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    return root


def files(root):
    return {
        path: path.stat().st_mtime_ns
        for path in root.rglob("*")
        if not path.is_symlink() and path.is_file()
    }


def refused(place, monkeypatch, capfd, command):
    """Run a command that must be refused, and return its one-line error."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("FLEDGE_CACHE", str(place.parent / "cache"))
    before = files(place)
    with pytest.raises(SystemExit) as ended:
        main.run(command.split())
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line.strip()]
    assert ended.value.code == 2, err
    assert out == ""
    assert lines[-1].startswith("fledge: ")
    assert len(lines) == 1, err
    assert len(lines[0]) < 600
    assert files(place) == before
    return lines[0]


FEW = "--limit 1 --max-new-tokens 4"
EVAL = f"--target target --prompts chats.jsonl --live 0 {FEW}"
REGENERATE = f"regenerate chats.jsonl --out new.jsonl {FEW}"
EXPORT = f"--engine vllm --target target {FEW}"
SPOILED = [
    f"{name}-{file}"
    for name in ("empty", "binary", "list", "broken", "object")
    for file in ("config", "model")
]


@pytest.mark.parametrize("name", SPOILED)
def test_a_corrupted_draft_is_refused(place, monkeypatch, capfd, name):
    for command in (f"eval draft-{name} {EVAL} --json", f"export draft-{name} {EXPORT} --json"):
        refused(place, monkeypatch, capfd, command)


@pytest.mark.parametrize("name", [*SPOILED, "with-more-layers"])
def test_a_corrupted_target_is_refused(place, monkeypatch, capfd, name):
    line = refused(place, monkeypatch, capfd, f"{REGENERATE} --target target-{name}")
    assert f"target-{name}" in line
    if name == "with-more-layers":  # transformers would fill them with random numbers
        assert "the weights lack model.layers.4" in line


# The target does not exist: an unwritable output is refused before the target is looked up.
FILES = (
    "eval draft --target nowhere --out ",
    "report draft --out ",
    "data preview chats.jsonl --model nowhere --html ",
    "regenerate chats.jsonl --target nowhere --out ",
)
DIRECTORIES = (
    "export draft --engine vllm --target nowhere --out ",
    "import draft --target nowhere --out ",
    "diagnose draft --target nowhere --fix ",
    "precompute recipe.yaml target.model=nowhere --output-dir ",
    "cache convert nowhere --out ",
    "train recipe.yaml target.model=nowhere run.output_dir=",
)
UNWRITABLE = [(c, out) for c in FILES for out in ("directory", "chats.jsonl/x", "loop/x")]
UNWRITABLE += [(c, out) for c in DIRECTORIES for out in ("chats.jsonl", "chats.jsonl/x", "loop")]


@pytest.mark.parametrize(("command", "out"), UNWRITABLE)
def test_unwritable_outputs_are_refused(place, monkeypatch, capfd, command, out):
    assert f"{out}: " in refused(place, monkeypatch, capfd, f"{command}{out}")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"eval draft {EVAL} --device nowhere", "not a device"),
        (f"eval draft {EVAL} --device meta", "torch sees"),
        (f"eval draft {EVAL} --draft-tokens 1000000000000", "out of memory"),
        (f"eval draft --target target --prompts half.jsonl {FEW}", "UTF-8"),
        (f"eval directory {EVAL}", "neither a draft"),
        (f"export target {EXPORT}", "tensors missing"),
        (f"export draft {EXPORT} --out .", "current directory"),
        ("diagnose draft --target target --device nowhere", "not a device"),
        ("diagnose draft --target target --dtype nothing", "not a dtype"),
        ("train recipe.yaml trainig.lr=1", "did you mean 'training'?"),
        ("train recipe.yaml data.train=[]", "no training data"),
        ("train recipe.yaml data.train=nowhere.jsonl", "no such file"),
        ("train recipe.yaml target.model=no-such-model", "no such model"),
        ("train recipe.yaml target.aux_layer_ids=0,1,9", "9"),
        ("train recipe.yaml draft.init_from=nowhere", "nowhere"),
        ("train recipe.yaml training.device=cuda", "torch sees no GPU"),
        ("train recipe.yaml target.backend=sglang", "target.backend"),
        ("train recipe.yaml training.epochs=1e12", "training.epochs"),
        ("train recipe.yaml packing.tokens=1000000000000", "out of memory"),
        ("train recipe.yaml draft.init_from=./target", "tensors missing"),
        ("regenerate chats.jsonl --out new.jsonl --url http://[::1", "not an address"),
        ("regenerate chats.jsonl --out new.jsonl --url http://host:99999", "not an address"),
        ("bench http://host:99999", "not an address"),
        (
            f"regenerate chats.jsonl --out new.jsonl --target target --max-new-tokens {10**6}",
            "--max-new-tokens: 1,000,000 tokens, but the model takes",
        ),
        ("data prepare half.jsonl --model target", "no usable row"),
        ("data prepare none.jsonl --model target", "none.jsonl: no such file"),
        ("data stats chats.jsonl --model smollm2-153m", "smollm2-135m"),
        ("data prepare chats.jsonl --model target --overlong cutt", "did you mean 'cut'?"),
        ("data prepare chats.jsonl --model target --template-option x", "is not NAME=VALUE"),
        ("data prepare chats.jsonl --model target --template-option a=[1", "not YAML"),
        ("data prepare", "Missing argument"),
        ("dat", "No such command"),
        (f"data preview chats.jsonl --model {'a' * 5000}", "too long"),
        ("serve draft --port 99999", "--port"),
        ("serve-target --target target --max-body-mb nan", "--max-body-mb"),
        ("cache info directory", "not a cache"),
        ("diagnose /proc/self/mem --target target", "check the disk"),  # fails like a bad disk
        ("eval draft --target target --prompts chats.jsonl --out ./chats.jsonl", "is read by"),
        ("data preview chats.jsonl --model target --html chats.jsonl", "is read by"),
        ("regenerate chats.jsonl --target nowhere --out chats.jsonl", "is read by"),
        ("regenerate chats.jsonl --target nowhere --out new.json", "is not a .jsonl file"),
    ],
)
def test_bad_values_are_refused(place, monkeypatch, capfd, command, message):
    assert message in refused(place, monkeypatch, capfd, command)


def test_report_refuses_files_that_are_not_a_run(place, monkeypatch, capfd, tmp_path):
    run = place / "a-run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (run / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    assert "YAML: " in refused(place, monkeypatch, capfd, "report a-run")
    (run / "recipe.yaml").unlink()
    assert "fledge eval" in refused(place, monkeypatch, capfd, "report a-run --eval object.json")
    over = "report a-run --out a-run/metrics.jsonl"
    assert "is read by" in refused(place, monkeypatch, capfd, over)
    shutil.rmtree(run)


def test_a_run_of_a_different_target_is_refused(place, monkeypatch, capfd):
    import numpy as np

    from fledge.data.vocab import DraftVocabulary

    run = place / "run"
    run.mkdir()
    shutil.copy(place / "recipe.yaml", run)
    DraftVocabulary(np.arange(128), 500, 1.0).save(run / "vocabulary.safetensors")
    line = refused(place, monkeypatch, capfd, "train recipe.yaml")
    assert "made for a target of 500 tokens, this one has 400" in line
    shutil.rmtree(run)


def test_a_group_without_arguments_shows_its_help(place, monkeypatch, capfd):
    with pytest.raises(SystemExit) as ended:
        main.run(["data"])
    out, err = capfd.readouterr()
    assert ended.value.code == 2
    assert "preview" in out
    assert err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_exit_code_3(place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as ended:
        main.run(["data", "preview", "chats.jsonl", "--model", "target", "--html", "/dev/full"])
    assert ended.value.code == 3
    assert capfd.readouterr().err.startswith("fledge: the disk is full")
    assert not os.path.isfile("/dev/full")  # it was written to, not replaced


@pytest.mark.parametrize(
    ("verb", "kept"),
    [("regenerate x", "the answers are kept"), ("cache convert", "--resume"), ("cache info", "")],
)
def test_the_interrupt_message_says_what_is_kept(monkeypatch, capfd, verb, kept):
    def app(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as ended:
        main.run(verb.split())
    assert ended.value.code == 130
    message = capfd.readouterr().err.strip()
    assert message.startswith("fledge: interrupted")
    assert kept in message if kept else message == "fledge: interrupted"


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_removes_half_written_files(tmp_path, monkeypatch, capfd, number, code, swallowed):
    def app(**_):
        try:
            with atomic_file(tmp_path / "x") as handle:
                handle.write(b"half")
                os.kill(os.getpid(), number)
        except KeyboardInterrupt as interrupt:
            kinds.append(type(interrupt))
            if not swallowed:
                raise
        raise ValueError("a library took the interrupt for something else")

    kinds = []
    monkeypatch.setattr(main, "app", app)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        main.run(["eval"])
    assert ended.value.code == code
    assert capfd.readouterr().err.startswith("fledge: interrupted; the target's answers are kept")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before
    assert KeyboardInterrupt not in kinds  # with exactly that type, Python would lose the exit code


def test_a_second_signal_does_not_suppress_the_message(monkeypatch, capfd):
    real = main._fail

    def fail(*given):
        os.kill(os.getpid(), signal.SIGINT)
        real(*given)

    monkeypatch.setattr(main, "app", lambda **_: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(main, "_fail", fail)
    with pytest.raises(SystemExit) as ended:
        main.run(["eval"])
    assert ended.value.code == 130
    assert capfd.readouterr().err.startswith("fledge: interrupted")


@pytest.mark.parametrize(
    "arguments",
    ["data preview {0}/chats.jsonl --model {0}/target -n 60", "recipe schema"],
    ids=["rich", "plain"],
)
def test_a_closed_pipe_is_not_an_error(place, arguments):
    command = [sys.executable, "-m", "fledge.cli.main", *arguments.format(place).split()]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_closed_stdout_is_not_an_error(place):
    command = f"{sys.executable} -m fledge.cli.main recipe show {place}/recipe.yaml >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
