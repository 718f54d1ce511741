"""Speed and memory of one training step, on random weights and random tokens of a named shape.

A step is what `fledge train` does: target forward, rollout, backward, clip, AdamW with float32
masters. `documents` packs documents of about that many tokens; without it every row is one document
of `seq` tokens. 60 % of the tokens are supervised.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fledge.core.distributed import World
from fledge.core.machine import multiplies_bfloat16
from fledge.core.rows import TokenRow
from fledge.core.transfer import record_event
from fledge.data.pack import collate, one_per_row, pack_rows
from fledge.methods.base import TrainerInputs
from fledge.methods.registry import DEFAULT_METHOD, METHODS
from fledge.target.base import InputEmbedding
from fledge.target.hf.loading import convert_linears
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.state_cache import RememberingTarget
from fledge.training.batches import StepBatch
from fledge.training.optimizer import StepGuard, make_optimizers
from fledge.training.recorded_steps import recorded_steps
from fledge.training.step import Clock, Parts, train_step

SHAPE_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size"),
)
SHAPES = {
    "tiny": (64, 8, 4, 2, 16, 128, 512),
    "135m": (576, 30, 9, 3, 64, 1536, 49_152),
    "1b": (2048, 16, 32, 8, 64, 8192, 128_256),
    "8b": (4096, 32, 32, 8, 128, 14_336, 128_256),
}
DRAFT_VOCAB = {"tiny": 256, "135m": 16_384, "1b": 32_000, "8b": 32_000}


@dataclass(frozen=True)
class Case:
    """What is measured. 0 stands for what the method's recipes have."""

    shape: str = "135m"
    kind: str = DEFAULT_METHOD
    seq: int = 2048
    batch: int = 1
    documents: int = 0  # mean length of packed documents; 0: one document a row
    depths: int = 0
    supervised: float = 0.6  # share of the tokens
    depth_keep: float = 1.0
    fp8: bool = False
    kept: bool = False  # a later epoch, whose states were kept
    record: bool = True  # steps of small drafts as CUDA graphs


@dataclass(frozen=True)
class StepFigures:
    tokens: int
    seconds: float  # of the median step
    slowest_seconds: float  # a step that compiled something would show here
    phases: dict[str, float]
    first_seconds: float
    resident_bytes: int  # weights of both models, and what AdamW keeps
    above_bytes: int | None  # peak beyond that; on a GPU only

    def to_json(self) -> dict[str, Any]:
        gib, above = 2**30, self.above_bytes
        return {
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / self.seconds),
            "step_ms": round(self.seconds * 1e3, 1),
            "slowest_step_ms": round(self.slowest_seconds * 1e3, 1),
            "phases_ms": {name: round(value * 1e3, 1) for name, value in self.phases.items()},
            "first_step_s": round(self.first_seconds, 1),
            "resident_gib": round(self.resident_bytes / gib, 2),
            "peak_above_gib": None if above is None else round(above / gib, 2),
        }


