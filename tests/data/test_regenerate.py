"""Regeneration: every row exactly once, whatever fails on the server or the machine."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from chat_server import ChatServer, answer, echo, said
from typer.testing import CliRunner

from data.chats import chat
from fledge.cli.main import app
from fledge.core import claims
from fledge.core.errors import BadInput
from fledge.data import journal
from fledge.data import regenerate as regenerate_module
from fledge.data.chat_servers import ChatServers, HttpOptions, endpoint, retry_after
from fledge.data.conversation import parse_conversation
from fledge.data.dialogue import Dialogue, Reply, Sampling
from fledge.data.drops import BadRow
from fledge.data.regenerate import regenerate

FAST = HttpOptions(concurrency=8, retries=8, timeout_s=60, pause_s=0.001, max_pause_s=0.01)
HASTY = replace(FAST, timeout_s=0.4, retries=30)  # for servers that stall


def write(path, rows):
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return [str(path)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def ask(sources, out, url, options=FAST, sampling=None, **more):
    sampling = sampling or Sampling()
    servers = ChatServers([url], "tiny", sampling, options)
    return regenerate(sources, out, servers, sampling, **more)


def test_every_assistant_turn_is_regenerated_in_order(tmp_path):
    row = chat("one", "old", "two", "old", "three", category="talk", id=7)
    data = write(tmp_path / "data.jsonl", [row, {"prompt": "alone", "category": "x"}])
    server = ChatServer()
    with server.serving() as url:
        outcome = ask(data, tmp_path / "new.jsonl", url)
    first, second = lines(tmp_path / "new.jsonl")
    assert [m["content"] for m in first["messages"]] == [
        "one", said("one"), "two", said("two"), "three", said("three"),
    ]  # fmt: skip
    assert {k: v for k, v in first.items() if k != "messages"} == {
        "category": "talk", "id": 7, "finish": "stop", "tokens": 15,
    }  # fmt: skip
    assert second == chat("alone", said("alone"), category="x", finish="stop", tokens=5)
    lengths = [
        len(body["messages"]) for body in server.requests if body["messages"][0]["content"] == "one"
    ]
    assert lengths == [1, 3, 5]  # each with the new answers so far
    assert (outcome.written, outcome.tokens, outcome.failed.dropped) == (2, 20, 0)
    assert set(server.paths) == {"/v1/chat/completions"}
    body = server.requests[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 1024, 0.0)
    assert "seed" not in body
    assert parse_conversation(first).truncated is False  # what training reads


def test_tools_are_sent_to_the_server(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [chat("a", tools=tools), chat("b", tools=json.dumps(tools)), chat("c", tools="{")]
    server = ChatServer()
    with server.serving() as url:
        outcome = ask(write(tmp_path / "data.jsonl", rows), tmp_path / "new.jsonl", url)
    assert [body["tools"] for body in server.requests] == [tools, tools]
    assert outcome.failed.counts == {"tools is not JSON": 1}
    assert [row["tools"] for row in lines(tmp_path / "new.jsonl")] == [tools, json.dumps(tools)]


def files_of(out):
    """Contents of the files that a finished job leaves."""
    names = (out.name, out.stem + ".failed.jsonl", out.stem + ".manifest.json")
    paths = {name: out.with_name(name) for name in names}
    return [path.read_bytes() for path in paths.values() if path.exists()]


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(regenerate_module, "_SHARD_ROWS", 4)
    monkeypatch.setattr(claims, "POLL_S", 0.02)
    monkeypatch.setattr(regenerate_module, "POLL_S", 0.02)


@pytest.mark.parametrize(
    ("processes", "shard_rows", "temperature"),
    [
        (1, 64, 0.7),
        pytest.param(4, 4, 0.0, marks=pytest.mark.slow),
        pytest.param(4, 4, 0.7, marks=pytest.mark.slow),
    ],
)
def test_ten_kills_lose_and_repeat_nothing(
    tmp_path, monkeypatch, small_shards, processes, shard_rows, temperature
):
    """Real processes run the same command. They are killed at random moments, counted in requests
    and not in time, and replaced. One that is killed while it creates a claim is noticed only after
    a minute."""
    monkeypatch.setattr(regenerate_module, "_SHARD_ROWS", shard_rows)
    rows = [chat(f"{'never' if i % 40 == 7 else 'row'} {i}", "old", f"and {i}") for i in range(160)]
    data = write(tmp_path / "data.jsonl", [*rows, "{broken"])
    sampling = Sampling(temperature=temperature)
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    whole, out = tmp_path / "one" / "new.jsonl", tmp_path / "many" / "new.jsonl"
    options = replace(FAST, concurrency=3)

    def behave(body, tries):
        """The answer depends on the seed, as with a real server."""
        text = body["messages"][-1]["content"]
        if "never" in text:
            return 400, {}, {}
        return 200, {}, answer(f"{said(text)} {body.get('seed', '')}", tokens=len(text))

    server, rng = ChatServer(behave), random.Random(11)
    context = multiprocessing.get_context("fork")
    with server.serving() as url:
        outcome = ask(data, whole, url, options, sampling)
        single_run = len(server.requests)

        def begin():
            arguments = (data, out, url, options, sampling)
            process = context.Process(target=ask, args=arguments)
            process.start()
            return process

        team = [begin() for _ in range(processes)]
        for _ in range(10):
            due, last = threading.Event(), len(server.requests) + rng.randint(2, 20)
            server.on_request = lambda count, due=due, last=last: due.set() if count >= last else 0
            assert due.wait(120)
            victim = rng.choice([process for process in team if process.is_alive()])
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            assert not out.exists()
            team = [*(process for process in team if process is not victim), begin()]
        for process in team:
            process.join(120)
    assert [process.exitcode for process in team] == [0] * processes
    assert (outcome.written, outcome.failed.dropped) == (156, 5)
    assert files_of(out) == files_of(whole)
    # only requests in flight, and rows that failed before a process started, were repeated
    assert len(server.requests) - 2 * single_run <= 10 * 3 * 2 + (10 + processes) * 4
    assert not (tmp_path / "many" / "new.jsonl.parts" / ".claims").exists()


def test_two_processes_share_the_rows_and_leave_nothing_behind(tmp_path, small_shards):
    """Each answers some and both report all; a third that comes late has nothing to do."""
    data, out = write(tmp_path / "data.jsonl", [chat(f"{i}") for i in range(60)]), "new.jsonl"
    server, messages = ChatServer(), []
    with server.serving() as url, ThreadPoolExecutor(2) as pool:
        barrier = threading.Barrier(2)
        server.behave = lambda body, tries: (200, {}, echo(body))

        def work(_):
            barrier.wait()
            return ask(data, tmp_path / out, url, replace(FAST, concurrency=2), say=messages.append)

        first, second = pool.map(work, range(2))
        third = ask(data, tmp_path / out, url)
    assert len(server.requests) == first.answered_now + second.answered_now == 60
    assert first.answered_now > 0 < second.answered_now
    assert first.result() == second.result() == third.result()
    assert third.answered_now == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "data.jsonl", "new.jsonl", "new.manifest.json",
    ]  # fmt: skip


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("dies_at", range(4))
def test_a_job_killed_while_it_merges_answers_is_continued(tmp_path, monkeypatch, dies_at, good):
    """Killed between any two files: the next one writes the same, and repeats no request."""
    data = write(tmp_path / "data.jsonl", [chat("a"), chat("b" if good else "never")])
    for name in ("one", "cut"):
        (tmp_path / name).mkdir()
    whole, out = tmp_path / "one" / "new.jsonl", tmp_path / "cut" / "new.jsonl"
    server = ChatServer(unreliable(random.Random(0)))
    with server.serving() as url:
        ask(data, whole, url, HASTY)
        written = []

        def dying(real):
            def write_or_die(path, *rest):
                written.append(path.name)
                if len(written) > dies_at + 1:  # the first write is the job's record
                    raise KeyboardInterrupt
                return real(path, *rest)

            return write_or_die

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in ("atomic_file", "write_json"):
                patch.setattr(regenerate_module, name, dying(getattr(regenerate_module, name)))
            ask(data, out, url, HASTY)
        before = len(server.requests)
        again = ask(data, out, url, HASTY)
        assert again.answered_now == 0
        assert len(server.requests) == before + (not good)  # failed rows are retried
    assert len(written) == min(dies_at + 2, 3 + (not good))
    assert files_of(out) == files_of(whole)
    names = [{path.name for path in place.parent.glob("*.*")} for place in (whole, out)]
    assert names[0] == names[1]


def unreliable(rng):
    """Random failures of every kind; certain texts always fail, or are truncated."""

    def behave(body, tries):
        text = body["messages"][-1]["content"]
        if "never" in text:
            return 400, {}, {"error": "too long"}
        if "filtered" in text:
            return 200, {}, answer("no", finish="content_filter")
        failure = rng.choice(
            ["fine"] * 4 + ["500", "429", "hang up", "half", "garbage", "empty", "stall"]
        )
        if tries >= 4 or failure == "fine":
            cut = "long" in text
            return 200, {}, answer(said(text), finish="length" if cut else "stop")
        return {
            "500": (500, {}, {"error": "oops"}),
            "429": (429, {"Retry-After": "0"}, b"slow down"),
            "half": (200, {"Content-Length": "10000"}, b'{"choices": ['),
            "garbage": (200, {}, b"<html>"),
            "empty": (200, {}, {"choices": []}),
        }.get(failure, failure)

    return behave


def test_no_row_is_lost_with_an_unreliable_server(tmp_path):
    kinds = ["plain", "never", "filtered", "long"]
    rows = [chat(f"{kinds[i % 20] if i % 20 < 4 else 'plain'} {i}") for i in range(100)]
    data = write(tmp_path / "data.jsonl", [*rows, "{broken", chat()])
    server = ChatServer(unreliable(random.Random(1)))
    with server.serving() as url:
        outcome = ask(data, tmp_path / "new.jsonl", url, HASTY)
    good = [row["messages"][0]["content"] for row in rows]
    kept = [t for t in good if not t.startswith(("never", "filtered"))]
    new = lines(tmp_path / "new.jsonl")
    assert [row["messages"][0]["content"] for row in new] == kept
    assert all(row["messages"][1]["content"] == said(row["messages"][0]["content"]) for row in new)
    assert [row["finish"] == "length" for row in new] == [t.startswith("long") for t in kept]
    assert outcome.truncated == 5
    assert outcome.failed.counts == {
        "HTTP 400": 5, "finish_reason": 5, "broken or truncated JSON": 1, "messages is empty": 1,
    }  # fmt: skip
    failed = lines(tmp_path / "new.failed.jsonl")
    assert len(failed) == 12
    assert failed[0]["place"].endswith("data.jsonl:2")
    assert failed[0]["original"] == rows[1]
    assert "too long" in failed[0]["detail"]
    assert outcome.written + len(failed) == outcome.rows == 102


def test_failed_rows_are_retried_and_finished_ones_are_not(tmp_path):
    data = write(tmp_path / "data.jsonl", [chat(f"row {i}") for i in range(6)])
    server = ChatServer(lambda body, tries: (500, {}, {}))
    options = HttpOptions(concurrency=2, retries=0, pause_s=0.001)
    with server.serving() as url:
        server.behave = lambda body, tries: (
            (422, {}, {}) if body["messages"][0]["content"] == "row 3" else (200, {}, echo(body))
        )
        assert ask(data, tmp_path / "new.jsonl", url, options).failed.counts == {"HTTP 422": 1}
        assert len(lines(tmp_path / "new.jsonl")) == 5
        server.behave = lambda body, tries: (200, {}, echo(body))
        before = len(server.requests)
        outcome = ask(data, tmp_path / "new.jsonl", url, options)
        assert len(server.requests) == before + 1
        assert (outcome.written, outcome.answered_now, outcome.failed.dropped) == (6, 1, 0)
        assert not (tmp_path / "new.failed.jsonl").exists()
        assert [r["messages"][0]["content"] for r in lines(tmp_path / "new.jsonl")][3] == "row 3"
        again = ask(data, tmp_path / "new.jsonl", url, options)  # finished: nothing to do
        assert len(server.requests) == before + 1
        assert (again.written, again.answered_now) == (6, 0)


def test_a_job_is_not_continued_with_other_settings(tmp_path):
    data, out = write(tmp_path / "data.jsonl", [chat("a"), chat("never")]), tmp_path / "new.jsonl"
    with ChatServer(unreliable(random.Random(0))).serving() as url:
        ask(data, out, url, HASTY)
        with pytest.raises(BadInput, match=r"sampling.temperature: 0.0, not 0.5"):
            ask(data, out, url, HASTY, sampling=Sampling(temperature=0.5))
        write(tmp_path / "data.jsonl", [chat("b")])
        with pytest.raises(BadInput, match="fingerprint"):
            ask(data, out, url, HASTY)
        moved = write(tmp_path / "moved.jsonl", [chat("a"), chat("never")])
        assert ask(moved, out, url, HASTY).written == 1  # the same rows at a different path
        other = tmp_path / "other.jsonl"
        other.write_text("mine")
        with pytest.raises(BadInput, match="not made by this command"):
            ask(moved, other, url, HASTY)
        assert other.read_text() == "mine"
        assert not (tmp_path / "other.jsonl.parts").exists()


def test_truncated_answers_end_their_conversation(tmp_path):
    data = write(tmp_path / "data.jsonl", [chat("long one", "old", "two", "old")])
    with ChatServer(unreliable(random.Random(3))).serving() as url:
        ask(data, tmp_path / "new.jsonl", url, HASTY)
        [row] = lines(tmp_path / "new.jsonl")
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert parse_conversation(row).truncated


def test_an_unreachable_server_ends_the_run_and_loses_nothing(tmp_path):
    data = write(tmp_path / "data.jsonl", [chat(f"{i}") for i in range(40)])
    out = tmp_path / "n.jsonl"
    server = ChatServer()
    server.behave = lambda body, tries: (
        (200, {}, echo(body)) if len(server.requests) <= 10 else "hang up"
    )
    options = HttpOptions(concurrency=2, retries=1, pause_s=0.001)
    with server.serving() as url:
        with pytest.raises(BadInput, match="6 rows one after another failed: no connection"):
            ask(data, out, url, options, patience=6)
        assert not out.exists()
        server.behave = lambda body, tries: (200, {}, echo(body))
        outcome = ask(data, out, url, options)
    assert (outcome.written, outcome.answered_now) == (40, 30)


def test_only_consecutive_failures_end_the_run(tmp_path):
    data = write(tmp_path / "data.jsonl", [chat(f"{i}") for i in range(12)])
    out = tmp_path / "n.jsonl"
    even = lambda body: int(body["messages"][0]["content"]) % 2 == 0  # noqa: E731
    server = ChatServer(lambda body, tries: (200, {}, echo(body)) if even(body) else (503, {}, {}))
    with server.serving() as url:
        outcome = ask(data, out, url, HttpOptions(concurrency=1, retries=0), patience=2)
    assert (outcome.written, outcome.failed.counts) == (6, {"HTTP 503": 6})


def test_a_retry_goes_to_the_next_server(tmp_path):
    data = write(tmp_path / "data.jsonl", [chat(f"{i}") for i in range(8)])
    broken, working = ChatServer(lambda body, tries: (500, {}, {})), ChatServer()
    options = HttpOptions(concurrency=4, retries=1, pause_s=0.001)
    with broken.serving() as first, working.serving() as second:
        servers = ChatServers([first, second], "tiny", Sampling(), options)
        outcome = regenerate(data, tmp_path / "new.jsonl", servers, Sampling())
    assert outcome.written == len(working.requests) == 8
    assert 0 < len(broken.requests) < 8


def test_reasoning_is_kept_beside_the_answer(tmp_path):
    data = write(tmp_path / "data.jsonl", [chat("q", "old", "then", "old")])
    server = ChatServer(lambda body, tries: (200, {}, answer("yes", reasoning_content="hm")))
    with server.serving() as url:
        options = {"enable_thinking": True}
        sampling = Sampling(temperature=0.7, seed=3, template_options=options)
        ask(data, tmp_path / "keep.jsonl", url, sampling=sampling)
    [kept] = lines(tmp_path / "keep.jsonl")
    assert [m.get("reasoning_content") for m in kept["messages"]] == [None, "hm", None, "hm"]
    first, second = server.requests[:2]
    assert first["chat_template_kwargs"] == {"enable_thinking": True}
    assert (first["seed"], first["temperature"]) == (3, 0.7)
    assert second["messages"][1] == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("text", "cut", "words", "thought"),
    [
        ("plain", False, "plain", ""),
        ("<think>\na\n</think>\n\nb", False, "b", "a"),
        ("a</think>b", False, "b", "a"),  # the prompt opened the tag
        ("<think>a b", True, "", "a b"),  # truncated within the reasoning
        ("<think>a b", False, "<think>a b", ""),
        (" spaced ", False, " spaced ", ""),
    ],
)
def test_reasoning_is_separated_from_the_text(text, cut, words, thought):
    reply, finish = Reply.of(text, cut=cut, tokens=1), "length" if cut else "stop"
    assert (reply.text, reply.reasoning, reply.finish) == (words, thought, finish)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "row is not an object"),
        ({"x": 1}, "no messages"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "assistant first"),
        ({"messages": [{"role": "system", "content": "be"}]}, "nothing to answer"),
        (chat("q", "") | {"messages": [{"role": "user", "content": "q"},
            {"role": "tool", "content": "5"}]}, "tool calls"),
    ],
)  # fmt: skip
def test_rows_without_a_question_are_refused(row, reason):
    with pytest.raises(BadRow, match=reason):
        Dialogue(row)


def test_pairs_and_leading_answers_can_be_regenerated():
    alpaca = {"id": 7, "instruction": "Translate.", "input": "Tag", "output": "old"}
    early = {"messages": [{"role": "assistant", "content": "Hi!"}, *chat("q")["messages"]]}
    for row, asked in ((alpaca, "Translate.\n\nTag"), (early, "q")):
        dialogue = Dialogue(row)
        assert dialogue.question == [{"role": "user", "content": asked}]
        with pytest.raises(BadRow, match="empty answer"):
            dialogue.hear(Reply("  ", "stop", 1))
        dialogue.hear(Reply("new", "stop", 1))
        new = dialogue.new_row(row)
        assert [m["content"] for m in new["messages"]] == [asked, "new"]
        assert set(new) - {"id"} == {"messages", "finish", "tokens"}


def test_a_line_that_was_cut_short_is_not_read_and_ruins_no_other(tmp_path):
    path = tmp_path / "000000.jsonl"
    assert list(journal.read(path)) == []
    records = [{"row": row, "place": "é \ud800"} for row in range(3)]  # half a surrogate pair
    journal.append(path, records[0])
    whole = path.read_bytes()
    for cut in range(1, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        for record in records[1:]:
            journal.append(path, record)
        assert [record for _, record in journal.read(path)] == records


def test_pauses_grow_with_jitter_and_respect_retry_after():
    servers = ChatServers(["http://x"], "m", Sampling(), HttpOptions(pause_s=1, max_pause_s=20))
    for attempt, longest in enumerate([1, 2, 4, 8, 16, 20, 20]):
        pauses = [servers._pause(attempt, 0.0) for _ in range(50)]
        assert longest / 2 <= min(pauses) <= max(pauses) <= longest
    assert servers._pause(0, 7.0) == 7
    assert servers._pause(0, 500.0) == 20
    assert retry_after("3") == 3.0
    assert retry_after(None) == retry_after("soon") == 0


@pytest.mark.parametrize(
    ("given_url", "full"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("https://h/v1", "https://h/v1/chat/completions"),
        ("http://h/api/v2/", "http://h/api/v2/chat/completions"),
        ("http://h/v1/chat/completions", "http://h/v1/chat/completions"),
    ],
)
def test_endpoints_of_addresses(given_url, full):
    assert endpoint(given_url) == full


def run(*arguments):
    return CliRunner().invoke(app, ["regenerate", *map(str, arguments)])


def test_the_command_with_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "word")
    data = write(tmp_path / "data.jsonl", [chat(f"row {i}") for i in range(5)])
    server = ChatServer()
    with server.serving() as url:
        more = ["--limit", 3, "--extra", '{"top_p": 0.5}', "--template-option", "deep=true"]
        out = ["--out", tmp_path / "new.jsonl", "--json"]
        result = run(*data, *out, "--url", url, "--url", url, *more)
        assert result.exit_code == 0, result.output
        summary = json.loads(result.stdout)
        assert (summary["rows"], summary["written"], summary["failed"]) == (3, 3, 0)
        assert server.requests[0]["top_p"] == 0.5
        assert server.requests[0]["model"] == "tiny"  # the only model of the server
        assert server.requests[0]["chat_template_kwargs"] == {"deep": True}
        assert server.headers[0]["Authorization"] == "Bearer word"
        manifest = (tmp_path / "new.manifest.json").read_text()
        assert "word" not in manifest
        server.models = ("one", "two")
        result = run(*data, "--out", tmp_path / "b.jsonl", "--url", url)
        assert isinstance(result.exception, BadInput)
        assert "choose one with --model" in str(result.exception)
        server.behave = lambda body, tries: (400, {}, b"no")
        result = run(*data, "--out", tmp_path / "c.jsonl", "--url", url, "--model", "one")
        assert result.exit_code == 1
        assert "5 failed: HTTP 400" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "who answers"),
        (["--target", "x", "--url", "http://h"], "who answers"),
        (["--url", "h:80"], "is not an address"),
        (["--url", "http://h", "--model", "m", "--extra", "[1]"], "not a JSON object"),
        (["--url", "http://h", "--template-option", "x"], "NAME=VALUE"),
        (["--target", "x", "--extra", "{}"], "is for servers"),
    ],
)
def test_the_command_refuses_bad_options(tmp_path, arguments, complaint):
    data = write(tmp_path / "data.jsonl", [chat("q")])
    result = run(*data, "--out", tmp_path / "new.jsonl", *arguments)
    assert isinstance(result.exception, BadInput)
    assert complaint in str(result.exception)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl"]
