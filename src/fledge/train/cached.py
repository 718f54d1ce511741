"""Training from an offline cache: its rows, its target, and whether both fit the recipe."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from fledge.core.errors import BadInput
from fledge.data.prepare import tokenizer_fingerprint
from fledge.data.vocab import DraftVocabulary
from fledge.models.resolve import local_model
from fledge.recipe.schema import Recipe
from fledge.recipe.target import CacheTarget, RemoteTarget
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.backend import CachedEagle3TargetModel
from fledge.target.cache.manifest import TARGET_FILES
from fledge.target.cache.store import CachedRows, CacheStore
from fledge.train.batches import RowView, split_rows
from fledge.train.remote import remote_files


def model_name(recipe: Recipe) -> str:
    """Where config and tokenizer come from: the recipe's model, else the cache or the servers."""
    section = recipe.target
    if section.model is not None:
        return section.model
    if isinstance(section, CacheTarget):
        return str(Path(section.cached_target_path).expanduser() / TARGET_FILES)
    if isinstance(section, RemoteTarget):
        return str(remote_files(section))
    raise BadInput("no model for the tokenizer", where="target.model")


def cached_rows(recipe: Recipe, section: CacheTarget) -> tuple[RowView, RowView, str]:
    """(training rows, held-out rows, fingerprint) of a cache."""
    store = CacheStore(section.cached_target_path, on_damage=section.on_damage)
    longest = int(store.lengths.max())
    if longest > recipe.packing.tokens:
        raise BadInput(
            f"packing.tokens ({recipe.packing.tokens}) is below the longest row of the cache "
            f"({longest})",
            where=str(store.directory),
            fix=f"packing.tokens={longest} or more",
        )
    rows, data = CachedRows(store), recipe.data
    fingerprint = hashlib.sha256(json.dumps(store.manifest, sort_keys=True).encode()).hexdigest()
    held_out = int(store.manifest["held_out_rows"])
    if not held_out:
        train, valid = split_rows(rows, data.valid_rows, drop_truncated=data.drop_truncated)
        return train, valid, f"cache:{fingerprint}"
    truncated = np.array([t for shard in store.shards for t in shard.truncated], dtype=bool)
    first = len(rows) - held_out
    index = np.arange(len(rows), dtype=np.int64)
    kept = index[:first][~(data.drop_truncated & truncated[:first])]
    return RowView(rows, kept), RowView(rows, index[first:]), f"cache:{fingerprint}"


def open_cache(
    recipe: Recipe, section: CacheTarget, device: torch.device
) -> CachedEagle3TargetModel:
    """The target of a cache, checked against what the recipe says of it."""
    target = CachedEagle3TargetModel(
        section.cached_target_path, device=device, on_damage=section.on_damage
    )
    where, manifest = str(target.store.directory), target.store.manifest
    wanted = section.aux_layer_ids
    if wanted is not None and list(wanted) != target.aux_layer_ids:
        raise BadInput(
            f"made with aux layers {target.aux_layer_ids}, the recipe says {list(wanted)}",
            where=where,
            fix="leave target.aux_layer_ids out, or make another cache",
        )
    if section.model is not None:
        _check_model(section.model, manifest, where)
    kept, size = target.vocabulary, recipe.draft.draft_vocab_size
    if kept is not None and kept.size != (kept.vocab_size if size is None else size):
        raise BadInput(
            f"made for a draft vocabulary of {kept.size}, draft.draft_vocab_size says {size}",
            where=where,
            fix=f"draft.draft_vocab_size={kept.size}, or a cache of hidden states",
        )
    return target


def _check_model(name: str, manifest: dict[str, object], where: str) -> None:
    """The named model must be the one that was asked; weights are compared where they lie here."""
    from fledge.target.cache.job import files_fingerprint, has_weights

    directory = local_model(name, weights=False)
    differing = []
    if tokenizer_fingerprint(directory) != manifest.get("tokenizer"):
        differing.append("tokenizer")
    if has_weights(directory) and files_fingerprint(directory) != manifest.get("model_files"):
        differing.append("weights or config")
    if differing:
        raise BadInput(
            f"made from another model than {name} (different {' and '.join(differing)})",
            where=where,
            fix="leave target.model out, or make a cache for this model",
        )


def cache_vocabulary(target: Eagle3TargetBackend) -> DraftVocabulary | None:
    """The vocabulary that a cache of probabilities dictates."""
    return target.vocabulary if isinstance(target, CachedEagle3TargetModel) else None


def read_ahead(target: Eagle3TargetBackend, rows: RowView) -> RowView:
    """The same rows; from a cache, collating them fetches the target's answers in advance."""
    if not isinstance(target, CachedEagle3TargetModel):
        return rows
    return rows.through(target.rows(reading=True))