def build_target(case: Case, device: torch.device) -> HFEagle3TargetModel:
    sizes = dict(zip(SHAPE_FIELDS, SHAPES[case.shape], strict=True))
    config = LlamaConfig(**sizes, max_position_embeddings=65_536, tie_word_embeddings=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=_dtype(device))
    if case.fp8:
        convert_linears(model)
    layers = METHODS[case.kind].aux_layers()
    return HFEagle3TargetModel(
        model, supervision="hidden", compile_layers=True, num_aux_layers=layers
    )


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def build_parts(case: Case, device: torch.device) -> Parts:
    target, method = build_target(case, device), METHODS[case.kind]
    usual = {"layers": 1, "freeze_embeddings": True, **method.draft_defaults, **method.fixed_draft}
    vocab = SHAPES[case.shape][-1]
    draft_vocab = usual.get("draft_vocab_size", DRAFT_VOCAB[case.shape]) or vocab  # null: all of it
    config = method.derive(
        target.model.config,
        architecture="LlamaForCausalLM",
        draft_vocab_size=draft_vocab,
        num_hidden_layers=usual["layers"],
        **method.draft_settings(None, tokenizer=None, vocab_size=vocab),
    )
    ids = torch.arange(draft_vocab) * (vocab // draft_vocab)
    mask = torch.isin(torch.arange(vocab), ids)
    with torch.device(device):
        draft = method.draft_type()(config)
    draft.set_vocab_mapping(ids, mask)
    draft.borrow_from(target)
    if method.fixed_draft.get("head_from_target"):
        draft.copy_head_from_target(InputEmbedding(target.info().head.weight_VD))
    draft.embed_tokens.weight.requires_grad_(not usual["freeze_embeddings"])
    given = TrainerInputs(ids, mask, target.info().head, _dtype(device))
    objective = method.objective(draft, given, **objective_options(case))
    parameters = [p for p in draft.parameters() if p.requires_grad]
    recorded = None
    if case.record:
        recorded = recorded_steps(objective, parameters, tokens=case.seq * case.batch)
    return Parts(
        target, objective, device, World(), Clock(device), parameters,
        make_optimizers(draft, lr=1e-4), StepGuard(None, device), 1.0, recorded=recorded,
    )  # fmt: skip


def objective_options(case: Case) -> dict[str, Any]:
    return METHODS[case.kind].bench_options(depths=case.depths, depth_keep=case.depth_keep)


def random_rows(case: Case, count: int, mean: int) -> list[TokenRow]:
    """Documents that begin with a prompt and end with the supervised answer."""
    rng = np.random.default_rng(0)
    lengths = np.full(count, case.seq)
    if mean < case.seq:
        spread = rng.lognormal(0.0, 0.5, count) / np.exp(0.125)
        lengths = np.clip(mean * spread, 8, case.seq).astype(int)
    rows = []
    for i, n in enumerate(lengths):
        mask = (np.arange(n) >= round(n * (1 - case.supervised))).astype(np.uint8)
        ids = rng.integers(0, SHAPES[case.shape][-1], n, dtype=np.int32)
        rows.append(TokenRow(ids, mask, f"row{i}", False))
    return rows


def build_batches(case: Case, count: int) -> list[StepBatch]:
    wanted = count * case.batch
    if case.documents:
        rows = random_rows(case, wanted * case.seq * 2 // case.documents + 8, case.documents)
        packs = list(pack_rows([len(row.input_ids) for row in rows], case.seq).packs)
    else:
        rows = random_rows(case, wanted, case.seq)
        packs = list(one_per_row([case.seq] * len(rows), case.seq))
    cut = [packs[begin : begin + case.batch] for begin in range(0, wanted, case.batch)]
    collated = (collate(rows, part, case.seq, pad_id=0) for part in cut)
    return [StepBatch(index, 0, (tokens,)) for index, tokens in enumerate(collated)]


def measure_step(
    case: Case,
    device: torch.device,
    *,
    steps: int,
    warmup: int,
    on_step: Callable[[], None] = lambda: None,
    look: Callable[[Parts, StepBatch], None] | None = None,
) -> StepFigures:
    """Run `warmup` + `steps` steps, one behind the other as training does: the host does not wait
    for them. `look` may run one more in its own way."""
    gpu = device.type == "cuda"
    parts = build_parts(case, device)
    batches = build_batches(case, warmup + steps)
    if case.kept:  # the target was asked about all of them before
        parts.target = RememberingTarget(parts.target, 2**62)
        if parts.objective.reads_target:
            parts.target.keep_coverage(parts.objective.draft_model.t2d)
        for rows in (rows for batch in batches for rows in batch.micro if rows is not None):
            parts.target.answer(rows)
    built = torch.cuda.memory_allocated() if gpu else 0
    moments = sum(p.numel() for p in parts.parameters) * 8
    times = [_Moment(device)]
    for index, batch in enumerate(batches):
        if index == warmup:
            parts.clock.read()  # waits for what compiles; from here on nothing does
            if gpu:
                torch.cuda.reset_peak_memory_stats()
            times.append(_Moment(device))
        train_step(parts, batch, lr=1e-4)
        times.append(_Moment(device))
        on_step()
    _, phases = parts.clock.read()
    above = torch.cuda.max_memory_allocated() - built - moments if gpu else None
    seconds = [after - before for before, after in pairwise(times[warmup + 1 :])]
    if look is not None:
        look(parts, batches[-1])
    return StepFigures(
        tokens=case.batch * case.seq,
        seconds=statistics.median(seconds),
        slowest_seconds=max(seconds),
        phases={name: spent / steps for name, spent in phases.items()},
        first_seconds=times[1] - times[0],
        resident_bytes=built + moments,
        above_bytes=above,
    )


class _Moment:
    """When the device had done what was asked of it so far; read when all is done."""

    def __init__(self, device: torch.device) -> None:
        self._now = time.perf_counter()
        self._event = record_event(device, timed=True) if device.type == "cuda" else None

    def __sub__(self, other: "_Moment") -> float:
        """Seconds."""
        if self._event is None or other._event is None:
            return self._now - other._now
        return float(other._event.elapsed_time(self._event)) / 1000
