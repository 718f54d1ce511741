"""Token rows: one document on the host, and the batch of rows that every target is asked about.

A batch is [B, T]: right-padded rows of one document each, or rows that several documents share
(`fledge.data.pack` shows an example). Nothing in it is shifted; all shifting is done by
`shift_left`. Importing this module does not import torch: tokenizer worker processes do not need
it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PACKING_FIELDS = ("position_ids", "seq_lens", "doc_remaining")
_PACKING_RULE = (
    "a packed batch needs position_ids and seq_lens (doc_remaining follows from them), a padded "
    "one neither"
)
SixTensors = tuple["Tensor", "Tensor", "Tensor", "Tensor | None", "Tensor | None", "Tensor | None"]


@dataclass(frozen=True)
class TokenRow:
    """One document: ids and loss mask [T], its origin, and whether its end was cut off."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    place: str
    truncated: bool


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A batch of rows as targets take them, on any device.

    The constructor checks shapes and dtypes, and its error names the offending field. Packed rows
    need `position_ids` and `seq_lens`; `doc_remaining` is derived from them when omitted. Padded
    rows need none of the three, but may have `position_ids` that count their tokens from 0.
    """

    input_ids: "Tensor"  # [B, T]
    attention_mask: "Tensor"  # [B, T], 1 at real tokens
    loss_mask: "Tensor"  # [B, T]
    position_ids: "Tensor | None" = None  # [B, T], restart at 0 with each document
    seq_lens: "Tensor | None" = None  # [B, max_docs], 0-padded; every row sums to T
    doc_remaining: "Tensor | None" = None  # [B, T], real tokens after the slot in its document
    places: tuple[tuple[str, ...], ...] = field(default=(), kw_only=True)  # per row and document

    def __post_init__(self) -> None:
        check_tokens(*self.arguments())
        if self.doc_remaining is None and self.seq_lens is not None:
            remaining = count_remaining(self.attention_mask, self.seq_lens)
            object.__setattr__(self, "doc_remaining", remaining)

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.input_ids.shape
        return rows, width

    @property
    def tokens(self) -> int:
        """Number of token slots, padding included."""
        return self.input_ids.numel()

    @property
    def packing(self) -> "tuple[Tensor, Tensor, Tensor] | None":
        """`position_ids`, `seq_lens` and `doc_remaining`, or None for padded rows."""
        if self.position_ids is None or self.seq_lens is None or self.doc_remaining is None:
            return None
        return self.position_ids, self.seq_lens, self.doc_remaining

    def arguments(self) -> SixTensors:
        """The tensors, in the order of `generate_batch`'s arguments."""
        return (
            *(self.input_ids, self.attention_mask, self.loss_mask),
            *(self.position_ids, self.seq_lens, self.doc_remaining),
        )

    def to(self, device: "torch.device") -> "TokenBatch":
        """The same rows on `device`, copied without synchronization."""
        from fledge.core.transfer import send

        return self.map(lambda tensor: send(tensor, device))

    def map(self, change: "Callable[[Tensor], Tensor]") -> "TokenBatch":
        """The same batch with `change` applied to every tensor."""
        tensors = [t for t in self.arguments() if t is not None]
        changed = [change(tensor) for tensor in tensors]
        if all(new is old for new, old in zip(changed, tensors, strict=True)):
            return self
        return TokenBatch(*changed, places=self.places)


def shift_left(tensor: "Tensor") -> "Tensor":
    """Shift [B, T, ...] left by one along T, with zeros in the last position."""
    shifted = tensor.new_zeros(tensor.shape)
    shifted[:, :-1] = tensor[:, 1:]
    return shifted


