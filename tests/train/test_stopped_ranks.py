"""A signal to one of several ranks that wait for their target: all of them stop soon, and the same
command continues the run as if nothing had happened."""

import os
import signal
import threading
import time
from concurrent.futures import Future

import pytest

from fledge.core.distributed import leave_world
from fledge.training.fit import fit
from fledge.training.setup import set_up
from ranks import run_ranks
from train.test_fit import comparable, differing, final_weights
from train.tiny import Notes, recipe_for

pytestmark = pytest.mark.ranks

OPTIONS = ("training.micro_batch=1", "training.epochs=1", "evaluation.every_steps=3")


def train(recipe, question=None, hanging=None, stopped=None):
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
    run_ranks(2, train, recipe_for(tiny_target, tiny_chats, directory, *OPTIONS))
    return directory


@pytest.mark.parametrize(
    ("question", "hanging", "stopped"),
    [(2, 0, 0), (2, 1, 0), (5, 0, 1), (10, 1, 0), (10, 0, 0)],
    ids=str,
)  # question 2: evaluation of step 0; 5: a step; 10: evaluation of step 3
def test_a_signal_to_one_rank_stops_all(recipe, whole, tmp_path, question, hanging, stopped):
    cut = recipe(*OPTIONS)
    ended = run_ranks(2, train, cut, question, hanging, stopped, timeout_s=60)
    assert [(finished, number) for finished, number, *_ in ended] == [(False, signal.SIGTERM)] * 2
    assert max(seconds for *_, seconds in ended) < 20
    assert len({step for *_, step, _ in ended}) == 1
    assert all(finished for finished, *_ in run_ranks(2, train, cut))
    assert differing(final_weights(whole), final_weights(tmp_path / "run")) == []
    assert comparable(whole) == comparable(tmp_path / "run")
