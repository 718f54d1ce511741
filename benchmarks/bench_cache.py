"""The offline cache: bytes, read and write rates, waiting time, and acceptance per encoding.

    python benchmarks/bench_cache.py sizes chats.jsonl        # an 8B shape on real chat lengths
    python benchmarks/bench_cache.py rates chats.jsonl DIR    # writer and reader against the disk
    python benchmarks/bench_cache.py waiting chats.jsonl DIR  # a CPU training run fed from a cache
    python benchmarks/bench_cache.py tau chats.jsonl DIR --recipe recipes/smollm2_gpu.yaml --steps N

`sizes` and `rates` need no target: states are random, lengths are those of the data. `tau` makes
one cache of hidden states with the real target, converts it, and trains one draft from each
encoding and one from the live target with the same steps (one GPU); mind the disk: `probs` at
16,384 takes 32 kB per supervised token (`--rows`, `--encodings hidden hidden-fp8 live topk`). DIR
must be on the disk to be measured.
"""

import argparse
import os
import shutil
from pathlib import Path
from statistics import median

import numpy as np
import torch

from cache_io import feed, forget, read_all, shards, size_of, write
from cache_training import LIVE, tau, waiting
from fledge.core.batch import Eagle3TargetBatch
from fledge.core.head import TargetHead
from fledge.core.rows import TokenBatch
from fledge.data.prepare import prepare_rows
from fledge.data.rows import RowView
from fledge.data.tokenise import TokeniseOptions
from fledge.models.resolve import local_model
from fledge.target.base import Eagle3TargetBackend, InputEmbedding, TargetInfo
from fledge.target.cache.format import ENCODINGS, FORMAT, CacheShape
from fledge.target.cache.job import CacheJob
from fledge.target.cache.manifest import dtype_name
from fledge.target.cache.shard import layout_of


