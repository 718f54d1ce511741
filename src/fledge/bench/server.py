"""Load on a running OpenAI-compatible server, and what its own counters say about acceptance.

httpx is imported by `fledge bench` only. Latencies are taken at the client, from streamed answers:
time to first token, seconds per token after the first, and the whole request. Acceptance comes from
the engine: vLLM's or llama.cpp's counters, read before and after; SGLang's running average.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import httpx

from fledge.core.errors import BadInput

_PERCENTILES = (50, 90, 99)
_SETTLE_TRIES, _SETTLE_S = 20, 0.05
_RUNNING = re.compile(
    r"^(?:vllm:num_requests_running|llamacpp:requests_processing)(?:\{[^}]*\})?\s+(\S+)",
    re.MULTILINE,
)
_COUNTING = {"vllm": "vLLM", "llamacpp": "llama.cpp"}  # by the prefix of their counters
_SAMPLE = re.compile(r"(?P<name>[\w:]+)(\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)")


@dataclass(frozen=True)
class Load:
    """What is sent."""

    messages: Sequence[Sequence[dict[str, str]]]  # conversations, in turn
    requests: int
    concurrency: int
    max_tokens: int = 256
    temperature: float = 0.0
    timeout_s: float = 600.0


class Answer(NamedTuple):
    """One request, in seconds since it was sent."""

    tokens: int
    first_s: float
    total_s: float

    @property
    def per_token_s(self) -> float | None:
        """After the first token; None when there was no second."""
        return (self.total_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class ServerAcceptance:
    """The engine's own figures about its draft, over the measured requests."""

    length: float
    source: str
    per_position: list[float] = field(default_factory=list)  # P(tokens 1..k accepted); vLLM only
    drafts: int | None = None


