"""Training from a cache is training with the target: same losses, same weights, same resumption."""

import json
import shutil

import numpy as np
import pytest

from fledge.core.errors import BadInput
from fledge.precompute_eagle3 import main
from fledge.recipe.schema import load_recipe
from fledge.training.fit import fit
from fledge.training.setup import set_up
from target.cache.caches import break_row, other_target, words_of
from train.test_fit import comparable, differing, final_weights, stop_after
from train.tiny import Notes, make_target


def cache_recipe(recipe, path, *overrides, run="cached"):
    """The same run from a cache: the target's section is replaced, everything else stays."""
    live = recipe(run=run).model_dump()
    target = {"backend": "cache", "cached_target_path": str(path)}
    sections = [f"{s}={json.dumps(v)}" for s, v in live.items() if s not in ("target", "data")]
    rows = ["data.valid_rows=8", "data.max_length=64"]
    return load_recipe(None, [f"target={json.dumps(target)}", *sections, *rows, *overrides])


def with_section(recipe, override):
    """The recipe with a whole section replaced."""
    section = override.partition("=")[0]
    rest = {name: value for name, value in recipe.model_dump().items() if name != section}
    return load_recipe(None, [*(f"{s}={json.dumps(v)}" for s, v in rest.items()), override])


def losses(directory):
    return [line["loss"] for line in comparable(directory) if "loss" in line]


def train(recipe, notes=None):
    return fit(set_up(recipe), notes or Notes())


# the target sees each conversation alone, as it did in precompute
ALONE = ("packing.padded=true", "training.micro_batch=1", "training.accumulate=2")


PEAGLE = "objective={kind: peagle, num_depths: 3}"


@pytest.mark.parametrize(
    ("encoding", "objective"), [("hidden", "eagle3"), ("hidden", "peagle"), ("probs", "eagle3")]
)
def test_a_float32_cache_trains_bit_for_bit(recipe, caches, tmp_path, encoding, objective):
    """The cache counts its vocabulary on all rows, like a live run without held-out rows."""
    options = [*ALONE, "data.valid_rows=0"]
    live = recipe(*options, f"target.supervision={encoding}", run="live")
    cached = cache_recipe(recipe, caches(encoding), *options)
    if objective == "peagle":
        live, cached = (with_section(r, PEAGLE) for r in (live, cached))
    train(live)
    train(cached)
    assert differing(final_weights(tmp_path / "live"), final_weights(tmp_path / "cached")) == []
    assert comparable(tmp_path / "live") == comparable(tmp_path / "cached")


@pytest.mark.parametrize(
    ("encoding", "dtype", "bound"),
    [("hidden", "fp32", 2e-5), ("hidden", "bf16", 0.02), ("hidden-fp8", "fp32", 0.15)],
)
def test_packed_training_follows_the_live_loss(recipe, caches, tmp_path, encoding, dtype, bound):
    train(recipe(run="live"))
    train(cache_recipe(recipe, caches(encoding, dtype)))
    live, cached = losses(tmp_path / "live"), losses(tmp_path / "cached")
    assert live[-1] < live[0]
    np.testing.assert_allclose(cached, live, rtol=bound)


def test_topk_trains(recipe, caches, tmp_path):
    path = caches("topk", "fp32", "--target-probs-topk", "16")
    notes = Notes()
    assert train(cache_recipe(recipe, path, "training.epochs=6"), notes).finished
    assert notes.lines[-1]["loss"] < notes.lines[0]["loss"]


@pytest.mark.parametrize("steps", [1, 4])
def test_resuming_in_the_middle_of_an_epoch_is_bitwise(
    recipe, caches, monkeypatch, tmp_path, steps
):
    train(cache_recipe(recipe, caches("hidden"), run="whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        assert not train(cache_recipe(recipe, caches("hidden"), run="cut")).finished
    assert train(cache_recipe(recipe, caches("hidden"), run="cut")).finished
    assert differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")) == []


def test_the_target_is_not_needed_at_all(recipe, tiny_chats, tmp_path):
    """Config and tokenizer travel with the cache: the model may be gone, and the data too."""
    target = make_target(tmp_path / "target")
    cache = tmp_path / "cache"
    assert main(words_of(target_model=target, input_data=tiny_chats, output_dir=cache)) == 0
    target.rename(tmp_path / "elsewhere")
    assert train(cache_recipe(recipe, cache)).finished


def test_a_cache_that_does_not_fit_the_recipe_is_refused(recipe, caches, tiny_target, tmp_path):
    hidden = caches("hidden")
    with pytest.raises(BadInput, match=r"made with aux layers \[0, 1, 2\]"):
        set_up(cache_recipe(recipe, hidden, "target.aux_layer_ids=0,1,3"))
    with pytest.raises(BadInput, match=r"packing.tokens \(32\) is below the longest row"):
        set_up(cache_recipe(recipe, hidden, "packing.tokens=32", "data.max_length=32"))
    with pytest.raises(BadInput, match="made for a draft vocabulary of 128"):
        set_up(cache_recipe(recipe, caches("probs"), "draft.draft_vocab_size=64"))
    set_up(cache_recipe(recipe, hidden, f"target.model={tiny_target}"))
    other = other_target(tmp_path / "other")
    with pytest.raises(BadInput, match="different weights or config"):
        set_up(cache_recipe(recipe, hidden, f"target.model={other}"))


def test_a_run_cannot_be_continued_from_another_cache(recipe, caches):
    train(cache_recipe(recipe, caches("hidden")))
    with pytest.raises(BadInput, match="the data is not what this run was started with"):
        train(cache_recipe(recipe, caches("hidden", "bf16")))


def test_a_damaged_row_is_an_error(recipe, caches, tmp_path):
    broken = shutil.copytree(caches("hidden"), tmp_path / "broken")
    break_row(broken, 20)
    with pytest.raises(BadInput, match=r"row 20 \(.*chats.jsonl:21; shard-00001"):
        train(cache_recipe(recipe, broken))
