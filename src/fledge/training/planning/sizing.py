"""Sizes a cluster for a recipe: GPUs for capture and for training, hours and cost. Only the recipe
is needed: nothing is downloaded, and no GPU is used.

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
from fledge.models.shapes import SIZES, STORED_BYTES, shape_of
from fledge.recipe.schema import Recipe
from fledge.target.kinds import model_name
from fledge.training.planning.shape_plan import (
    GPUS_OF_A_MACHINE,
    TargetShape,
    draft_without_memory,
)
from fledge.training.planning.step_cost import USABLE, DraftMemory, StepMemory, typical_rows

# (operations per token, seconds that they took) of EAGLE-3 steps of 135M, 1B and 8B shapes
# (benchmarks/results/train_step.md): their targets, and the rest of a rank's step, at 7 depths with
# 60 % of the tokens supervised.
TARGETS = (
    (0.221e9, 0.015 / 16_384),
    (2.080e9, 0.0593 / 16_384),
    (14.50e9, 0.1906 / 8192),
)
STEPS = (
    (0.3869e9, 0.074 / 16_384),
    (3.823e9, 0.1360 / 16_384),
    (10.270e9, 0.1638 / 8192),
)
FP8 = 0.1189 / 0.1906  # time of the 8B target in fp8, relative to bfloat16

SAMPLES = (1_000_000, 100_000_000)
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


def seconds_for(operations: float, measured: Sequence[tuple[float, float]]) -> float:
    """Seconds per token on an H200, given the operations per token. The rate is interpolated
    between the measured sizes; beyond them it is that of the nearest."""
    sizes = [math.log(count) for count, _ in measured]
    rates = [math.log(count / seconds) for count, seconds in measured]
    return float(operations / np.exp(np.interp(math.log(operations), sizes, rates)))


def gpu_of(name: str, gib: float | None = None) -> Gpu:
    """A GPU model by name, optionally with another memory size."""
    if name.lower() not in GPUS:
        raise BadInput(f"no GPU {name!r}", where="--gpu", fix=nearest(name, [*GPUS]))
    gpu = GPUS[name.lower()]
    return gpu if gib is None else replace(gpu, gib=gib)


@dataclass(frozen=True)
class Load:
    """What one token requires of a cluster, independent of the cluster's size."""

    model: str
    target: TargetShape
    token_bytes: int  # of an answer
    worker_gpus: int
    worker_bytes: int  # on each GPU of a worker
    rank_bytes: int  # on each GPU that trains
    target_s: float  # seconds of one worker
    step_s: float  # seconds of one rank
    target_scale: float | None  # operations relative to the 8B shape; None: the speed was given
    step_scale: float | None

    @classmethod
    def of(cls, recipes: Sequence[Recipe], given: Given, size: str = "") -> "Load":
        """The load of a recipe's drafts, for which the target answers once, on the recipe's own
        target or on a well-known one of the given `size`."""
        recipe, section = recipes[0], recipes[0].target
        if size and size.lower() not in SIZES:
            fix = nearest(size, [*SIZES])
            raise BadInput(f"no target of size {size!r}", where="--target-shape", fix=fix)
        name = SIZES[size.lower()] if size else model_name(section)
        config = shape_of(name, trust_remote_code=not size and section.trust_remote_code)
        target, drafts = TargetShape.of(config), [draft_without_memory(r, config) for r in recipes]
        fp8 = getattr(section, "dtype", "auto") == "fp8"
        width = 1 if fp8 else STORED_BYTES.get(name, 2)
        rows = typical_rows(
            recipe.training.micro_batch, recipe.packing.tokens, document=given.sample_tokens
        )
        # the recipe's tensor-parallel size, doubled until weights and one pass fit
        worker_bytes = target.weights * width + rows.tokens * target.widest * 2
        worker: dict[str, Any] = getattr(section, "worker", {})
        gpus: int = worker.get("tp_size", getattr(section, "tp_size", 1))
        while worker_bytes / gpus > given.gpu.usable_bytes:
            gpus *= 2
        steps = [StepMemory.of(d, [rows], r) for d, r in zip(drafts, recipes, strict=True)]
        operations = target.operations(given.sample_tokens / 2)
        target_s = seconds_for(operations, TARGETS) / given.gpu.speed / gpus
        target_s = target_s * (FP8 if width == 1 else 1.0) + target.reducing_s(gpus)
        # several drafts take their steps in turn
        step_operations = [step.cost.operations / rows.tokens for step in steps]
        step_s = sum(seconds_for(count, STEPS) for count in step_operations) / given.gpu.speed
        supervision = getattr(section, "supervision", "hidden")
        return cls(
            model=name,
            target=target,
            token_bytes=max(_token_bytes(draft.config, supervision) for draft in drafts),
            worker_gpus=gpus,
            worker_bytes=int(worker_bytes / gpus),
            rank_bytes=sum(
                DraftMemory.of(d, r.training).bytes(shard=r.training.shard, width=2) + step.bytes()
                for d, r, step in zip(drafts, recipes, steps, strict=True)
            ),
            target_s=1 / given.target_tokens_s if given.target_tokens_s else target_s,
            step_s=1 / given.train_tokens_s if given.train_tokens_s else step_s,
            target_scale=None if given.target_tokens_s else operations / TARGETS[-1][0],
            step_scale=None if given.train_tokens_s else sum(step_operations) / STEPS[-1][0],
        )


