"""Builds what `fledge precompute` needs from a recipe: rows, vocabulary, target, cache layout."""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.core.errors import BadInput
from fledge.core.progress import Progress, unwatched
from fledge.data import sources
from fledge.data.prepare import tokenizer_files_fingerprint
from fledge.data.rows import Rows, RowView
from fledge.data.vocab import special_token_ids
from fledge.models.resolve import local_model
from fledge.recipe.schema import Recipe
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.format import FORMAT, OVER_A_VOCABULARY
from fledge.target.cache.job import (
    CacheJob,
    CacheOptions,
    encoding_facts,
    files_fingerprint,
)
from fledge.target.kinds import (
    TargetKind,
    kind_of,
    model_name,
    target_config,
    target_tokenizer,
)
from fledge.target.layers import target_depth, text_config, validate_aux_layer_ids
from fledge.training.drafts import choose_vocabulary, make_target, target_section
from fledge.training.setup import split_training, tokenise_options, tokenised


class _Concatenated:
    """Training rows, followed by held-out rows."""

    def __init__(self, first: Rows, then: Rows) -> None:
        self._first, self._then = first, then
        self.lengths = np.concatenate([first.lengths, then.lengths])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> object:
        first = len(self._first)
        return self._first[index] if index < first else self._then[index - first]


def cache_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The dtype of the target's answers, as far as it can be read from the config."""
    return _asked(recipe).dtype(recipe.target, device)


def _asked(recipe: Recipe) -> TargetKind[Any]:
    """The kind of target that answers about the recipe's rows."""
    kind = kind_of(recipe.target)
    if kind.brings_rows:
        what, fix = "a cache is not made from a cache", "fledge cache convert"
        raise BadInput(what, where="target.backend", fix=fix)
    return kind


def recipe_job(
    recipe: Recipe,
    directory: Path,
    options: CacheOptions,
    progress: Progress = unwatched,
    *,
    shuffle_seed: int | None = None,
) -> CacheJob:
    """Tokenize the recipe's data and lay out the cache; no weights are read.

    All rows are kept, in the order of the data unless a `shuffle_seed` is given: which of them are
    held out is decided in training, unless the recipe names separate held-out data (`data.valid`).
    """
    section, data = recipe.target, recipe.data
    parallel = _asked(recipe).cut(section)
    if parallel is not None and parallel.ranks > 1:
        what = "a target that ranks share cannot be precomputed"
        raise BadInput(what, where="target.parallel", fix="take an engine, or train live")
    config, tokenizer = text_config(target_config(section)), target_tokenizer(section)
    aux_layer_ids = _aux_layer_ids(recipe, target_depth(config))
    model_dir, template = local_model(model_name(section), weights=False), tokenizer.chat_template
    train = tokenised(data.train, recipe, progress)
    rows: Rows = train
    if data.valid:
        valid = tokenised(data.valid, recipe, progress)
        rows = _Concatenated(train, valid)
    vocabulary = None
    if options.encoding in OVER_A_VOCABULARY or recipe.says_vocab_size:
        vocabulary = choose_vocabulary(
            recipe, split_training(train, recipe)[0], vocab_size=config.vocab_size,
            fingerprint=train.fingerprint, special_ids=special_token_ids(tokenizer),
        )  # fmt: skip
    manifest = {
        "format": FORMAT,
        "rows": len(rows),
        "held_out_rows": len(rows) - len(train),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "aux_layer_ids": aux_layer_ids,
        "model_files": files_fingerprint(model_dir),
        "template": hashlib.sha256(str(template).encode()).hexdigest()[:16],
        **encoding_facts(options, vocabulary),
        "data": sources.fingerprint(list(data.train)),
        "valid": sources.fingerprint(list(data.valid)) if data.valid else None,
        "tokenizer": tokenizer_files_fingerprint(model_dir),
        "tokenise": asdict(tokenise_options(data)),
        "seq_length": data.max_length,
        "shuffle_seed": shuffle_seed,
        "draft_vocab_size": None if vocabulary is None else recipe.draft.draft_vocab_size,
    }
    order = np.arange(len(rows), dtype=np.int64)
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(order)
    pad_id = int(tokenizer.pad_token_id or 0)
    view = RowView(rows, order)
    return CacheJob(directory, view, manifest, options, vocabulary, model_dir, pad_id=pad_id)


def _aux_layer_ids(recipe: Recipe, depth: int) -> list[int]:
    """The layers to keep."""
    layers = kind_of(recipe.target).aux_layer_ids(target_section(recipe))
    try:
        return validate_aux_layer_ids(layers, depth, recipe.method.aux_layers(recipe.objective))
    except ValueError as error:
        raise BadInput(str(error), where="aux layers") from None


def recipe_target(recipe: Recipe, device: torch.device) -> Eagle3TargetBackend:
    """The recipe's target, set up for a single pass over the rows."""
    section = kind_of(recipe.target).asked_once(recipe.target)
    return make_target(recipe.model_copy(update={"target": section}), device)
