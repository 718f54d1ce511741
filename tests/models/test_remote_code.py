"""Python code that comes with a model runs only with the user's consent, in every verb."""

import json
import shutil
from pathlib import Path

import pytest

from fledge.core.errors import UntrustedCode
from fledge.core.machine import find_device
from fledge.data.prepare import prepare_rows
from fledge.precompute_eagle3 import main
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.kinds import engine_section, kind_of
from fledge.target.remote.server.app import TargetServer
from target.cache.caches import verb

NOTE = "from pathlib import Path\nPath({marker!r}).touch()\n"
CODE = {
    "configuration_own": "from transformers import LlamaConfig\n"
    "class OwnConfig(LlamaConfig):\n    model_type = 'fledge_own'\n",
    "modeling_own": "from transformers import LlamaForCausalLM\n"
    "from .configuration_own import OwnConfig\n"
    "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n",
    "tokenization_own": "from transformers import PreTrainedTokenizerFast\n"
    "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n",
}


def with_code(tiny_target, directory, *, config=True):
    """The tiny target with custom code, which creates a marker file when it is imported."""
    shutil.copytree(tiny_target, directory)
    for name, text in CODE.items():
        note = NOTE.format(marker=str(mark(directory)))
        (directory / f"{name}.py").write_text(note + text)
    if config:
        maps = {"AutoConfig": "configuration_own.OwnConfig"}
        maps["AutoModelForCausalLM"] = "modeling_own.OwnForCausalLM"
        change(directory / "config.json", model_type="fledge_own", auto_map=maps)
    maps = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    change(directory / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=maps)
    return directory


def mark(directory):
    return directory.with_name(f"{directory.name}.imported")


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def places(tiny_target, tmp_path_factory):
    """Models, with caches for rows and modules that only these tests use."""
    place = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        modules = str(place / "modules")
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        patch.setenv("FLEDGE_CACHE", str(place / "fledge"))
        with_code(tiny_target, place / "trusted")
        with_code(tiny_target, place / "strange")
        with_code(tiny_target, place / "tokenizer", config=False)
        yield place