def _token_bytes(config: Any, supervision: str) -> int:
    """Bytes per token of an answer in bfloat16: the draft's aux layers and its supervision."""
    sizes = {"probs": config.draft_vocab_size, "logits": config.vocab_size}
    aux_size = config.num_aux_hidden_states * config.target_hidden_size
    return int(2 * (aux_size + sizes.get(supervision, config.target_hidden_size)))


@dataclass(frozen=True)
class Pipeline:
    """Seconds that one token, or one batch of them, takes in each part of a cluster. Requests in
    flight hide the way of an answer (target.prefetch), so the slowest part sets the pace."""

    target_s: float  # of a worker, to answer
    step_s: float  # of a rank, to train on it
    carry_s: float = 0.0  # from worker to rank
    workers: int = 1
    ranks: int = 1

    @property
    def period_s(self) -> float:
        """The time between two steps of a rank."""
        return max(self.ranks * self.target_s / self.workers, self.step_s, self.carry_s)

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
        return self.pipeline.ranks / self.pipeline.period_s

    def to_json(self) -> dict[str, Any]:
        load, given, pipeline = self.load, self.given, self.pipeline
        samples = []
        for count in SAMPLES:  # each counted as often as it is trained on
            tokens = count * given.sample_tokens
            hours = tokens / self.tokens_s / 3600
            samples.append({
                "samples": count, "tokens": tokens, "hours": hours,
                "cost": hours * self.gpus * given.gpu_hour,
                "cache_bytes": tokens * load.token_bytes,
            })  # fmt: skip
        return {
            "model": load.model,
            "parameters": load.target.weights,
            "active_parameters": load.target.active + load.target.head,
            "target_workers": pipeline.workers,
            "gpus_per_worker": load.worker_gpus,
            "train_gpus": pipeline.ranks,
            "bytes_per_capture_gpu": load.worker_bytes,
            "bytes_per_train_gpu": load.rank_bytes,
            "worker_tokens_per_s": 1 / load.target_s,
            "rank_tokens_per_s": 1 / load.step_s,
            "worker_operations": load.target_scale,
            "rank_operations": load.step_scale,
            "tokens_per_s": self.tokens_s,
            "waiting_share": pipeline.waiting_share,
            "bytes_per_token": load.token_bytes,
            "bytes_per_s_to_rank": self.tokens_s / pipeline.ranks * load.token_bytes,
            "samples": samples,
        }


def size_cluster(recipes: Sequence[Recipe], given: Given, size: str = "") -> Sizing:
    """The smallest cluster with about the lowest cost per token: up to one machine of ranks, or the
    given number of ranks, with a matching number of workers."""
    load, sizings = Load.of(recipes, given, size), []
    carry_s = load.token_bytes / given.link_bytes
    for ranks in (given.ranks,) if given.ranks else range(1, GPUS_OF_A_MACHINE + 1):
        needed = ranks * load.target_s / load.step_s  # workers that keep these ranks busy
        for workers in {max(1, math.floor(needed)), math.ceil(needed)}:
            pipeline = Pipeline(load.target_s, load.step_s, carry_s, workers, ranks)
            sizings.append(Sizing(load, given, pipeline))
    best = min(sizing.gpus / sizing.tokens_s for sizing in sizings)
    good = (sizing for sizing in sizings if sizing.gpus / sizing.tokens_s <= _GOOD_ENOUGH * best)
    return min(good, key=lambda sizing: sizing.gpus)
