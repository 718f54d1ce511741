"""Variants of kernels that a GPU has yet to judge, as changes of their source.

    python benchmarks/gpu_candidates.py --only variants     # how fast they are
    python benchmarks/kernel_variants.py                    # that they compile for an H200

What each should gain, read from the source and not measured:

    unmasked       In full blocks of keys the loads of keys and values need no mask: fewer
                   instructions per load. 1 to 3 % of `attend` and `query_grad`.
    scale last     The maximum of a row is taken before scores are scaled; the scale is then part of
                   the exponent's multiply-add: one of five operations per score less. 2 to 4 % of
                   `attend`, which spends almost half its time on the softmax.
    tma            Keys and values are copied by the tensor memory accelerator: one thread instead
                   of all computes addresses, and registers are free. 5 to 10 % of `attend` and
                   `query_grad` in long rows, nothing in short ones (a descriptor per program).
    tma, scale last  Both.
    rows first     The gradient of keys reads rows in slot order through `order`: a load whose
                   address is a load, which Triton does not pipeline. Gathering the rows once (four
                   small copies) makes it do so, in a third more shared memory (134 KB, 101 as it
                   is), so that one program fits a multiprocessor instead of two: with one stage
                   less, too. 3 to 8 % of `key_grad`, or a loss.

    lanes          `score_rows` (losses of logits) takes the maximum, its place and the sum of
                   exponentials over each block of columns: three reductions over the threads of a
                   program per block. Here each lane keeps its own and they are reduced once, for a
                   second exponential per number. A profile has the kernel at 1.35 ms in P-EAGLE's
                   step, where its bytes take 0.3: perhaps half of it, 1 % of EAGLE-3's step.

Not possible here: warp specialization (Triton 3.6 partitions loops for Blackwell; for Hopper only
simple products), and one backward kernel for queries and keys (5 products instead of 7), because
its sums of query gradients need atomics, and results would not be reproducible.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor

from fledge.kernels import head_rows
from fledge.rollout import attention_kernels, attention_triton, key_grad_kernels
from fledge.rollout.attention_triton import Job
from fledge.rollout.plan import QueryRows

Change = tuple[str, str]
_LIVE = "        live = n < end\n"
_UNMASKED = (
    _LIVE,
    f"{_LIVE}        if not MASKED:\n            live = tl.full([BLOCK_N], 1, tl.int1)\n",
)
_SCALE_LAST = [
    (
        "scores = tl.dot(q, tl.trans(keys), input_precision=\"ieee\") * (SCALE * LOG2E)\n"
        "        if MASKED:\n"
        "            seen = (n[None, :] >= first_M[:, None]) & (n[None, :] <= slot_M[:, None])\n"
        "            scores = tl.where(seen, scores, float(\"-inf\"))\n"
        "        higher_M = tl.maximum(peak_M, tl.max(scores, 1))\n",
        "scores = tl.dot(q, tl.trans(keys), input_precision=\"ieee\")\n"
        "        if MASKED:\n"
        "            seen = (n[None, :] >= first_M[:, None]) & (n[None, :] <= slot_M[:, None])\n"
        "            scores = tl.where(seen, scores, float(\"-inf\"))\n"
        "        higher_M = tl.maximum(peak_M, tl.max(scores, 1) * (SCALE * LOG2E))\n",
    ),
    (
        "weights = tl.exp2(scores - higher_M[:, None])\n        total_M",
        "weights = tl.exp2(scores * (SCALE * LOG2E) - higher_M[:, None])\n        total_M",
    ),
]  # fmt: skip
_LOOP = "    for start in tl.range(begin, end, BLOCK_N):\n"
_KEYS = "keys = load_rows(k, n.to(tl.int64) * k_row, live, CHANNELS, BLOCK_C)\n"
_VALUES = "values = load_rows(v, n.to(tl.int64) * v_row, live, CHANNELS, BLOCK_C)\n"
_TMA = [
    (_LOOP, f"""\
    key_rows = tl.make_tensor_descriptor(
        k, [end, CHANNELS], [tl.cast(k_row, tl.int64), 1], [BLOCK_N, BLOCK_C])
    value_rows = tl.make_tensor_descriptor(
        v, [end, CHANNELS], [tl.cast(v_row, tl.int64), 1], [BLOCK_N, BLOCK_C])
{_LOOP}"""),
    (_KEYS, "keys = key_rows.load([start, 0])\n"),
    (_VALUES, "values = value_rows.load([start, 0])\n"),
]  # fmt: skip
_ORDER = "        row = tl.load(order + m // GROUP, mask=live, other=0)\n"

_LANES = [
    (
        """\
    peak = float("-inf")
    argmax = 0
    total = 0.0
""",
        """\
    peak_lane = tl.full([BLOCK], -1e30, tl.float32)
    total_lane = tl.zeros([BLOCK], tl.float32)
    at_lane = tl.zeros([BLOCK], tl.int32)
