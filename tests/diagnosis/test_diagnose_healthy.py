"""Nothing is wrong with a healthy draft, whoever wrote it down."""

import pytest
from test_diagnose_faults import no_decoding

from export.layouts import LAYOUTS, write_as
from fledge.diagnosis.diagnose import diagnose

KINDS = ("eagle3", "eagle31", "peagle")


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_draft_of_ours_passes(place, answering, kind):
    found = diagnose(place / kind, str(place / "target"), answering=answering)
    assert found.healthy, found.findings
    assert found.layout == "fledge"
    assert not found.skipped
    assert found.repaired is None
    assert found.score.first > 0.3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_healthy_draft_of_others_passes(place, tmp_path, layout, kind):
    """Their numbers are ours, bit for bit (`test_import`): decoding need not be repeated."""
    written = write_as(layout, place / kind, tmp_path / "draft", place / "target")
    found = diagnose(written, str(place / "target"), answering=no_decoding)
    assert found.healthy, found.findings
    assert found.layout == layout


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_a_healthy_draft_of_others_decodes_as_ours(place, answering, tmp_path, layout):
    written = write_as(layout, place / "eagle31", tmp_path / "draft", place / "target")
    found, own = (
        diagnose(path, str(place / "target"), answering=answering)
        for path in (written, place / "eagle31")
    )
    assert found.healthy
    assert not found.skipped
    assert found.score.acceptance == own.score.acceptance
