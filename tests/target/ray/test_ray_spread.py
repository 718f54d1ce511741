"""Caches and answers by workers on a cluster are those of one process, byte for byte."""

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
from fledge.target.ray.connection import Connection
from fledge.target.ray.spread import Spread
from target.cache.caches import payload
from target.ray.clusters import cluster, everything_is_free, until
from train.tiny import make_chats

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def nodes():
    with cluster(1, 1) as started:
        yield started


def fledge(*words):
    return [sys.executable, "-m", "fledge", *map(str, words)]


def outcome(*words):
    """What the command says as JSON, in this process and without a cluster."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def at_work(claims, process):
    """The process of a worker that has claimed a shard."""
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        for path in claims.glob("[0s]*.*"):
            with contextlib.suppress(OSError, IndexError):  # given back, or just being made
                return int(path.read_text().split()[0])
        time.sleep(0.002)
    raise AssertionError(process.communicate())


@pytest.fixture
def disturbed(nodes):
    """Runs a command on the cluster, of which something is done to a worker in the middle of its
    work, or to the command: the exit code, and what was written to stdout and stderr."""

    def run(disturb, claims, *words):
        command = fledge(*words, "--json", "--ray", "--address", nodes.address)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            try:
                disturb(process.pid, at_work(claims, process))
                written, said = process.communicate(timeout=200)
            finally:
                process.kill()
        with Connection(nodes.address):
            until(everything_is_free)
        assert not claims.exists()
        return process.returncode, written, said

    return run


def murder(_command, worker):
    os.kill(worker, signal.SIGKILL)


def stop(command, _worker):
    os.kill(command, signal.SIGTERM)


def test_a_cache_by_workers_that_are_stopped_continued_and_killed(recipe, tmp_path, disturbed):
    path, cache = tmp_path / "recipe.yaml", tmp_path / "cache"
    chats = make_chats(tmp_path / "chats.jsonl", count=1500)  # for seconds of work
    path.write_text(recipe(f"data.train={chats}").to_yaml())
    words = ("precompute", path, "--shard-size", 2, "--batch-size", 2)
    whole = outcome(*words, "--out", tmp_path / "whole")
    words, claims = (*words, "--out", cache, "--workers", 2), cache / ".claims"
    code, _, said = disturbed(stop, claims, *words)
    assert code == 143, said
    assert "written shards are kept, --resume continues" in said
    reused = len(list(cache.glob("shard-*")))
    assert reused < whole["shards_written"]
    code, written, said = disturbed(murder, claims, *words, "--resume")
    assert code == 0, said
    assert payload(cache) == payload(tmp_path / "whole")
    counts = {"shards_written": whole["shards_written"] - reused, "shards_reused": reused}
    assert json.loads(written) == {**whole, **counts, "directory": str(cache)}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answers_by_workers_of_whom_one_is_killed(tiny_target, tmp_path, disturbed, temperature):
    rows = [{"messages": [{"role": "user", "content": f"count to {i}"}]} for i in range(400)]
    rows[7] = {"messages": [{"role": "user", "content": "word " * 600}]}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = one, many = tmp_path / "one" / "new.jsonl", tmp_path / "many" / "new.jsonl"
    words = ("regenerate", data, "--target", tiny_target, "--max-new-tokens", 12, "--batch", 4,
             "--device", "cpu", "--temperature", temperature)  # fmt: skip
    for place in places:
        place.parent.mkdir()
    whole = outcome(*words, "--out", one)
    claims = many.with_name("new.jsonl.parts") / ".claims"
    code, written, said = disturbed(murder, claims, *words, "--out", many)
    assert code == 0, said
    kept = ("new.jsonl", "new.failed.jsonl", "new.manifest.json")
    ours, theirs = payload(many.parent), payload(one.parent)
    assert [ours[name] for name in kept] == [theirs[name] for name in kept]
    alike = ("rows", "written", "failed", "tokens", "reasons", "examples")
    found = json.loads(written)
    assert [found[name] for name in alike] == [whole[name] for name in alike]


def test_what_a_worker_refuses_the_command_refuses(nodes, tmp_path):
    refused = partial(check_out, tmp_path / "answers.txt", [])
    with Spread(nodes.address) as spread:
        assert (spread.workers, spread.device) == (2, "cpu")  # one for each machine that has a CPU
        with pytest.raises(BadInput, match=r"'answers\.txt' is not a \.jsonl file"):
            spread.run(refused, lambda: None)
        until(everything_is_free)


def test_workers_that_die_over_and_over_end_the_command(nodes, monkeypatch):
    monkeypatch.setattr(spread_module, "_MAX_RESTARTS", 1)
    looks = []
    with Spread(nodes.address, workers=3) as spread:
        with pytest.raises(BadInput, match="all workers were lost"):
            spread.run(partial(os._exit, 1), lambda: looks.append(1))
        until(everything_is_free)
    assert looks
