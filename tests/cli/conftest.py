"""Verbs as a user runs them, in this process, and one finished run for those that need a draft."""

from typing import NamedTuple

import pytest

from fledge.cli import main


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def fledge(capfd):
    """Runs a verb: its exit code and its output."""

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            main.run([str(word) for word in words])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Ended(ended.value.code or 0, out, err)

    return call


@pytest.fixture(scope="session")
def trained(tiny_target, tiny_chats, tmp_path_factory):
    """The directory of a run of depth 3 on the tiny target."""
    from fledge.training.fit import fit
    from fledge.training.setup import set_up
    from train.tiny import Notes, recipe_for

    run = tmp_path_factory.mktemp("trained") / "run"
    fit(set_up(recipe_for(tiny_target, tiny_chats, run, "training.epochs=4")), Notes())
    return run
