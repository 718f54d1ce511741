"""Small data sets: most rows are trained on, and existing runs keep their split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.test_repeated_rows import Rows
from fledge.cli.train import check_existing
from fledge.core.errors import BadInput
from fledge.data.rows import KnownRows, split_rows
from fledge.recipe.schema import load_recipe
from fledge.target.cache.job import CacheOptions
from fledge.training.fit import fit
from fledge.training.precompute import recipe_job
from fledge.training.setup import prepare_data, set_up
from train.tiny import Notes, make_chats, recipe_for


def distinct(count):
    return Rows([(i, i) for i in range(count)])


@given(st.integers(0, 12_000))
def test_by_default_at_most_a_tenth_is_held_out(count):
    train, held_out = split_rows(distinct(count), None)
    assert len(held_out) == min(512, count // 10)
    assert len(train) + len(held_out) == count


@given(st.integers(1, 300), st.integers(0, 400))
def test_the_requested_rows_are_held_out_or_refused(count, requested):
    left = count - requested
    known = KnownRows(distinct(count), 0, "")
    if requested and left < max(1, count // 10):
        line = (
            rf"data\.valid_rows: {requested} rows? (is|are) to be held out, "
            rf"and there are {count}: "
        )
        for split in (lambda: split_rows(distinct(count), requested),
                      lambda: known.split(requested, drop_truncated=False)):  # fmt: skip
            with pytest.raises(BadInput, match=line + rf"{max(0, left)} would be left"):
                split()
    else:
        assert [len(part) for part in split_rows(distinct(count), requested)] == [left, requested]


@pytest.fixture
def little(tiny_target, tmp_path):
    """Makes recipes for `count` chats that do not set how many rows to hold out."""

    def make(count, *overrides, run="run"):
        chats = tmp_path / f"chats-{count}.jsonl"
        chats = chats if chats.exists() else make_chats(chats, count)
        path = tmp_path / "sparse.yaml"
        lines = recipe_for(tiny_target, chats, tmp_path / run).to_yaml().splitlines()
        path.write_text("\n".join(line for line in lines if "valid_rows" not in line))
        return load_recipe(path, overrides)

    return make


def counts(recipe):
    return tuple(len(part) for part in prepare_data(recipe)[:2])


def test_most_of_160_rows_are_trained_on(little):
    recipe = little(160)
    assert recipe.data.valid_rows is None
    assert counts(recipe) == (144, 16)
    assert load_recipe(None, ["data.valid_rows=null"]).data.valid_rows is None
    with pytest.raises(BadInput, match="512 rows are to be held out, and there are 160: 0 would"):
        prepare_data(little(160, "data.valid_rows=512"))
    assert counts(little(160, "data.valid_rows=100")) == (60, 100)  # explicitly requested


def test_a_run_of_this_version_keeps_its_split(little, tmp_path):
    fit(set_up(little(60, "training.steps=2")), Notes())
    resolved = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert resolved.data.valid_rows is None
    check_existing(resolved)
    check_existing(little(60, "training.steps=2"))
    assert counts(resolved) == (54, 6)
    with pytest.raises(BadInput, match=r"data\.valid_rows: None -> 512"):
        check_existing(little(60, "training.steps=2", "data.valid_rows=512"))


def test_a_cache_is_split_the_same_way(little, tmp_path):
    from fledge.cli import main

    for encoding in ("hidden", "probs"):
        recipe, cache = tmp_path / "sparse.yaml", tmp_path / encoding
        live = little(40)
        words = ["precompute", str(recipe), "-o", str(cache), "--encoding", encoding]
        with pytest.raises(SystemExit) as exit_info:
            main.run(words)
        assert not exit_info.value.code
        cached = [
            "target.backend=cache",
            "target.model=null",
            f"target.cached_target_path={cache}",
        ]
        run = set_up(load_recipe(recipe, cached))
        assert [len(run.stream.rows), sum(len(p) for b in run.held_out for p in b.places)] == [
            36,
            4,
        ]
        assert run.vocabulary.digest() == set_up(live).vocabulary.digest()
        with pytest.raises(BadInput, match="39 rows are to be held out, and there are 40: 1 would"):
            set_up(load_recipe(recipe, [*cached, "data.valid_rows=39"]))
    with pytest.raises(BadInput, match="39 rows are to be held out"):
        recipe_job(little(40, "data.valid_rows=39"), tmp_path / "x", CacheOptions("probs"))
