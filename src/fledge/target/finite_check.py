"""Reject answers that hold NaN or infinity: found on the device, reported on the host in one line.

A target that overflows its number format, or whose weights are damaged, still answers, and NaN
looks like agreement wherever two argmax tokens are compared. So every caller checks the answer: at
once (`checked_answer`), or, where synchronizing with the device would cost time, by keeping the
verdict (`inspect`) on the device and reading it later with the rest of the step.

Tokens picked from non-finite logits are handled in `core.picks`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fledge.core.batch import Eagle3TargetBatch, Supervision
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch, shift_left
from fledge.target.base import Eagle3TargetBackend, by_layer
from fledge.target.weights import local_part, stored_tensors

_NAMES: dict[Supervision, str] = {
    "hidden": "last hidden state",
    "logits": "logits",
    "probs": "probabilities",
}
_WIDER = {torch.float16: "bfloat16 or float32", torch.bfloat16: "float32"}


class NotFinite(BadInput):
    """A model's numbers are NaN or infinite: nothing derived from them means anything."""


@dataclass(frozen=True)
class Fault:
    """The first place in an answer that is not finite."""

    layer: str  # "layer 7", "last hidden state", "logits", ...
    row: int
    token: int  # index within the row


@dataclass(frozen=True)
class Verdict:
    """The result of `inspect`, still on the device."""

    first_BL: Tensor  # first bad slot of each aux layer, then of the supervision; T if none is bad
    width: int  # T
    supervision: Supervision
    dtype: torch.dtype  # of the states

    @property
    def broken(self) -> Tensor:
        """Whether anything is not finite, as a bool tensor on the device."""
        return (self.first_BL < self.width).any()

    def fault(self, aux_layer_ids: Sequence[int]) -> Fault | None:
        """The lowest bad layer of the first bad row, which is the likely origin; None if all is
        finite. Waits for the device."""
        for row, (*aux, last) in enumerate(self.first_BL.tolist()):
            layers = zip(aux_layer_ids, aux, strict=True)
            for layer_id, slot in sorted(pair for pair in layers if pair[1] < self.width):
                return Fault(f"layer {layer_id}", row, slot)
            if last < self.width:  # supervision is shifted: slot t is about token t + 1
                return Fault(_NAMES[self.supervision], row, last + 1)
        return None


@torch.no_grad()
def inspect(batch: Eagle3TargetBatch, aux_layers: int) -> Verdict:
    """Look for NaN and infinity at real tokens, without waiting for the device. Values at padding,
    or about a token past the end of a document, are meaningless and are ignored."""
    aux_BTAD = by_layer(batch.aux_hidden_states, aux_layers)
    real_BT = batch.attention_mask.to(aux_BTAD.device) != 0
    bad_BTA = ~finite_rows(aux_BTAD) & real_BT[..., None]
    remaining_BT = batch.doc_remaining
    supervised_BT = shift_left(real_BT) if remaining_BT is None else remaining_BT > 0
    bad_BT = ~_finite_supervision(batch) & supervised_BT.to(real_BT.device)
    bad_BTL = torch.cat([bad_BTA, bad_BT[..., None]], dim=-1)
    width = real_BT.shape[1]
    slot_T1 = torch.arange(width, device=bad_BTL.device)[:, None]
    first_BL = torch.where(bad_BTL, slot_T1, width).amin(1)
    return Verdict(first_BL, width, batch.supervision, aux_BTAD.dtype)


def finite_rows(values: Tensor) -> Tensor:
    """Whether every number of a row is finite: [..., D] -> bool [...].

    Tests the minimum and the maximum: both propagate NaN, and both are exact, whereas a sum of
    large bfloat16 numbers could itself overflow. `isfinite().all()` would materialize a mask of the
    whole tensor.
    """
    if values.is_cuda:
        low, high = torch.aminmax(values, dim=-1)
    else:  # no synchronization, and one reduction over everything is five times as fast as per row
        if values.numel() and all(map(math.isfinite, map(float, torch.aminmax(values)))):
            return torch.ones(values.shape[:-1], dtype=torch.bool, device=values.device)
        low, high = values.amin(-1), values.amax(-1)
    return low.isfinite() & high.isfinite()


def _finite_supervision(batch: Eagle3TargetBatch) -> Tensor:
    if batch.logits is not None:  # minus infinity is a token that cannot be sampled
        return batch.logits.amax(-1).isfinite()
    states = batch.target_probs if batch.last_hidden_states is None else batch.last_hidden_states
    assert states is not None
    return finite_rows(states)


def checked_answer(target: Eagle3TargetBackend, rows: TokenBatch) -> Eagle3TargetBatch:
    """The target's answer about these rows; raises NotFinite unless it is finite. Waits for the
    device."""
    batch = target.answer(rows)
    check_answer(target, batch, rows)
    return batch


def check_answer(target: Eagle3TargetBackend, batch: Eagle3TargetBatch, rows: TokenBatch) -> None:
    """Raise NotFinite if an answer is not finite."""
    verdict = inspect(batch, len(target.aux_layer_ids))
    fault = verdict.fault(target.aux_layer_ids)
    if fault is not None:
        raise refusal(fault, place=place_of(rows, fault), dtype=verdict.dtype)


def refusal(
    fault: Fault,
    *,
    dtype: torch.dtype,  # of the target's states
    place: str = "",  # where the row came from
    where: str = "",
) -> NotFinite:
    """The error about an answer: its layer, its row, and the probable cause."""
    row = f"row {fault.row} ({place})" if place else f"row {fault.row}"
    seen = f"the target's answer is not finite in {fault.layer}, {row}, token {fault.token}"
    name, wider = str(dtype).removeprefix("torch."), _WIDER.get(dtype)
    fix = f"load the target in {wider}" if wider else "check the target's weights and config"
    overflow = f"{name} overflows" if wider else f"its numbers overflow even {name}"
    what = f"{seen}: {overflow}, or the weights are damaged"
    return NotFinite(what, where=where, fix=fix)


def place_of(rows: TokenBatch, fault: Fault) -> str:
    """Where the document with the fault came from; empty if unknown."""
    places = rows.places[fault.row] if fault.row < len(rows.places) else ()
    if rows.seq_lens is None:
        return places[0] if places else ""
    ends = rows.seq_lens[fault.row].cumsum(0).tolist()
    return next((place for place, end in zip(places, ends, strict=False) if fault.token < end), "")


def bad_weights(name: str, *, owner: str, where: str = "") -> NotFinite:
    """The error about a tensor that holds NaN or infinity."""
    what = f"weights of {owner} hold NaN or infinity: tensor {name}"
    return NotFinite(what, where=where, fix="the files are damaged: fetch or convert them again")


@torch.no_grad()
def bad_weight(model: nn.Module) -> str | None:
    """Name of the first tensor of a model that is not finite."""
    tensors = model.state_dict().items()
    return next((n for n, t in tensors if isinstance(t, Tensor) and not is_finite(t)), None)


def is_finite(tensor: Tensor) -> bool:
    """Whether a weight holds neither NaN nor infinity. Each rank checks its own shard."""
    parts = stored_tensors(local_part(tensor))
    # 8-bit and packed parts support no such reductions and hardly hold NaN or infinity
    plain = [p for p in parts if p.is_floating_point() and p.itemsize > 1 and p.numel()]
    return all(
        bool(torch.stack([part.amin(), part.amax()]).isfinite().all())
        for part in plain
        if part.device.type != "meta"
    )
