"""Run packed rows through any causal LM: documents never attend to each other, without a mask.

Documents are *run as rows of their own*: sorted by length, grouped with others of similar length,
right-padded to the longest of the group, run with plain causal attention, and their states written
back to their slots in the pack. That is exact for every architecture (docs/target.md explains why,
and what it costs); `plan_groups` keeps the padding inside a group small.

Worked example, width 8, documents of 3 and 2 tokens (`a b c`, `d e`, three slots of padding):

    flat slot   0 1 2 3 4 5 6 7          group of two rows   a b c     slots 0 1 2
    token       a b c d e . . .                              d e e     slots 3 4 (the second e is
                                                             padding and is written nowhere)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fledge.core.rows import TokenBatch, check_lengths, check_positions
from fledge.core.transfer import send


@dataclass(frozen=True)
class Documents:
    """Where the documents of a batch are, in slots of its flattened [B * T]."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]  # real tokens; padding after the last document is not one


@dataclass(frozen=True, eq=False)
class Group:
    """Some documents run as one right-padded batch [N, L].

    `slots_NL` holds the flat slot that each cell reads; cells past a document's end repeat its last
    token. `cells` and `slots` pair the real cells (of the flattened N * L) with their slots.
    """

    slots_NL: Tensor
    attention_mask_NL: Tensor
    cells: Tensor
    slots: Tensor

    def take(self, tokens_BT: Tensor) -> Tensor:
        return tokens_BT.flatten()[self.slots_NL]

    def put(self, states_NLD: Tensor, into_BTD: Tensor) -> None:
        """Write the real cells' states to their documents' slots."""
        real_ND = states_NLD.flatten(0, 1).index_select(0, self.cells.to(states_NLD.device))
        into_BTD.flatten(0, 1).index_copy_(
            0, self.slots.to(into_BTD.device), real_ND.to(into_BTD.device)
        )


def right_padded(attention_mask: Tensor) -> Tensor:
    """The mask [B, T] as booleans on the CPU; raises unless all padding is on the right."""
    real_BT = attention_mask.detach().cpu().numpy().astype(np.bool_)
    if (real_BT != (np.arange(real_BT.shape[1]) < real_BT.sum(1, keepdims=True))).any():
        raise ValueError("attention_mask must be ones followed by zeros in every row")
    return torch.from_numpy(real_BT)


def find_documents(rows: TokenBatch) -> Documents | None:
    """Locate the documents of packed rows; None when the batch is not packed. `seq_lens` and
    `attention_mask` are needed on the host: a batch on a device is synchronized with it."""
    if rows.packing is None:
        if rows.position_ids is not None and rows.position_ids.device.type != "cpu":
            check_positions(rows.position_ids, rows.attention_mask)  # not checked before
        return None
    position_ids, seq_lens, _ = rows.packing
    width = rows.shape[1]
    if seq_lens.device.type != "cpu":  # not checked before
        seq_lens = seq_lens.detach().cpu()
        check_lengths(seq_lens, width)
    # numpy: for so few numbers, waking torch's threads at every step takes longer than the work
    real_BT = right_padded(rows.attention_mask).numpy()
    starts: list[int] = []
    lengths: list[int] = []
    filled_B = real_BT.sum(1).tolist()
    for row, (documents, filled) in enumerate(zip(seq_lens.tolist(), filled_B, strict=True)):
        begin = 0
        for length in documents:
            real = min(length, filled - begin)
            if real > 0:
                starts.append(row * width + begin)
                lengths.append(real)
            begin += length
    if position_ids.device.type == "cpu":  # position ids of padding do not matter
        slot_N = np.flatnonzero(real_BT)
        expected_N = slot_N - np.repeat(*np.array([starts, lengths], dtype=np.int64))
        wrong_N = position_ids.numpy()[real_BT] != expected_N
        if wrong_N.any():
            row = slot_N[wrong_N][0] // width
            raise ValueError(
                f"position_ids must restart at 0 with each document of seq_lens; wrong in row {row}"
            )
    return Documents(tuple(starts), tuple(lengths))


def plan_groups(
    lengths: Sequence[int], *, overhead_tokens: int, max_tokens: int
) -> list[list[int]]:
    """Partition documents, sorted by length, into groups that minimize padded tokens plus overhead
    per group (a dynamic program over where to cut). A group never holds more than `max_tokens`
    cells unless it is one long document. The same lengths give the same groups."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    longest = np.array([lengths[i] for i in order], dtype=np.int64)
    count = len(order)
    cost = np.zeros(count + 1, dtype=np.int64)  # of the first i documents
    cut = np.zeros(count + 1, dtype=np.int64)  # where their last group begins
    for end in range(1, count + 1):
        begins = np.arange(end)
        cells = longest[:end] * (end - begins)
        allowed = (cells <= max_tokens) | (begins == end - 1)
        candidate = np.where(allowed, cost[:end] + cells + overhead_tokens, np.iinfo(np.int64).max)
        cut[end] = candidate.argmin()
        cost[end] = candidate[cut[end]]
    groups = []
    end = count
    while end > 0:
        groups.append(order[cut[end] : end])
        end = int(cut[end])
    return groups[::-1]


def group_documents(
    documents: Documents, plan: Sequence[Sequence[int]], *, device: torch.device
) -> list[Group]:
    """The plan (which documents go together) as index tensors on `device`."""
    groups = []
    for members in plan:
        starts_N1 = torch.tensor([[documents.starts[i]] for i in members])
        lengths_N1 = torch.tensor([[documents.lengths[i]] for i in members])
        offsets_L = torch.arange(int(lengths_N1.max()))
        real_NL = offsets_L < lengths_N1
        slots_NL = starts_N1 + torch.minimum(offsets_L, lengths_N1 - 1)
        parts = (slots_NL, real_NL.long(), real_NL.flatten().nonzero()[:, 0], slots_NL[real_NL])
        groups.append(Group(*(send(part, device) for part in parts)))
    return groups


def overhead_in_tokens(model: nn.Module, *, depth: int) -> int:
    """Fixed cost of one more forward pass, roughly, in tokens: launching kernels and reading
    weights takes a fixed time per layer; a token takes two operations per weight."""
    parameters = list(model.parameters())
    weights = max(1, sum(parameter.numel() for parameter in parameters))
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    seconds_per_layer, operations_per_second = (2e-4, 1e11) if on_cpu else (5e-4, 4e14)
    return round(depth * seconds_per_layer / (2 * weights / operations_per_second))
