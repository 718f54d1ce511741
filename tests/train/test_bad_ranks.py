"""Several ranks: a bad step names the rows of its rank, and a signal to one rank stops all."""

import os
import re
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from fledge.core.distributed import leave_world
from fledge.core.errors import BadInput
from fledge.training import fit as fit_module
from fledge.training.fit import fit
from fledge.training.setup import set_up
from ranks import run_ranks
from train.test_fit import comparable, differing, final_weights
from train.tiny import Notes, recipe_for

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


@pytest.mark.parametrize(("spoiled", "kind"), [((1,), "answer"), ((0, 1), "loss")])
def test_the_rows_of_the_bad_rank_are_named(recipe, spoiled, kind):
    options = ("training.steps=4", "data.valid_rows=0", "training.max_bad_steps=1")
    ends = run_ranks(2, train, recipe(*options), spoiled, kind)
    [(notes, error, _), (other_notes, other_error, rank_1)] = ends
    assert (notes, error) == (other_notes, other_error)
    places = [place for rank in spoiled for place in ends[rank][2]]
    begin = f"{len(places)} documents: {', '.join(places[:3])}"
    assert notes[0].startswith(f"step {BAD_STEP + 1} skipped: gradient norm nan; {begin}")
    if kind == "answer":
        assert re.search(r"row 0 \((.*?)\)", error)[1] == rank_1[0]
    else:
        assert begin in error


# --- a signal to one of several ranks ------------------------------------------------------------


OPTIONS = ("training.micro_batch=1", "training.epochs=1", "evaluation.every_steps=3")


def train_asking_ahead(recipe, question=None, hanging=None, stopped=None):
    """Train with a target that is asked ahead. From the numbered question on, it does not answer
    rank `hanging`; rank `stopped` gets a signal a moment later."""
    training = set_up(recipe)
    target, world, asked = training.parts.target, training.parts.world, []
    answer_async = target.answer_async

    def answer(rows):
        asked.append(rows)
        if len(asked) == question and world.rank == stopped:
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if question is not None and len(asked) >= question and world.rank == hanging:
            return Future()
        return answer_async(rows)

    target.answer_async, target.supports_async = answer, True
    begin = time.monotonic()
    outcome = fit(training, Notes())
    leave_world(world)
    return outcome.finished, outcome.signal, outcome.state.step, time.monotonic() - begin


@pytest.fixture(scope="module")
def whole(tiny_target, tiny_chats, tmp_path_factory):
    """A run that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(2, train_asking_ahead, recipe_for(tiny_target, tiny_chats, directory, *OPTIONS))
    return directory


@pytest.mark.parametrize(
    ("question", "hanging", "stopped"),
    [(2, 0, 0), (2, 1, 0), (5, 0, 1), (10, 1, 0), (10, 0, 0)],
    ids=str,
)  # question 2: evaluation of step 0; 5: a step; 10: evaluation of step 3
def test_a_signal_to_one_rank_stops_all(recipe, whole, tmp_path, question, hanging, stopped):
    cut = recipe(*OPTIONS)
    ended = run_ranks(2, train_asking_ahead, cut, question, hanging, stopped, timeout_s=60)
    assert [(finished, number) for finished, number, *_ in ended] == [(False, signal.SIGTERM)] * 2
    assert max(seconds for *_, seconds in ended) < 20
    assert len({step for *_, step, _ in ended}) == 1
    assert all(finished for finished, *_ in run_ranks(2, train_asking_ahead, cut))
    assert differing(final_weights(whole), final_weights(tmp_path / "run")) == []
    assert comparable(whole) == comparable(tmp_path / "run")
