"""Caches, checkpoints and drafts that an earlier version wrote still work.

`written_before/` was made by version 0.1.0 on a CPU: a cache of 16 short chats, an EAGLE-3 and a
P-EAGLE run of six steps on it, stopped after the third step, and the weights they ended with.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fledge.methods.registry import load_draft
from fledge.recipe.schema import load_recipe
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.tiny import Notes

BEFORE = Path(__file__).parent / "written_before"


@pytest.fixture
def place(tmp_path, monkeypatch):
    shutil.copytree(BEFORE, tmp_path / "before")
    monkeypatch.chdir(tmp_path / "before")  # its recipes name the cache beside them
    return tmp_path / "before"


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_run_of_an_earlier_version_resumes(place, kind):
    checkpoint = place / kind / "checkpoints" / "step-00000003"
    draft = load_draft(checkpoint)
    assert set(draft.state_dict()) == set(load_file(checkpoint / "model.safetensors"))
    outcome = fit(set_up(load_recipe(place / kind / "recipe.yaml")), Notes())
    assert outcome.finished
    final = load_file(place / kind / "checkpoints" / "step-00000006" / "model.safetensors")
    expected = load_file(place / f"{kind}-finished.safetensors")
    # not bit for bit: other CPUs round differently
    torch.testing.assert_close(final, expected, rtol=1e-5, atol=1e-6)