""",
    ),
    (
        """\
        highest, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        argmax = tl.where(highest > peak, start + index, argmax)
        higher = tl.maximum(peak, highest)
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
""",
        """\
        at_lane = tl.where(x > peak_lane, w, at_lane)
        higher = tl.maximum(peak_lane, x)
        total_lane = total_lane * tl.exp(peak_lane - higher) + tl.exp(x - higher)
        peak_lane = higher
""",
    ),
    (
        "    lse = peak + tl.log(total)\n",
        """\
    peak = tl.max(peak_lane, 0)
    argmax = tl.min(tl.where(peak_lane == peak, at_lane, width), 0)
    lse = peak + tl.log(tl.sum(total_lane * tl.exp(peak_lane - peak), 0))
""",
    ),
]

# name: changes of attention_kernels.py, key_grad_kernels.py and head_rows.py
SOURCES = (attention_kernels, key_grad_kernels, head_rows)
VARIANTS: dict[str, tuple[list[Change], list[Change], list[Change]]] = {
    "unmasked": ([_UNMASKED], [], []),
    "scale last": (_SCALE_LAST, [], []),
    "tma": (_TMA, [], []),
    "tma, scale last": ([*_TMA, *_SCALE_LAST], [], []),
    "rows first": ([], [(_ORDER, "        row = (m // GROUP).to(tl.int64)\n")], []),
    "lanes": ([], [], _LANES),
}


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="kernel_variants"))


@cache
def changed(name: str, which: int) -> ModuleType:
    """The kernels of a variant, of one of the sources."""
    original = SOURCES[which]
    source = Path(str(original.__file__)).read_text()
    changes = VARIANTS[name][which]
    for old, new in changes:
        if old not in source:
            raise ValueError(f"{name}: the kernels have changed, there is no {old!r}")
        source = source.replace(old, new)
    path = _folder() / f"kernels_{list(VARIANTS).index(name)}_{which}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def kernels_of(name: str) -> set[str]:
    """Which kernels a variant changes."""
    attention, key_grad, head = VARIANTS[name]
    queries = {"attend"} if attention == _SCALE_LAST else {"attend", "query_grad"}
    found = queries if attention else set()
    return found | ({"key_grad"} if key_grad else set()) | ({"score_rows"} if head else set())


@contextmanager
def use(name: str) -> Iterator[None]:
    """While open, the kernels of a variant are launched."""
    if torch.cuda.is_available():  # descriptors live in memory that Triton asks for
        triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device="cuda"))
    rows_first = patch.object(Job, "key_grad", _key_grad_of_sorted_rows)
    with (
        patch.object(attention_triton, "kernels", changed(name, 0)),
        patch.object(attention_triton, "key_grad_kernels", changed(name, 1)),
        patch.object(head_rows, "score_rows", changed(name, 2).score_rows),
    ):
        if not VARIANTS[name][1]:
            yield
            return
        with rows_first:
            yield


_key_grad = Job.key_grad


def _key_grad_of_sorted_rows(job: Job, *per_row: Tensor) -> tuple[Tensor, Tensor]:
    rows, order_N = job.rows, job.rows.order_N
    sorted_rows = QueryRows(rows.slot_N[order_N], rows.first_N[order_N], order_N)
    sorted_rows.bounds[len(job.k)] = job._row_bounds()
    again = Job(job.q[order_N], job.k, job.v, sorted_rows, attention_triton.Chain([], []))
    return _key_grad(again, *(x[order_N] for x in per_row))


# --- compiling for a GPU that is not here ---------------------------------------------------------


def main() -> None:
    import compile_kernels as compiling  # puts another driver in place

    compiling.driver.set_active(compiling.AbsentGPU(90))
    compiling.tiles.shared_memory = lambda device: 227 << 10

    def needs() -> dict[str, tuple[int, int, int]]:
        calls = chain(
            compiling.attention_calls(128, torch.bfloat16), compiling.row_calls(torch.bfloat16)
        )
        by_name = compiling.compiled_by(calls)
        return {
            name: tuple(map(max, zip(*map(compiling.needs, kernels), strict=True)))
            for name, kernels in by_name.items()
        }

    def report(title: str, kernels: Any) -> None:
        found = needs()
        for kernel in (kernel for kernel in kernels if kernel in found):
            shared, registers, spilled = found[kernel]
            print(f"{title:16} {kernel:11} {shared:7,} B shared, {registers} registers, "
                  f"{spilled} B spilled", flush=True)  # fmt: skip

    report("as it is", ("attend", "query_grad", "key_grad", "score_rows"))
    for name in VARIANTS:
        with use(name):
            report(name, sorted(kernels_of(name)))


if __name__ == "__main__":
    main()
