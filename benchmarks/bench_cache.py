"""The offline cache: bytes, read and write rates, waiting time, and acceptance per encoding.

    python benchmarks/bench_cache.py sizes chats.jsonl        # an 8B shape on real chat lengths
    python benchmarks/bench_cache.py rates chats.jsonl DIR    # writer and reader against the disk
    python benchmarks/bench_cache.py waiting chats.jsonl DIR  # a CPU training run fed from a cache
    python benchmarks/bench_cache.py tau chats.jsonl DIR --recipe recipes/smollm2_gpu.yaml --steps N

`sizes` and `rates` need no target: states are random, lengths are those of the data. `tau` makes
one cache of hidden states with the real target, converts it, and trains one draft from each
encoding with the same steps (one GPU); mind the disk: `probs` at 16,384 takes 32 kB a supervised
token (`--rows`, `--encodings hidden,hidden-fp8,topk`). DIR must lie on the disk that is to be
measured.
"""

import argparse
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fledge.data.prepare import prepare_rows
from fledge.data.tokenise import TokeniseOptions
from fledge.models.resolve import local_model
from fledge.target.base import Eagle3TargetBackend, InputEmbedding, TargetInfo
from fledge.target.batch import Eagle3TargetBatch, _shift_left_with_zero
from fledge.target.cache import CachedEagle3TargetModel
from fledge.target.cache_format import FORMAT, Shape, seed_layout_bytes
from fledge.target.cache_manifest import dtype_name
from fledge.target.cache_precompute import CacheJob, begin_cache, plan_cache, run_job
from fledge.target.cache_shard import layout_of
from fledge.target.head import TargetHead
from fledge.train.batches import PackStream, RowView

ENCODINGS = ("hidden", "hidden-fp8", "probs", "topk")


class NoiseTarget(Eagle3TargetBackend):
    """Answers with random states at once: what remains is the cost of keeping them."""

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

    def generate_batch(
        self, input_ids, attention_mask, loss_mask, position_ids=None, seq_lens=None,
        doc_remaining=None,
    ) -> Eagle3TargetBatch:  # fmt: skip
        rows, width = input_ids.shape
        states = self._noise_ND[: rows * width].view(rows, width, -1)
        split = 3 * self._hidden
        return Eagle3TargetBatch(
            aux_hidden_states=states[..., :split],
            input_ids=_shift_left_with_zero(input_ids),
            attention_mask=attention_mask,
            loss_mask=_shift_left_with_zero(loss_mask),
            last_hidden_states=states[..., split:],
        )


def token_rows(data: str, model: str, max_length: int) -> RowView:
    options = TokeniseOptions(max_length=max_length)
    rows = prepare_rows([data], local_model(model, weights=False), options)
    return RowView(rows, np.arange(len(rows)))


def job_for(rows: RowView, directory: Path, shape: Shape, vocab_size: int) -> CacheJob:
    manifest = {
        "format": FORMAT, "encoding": shape.encoding, "dtype": dtype_name(shape.dtype),
        "top_k": shape.top_k or None, "supervised_only": False, "shard_size": 256,
        "rows": len(rows), "held_out_rows": 0, "hidden_size": shape.hidden_size,
        "vocab_size": vocab_size, "aux_layer_ids": [0, 1, 2], "vocabulary": None,
    }  # fmt: skip
    return CacheJob(directory, rows, shape, manifest)


def shape_for(encoding: str, hidden_size: int, width: int, top_k: int = 64) -> Shape:
    over_vocabulary = encoding in ("probs", "topk")
    return Shape(
        encoding, torch.bfloat16, hidden_size, width if over_vocabulary else 0,
        top_k if encoding == "topk" else 0,
    )  # fmt: skip


def sizes(args: argparse.Namespace) -> None:
    """Bytes of an 8B target (hidden 4096, draft vocabulary 32,000) on the data's own lengths."""
    rows = token_rows(args.data, args.model, 2048)
    tokens = int(rows.lengths.sum())
    seed = seed_layout_bytes(len(rows), 2048, 4096, 32_000)
    print(f"{len(rows):,} rows, {tokens:,} tokens (mean {tokens / len(rows):.0f}, 2,048 at most)")
    print("| encoding | bytes a token | MB a row | total GB | of the seed's padded rows |")
    print("|---|--:|--:|--:|--:|")
    print(f"| seed: probs, padded | {seed / tokens:,.0f} | {seed / len(rows) / 1e6:.1f} | "
          f"{seed / 1e9:,.1f} | 100 % |")  # fmt: skip
    parts = [[rows[i] for i in range(b, min(b + 256, len(rows)))] for b in range(0, len(rows), 256)]
    for encoding in ENCODINGS:
        total = sum(layout_of(shape_for(encoding, 4096, 32_000), part).n_bytes for part in parts)
        print(f"| {encoding} | {total / tokens:,.0f} | {total / len(rows) / 1e6:.1f} | "
              f"{total / 1e9:,.1f} | {total / seed:.1%} |")  # fmt: skip
    few = RowView(rows._rows, np.arange(48))
    target = NoiseTarget(4096, 1000, torch.bfloat16)
    for encoding in ("hidden", "hidden-fp8"):
        directory = Path(args.scratch) / f"sizes-{encoding}"
        shutil.rmtree(directory, ignore_errors=True)
        write(few, directory, shape_for(encoding, 4096, 0), target)
        found = sum(path.stat().st_size for path in directory.glob("shard-*"))
        share = found / seed_layout_bytes(len(few), 2048, 4096, 32_000)
        print(f"measured on files, first {len(few)} rows, {encoding}: {share:.1%}")
        shutil.rmtree(directory)


