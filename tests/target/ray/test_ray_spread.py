"""Caches and answers written by workers on a cluster equal those of one process, byte for byte."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

pytest.importorskip("ray.cluster_utils", reason="needs the cluster extra")

from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.data.regenerate import check_out
from fledge.target.ray import spread as spread_module
from fledge.target.ray.connection import connected
from fledge.target.ray.spread import spread_over
from target.cache.caches import payload
from target.ray.clusters import cluster, everything_is_free, until
from train.tiny import make_chats

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def nodes():
    with cluster(1, 1) as started:
        yield started


def fledge(*arguments):
    return [sys.executable, "-m", "fledge", *map(str, arguments)]


def outcome(*arguments):
    """Run a command in this process, without a cluster; returns its JSON output."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def at_work(claims, process):
    """The pid of a worker that has claimed a shard."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        for path in claims.glob("[0s]*.*"):
            with contextlib.suppress(OSError, IndexError):  # released, or just being created
                return int(path.read_text().split()[0])
        time.sleep(0.002)
    raise AssertionError(process.communicate())


@pytest.fixture
def disturbed(nodes):
    """Runs a command on the cluster and disturbs one of its workers, or the command itself, while
    they work; returns the exit code, stdout and stderr."""

    def run(disturb, claims, *arguments):
        command = fledge(*arguments, "--json", "--ray", "--address", nodes.address)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            try:
                disturb(process.pid, at_work(claims, process))
                stdout, stderr = process.communicate(timeout=200)
            finally:
                process.kill()
        with connected(nodes.address):
            until(everything_is_free)
        assert not claims.exists()
        return process.returncode, stdout, stderr

    return run


def kill_worker(_command, worker):
    os.kill(worker, signal.SIGKILL)


def stop_command(command, _worker):
    os.kill(command, signal.SIGTERM)


def test_a_cache_survives_stopped_resumed_and_killed_workers(recipe, tmp_path, disturbed):
    path, cache = tmp_path / "recipe.yaml", tmp_path / "cache"
    chats = make_chats(tmp_path / "chats.jsonl", count=1500)  # seconds of work
    path.write_text(recipe(f"data.train={chats}").to_yaml())
    arguments = ("precompute", path, "--shard-size", 2, "--batch-size", 2)
    whole = outcome(*arguments, "--out", tmp_path / "whole")
    arguments, claims = (*arguments, "--out", cache, "--workers", 2), cache / ".claims"
    code, _, stderr = disturbed(stop_command, claims, *arguments)
    assert code == 143, stderr
    assert "written shards are kept, --resume continues" in stderr
    reused = len(list(cache.glob("shard-*")))
    assert reused < whole["shards_written"]
    code, stdout, stderr = disturbed(kill_worker, claims, *arguments, "--resume")
    assert code == 0, stderr
    assert payload(cache) == payload(tmp_path / "whole")
    counts = {"shards_written": whole["shards_written"] - reused, "shards_reused": reused}
    assert json.loads(stdout) == {**whole, **counts, "directory": str(cache)}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answers_survive_a_killed_worker(tiny_target, tmp_path, disturbed, temperature):
    rows = [{"messages": [{"role": "user", "content": f"count to {i}"}]} for i in range(400)]
    rows[7] = {"messages": [{"role": "user", "content": "word " * 600}]}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    outputs = single, many = tmp_path / "one" / "new.jsonl", tmp_path / "many" / "new.jsonl"
    arguments = ("regenerate", data, "--target", tiny_target, "--max-new-tokens", 12, "--batch", 4,
             "--device", "cpu", "--temperature", temperature)  # fmt: skip
    for output in outputs:
        output.parent.mkdir()
    whole = outcome(*arguments, "--out", single)
    claims = many.with_name("new.jsonl.parts") / ".claims"
    code, stdout, stderr = disturbed(kill_worker, claims, *arguments, "--out", many)
    assert code == 0, stderr
    names = ("new.jsonl", "new.failed.jsonl", "new.manifest.json")
    files, expected_files = payload(many.parent), payload(single.parent)
    assert [files[name] for name in names] == [expected_files[name] for name in names]
    compared = ("rows", "written", "failed", "tokens", "reasons", "examples")
    figures = json.loads(stdout)
    assert [figures[name] for name in compared] == [whole[name] for name in compared]


def test_the_command_reports_what_a_worker_refuses(nodes, tmp_path):
    refused = partial(check_out, tmp_path / "answers.txt", [])
    with spread_over(nodes.address) as spread:
        assert (spread.workers, spread.device) == (2, "cpu")  # one per machine that has a CPU
        with pytest.raises(BadInput, match=r"'answers\.txt' is not a \.jsonl file"):
            spread.run(refused, lambda: None)
        until(everything_is_free)


def test_workers_that_die_repeatedly_end_the_command(nodes, monkeypatch):
    monkeypatch.setattr(spread_module, "_MAX_RESTARTS", 1)
    polls = []
    with spread_over(nodes.address, workers=3) as spread:
        with pytest.raises(BadInput, match="all workers were lost"):
            spread.run(partial(os._exit, 1), lambda: polls.append(1))
        until(everything_is_free)
    assert polls
