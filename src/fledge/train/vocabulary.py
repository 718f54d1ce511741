"""Chooses a draft's vocabulary: that of a warm start, else that of a cache unless the recipe sets
another size, else the most frequent tokens of the rows.

Training and precompute share this choice, so that a cache of probabilities is made for the
vocabulary that training would choose.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.data.rows import RowView
from fledge.data.vocab import (
    DraftVocabulary,
    count_supervised,
    select_vocabulary,
    special_token_ids,
)
from fledge.methods.registry import load_draft
from fledge.recipe.schema import Recipe
from fledge.target.base import Eagle3TargetBackend
from fledge.train.runs import starting_draft

VOCABULARY_NAME = "vocabulary.safetensors"


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


def vocabulary_of_run(
    recipe: Recipe, target: Eagle3TargetBackend, train: RowView, tokenizer: Any, fingerprint: str
) -> DraftVocabulary:
    """The vocabulary of a run's draft: the saved one if the run exists, else that of `init_from`,
    else the cache's, else one chosen from the rows. A cache of probabilities dictates its own,
    which a warm start must match; one that a cache only suggests must have the recipe's size."""
    saved = Path(recipe.run.output_dir) / VOCABULARY_NAME
    dictated, suggested = target.info().vocabulary, target.info().suggested
    vocab_size, size = target.info().vocab_size, recipe.draft.draft_vocab_size
    wanted = vocab_size if size is None else min(size, vocab_size)
    warm = recipe.draft.init_from is not None  # brings its own map, whatever size the recipe sets
    if dictated is not None and dictated.size != wanted and recipe.says_vocab_size and not warm:
        what = f"made for a draft vocabulary of {dictated.size}, draft.draft_vocab_size says {size}"
        fix = f"draft.draft_vocab_size={dictated.size}, or a cache of hidden states"
        raise BadInput(what, where=f"target.backend={recipe.target.backend}", fix=fix)
    if saved.exists():  # a resumed run always keeps its map
        kept = DraftVocabulary.load(saved)
        if kept.vocab_size != vocab_size:
            what = f"made for a target of {kept.vocab_size} tokens, this one has {vocab_size}"
            fix = "name the target that the run was started with"
            raise BadInput(what, where=str(saved), fix=fix)
        return kept
    if not warm:
        if dictated is not None:
            return dictated
        if suggested is not None and suggested.size == wanted:
            return suggested
    special_ids = special_token_ids(tokenizer)
    return choose_vocabulary(
        recipe, train, vocab_size=vocab_size, special_ids=special_ids, fingerprint=fingerprint
    )
