"""Builds what `fledge precompute` needs from a recipe: rows, vocabulary, target, cache layout."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.core.errors import BadInput
from fledge.data import sources
from fledge.data.prepare import Progress, tokenizer_files_fingerprint
from fledge.data.rows import Rows, RowView, split_rows
from fledge.data.vocab import special_token_ids
from fledge.recipe.schema import Recipe
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.format import OVER_A_VOCABULARY
from fledge.target.cache.job import CacheJob, CacheOptions, ModelFacts, make_job
from fledge.target.kinds import TargetKind, kind_of
from fledge.training.drafts import choose_vocabulary, make_target, open_target, shared_section
from fledge.training.setup import repeated_rows, split_training, tokenise_options, tokenised


class _Concatenated:
    """Training rows, followed by held-out rows."""

    def __init__(self, first: Rows, then: Rows | None) -> None:
        self._first, self._then = first, then
        parts = [first.lengths] if then is None else [first.lengths, then.lengths]
        self.lengths = np.concatenate(parts)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> object:
        if index < len(self._first):
            return self._first[index]
        assert self._then is not None
        return self._then[index - len(self._first)]


def _precomputable(recipe: Recipe) -> TargetKind[Any]:
    kind = kind_of(recipe.target)
    if kind.brings_rows:
        what, fix = "a cache is not made from a cache", "fledge cache convert"
        raise BadInput(what, where="target.backend", fix=fix)
    return kind


def cache_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The dtype of the target's answers, as far as it can be read from the config."""
    return _precomputable(recipe).dtype(recipe.target, device)


def recipe_job(
    recipe: Recipe,
    directory: Path,
    options: CacheOptions,
    on_progress: Callable[[Progress], None] = lambda _: None,
    *,
    others: Sequence[Recipe] = (),
    device: torch.device | None = None,
) -> CacheJob:
    """Tokenize the recipe's data and lay out the cache; no weights are read.

    All rows are kept, in the order of the data: which of them are held out is decided in training,
    unless the recipe names separate held-out data (`data.valid`). `others`: recipes of more drafts
    on the same data, whose aux layers are kept, too.
    """
    kind, section, data = _precomputable(recipe), recipe.target, recipe.data
    if not data.train:
        raise BadInput("no training data", where="data.train", fix="data.train=chats.jsonl")
    layers = kind.aux_layer_ids(shared_section(recipe, *others))
    count = recipe.method.aux_layers(recipe.objective)
    model = ModelFacts.read(
        kind.model_name(section),
        aux_layer_ids=layers,
        num_aux_layers=None if others else count,
        trust_remote_code=section.trust_remote_code,
    )
    train = tokenised(data.train, recipe, on_progress)
    valid = tokenised(data.valid, recipe, on_progress) if data.valid else None
    if valid is not None:
        repeated_rows(split_training(train, recipe)[0], split_rows(valid, 0)[0], recipe)
    rows = _Concatenated(train, valid)
    vocabulary = None
    if options.encoding in OVER_A_VOCABULARY or recipe.says_vocab_size:
        training_rows, _ = split_training(train, recipe)
        vocabulary = choose_vocabulary(
            recipe, training_rows, vocab_size=model.vocab_size, fingerprint=train.fingerprint,
            special_ids=special_token_ids(model.tokenizer),
        )  # fmt: skip
    facts = {
        "data": sources.fingerprint(list(data.train)),
        "valid": sources.fingerprint(list(data.valid)) if data.valid else None,
        "tokenizer": tokenizer_files_fingerprint(model.directory),
        "tokenise": asdict(tokenise_options(data)),
        "seq_length": data.max_length,
        "shuffle_seed": None,
        "draft_vocab_size": None if vocabulary is None else recipe.draft.draft_vocab_size,
    }
    view = RowView(rows, np.arange(len(rows), dtype=np.int64))
    held_out_rows = 0 if valid is None else len(valid)
    computed = cache_dtype(recipe, device or torch.device("cpu"))
    return make_job(
        directory, view, model, options, facts=facts, computed=computed, vocabulary=vocabulary,
        held_out_rows=held_out_rows,
    )  # fmt: skip


def recipe_target(
    recipe: Recipe, device: torch.device, others: Sequence[Recipe] = ()
) -> Eagle3TargetBackend:
    """The recipe's target, set up for a single pass over the rows."""
    single_pass = [
        r.model_copy(update={"target": kind_of(r.target).asked_once(r.target)})
        for r in (recipe, *others)
    ]
    return open_target(single_pass, device) if others else make_target(single_pass[0], device)
