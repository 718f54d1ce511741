"""A block draft replayed over the target's own answers, as it is and with one thing changed.

The same idea as `probe`: what a file cannot show, acceptance does. Readings differ in where the
features come from, what the placeholder is, which slot speaks first, how positions turn, which way
slots see, and how the Markov head's factors lie.
"""

import copy
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.diagnosis.checks.base import Subject
from fledge.diagnosis.checks.positions import own_rope, target_rope
from fledge.diagnosis.checks.probe import Answering, Enough, Score
from fledge.draft.block import BlockDraftModel
from fledge.draft.mask_token import choose_mask_token_id
from fledge.draft.rotary import Rotary
from fledge.target.base import Eagle3TargetBackend
from fledge.target.hf.model import HFEagle3TargetModel

_W1, _W2 = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
_CLEARLY = Enough(0.05)
_ENOUGH = {"block-direction-measured": Enough(0.03), "block-size-measured": Enough(0.1)}


@dataclass(frozen=True)
class BlockReading:
    """One way to read the files."""

    aux_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    from_anchor: bool  # the first slot speaks
    causal: bool
    late: int = 0  # the features of token t were trained as those of token t + late
    interleaved: bool = False  # channels 2i and 2i + 1 turn against each other
    target_rope: bool = False
    factors_swapped: bool = False  # of the Markov head


class BlockProbe:
    """One draft's files under every reading that differs in one setting."""

    def __init__(self, subject: Subject, draft: BlockDraftModel, answering: Answering) -> None:
        model, info = answering.first.model, answering.first.info()
        self.draft: Any = draft.to(next(model.parameters()).device, info.dtype)
        self.draft.borrow_from(answering.first)
        self.answering, self._subject = answering, subject
        config = draft.config
        self.as_written = BlockReading(
            tuple(config.aux_layer_ids), config.mask_token_id, config.block_size,
            config.sample_from_anchor, config.causal,
        )  # fmt: skip
        self._rotary: Any = self.draft.rotary
        self._state = {name: held.clone() for name, held in self.draft.state_dict().items()}
        self._scores: dict[BlockReading, Score] = {}

    def score(self, reading: BlockReading) -> Score:
        if reading not in self._scores:
            self._set(reading)
            backend: Eagle3TargetBackend = self.answering.backend(reading.aux_layer_ids)
            if reading.late:
                backend = _Late(self.answering.backend(reading.aux_layer_ids), reading.late)
            self._scores[reading] = self.answering.score_on(backend, self.draft)
            self._set(self.as_written)
        return self._scores[reading]

    def _set(self, reading: BlockReading) -> None:
        config = self.draft.config
        config.mask_token_id, config.block_size = reading.mask_token_id, reading.block_size
        config.sample_from_anchor, config.causal = reading.from_anchor, reading.causal
        self.draft.rotary = self._rotary
        rope = target_rope(self._subject)
        if reading.target_rope and rope is not None:
            turned = copy.deepcopy(config)
            turned.rope_parameters = rope
            self.draft.rotary = Rotary(turned)
        state = dict(self._state)
        if reading.interleaved:
            state |= in_halves(state, config.head_dim)
        if reading.factors_swapped:
            state |= {_W1: state[_W2], _W2: state[_W1]}
        self.draft.load_state_dict(state)

    def _others(self, reading: BlockReading) -> Iterator[tuple[str, BlockReading]]:
        """Readings that differ in one setting, by the check that asks for it."""
        depth = self._subject.target.depth
        for shift in (-1, 1):
            ids = tuple(layer + shift for layer in reading.aux_layer_ids)
            if all(0 <= layer < depth for layer in ids):
                yield "block-layers-shifted", replace(reading, aux_layer_ids=ids)
        for late in (-1, 1):
            yield "context-shifted", replace(reading, late=late)
        yield "slot-shifted", replace(reading, from_anchor=not reading.from_anchor)
        yield "rotary-layout", replace(reading, interleaved=not reading.interleaved)
        own, theirs = own_rope(self._subject), target_rope(self._subject)
        if theirs is not None and own != theirs:
            yield "block-rope-measured", replace(reading, target_rope=not reading.target_rope)
        for token in self._masks:
            yield "mask-measured", replace(reading, mask_token_id=token)
        yield "block-direction-measured", replace(reading, causal=not reading.causal)
        for size in (2 * reading.block_size, reading.block_size // 2):
            if 2 < size <= 64:
                yield "block-size-measured", replace(reading, block_size=size)
        if _W1 in self._state and self._state[_W1].shape == self._state[_W2].shape:
            swapped = not reading.factors_swapped
            yield "markov-swapped", replace(reading, factors_swapped=swapped)

    @cached_property
    def _masks(self) -> list[int]:
        """Tokens that trainers take for placeholders."""
        tokenizer, full = self._subject.target.tokenizer, self._subject.vocab_size
        found: list[int | None] = [full - 1, 0]
        if tokenizer is not None:
            names = ("mask_token_id", "pad_token_id", "unk_token_id", "eos_token_id")
            found += [getattr(tokenizer, name, None) for name in names]
            with suppress(BadInput):
                found.append(choose_mask_token_id(tokenizer, full))
        known = [i for i in dict.fromkeys(found) if i is not None and 0 <= i < full]
        return [i for i in known if i != self.as_written.mask_token_id]

    @cached_property
    def steps(self) -> dict[str, tuple[BlockReading, Score, BlockReading, Score]]:
        """From the files' own reading to the best: what was changed, by the check that names it."""
        steps: dict[str, tuple[BlockReading, Score, BlockReading, Score]] = {}
        here = self.as_written
        while (better := self._better(here, steps)) is not None:
            name, best = better
            steps[name] = (here, self.score(here), best, self.score(best))
            here = best
        return steps

    def _better(self, here: BlockReading, done: Container[str]) -> tuple[str, BlockReading] | None:
        """The best of the readings that clearly beat this one."""
        better = None
        for name, other in self._others(here):
            score = self.score(other) if name not in done else None
            enough = _ENOUGH.get(name, _CLEARLY)
            if score is None or not self.score(here).clearly_below(score, enough):
                continue
            if better is None or score.accepted_S.mean() > self.score(better[1]).accepted_S.mean():
                better = (name, other)
        return better

    @property
    def best(self) -> Score:
        """What the files are worth with everything that decoding found mended."""
        readings = list(self.steps.values())
        return self.score(readings[-1][2] if readings else self.as_written)


def in_halves(state: dict[str, Tensor], channels: int) -> dict[str, Tensor]:
    """q and k of every layer, from pairs of neighbors that turn to halves that do."""
    order = torch.cat([torch.arange(0, channels, 2), torch.arange(1, channels, 2)])
    found = {}
    for name, held in state.items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            by_head = held.view(-1, channels, held.shape[1])
            found[name] = by_head[:, order.to(held.device)].reshape(held.shape).contiguous()
        elif name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
            found[name] = held[order.to(held.device)]
    return found


class _Late(Eagle3TargetBackend):
    """A target whose features come `late` tokens late, or early."""

    def __init__(self, inner: HFEagle3TargetModel, late: int) -> None:
        super().__init__("hidden")
        self.inner, self.late, self.aux_layer_ids = inner, late, inner.aux_layer_ids

    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        batch = self.inner.answer(rows)
        return replace(batch, aux_hidden_states=batch.aux_hidden_states.roll(self.late, dims=1))

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def info(self) -> Any:
        return self.inner.info()
