"""How fast answers travel from a target server to a trainer, compared to a plain socket.

The target costs nothing here: the server's backend returns precomputed states in the shape of an 8B
target (hidden 4096, bfloat16). A plain socket copies as many bytes between two processes in the
same run; the figure that matters is the ratio. Bytes per token are the sizes of answers.

    python benchmarks/bench_remote.py [--tokens 4096] [--rounds 12] [--markdown FILE]
"""

import argparse
import json
import os
import statistics
import sys
import time
import urllib.request
from pathlib import Path

import torch

from fledge.core.rows import TokenBatch
from fledge.target.remote.client import RemoteEagle3TargetModel
from fledge.target.remote.protocol import WIRE_ENCODINGS, Question
from ready_states import Plain, rows, started

HIDDEN, DRAFT_VOCABULARY = 4096, 32_000
REPLIES = 4  # per round


def measure(tokens: int, rounds: int) -> dict[str, float]:
    """Gigabytes per second of each way; the ways alternate."""
    nbytes = 4 * HIDDEN * 2 * tokens
    states, url = started("states", tokens)
    plain, port = started("bytes", tokens)
    copy, batch = Plain(int(port), nbytes).copy, rows(tokens)

    def one_by_one(target: RemoteEagle3TargetModel) -> None:
        for _ in range(REPLIES):
            target.generate_batch(*batch)

    def ahead(target: RemoteEagle3TargetModel) -> None:
        """As a trainer does: the next reply is in flight while this one is used."""
        waiting = [target.generate_batch_async(*batch) for _ in range(REPLIES)]
        while waiting:
            waiting.pop(0).result()

    seconds: dict[str, list[float]] = {}
    with RemoteEagle3TargetModel(url) as http:
        ways = {
            "plain socket": lambda: [copy() for _ in range(REPLIES)],
            "HTTP, one request at a time": lambda: one_by_one(http),
            "HTTP, two under way (default)": lambda: ahead(http),
        }
        for index in range(rounds + 1):
            for name, way in ways.items():
                begin = time.perf_counter()
                way()
                if index:
                    seconds.setdefault(name, []).append(time.perf_counter() - begin)
    for process in (states, plain):
        process.terminate()
        process.wait()
    total = REPLIES * nbytes
    return {name: total / statistics.median(times) / 1e9 for name, times in seconds.items()}


def bytes_per_token(tokens: int) -> dict[str, float]:
    """The size of an answer, by encoding."""
    states, url = started("states", tokens)
    sizes = {}
    for name in WIRE_ENCODINGS:
        question = Question(
            "0" * 32,
            TokenBatch(*rows(tokens)),
            encoding=name,
            top_k=64,
            vocabulary=None if name == "hidden" else torch.arange(DRAFT_VOCABULARY),
        )
        body = question.to_message().to_bytes()
        with urllib.request.urlopen(f"{url}/v1/generate", data=body) as reply:
            sizes[name] = len(reply.read()) / tokens
    states.terminate()
    states.wait()
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    speed = measure(args.tokens, args.rounds)
    sizes = bytes_per_token(512)
    size = 8 * HIDDEN * args.tokens
    lines = [
        f"Replies of {size / 1e6:.0f} MB ({args.tokens:,} tokens, hidden 4096, bfloat16), median "
        f"of {args.rounds} rounds, {os.cpu_count()} cores, one machine; the ways took turns.",
        "",
        "| way | GB/s | of a plain socket |",
        "|---|--:|--:|",
        *(
            f"| {name} | {value:.2f} | {value / speed['plain socket']:.0%} |"
            for name, value in speed.items()
        ),
        "",
        "| encoding, half of the tokens supervised | bytes a token |",
        "|---|--:|",
        *(f"| {name} | {value:,.0f} |" for name, value in sizes.items()),
    ]
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")
    print(json.dumps({"speed_gb_s": speed, "bytes_per_token": sizes}), file=sys.stderr)


if __name__ == "__main__":
    main()
