"""A healthy draft has no findings, whichever trainer wrote it."""

import pytest
from test_diagnose_faults import no_decoding

from export.layouts import LAYOUTS, write_as
from fledge.diagnosis.diagnose import diagnose

KINDS = ("eagle3", "eagle31", "peagle")


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_draft_passes(place, answering, kind):
    diagnosis = diagnose(place / kind, str(place / "target"), answering=answering)
    assert diagnosis.healthy, diagnosis.findings
    assert diagnosis.layout == "fledge"
    assert not diagnosis.skipped
    assert diagnosis.repaired is None
    assert diagnosis.score.first > 0.3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_healthy_foreign_draft_passes(place, tmp_path, layout, kind):
    """Imports are bit for bit the same (`test_import`), so decoding need not be repeated."""
    written = write_as(layout, place / kind, tmp_path / "draft", place / "target")
    diagnosis = diagnose(written, str(place / "target"), answering=no_decoding)
    assert diagnosis.healthy, diagnosis.findings
    assert diagnosis.layout == layout


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_a_healthy_foreign_draft_decodes_like_ours(place, answering, tmp_path, layout):
    written = write_as(layout, place / "eagle31", tmp_path / "draft", place / "target")
    diagnosis, original = (
        diagnose(path, str(place / "target"), answering=answering)
        for path in (written, place / "eagle31")
    )
    assert diagnosis.healthy
    assert not diagnosis.skipped
    assert diagnosis.score.acceptance == original.score.acceptance