def write(rows: RowView, directory: Path, shape: Shape, target: NoiseTarget) -> float:
    """Seconds to write a cache."""
    job = job_for(rows, directory, shape, len(target._weight_VD))
    plan = plan_cache(job, head_bytes=0)
    begin_cache(job, target)
    begin = time.perf_counter()
    run_job(job, plan, target)
    return time.perf_counter() - begin


def forget(paths: list[Path]) -> None:
    """Push files out of the page cache, so that the next read comes from the disk."""
    for path in paths:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(paths: list[Path]) -> float:
    """Seconds to read files from end to end, 8 MB at a time."""
    buffer = bytearray(8 << 20)
    begin = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass
    return time.perf_counter() - begin


def feed(directory: Path, *, tokens: int, epochs: int = 1) -> float:
    """Seconds in which the reader delivers every batch of shuffled packs, nobody training."""
    target = CachedEagle3TargetModel(directory)
    rows = RowView(target.rows(reading=True), np.arange(len(target.store)))
    stream = PackStream(rows, tokens=tokens, pad_id=0, seed=0, epochs=epochs)
    begin = time.perf_counter()
    for step in stream.prefetched(0, 2):
        for batch in step.micro:
            if batch is not None:
                target.generate_batch(
                    batch.input_ids, batch.attention_mask, batch.loss_mask, batch.position_ids,
                    batch.seq_lens, batch.doc_remaining,
                )  # fmt: skip
    seconds = time.perf_counter() - begin
    target.close()
    return seconds


