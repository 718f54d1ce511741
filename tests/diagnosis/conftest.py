"""The drafts of the export tests, and drafts of the other kinds for the same target."""

import pytest

from export.conftest import answering, place

__all__ = ["answering", "blocks", "eagle1", "look", "made", "place"]


@pytest.fixture(scope="session")
def made(place):
    """A function: kind -> the directory of a fitted draft in our layout, made on first use."""
    from block_drafts import make_block

    from export.drafts import make_eagle1

    def directory(kind):
        path, target = place / kind, place / "target"
        if not path.exists():
            draft = make_eagle1(target) if kind == "eagle1" else make_block(target, kind)
            draft.save_pretrained(path)
        return path

    return directory


@pytest.fixture(scope="session")
def eagle1(made):
    return made("eagle1")


@pytest.fixture(scope="session")
def blocks(made):
    return {kind: made(kind) for kind in ("dflash", "dspark")}


@pytest.fixture
def look(place, answering):
    """A function that diagnoses a draft of the target that all fixtures share."""
    from fledge.formats.diagnose import diagnose

    target = str(place / "target")
    return lambda path, **options: diagnose(path, target, answering=answering, **options)
