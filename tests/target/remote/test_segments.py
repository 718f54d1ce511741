"""Shared memory: reused once it is free, removed after kills; nothing else can be written to."""

import errno
import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from fledge.target.remote import segment as remote_segment
from fledge.target.remote.segment import Segments, available, remove_leftovers, write_segment
from fledge.target.remote.wire import Message, unpack

pytestmark = pytest.mark.skipif(not available(), reason="no /dev/shm here")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_segment, "DIRECTORY", tmp_path)
    return tmp_path


def message(value=1.0, count=1000):
    return Message({"t": torch.full((count,), value)}, {"request_id": "x"})


def test_a_reply_passes_through_and_the_memory_is_reused_and_grows(directory):
    segments = Segments()
    names = []
    for value, count in ((1.0, 10), (2.0, 1_000_000), (3.0, 10)):
        reply = message(value, count)
        segment = segments.lease(reply.nbytes)
        names.append(segment.name)
        assert write_segment(segment.name, reply)
        tensors, metadata = unpack(segments.adopt(segment, reply.nbytes))
        assert metadata == {"request_id": "x"}
        assert torch.equal(tensors["t"], torch.full((count,), value))
        del tensors, segment
        gc.collect()
    assert len(set(names)) == 1
    segments.close()
    assert list(directory.iterdir()) == []


def test_memory_still_in_use_is_not_reused(directory):
    segments = Segments()
    first = segments.lease(message().nbytes)
    write_segment(first.name, message(1.0))
    kept = unpack(segments.adopt(first, message().nbytes))[0]["t"][5:]
    second = segments.lease(message().nbytes)
    assert second.name != first.name
    write_segment(second.name, message(2.0))
    assert torch.equal(kept, torch.full((995,), 1.0))
    second.discard()
    segments.close()
    assert [path.name for path in directory.iterdir()] == [first.name]
    del kept
    gc.collect()
    assert list(directory.iterdir()) == []  # already closed: removed with the last view


def test_only_segments_are_written_to(directory, tmp_path):
    segments = Segments()
    segment = segments.lease(message().nbytes)
    for name in ("", "../etc/passwd", "fledge-zz", segment.name + "/", "fledge-" + "0" * 32):
        assert not write_segment(name, message())
    assert not write_segment(segment.name, message(count=10_000_000))  # too small
    other = directory / ("fledge-" + "1" * 32)
    other.symlink_to(tmp_path / "victim")
    assert not write_segment(other.name, message())
    assert not (tmp_path / "victim").exists()
    segment.discard()


def holder(directory):
    """A process that holds a segment until it is killed."""
    code = (
        "import sys, time; from pathlib import Path; from fledge.target.remote import segment as r;"
        "r.DIRECTORY = Path(sys.argv[1]); s = r.Segments(); keep = s.lease(100); print('held');"
        "sys.stdout.flush(); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_segments_of_a_killed_process_are_removed_and_those_in_use_are_not(directory):
    process = holder(directory)
    assert remove_leftovers() == 0
    assert len(list(directory.iterdir())) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 5
    while remove_leftovers() == 0:
        assert time.monotonic() < deadline
    assert list(directory.iterdir()) == []


def test_a_running_server_removes_segments_of_a_killed_client(directory, monkeypatch):
    from target.remote.servers import running

    monkeypatch.setattr("fledge.target.remote.server.run._LEFTOVERS_S", 0.1)
    with running():
        process = holder(directory)
        segments = Segments()
        kept = segments.lease(100)
        time.sleep(2.5)  # more than two rounds of cleanup
        assert len(list(directory.iterdir())) == 2
        process.kill()
        process.communicate()
        deadline = time.monotonic() + 10
        while len(list(directory.iterdir())) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert kept.path.exists()
        kept.discard()


def test_all_segments_of_a_machine_are_bounded_together(directory):
    segments, others = (Segments(max_bytes=5 << 20) for _ in range(2))
    first, second = segments.lease(2 << 20), others.lease(2 << 20)
    assert segments.lease(2 << 20) is None  # only one more megabyte fits
    third = others.lease(1 << 20)
    assert third is not None
    assert segments.lease(1) is None
    second.discard()
    view = segments.adopt(first, 100)
    del view
    gc.collect()
    reused = segments.lease(2 << 20)
    assert reused is first  # reusing a segment needs no more room
    segments.adopt(reused, 100)
    gc.collect()
    grown = segments.lease(4 << 20)  # grows from 2 to 4, beside 1 elsewhere
    assert grown is first
    assert others.lease(1 << 20) is None
    assert remote_segment.living_bytes() == 5 << 20
    for segment in (grown, third):
        segment.discard()


def test_without_room_the_answer_is_sent_as_a_body(monkeypatch, server):
    from fledge.target.remote.client import RemoteEagle3TargetModel
    from target.contract import padded_rows
    from target.remote.servers import metric

    def sent_by(way):
        return metric(server, f'fledge_reply_bytes_total{{way="{way}"}}')

    monkeypatch.setattr(remote_segment, "most_bytes", lambda: 0)
    before = sent_by("body"), sent_by("shared_memory")
    with RemoteEagle3TargetModel(server.url) as target:
        expected = target.generate_batch(*padded_rows())
        assert (sent_by("body") > before[0], sent_by("shared_memory")) == (True, before[1])
        target._segments._most_bytes = 1 << 30  # room again: the next answer is shared
        shared = target.generate_batch(*padded_rows())
        assert sent_by("shared_memory") > before[1]
    assert torch.equal(shared.aux_hidden_states, expected.aux_hidden_states)


def test_a_normal_exit_leaves_no_segments(directory):
    code = (
        "import sys; from pathlib import Path; from fledge.target.remote import segment as r;"
        "r.DIRECTORY = Path(sys.argv[1]); s = r.Segments(); a = s.lease(100);"
        "b = s.lease(100); view = s.adopt(a, 100); free = s.adopt(b, 100); del free"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True)
    assert list(directory.iterdir()) == []


def test_writing_to_full_shared_memory_fails_cleanly(directory):
    segments = Segments()
    segment = segments.lease(message().nbytes)

    class Full(Message):
        def chunks(self):
            yield next(super().chunks())
            raise OSError(errno.ENOSPC, "No space left on device")

    assert not write_segment(segment.name, Full({"t": torch.ones(9)}, {}))
    assert segment.path.stat().st_blocks == 0  # no space stays allocated
    assert write_segment(segment.name, message())
    segment.discard()
