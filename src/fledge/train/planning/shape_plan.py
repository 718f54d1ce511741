"""A run predicted from its recipe alone: no weights, no data, no GPU. For machines that one does
not have yet, and targets that fit no single GPU of them.

Bytes are counted from the target's config (`memory.py`). Times rest on the rate that whole steps
reached on one H200 (`pace.py`) and on rates of links that were not measured here: an order of
magnitude, and a way to compare recipes. Steps are those of `training.steps`: the data is not read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fledge.core.errors import BadInput
from fledge.draft.base import DraftModel
from fledge.models.shapes import shape_of
from fledge.objective.work import Work
from fledge.recipe.schema import Recipe
from fledge.target.kinds import Cut, kind_of, model_name
from fledge.target.layers import text_config
from fledge.train.drafts import config_of_draft
from fledge.train.planning.memory import StepMemory, draft_bytes, kept_bytes
from fledge.train.planning.pace import RATES
from fledge.train.planning.predict import SAVE_BYTES, STEP_SECONDS, UPDATE_BYTES, Prediction, times

GPUS_OF_A_MACHINE = 8
LINK_BYTES = (300e9, 40e9)  # a second and GPU: inside a machine (NVLink), between machines


@dataclass(frozen=True)
class TargetShape:
    """What a target costs, from a model without memory."""

    weights: int  # all parameters
    active: int  # of its matrices, those that a token goes through; not the embedding
    layer: int  # parameters of a decoder layer
    head: int  # of the head
    config: Any

    @classmethod
    def of(cls, config: Any) -> "TargetShape":
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
        text = text_config(config)
        chosen = getattr(text, "num_experts_per_tok", None) or 1
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((n for n in (getattr(text, name, None) for name in names) if n), None)
        share = chosen / experts if experts else 1.0
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        matrices = {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1}
        return cls(
            weights=sum(sizes.values()),
            active=int(
                sum(
                    size * (share if ".experts." in name else 1)
                    for name, size in matrices.items()
                    if ".layers." in name
                )
            ),
            layer=sum(sizes.values()) // (text.num_hidden_layers + 1),
            head=text.vocab_size * text.hidden_size,
            config=text,
        )

    @property
    def widest(self) -> int:
        """Numbers a token that a layer holds while it runs: states, and the MLP's."""
        text = self.config
        experts = getattr(text, "moe_intermediate_size", None)
        chosen = getattr(text, "num_experts_per_tok", None) or 1
        wide = chosen * experts if experts else text.intermediate_size
        return 4 * int(text.hidden_size) + 3 * int(wide)


