"""Claims: each piece of work has one owner, and is freed soon after its owner's process dies."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fledge.core import claims as claims_module
from fledge.core.claims import Claims

QUICK = {"beat_s": 0.05, "stale_s": 0.6}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(claims_module, "POLL_S", 0.02)


def test_workers_share_the_work_and_every_piece_is_done_once(tmp_path):
    names, done, lock = [f"{i:05d}" for i in range(60)], [], threading.Lock()

    def is_done(name):
        return (tmp_path / name).exists()

    def work(_):
        with Claims(tmp_path / "claims") as claims:
            for name in claims.share(names, is_done):
                time.sleep(0.002)
                with lock:
                    done.append(name)
                (tmp_path / name).touch()
            return all(map(is_done, names))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))  # no worker returns before all pieces are done
    assert sorted(done) == names
    assert not (tmp_path / "claims").exists()


def test_one_pass_takes_free_pieces_and_skips_claimed_ones(tmp_path):
    done = {"a"}
    with Claims(tmp_path / "claims") as claims, Claims(tmp_path / "claims") as other:
        left = dict.fromkeys("abcd")
        assert other.take("c")
        free_pieces = claims.free(left, done.__contains__)
        assert next(free_pieces) == "b"
        assert not other.take("b")
        done |= {"b", "d"}
        assert list(free_pieces) == []  # without waiting for c
        assert list(left) == ["c"]
        assert other.take("b")  # it was released once it was done
        other.release("c")
        assert list(claims.free(left, done.__contains__)) == ["c"]
        assert left == {}


def test_a_stale_claim_is_taken_over_by_exactly_one_process(tmp_path):
    with Claims(tmp_path, **QUICK) as dead, Claims(tmp_path, **QUICK) as a, Claims(tmp_path) as b:
        assert dead.take("x")
        time.sleep(2 * QUICK["stale_s"])
        assert not a.take("x")  # its owner is alive and keeps refreshing the claim
        dead._stopped.set()
        dead._thread.join()
        time.sleep(1.5 * QUICK["stale_s"])
        assert not b.take("x")  # has a longer stale time
        assert a.take("x")
        assert not a.take("x")
        dead.release("x")  # it was only stalled: the new owner keeps its claim
        assert sorted(path.name for path in tmp_path.glob("x.*")) == ["x.1"]
        a.release("x")
        assert b.take("x")


def _claim_and_wait(directory, ready):
    with Claims(directory) as claims:
        claims.take("x")
        ready.set()
        time.sleep(60)


def test_a_dead_process_on_this_machine_is_detected_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_claim_and_wait, args=(tmp_path, ready))
    process.start()
    assert ready.wait(20)
    with Claims(tmp_path) as claims:
        assert not claims.take("x")
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert claims.take("x")
    assert not tmp_path.exists()  # the dead process's files are removed, too


def test_a_claim_of_another_machine_holds_until_it_is_stale(tmp_path):
    with Claims(tmp_path, **QUICK) as claims:
        claim = tmp_path / "x.0"
        claim.write_text("1 another-boot pid:[1]")
        assert not claims.take("x")
        os.utime(claim, (time.time() - 3600,) * 2)
        assert claims.take("x")


def test_alone_admits_one_process_at_a_time(tmp_path):
    inside, counts = [], []

    def enter(_):
        with Claims(tmp_path / "claims") as claims, claims.alone("manifest"):
            inside.append(1)
            counts.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(8)))
    assert counts == [1] * 8


def test_a_claim_that_changes_hands_while_it_is_checked(tmp_path, monkeypatch):
    """The first releases it and the third takes it between two checks by the second."""
    with Claims(tmp_path / "c") as first, Claims(tmp_path / "c") as second:
        with Claims(tmp_path / "c") as third:
            assert first.take("piece")
            real = second._is_stale

            def check(path):
                monkeypatch.setattr(second, "_is_stale", real)
                first.release("piece")
                stale = real(path)
                assert third.take("piece")
                return stale

            monkeypatch.setattr(second, "_is_stale", check)
            assert not second.take("piece")
            assert [path.name for path in (tmp_path / "c").glob("piece.*")] == ["piece.0"]
            third.release("piece")
        assert second.take("piece")


def test_the_last_process_to_leave_removes_leftovers_of_killed_ones(tmp_path):
    leftover = tmp_path / "target" / ".config.json.x.tmp"
    leftover.parent.mkdir()
    with Claims(tmp_path / "claims") as first:
        leftover.touch()
        with Claims(tmp_path / "claims"):
            pass
        assert leftover.exists()  # it may belong to the first, which is still working
        (tmp_path / "kept").touch()
        first.take("x")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["kept"]
