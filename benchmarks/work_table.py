"""What a training step computes, against the least that its definition needs, phase by phase.

    python benchmarks/work_table.py [--only peagle] [--detail 12] [--json]

The real step runs on the meta device, on the path that a GPU takes: kernels are counted instead of
launched. Operations are those of matrix products (a multiply-add is two); attention kernels count
all pairs of their tiles, masked ones included. Bytes are those that every operation and kernel
reads and writes, each tensor once. Any machine, no GPU, a few seconds a method.

The least is a closed form from the sizes of the plan (`work_least.py`): each of these once,

- the target's layers up to the last one that is read, and of the last layer only keys and values
  for tokens that hold no target; its head once for every target;
- of the draft, every projection only for rows that something reads; attention for visible pairs;
- the head for every supervised (row, depth) element;
- per product, one for the gradient of its input and one for that of its weight, where they exist;
  of attention also its scores, which are not kept (nothing of [tokens, tokens] is);
- AdamW reads weights, gradients and two moments, writes all but the gradients, and the norm of the
  gradients, which must be known before, reads them once more.

The head's gradient is computed in the forward phase, and both columns have it there. The GPU is
assumed to have memory to spare, so that no MLP is computed again.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaModel
from transformers.models.llama import modeling_llama
from triton.runtime.jit import JITFunction

import fledge.rollout.attention as rollout_attention
import fledge.rollout.attention_triton as attention_triton
from fledge.bench.train_step import (
    DRAFT_VOCAB,
    SHAPES,
    Case,
    build_batches,
    objective_options,
)
from fledge.core.rows import TokenBatch
from fledge.kernels import adamw, elementwise, gate, head_rows
from fledge.methods.registry import METHODS
from fledge.methods.shared import norms
from fledge.methods.shared.config import derive_draft_config
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.rollout_objective import RolloutTrainerModule
from fledge.methods.shared.supervision import HiddenSupervision
from fledge.rollout.attention_triton import Job
from fledge.rollout.plan import QueryRows
from fledge.training.optimizer import _LARGE, clip_gradients
from fledge.training.planning.step_cost import MetaStep
from work_least import layers_read, least_of, target_config, visible_pairs

CASES = {
    "EAGLE-3, 8B, 4 x 2048": Case("8b", batch=4),
    "EAGLE-3, 8B, 1 x 32,768": Case("8b", seq=32_768),
    "P-EAGLE, 8B, 2 x 2048": Case("8b", "peagle", batch=2),
    "DFlash, 8B, 4 x 2048": Case("8b", "dflash", batch=4),
    "DSpark, 8B, 4 x 2048": Case("8b", "dspark", batch=4),
    "EAGLE-1, 8B, 4 x 2048": Case("8b", "eagle1", batch=4),
}
LIMIT = 1.05
PHASES = ("target", "supervision", "forward", "backward")
MEMORY = 227 << 10  # shared memory of an H200
SPARE = 16.0  # GiB that a step may keep
REASONS = {  # why a phase computes more than LIMIT times the least
    "eagle3 supervision": (
        "EAGLE-3, supervision: the draft vocabulary's columns are computed twice. Each depth's "
        "loss is divided by its covered elements, so coverage comes first, and nothing of "
        "[slots, W] is kept until the loss."
    ),
    "peagle supervision": (
        "P-EAGLE, supervision: the same. One sweep would do, which gains 0.4 % of a step and needs "
        "the head's other rows side by side (0.8 GB)."
    ),
    "eagle3 backward": (
        "EAGLE-3, long rows, backward: gradients of queries and of keys are two kernels, with 7 "
        "products instead of 5. One kernel would need atomics, and results would not be "
        "reproducible."
    ),
}
ATTENTION = {"attend": 2, "query_grad": 3, "key_grad": 4}  # products over pairs

# --- counting -------------------------------------------------------------------------------------

PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::addmm_": 1}  # first factor
FREE = {"aten::detach", "aten::lift_fresh", "aten::empty_strided", "aten::_unsafe_view"}
GATHERS = {"aten::index_select", "aten::index", "aten::embedding"}  # read what they return
SCATTERS = {
    "aten::index_copy_",
    "aten::index_add_",
    "aten::index_put_",
}  # write what they are given
WRITES = {"aten::copy_", "aten::fill_", "aten::zero_"}
UPDATED = {"_update": (0, 2, 3), "score_rows": (0,)}  # arguments that a kernel reads and writes


@dataclass
class Spent:
    operations: float = 0.0
    bytes: float = 0.0
    calls: int = 0

    def add(self, operations: float, size: float) -> None:
        self.operations += operations
        self.bytes += size
        self.calls += 1


def _bytes(tensors: Iterable[Any]) -> int:
    sizes = (
        min(x.numel() * x.itemsize, x.untyped_storage().nbytes())
        for x in tensors
        if isinstance(x, Tensor)
    )
    return sum(sizes)


class Counter(TorchDispatchMode):
    """What is spent in each phase, by operation or kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "other"
        self.spent: dict[str, dict[str, Spent]] = defaultdict(lambda: defaultdict(Spent))

    def add(self, what: str, operations: float, size: float) -> None:
        self.spent[self.phase][what].add(operations, size)

    def total(self, phase: str) -> Spent:
        parts = self.spent[phase].values()
        return Spent(sum(p.operations for p in parts), sum(p.bytes for p in parts))

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.is_view or name in FREE or "empty" in name:
            return out
        given, made = tree_leaves((args, kwargs)), tree_leaves(out)
        operations = 0.0
        if name in PRODUCTS:
            left, right = args[PRODUCTS[name] :][:2]
            operations = 2.0 * left.numel() * right.shape[-1]
        if name in GATHERS:
            size = 2 * _bytes(made)
        elif name in SCATTERS:
            size = 2 * _bytes(given[1:])
        elif name in WRITES:
            size = _bytes(given[1:]) + _bytes(made)
        else:
            size = _bytes(given) + _bytes(made)
        self.add(name.removeprefix("aten::"), operations, size)
        return out


