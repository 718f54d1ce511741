"""One real run, measured, and one browser shared by all tests of the page."""

import json

import browser as chromium
import pytest
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.tiny import Notes, make_chats, make_target, recipe_for


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The directory of a real run on the tiny target, with measurements."""
    root = tmp_path_factory.mktemp("report")
    target, chats = make_target(root / "target"), make_chats(root / "chats.jsonl")
    fit(set_up(recipe_for(target, chats, root / "run", "training.epochs=4")), Notes())
    rows = [{"prompt": f"count to {n}", "category": f"kind {n % 3}"} for n in range(6)]
    (root / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(root / "cache"))
        measured = root / "run" / "eval.json"
        for command in (
            ["eval", root / "run", "--prompts", root / "asked.jsonl", "--device", "cpu",
             "--samples", 3, "--out", measured],
            ["report", root / "run"],
        ):  # fmt: skip
            result = CliRunner().invoke(app, [*map(str, command)])
            assert result.exit_code == 0, result.output
    assert "report.html" in result.output
    return root / "run"


@pytest.fixture(scope="session")
def page():
    if chromium.find() is None:
        pytest.skip("no Chromium on this machine: `make browser` installs it where apt does")
    with chromium.open_browser() as browser:
        yield browser
