"""Several questions as one pass of the target, and its answer cut up again.

Rows are padded on the right to the widest question; a causal target does not see that, so each
question gets what it would have got alone, up to the rounding of a differently shaped pass.

Two packed rows of width 4 and 6, documents of 3 and of 2 + 3 tokens, padding shown as a dot:

    a b c .          a b c . . .     the padding joins the row's last document, as everywhere
    d e f g h .      d e f g h .
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch


def may_merge(one: TokenBatch, other: TokenBatch) -> bool:
    """Packed rows go with packed ones, padded with padded ones."""
    return (one.seq_lens is None) == (other.seq_lens is None)


def merged_tokens(questions: Sequence[TokenBatch]) -> int:
    """Cells of the pass that these would make together."""
    return sum(rows.shape[0] for rows in questions) * max(rows.shape[1] for rows in questions)


def merge(questions: Sequence[TokenBatch]) -> TokenBatch:
    """All rows, one below the other."""
    if len(questions) == 1:
        return questions[0]
    width = max(rows.shape[1] for rows in questions)
    lengths = [rows.seq_lens for rows in questions if rows.seq_lens is not None]
    documents = max((seq_lens.shape[1] for seq_lens in lengths), default=0)
    wide = [_widen(rows, width, documents) for rows in questions]
    columns = zip(*(rows.arguments() for rows in wide), strict=True)
    return TokenBatch(*(torch.cat(tensors) for tensors in columns if tensors[0] is not None))


def _widen(rows: TokenBatch, width: int, documents: int) -> TokenBatch:
    more = width - rows.shape[1]
    tokens = [F.pad(t, (0, more)) for t in (rows.input_ids, rows.attention_mask, rows.loss_mask)]
    if rows.packing is None:
        return TokenBatch(*tokens)
    position_BT, seq_lens, remaining_BT = rows.packing
    seq_lens = F.pad(seq_lens, (0, documents - seq_lens.shape[1]))
    last_B = (seq_lens > 0).long().cumsum(1).argmax(1)  # the last document of each row
    seq_lens[torch.arange(len(seq_lens)), last_B] += more
    position_BT = torch.cat([position_BT, position_BT[:, -1:] + 1 + torch.arange(more)], dim=1)
    remaining_BT = F.pad(remaining_BT, (0, more))
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
    assert batch.last_hidden_states is not None
    width = rows.shape[1]
    hidden_BTD = batch.last_hidden_states[:, :width].clone()
    hidden_BTD[:, -1] = 0  # the shift's tail: the wider batch has a padding token's state there
    aux_BTD = batch.aux_hidden_states[:, :width]
    return Eagle3TargetBatch.about(
        rows, aux_hidden_states=aux_BTD, last_hidden_states=hidden_BTD, shifted=True
    )
