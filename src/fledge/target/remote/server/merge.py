"""Merges several questions into one pass of the target, and splits its answer again.

Rows are padded on the right to the widest question. Padding does not affect a causal target, so
each question gets the answer it would get alone, up to the rounding of a differently shaped pass.

Two packed rows of width 4 and 6, documents of 3 and of 2 + 3 tokens, padding shown as a dot:

    a b c .          a b c . . .     padding belongs to the row's last document, as elsewhere
    d e f g h .      d e f g h .
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch


def may_merge(one: TokenBatch, other: TokenBatch) -> bool:
    """Whether both are packed or both are padded."""
    return (one.seq_lens is None) == (other.seq_lens is None)


def merged_tokens(questions: Sequence[TokenBatch]) -> int:
    """The tokens, padding included, of the pass that these questions make together."""
    return sum(rows.shape[0] for rows in questions) * max(rows.shape[1] for rows in questions)


def merge(questions: Sequence[TokenBatch]) -> TokenBatch:
    """All rows, stacked and padded to a common width."""
    if len(questions) == 1:
        return questions[0]
    width = max(rows.shape[1] for rows in questions)
    lengths = [rows.seq_lens for rows in questions if rows.seq_lens is not None]
    documents = max((seq_lens.shape[1] for seq_lens in lengths), default=0)
    padded = [_widen(rows, width, documents) for rows in questions]
    fields = zip(*(rows.arguments() for rows in padded), strict=True)
    return TokenBatch(*(torch.cat(tensors) for tensors in fields if tensors[0] is not None))


def _widen(rows: TokenBatch, width: int, documents: int) -> TokenBatch:
    padding = width - rows.shape[1]
    tokens = [F.pad(t, (0, padding)) for t in (rows.input_ids, rows.attention_mask, rows.loss_mask)]
    if rows.packing is None:
        return TokenBatch(*tokens)
    position_BT, seq_lens, remaining_BT = rows.packing
    seq_lens = F.pad(seq_lens, (0, documents - seq_lens.shape[1]))
    last_B = (seq_lens > 0).long().cumsum(1).argmax(1)  # the last document of each row
    seq_lens[torch.arange(len(seq_lens)), last_B] += padding
    position_BT = torch.cat([position_BT, position_BT[:, -1:] + 1 + torch.arange(padding)], dim=1)
    remaining_BT = F.pad(remaining_BT, (0, padding))
    return TokenBatch(*tokens, *[position_BT, seq_lens, remaining_BT])


def split(batch: Eagle3TargetBatch, questions: Sequence[TokenBatch]) -> list[Eagle3TargetBatch]:
    """The answer to each question, as if it had been asked alone."""
    if len(questions) == 1:
        return [batch]
    answers, first = [], 0
    for rows in questions:
        count = rows.shape[0]
        answers.append(_cut(batch.rows(slice(first, first + count)), rows))
        first += count
    return answers


def _cut(batch: Eagle3TargetBatch, rows: TokenBatch) -> Eagle3TargetBatch:
    width, supervision = rows.shape[1], {}
    for name in ("logits", "last_hidden_states"):
        if (answer_BTX := getattr(batch, name)) is not None:
            supervision[name] = answer_BTX[:, :width].clone()
            supervision[name][:, -1] = 0  # end of the shift; in the wider batch, a padding token's
    aux_BTD = batch.aux_hidden_states[:, :width]
    return Eagle3TargetBatch.about(rows, aux_hidden_states=aux_BTD, shifted=True, **supervision)
