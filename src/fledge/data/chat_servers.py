"""Answers from any OpenAI-compatible chat server (vLLM, SGLang, ...), many at a time.

A failed request is retried after a pause; one that fails for good costs only its row.
"""

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fledge.core.addresses import server_address
from fledge.core.errors import BadInput
from fledge.data.dialogue import EndedTask, Reply, Sampling, Task
from fledge.data.drops import BadRow

_RETRIED = {408, 409, 425, 429}  # and every 5xx
_REFUSED = {401, 403, 404}  # wrong key, address or model: every row will fail
_ENDPOINT = "/chat/completions"


@dataclass(frozen=True)
class HttpOptions:
    concurrency: int = 32
    retries: int = 5  # after the first try
    timeout_s: float = 600.0  # of one request, from start to end
    pause_s: float = 0.5  # before the first retry; doubles with each
    max_pause_s: float = 60.0  # also limits what a server requests
    headers: dict[str, str] = field(default_factory=dict)  # e.g. Authorization; never stored
    body: dict[str, Any] = field(default_factory=dict)  # added to every request


class _Failure(Exception):  # noqa: N818  (caught request by request)
    """One failed attempt. `again`: another may succeed; `hopeless`: else every row will fail."""

    def __init__(self, bad: BadRow, *, again: bool, hopeless: bool, wait_s: float = 0.0) -> None:
        super().__init__(bad.reason)
        self.bad, self.again, self.hopeless, self.wait_s = bad, again, hopeless, wait_s


class ChatServers:
    """One model behind one or several addresses, which take turns."""

    together = 1  # answers are taken to be independent

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        sampling: Sampling,
        options: HttpOptions | None = None,
    ) -> None:
        self._urls = [endpoint(url) for url in urls]
        self._sampling, self._options = sampling, options or HttpOptions()
        self._model = model or self._only_model()

    def identity(self) -> dict[str, Any]:
        """Excludes addresses: a job may be resumed with another server of the same model."""
        return {"by": "server", "model": self._model, "template": "the server's",
                "body": self._options.body}  # fmt: skip

    def _only_model(self) -> str:
        """The server's model, if it has exactly one."""
        import httpx

        url = self._urls[0].removesuffix(_ENDPOINT) + "/models"
        try:
            answer = httpx.get(url, headers=self._options.headers, timeout=30)
            names = [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"no list of models ({error})", where=url, fix="give --model") from None
        if len(names) != 1:
            raise BadInput(f"serves {', '.join(names)}", where=url, fix="choose one with --model")
        return names[0]

    def run(self, tasks: Iterator[Task], report: Callable[[EndedTask], None]) -> None:
        asyncio.run(self._run(tasks, report))

    async def _run(self, tasks: Iterator[Task], report: Callable[[EndedTask], None]) -> None:
        import httpx

        count, headers = self._options.concurrency, self._options.headers
        limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)

        async def work(turn: int) -> None:
            """Answer row after row until there are none left."""
            for task in tasks:
                try:
                    while task.dialogue.question is not None:
                        task.dialogue.hear(await self._ask(client, turn, self._body(task)))
                    report(EndedTask(task))
                except _Failure as failure:
                    report(EndedTask(task, failure.bad, hopeless=failure.hopeless))
                except BadRow as bad:
                    report(EndedTask(task, bad))

        async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:
            await asyncio.gather(*map(work, range(count)))  # the first error ends all

    async def _ask(self, client: Any, turn: int, body: dict[str, Any]) -> Reply:
        """Request one answer, with retries; each attempt goes to the next address."""
        for attempt in itertools.count():
            url = self._urls[(turn + attempt) % len(self._urls)]
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    return await self._try(client, url, body)
            except TimeoutError:
                bad = BadRow("timed out", f"no answer within {self._options.timeout_s:g} s")
                failure = _Failure(bad, again=True, hopeless=True)
            except _Failure as error:
                failure = error
            if not failure.again or attempt == self._options.retries:
                raise failure
            await asyncio.sleep(self._pause(attempt, failure.wait_s))
        raise AssertionError

    def _pause(self, attempt: int, requested_s: float) -> float:
        """The delay that the server requested, else an exponential one; with jitter, so that
        requests that failed together are not retried together."""
        pause_s = requested_s or self._options.pause_s * 2**attempt * random.uniform(0.5, 1.0)
        return min(pause_s, self._options.max_pause_s)

    def _body(self, task: Task) -> dict[str, Any]:
        """The request body for a task's next answer."""
        sampling, dialogue = self._sampling, task.dialogue
        keys = ("role", "content", "name")  # earlier reasoning is not sent back: templates drop it
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{k: m[k] for k in keys if k in m} for m in dialogue.question or []],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.temperature > 0:
            body["seed"] = sampling.seed + task.number
        if dialogue.tools:
            body["tools"] = list(dialogue.tools)
        if sampling.template_options:
            body["chat_template_kwargs"] = sampling.template_options
        return body | self._options.body

    async def _try(self, client: Any, url: str, body: dict[str, Any]) -> Reply:
        import httpx

        try:
            answer = await client.post(url, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            bad = BadRow("no connection", str(error) or type(error).__name__)
            raise _Failure(bad, again=True, hopeless=True) from None
        status = answer.status_code
        if status != 200:
            bad = BadRow(f"HTTP {status}", " ".join(answer.text.split())[:200])
            again = status in _RETRIED or status >= 500
            wait_s = retry_after(answer.headers.get("retry-after"))
            raise _Failure(bad, again=again, hopeless=again or status in _REFUSED, wait_s=wait_s)
        return _reply(answer.content)


def _reply(content: bytes) -> Reply:
    """The answer in a response body."""
    try:
        value = json.loads(content)
        choice = value["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        tokens = int((value.get("usage") or {}).get("completion_tokens") or 0)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        bad = BadRow("malformed answer", str(error)[:80])
        raise _Failure(bad, again=True, hopeless=False) from None
    if finish not in ("stop", "length"):
        raise BadRow("finish_reason", str(finish)[:40])
    return Reply.of(str(text), cut=finish == "length", tokens=tokens, reasoning=str(reasoning))


def retry_after(header: str | None) -> float:
    """Seconds to wait according to a Retry-After header; 0: none, or a date."""
    try:
        return max(0.0, float(header or ""))
    except ValueError:
        return 0.0


def endpoint(url: str) -> str:
    """The chat endpoint of an address that is given with or without its path."""
    parts = server_address(url, where="--url")
    plain = url.rstrip("/")
    if plain.endswith(_ENDPOINT):
        return plain
    return plain + ("" if parts.path.rstrip("/") else "/v1") + _ENDPOINT
