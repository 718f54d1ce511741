"""Replay a block draft over the target's own answers, as it is and with one setting changed.

The same idea as `probe`: acceptance shows what files cannot. Readings differ in the source of the
features, the mask token, the slot that predicts the first token, the rotary settings, the size of
blocks and their attention direction, and the order of the Markov head's factors.
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
    from_anchor: bool  # slot 0 predicts the first token
    causal: bool
    late: int = 0  # training used the features of token t as those of token t + late
    interleaved: bool = False  # rotary pairs channels 2i and 2i + 1
    target_rope: bool = False
    factors_swapped: bool = False  # of the Markov head


class BlockProbe:
    """Scores one draft under every reading of its files that differs in one setting."""

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
        self._state = {name: tensor.clone() for name, tensor in self.draft.state_dict().items()}
        self._scores: dict[BlockReading, Score] = {}

    def score(self, reading: BlockReading) -> Score:
        if reading not in self._scores:
            self._apply(reading)
            backend: Eagle3TargetBackend = self.answering.backend(reading.aux_layer_ids)
            if reading.late:
                backend = _Late(self.answering.backend(reading.aux_layer_ids), reading.late)
            self._scores[reading] = self.answering.score_on(backend, self.draft)
            self._apply(self.as_written)
        return self._scores[reading]

    def _apply(self, reading: BlockReading) -> None:
        config = self.draft.config
        config.mask_token_id, config.block_size = reading.mask_token_id, reading.block_size
        config.sample_from_anchor, config.causal = reading.from_anchor, reading.causal
        self.draft.rotary = self._rotary
        rope = target_rope(self._subject)
        if reading.target_rope and rope is not None:
            rope_config = copy.deepcopy(config)
            rope_config.rope_parameters = rope
            self.draft.rotary = Rotary(rope_config)
        state = dict(self._state)
        if reading.interleaved:
            state |= in_halves(state, config.head_dim)
        if reading.factors_swapped:
            state |= {_W1: state[_W2], _W2: state[_W1]}
        self.draft.load_state_dict(state)

    def _variants(self, reading: BlockReading) -> Iterator[tuple[str, BlockReading]]:
        """The readings that differ in one setting, each with the id of its check."""
        depth = self._subject.target.depth
        for shift in (-1, 1):
            ids = tuple(layer + shift for layer in reading.aux_layer_ids)
            if all(0 <= layer < depth for layer in ids):
                yield "block-layers-shifted", replace(reading, aux_layer_ids=ids)
        for late in (-1, 1):
            yield "context-shifted", replace(reading, late=late)
        yield "slot-shifted", replace(reading, from_anchor=not reading.from_anchor)
        yield "rotary-layout", replace(reading, interleaved=not reading.interleaved)
        rope, expected_rope = own_rope(self._subject), target_rope(self._subject)
        if expected_rope is not None and rope != expected_rope:
            yield "block-rope-measured", replace(reading, target_rope=not reading.target_rope)
        for token in self._mask_candidates:
            yield "mask-measured", replace(reading, mask_token_id=token)
        yield "block-direction-measured", replace(reading, causal=not reading.causal)
        for size in (2 * reading.block_size, reading.block_size // 2):
            if 2 < size <= 64:
                yield "block-size-measured", replace(reading, block_size=size)
        if _W1 in self._state and self._state[_W1].shape == self._state[_W2].shape:
            swapped = not reading.factors_swapped
            yield "markov-swapped", replace(reading, factors_swapped=swapped)

    @cached_property
    def _mask_candidates(self) -> list[int]:
        """Tokens that trainers commonly use as the mask token, except the one in the files."""
        tokenizer, full = self._subject.target.tokenizer, self._subject.vocab_size
        candidates: list[int | None] = [full - 1, 0]
        if tokenizer is not None:
            names = ("mask_token_id", "pad_token_id", "unk_token_id", "eos_token_id")
            candidates += [getattr(tokenizer, name, None) for name in names]
            with suppress(BadInput):
                candidates.append(choose_mask_token_id(tokenizer, full))
        valid = [i for i in dict.fromkeys(candidates) if i is not None and 0 <= i < full]
        return [i for i in valid if i != self.as_written.mask_token_id]

    @cached_property
    def steps(self) -> dict[str, tuple[BlockReading, Score, BlockReading, Score]]:
        """The changes from the files' own reading to the best one, by the id of their check."""
        steps: dict[str, tuple[BlockReading, Score, BlockReading, Score]] = {}
        current = self.as_written
        while (better := self._better(current, steps)) is not None:
            name, best = better
            steps[name] = (current, self.score(current), best, self.score(best))
            current = best
        return steps

    def _better(
        self, current: BlockReading, done: Container[str]
    ) -> tuple[str, BlockReading] | None:
        """The best of the readings that clearly beat the current one, with its check; or None."""
        better = None
        for name, other in self._variants(current):
            score = self.score(other) if name not in done else None
            enough = _ENOUGH.get(name, _CLEARLY)
            if score is None or not self.score(current).clearly_below(score, enough):
                continue
            if better is None or score.accepted_S.mean() > self.score(better[1]).accepted_S.mean():
                better = (name, other)
        return better

    @property
    def best(self) -> Score:
        """The score with every setting corrected that decoding found wrong."""
        readings = list(self.steps.values())
        return self.score(readings[-1][2] if readings else self.as_written)


def in_halves(state: dict[str, Tensor], channels: int) -> dict[str, Tensor]:
    """q and k of every layer, permuted from rotary pairs of neighbors to rotary halves."""
    order = torch.cat([torch.arange(0, channels, 2), torch.arange(1, channels, 2)])
    permuted = {}
    for name, tensor in state.items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            by_head = tensor.view(-1, channels, tensor.shape[1])
            permuted[name] = by_head[:, order.to(tensor.device)].reshape(tensor.shape).contiguous()
        elif name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
            permuted[name] = tensor[order.to(tensor.device)]
    return permuted


class _Late(Eagle3TargetBackend):
    """A target whose features are shifted by `late` tokens; negative is early."""

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