@dataclass(frozen=True)
class ServerFigures:
    """One server under one load."""

    url: str
    model: str
    concurrency: int
    requests: int
    tokens: int
    seconds: float
    first_ms: dict[str, float]
    per_token_ms: dict[str, float]
    total_ms: dict[str, float]
    acceptance: ServerAcceptance | None
    tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_server(
    url: str, load: Load, *, model: str = "", on_answer: Callable[[int], None] = lambda done: None
) -> ServerFigures:
    """Send the load after two requests that warm the server up; `on_answer` gets their number.

    `model` defaults to the one the server names first.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        return asyncio.run(_measure(url, load, model, on_answer))
    except httpx.TransportError as error:
        what = f"no answer ({type(error).__name__}: {error})"
        raise BadInput(what, where=url, fix="is it running?") from None


async def _measure(
    url: str, load: Load, model: str, on_answer: Callable[[int], None]
) -> ServerFigures:
    limits = httpx.Limits(max_connections=load.concurrency + 1)
    async with httpx.AsyncClient(base_url=url, timeout=load.timeout_s, limits=limits) as client:
        model = model or await _first_model(client)
        for messages in load.messages[:2]:
            await _ask(client, model, messages, load)
        before = await _counters(client)
        begin = time.perf_counter()
        answers = await _send(client, model, load, on_answer)
        seconds = time.perf_counter() - begin
        acceptance = await _acceptance(client, before)
    tokens = sum(answer.tokens for answer in answers)
    later_s = [s for answer in answers if (s := answer.per_token_s) is not None]
    return ServerFigures(
        url, model, load.concurrency, len(answers), tokens, seconds,
        first_ms=percentiles([1e3 * answer.first_s for answer in answers]),
        per_token_ms=percentiles([1e3 * s for s in later_s]),
        total_ms=percentiles([1e3 * answer.total_s for answer in answers]),
        acceptance=acceptance, tokens_per_s=tokens / seconds,
    )  # fmt: skip


async def _send(
    client: httpx.AsyncClient, model: str, load: Load, on_answer: Callable[[int], None]
) -> list[Answer]:
    """`concurrency` workers take requests from one line; prompts come round again."""
    waiting = iter(range(load.requests))
    answers: list[Answer] = []

    async def work() -> None:
        for number in waiting:
            messages = load.messages[number % len(load.messages)]
            answers.append(await _ask(client, model, messages, load))
            on_answer(len(answers))

    await asyncio.gather(*(work() for _ in range(load.concurrency)))
    return answers


async def _ask(
    client: httpx.AsyncClient, model: str, messages: Sequence[dict[str, str]], load: Load
) -> Answer:
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin, first, tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            what = f"the server answered {response.status_code}: {text[:200]}"
            raise BadInput(what, where=str(response.url))
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if not first and any(choice["delta"].get("content") for choice in event["choices"]):
                first = time.perf_counter() - begin
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    total = time.perf_counter() - begin
    if not tokens:
        what = "the server does not say how many tokens it made (usage)"
        raise BadInput(what, where=str(client.base_url))
    return Answer(tokens, first or total, total)


async def _first_model(client: httpx.AsyncClient) -> str:
    response = await client.get("/v1/models")
    if response.status_code != 200 or not response.json().get("data"):
        what = f"not an OpenAI-compatible server (/v1/models says {response.status_code})"
        raise BadInput(what, where=str(client.base_url))
    return str(response.json()["data"][0]["id"])


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 by nearest rank (a value that was seen), and the mean."""
    if not values:
        return {}
    ordered, count = sorted(values), len(values)
    ranks = {f"p{p}": ordered[max(0, -(-p * count // 100) - 1)] for p in _PERCENTILES}
    return {**ranks, "mean": sum(ordered) / count}


# --- acceptance --------------------------------------------------------------------------------


async def _counters(client: httpx.AsyncClient) -> dict[str, float]:
    """The spec-decode samples of /metrics, summed over engines; empty when it has none.

    An engine sends an answer a moment before it counts the last round: this waits until it knows of
    no running request, but not for those of others.
    """
    for _ in range(_SETTLE_TRIES):
        response = await client.get("/metrics", follow_redirects=True)
        if response.status_code != 200:
            return {}
        if all(float(count) == 0 for count in _RUNNING.findall(response.text)):
            break
        await asyncio.sleep(_SETTLE_S)
    return parse_counters(response.text)


def parse_counters(text: str) -> dict[str, float]:
    """`name` or `name:position` -> value, for the engine's speculative decoding counters."""
    counters: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or "spec_" not in match["name"]:
            continue
        if match["name"].endswith("_created"):  # when the counter was made: no count
            continue
        name = match["name"].removesuffix("_total")
        if position := re.search(r'position="(\d+)"', match["labels"] or ""):
            name = f"{name}:{position[1]}"
        counters[name] = counters.get(name, 0.0) + float(match["value"])
    return counters


async def _acceptance(
    client: httpx.AsyncClient, before: dict[str, float]
) -> ServerAcceptance | None:
    after = await _counters(client)
    for prefix, engine in _COUNTING.items():
        prefix = f"{prefix}:spec_decode_num"
        drafts = after.get(f"{prefix}_drafts", 0.0) - before.get(f"{prefix}_drafts", 0.0)
        if drafts <= 0:
            continue
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        per_position = f"{prefix}_accepted_tokens_per_pos"
        positions = sum(name.startswith(f"{per_position}:") for name in grown)
        return ServerAcceptance(
            length=1 + grown[f"{prefix}_accepted_tokens"] / drafts,
            per_position=[grown[f"{per_position}:{k}"] / drafts for k in range(positions)],
            drafts=int(drafts),
            source=f"{engine}'s counters over the measured requests",
        )
    for path in ("/server_info", "/get_server_info"):  # 0.5.9 knows the second only
        response = await client.get(path)
        states = response.json().get("internal_states") if response.status_code == 200 else None
        if states and states[0].get("avg_spec_accept_length"):
            length = states[0]["avg_spec_accept_length"]
            return ServerAcceptance(length, "SGLang's average since its start")
    return None
