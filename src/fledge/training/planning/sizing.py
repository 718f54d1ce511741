"""Sizes a cluster for a recipe: GPUs for capture and for training, traffic on every link, hours and
cost. Only the recipe is needed: nothing is downloaded, and no GPU is used.

The speed of targets and drafts of three sizes was measured on one H200. Other sizes are scaled from
these by operations per token of the active parameters; a plan reports the factor. What workers,
ranks and links can carry bounds the speed of all of them together (`Pipeline`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fledge.core.errors import BadInput, nearest
from fledge.methods.shared.draft import DraftModel
from fledge.models.shapes import SIZES, STORED_BYTES, shape_of
from fledge.recipe.schema import Recipe
from fledge.target.kinds import model_name
from fledge.training.planning.cost import USABLE, DraftMemory, StepMemory, typical_rows
from fledge.training.planning.shape_plan import (
    GPUS_OF_A_MACHINE,
    LINK_BYTES,
    TargetShape,
    draft_without_memory,
)


@dataclass(frozen=True)
class Measured:
    """Operations per token, and the seconds that they took."""

    operations: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.operations / self.seconds


# EAGLE-3 steps of 135M, 1B and 8B shapes (benchmarks/results/train_step.md): their targets, and the
# rest of a rank's step, at 7 depths with 60 % of the tokens supervised.
TARGETS = (
    Measured(0.221e9, 0.015 / 16_384),
    Measured(2.080e9, 0.0593 / 16_384),
    Measured(14.50e9, 0.1906 / 8192),
)
STEPS = (
    Measured(0.3869e9, 0.074 / 16_384),
    Measured(3.823e9, 0.1360 / 16_384),
    Measured(10.270e9, 0.1638 / 8192),
)
FP8 = 0.1189 / 0.1906  # time of the 8B target in fp8, relative to bfloat16

SAMPLES = (1_000_000, 100_000_000)
_STOCK = 2  # requests that a rank wants in flight, so that one late answer does not stop all ranks
_GOOD_ENOUGH = 1.03  # up to this factor of the lowest cost per token, a smaller cluster is chosen


@dataclass(frozen=True)
class Gpu:
    """A GPU model."""

    gib: float
    speed: float  # relative to an H200, by the data sheets' dense bfloat16

    @property
    def usable_bytes(self) -> float:
        return USABLE * self.gib * 2**30


GPUS = {"h200": Gpu(140, 1.0), "h100": Gpu(80, 1.0), "a100": Gpu(80, 0.32), "b200": Gpu(179, 2.27)}


@dataclass(frozen=True)
class Given:
    """The inputs of a sizing that a recipe does not contain."""

    gpu: Gpu = GPUS["h200"]
    link_bytes: float = 3e9  # per second, into one rank
    gpu_hour: float = 3.0  # price of a GPU hour
    sample_tokens: int = 1024
    ranks: int = 0  # 0: choose the number
    target_tokens_s: float | None = None  # of one worker; None: estimated
    train_tokens_s: float | None = None  # of one rank; None: estimated


def seconds_for(operations: float, measured: Sequence[Measured]) -> float:
    """Seconds per token on an H200, given the operations per token. The rate is interpolated
    between the measured sizes; beyond them it is that of the nearest."""
    sizes = [math.log(point.operations) for point in measured]
    rates = [math.log(point.rate) for point in measured]
    return float(operations / np.exp(np.interp(math.log(operations), sizes, rates)))


def gpu_of(name: str, gib: float | None = None) -> Gpu:
    """A GPU model by name, optionally with another memory size."""
    if name.lower() not in GPUS:
        raise BadInput(f"no GPU {name!r}", where="--gpu", fix=nearest(name, [*GPUS]))
    gpu = GPUS[name.lower()]
    return gpu if gib is None else replace(gpu, gib=gib)


@dataclass(frozen=True)
class Load:
    """What one batch requires of a cluster, independent of the cluster's size."""

    model: str
    target: TargetShape
    tokens: int  # per batch
    token_bytes: int  # of an answer, per token
    worker_gpus: int
    worker_bytes: int  # on each GPU of a worker
    rank_bytes: int  # on each GPU that trains
    target_s: float  # seconds per token of one worker
    step_s: float  # seconds per token of one rank
    target_scale: float | None  # operations relative to the 8B shape; None: the speed was given
    step_scale: float | None

    @classmethod
    def of(cls, recipes: Sequence[Recipe], given: Given, size: str = "") -> "Load":
        """The load of a recipe's drafts, for which the target answers once, on the recipe's own
        target or on a well-known one of the given `size`."""
        recipe, (name, config) = recipes[0], _target(recipes[0], size)
        target, drafts = TargetShape.of(config), [draft_without_memory(r, config) for r in recipes]
        packs, tokens = recipe.training.micro_batch, recipe.packing.tokens
        rows = typical_rows(packs, tokens, document=given.sample_tokens)
        width = _weight_bytes(recipe, name)
        gpus, worker_bytes = _worker(recipe, target, width, given.gpu)
        target_s, target_scale = _target_s(target, width, gpus, given)
        steps = [StepMemory.of(d, [rows], r) for d, r in zip(drafts, recipes, strict=True)]
        step_s, step_scale = _step_s([step.cost.operations / rows.tokens for step in steps], given)
        return cls(
            model=name,
            target=target,
            tokens=rows.tokens,
            token_bytes=max(_token_bytes(recipe, draft) for draft in drafts),
            worker_gpus=gpus,
            worker_bytes=worker_bytes,
            rank_bytes=sum(map(_rank_bytes, recipes, drafts, steps)),
            target_s=target_s,
            step_s=step_s,
            target_scale=target_scale,
            step_scale=step_scale,
        )