class NoiseTarget(Eagle3TargetBackend):
    """Answers with random states at no cost, so that only the cost of storing them remains."""

    def __init__(self, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__("hidden")
        self.aux_layer_ids = [0, 1, 2]
        self._noise_ND = torch.randn(1 << 14, 4 * hidden_size).to(dtype)
        self._weight_VD = torch.randn(vocab_size, hidden_size).to(dtype)
        self._hidden = hidden_size

    def info(self) -> TargetInfo:
        return TargetInfo(
            TargetHead(self._weight_VD), None, self._hidden, len(self._weight_VD), 4,
            self._weight_VD.dtype, "noise", "noise", None,
        )  # fmt: skip

    def get_input_embeddings(self) -> InputEmbedding:
        return InputEmbedding(self._weight_VD)

    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        states = self._noise_ND[: rows.tokens].view(*rows.shape, -1)
        split = 3 * self._hidden
        return Eagle3TargetBatch.about(
            rows,
            aux_hidden_states=states[..., :split],
            last_hidden_states=states[..., split:],
            shifted=True,
        )


def token_rows(data: str, model: str, max_length: int) -> RowView:
    options = TokeniseOptions(max_length=max_length)
    rows = prepare_rows([data], local_model(model, weights=False), options)
    return RowView(rows, np.arange(len(rows)))


def job_for(rows: RowView, directory: Path, shape: CacheShape, vocab_size: int) -> CacheJob:
    manifest = {
        "format": FORMAT, "encoding": shape.encoding, "dtype": dtype_name(shape.dtype),
        "top_k": shape.top_k or None, "shard_size": 256,
        "rows": len(rows), "held_out_rows": 0, "hidden_size": shape.hidden_size,
        "vocab_size": vocab_size, "aux_layer_ids": [0, 1, 2], "vocabulary": None,
    }  # fmt: skip
    manifest["vocabulary"] = {"size": shape.draft_vocab_size} if shape.draft_vocab_size else None
    return CacheJob(directory, rows, manifest)


def shape_for(encoding: str, hidden_size: int, width: int, top_k: int = 64) -> CacheShape:
    over_vocabulary = encoding in ("probs", "topk")
    return CacheShape(
        encoding, torch.bfloat16, hidden_size, 3, width if over_vocabulary else 0,
        top_k if encoding == "topk" else 0,
    )  # fmt: skip


def padded_bytes(rows: int) -> int:
    """Rows padded to 2,048 tokens in bf16, each position with aux states, probabilities, ids, two
    masks (int64) and the position mask."""
    return rows * 2048 * (2 * (3 * 4096 + 32_000) + 3 * 8 + 1)


def sizes(args: argparse.Namespace) -> None:
    """Bytes of an 8B target (hidden 4096, draft vocabulary 32,000) on the data's own lengths."""
    rows = token_rows(args.data, args.model, 2048)
    tokens = int(rows.lengths.sum())
    padded = padded_bytes(len(rows))
    print(f"{len(rows):,} rows, {tokens:,} tokens (mean {tokens / len(rows):.0f}, 2,048 at most)")
    print("| encoding | bytes a token | MB a row | total GB | of padded rows |")
    print("|---|--:|--:|--:|--:|")
    print(f"| seed: probs, padded | {padded / tokens:,.0f} | {padded / len(rows) / 1e6:.1f} | "
          f"{padded / 1e9:,.1f} | 100 % |")  # fmt: skip
    parts = [[rows[i] for i in range(b, min(b + 256, len(rows)))] for b in range(0, len(rows), 256)]
    for encoding in ENCODINGS:
        total = sum(layout_of(shape_for(encoding, 4096, 32_000), part).n_bytes for part in parts)
        print(f"| {encoding} | {total / tokens:,.0f} | {total / len(rows) / 1e6:.1f} | "
              f"{total / 1e9:,.1f} | {total / padded:.1%} |")  # fmt: skip
    first_rows = RowView(rows._rows, np.arange(48))
    target = NoiseTarget(4096, 1000, torch.bfloat16)
    for encoding in ("hidden", "hidden-fp8"):
        directory = Path(args.scratch) / f"sizes-{encoding}"
        write(job_for(first_rows, directory, shape_for(encoding, 4096, 0), 1000), target)
        share = size_of(directory) / padded_bytes(len(first_rows))
        print(f"measured on files, first {len(first_rows)} rows, {encoding}: {share:.1%}")
        shutil.rmtree(directory)


def rates(args: argparse.Namespace) -> None:
    """Write a cache, then read it from a cold disk: end to end, and as training would.

    `reader` ends with a batch's bytes checked and gathered on the host, ready to be sent to a GPU;
    `decoded` also decodes them on this CPU. Shares of the disk are medians over rounds, each
    relative to the disk in the same round.
    """
    rows = token_rows(args.data, args.model, 2048)
    rows = RowView(rows._rows, np.arange(min(args.rows, len(rows))))
    vocab_size = 1 + max(int(rows[i].input_ids.max()) for i in range(len(rows)))
    target = NoiseTarget(args.hidden_size, vocab_size, torch.bfloat16)
    tokens = int(rows.lengths.sum())
    print(f"load average {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads for torch")
    print("| encoding | GB | bytes a token | write MB/s | disk MB/s | reader MB/s | of the disk "
          "| decoded MB/s | of the disk | decoded tokens/s |")  # fmt: skip
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for encoding in ("hidden", "hidden-fp8"):
        directory = Path(args.directory) / f"rates-{encoding}"
        job = job_for(rows, directory, shape_for(encoding, args.hidden_size, 0), vocab_size)
        seconds, size = write(job, target), size_of(directory)
        rounds = [cold_rates(directory, turn) for turn in range(args.repeat)]
        disk, reader, decoded = (
            size / median(times[way] for times in rounds) / 1e6 for way in ("disk", "meta", "cpu")
        )
        of_disk = {
            way: median(times["disk"] / times[way] for times in rounds) for way in ("meta", "cpu")
        }
        print(f"| {encoding} | {size / 1e9:.2f} | {size / tokens:,.0f} | "
              f"{size / seconds / 1e6:,.0f} | {disk:,.0f} | {reader:,.0f} | {of_disk['meta']:.0%} "
              f"| {decoded:,.0f} | {of_disk['cpu']:.0%} | {decoded * 1e6 * tokens / size:,.0f} |",
              flush=True)  # fmt: skip
        shutil.rmtree(directory)
    print(f"load average {os.getloadavg()[0]:.1f}")


def cold_rates(directory: Path, turn: int) -> dict[str, float]:
    """Seconds to read a cache in three ways, starting with a different one at each turn.

    The device `meta` stands for a GPU: it receives the bytes and computes nothing with them.
    """
    ways = ["disk", "meta", "cpu"]
    times = {}
    for way in ways[turn % 3 :] + ways[: turn % 3]:
        paths = shards(directory)
        forget(paths)
        times[way] = read_all(paths) if way == "disk" else feed(directory, tokens=8192, device=way)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, run in {"sizes": sizes, "rates": rates, "waiting": waiting, "tau": tau}.items():
        verb = verbs.add_parser(name, help=run.__doc__)
        verb.set_defaults(run=run)
        verb.add_argument("data", help="chats as JSONL")
        verb.add_argument("--model", default="smollm2-135m")
        if name == "sizes":
            verb.add_argument("--scratch", default="/tmp")
            continue
        verb.add_argument("directory", help="where caches and runs go")
        default_rows = {"rates": 1500, "waiting": 64, "tau": None}[name]
        verb.add_argument("--rows", type=int, default=default_rows, help="take only the first rows")
        if name == "rates":
            verb.add_argument("--hidden-size", type=int, default=576)
            verb.add_argument("--repeat", type=int, default=6, help="rounds")
            continue
        on_gpu = name == "tau"
        verb.add_argument("--recipe", default=f"recipes/smollm2_{'gpu' if on_gpu else 'cpu'}.yaml")
        verb.add_argument("--steps", type=int, default=None if on_gpu else 10)
        verb.add_argument("--batch-size", type=int, default=64 if on_gpu else 4)
        verb.add_argument("--override", dest="overrides", action="append", default=[])
        if on_gpu:
            default = ["hidden", "hidden-fp8", LIVE, "topk", "probs"]
            verb.add_argument("--encodings", nargs="+", default=default, choices=default)
            verb.add_argument("--seeds", nargs="+", type=int, default=[0], help="a run for each")
            verb.add_argument("--top-k", type=int, default=64)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
