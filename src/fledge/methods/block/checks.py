"""Checks of block drafts (DFlash, DSpark): by their files, and by decoding with other readings.

Engines load most of these faults without a warning: a wrong mask token is embedded like any other,
and acceptance falls to that of a random draft.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.formats.checks.base import Finding, Repair, Subject, check, error
from fledge.formats.checks.probe import (
    AUX_SHIFTED,
    ROPE_MEASURED,
    Answering,
    Probe,
    Score,
    Setting,
)
from fledge.formats.foreign import DraftFiles
from fledge.methods.block.formats import BlockView
from fledge.methods.shared.config import PLACEHOLDER_KEY
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.placeholder import choose_placeholder


@check("block", "static", "DFlash, DSpark: a block size that is absent, or at odds with the tokens "
       "that a round proposes; a key that vLLM takes for causal blocks")  # fmt: skip
def block(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    assert isinstance(view, BlockView)
    size, stated = view.setting("block_size"), view.stated_tokens
    if type(size) is not int or size <= view.first_place:
        fix = f"block_size: {stated + view.first_place}" if stated else "write the trained size"
        yield error(f"block_size is {size}", fix)
    elif stated not in (None, size - view.first_place):
        yield error(
            f"blocks of {size} slots propose {size - view.first_place} tokens, the file says "
            f"{stated}: a block of another length is served than was trained",
            fix=f"speculative_tokens: {size - view.first_place}",
        )
    if view.get("sliding_window_non_causal") is False and not view.sliding_layers:
        evidence = (
            "sliding_window_non_causal is false: the trainer means sliding layers, of which there "
            "are none; vLLM 0.32 applies it to all layers, and slots no longer see later ones"
        )
        yield subject.only_for("vllm", evidence, "leave the key out")


# --- readings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockReading:
    """One way to read the files."""

    aux_layer_ids: tuple[int, ...]
    mask: int
    from_anchor: bool  # slot 0 predicts the first token
    interleaved: bool = False  # rotary pairs channels 2i and 2i + 1
    target_rope: bool = False


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


def _permute(files: DraftFiles) -> None:
    for name, tensor in in_halves(files.view.state, files.view.get("head_dim")).items():
        files.put_tensor(name, tensor)


def _anchor(subject: Subject, right: BlockReading) -> Repair | None:
    if subject.view.method.name != "dspark":
        return None  # no engine reads a DFlash draft that way
    return partial(DraftFiles.put, key="sample_from_anchor", value=right.from_anchor)


class BlockProbe(Probe[BlockReading]):
    settings = (
        AUX_SHIFTED,
        Setting(
            "slot-shifted", "DFlash, DSpark: the first token read from the wrong slot",
            lambda _, reading: [replace(reading, from_anchor=not reading.from_anchor)],
            lambda reading: f"first token from slot {0 if reading.from_anchor else 1}",
            "its slots predict other tokens than engines assume: sample_from_anchor, or, for "
            "DFlash, labels one place off in training",
            repair=_anchor,
        ),
        Setting(
            "rotary-layout", "DFlash, DSpark: rotary pairs of neighboring channels, not halves",
            lambda _, reading: [replace(reading, interleaved=not reading.interleaved)],
            lambda reading: f"with {'neighboring channels' if reading.interleaved else 'halves'} "
            "paired",
            "permute q_proj, k_proj and their norms",
            repair=lambda _, right: _permute,
        ),
        ROPE_MEASURED,
        Setting(
            "mask-measured", "DFlash, DSpark: another placeholder than in training",
            lambda probe, reading: (replace(reading, mask=i) for i in probe.mask_candidates),
            lambda reading: f"with token {reading.mask} as the placeholder",
            "write the id that it was trained with",
            repair=lambda _, right: partial(DraftFiles.put_mask, token=right.mask),
        ),
    )  # fmt: skip

    def __init__(self, subject: Subject, draft: DraftModel, answering: Answering) -> None:
        config = draft.config
        ids, mask = tuple(config.aux_layer_ids), getattr(config, PLACEHOLDER_KEY)
        super().__init__(
            subject, draft, answering, BlockReading(ids, mask, config.sample_from_anchor)
        )
        self.draft.borrow_from(answering.first)
        self.state = {name: tensor.clone() for name, tensor in self.draft.state_dict().items()}

    def beats(self, best: Score, score: Score) -> bool:
        return bool(score.accepted_S.mean() > best.accepted_S.mean())

    def apply(self, reading: BlockReading) -> None:
        changed = {PLACEHOLDER_KEY: reading.mask, "sample_from_anchor": reading.from_anchor}
        self.draft.spec = replace(self.draft.spec, **changed)
        self.draft.rotary = self.rotary(reading)
        permuted = in_halves(self.state, self.draft.spec.head_dim) if reading.interleaved else {}
        self.draft.load_state_dict(self.state | permuted)

    @cached_property
    def mask_candidates(self) -> list[int]:
        """Tokens that trainers commonly use as the mask token, except the one in the files."""
        tokenizer, full = self.subject.target.tokenizer, self.subject.vocab_size
        candidates: list[int | None] = [full - 1, 0]
        if tokenizer is not None:
            names = (PLACEHOLDER_KEY, "pad_token_id", "unk_token_id", "eos_token_id")
            candidates += [getattr(tokenizer, name, None) for name in names]
            with suppress(BadInput):
                candidates.append(choose_placeholder(tokenizer, full))
        valid = [i for i in dict.fromkeys(candidates) if i is not None and 0 <= i < full]
        return [i for i in valid if i != self.as_written.mask]


MEASURED = [setting.check() for setting in BlockProbe.settings]