@dataclass(frozen=True)
class ShapePlan:
    """A recipe on so many ranks, a GPU each."""

    recipe: Recipe
    ranks: int
    target: TargetShape
    draft: DraftModel  # without memory
    cut: Cut

    @classmethod
    def of(cls, recipe: Recipe, ranks: int) -> "ShapePlan":
        section = recipe.target
        cut = kind_of(section).cut(section)
        if cut is None:
            what = "the target runs elsewhere: --ranks is for targets beside the draft"
            raise BadInput(what, where="target.backend", fix="leave --ranks out")
        if recipe.training.steps is None:
            what = "the data is not read, so the number of steps must be said"
            raise BadInput(what, where="training.steps", fix="training.steps=10000, for example")
        training = recipe.training
        for key, size in (
            ("target.parallel", cut.ranks),
            ("training.shard x training.context", training.shard * training.context),
        ):
            if ranks % size:
                what = f"{ranks} ranks cannot be cut into {size} ({key})"
                raise BadInput(what, where="--ranks", fix=f"a multiple of {size}")
        trusted = section.trust_remote_code
        config = shape_of(model_name(section), trust_remote_code=trusted)
        return cls(recipe, ranks, TargetShape.of(config), draft_without_memory(recipe, config), cut)

    # --- memory ---------------------------------------------------------------------------------

    @property
    def step(self) -> StepMemory:
        training, packing = self.recipe.training, self.recipe.packing
        tokens = training.micro_batch * packing.tokens
        return StepMemory(self._work, tokens, training.accumulate, width=2)

    def target_bytes(self) -> int:
        """A rank's share of the weights, the layers that are whole while they run, the head that
        the loss reads, and what a pass holds."""
        target, cut, width = self.target, self.cut, self._target_width
        held = target.weights * width / (cut.fsdp * cut.tp)
        if cut.fsdp > 1:
            held += 2 * target.layer * width / cut.tp  # this layer, and the next on its way
        if cut.fsdp * cut.tp > 1:
            held += 2 * target.head
        a_pass = self.recipe.packing.tokens / cut.cp * target.widest / cut.tp * 2
        return int(held + a_pass)

    def predict(self, *, asks: bool = True) -> Prediction:
        """`asks`: the target's time is this draft's, too."""
        training = self.recipe.training
        trained, frozen = self._trained()
        kept = kept_bytes(self.draft, training)
        saved = 4 * (trained + frozen) + kept
        data_ranks = self.ranks // training.context
        packs = training.micro_batch * training.accumulate * data_ranks
        return Prediction(
            target_bytes=self.target_bytes(),
            draft_bytes=draft_bytes(trained, frozen, shard=training.shard, width=2, kept=kept),
            step_bytes=self.step.bytes(training.context),
            disk_bytes=(self.recipe.checkpoint.keep + 1) * saved,
            seconds_by_part=self._seconds(saved, self._target_s if asks else _nothing),
            tokens=(training.steps or 0) * packs * self.recipe.packing.tokens,
        )

    def _trained(self) -> tuple[int, int]:
        """Parameters of the draft that are trained, and that are not."""
        trained = sum(p.numel() for p in self.draft.parameters() if p.requires_grad)
        return trained, sum(p.numel() for p in self.draft.parameters()) - trained

    @property
    def _target_width(self) -> int:
        """Bytes of a weight."""
        dtype = getattr(self.recipe.target, "dtype", "auto")
        return {"fp8": 1, "float32": 4}.get(dtype, 2)

    # --- time -----------------------------------------------------------------------------------

    def _seconds(self, saved: int, target_s: Callable[..., float]) -> dict[str, float]:
        recipe, training = self.recipe, self.recipe.training
        total = training.steps or 0
        packs = training.micro_batch * training.accumulate
        one = target_s() + self._pack_s(self._work.step(self._seen())) / training.context
        trained, _ = self._trained()
        update = STEP_SECONDS["cuda"] + 36 * trained / training.shard / UPDATE_BYTES["cuda"]
        update += 2 * 4 * trained / self._link(self.ranks) * (self.ranks > 1)
        measured = times(0, total, recipe.evaluation.every_steps)
        saves = times(0, total, recipe.checkpoint.every_steps) | measured
        held_out = recipe.evaluation.rows * recipe.data.max_length / recipe.packing.tokens
        scored = self._pack_s(self._work.scored(self._seen()))
        evaluated = held_out / self.ranks * (target_s(alone=True) + scored)
        return {
            "start_up": 0.0,
            "data": 0.0,
            "steps": total * (packs * one + update),
            "evaluations": len(measured) * evaluated,
            "checkpoints": len(saves - {0}) * saved / SAVE_BYTES,
        }

    def _seen(self) -> float:
        """Keys that a query looks at: rows as long as they may be."""
        return self.recipe.data.max_length / 2

    def _target_s(self, *, alone: bool = False) -> float:
        """Seconds that a rank spends on the answer about a pack of its own. `alone`: ranks ask
        about different packs, as in an evaluation."""
        target, cut, tokens = self.target, self.cut, self.recipe.packing.tokens
        text, together = target.config, cut.tp * cut.cp
        context = 1 if alone else self.recipe.training.context
        asked = max(1, together // context)  # packs that ranks of one target ask about at a time
        width = text.num_attention_heads * text.head_dim
        operations = 2 * target.active + 4 * width * self._seen() * text.num_hidden_layers
        pass_s = tokens * operations / RATES["cuda"] / together
        if cut.fsdp > 1:  # the next layer comes while this one runs
            others = target.weights * self._target_width / cut.tp * (1 - 1 / cut.fsdp)
            pass_s = max(pass_s, others / self._link(cut.ranks))
        if cut.tp > 1:  # twice a layer, and nothing else to do meanwhile
            summed = 4 * text.num_hidden_layers * tokens / cut.cp * text.hidden_size * 2
            pass_s += summed / self._link(together)
        return float(asked * pass_s)

    @property
    def _work(self) -> Work:
        return self.recipe.method.work(self.draft, self.recipe.objective)

    def _pack_s(self, operations: float) -> float:
        """Seconds for so many operations a token of a pack, on one rank."""
        return float(self.recipe.packing.tokens * operations / RATES["cuda"])

    def _link(self, ranks: int) -> float:
        """Bytes a second between so many neighboring ranks."""
        return LINK_BYTES[ranks > GPUS_OF_A_MACHINE]


def _nothing(*, alone: bool = False) -> float:
    return 0.0


def draft_without_memory(recipe: Recipe, config: Any) -> DraftModel:
    """The recipe's draft, on a target of this config."""
    vocab_size = text_config(config).vocab_size
    size = min(recipe.draft.draft_vocab_size or vocab_size, vocab_size)
    settings = recipe.method.bench_draft_settings(vocab_size, recipe.objective)
    with torch.device("meta"):
        draft = recipe.method.draft_type()(config_of_draft(recipe, config, size, settings))
    if recipe.draft.freeze_embeddings:
        draft.freeze_embeddings()
    return draft
