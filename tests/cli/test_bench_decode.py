"""`fledge bench decode`: every way of decoding gives the same text, and the figures add up."""

import json

import pytest
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.errors import BadInput
from measure.test_eval import place

__all__ = ["place"]


def bench(place, *options):
    arguments = ["bench", "decode", str(place / "trained"), str(place / "parallel")]
    arguments += ["--target", str(place / "target"), "--prompts", str(place / "asked.jsonl")]
    arguments += ["--max-new-tokens", "24", "--draft-tokens", "3", "--device", "cpu"]
    arguments += ["--aux-layers", "0,1,2", *options]
    return CliRunner().invoke(app, arguments)


def test_every_way_of_decoding_gives_the_target_text(place):
    """Token for token."""
    options = ["--batch", "1", "--batch", "3", "--method", "chain", "--method", "tree"]
    options += ["--method", "parallel"]
    result = bench(place, *options, "--json")
    rows = json.loads(result.stdout)
    names = {row["way"] for row in rows}
    draftless = {"plain", "transformers generate"}
    drafted = {"trained, chain", "trained, tree"}
    drafted |= {f"parallel, {method}" for method in ("parallel", "chain", "tree")}
    assert names == draftless | drafted
    for row in rows:
        assert row["texts"] == row["texts_as_plain"] == 3, row
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        if row["way"] in draftless:
            assert row["tokens_per_round"] == 1
        assert row["way"] != "plain" or row["against_plain"] == 1
    [chain] = {row["tokens_per_round"] for row in rows if row["way"] == "trained, chain"}
    assert chain > 1  # and the same at either batch size


def test_the_table_has_a_row_for_every_way(place):
    shown = bench(place).stdout
    assert "batch 1" in shown
    assert shown.count("3 of 3") == 4  # each draft with its own method


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--method", "chian"], "no strategy is named 'chian'"),
        (["--max-new-tokens", "100000"], "no prompt leaves room for an answer"),
    ],
)
def test_bad_options_are_rejected_before_anything_is_decoded(place, options, complaint):
    error = bench(place, *options).exception
    assert isinstance(error, BadInput)
    assert complaint in str(error)
