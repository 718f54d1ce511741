"""The cost of moving a target's answers to a trainer: in the same process, over a plain socket, and
by the target server, in one run, with the same batches.

The target costs nothing here: its states are precomputed (`ready_states.py`). The ways alternate,
so that all of them see the same load on the machine. The plain socket only copies as many bytes; it
is the lower bound for crossing a process boundary.

    python benchmarks/bench_transport.py [--tokens 4096] [--rounds 8] [--markdown FILE]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend
from fledge.target.remote.client import RemoteEagle3TargetModel
from ready_states import Plain, Ready, rows, started

SHAPES = {"SmolLM2-135M": 576, "8B": 4096}  # hidden size
BATCHES = 4  # per round
Way = Callable[[], Any]


@dataclass(frozen=True)
class Figures:
    """The figures of one way."""

    tokens: int  # per batch
    nbytes: int
    seconds: float  # per batch, median over the rounds

    def row(self, name: str, least_s: float) -> str:
        rate, speed = self.tokens / self.seconds, self.nbytes / self.seconds / 1e9
        ratio = least_s / self.seconds
        return f"| {name} | {rate:,.0f} | {speed:.2f} | {1e3 * self.seconds:.1f} | {ratio:.0%} |"


def one_by_one(target: Eagle3TargetBackend, batch: TokenBatch) -> None:
    for _ in range(BATCHES):
        target.answer(batch)


def ahead(target: Eagle3TargetBackend, batch: TokenBatch) -> None:
    """As a trainer does: the next answers are in flight while this one is used."""
    pending = [target.answer_async(batch) for _ in range(BATCHES)]
    while pending:
        pending.pop(0).result()


class InProcess:
    """The target in the trainer's own process; its states are copied once, as on the way to a GPU,
    into reused memory."""

    def __init__(self, target: Ready, batch: TokenBatch) -> None:
        self._target, self._batch = target, batch
        self._memory = [tensor.clone() for tensor in self._states()]

    def __call__(self) -> None:
        for _ in range(BATCHES):
            for tensor, memory in zip(self._states(), self._memory, strict=True):
                memory.copy_(tensor)

    def _states(self) -> list[Tensor]:
        answer = self._target.answer(self._batch)
        return [answer.aux_hidden_states, answer.last_hidden_states]


@contextmanager
def ways(hidden: int, tokens: int) -> Iterator[dict[str, Way]]:
    batch = TokenBatch(*rows(tokens))
    with ExitStack() as stack:
        states, url = started("states", tokens, hidden)
        plain, port = started("bytes", tokens, hidden)
        for process in (states, plain):
            stack.callback(process.wait)
            stack.callback(process.terminate)
        copy = Plain(int(port), 8 * hidden * tokens).copy
        by_name: dict[str, Way] = {
            "in this process, copied once": InProcess(Ready(tokens, hidden), batch),
            "plain socket": lambda: [copy() for _ in range(BATCHES)],
        }
        target = stack.enter_context(RemoteEagle3TargetModel(url))
        by_name["target server, one at a time"] = lambda: one_by_one(target, batch)
        by_name["target server, two under way"] = lambda: ahead(target, batch)
        yield by_name


def measure(hidden: int, tokens: int, rounds: int) -> dict[str, Figures]:
    seconds: dict[str, list[float]] = {}
    with ways(hidden, tokens) as by_name:
        for index in range(rounds + 1):
            for name, way in by_name.items():
                begin = time.perf_counter()
                way()
                if index:  # the first round loads, connects and touches memory
                    seconds.setdefault(name, []).append((time.perf_counter() - begin) / BATCHES)
    nbytes = 8 * hidden * tokens
    return {name: Figures(tokens, nbytes, statistics.median(s)) for name, s in seconds.items()}


def table(shape: str, figures: dict[str, Figures]) -> list[str]:
    base = figures["plain socket"]
    size = (
        f"{base.tokens:,} tokens of {base.nbytes // base.tokens:,} bytes, "
        f"{base.nbytes / 1e6:.0f} MB"
    )
    return [
        f"**{shape}**: batches of {size}",
        "",
        "| way | tokens/s | GB/s | ms a batch | speed, plain socket = 100 % |",
        "|---|--:|--:|--:|--:|",
        *(row.row(name, base.seconds) for name, row in figures.items()),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    begin, lines = os.getloadavg()[0], []
    for shape, hidden in SHAPES.items():
        lines += table(shape, measure(hidden, args.tokens, args.rounds))
    rounds = f"median of {args.rounds} rounds of {BATCHES}"
    load = f"load average {begin:.1f} before, {os.getloadavg()[0]:.1f} after"
    lines.append(f"{os.cpu_count()} cores, {rounds}; {load}.")
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