def recipe_overrides(place, model, run_dir, *more):
    return [
        f"target.model={place / model}", "target.aux_layer_ids=0,1,2", "target.dtype=float32",
        f"data.train={place / 'chats.jsonl'}", "data.valid_rows=8", "data.max_length=64",
        "data.workers=1", "packing.tokens=96", "draft.draft_vocab_size=128", "training.steps=2",
        "training.device=cpu", "objective.ttt_steps=2", f"run.output_dir={run_dir}", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(places, tiny_chats):
    """A run on the trusted model; its draft also fits the other models, which share its weights."""
    shutil.copy(tiny_chats, places / "chats.jsonl")
    questions = [{"messages": [{"role": "user", "content": f"count to {i}"}]} for i in range(2)]
    lines = "".join(f"{json.dumps(question)}\n" for question in questions)
    (places / "questions.jsonl").write_text(lines)
    overrides = recipe_overrides(places, "trusted", places / "run", "target.trust_remote_code=true")
    assert verb("train", *overrides) == 0
    assert mark(places / "trusted").exists()
    return places


def flags_of(place, model, out):
    """verb -> its arguments, for every verb that takes a model by name."""
    target, draft = place / model, place / "run" / "best"
    chats, questions = place / "chats.jsonl", place / "questions.jsonl"
    short = ["--max-new-tokens", 8, "--device", "cpu"]
    return {
        "data prepare": [chats, "--model", target, "--max-length", 60, "--workers", 1],
        "data preview": [chats, "--model", target],
        "data stats": [chats, "--model", target, "--max-length", 61, "--workers", 1],
        "eval": [draft, "--target", target, "--prompts", questions, "--live", 1, *short],
        "export": [
            draft, "--engine", "vllm", "--target", target, "--out", out / "export", "--limit", 1,
            "--prompts", questions, *short,
        ],
        "diagnose": [draft, "--target", target, "--prompts", 1, *short],
        "import": [draft, "--target", target, "--out", out / "imported"],
        "chat": [draft, "--target", target, *short],
        "regenerate": [questions, "--out", out / "new.jsonl", "--target", target, *short],
    }  # fmt: skip


def refused(capsys, code):
    """Whether the exit code is 2 and the one-line error says what to set."""
    stderr = capsys.readouterr().err
    [line] = [line for line in stderr.splitlines() if line.startswith("fledge: ")]
    return code == 2 and "--trust-remote-code" in line and "target.trust_remote_code=true" in line


@pytest.mark.parametrize("model", ["strange", "tokenizer"])
def test_no_verb_runs_custom_code_by_default(trained, tmp_path, capsys, monkeypatch, model):
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    overrides = recipe_overrides(trained, model, tmp_path / "run")
    for name, flags in flags_of(trained, model, tmp_path).items():
        assert refused(capsys, verb(*name.split(), *flags)), name
    for name, options in (("train", []), ("plan", []), ("precompute", ["-o", tmp_path / "cache"])):
        assert refused(capsys, verb(name, *overrides, *options)), name
    serve = ["--target", trained / model, "--aux-layer-ids", "0,1,2", "--port", 0]
    assert refused(capsys, verb("serve-target", *serve))
    plain = ["--target-model", trained / model, "--input-data", trained / "chats.jsonl"]
    plain += ["--output-dir", tmp_path / "cache", "--aux-layer-ids", "0,1,2", "--device", "cpu"]
    assert main([str(word) for word in plain]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert not mark(trained / model).exists()
    assert sorted(tmp_path.iterdir()) == []


def test_the_recipe_of_a_run_cannot_give_consent(trained, tmp_path, capsys):
    """The recipe in a run trusts its target; a user who received that run does not."""
    shutil.copytree(trained / "run", tmp_path / "run")
    resolved = tmp_path / "run" / "recipe.yaml"
    text = resolved.read_text()
    assert "trust_remote_code: true" in text
    resolved.write_text(text.replace(str(trained / "trusted"), str(trained / "strange")))
    questions = ["--prompts", trained / "questions.jsonl"]
    for command in (
        ["eval", tmp_path / "run", *questions],
        ["export", tmp_path / "run", "--engine", "vllm"],
        ["export", tmp_path / "run", "--engine", "vllm", "--without-target"],
    ):
        assert refused(capsys, verb(*command)), command
    assert not mark(trained / "strange").exists()


def test_trusted_code_works_from_end_to_end(trained, tmp_path, capsys):
    assert "auto_map" not in (trained / "run" / "best" / "config.json").read_text()
    overrides = recipe_overrides(
        trained, "trusted", tmp_path / "run", "target.trust_remote_code=true"
    )
    assert verb("plan", *overrides) == 0
    assert verb("precompute", *overrides, "-o", tmp_path / "cache") == 0
    verbs = flags_of(trained, "trusted", tmp_path)
    for name in ("data prepare", "data preview", "data stats", "eval", "export", "regenerate"):
        code = verb(*name.split(), *verbs[name], "--trust-remote-code")
        assert code == 0, (name, capsys.readouterr().err)
    assert verb("export", trained / "run", "--engine", "vllm", "--trust-remote-code",
                "--out", tmp_path / "own", "--limit", 1, "--max-new-tokens", 8) == 0  # fmt: skip
    check = json.loads((tmp_path / "own" / "fledge_export.json").read_text())["self_check"]
    assert check["same_rows"] is not None  # the run's recipe was read
    capsys.readouterr()
    assert verb("serve", tmp_path / "export", "--target", "x", "--trust-remote-code") == 0
    assert capsys.readouterr().out.rstrip().endswith("--trust-remote-code")
    section = engine_section(
        "hf", model=str(trained / "trusted"), aux_layer_ids=[0, 1, 2], trust_remote_code=True,
        device="cpu",
    )  # fmt: skip
    server = TargetServer(
        kind_of(section).open(section, device=find_device(None), aux_layers=3),
        model=section.model, engine=section.backend, model_dir=trained / "trusted", token=None,
    )  # fmt: skip
    assert server.info["aux_layer_ids"] == [0, 1, 2]
    assert server.info["tokenizer_fingerprint"]


def test_code_in_a_target_cache_needs_consent_too(trained, tmp_path, capsys):
    """The cache contains the model's code so that training is self-contained."""
    cache, model = tmp_path / "cache", trained / "trusted"
    trusted = recipe_overrides(
        trained, "trusted", tmp_path / "run", "target.trust_remote_code=true"
    )
    assert verb("precompute", *trusted, "-o", cache) == 0
    for path in (cache / "target").glob("*.py"):  # so that its code leaves a different marker
        path.write_text(path.read_text().replace(str(mark(model)), str(mark(cache))))
    overrides = [
        f"target.cached_target_path={cache}", "training.steps=2", "training.device=cpu",
        "data.valid_rows=8", "objective.ttt_steps=2", f"run.output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert refused(capsys, verb("train", *overrides))
    probs = [cache, "-o", tmp_path / "probs", "--encoding", "probs", "--draft-vocab-size", 64]
    assert refused(capsys, verb("cache", "convert", *probs))
    assert not mark(cache).exists()
    assert verb("train", *overrides, "target.trust_remote_code=true") == 0
    assert mark(cache).exists()
    assert verb("cache", "convert", *probs, "--trust-remote-code") == 0


def test_the_library_refuses_custom_code_too(trained):
    chats = [str(trained / "chats.jsonl")]
    with pytest.raises(UntrustedCode):  # before any worker starts, which could not explain
        prepare_rows(chats, trained / "tokenizer", workers=2, rows_per_part=10)
    with pytest.raises(UntrustedCode):
        HFEagle3TargetModel.from_pretrained(trained / "strange", aux_layer_ids=[0, 1, 2])
    with pytest.raises(UntrustedCode):  # not even without its tokenizer
        HFEagle3TargetModel.from_pretrained(trained / "tokenizer", aux_layer_ids=[0, 1, 2])
    assert not mark(Path(trained / "strange")).exists()
