"""Rows that stand twice are counted, never stand on both sides of a split, and are named where the
user's own held-out rows or prompts were trained on."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from data.chats import chat, write_jsonl
from fledge.cli import main
from fledge.core.errors import BadInput
from fledge.core.rows import TokenRow
from fledge.data.rows import digests, repeats, split_rows
from fledge.training.fit import fit
from fledge.training.setup import prepare_data, set_up
from train.tiny import Notes, make_chats


class Rows:
    """Rows of (conversation, text): equal texts are equal tokens."""

    def __init__(self, rows):
        self.rows, self.lengths = rows, np.full(len(rows), 3)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        place, text = self.rows[index]
        ids = np.array([1, 2, text], dtype=np.int32)
        return TokenRow(ids, np.ones(3, np.uint8), f"chats:{place:04d}", truncated=False)


@given(st.data())
def test_equal_rows_and_conversations_stand_on_one_side(data):
    count = data.draw(st.integers(1, 60))
    unique, numbers = data.draw(st.booleans()), st.integers(0, 2 * count)
    texts = data.draw(st.lists(numbers, min_size=count, max_size=count, unique=unique))
    places = sorted(data.draw(st.lists(st.integers(0, count), min_size=count, max_size=count)))
    rows, asked = Rows([*zip(places, texts, strict=True)]), data.draw(st.integers(0, 5))
    assert repeats(digests(rows)) == count - len(set(texts))
    try:
        train, held_out = split_rows(rows, asked)
    except BadInput:  # joined, too few conversations are left to hold out as many
        assume(False)
    sides = [[rows.rows[i] for i in view._index] for view in (train, held_out)]
    assert sum(map(len, sides)) == count
    for what in (0, 1):
        assert not {row[what] for row in sides[0]} & {row[what] for row in sides[1]}


@pytest.fixture
def chats(tmp_path):
    """Writes a file of chats: those with these numbers, which may repeat."""

    def write(name, numbers):
        lines = make_chats(tmp_path / "all.jsonl", 200).read_text().splitlines()
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{lines[number]}\n" for number in numbers))
        return path

    return write


@pytest.fixture
def run(capfd):
    """Runs a verb: its exit code, its JSON or text, and stderr in one line."""

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main.run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        result = json.loads(out) if "--json" in arguments else out
        return ended.value.code or 0, result, " ".join(err.split())

    return call


def test_repeated_rows_are_counted_and_shown(run, chats, tiny_target, recipe):
    path = chats("twice", [*range(50), *range(10)])
    for verb in ("prepare", "stats"):
        words = ("data", verb, path, "--model", tiny_target)
        assert run(*words, "--json")[1]["repeated"] == 10
        shown = run(*words)[1]
        assert ("(10 repeated)" if verb == "prepare" else "repeated rows") in shown
    training = recipe(f"data.train={path}", "data.valid_rows=5")
    train, held_out, _ = prepare_data(training)
    ids = [{tuple(row.input_ids) for row in view} for view in (train, held_out)]
    assert (len(ids[1]), len(ids[0] & ids[1])) == (5, 0)
    assert set_up(training).warnings == []
    with pytest.raises(BadInput, match="50 rows are to be held out, and there are 50"):
        prepare_data(recipe(f"data.train={path}", "data.valid_rows=50"))


@pytest.mark.parametrize(
    ("valid", "line"),
    [
        (range(100, 150), ""),
        (range(199, 99, -1), "1 held-out row of 100 (1.0%)"),
        (range(98, 120), "2 held-out rows of 22 (9.1%)"),
    ],
)
def test_held_out_rows_that_are_trained_on_are_named(chats, recipe, valid, line):
    numbers = [*range(100), 150] if 150 in valid else range(100)
    names = [f"data.train={chats('train', numbers)}", f"data.valid={chats('valid', valid)}"]
    expected = [f"{line} also among the training rows"] * bool(line)
    warnings = set_up(recipe(*names)).warnings
    assert [text.partition(":")[0] for text in warnings] == expected


def test_eval_names_prompts_that_were_trained_on(run, recipe, chats, tmp_path):
    training = recipe(f"data.train={chats('train', range(100))}", "training.steps=2")
    with (trained := set_up(training)).parts.target:
        assert fit(trained, Notes()).finished
        train = {row.place.rpartition(":")[2] for row in trained.rows}
    asked = write_jsonl(tmp_path / "asked.jsonl", [chat(f"count to {i}") for i in range(90, 110)])
    known = len({str(i + 1) for i in range(90, 100)} & train)
    assert 5 <= known <= 10
    command = ["eval", Path(training.run.output_dir), "--prompts", asked, "--max-new-tokens", 4]
    code, measured, err = run(*command, "--live", 1, "--device", "cpu", "--json")
    assert code == 0
    assert measured["drafts"][0]["prompts_trained_on"] == known
    assert f"was trained on {known} prompts of 20 ({known / 20:.1%})" in err
    (Path(training.run.output_dir) / "prompts.safetensors").unlink()  # an older run
    code, measured, err = run(*command, "--live", 1, "--device", "cpu", "--json")
    assert (code, measured["drafts"][0]["prompts_trained_on"]) == (0, None)
    assert "trained on" not in err
