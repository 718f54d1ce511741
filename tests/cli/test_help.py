"""Help pages as users see them: complete at 80 columns, with examples that can be copied."""

import re

import pytest
import typer.main
from typer.testing import CliRunner

from fledge.cli.help import examples_of
from fledge.cli.main import app
from fledge.cli.options import OUT


def pages(command=None, path=()):
    """(path, command) of `fledge` and every command below it."""
    command = typer.main.get_command(app) if command is None else command
    yield path, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from pages(sub, (*path, name))


def shown(path) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}, prog_name="fledge")
    assert result.exit_code == 0
    return result.output


PAGES = dict(pages())


@pytest.mark.parametrize("path", PAGES, ids=" ".join)
def test_a_help_page_is_complete_at_80_columns(path):
    page, command = shown(path), PAGES[path]
    examples = examples_of(command.epilog or "")
    assert examples
    for example in examples:  # unbroken
        assert f"\n  {example}\n" in page
    before = re.split(r"\nExamples?:\n", page)[0]
    assert max(map(len, before.splitlines())) <= 80
    assert "…" not in page
    assert "<bool>" not in page
    words = " ".join(page.split())
    for option in command.params:
        for name in (*option.opts, *option.secondary_opts):
            if name.startswith("-"):
                assert name in words
        if getattr(option, "help", None):  # brackets included
            assert " ".join(option.help.split()) in words
    assert "--json" in words or hasattr(command, "commands")


def test_verbs_are_listed_in_workflow_order():
    listed = re.findall(r"^  ([a-z-]+) {2,}[A-Z]", shown(()).partition("Commands:")[2], flags=re.M)
    assert set(listed) == set(typer.main.get_command(app).commands)
    workflow = ["data", "precompute", "plan", "train", "eval", "report", "chat", "export", "serve"]
    assert [verb for verb in listed if verb in workflow] == workflow
    summary = "Check an EAGLE, P-EAGLE or block draft of any trainer against its target."
    assert summary in " ".join(shown(()).split())


def test_output_options_are_spelled_alike():
    """`--out` everywhere, always with the same aliases."""
    for path, command in pages():
        for option in command.params:
            names = {*option.opts}
            if names & set(OUT):
                assert names == set(OUT), path
    for verb in ("precompute", "export", "import", "regenerate", "report", "eval", "demo"):
        assert "-o, --out, --output-dir" in shown((verb,))


@pytest.mark.parametrize("option", ["--seq", "--batch"])
def test_a_number_beyond_all_sizes_is_refused(option):
    result = CliRunner().invoke(app, ["bench", "train", option, "9" * 20])
    assert result.exit_code == 2
    assert f"{'9' * 20} is not a number up to" in result.stderr
