"""Several questions as one pass of the target, and its answer cut up again.

Rows are padded on the right to the widest question; a causal target does not see that, so each
question gets what it would have got alone, up to the rounding of a differently shaped pass.

Two packed rows of width 4 and 6, documents of 3 and of 2 + 3 tokens, padding shown as a dot:

    a b c .          a b c . . .     the padding joins the row's last document, as everywhere
    d e f g h .      d e f g h .
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.target.remote.protocol import Rows


def may_merge(one: Rows, other: Rows) -> bool:
    """Packed rows go with packed ones, padded with padded ones."""
    return (one.seq_lens is None) == (other.seq_lens is None)


def merged_tokens(questions: Sequence[Rows]) -> int:
    """Cells of the pass that these would make together."""
    return sum(rows.shape[0] for rows in questions) * max(rows.shape[1] for rows in questions)


def merge(questions: Sequence[Rows]) -> Rows:
    """All rows, one below the other."""
    if len(questions) == 1:
        return questions[0]
    width = max(rows.shape[1] for rows in questions)
    wide = [_widen(rows, width) for rows in questions]
    documents = max(
        (rows.seq_lens.shape[1] for rows in wide if rows.seq_lens is not None), default=0
    )

    def stacked(name: str) -> Tensor | None:
        parts = [getattr(rows, name) for rows in wide]
        if parts[0] is None:
            return None
        if name == "seq_lens":
            parts = [F.pad(part, (0, documents - part.shape[1])) for part in parts]
        return torch.cat(parts)

    return Rows(**{name: stacked(name) for name in Rows.__dataclass_fields__})  # type: ignore[arg-type]


def _widen(rows: Rows, width: int) -> Rows:
    more = width - rows.shape[1]
    if more == 0:
        return rows
    padded = {
        name: F.pad(getattr(rows, name), (0, more))
        for name in ("input_ids", "attention_mask", "loss_mask")
    }
    if rows.seq_lens is None:
        return Rows(**padded)
    assert rows.position_ids is not None
    assert rows.doc_remaining is not None
    seq_lens = rows.seq_lens.clone()
    last_B = (seq_lens > 0).long().cumsum(1).argmax(1)  # the last document of each row
    seq_lens[torch.arange(len(seq_lens)), last_B] += more
    further_B1 = rows.position_ids[:, -1:]
    positions = torch.cat([rows.position_ids, further_B1 + 1 + torch.arange(more)], dim=1)
    return Rows(
        **padded,
        position_ids=positions,
        seq_lens=seq_lens,
        doc_remaining=F.pad(rows.doc_remaining, (0, more)),
    )


def split(batch: Eagle3TargetBatch, questions: Sequence[Rows]) -> list[Eagle3TargetBatch]:
    """The answer to each question, as if it had been asked alone."""
    if len(questions) == 1:
        return [batch]
    answers, first = [], 0
    for rows in questions:
        count, width = rows.shape
        answers.append(_cut(batch.rows(slice(first, first + count)), width))
        first += count
    return answers


def _cut(batch: Eagle3TargetBatch, width: int) -> Eagle3TargetBatch:
    assert batch.last_hidden_states is not None
    hidden = batch.last_hidden_states[:, :width].clone()
    hidden[:, -1] = 0  # the shift's tail: in the wider batch a padding token's state came after it
    return Eagle3TargetBatch(
        aux_hidden_states=batch.aux_hidden_states[:, :width],
        input_ids=batch.input_ids[:, :width],
        attention_mask=batch.attention_mask[:, :width],
        loss_mask=batch.loss_mask[:, :width],
        last_hidden_states=hidden,
    )
