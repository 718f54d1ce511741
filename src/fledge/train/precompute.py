"""From a recipe to the work of `fledge precompute`: its rows, its vocabulary, its target."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from fledge.core.errors import BadInput
from fledge.data import sources
from fledge.data.prepare import Progress, tokenizer_fingerprint
from fledge.data.vocab import special_token_ids
from fledge.models.resolve import load_config
from fledge.recipe.schema import Recipe
from fledge.recipe.target import CacheTarget, HfTarget, RemoteTarget
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.format import DTYPES
from fledge.target.cache.job import CacheOptions, ModelFacts, make_job
from fledge.target.cache.precompute import CacheJob
from fledge.train.batches import Rows, RowView, split_rows
from fledge.train.cached import model_name
from fledge.train.remote import remote_facts
from fledge.train.setup import make_target, tokenise_options, tokenised
from fledge.train.vocabulary import choose_vocabulary


class _Joined:
    """Training rows, then held-out rows."""

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


def _check_backend(recipe: Recipe) -> None:
    if isinstance(recipe.target, CacheTarget):
        raise BadInput(
            "a cache is not made from a cache", where="target.backend", fix="fledge cache convert"
        )


def cache_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The precision in which the recipe's target answers, as far as its config tells."""
    _check_backend(recipe)
    section = recipe.target
    if isinstance(section, RemoteTarget):
        wire = section.wire_dtype
        return DTYPES[remote_facts(section)["dtype"] if wire == "auto" else wire]
    named = getattr(section, "dtype", "auto")
    if named in DTYPES:
        return DTYPES[named]
    stored = getattr(load_config(model_name(recipe)), "dtype", None) or torch.float32
    if stored not in DTYPES.values() or (device.type == "cuda" and stored == torch.float32):
        return torch.bfloat16  # what `make_target` runs such a model in
    return stored


def recipe_job(
    recipe: Recipe,
    directory: Path,
    options: CacheOptions,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[CacheJob, ModelFacts]:
    """Tokenise the recipe's data and lay out the cache; no weights are read.

    All rows are kept, in the order of the data: which of them are held out is decided when
    training, unless the recipe names held-out data of its own (`data.valid`).
    """
    _check_backend(recipe)
    section, data = recipe.target, recipe.data
    if not data.train:
        raise BadInput("no training data", where="data.train", fix="data.train=chats.jsonl")
    layers = section.aux_layer_ids
    if layers is None and isinstance(section, RemoteTarget):
        layers = tuple(remote_facts(section)["aux_layer_ids"])
    model = ModelFacts.read(
        model_name(recipe),
        aux_layer_ids=layers,
        trust_remote_code=getattr(section, "trust_remote_code", False),
    )
    train = tokenised(data.train, model.directory, data, on_progress)
    valid = tokenised(data.valid, model.directory, data, on_progress) if data.valid else None
    rows = _Joined(train, valid)
    vocabulary = None
    if options.encoding in ("probs", "topk"):
        held_out = 0 if data.valid else data.valid_rows
        counted, _ = split_rows(train, held_out, drop_truncated=data.drop_truncated)
        vocabulary = choose_vocabulary(
            recipe,
            counted,
            vocab_size=model.vocab_size,
            special_ids=special_token_ids(model.tokenizer),
            fingerprint=train.fingerprint,
        )
    facts = {
        "data": sources.fingerprint(list(data.train)),
        "valid": sources.fingerprint(list(data.valid)) if data.valid else None,
        "tokenizer": tokenizer_fingerprint(model.directory),
        "tokenise": asdict(tokenise_options(data)),
        "seq_length": data.max_length,
        "shuffle_seed": None,
        "draft_vocab_size": None if vocabulary is None else recipe.draft.draft_vocab_size,
    }
    view = RowView(rows, np.arange(len(rows), dtype=np.int64))
    job = make_job(
        directory,
        view,
        model,
        options,
        facts=facts,
        vocabulary=vocabulary,
        held_out_rows=0 if valid is None else len(valid),
    )
    return job, model


def recipe_target(recipe: Recipe, device: torch.device) -> Eagle3TargetBackend:
    """The recipe's target; states are not kept in memory, each row is asked about once.

    Nor are its layers compiled: every batch has a width of its own, and would be compiled for.
    """
    if isinstance(recipe.target, HfTarget):
        section = recipe.target.model_copy(update={"keep_states_gb": 0.0, "compile": False})
        recipe = recipe.model_copy(update={"target": section})
    return make_target(recipe, device)
