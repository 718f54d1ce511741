"""`fledge bench decode`: every way of decoding gives the same text, and the figures add up."""

import json

import pytest
from typer.testing import CliRunner

from decode.tiny_decode import make_target
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
    """Token for token: with drafts, with an assistant model and with prompt lookup."""
    options = ["--batch", "1", "--batch", "3", "--method", "chain", "--method", "tree"]
    options += ["--method", "parallel"]
    result = bench(place, *options, "--assistant", str(place / "target"), "--json")
    rows = json.loads(result.stdout)
    names = {row["way"] for row in rows}
    draftless = {"plain", "transformers generate"}
    drafted = {"trained, chain", "trained, tree"}
    drafted |= {f"parallel, {method}" for method in ("parallel", "chain", "tree")}
    one_by_one = {"transformers prompt lookup", "transformers assisted"}
    assert names == draftless | drafted | one_by_one
    assert {row["way"] for row in rows if row["batch"] == 3}.isdisjoint(one_by_one)
    for row in rows:
        assert row["texts"] == row["texts_as_plain"] == 3, row
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        if row["way"] in draftless:
            assert row["tokens_per_round"] == 1
        assert row["way"] != "plain" or row["against_plain"] == 1
    best = max(rows, key=lambda row: row["tokens_per_round"])
    assert best["way"] == "transformers assisted"  # the target itself is a perfect assistant
    [chain] = {row["tokens_per_round"] for row in rows if row["way"] == "trained, chain"}
    assert chain > 1  # and the same at either batch size


def test_the_table_has_a_row_for_every_way(place):
    shown = bench(place).stdout
    assert "batch 1" in shown
    assert shown.count("3 of 3") == 5  # each draft with its own method


def test_an_assistant_with_another_vocabulary_is_refused(place, tmp_path):
    make_target(vocab=40).save_pretrained(tmp_path / "other")
    error = bench(place, "--assistant", str(tmp_path / "other")).exception
    assert isinstance(error, BadInput)
    assert "it has 40 tokens, the target 261" in str(error)


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