def rates(args: argparse.Namespace) -> None:
    """Write a cache, then read it from a cold disk: end to end, and as training would."""
    rows = token_rows(args.data, args.model, 2048)
    rows = RowView(rows._rows, np.arange(min(args.rows, len(rows))))
    target = NoiseTarget(args.hidden_size, 1000, torch.bfloat16)
    print("| encoding | GB | bytes a token | write MB/s | disk MB/s | reader MB/s | of the disk |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for encoding in ("hidden", "hidden-fp8"):
        directory = Path(args.directory) / f"rates-{encoding}"
        shutil.rmtree(directory, ignore_errors=True)
        seconds = write(rows, directory, shape_for(encoding, args.hidden_size, 0), target)
        paths = sorted(directory.glob("shard-*"))
        size = sum(path.stat().st_size for path in paths)
        found = []
        for _ in range(args.repeat):  # neither way always goes first
            forget(paths)
            disk = read_all(paths)
            forget(paths)
            found.append((disk, feed(directory, tokens=8192)))
        disk, reader = (sorted(values)[len(found) // 2] for values in zip(*found, strict=True))
        print(f"| {encoding} | {size / 1e9:.2f} | {size / int(rows.lengths.sum()):,.0f} | "
              f"{size / seconds / 1e6:,.0f} | {size / disk / 1e6:,.0f} | "
              f"{size / reader / 1e6:,.0f} | {disk / reader:.0%} |")  # fmt: skip
        shutil.rmtree(directory)


class _Log:
    """An observer that keeps the metrics."""

    def __init__(self) -> None:
        self.lines, self.evaluations = [], []

    def note(self, text: str) -> None:
        print(text)

    def logged(self, values: dict) -> None:
        self.lines.append(values)

    def evaluated(self, values: dict) -> None:
        self.evaluations.append(values)


def train_from(
    cache: Path, recipe: str, run: Path, overrides: list[str], exact: Path | None = None
) -> tuple[_Log, float]:
    """Train from a cache; the log, and the draft's tau on the held-out states of `exact`."""
    from fledge.train.evaluate import evaluate
    from fledge.train.fit import fit
    from fledge.train.recipe import load_recipe
    from fledge.train.setup import set_up

    shutil.rmtree(run, ignore_errors=True)
    given = [
        "target.backend=cache", f"target.cached_target_path={cache}", f"run.output_dir={run}",
        *overrides,
    ]  # fmt: skip
    log, found = _Log(), 0.0
    training = set_up(load_recipe(recipe, given))
    fit(training, log)
    parts = training.parts
    if exact is not None:  # the same yardstick for all: states as the target gave them
        with CachedEagle3TargetModel(exact, device=parts.device) as target:
            found = evaluate(replace(parts, target=target), training.held_out)["tau"]
    parts.target.close()
    return log, found


def first_rows(args: argparse.Namespace) -> None:
    """Cut the data to its first `--rows` chats."""
    if args.rows is None:
        return
    few = Path(args.directory) / "few.jsonl"
    few.parent.mkdir(parents=True, exist_ok=True)
    with open(args.data) as lines:
        few.write_text("".join(line for line, _ in zip(lines, range(args.rows), strict=False)))
    args.data = str(few)


def precompute(args: argparse.Namespace, encoding: str, *more: str) -> tuple[Path, float]:
    from fledge.precompute_eagle3 import main

    cache = Path(args.directory) / f"cache-{encoding}"
    shutil.rmtree(cache, ignore_errors=True)
    begin = time.perf_counter()
    code = main(
        [
            "--target-model", args.model, "--input-data", args.data, "--output-dir", str(cache),
            "--seq-length", str(args.max_length), "--encoding", encoding, "--dtype", args.dtype,
            "--batch-size", str(args.batch_size), *more,
        ]
    )  # fmt: skip
    assert code == 0
    return cache, time.perf_counter() - begin


def waiting(args: argparse.Namespace) -> None:
    """Share of a training step that is spent on the cached target (SmolLM2 CPU recipe)."""
    first_rows(args)
    cache, seconds = precompute(args, "hidden")
    print(f"precompute: {seconds:.1f} s")
    overrides = [
        f"training.steps={args.steps}", "tracking.every_steps=5", "evaluation.every_steps=100000",
        "data.valid_rows=0",
    ]  # fmt: skip
    log, _ = train_from(cache, args.recipe, Path(args.directory) / "run", overrides)
    for line in log.lines:
        print(f"step {line['step']}: {line['tokens_per_s']:,.0f} tokens/s, waiting for the target "
              f"{line['target_share']:.2%}")  # fmt: skip


def tau(args: argparse.Namespace) -> None:
    """One draft per encoding from one set of states: same rows, same steps, same seed."""
    from fledge.cli.main import app

    first_rows(args)
    hidden, seconds = precompute(args, "hidden")
    tokens = int(CachedEagle3TargetModel(hidden).store.lengths.sum())
    print(f"target over {tokens:,} tokens: {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s")
    convert = {
        "hidden": [],
        "hidden-fp8": [],
        "probs": ["--draft-vocab-size", str(args.draft_vocab_size)],
        "topk": ["--draft-vocab-size", str(args.draft_vocab_size), "--top-k", str(args.top_k)],
    }
    rows = []
    for encoding in args.encodings.split(","):
        flags = convert[encoding]
        cache = hidden if encoding == "hidden" else Path(args.directory) / f"cache-{encoding}"
        if cache != hidden:
            shutil.rmtree(cache, ignore_errors=True)
            words = ["cache", "convert", str(hidden), str(cache), "--encoding", encoding, *flags]
            app(args=words, standalone_mode=False)
        overrides = [f"draft.draft_vocab_size={args.draft_vocab_size}", *args.overrides]
        if args.steps:
            overrides.append(f"training.steps={args.steps}")
        run = Path(args.directory) / f"run-{encoding}"
        log, exact = train_from(cache, args.recipe, run, overrides, exact=hidden)
        size = sum(path.stat().st_size for path in cache.glob("shard-*"))
        rows.append((encoding, size / tokens, exact, log.lines[-1]))
        if cache != hidden:
            shutil.rmtree(cache)
    best = rows[0][2]
    print("| encoding | bytes a token | held-out tau | against hidden | tok/s | waiting |")
    print("|---|--:|--:|--:|--:|--:|")
    for encoding, per_token, found, line in rows:
        print(f"| {encoding} | {per_token:,.0f} | {found:.4f} | {found / best - 1:+.2%} | "
              f"{line['tokens_per_s']:,.0f} | {line['target_share']:.1%} |")  # fmt: skip


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
        few = {"rates": 4000, "waiting": 64, "tau": None}[name]
        verb.add_argument("--rows", type=int, default=few, help="take only the first rows")
        if name == "rates":
            verb.add_argument("--hidden-size", type=int, default=576)
            verb.add_argument("--repeat", type=int, default=3)
            continue
        on_gpu = name == "tau"
        verb.add_argument("--recipe", default=f"recipes/smollm2_{'gpu' if on_gpu else 'cpu'}.yaml")
        verb.add_argument("--steps", type=int, default=None if on_gpu else 10)
        verb.add_argument("--dtype", default="bf16" if on_gpu else "fp32")
        verb.add_argument("--max-length", type=int, default=640)
        verb.add_argument("--batch-size", type=int, default=64 if on_gpu else 4)
        verb.add_argument("--draft-vocab-size", type=int, default=16_384)
        verb.add_argument("--top-k", type=int, default=64)
        verb.add_argument("--encodings", default=",".join(ENCODINGS), help="in this order")
        verb.add_argument("--override", dest="overrides", action="append", default=[])
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
