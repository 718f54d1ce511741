"""Caches and answers by workers on a cluster are those of one process, byte for byte."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("ray.cluster_utils", reason="needs the cluster extra")

from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.target.ray.connection import Connection
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


def files_below(place):
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


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
def murderous(nodes):
    """Runs a command on the cluster and kills a worker in the middle of its work."""

    def run(claims, *words):
        command = fledge(*words, "--json", "--ray", "--address", nodes.address)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            try:
                os.kill(at_work(claims, process), signal.SIGKILL)
                written, said = process.communicate(timeout=200)
            finally:
                process.kill()
        assert process.returncode == 0, said
        with Connection(nodes.address):
            until(everything_is_free)
        return json.loads(written)

    return run


def test_a_cache_by_workers_of_whom_one_is_killed(recipe, tmp_path, murderous):
    path, cache = tmp_path / "recipe.yaml", tmp_path / "cache"
    chats = make_chats(tmp_path / "chats.jsonl", count=300)
    path.write_text(recipe(f"data.train={chats}").to_yaml())
    words = ("precompute", path, "--shard-size", 2, "--batch-size", 2)
    whole = outcome(*words, "--out", tmp_path / "whole")
    found = murderous(cache / ".claims", *words, "--out", cache, "--workers", 2)
    assert files_below(cache) == files_below(tmp_path / "whole")
    assert {**found, "directory": ""} == {**whole, "directory": ""}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answers_by_workers_of_whom_one_is_killed(tiny_target, tmp_path, murderous, temperature):
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
    found = murderous(many.with_name("new.jsonl.parts") / ".claims", *words, "--out", many)
    kept = ("new.jsonl", "new.failed.jsonl", "new.manifest.json")
    ours, theirs = files_below(many.parent), files_below(one.parent)
    assert [ours[name] for name in kept] == [theirs[name] for name in kept]
    assert not list(many.parent.rglob(".claims"))
    alike = ("rows", "written", "failed", "tokens", "reasons", "examples")
    assert [found[name] for name in alike] == [whole[name] for name in alike]