def _target(recipe: Recipe, size: str) -> tuple[str, Any]:
    if not size:
        name = model_name(recipe.target)
        return name, shape_of(name, trust_remote_code=recipe.target.trust_remote_code)
    if size.lower() not in SIZES:
        fix = nearest(size, [*SIZES])
        raise BadInput(f"no target of size {size!r}", where="--target-shape", fix=fix)
    name = SIZES[size.lower()]
    return name, shape_of(name)


def _weight_bytes(recipe: Recipe, name: str) -> int:
    if getattr(recipe.target, "dtype", "auto") == "fp8":
        return 1
    return STORED_BYTES.get(name, 2)


def _token_bytes(recipe: Recipe, draft: DraftModel) -> int:
    """Bytes per token of an answer in bfloat16: the draft's aux layers and its supervision."""
    config = draft.config
    sizes = {"probs": config.draft_vocab_size, "logits": config.vocab_size}
    supervision = getattr(recipe.target, "supervision", "hidden")
    aux_size = config.num_aux_hidden_states * config.target_hidden_size
    return int(2 * (aux_size + sizes.get(supervision, config.target_hidden_size)))


def _worker(recipe: Recipe, target: TargetShape, width: int, gpu: Gpu) -> tuple[int, int]:
    """The number of GPUs of a target worker, and the bytes of weights and one pass on each: the
    recipe's tensor-parallel size, doubled until they fit."""
    section: Any = recipe.target
    worker: dict[str, Any] = getattr(section, "worker", {})
    tp_size: int = worker.get("tp_size", getattr(section, "tp_size", 1))
    pass_bytes = recipe.training.micro_batch * recipe.packing.tokens * target.widest * 2
    gpus, total = tp_size, target.weights * width + pass_bytes
    while total / gpus > gpu.usable_bytes:
        gpus *= 2
    return gpus, int(total / gpus)


def _target_s(
    target: TargetShape, width: int, gpus: int, given: Given
) -> tuple[float, float | None]:
    """Seconds per token of a worker, and its operations relative to the 8B target."""
    if given.target_tokens_s:
        return 1 / given.target_tokens_s, None
    text, operations = target.config, target.operations(given.sample_tokens / 2)
    seconds = seconds_for(operations, TARGETS) / given.gpu.speed / gpus
    seconds *= FP8 if width == 1 else 1.0
    if gpus > 1:  # two all-reduces per layer, which do not overlap with computation
        reduced = 4 * text.num_hidden_layers * text.hidden_size * 2
        seconds += reduced / LINK_BYTES[gpus > GPUS_OF_A_MACHINE]
    return seconds, operations / TARGETS[-1].operations


def _step_s(operations: Sequence[float], given: Given) -> tuple[float, float | None]:
    """Seconds per token of a rank, and its operations relative to the 8B shape. Several drafts, of
    which each has its `operations` per token, take their steps in turn."""
    if given.train_tokens_s:
        return 1 / given.train_tokens_s, None
    seconds = sum(seconds_for(count, STEPS) for count in operations)
    return seconds / given.gpu.speed, sum(operations) / STEPS[-1].operations


def _rank_bytes(recipe: Recipe, draft: DraftModel, step: StepMemory) -> int:
    training = recipe.training
    return DraftMemory.of(draft, training).bytes(shard=training.shard, width=2) + step.bytes()


