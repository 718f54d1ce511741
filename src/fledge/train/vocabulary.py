"""Which tokens a recipe's draft can say: a warm start's own, else its cache's where the recipe does
not say another size, else the most frequent of the rows.

Training and precompute both choose here, so a cache of probabilities is made for the vocabulary
that training would have taken.
"""

from collections.abc import Iterable

from fledge.core.errors import BadInput
from fledge.data.rows import RowView
from fledge.data.vocab import DraftVocabulary, count_supervised, select_vocabulary
from fledge.methods.registry import load_draft
from fledge.recipe.schema import Recipe
from fledge.train.runs import starting_draft


def choose_vocabulary(
    recipe: Recipe,
    rows: RowView,  # the training rows
    *,
    vocab_size: int,  # of the target
    special_ids: Iterable[int | None],
    fingerprint: str,  # of the rows
) -> DraftVocabulary:
    counts_V = count_supervised(rows.flat(), vocab_size)
    start = starting_draft(recipe)
    if start is None:
        size = recipe.draft.draft_vocab_size
        return select_vocabulary(counts_V, size, special_ids=special_ids, fingerprint=fingerprint)
    ids = load_draft(start).selected_token_ids
    if ids is None:
        raise BadInput("the draft has no vocabulary map", where=str(start))
    covered = float(counts_V[ids.numpy()].sum() / max(1, counts_V.sum()))
    return DraftVocabulary(ids.numpy(), vocab_size, covered, fingerprint)
