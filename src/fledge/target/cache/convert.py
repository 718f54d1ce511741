"""Convert a cache to another encoding: a cache is a target, so this is precompute over it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.data.vocab import (
    DraftVocabulary,
    count_supervised,
    select_vocabulary,
    special_token_ids,
)
from fledge.models.resolve import load_tokenizer
from fledge.target.cache.backend import CachedEagle3TargetModel
from fledge.target.cache.format import OVER_A_VOCABULARY, Encoding
from fledge.target.cache.job import CacheJob, CacheOptions, encoding_facts
from fledge.target.cache.manifest import LATE, TARGET_FILES


def convert_job(
    source: CachedEagle3TargetModel,
    directory: Path,
    options: CacheOptions,
    *,
    draft_vocab_size: int | None = None,
    trust_remote_code: bool = False,
) -> CacheJob:
    """Write what `source` holds in another encoding; run it with `source` as the target."""
    old = source.store.manifest
    if options.encoding in ("hidden", "hidden-fp8") and not source.shape.is_hidden:
        raise BadInput(
            f"{options.encoding} cannot be made of {source.shape.encoding}: probabilities do not "
            "tell the hidden states",
            where=str(source.store.directory),
        )
    # supervision that the source does not hold cannot be written
    options = replace(options, supervised_only=options.supervised_only or source.shape.compact)
    vocabulary = _vocabulary(source, options.encoding, draft_vocab_size, trust_remote_code)
    manifest: dict[str, Any] = {
        **{key: value for key, value in old.items() if key != LATE},
        **encoding_facts(options, vocabulary),
        "converted_from": [old["encoding"], old["dtype"]],
    }
    more = {"vocabulary": vocabulary, "model_dir": source.store.directory / TARGET_FILES}
    return CacheJob.of(directory, source.rows(), manifest, options, **more)


def _vocabulary(
    source: CachedEagle3TargetModel, encoding: Encoding, size: int | None, trust: bool
) -> DraftVocabulary | None:
    """The source's own where it has one, else counted on its rows (not on held-out ones)."""
    kept, suggested = source.vocabulary, source.info().suggested
    if kept is None and suggested is not None and size in (None, suggested.size):
        return suggested
    if kept is None and size is None and encoding not in OVER_A_VOCABULARY:
        return None
    if kept is None:
        rows = source.rows()
        trained = range(len(rows) - int(source.store.manifest["held_out_rows"]))
        pairs = ((row.input_ids, row.loss_mask) for row in (rows[i] for i in trained))
        files = str(source.store.directory / TARGET_FILES)
        tokenizer = load_tokenizer(files, trust_remote_code=trust)
        counts_V = count_supervised(pairs, source.info().vocab_size)
        return select_vocabulary(counts_V, size, special_ids=special_token_ids(tokenizer))
    if size is not None and kept.size != size:
        raise BadInput(
            f"made for a draft vocabulary of {kept.size}, not {size}",
            where=str(source.store.directory),
            fix="another vocabulary needs a cache of hidden states",
        )
    return kept
