"""`torchrun -m fledge train`: real processes, started by torch's own launcher."""

import json
import os
import subprocess
import sys

import pytest

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
    assert 1 <= len(lines) <= 2  # torchrun may stop the other rank first
    assert lines[0].endswith("unknown key 'training.max_steps'; did you mean 'training.steps'?")
    assert "fledge/cli" not in done.stderr  # no traceback of fledge
    assert "exitcode  : 2" in done.stderr.partition("Root Cause")[2]
    assert done.stdout == ""