_MetaNorm = norms._MetaNorm


class _CountedNorm(_MetaNorm):
    """A norm as a GPU computes it: one kernel forward, one backward."""

    counter: Counter

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        _CountedNorm.counter.add("rms norm", 0.0, 2 * _bytes([x]))
        return _MetaNorm.forward(ctx, x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        _CountedNorm.counter.add("rms norm backward", 0.0, 3 * _bytes(grads))
        return _MetaNorm.backward(ctx, *grads)


@contextmanager
def as_on_a_gpu(counter: Counter) -> Iterator[None]:
    """While open, meta tensors take the path of a GPU, where kernels are counted."""

    def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **_: Any) -> None:
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        again = [tensors[i] for i in UPDATED.get(self.__name__, ())]
        if self.__name__ == "attend":  # its unused chain tensors are the keys
            tensors = list({id(x): x for x in tensors}.values())
        counter.add(f"kernel {self.__name__}", 0.0, _bytes([*tensors, *again]))

    def counted(kernel: str) -> Any:
        call = getattr(Job, kernel)

        def run(job: Job, *args: Tensor) -> Any:
            width = job.heads // job.groups
            pairs = tile_pairs(kernel, job.rows, len(job.k), width, job.options(kernel))
            operations = 2.0 * ATTENTION[kernel] * pairs * job.heads * job.channels
            counter.add(f"kernel {kernel}", operations, 0)
            return call(job, *args)

        return run

    def probs(self: HiddenSupervision, begin: int, end: int) -> Tensor:
        with counter.within("supervision"):
            return whole_probs(self, begin, end)

    whole_probs = HiddenSupervision.probs
    _CountedNorm.counter = counter
    with ExitStack() as stack:
        swap = [(JITFunction, "run", launch), (gate, "_missing", lambda: None)]
        swap += [(gate, "shared_memory", lambda _: MEMORY), (norms, "_MetaNorm", _CountedNorm)]
        swap += [(rollout_attention, "shared_memory", lambda _: MEMORY)]
        swap += [(HiddenSupervision, "probs", probs), (DraftModel, "_spare_gib", lambda _: SPARE)]
        swap += [(Job, kernel, counted(kernel)) for kernel in ATTENTION]
        for module in (adamw, attention_triton, elementwise, head_rows):
            swap.append((module, "on_device_of", lambda _: nullcontext()))
        for owner, name, value in swap:
            stack.enter_context(patch.object(owner, name, value))
        on_gpu = property(lambda _: True)
        stack.enter_context(patch.object(Tensor, "is_cuda", on_gpu, create=True))
        stack.enter_context(counter)
        yield


