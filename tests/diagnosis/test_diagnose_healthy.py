"""A healthy draft has no findings, whichever trainer wrote it."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_diagnose_faults import no_decoding

from export.layouts import EAGLE1_LAYOUTS, LAYOUTS, write_as
from fledge.formats.diagnose import diagnose

WEIGHTS = "model.safetensors"
KINDS = ("eagle3", "eagle31", "peagle")


@pytest.mark.parametrize("kind", [*KINDS, "eagle1"])
def test_a_healthy_draft_passes(place, eagle1, look, kind):
    diagnosis = look(place / kind)
    assert diagnosis.healthy, diagnosis.findings
    assert diagnosis.layout == "fledge"
    assert not diagnosis.skipped
    assert diagnosis.repaired is None
    assert diagnosis.score.first > 0.3


def test_rows_that_are_nearly_equal_in_the_target_may_be_confused(place, tmp_path):
    """Tokens that a target never saw have nearly equal rows: training decides which is nearest."""
    target, draft = (shutil.copytree(place / n, tmp_path / n) for n in ("target", "eagle3"))
    table, head = load_file(target / WEIGHTS), load_file(draft / WEIGHTS)
    name = next(name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in table)
    noise = torch.Generator().manual_seed(0)
    unseen = table[name][:1].expand_as(table[name])
    table[name] = unseen + 0.01 * torch.randn(unseen.shape, generator=noise).to(unseen)
    ids = torch.arange(len(head["d2t"])) + head["d2t"]
    trained = 0.02 * torch.randn(head["lm_head.weight"].shape, generator=noise)
    head["lm_head.weight"] = (table[name][ids] + trained).to(head["lm_head.weight"])
    save_file(table, target / WEIGHTS, {"format": "pt"})
    save_file(head, draft / WEIGHTS, {"format": "pt"})
    diagnosis = diagnose(draft, str(target), answering=no_decoding)
    assert "head-map" not in {finding.check for finding in diagnosis.findings}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_healthy_foreign_draft_passes(place, tmp_path, layout, kind):
    """Imports are bit for bit the same (`test_import`), so decoding need not be repeated."""
    written = write_as(layout, place / kind, tmp_path / "draft", place / "target")
    diagnosis = diagnose(written, str(place / "target"), answering=no_decoding)
    assert diagnosis.healthy, diagnosis.findings
    assert diagnosis.layout == layout


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("eagle31", "eagle"), ("eagle31", "speculators"), *(("eagle1", a) for a in EAGLE1_LAYOUTS)],
)
def test_a_healthy_foreign_draft_decodes_like_ours(place, eagle1, look, tmp_path, kind, layout):
    diagnosis = look(write_as(layout, place / kind, tmp_path / "draft", place / "target"))
    assert diagnosis.healthy, diagnosis.findings
    assert diagnosis.layout == layout
    assert not diagnosis.skipped
    assert diagnosis.score.acceptance == look(place / kind).score.acceptance
