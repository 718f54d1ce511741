"""Convert a cache to another encoding: precompute with the source cache as the target."""

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
from fledge.models.resolve import load_tokenizer, local_model
from fledge.target.cache.automodel import LAYOUT
from fledge.target.cache.backend import CachedEagle3TargetModel
from fledge.target.cache.format import OVER_A_VOCABULARY
from fledge.target.cache.job import CacheJob, CacheOptions, encoding_facts
from fledge.target.cache.manifest import LATE, lacks_target, target_files


def convert_job(
    source: CachedEagle3TargetModel,
    directory: Path,
    options: CacheOptions,
    *,
    draft_vocab_size: int | None = None,
    trust_remote_code: bool = False,
    padded: bool = False,
    model: str | None = None,
) -> CacheJob:
    """The job that writes the contents of `source` in another encoding; run it with `source` as the
    target. `padded` selects AutoModel's layout, with rows padded to the maximum length. Config and
    tokenizer come from `model` if the source has none."""
    old = source.store.manifest
    if options.encoding in ("hidden", "hidden-fp8") and not source.shape.is_hidden:
        raise BadInput(
            f"{options.encoding} cannot be made from {source.shape.encoding}: probabilities do "
            "not determine the hidden states",
            where=str(source.store.directory),
        )
    if padded and options.encoding not in OVER_A_VOCABULARY:
        fix = f"--encoding {' or '.join(OVER_A_VOCABULARY)}"
        raise BadInput("AutoModel's layout keeps probabilities", where="--layout", fix=fix)
    # supervision that is not in the source cannot be written
    options = replace(options, supervised_only=options.supervised_only or source.shape.compact)
    model_name = model if lacks_target(source.store.directory, old) else None
    files = local_model(model_name or target_files(source.store.directory), weights=False)
    vocabulary = _vocabulary(source, draft_vocab_size)
    if vocabulary is None and (draft_vocab_size or options.encoding in OVER_A_VOCABULARY):
        tokenizer = load_tokenizer(str(files), trust_remote_code=trust_remote_code)
        vocabulary = _select_vocabulary(source, draft_vocab_size, special_token_ids(tokenizer))
    manifest: dict[str, Any] = {
        **{key: value for key, value in old.items() if key not in (LATE, "layout")},
        **encoding_facts(options, vocabulary),
        "converted_from": [old["encoding"], old["dtype"]],
    }
    more: dict[str, Any] = {"vocabulary": vocabulary, "model_dir": files}
    if padded:
        longest = int(source.store.lengths.max(initial=2))
        manifest["seq_length"] = more["padded_to"] = max(longest, old.get("seq_length") or 0)
        manifest["layout"] = LAYOUT
    return CacheJob.of(directory, source.rows(), manifest, options, **more)


def _vocabulary(source: CachedEagle3TargetModel, size: int | None) -> DraftVocabulary | None:
    """The source's own vocabulary, if it has one of the requested size."""
    required, suggested = source.vocabulary, source.info().suggested
    if required is None:
        fits = suggested is not None and size in (None, suggested.size)
        return suggested if fits else None
    if size is not None and required.size != size:
        raise BadInput(
            f"made for a draft vocabulary of {required.size}, not {size}",
            where=str(source.store.directory),
            fix="another vocabulary needs a cache of hidden states",
        )
    return required


def _select_vocabulary(
    source: CachedEagle3TargetModel, size: int | None, special_ids: list[int | None]
) -> DraftVocabulary:
    """Select a vocabulary by counts over the source's rows, excluding held-out ones."""
    rows = source.rows()
    trained = range(len(rows) - int(source.store.manifest["held_out_rows"]))
    pairs = ((row.input_ids, row.loss_mask) for row in (rows[i] for i in trained))
    counts_V = count_supervised(pairs, source.info().vocab_size)
    return select_vocabulary(counts_V, size, special_ids=special_ids)
