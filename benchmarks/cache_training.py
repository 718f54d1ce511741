"""Training from caches: how long a step waits, and what each encoding costs in draft quality.

The verbs `waiting` and `tau` of `bench_cache.py`. Chats are split once; the live run, the caches
and the vocabularies then see the same rows, and all drafts are measured on the target's exact
states for the held-out rows.
"""

import argparse
import gzip
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from cache_io import feed, forget, shards, size_of, write
from fledge.core.distributed import pick_device
from fledge.core.errors import BadInput
from fledge.core.files import write_text
from fledge.data.rows import MOST_HELD_OUT
from fledge.recipe.schema import Recipe, load_recipe
from fledge.target.cache.backend import CachedEagle3TargetModel
from fledge.target.cache.job import CacheOptions, convert_job
from fledge.training.fit import evaluate, fit
from fledge.training.precompute import cache_dtype, recipe_job, recipe_target
from fledge.training.setup import set_up

LIVE = "live"  # no cache: the target answers during training
_NEVER = 10**9  # an interval that no run reaches


class _Log:
    """An observer that records the metrics."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def note(self, text: str) -> None:
        print(text, flush=True)

    def logged(self, values: dict[str, Any]) -> None:
        self.lines.append(values)

    def evaluated(self, values: dict[str, Any]) -> None:
        length = values["evaluation"]["acceptance_length"]
        print(f"step {values['step']}: acceptance length {length:.3f}", flush=True)


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    lines: list[dict[str, Any]]  # its metrics
    tau: float  # of its last draft, on the held-out states of the exact cache
    acceptance_length: float


@dataclass(frozen=True)
class Cached:
    """How a cache was written and read."""

    n_bytes: int
    tokens: int
    write_s: float
    read_s: float


def split_chats(data: str, directory: Path, rows: int | None, held_out: int) -> tuple[Path, Path]:
    """Write the first `rows` chats to two files: those to train on, and a held-out sample."""
    with gzip.open(data, "rt") if data.endswith(".gz") else open(data) as handle:
        chats = [line for line, _ in zip(handle, range(rows or _NEVER), strict=False)]
    drawn = set(random.Random(0).sample(range(len(chats)), min(held_out, len(chats) // 4)))
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    for path, chosen in zip(paths, (False, True), strict=True):
        path.write_text("".join(chat for i, chat in enumerate(chats) if (i in drawn) is chosen))
    return paths


def overrides_for(args: argparse.Namespace, *given: str) -> list[str]:
    """The overrides of a verb, including its data; the user's overrides come after `given`."""
    words = [f"target.model={args.model}", f"evaluation.every_steps={_NEVER}",
             f"checkpoint.every_steps={_NEVER}",
             "draft.layers_from_target=false",  # a cache holds no layers
             *given, *args.overrides]  # fmt: skip
    if args.steps:
        words.append(f"training.steps={args.steps}")
    valid_rows = load_recipe(args.recipe, words).data.valid_rows
    held_out = MOST_HELD_OUT if valid_rows is None else valid_rows
    train, valid = split_chats(args.data, Path(args.directory), args.rows, held_out)
    words.append(f"data.train={train}")
    return [*words, f"data.valid={valid}"] if valid.stat().st_size else words


def make_cache(
    recipe: Recipe, directory: Path, batch_size: int, device: torch.device
) -> tuple[float, int]:
    """Write the target's answers for all rows to a cache of hidden states; (seconds, tokens)."""
    options = CacheOptions(dtype=cache_dtype(recipe, device), batch_size=batch_size)
    job = recipe_job(recipe, directory, options)
    with recipe_target(recipe, device) as target:
        return write(job, target), sum(len(row.input_ids) for row in job.rows)


def train(recipe: str, words: list[str], run: Path, exact: Path | None = None) -> Trained:
    """Train a draft and measure it on the held-out states of the cache `exact`.

    Only the metrics of the run are kept.
    """
    shutil.rmtree(run, ignore_errors=True)
    training = set_up(load_recipe(recipe, [*words, f"run.output_dir={run}"]))
    log, figures = _Log(), {"tau": 0.0, "acceptance_length": 0.0}
    fit(training, log)
    parts = training.parts
    parts.target.close()
    if exact is not None:
        with CachedEagle3TargetModel(exact, device=parts.device) as target:
            figures = evaluate(replace(parts, target=target), training.held_out)
    shutil.copy(run / "metrics.jsonl", run.with_suffix(".jsonl"))
    shutil.rmtree(run)
    return Trained(log.lines, figures["tau"], figures["acceptance_length"])


def from_cache(words: list[str], cache: Path) -> list[str]:
    return [*words, "target.backend=cache", "target.model=null",
            f"target.cached_target_path={cache}"]  # fmt: skip


