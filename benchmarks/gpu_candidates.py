"""What could still make a training step faster on a GPU, measured in turns: one call, one JSON.

    python benchmarks/gpu_candidates.py [--seconds 420] [--only peagle] [--out FILE]
    python benchmarks/gpu_candidates.py --toy           # the same code with toy shapes on a CPU

Parts, in the order of their value (the rest is left out once the time is up):

    NAME        a step of `fledge bench train` as it is, and with one thing changed at a time, in
                turns: median ms, ratio to the step as it is, ms by phase, GiB above the models
    NAME kernels   the kernels that took the most time in one profiled step
    NAME tiles     attention kernels on the very tensors of that step, tile by tile
    NAME variants  the same with the variants of `kernel_variants.py`
    head variants  the losses of logits, as they are and in a variant
    adamw       GB/s of AdamW's kernel by block size and warps, and of the gradient's norm

Ratios below 1 are faster. `frozen embedding` is no candidate, but the bound of what a smaller
update of the embedding could gain. Needs neither pydantic nor a network.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = str(int("--toy" in sys.argv))  # read when Triton is imported

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fledge.methods.block.attention as block_attention
import fledge.methods.peagle.draft as peagle_draft
import fledge.methods.shared.unroll as eagle_unroll
import fledge.rollout.attention as rollout_attention
from fledge.bench.train_step import Case, build_batches, build_parts
from fledge.kernels import adamw as adamw_kernel
from fledge.kernels.gate import TILES, TILES_FP32, Tile
from fledge.kernels.head_rows import fused_rows
from fledge.methods.peagle.objective import PEagleTrainerModule
from fledge.methods.shared.draft import DraftModel
from fledge.rollout.attention_triton import Job
from fledge.training.step import Parts, train_step
from kernel_variants import VARIANTS, kernels_of, use

TOY = "--toy" in sys.argv
DEVICE = torch.device("cpu" if TOY else "cuda")
if TOY:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    importlib.import_module("interpreted_triton")  # repairs Triton's interpreter
Variant = Callable[[Parts], AbstractContextManager[Any]]
KEY_GRAD = dict(TILES["key_grad"])
KERNELS = ("attend", "query_grad", "key_grad")


# --- variants of a step ---------------------------------------------------------------------------


def as_it_is(_: Parts) -> AbstractContextManager[Any]:
    return nullcontext()


def keeping(module: Any, gib: float) -> Variant:
    """MLP activations up to this limit, however much memory is free."""

    @contextmanager
    def limited(_: Parts) -> Iterator[None]:
        with (
            patch.object(DraftModel, "_spare_gib", lambda _: 0.0),
            patch.object(module, "KEPT_MLP_GIB", gib),
        ):
            yield

    return limited


def without_coverage(_: Parts) -> AbstractContextManager[Any]:
    """As in steps whose metrics nobody reads."""

    def all_covered(self: Any, plan: Any, input_ids: Tensor, supervision: Any) -> Tensor:
        return torch.ones_like(supervision.slot_M, dtype=torch.bool)

    return patch.object(PEagleTrainerModule, "_covered", all_covered)


@contextmanager
def frozen_embedding(parts: Parts) -> Iterator[None]:
    weight = parts.objective.draft_model.embed_tokens.weight
    weight.requires_grad_(False)
    try:
        yield
    finally:
        weight.requires_grad_(True)


@contextmanager
def last_mlp_on_supervised(parts: Parts, case: Case) -> Iterator[None]:
    """The target's last MLP only where the draft is supervised."""
    target: Any = parts.target
    mlp: nn.Module = target._layers[-1].mlp
    slot_T = torch.arange(case.seq, device=DEVICE)
    picked = (slot_T >= round(case.seq * (1 - case.supervised))).repeat(case.batch).nonzero()[:, 0]
    whole = mlp.forward

    def forward(x_BTD: Tensor) -> Tensor:
        flat = x_BTD.flatten(0, 1)
        out = torch.zeros_like(flat)
        return out.index_copy_(0, picked, whole(flat.index_select(0, picked))).view_as(x_BTD)

    with patch.object(mlp, "forward", forward):
        yield


@dataclass(frozen=True)
class Trial:
    case: Case
    variants: Mapping[str, Variant]
    rounds: int = 4
    steps: int = 2  # of a variant in a round


