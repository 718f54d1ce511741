"""The rows whose steps are counted: some of a run's own or, where no data is read, typical ones."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from fledge.core.rows import TokenBatch, TokenRow
from fledge.data.pack import Piece, collate

if TYPE_CHECKING:
    from fledge.train.setup import Training

SUPERVISED = 0.8  # a typical share of the tokens
_SAMPLED = 4  # micro-batches of a run


def sampled_rows(training: "Training") -> list[TokenBatch]:
    """The first micro-batches of this rank; typical ones if it has none."""
    recipe, stream = training.recipe, training.stream
    batches = islice(stream.micro_batches_before(stream.steps), _SAMPLED)
    return [collated() for collated in batches] or [
        typical_rows(recipe.training.micro_batch, stream.tokens, document=recipe.data.max_length)
    ]


def typical_rows(
    rows: int, tokens: int, *, document: int, supervised: float = SUPERVISED
) -> TokenBatch:
    """`rows` packs of `tokens` tokens, with documents of this length that end in an answer."""
    lengths = np.diff([*range(0, tokens, document), tokens]).tolist()
    documents = [_document(length, supervised) for length in lengths]
    pack = tuple(Piece(row, 0, length) for row, length in enumerate(lengths))
    return collate(documents, [pack] * rows, tokens, pad_id=0)


def _document(length: int, supervised: float) -> TokenRow:
    answer = np.arange(length) >= round(length * (1 - supervised))
    return TokenRow(np.zeros(length, np.int32), answer.astype(np.uint8), "", truncated=False)


def per_token(operations: Callable[[TokenBatch], float], batches: Sequence[TokenBatch]) -> float:
    """The mean over all tokens, of which padding is none."""
    tokens = sum(int(rows.attention_mask.sum()) for rows in batches)
    return sum(map(operations, batches)) / max(1, tokens)
