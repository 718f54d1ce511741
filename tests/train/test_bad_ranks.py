"""A bad step of one of several ranks: the message names the rows of that rank."""

import re
from dataclasses import replace

import pytest

from fledge.core.distributed import leave_world
from fledge.core.errors import BadInput
from fledge.training import fit as fit_module
from fledge.training.fit import fit
from fledge.training.setup import set_up
from ranks import run_ranks
from train.tiny import Notes

pytestmark = pytest.mark.ranks

BAD_STEP = 1  # counted from 0


def train(recipe, spoiled, kind):
    """Train; in the bad step, the answers or the losses of the `spoiled` ranks are not finite.
    Returns what is said about it, and this rank's documents in that step."""
    training = set_up(recipe)
    parts, notes, places = training.parts, Notes(), []
    step, answer, score = fit_module.train_step, parts.target.answer, parts.objective.score

    def is_bad(this_kind):
        return kind == this_kind and parts.world.rank in spoiled and bool(places)

    def stepping(parts, batch, **more):
        if batch.step == BAD_STEP:
            places.extend(place for rows in batch.micro for pack in rows.places for place in pack)
        return step(parts, batch, **more)

    def answering(rows):
        batch = answer(rows)
        if is_bad("answer"):
            batch.aux_hidden_states.fill_(float("nan"))
        return batch

    def scoring(*args):
        output = score(*args)
        return replace(output, loss=output.loss * float("nan")) if is_bad("loss") else output

    fit_module.train_step = stepping
    parts.target.answer, parts.objective.score = answering, scoring
    with pytest.raises(BadInput) as caught:
        fit(training, notes)
    leave_world(parts.world)
    return notes.notes, str(caught.value), places


@pytest.mark.parametrize(("spoiled", "kind"), [((1,), "answer"), ((1,), "loss"), ((0, 1), "loss")])
def test_the_rows_of_the_bad_rank_are_named(recipe, spoiled, kind):
    options = ("training.steps=4", "data.valid_rows=0", "training.max_bad_steps=1")
    ends = run_ranks(2, train, recipe(*options), spoiled, kind)
    [(notes, error, _), (other_notes, other_error, rank_1)] = ends
    assert (notes, error) == (other_notes, other_error)
    places = [place for rank in spoiled for place in ends[rank][2]]
    on_rank = " on rank 1" if spoiled == (1,) else ""
    begin = f"its {len(places)} documents{on_rank} begin with {', '.join(places[:3])}"
    assert notes[0].startswith(f"step {BAD_STEP + 1} skipped: gradient norm nan; {begin}")
    if kind == "answer":
        assert re.search(r"row 0 \((.*?)\)", error)[1] == rank_1[0]
    else:
        assert f"documents {', '.join(places[:3])})" in error