def trials() -> dict[str, Trial]:
    cases = {
        "peagle": Case("8b", "peagle", batch=2),
        "eagle3": Case("8b", batch=4),
        "dflash": Case("8b", "dflash", batch=4),
        "dspark": Case("8b", "dspark", batch=4),
        "eagle3 32k": Case("8b", seq=32_768),
    }
    if TOY:
        sizes = {"peagle": 2, "eagle3": 2, "dflash": 1, "dspark": 1, "eagle3 32k": 1}
        cases = {
            name: replace(case, shape="tiny", seq=16, batch=sizes[name], depths=min(case.depths, 3))
            for name, case in cases.items()
        }
    variants: dict[str, dict[str, Variant]] = {
        "peagle": {
            "no MLPs kept": keeping(peagle_draft, 0.0),
            "MLPs kept up to 1.5 GiB": keeping(peagle_draft, 1.5),
            "without coverage": without_coverage,
            "frozen embedding": frozen_embedding,
        },
        "eagle3": {"last MLP on supervised": partial(last_mlp_on_supervised, case=cases["eagle3"])},
        "dflash": {},
        "dspark": {},
        "eagle3 32k": {"no MLPs kept": keeping(eagle_unroll, 0.0)},
    }
    return {
        name: Trial(
            case, {"as it is": as_it_is, **variants[name]}, rounds=2 if "32k" in name else 4
        )
        for name, case in cases.items()
    }


# --- measuring steps ------------------------------------------------------------------------------


def wait() -> None:
    if not TOY:
        torch.cuda.synchronize()


def measure(trial: Trial, parts: Parts) -> dict[str, Any]:
    """Each variant's steps, in turns: a round of each, in another order every time."""
    batches = build_batches(trial.case, 4)
    built = 0 if TOY else torch.cuda.memory_allocated()
    times: dict[str, list[float]] = defaultdict(list)
    phases: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    above: dict[str, float] = {}
    failed: dict[str, str] = {}
    names, number = list(trial.variants), 0
    for turn in range(trial.rounds + 1):  # the first is the warm-up
        for name in names if turn % 2 else names[::-1]:
            if name in failed:
                continue
            try:
                with trial.variants[name](parts):
                    if not TOY:
                        torch.cuda.reset_peak_memory_stats()
                    parts.clock.read()
                    for _ in range(trial.steps):
                        number += 1
                        wait()
                        begin = time.perf_counter()
                        train_step(parts, replace(batches[number % 4], step=number), lr=1e-6)
                        wait()
                        if turn:
                            times[name].append(time.perf_counter() - begin)
                    for phase, seconds in parts.clock.read()[1].items():
                        phases[name][phase] += seconds if turn else 0.0
                    if not TOY:
                        above[name] = (torch.cuda.max_memory_allocated() - built) / 2**30
            except Exception as error:  # noqa: BLE001  (the others go on)
                failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
                for parameter in parts.parameters:
                    parameter.grad = None
    base = statistics.median(times["as it is"])
    steps = trial.rounds * trial.steps
    return {
        name: {
            "ms": round(1e3 * statistics.median(times[name]), 2),
            "ratio": round(statistics.median(times[name]) / base, 4),
            "phases_ms": {n: round(1e3 * s / steps, 2) for n, s in phases[name].items()},
            "above_gib": round(above.get(name, 0.0), 2),
        }
        for name in names
        if name not in failed
    } | {name: {"failed": why} for name, why in failed.items()}


def profiled(trial: Trial, parts: Parts, rows: int = 45) -> list[dict[str, Any]]:
    """The kernels that took the most time in one step."""
    batch = build_batches(trial.case, 1)[0]
    train_step(parts, batch, lr=1e-6)
    wait()
    activity = ProfilerActivity.CPU if TOY else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        train_step(parts, batch, lr=1e-6)
        wait()
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        seconds = event.self_cpu_time_total if TOY else event.self_device_time_total
        spent[event.name][0] += seconds / 1e3
        spent[event.name][1] += 1
    ranked = sorted(spent.items(), key=lambda item: -item[1][0])
    listed = [
        {"kernel": name[:160], "ms": round(ms, 3), "calls": int(calls)}
        for name, (ms, calls) in ranked[:rows]
    ]
    total = {"kernel": "all", "ms": round(sum(ms for ms, _ in spent.values()), 2), "calls": 0}
    return [total, *listed]


# --- kernels on the tensors of a step -------------------------------------------------------------

TILE_SECONDS = 40.0
CANDIDATES = {  # (row, head) pairs, keys, warps, stages; the most promising first
    "attend": [
        *(Tile(128, 128, 8, 2), Tile(128, 64, 8, 4), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
        *(Tile(128, 64, 8, 2), Tile(64, 128, 4, 2)),
    ],
    "query_grad": [
        *(Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3), Tile(128, 32, 8, 3)),
        *(Tile(64, 64, 4, 2), Tile(64, 128, 4, 2)),
    ],
    "key_grad": [
        *(Tile(64, 128, 8, 2), Tile(64, 64, 4, 4), Tile(32, 64, 4, 4), Tile(128, 64, 8, 2)),
        *(Tile(64, 128, 8, 3), Tile(32, 128, 8, 3)),
    ],
}
if TOY:
    CANDIDATES = {kernel: [Tile(32, 64, 4, 1)] for kernel in KERNELS}


