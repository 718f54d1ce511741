"""The drafts of the export tests, and an EAGLE-1 draft."""

import pytest

from export.conftest import answering, place

__all__ = ["answering", "eagle1", "place"]


@pytest.fixture(scope="session")
def eagle1(place):
    """An EAGLE-1 draft of the same target, stored next to the others."""
    from export.drafts import make_eagle1

    make_eagle1(place / "target").save_pretrained(place / "eagle1")
    return place / "eagle1"


@pytest.fixture
def look(place, answering):
    """A function that diagnoses a draft of the target that all fixtures share."""
    from fledge.formats.diagnose import diagnose

    target = str(place / "target")
    return lambda path, **options: diagnose(path, target, answering=answering, **options)