def waiting(args: argparse.Namespace) -> None:
    """Share of a training step that is spent on the cached target (SmolLM2 CPU recipe)."""
    words = overrides_for(args, "data.valid_rows=0", "tracking.every_steps=5")
    recipe, cache = load_recipe(args.recipe, words), Path(args.directory) / "cache-hidden"
    device = pick_device(recipe.training.device)
    seconds, tokens = make_cache(recipe, cache, args.batch_size, device)
    print(f"target over {tokens:,} tokens: {seconds:.1f} s")
    trained = train(args.recipe, from_cache(words, cache), Path(args.directory) / "run-waiting")
    for line in trained.lines:
        print(f"step {line['step']}: {line['tokens_per_s']:,.0f} tokens/s, waiting for the target "
              f"{line['target_share']:.2%}")  # fmt: skip


def tau(args: argparse.Namespace) -> None:
    """One draft per encoding, and one from the live target: same rows, steps, seeds, yardstick.

    The table is printed, and written to DIR/tau.md, after every encoding. An encoding that the
    disk has no room for is left out.
    """
    words = overrides_for(args)
    recipe, directory = load_recipe(args.recipe, words), Path(args.directory)
    device, hidden = pick_device(recipe.training.device), directory / "cache-hidden"
    capture_s, tokens = make_cache(recipe, hidden, args.batch_size, device)
    print(f"target over {tokens:,} tokens: {capture_s:.1f} s", flush=True)
    table: list[str] = []
    first: float | None = None
    for encoding in args.encodings:
        cache = directory / f"cache-{encoding}"
        try:
            cached = None
            if cache == hidden:
                cached = timed(cache, tokens, capture_s, recipe.packing.tokens, device)
            elif encoding != LIVE:
                convert_s = convert(hidden, cache, encoding, recipe, args, device)
                cached = timed(cache, tokens, convert_s, recipe.packing.tokens, device)
            source = words if cached is None else from_cache(words, cache)
            runs = [
                train(
                    args.recipe,
                    [*source, f"training.seed={seed}", f"packing.seed={seed}"],
                    directory / f"run-{encoding}-{seed}",
                    exact=hidden,
                )
                for seed in args.seeds
            ]
        except (BadInput, OSError) as error:  # most likely the disk is full; others may fit
            print(f"{encoding} is left out: {error}", flush=True)
            continue
        finally:
            if cache != hidden:
                shutil.rmtree(cache, ignore_errors=True)
        first = fmean(run.tau for run in runs) if first is None else first
        table.append(_line(encoding, cached, runs, first))
        text = "\n".join([*_HEAD, *table]) + "\n"
        write_text(directory / "tau.md", text)
        print(text, flush=True)


def convert(
    source: Path, cache: Path, encoding: Any, recipe: Recipe, args: argparse.Namespace,
    device: torch.device,
) -> float:  # fmt: skip
    """Seconds to write a cache of hidden states in another encoding."""
    over_vocabulary = encoding in ("probs", "topk")
    with CachedEagle3TargetModel(source, device=device) as target:
        options = CacheOptions(
            encoding=encoding,
            dtype=target.shape.dtype,
            top_k=args.top_k if encoding == "topk" else None,
            batch_size=args.batch_size,
        )
        size = recipe.draft.draft_vocab_size if over_vocabulary else None
        return write(convert_job(target, cache, options, draft_vocab_size=size), target)


def timed(
    cache: Path, tokens: int, write_s: float, pack_tokens: int, device: torch.device
) -> Cached:
    forget(shards(cache))
    return Cached(size_of(cache), tokens, write_s, feed(cache, tokens=pack_tokens, device=device))


_HEAD = [
    "| trained from | bytes a token | write MB/s | tokens/s | read MB/s | tokens/s | held-out tau "
    "| against the first | acceptance length | training tokens/s | waiting |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
]


def _line(encoding: str, cached: Cached | None, runs: list[Trained], first: float) -> str:
    """One row of the table; `write` is the target's work for hidden, a conversion for the rest."""
    cells = ["", "", "", "", ""]
    if cached is not None:
        cells = [f"{cached.n_bytes / cached.tokens:,.0f}"]
        for seconds in (cached.write_s, cached.read_s):
            cells += [f"{cached.n_bytes / seconds / 1e6:,.0f}", f"{cached.tokens / seconds:,.0f}"]
    speed, share = (
        fmean(run.lines[-1][name] for run in runs) for name in ("tokens_per_s", "target_share")
    )
    mean_tau, taus = fmean(run.tau for run in runs), " ".join(f"{run.tau:.4f}" for run in runs)
    cells += [
        f"{mean_tau:.4f}" if len(runs) == 1 else f"{mean_tau:.4f} ({taus})",
        f"{mean_tau / first - 1:+.2%}",
        f"{fmean(run.acceptance_length for run in runs):.3f}",
        f"{speed:,.0f}",
        f"{share:.1%}",
    ]
    return f"| {encoding} | {' | '.join(cells)} |"