@contextmanager
def kernels_interpreted() -> Iterator[None]:
    """In toy mode attention uses the kernels, too."""
    with ExitStack() as stack:
        for module in (rollout_attention, peagle_draft, block_attention) if TOY else ():
            stack.enter_context(patch.object(module, "kernel_runs", lambda *_: True))
        yield


def captured_calls(trial: Trial, parts: Parts) -> dict[str, Callable[[], Any]]:
    """A call of each attention kernel as it is made in a step, by kernel and layout."""
    calls: dict[str, list[Callable[[], Any]]] = defaultdict(list)

    def capture(kernel: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def captured(job: Job, *args: Tensor) -> Any:
            layout = [name for name in ("NESTED", "OWN", "FLOORED") if job.kind[name]]
            label = " ".join([kernel, f"{len(job.rows)} x {len(job.k)}", *layout])
            if not layout and kernel != "key_grad":
                label = f"{kernel} chain {job.depth}"
            calls[label].append(lambda: getattr(Job, kernel)(job, *args))  # its variant of then
            return launch(job, *args)

        return captured

    with kernels_interpreted(), ExitStack() as stack:
        for kernel in KERNELS:
            launch = getattr(Job, kernel)
            stack.enter_context(patch.object(Job, kernel, capture(kernel, launch)))
        train_step(parts, build_batches(trial.case, 1)[0], lr=1e-6)
    labels: dict[str, list[str]] = defaultdict(list)
    for label in calls:
        labels[label.split()[0]].append(label)
    chosen = []
    for kernel in KERNELS:  # EAGLE-3 has one label per depth: the middle one; others have few
        of_kernel = labels[kernel]
        chosen += [of_kernel[len(of_kernel) // 2]] if len(of_kernel) > 2 else of_kernel
    return {label: calls[label][0] for label in chosen}


def timed(call: Callable[[], Any], repeats: int = 7) -> float:
    """Median milliseconds after a warm-up call; of one call in toy mode."""
    if TOY:
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    call()
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def tiles(trial: Trial, parts: Parts, until: float) -> dict[str, Any]:
    """ms of each captured call by tile, the tile of today first and, as a check, last. Most of the
    time goes into compiling, so every call gets its next tile before one gets all."""
    calls = captured_calls(trial, parts)
    table: dict[str, Any] = {label: {} for label in calls}
    width = max(64, parts.objective.draft_model.config.head_dim)
    until = min(until, time.perf_counter() + TILE_SECONDS)
    for number in range(-1, max(map(len, CANDIDATES.values())) + 1):
        for label, call in calls.items():
            kernel = label.split()[0]
            at = TILES_FP32 if TOY else TILES[kernel]
            candidates = [*CANDIDATES[kernel], at[width]]
            if time.perf_counter() > until or number >= len(candidates):
                continue
            tile = at[width] if number < 0 else candidates[number]
            name = "/".join(map(str, astuple(tile)))
            with patch.dict(at, {width: tile}):
                try:
                    ms: Any = round(timed(call), 4)
                except Exception as error:  # noqa: BLE001  (too large, for example)
                    ms = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            table[label]["again" if name in table[label] else name] = ms
    return table


def variants(trial: Trial, parts: Parts, until: float) -> dict[str, Any]:
    """ms of each captured call by variant of its kernel, and the largest difference of its results
    from those of today, relative to their largest number."""
    table: dict[str, Any] = {}
    for label, call in captured_calls(trial, parts).items():
        wanted = call()
        line = table[label] = {"as it is": round(timed(call), 4)}
        for name in VARIANTS:
            if label.split()[0] not in kernels_of(name) or time.perf_counter() > until:
                continue
            try:
                with use(name):
                    found = call()
                    line[name] = round(timed(call), 4)
                    if name == "rows first":
                        line[f"{name}, one stage less"] = round(one_stage_less(call), 4)
                line[f"{name}: difference"] = max(map(difference, found, wanted))
            except Exception as error:  # noqa: BLE001  (a variant may not compile)
                line[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        line["again"] = round(timed(call), 4)
    return table


def one_stage_less(call: Callable[[], Any]) -> float:
    fewer = {width: replace(tile, stages=tile.stages - 1) for width, tile in KEY_GRAD.items()}
    with patch.dict(TILES["key_grad"], {w: tile for w, tile in fewer.items() if tile.stages}):
        return timed(call)


def difference(found: Tensor, wanted: Tensor) -> float:
    size = wanted.float().nan_to_num(posinf=0.0, neginf=0.0).abs().max()
    return float((found.float() - wanted.float()).nan_to_num().abs().max() / size.clamp_min(1e-30))


def head_speed() -> dict[str, Any]:
    """ms of the losses of logits, as they are and by lanes, at the sizes of a chunk."""
    table: dict[str, Any] = {}
    sizes = {"hard": (2048, 128_256), "soft": (8192, 32_000), "kl": (8192, 32_000)}
    for kind, (rows, width) in sizes.items():
        rows, width = (8, 4500) if TOY else (rows, width)
        generator = torch.Generator(DEVICE).manual_seed(0)
        made = 8 * torch.randn(rows, width, generator=generator, device=DEVICE)
        logits = made.to(torch.float32 if TOY else torch.bfloat16)
        probs = torch.softmax(made.flip(0)[: rows // 4], -1)
        slot = torch.arange(rows, device=DEVICE) // 4
        given = (probs, slot, probs.argmax(-1)[slot])
        weight = torch.ones(rows, device=DEVICE)

        def call(kind: str = kind, given: Any = given, logits: Tensor = logits) -> Any:
            copy = logits.clone()
            loss, correct, _ = fused_rows(copy, *given, kind=kind, coefficient_J=weight)  # noqa: B023
            return loss, correct.float(), copy

        wanted, copied = call(), timed(logits.clone)
        line = table[f"{kind} {rows} x {width}"] = {"as it is": round(timed(call) - copied, 4)}
        with use("lanes"):
            found = call()
            line["lanes"] = round(timed(call) - copied, 4)
        line["lanes: difference"] = max(map(difference, found, wanted))
        line["again"] = round(timed(call) - copied, 4)
    return table


class _WithWarps:
    """A kernel that is launched with another number of warps."""

    def __init__(self, kernel: Any, warps: int) -> None:
        self._kernel, self._warps = kernel, warps

    def __getitem__(self, grid: Any) -> Any:
        return partial(self._kernel[grid], num_warps=self._warps)


def adamw_speed() -> dict[str, Any]:
    size = 4096 if TOY else 2**28
    tensors = [torch.zeros(size, device=DEVICE) for _ in range(4)]
    param, grad, first, second = ([x] for x in tensors)
    step = [torch.ones((), device=DEVICE)]
    one = torch.ones((), device=DEVICE)
    options = {"lr": 1e-6, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}

    def update() -> None:
        adamw_kernel.adamw(param, grad, first, second, step, grad_scale=one, **options)

    speeds: dict[str, Any] = {}
    kernel = adamw_kernel._update
    for block in (512, 1024, 2048, 4096):
        for warps in (4, 8):
            with patch.multiple(adamw_kernel, _BLOCK=block, _update=_WithWarps(kernel, warps)):
                ms = timed(update)
            speeds[f"block {block}, {warps} warps: GB/s"] = round(28 * size / ms / 1e6)
    norm = timed(lambda: nn.utils.get_total_norm(grad))
    speeds["norm: GB/s"] = round(4 * size / norm / 1e6)
    copy = timed(lambda: tensors[0].copy_(tensors[1]))
    speeds["copy: GB/s"] = round(8 * size / copy / 1e6)
    return speeds


# --- the call -------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=420, help="no part begins after this")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--out", help="also write the JSON to this file, after every part")
    parser.add_argument("--toy", action="store_true", help="toy shapes on the CPU")
    args = parser.parse_args()
    begin, results = time.perf_counter(), dict[str, Any]()
    until = begin + args.seconds

    def part(name: str, run: Callable[[], Any]) -> None:
        if args.only not in name:
            return
        started = time.perf_counter()
        if started > until:
            results[name] = "left out: the time was up"
            return
        try:
            results[name] = run()
        except Exception as error:  # noqa: BLE001  (the other parts go on)
            results[name] = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        results[f"{name}: seconds"] = round(time.perf_counter() - started, 1)
        print(f"{name}: {results[f'{name}: seconds']} s", file=sys.stderr, flush=True)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(results, file, indent=1)

    part("adamw", adamw_speed)
    part("head variants", head_speed)
    for name, trial in trials().items():
        if not any(
            args.only in f"{name}{suffix}" for suffix in ("", " kernels", " tiles", " variants")
        ):
            continue
        if time.perf_counter() > until:
            results[name] = "left out: the time was up"
            continue
        parts = build_parts(trial.case, DEVICE)
        part(name, partial(measure, trial, parts))
        if "32k" not in name:
            part(f"{name} kernels", partial(profiled, trial, parts))
        if name != "dspark":
            part(f"{name} variants", partial(variants, trial, parts, until))
            part(f"{name} tiles", partial(tiles, trial, parts, until))
        del parts
        gc.collect()  # the models are gone when the next ones are built
        if not TOY:
            torch.cuda.empty_cache()
    results["torch"], results["seconds"] = torch.__version__, round(time.perf_counter() - begin, 1)
    if not TOY:
        results["gpu"] = torch.cuda.get_device_name()
    print(json.dumps(results, indent=1))
    if args.out:
        with open(args.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
