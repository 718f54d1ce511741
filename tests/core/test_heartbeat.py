"""A rank that dies is named, once; one that leaves in order raises no alarm."""

import multiprocessing
import os
import signal
import time
from contextlib import nullcontext

import pytest
from torch.distributed import HashStore

from fledge.core import heartbeat
from fledge.core.heartbeat import Heartbeat, RankLost, ending_together


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.6)
    monkeypatch.setattr(heartbeat, "SUSPECT_S", 0.3)


@pytest.fixture
def three(quick):
    """Three ranks in one process, and the message each of them would end with."""
    store, ended = HashStore(), {}
    ranks = [Heartbeat(store, rank, 3, end=_keep(ended, rank)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    yield ranks, ended
    for rank in ranks:
        rank.stop()


def _keep(ended, rank):
    return lambda message: ended.setdefault(rank, message)


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_silent_rank_is_named_by_all_others(three):
    ranks, ended = three
    ranks[1]._stopped.set()  # its thread ends silently, as if the process had died
    until(lambda: len(ended) == 2)
    assert set(ended) == {0, 2}
    for message in ended.values():
        assert message.startswith(f"rank 1 on {os.uname().nodename} is gone: nothing heard")
    assert ranks[0].speaks()
    assert not ranks[2].speaks()  # one rank per machine prints it


def test_the_reason_of_a_failed_rank_reaches_the_others(three):
    ranks, ended = three
    ranks[2].stop("the disk is full")
    until(lambda: len(ended) == 2)
    assert ended[0].endswith("ended: the disk is full")


def test_ranks_that_leave_in_order_are_not_reported_lost(three):
    ranks, ended = three
    ranks[1].stop()
    ranks[0].stop()
    time.sleep(3 * heartbeat.SILENT_S)
    assert ended == {}
    assert ranks[2].lost(silent_s=heartbeat.SUSPECT_S) is None


class GoneStore:
    """The store of a process that has died."""

    def set(self, *_):
        raise RuntimeError("Connection reset by peer")

    multi_get = set


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_lost_store_ends_the_rank(three, monkeypatch, torchrun):
    """If it was rank 0's, rank 1 is the first that can still say so."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(torchrun))
    ranks, ended = three
    until(lambda: all(len(rank._seen) == 3 for rank in ranks))
    for rank in ranks[1:]:
        rank._store = GoneStore()
    until(lambda: len(ended) >= 2)
    assert "rank 0 or its torchrun is gone" in ended[1]
    assert [rank.speaks() for rank in ranks[1:]] == [not torchrun, False]


def test_a_collective_that_fails_with_the_store_is_one_line(three, monkeypatch):
    ranks, _ = three
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(heartbeat, "_current", ranks[1])
    ranks[1]._store = GoneStore()
    told = "rank 0 or its torchrun is gone"
    with pytest.raises(RankLost, match=told), ending_together(nullcontext):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")


def test_an_error_of_this_rank_is_not_hidden_by_a_lost_store(three, monkeypatch):
    ranks, _ = three
    monkeypatch.setattr(heartbeat, "_current", ranks[1])
    ranks[1]._store = GoneStore()
    with pytest.raises(ValueError, match="a bad row"), ending_together(nullcontext):
        raise ValueError("a bad row")


def test_a_failed_collective_names_the_rank_that_died(three, monkeypatch):
    ranks, _ = three
    monkeypatch.setattr(heartbeat, "_current", ranks[0])
    ranks[2]._stopped.set()
    named = r"rank 2 .* is gone.*; the same command continues the run"
    with pytest.raises(RankLost, match=named), ending_together(nullcontext):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")


def test_an_interrupt_of_one_rank_is_called_that(three, monkeypatch):
    ranks, ended = three
    monkeypatch.setattr(heartbeat, "_current", ranks[0])
    with pytest.raises(KeyboardInterrupt), ending_together(nullcontext):
        raise KeyboardInterrupt
    until(lambda: len(ended) == 2)
    assert ended[1].endswith("ended: interrupted")


def test_a_rank_raises_its_own_error_unchanged(three, monkeypatch):
    ranks, ended = three
    monkeypatch.setattr(heartbeat, "_current", ranks[0])
    with pytest.raises(RuntimeError, match="a bug"), ending_together(nullcontext):
        raise RuntimeError("a bug")
    until(lambda: len(ended) == 2)
    assert ended[1].endswith("ended: a bug")


def _wait_forever(store_path, rank):
    from torch.distributed import FileStore

    heartbeat.BEAT_S, heartbeat.SILENT_S = 0.05, 1.0
    beat = Heartbeat(FileStore(store_path, 2), rank, 2)
    time.sleep(0.5)
    beat.start()
    signal.pause()  # stands for a collective that never ends


def test_a_process_ends_while_its_main_thread_waits(tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = [(str(tmp_path / "store"), rank) for rank in range(2)]
    ranks = [context.Process(target=_wait_forever, args=args) for args in arguments]
    for process in ranks:
        process.start()
    time.sleep(1.0)
    os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[0].join(timeout=20)
    assert ranks[0].exitcode == 2
