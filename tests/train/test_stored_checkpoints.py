"""Checkpoints that an earlier version wrote still work; damaged ones are passed over or refused,
in one line.

`written_before/` was made by version 0.1.0 on a CPU: a cache of 16 short chats, an EAGLE-3 and a
P-EAGLE run of six steps on it, stopped after the third step, and the weights they ended with.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.core.errors import BadInput
from fledge.data.tokenise import checksum
from fledge.methods.registry import load_draft
from fledge.recipe.schema import load_recipe
from fledge.training.checkpoint import (
    matching,
    newest_checkpoint,
    read_checkpoint,
)
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.tiny import Notes

BEFORE = Path(__file__).parent / "written_before"
NAME = "step-00000003"


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_run_of_an_earlier_version_resumes(tmp_path, monkeypatch, kind):
    place = shutil.copytree(BEFORE, tmp_path / "before")
    monkeypatch.chdir(place)  # its recipes name the cache beside them
    checkpoint = place / kind / "checkpoints" / NAME
    draft = load_draft(checkpoint)
    assert set(draft.state_dict()) == set(load_file(checkpoint / "model.safetensors"))
    outcome = fit(set_up(load_recipe(place / kind / "recipe.yaml")), Notes())
    assert outcome.finished
    final = load_file(place / kind / "checkpoints" / "step-00000006" / "model.safetensors")
    expected = load_file(place / f"{kind}-finished.safetensors")
    # not bit for bit: other CPUs round differently
    torch.testing.assert_close(final, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(BEFORE / "eagle3", tmp_path / "run")


@pytest.fixture
def path(run):
    return run / "checkpoints" / NAME


def rewrite(path, **fields):
    state = json.loads((path / "state.json").read_bytes())
    (path / "state.json").write_text(json.dumps({**state, **fields}))
    return state


def test_an_incomplete_checkpoint_is_passed_over(run, path):
    sums = rewrite(path)["checksums"]
    rewrite(path, checksums={**sums, "model.safetensors": 1})
    checkpoint, [line] = newest_checkpoint(run)
    assert checkpoint is None
    assert "damaged: model.safetensors" in line
    rewrite(path, checksums={})
    with pytest.raises(BadInput, match=r"no config\.json"):
        read_checkpoint(path)
    rewrite(path, checksums=sums)
    assert read_checkpoint(path).step == 3


def test_tensors_that_do_not_match_the_trainer_are_refused(path):
    file = path / "training.safetensors"
    whole = load_file(file)
    want = {"norms": whole["guard.norms"]}
    assert matching(whole, want, prefix="guard.").keys() == want.keys()
    for other in (torch.zeros(3), torch.zeros(64).double(), None):
        tensors = {key: value for key, value in whole.items() if key != "guard.norms"}
        tensors |= {} if other is None else {"guard.norms": other}
        save_file(tensors, file)
        sums = json.loads((path / "state.json").read_bytes())["checksums"]
        rewrite(path, checksums={**sums, file.name: checksum(file)})
        with pytest.raises(BadInput, match=r"guard\.norms is"):
            matching(read_checkpoint(path).tensors(), want, prefix="guard.")
