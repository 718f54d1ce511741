"""Claims: every piece of work is somebody's, and nobody's for long when its process is gone."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from fledge.core import claims as claims_module
from fledge.core.claims import Claims

QUICK = {"beat_s": 0.05, "stale_s": 0.6}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(claims_module, "POLL_S", 0.02)


def test_many_share_the_work_and_every_piece_is_done_once(tmp_path):
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
        assert all(pool.map(work, range(6)))  # nobody leaves before everything is there
    assert sorted(done) == names
    assert not (tmp_path / "claims").exists()


def test_one_look_takes_what_is_free_and_leaves_the_rest_to_others(tmp_path):
    done = {"a"}
    with Claims(tmp_path / "claims") as one, Claims(tmp_path / "claims") as other:
        left = dict.fromkeys("abcd")
        assert other.take("c")
        mine = one.free(left, done.__contains__)
        assert next(mine) == "b"
        assert not other.take("b")
        done |= {"b", "d"}
        assert list(mine) == []  # without waiting for c
        assert list(left) == ["c"]
        assert other.take("b")  # it was given back when it was done
        other.release("c")
        assert list(one.free(left, done.__contains__)) == ["c"]
        assert left == {}


def test_a_claim_that_is_not_touched_is_taken_over_by_one(tmp_path):
    with Claims(tmp_path, **QUICK) as dead, Claims(tmp_path, **QUICK) as a, Claims(tmp_path) as b:
        assert dead.take("x")
        time.sleep(2 * QUICK["stale_s"])
        assert not a.take("x")  # it is alive, and touches its claim
        dead._stopped.set()
        dead._thread.join()
        time.sleep(1.5 * QUICK["stale_s"])
        assert not b.take("x")  # more patient
        assert a.take("x")
        assert not a.take("x")
        dead.release("x")  # it was only asleep: the claim of the new owner stays
        assert sorted(path.name for path in tmp_path.glob("x.*")) == ["x.1"]
        a.release("x")
        assert b.take("x")


def _claim_and_wait(directory, ready):
    with Claims(directory) as claims:
        claims.take("x")
        ready.set()
        time.sleep(60)


def test_the_dead_of_this_machine_are_known_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_claim_and_wait, args=(tmp_path, ready))
    process.start()
    assert ready.wait(20)
    with Claims(tmp_path) as claims:
        assert claims.has_company()
        assert not claims.take("x")
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert not claims.has_company()
        assert claims.take("x")
    assert not tmp_path.exists()  # what the dead left is gone, too


def test_another_machine_is_given_its_time(tmp_path):
    with Claims(tmp_path, **QUICK) as claims:
        claim = tmp_path / "x.0"
        claim.write_text("1 another-boot pid:[1]")
        assert not claims.take("x")
        os.utime(claim, (time.time() - 3600,) * 2)
        assert claims.take("x")


def test_one_after_the_other(tmp_path):
    inside, most = [], []

    def enter(_):
        with Claims(tmp_path / "claims") as claims, claims.alone("manifest"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(8)))
    assert most == [1] * 8


def test_a_claim_that_changes_hands_while_it_is_looked_at(tmp_path, monkeypatch):
    """Given back by the first and taken by the third between the second's two looks."""
    with Claims(tmp_path / "c") as first, Claims(tmp_path / "c") as second:
        with Claims(tmp_path / "c") as third:
            assert first.take("piece")
            real = second._is_stale

            def look(path):
                monkeypatch.setattr(second, "_is_stale", real)
                first.release("piece")
                gone = real(path)
                assert third.take("piece")
                return gone

            monkeypatch.setattr(second, "_is_stale", look)
            assert not second.take("piece")
            assert [path.name for path in (tmp_path / "c").glob("piece.*")] == ["piece.0"]
            third.release("piece")
        assert second.take("piece")


def test_whoever_is_killed_while_it_enters_is_not_in_the_way(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            Claims(tmp_path / "claims").__enter__()
    assert not list((tmp_path / "claims").iterdir())
    with Claims(tmp_path / "claims") as claims:
        assert not claims.has_company()
    assert not list(tmp_path.iterdir())


def test_whoever_leaves_last_removes_what_the_killed_left(tmp_path):
    left = tmp_path / "target" / ".config.json.x.tmp"
    left.parent.mkdir()
    with Claims(tmp_path / "claims") as first:
        left.touch()
        with Claims(tmp_path / "claims") as second:
            second.remove_temporary_files()
        assert left.exists()  # it may be the first one's, who is still at work
        (tmp_path / "kept").touch()
        first.take("x")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["kept"]
    left.touch()
    with Claims(tmp_path / "claims") as alone:
        alone.remove_temporary_files()
        assert not left.exists()
