"""How fast answers travel from a target server to a trainer, against a plain socket.

The target is taken out of the picture: the server's backend returns states that lie ready, in the
shape of an 8B target (hidden 4096, bfloat16). A plain socket copies as many bytes between two
processes in the same run; the figure that matters is the ratio. Bytes a token are what the server
counted for each encoding.

    python benchmarks/bench_remote.py [--tokens 4096] [--rounds 12] [--markdown FILE]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.head import TargetHead
from fledge.target.base import Eagle3TargetBackend, InputEmbedding, TargetInfo
from fledge.target.remote.client import RemoteEagle3TargetModel

HIDDEN, VOCABULARY, DRAFT_VOCABULARY = 4096, 40_000, 32_000


class Ready(Eagle3TargetBackend):
    """States of the right shape, computed once, whatever is asked."""

    def __init__(self, tokens: int) -> None:
        super().__init__("hidden")
        self.aux_layer_ids = [1, 15, 28]
        self._states = torch.randn(tokens, 4 * HIDDEN).bfloat16()
        self._weight = torch.randn(VOCABULARY, HIDDEN).bfloat16()

    def answer(self, rows):
        states = self._states[: rows.tokens].flatten()
        return Eagle3TargetBatch.about(
            rows,
            aux_hidden_states=states[: 3 * HIDDEN * rows.tokens].view(*rows.shape, -1),
            last_hidden_states=states[: HIDDEN * rows.tokens].view(*rows.shape, -1),
            shifted=True,
        )

    def get_input_embeddings(self):
        return InputEmbedding(self._weight)

    def info(self):
        return TargetInfo(
            head=TargetHead(self._weight),
            final_norm=None,
            hidden_size=HIDDEN,
            vocab_size=VOCABULARY,
            depth=32,
            dtype=torch.bfloat16,
            weight_dtypes="bfloat16 100.0%",
            weights_fingerprint="0" * 16,
            tokenizer_fingerprint=None,
        )


def serve_states(tokens: int) -> None:
    from fledge.target.remote.server.app import TargetServer
    from fledge.target.remote.server.run import Address, serve

    address = Address(port=0)
    with address.bind() as bound:
        server = TargetServer(Ready(tokens), model="8B shape")
        serve(server, address, bound, on_ready=lambda url: print(url, flush=True))


def serve_bytes() -> None:
    """A plain socket: on every byte it is sent it answers with as many bytes as it was told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        data = memoryview(np.ones(int(connection.recv(64)), np.uint8))
        connection.sendall(b"!")
        while connection.recv(1):
            connection.sendall(data)


def started(kind: str, tokens: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, __file__, "--serve", kind, "--tokens", str(tokens)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


class Plain:
    """The other end of `serve_bytes`, into memory that is used again."""

    def __init__(self, port: int, nbytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(str(nbytes).encode())
        self._socket.recv(1)
        self._view = memoryview(np.empty(nbytes, np.uint8))

    def copy(self) -> None:
        self._socket.sendall(b"?")
        at = 0
        while at < len(self._view):
            at += self._socket.recv_into(self._view[at : at + (1 << 20)])


def rows(tokens: int, supervised_share: float = 0.5) -> tuple[torch.Tensor, ...]:
    ids_BT = torch.arange(tokens)[None] % VOCABULARY
    loss_BT = (torch.arange(tokens)[None] >= tokens * (1 - supervised_share)).long()
    return ids_BT, torch.ones_like(ids_BT), loss_BT


REPLIES = 4  # in a round


def measure(tokens: int, rounds: int) -> dict[str, float]:
    """Gigabytes per second of each way, the ways taking turns."""
    nbytes = 4 * HIDDEN * 2 * tokens
    states, url = started("states", tokens)
    plain, port = started("bytes", tokens)
    copy, given = Plain(int(port), nbytes).copy, rows(tokens)

    def one_by_one(target: RemoteEagle3TargetModel) -> None:
        for _ in range(REPLIES):
            target.generate_batch(*given)

    def ahead(target: RemoteEagle3TargetModel) -> None:
        """As a trainer asks: the next reply is under way while this one is looked at."""
        waiting = [target.generate_batch_async(*given) for _ in range(REPLIES)]
        while waiting:
            waiting.pop(0).result()

    seconds: dict[str, list[float]] = {}
    with (
        RemoteEagle3TargetModel(url, shared_memory=False) as http,
        RemoteEagle3TargetModel(url) as memory,
    ):
        ways = {
            "plain socket": lambda: [copy() for _ in range(REPLIES)],
            "HTTP, one request at a time": lambda: one_by_one(http),
            "HTTP, two under way (default)": lambda: ahead(http),
            "shared memory, one request at a time": lambda: one_by_one(memory),
            "shared memory, two under way (default)": lambda: ahead(memory),
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
    """What the server counted, by encoding."""
    states, url = started("states", tokens)
    ids = torch.arange(DRAFT_VOCABULARY)
    mask = torch.arange(VOCABULARY) < DRAFT_VOCABULARY
    found = {}
    for name in ("hidden", "probs", "topk"):
        with RemoteEagle3TargetModel(url, supervision=name, shared_memory=False) as target:
            target.set_vocab_mapping(ids, mask)
            before = _sent(url)
            target.generate_batch(*rows(tokens))
            found[name] = (_sent(url) - before) / tokens
    states.terminate()
    states.wait()
    return found


def _sent(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text = reply.read().decode()
    name = 'fledge_reply_bytes_total{way="body"} '
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--serve", choices=["states", "bytes"], help=argparse.SUPPRESS)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    if args.serve == "states":
        serve_states(args.tokens)
        return
    if args.serve == "bytes":
        serve_bytes()
        return
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