def check_tokens(
    input_ids: "Tensor",
    attention_mask: "Tensor",
    loss_mask: "Tensor",
    position_ids: "Tensor | None",
    seq_lens: "Tensor | None",
    doc_remaining: "Tensor | None",
) -> None:
    """Check ids [B, T], their masks and their packing; a ValueError names the offending field.

    Packed rows have `position_ids` and `seq_lens`, optionally `doc_remaining`; padded rows have
    none of them, or `position_ids` alone. Values are checked only on the CPU, where this needs no
    synchronization.
    """
    check_integers("input_ids", input_ids)
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids must be [B, T], not empty; got {list(input_ids.shape)}")
    rows, width = input_ids.shape
    check_shape("attention_mask", attention_mask, (rows, width))
    check_shape("loss_mask", loss_mask, (rows, width))
    check_packing(position_ids, seq_lens, doc_remaining)
    for name, tensor in (("position_ids", position_ids), ("doc_remaining", doc_remaining)):
        if tensor is not None:
            check_integers(name, tensor)
            check_shape(name, tensor, (rows, width))
    if seq_lens is None:
        if position_ids is not None and position_ids.is_cpu and attention_mask.is_cpu:
            check_positions(position_ids, attention_mask)
        return
    check_integers("seq_lens", seq_lens)
    if seq_lens.ndim != 2 or seq_lens.shape[0] != rows:
        raise ValueError(f"seq_lens must be [{rows}, max_docs], got {list(seq_lens.shape)}")
    if seq_lens.is_cpu:
        check_lengths(seq_lens, width)


def check_packing(position_ids: object, seq_lens: object, doc_remaining: object) -> None:
    """Check which of the packing fields are given, by the one rule of batches and trainers."""
    if seq_lens is None and doc_remaining is not None:
        raise ValueError(f"seq_lens missing: {_PACKING_RULE}")
    if seq_lens is not None and position_ids is None:
        raise ValueError(f"position_ids missing: {_PACKING_RULE}")


def count_remaining(attention_mask: "Tensor", seq_lens: "Tensor") -> "Tensor":
    """`doc_remaining`: the real tokens after each slot in its document, on the mask's device."""
    import torch

    rows, width = attention_mask.shape
    real_BT = (attention_mask != 0).long().cumsum(1)
    end_BJ = seq_lens.to(attention_mask.device).long().cumsum(1)
    slot_BT = torch.arange(width, device=end_BJ.device).repeat(rows, 1)
    document_BT = torch.searchsorted(end_BJ, slot_BT, right=True).clamp_max(end_BJ.shape[1] - 1)
    last_BT = (end_BJ.gather(1, document_BT) - 1).clamp(0, width - 1)  # lengths are checked later
    return real_BT.gather(1, last_BT) - real_BT


def check_positions(position_ids: "Tensor", attention_mask: "Tensor") -> None:
    """Check the position ids of rows without `seq_lens`, which are one document each.

    A row's real tokens must be at 0 .. n - 1, wherever its padding is; positions of padding are
    ignored. This reads values, so tensors on a device are synchronized.
    """
    real_BT = attention_mask.cpu() != 0
    expected_BT = real_BT.long().cumsum(1) - 1
    wrong_BT = real_BT & (position_ids.cpu() != expected_BT)
    if bool(wrong_BT.any()):
        raise ValueError(
            "position_ids without seq_lens must count the tokens of a row from 0 (0 .. n - 1), "
            f"since it is one document; wrong in row {int(wrong_BT.any(1).nonzero()[0])}"
        )


def check_lengths(seq_lens: "Tensor", width: int) -> None:
    """Check that the documents of every row fill it; `seq_lens` is on the CPU."""
    wrong = [row for row, total in enumerate(seq_lens.sum(1).tolist()) if total != width]
    if wrong or bool((seq_lens < 0).any()):
        raise ValueError(
            f"seq_lens must be non-negative and sum to the width {width} in every row (trailing"
            f" padding belongs to the last document); wrong in row {wrong[0] if wrong else 0}"
        )


def check_tensor(name: str, value: object) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")


def check_integers(name: str, tensor: "Tensor") -> None:
    import torch

    check_tensor(name, tensor)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, got {tensor.dtype}")


def check_shape(name: str, tensor: "Tensor", shape: tuple[int, ...]) -> None:
    check_tensor(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