def tile_pairs(
    kernel: str, rows: QueryRows, keys: int, width: int, options: dict[str, Any]
) -> float:
    """(row, key) pairs in the tiles that a kernel visits; `width` query heads share a key head."""
    if rows.sorted_host is None:  # the keys of its own block: each tile of rows has one of keys
        return len(rows) * max(options["BLOCK_N"], options["BLOCK_M"] // width)
    slot, first = rows.sorted_host
    per_tile = options["BLOCK_M"] // width
    block = options["BLOCK_N"]
    if kernel != "key_grad":
        begins = np.arange(0, len(slot), per_tile)
        last = np.minimum(begins + per_tile, len(slot)) - 1
        count = slot[last] + 1 - first[begins]
        return float((-(-count // block) * block).sum()) * per_tile
    key = np.arange(0, keys, block)
    begins = np.searchsorted(slot, key)
    ends = np.searchsorted(first, key + block)
    count = np.maximum(ends - begins, 0) * width
    return float((-(-count // options["BLOCK_M"])).sum()) * per_tile * block


# --- a step ---------------------------------------------------------------------------------------


def build(case: Case) -> tuple[MetaStep, Any, TokenBatch]:
    """The objective on the meta device, a plan of its rows, and the rows."""
    method, vocab = METHODS[case.kind], SHAPES[case.shape][-1]
    usual = {"layers": 1, "freeze_embeddings": True, **method.draft_defaults, **method.fixed_draft}
    drafted = usual.get("draft_vocab_size", DRAFT_VOCAB[case.shape]) or vocab
    config = derive_draft_config(
        target_config(case), architecture="LlamaForCausalLM", draft_vocab_size=drafted,
        num_hidden_layers=usual["layers"],
        **method.draft_settings(None, tokenizer=None, vocab_size=vocab),
    )  # fmt: skip
    with torch.device("meta"):
        draft = method.draft_type()(config)
    draft.embed_tokens.weight.requires_grad_(not usual["freeze_embeddings"])
    if method.fixed_draft.get("head_from_target"):  # the target's own, in its dtype
        draft.embed_tokens.to(torch.bfloat16)
        draft.lm_head.to(torch.bfloat16)
    step = MetaStep(method, draft, objective_options(case))
    draft.train()
    rows = build_batches(case, 1)[0].micro[0]
    assert rows is not None
    objective = step._objective
    assert isinstance(objective, RolloutTrainerModule)
    return step, objective.plan_rows(rows, 0), rows


def computed(case: Case) -> tuple[Counter, MetaStep, Any, TokenBatch]:
    step, plan, rows = build(case)
    objective, counter = step._objective, Counter()
    answer = step._answer(rows).to("meta")
    inputs = answer.to_trainer_inputs()
    with as_on_a_gpu(counter):
        objective._heads(torch.device("meta"))  # made once
        with counter.within("supervision"):
            ready = objective.prepare_inputs(**inputs, plan=plan)
        with counter.within("forward"):
            loss = objective.score(ready, ready.charged_K).loss
        with counter.within("backward"):
            loss.backward()
        with counter.within("update"):
            update(objective.draft_model)
        count_target(case, objective, rows, counter)
    return counter, step, plan, rows


def update(draft: nn.Module) -> None:
    trained = [p for p in draft.parameters() if p.grad is not None]
    clip_gradients((), trained, 1.0)
    large = [p for p in trained if p.numel() >= _LARGE]
    moments = [[torch.empty_like(p) for p in large] for _ in range(2)]
    steps = [torch.zeros((), device="meta") for _ in large]
    adamw.adamw(
        large, [p.grad for p in large], *moments, steps, lr=1e-4, betas=(0.9, 0.95), eps=1e-8,
        weight_decay=0.0,
    )  # fmt: skip


def count_target(case: Case, objective: Any, rows: TokenBatch, counter: Counter) -> None:
    config = target_config(case)
    config.num_hidden_layers = layers_read(case, objective.reads_target)
    with torch.device("meta"):
        model = LlamaModel(config).to(torch.bfloat16)
    ids = torch.zeros(rows.shape, dtype=torch.long, device="meta")
    no_mask = patch.object(modeling_llama, "create_causal_mask", lambda **_: None)
    outside = patch.object(F, "scaled_dot_product_attention", lambda q, *_, **__: q.clone())
    with counter.within("target"), torch.no_grad(), no_mask, outside:
        model(input_ids=ids, use_cache=False)
        width = 4.0 * config.num_attention_heads * config.head_dim  # both products of a pair
        counter.add("attention", width * visible_pairs(rows) * config.num_hidden_layers, 0)


# --- the table ------------------------------------------------------------------------------------


def lines(name: str, case: Case, detail: int = 0) -> Iterator[dict[str, Any]]:
    counter, step, plan, rows = computed(case)
    least = least_of(case, step, plan, rows)
    for phase in (*PHASES, "update"):
        spent, need = counter.total(phase), least[phase]
        done = spent.bytes if phase == "update" else spent.operations
        ratio = done / need if need else 1.0
        parts = sorted(
            counter.spent[phase].items(),
            key=lambda part: -(part[1].operations / 790e12 + part[1].bytes / 4.8e12),
        )
        yield {
            "step": name,
            "phase": phase,
            "computed": done,
            "least": need,
            "ratio": ratio,
            "bytes": None if phase == "target" else spent.bytes,  # compiled layers move fewer
            "reason": REASONS.get(f"{case.kind} {phase}", "") if ratio > LIMIT else "",
            "parts": {
                what: f"{x.operations / 1e12:.2f} TFLOP, {x.bytes / 1e9:.2f} GB, {x.calls} calls"
                for what, x in parts[:detail]
            },
        }


def printed(step: str, found: list[dict[str, Any]]) -> str:
    cells = [step]
    for line in found:
        scale = 1e9 if line["phase"] == "update" else 1e12
        cells.append(f"{line['computed'] / scale:,.1f} ({line['ratio']:.3f})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="steps whose name or method contains this")
    parser.add_argument("--detail", type=int, default=0, help="operations to list per phase")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chosen = {n: c for n, c in CASES.items() if args.only in n or args.only in c.kind}
    found = {name: list(lines(name, case, args.detail)) for name, case in chosen.items()}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print("| step | target | supervision | forward | backward | update, GB |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, step in found.items():
        print(printed(name, step))
    for name, step in found.items():
        for line in step if args.detail else ():
            print(f"\n{name}, {line['phase']}: {(line['bytes'] or 0) / 1e9:,.0f} GB moved")
            for what, spent in line["parts"].items():
                print(f"    {what}: {spent}")
    for reason in dict.fromkeys(line["reason"] for step in found.values() for line in step):
        if reason:
            print(f"\n{reason}")


if __name__ == "__main__":
    main()