@dataclass(frozen=True)
class Pipeline:
    """A cluster's seconds per batch, and how many of each part there are."""

    target_s: float  # of a worker, to answer about one batch
    step_s: float  # of a rank, to train on one batch
    carry_s: float = 0.0  # from worker to rank
    workers: int = 1
    ranks: int = 1
    prefetch: int = 2  # requests in flight at each worker, over all ranks

    @property
    def ahead(self) -> int:
        """The maximum number of requests of one rank in flight."""
        return -(-self.prefetch * self.workers // self.ranks)

    @property
    def period_s(self) -> float:
        """Seconds per step: the most that workers, ranks, links or the requests in flight need. For
        one rank steps are a cycle of waits, and these are all possible cycles."""
        shared = self.ranks * self.target_s / self.workers
        round_trip_s = self.target_s + self.carry_s
        return max(shared, self.step_s, self.carry_s, round_trip_s / self.ahead)

    @property
    def waiting_share(self) -> float:
        """The share of time in which the ranks have nothing to train on."""
        return 1 - self.step_s / self.period_s


@dataclass(frozen=True)
class Sizing:
    """A cluster for a load."""

    load: Load
    given: Given
    pipeline: Pipeline

    @property
    def gpus(self) -> int:
        return self.pipeline.workers * self.load.worker_gpus + self.pipeline.ranks

    @property
    def tokens_s(self) -> float:
        return self.pipeline.ranks * self.load.tokens / self.pipeline.period_s

    def hours(self, samples: int) -> float:
        """Hours to train on `samples` samples, each counted as often as it is trained on."""
        return samples * self.given.sample_tokens / self.tokens_s / 3600

    def to_json(self) -> dict[str, Any]:
        load, given, size = self.load, self.given, self.load.token_bytes
        workers, ranks = self.pipeline.workers, self.pipeline.ranks
        return {
            "model": load.model,
            "parameters": load.target.weights,
            "active_parameters": load.target.active + load.target.head,
            "target_workers": workers,
            "gpus_per_worker": load.worker_gpus,
            "capture_gpus": workers * load.worker_gpus,
            "train_gpus": ranks,
            "prefetch": self.pipeline.prefetch,
            "bytes_per_capture_gpu": load.worker_bytes,
            "bytes_per_train_gpu": load.rank_bytes,
            "worker_tokens_per_s": 1 / load.target_s,
            "rank_tokens_per_s": 1 / load.step_s,
            "worker_operations": load.target_scale,
            "rank_operations": load.step_scale,
            "tokens_per_s": self.tokens_s,
            "waiting_share": self.pipeline.waiting_share,
            "busy_share": self.tokens_s * load.target_s / workers,
            "bytes_per_token": size,
            "bytes_per_s": {
                "worker_to_store": self.tokens_s / workers * size,
                "store_to_rank": self.tokens_s / ranks * size,
                "store_to_ranks": self.tokens_s * size,
                "link": given.link_bytes,
                "cache_written": workers / load.target_s * size,
                "cache_read": ranks / load.step_s * size,
            },
            "samples": [
                {
                    "samples": samples,
                    "tokens": samples * given.sample_tokens,
                    "hours": self.hours(samples),
                    "cost": self.hours(samples) * self.gpus * given.gpu_hour,
                    "cache_bytes": samples * given.sample_tokens * size,
                }
                for samples in SAMPLES
            ],
        }


def size_cluster(recipes: Sequence[Recipe], given: Given, size: str = "") -> Sizing:
    """The smallest cluster with about the lowest cost per token: up to one machine of ranks, or the
    given number of ranks, with a matching number of workers."""
    load = Load.of(recipes, given, size)
    rank_counts = (given.ranks,) if given.ranks else range(1, GPUS_OF_A_MACHINE + 1)
    prefetch = getattr(recipes[0].target, "prefetch", 2)
    pipeline = Pipeline(
        target_s=load.tokens * load.target_s,
        step_s=load.tokens * load.step_s,
        carry_s=load.tokens * load.token_bytes / given.link_bytes,
    )
    sizings = []
    for ranks in rank_counts:
        needed = ranks * load.target_s / load.step_s  # workers that keep these ranks busy
        for workers in {max(1, math.floor(needed)), math.ceil(needed)}:
            tuned = replace(pipeline, ranks=ranks, workers=workers, prefetch=prefetch)
            while tuned.ahead < _STOCK:
                tuned = replace(tuned, prefetch=2 * tuned.prefetch)
            sizings.append(Sizing(load, given, tuned))
    best = min(sizing.gpus / sizing.tokens_s for sizing in sizings)
    good = (sizing for sizing in sizings if sizing.gpus / sizing.tokens_s <= _GOOD_ENOUGH * best)
    return min(good, key=lambda sizing: sizing.gpus)
