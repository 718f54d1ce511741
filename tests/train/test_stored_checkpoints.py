"""Checkpoints that an earlier version wrote still work; maliciously written ones are passed over or
refused, in one line.

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
    best_step,
    matching,
    newest_checkpoint,
    prune,
    read_checkpoint,
)
from fledge.training.fit import fit
from fledge.training.runs import checkpoint_state
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


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1}, {"step": "3"}, {"step": 10**30}, {"best_step": 1.5}, {"seconds": None},
        {"last": []}, {"last": {"tau": "x"}}, {"fingerprints": 3}, {"checksums": []},
        {"best_length": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_with_wrong_types_is_passed_over(run, path, fields):
    rewrite(path, **fields)
    checkpoint, complaints = newest_checkpoint(run)
    assert checkpoint is None
    [line] = complaints
    assert next(iter(fields)) in line
    assert str(path) in line


def test_missing_files_are_refused(path):
    sums = rewrite(path)["checksums"]
    rewrite(path, checksums={**sums, "gone": 0})
    with pytest.raises(BadInput, match="no gone in it"):
        read_checkpoint(path)
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


def test_the_state_file_beside_a_draft_is_checked_too(path):
    # as an older version wrote it
    (path / "state.json").write_text('{"step": 3, "last": {"step": 3}}')
    assert checkpoint_state(path)["step"] == 3
    (path / "state.json").write_text("[" * 9999)
    with pytest.raises(BadInput, match="not JSON"):
        checkpoint_state(path)


def test_links_in_a_run_are_not_followed(run, path, tmp_path):
    (run / "best").symlink_to("checkpoints/step-of-mine")
    assert best_step(run) is None
    other = tmp_path / "important"
    other.mkdir()
    (run / "checkpoints" / "step-00000001").symlink_to(other)
    prune(run, 1)
    assert other.is_dir()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [NAME]
