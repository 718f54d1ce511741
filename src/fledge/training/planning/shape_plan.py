"""Predicts a run from its recipe alone, without weights, data or a GPU: for machines that are not
at hand yet, and for targets that do not fit on a single GPU.

Bytes are counted from the target's config. Times are based on the rate that whole steps reached on
one H200 and on nominal link rates, which were not measured: they give an order of magnitude, and a
way to compare recipes. The number of steps is `training.steps`: the data is not read.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.methods.shared.draft import DraftModel
from fledge.models.shapes import shape_of
from fledge.recipe.schema import Recipe
from fledge.target.kinds import Parallel, kind_of, model_name
from fledge.target.layers import text_config
from fledge.training.drafts import config_of_draft
from fledge.training.planning.prediction import EVALUATION, RATES, Pace, Prediction, Work
from fledge.training.planning.step_cost import (
    DraftMemory,
    StepMemory,
    typical_rows,
    without_memory,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GPUS_OF_A_MACHINE = 8


def link_bytes(gpus: int) -> float:
    """Bytes per second and GPU between neighboring GPUs: NVLink, or between machines."""
    return 40e9 if gpus > GPUS_OF_A_MACHINE else 300e9


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target, from a model on the meta device."""

    weights: int  # all parameters
    active: int  # parameters of the matrices that a token passes through, without the embedding
    layer: int  # parameters of a decoder layer
    head: int  # parameters of the head
    config: "PretrainedConfig"

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "TargetShape":
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
        text, weights = text_config(config), sum(p.numel() for p in model.parameters())
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((n for n in (getattr(text, name, None) for name in names) if n), None)
        share = (getattr(text, "num_experts_per_tok", None) or 1) / experts if experts else 1.0
        active = sum(
            p.numel() * (share if ".experts." in name else 1)
            for name, p in model.named_parameters()
            if p.ndim > 1 and ".layers." in name
        )
        head = text.vocab_size * text.hidden_size
        return cls(weights, int(active), weights // (text.num_hidden_layers + 1), head, text)

    def operations(self, mean_keys: float) -> float:
        """Operations per token, given the mean number of keys per query."""
        text = self.config
        heads, head_dim = text.num_attention_heads, getattr(text, "head_dim", None)
        channels = head_dim or text.hidden_size / heads
        return float(2 * self.active + 4 * heads * channels * mean_keys * text.num_hidden_layers)

    @property
    def widest(self) -> int:
        """Elements per token that a layer holds while it runs: hidden states, and the MLP's."""
        text = self.config
        expert_size = getattr(text, "moe_intermediate_size", None)
        active_experts = getattr(text, "num_experts_per_tok", None) or 1
        mlp_size = active_experts * expert_size if expert_size else text.intermediate_size
        return 4 * int(text.hidden_size) + 3 * int(mlp_size)


@dataclass(frozen=True)
class ShapePlan:
    """A recipe on a number of ranks with one GPU each."""

    recipe: Recipe
    ranks: int
    target: TargetShape
    draft: DraftModel  # on the meta device
    cut: Parallel

    @classmethod
    def of(cls, recipe: Recipe, ranks: int) -> "ShapePlan":
        section, training = recipe.target, recipe.training
        cut = kind_of(section).cut(section)
        if cut is None:
            what = "the target runs elsewhere: --ranks is for targets beside the draft"
            raise BadInput(what, where="target.backend", fix="leave --ranks out")
        if training.steps is None:
            what = "the data is not read, so the number of steps must be given"
            raise BadInput(what, where="training.steps", fix="training.steps=10000, for example")
        for key, size in (
            ("target.parallel", cut.ranks),
            ("training.shard x training.context", training.shard * training.context),
        ):
            if ranks % size:
                what = f"{ranks} ranks cannot be cut into {size} ({key})"
                raise BadInput(what, where="--ranks", fix=f"a multiple of {size}")
        config = shape_of(model_name(section), trust_remote_code=section.trust_remote_code)
        return cls(recipe, ranks, TargetShape.of(config), draft_without_memory(recipe, config), cut)

    @cached_property
    def step(self) -> StepMemory:
        return StepMemory.of(self.draft, [self._rows], self.recipe)

    @cached_property
    def _rows(self) -> TokenBatch:
        """A micro-batch, assuming documents of the maximum length."""
        recipe = self.recipe
        document = recipe.data.max_length
        return typical_rows(recipe.training.micro_batch, recipe.packing.tokens, document=document)

    def target_bytes(self) -> int:
        """Bytes of a rank's share of the weights, of the layers that are gathered while they run,
        of the head that the loss reads, and of a pass."""
        target, cut, width = self.target, self.cut, self._target_width
        weight_bytes = target.weights * width / (cut.fsdp * cut.tp)
        if cut.fsdp > 1:
            weight_bytes += 2 * target.layer * width / cut.tp  # this layer, and the prefetched one
        if cut.fsdp * cut.tp > 1:
            weight_bytes += 2 * target.head
        pass_bytes = self.recipe.packing.tokens / cut.cp * target.widest / cut.tp * 2
        return int(weight_bytes + pass_bytes)

    def predict(self) -> Prediction:
        recipe, training, ranks = self.recipe, self.recipe.training, self.ranks
        memory = DraftMemory.of(self.draft, training)
        total, packs = training.steps or 0, training.micro_batch * training.accumulate
        tokens = total * packs * recipe.packing.tokens
        step_s = self.step.cost.operations / self._rows.tokens / RATES["cuda"]
        pace = Pace(
            target_s=self._target_s(training.context),
            step_s=step_s / training.context,
            evaluation_s=self._target_s(1) + EVALUATION * step_s,
        )
        work = Work(0, total, tokens, recipe.evaluation.rows * recipe.data.max_length / ranks)
        sharing_s = 2 * 4 * memory.trained / link_bytes(ranks) if ranks > 1 else 0.0
        seconds = work.seconds(recipe, pace, memory, "cuda", sharing_s)
        return Prediction(
            target_bytes=self.target_bytes(),
            draft_bytes=memory.bytes(shard=training.shard, width=2),
            step_bytes=self.step.bytes(training.context),
            disk_bytes=(recipe.checkpoint.keep + 1) * memory.saved_bytes,
            seconds_by_part={"start_up": 0.0, **seconds},
            tokens=tokens * (ranks // training.context),
        )

    @property
    def _target_width(self) -> int:
        """Bytes per weight of the target."""
        dtype = getattr(self.recipe.target, "dtype", "auto")
        return {"fp8": 1, "float32": 4}.get(dtype, 2)

    def _target_s(self, context: int) -> float:
        """Seconds that a rank spends per token of its own on the target, if `context` ranks share
        a pack; in an evaluation none do."""
        target, cut, tokens = self.target, self.cut, self.recipe.packing.tokens
        group = cut.tp * cut.cp
        operations = target.operations(self.recipe.data.max_length / 2)  # as in `_rows`
        token_s = operations / RATES["cuda"] / group
        if cut.fsdp > 1:  # the next layer is gathered while this one runs
            gathered = target.weights * self._target_width / cut.tp * (1 - 1 / cut.fsdp)
            token_s = max(token_s, gathered / link_bytes(cut.ranks) / tokens)
        if cut.tp > 1:  # two all-reduces per layer, which do not overlap with computation
            reduced = 8 * target.config.num_hidden_layers * target.config.hidden_size
            token_s += reduced / link_bytes(group) / cut.cp
        # the ranks of one target answer each other's packs one after another
        return token_s * max(1, group // context)


def draft_without_memory(recipe: Recipe, config: "PretrainedConfig") -> DraftModel:
    """The recipe's draft for a target of this config, on the meta device."""
    vocab_size = text_config(config).vocab_size
    size = min(recipe.draft.draft_vocab_size or vocab_size, vocab_size)
    settings = recipe.method.draft_settings(recipe.objective, tokenizer=None, vocab_size=vocab_size)
    draft = without_memory(recipe.method, config_of_draft(recipe, config, size, settings))
    if recipe.draft.freeze_embeddings:
        draft.freeze_embeddings()
    return draft
