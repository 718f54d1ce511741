"""`torchrun -m fledge train`: real processes, started by torch's own launcher."""

import json
import os
import subprocess
import sys

import pytest

from fledge.cli.main import run
from train.tiny import make_chats, make_target, recipe_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    root = tmp_path_factory.mktemp("torchrun")
    target, chats = make_target(root / "target"), make_chats(root / "chats.jsonl")
    (root / "recipe.yaml").write_text(recipe_for(target, chats, root / "run").to_yaml())
    return root / "recipe.yaml"


def torchrun(*arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "fledge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)


def test_two_processes_train_one_draft(recipe_file):
    done = torchrun("train", recipe_file, "training.steps=2", "training.device=cpu", "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)  # only one rank prints
    assert outcome["finished"]
    assert outcome["step"] == 2
    assert (recipe_file.parent / "run" / "best" / "model.safetensors").is_file()


def test_a_bad_key_is_one_line(recipe_file):
    done = torchrun("train", recipe_file, "training.max_steps=2")
    lines = [line for line in done.stderr.splitlines() if line.startswith("fledge: ")]
    assert len(lines) == 1
    assert lines[0].endswith("unknown key 'training.max_steps'; did you mean 'training.steps'?")
    assert "fledge/cli" not in done.stderr  # no traceback of fledge
    cause = done.stderr.partition("Root Cause")[2]  # torchrun's report has the reason
    assert "exitcode  : 2" in cause
    assert "did you mean 'training.steps'?" in cause
    assert done.stdout == ""


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_every_rank_records_its_error_and_one_prints_it(monkeypatch, capsys, tmp_path, rank, lines):
    waited = []
    monkeypatch.setattr("fledge.cli.main._wait_for_first_rank", lambda: waited.append(rank))
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    with pytest.raises(SystemExit) as ended:
        run(["train", "training.lrr=1"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == lines
    assert len(waited) == 1 - lines
    recorded = json.loads((tmp_path / "0" / "error.json").read_text())["message"]
    assert "did you mean 'lr'?" in recorded["message"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "file" / "error.json"))
    with pytest.raises(SystemExit):
        run(["train", "training.lrr=1"])
    assert len(capsys.readouterr().err.splitlines()) == 1  # no other rank will print it


def test_a_rank_stopped_while_it_waits_keeps_its_exit_code(tmp_path):
    """torchrun stops all ranks when one fails, and may report any of them as the root cause."""
    script = """
import os, signal, threading
from fledge.cli.main import run
wait = threading.Event.wait
threading.Event.wait = lambda *a, **k: (os.kill(os.getpid(), signal.SIGTERM), wait(*a, **k))
run(["train", "training.lrr=1"])
"""
    environment = {"LOCAL_RANK": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert "training.lr" in (tmp_path / "error.json").read_text()
