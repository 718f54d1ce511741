"""What a precompute or a conversion will write: a `CacheJob`, its manifest and its size.

Nothing here loads weights; `begin_cache` adds the facts that require the loaded target.
"""

import hashlib
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from rich import filesize

from fledge.core.errors import BadInput, nearest
from fledge.core.rows import TokenRow
from fledge.core.terminal import counted
from fledge.data.vocab import (
    DraftVocabulary,
    count_supervised,
    select_vocabulary,
    special_token_ids,
)
from fledge.models.resolve import load_tokenizer, local_model
from fledge.target.cache.automodel import LAYOUT, PaddedLayout, padded_shard_name, their_manifest
from fledge.target.cache.backend import CachedEagle3TargetModel
from fledge.target.cache.format import DTYPES, ENCODINGS, OVER_A_VOCABULARY, CacheShape, Encoding
from fledge.target.cache.manifest import (
    LATE,
    TARGET_FILES,
    dtype_name,
    ensure_free,
    ensure_resumable,
    existing_shards,
    lacks_target,
    shape_of,
    shard_name,
    target_files,
)
from fledge.target.cache.shard import Layout, is_whole_shard, layout_of

_SAMPLE_BYTES = 1 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True)
class CacheOptions:
    """The user's choices about a cache."""

    encoding: Encoding = "hidden"
    dtype: torch.dtype = torch.bfloat16
    top_k: int | None = None
    shard_size: int = 256
    batch_size: int = 4
    resume: bool = False
    quota_bytes: int | None = None  # of shards


def cache_options(
    *,
    encoding: str,
    dtype: str,
    natural: Callable[[], torch.dtype],
    top_k: int | None,
    quota_gb: float | None,
    top_k_flag: str = "--top-k",
    **chosen: Any,
) -> CacheOptions:
    """The flags of a command as options; `natural` is the dtype for "auto"."""
    from fledge.target.kinds import spelt_out  # needs pydantic

    name = spelt_out(dtype)
    given = (("--encoding", encoding, ENCODINGS), ("--dtype", name, ("auto", *DTYPES)))
    for flag, value, valid in given:
        if value not in valid:
            raise BadInput(f"{value!r} is unknown", where=flag, fix=nearest(value, list(valid)))
    if (encoding == "topk") != bool(top_k):
        what = f"the topk encoding and {top_k_flag} belong together"
        raise BadInput(what, where="--encoding")
    if quota_gb is not None and not 0 < quota_gb < 1e9:
        raise BadInput(f"{quota_gb} is not a disk size", where="--quota-gb", fix="500, say")
    return CacheOptions(
        encoding=cast(Encoding, encoding),
        dtype=natural() if name == "auto" else DTYPES[name],
        top_k=top_k or None,
        quota_bytes=None if quota_gb is None else int(quota_gb * 1e9),
        **chosen,
    )


@dataclass(frozen=True)
class CacheJob:
    """What to compute and where to write it; nothing is loaded or written yet."""

    directory: Path
    rows: Sequence[TokenRow]  # in the order of the cache
    manifest: dict[str, Any]  # all fields except `LATE`
    options: CacheOptions = CacheOptions()
    vocabulary: DraftVocabulary | None = None  # with hidden states only a suggestion
    model_dir: Path | None = None  # whose config and tokenizer are copied into the cache
    pad_id: int = 0
    padded_to: int | None = None  # tokens per row in AutoModel's layout; None: our layout

    @cached_property
    def shape(self) -> CacheShape:
        return shape_of(self.manifest)

    def layout(self, rows: Sequence[TokenRow]) -> Layout:
        """The layout of a shard with these rows."""
        if self.padded_to is None:
            return layout_of(self.shape, rows)
        return PaddedLayout(self.shape, rows, self.padded_to)

    def shard_path(self, index: int) -> Path:
        name = shard_name if self.padded_to is None else padded_shard_name
        return self.directory / name(index)

    def on_disk(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """The manifest as written to its file."""
        if self.padded_to is None:
            return manifest
        assert self.vocabulary is not None, "padded rows are of probabilities"
        return their_manifest(manifest, self.vocabulary, self.directory / TARGET_FILES)

    def shard_rows(self, index: int) -> list[TokenRow]:
        size = self.options.shard_size
        return [self.rows[i] for i in range(len(self.rows))[index * size : (index + 1) * size]]

    def is_written(self, index: int) -> bool:
        """Whether a shard is on disk, written by any process."""
        path = self.shard_path(index)
        return path.exists() and is_whole_shard(path, self.layout(self.shard_rows(index)))


@dataclass(frozen=True)
class CachePlan:
    """The size of a cache's shards, to the byte, before the job starts."""

    shard_bytes: tuple[int, ...]
    done: frozenset[int]  # shards that already exist
    allowed: int  # how many shards fit the quota
    tokens: int

    @property
    def missing(self) -> list[int]:
        """The shards to be written, within the quota."""
        return [i for i in range(self.allowed) if i not in self.done]

    @property
    def complete(self) -> bool:
        """Whether the quota is large enough for all shards."""
        return self.allowed == len(self.shard_bytes)


def has_weights(directory: Path) -> bool:
    return any(path.name.endswith(_WEIGHT_SUFFIXES) for path in directory.iterdir())


def files_fingerprint(directory: Path) -> str:
    """A digest of a model's config and of its weight files: names, sizes, first and last bytes.
    Fast enough to compute before anything is loaded; loaded weights are compared in full."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.name.endswith(_WEIGHT_SUFFIXES):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}:".encode())
            with path.open("rb") as handle:
                digest.update(handle.read(_SAMPLE_BYTES))
                handle.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def encoding_facts(options: CacheOptions, vocabulary: DraftVocabulary | None) -> dict[str, Any]:
    """The manifest's fields about how rows are stored."""
    entry = None if vocabulary is None else {"size": vocabulary.size, "digest": vocabulary.digest()}
    required = options.encoding in OVER_A_VOCABULARY
    return {
        "encoding": options.encoding,
        "dtype": dtype_name(options.dtype),
        "top_k": options.top_k,
        "shard_size": options.shard_size,
        "vocabulary": entry if required else None,
        "suggested_vocabulary": None if required else entry,
    }


def plan_cache(job: CacheJob) -> CachePlan:
    """Refuse a job that cannot work, else add up its bytes. Writes nothing."""
    if not len(job.rows):
        raise BadInput("no row to precompute", where=str(job.directory))
    ensure_free(job.directory, resume=job.options.resume)
    existing = existing_shards(job.directory)
    ensure_resumable(job.directory, job.manifest, existing, before_loading=True)
    sizes, done, tokens = [], set(), 0
    for index in range(-(-len(job.rows) // job.options.shard_size)):
        rows = job.shard_rows(index)
        layout = job.layout(rows)
        sizes.append(layout.n_bytes)
        tokens += sum(len(row.input_ids) for row in rows)
        if index in existing and is_whole_shard(job.shard_path(index), layout):
            done.add(index)
    quota, total = job.options.quota_bytes, itertools.accumulate(sizes)
    allowed = sum(quota is None or n_bytes <= quota for n_bytes in total)
    return CachePlan(tuple(sizes), frozenset(done), allowed, tokens)


def announce(job: CacheJob, plan: CachePlan) -> str:
    """What the shards will hold, to the byte; refuses a disk that is too small for them."""
    existing = job.directory
    while not existing.exists():
        existing = existing.parent
    free, total = shutil.disk_usage(existing).free, sum(plan.shard_bytes)
    needed, room = sum(plan.shard_bytes[i] for i in plan.missing), filesize.decimal(free)
    if needed > free:
        what = f"{filesize.decimal(needed)} would be written, {room} are free"
        fix = "use a smaller encoding, fewer rows or another disk"
        raise BadInput(what, where=str(job.directory), fix=fix)
    text = (
        f"{counted(len(job.rows), 'row')}, {counted(plan.tokens, 'token')} as {job.shape.encoding} "
        f"({job.manifest['dtype']}): {total / plan.tokens:,.0f} bytes a token, "
        f"{filesize.decimal(total)} in {counted(len(plan.shard_bytes), 'shard')}; {room} are free"
    )
    if plan.done:
        text += f"; {counted(len(plan.done), 'shard')} already exist"
    if not plan.complete:
        text += f"; the quota stops it after {counted(plan.allowed, 'shard')}"
    return text


# --- conversion ----------------------------------------------------------------------------------
# Convert a cache to another encoding: precompute with the source cache as the target.


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
    old, where = source.store.manifest, str(source.store.directory)
    over_a_vocabulary = options.encoding in OVER_A_VOCABULARY
    if not over_a_vocabulary and not source.shape.is_hidden:
        what = f"{options.encoding} cannot be made from {source.shape.encoding}: probabilities do "
        raise BadInput(what + "not determine the hidden states", where=where)
    if padded and not over_a_vocabulary:
        fix = f"--encoding {' or '.join(OVER_A_VOCABULARY)}"
        raise BadInput("AutoModel's layout keeps probabilities", where="--layout", fix=fix)
    named = model if lacks_target(source.store.directory, old) else None
    files = local_model(named or target_files(source.store.directory), weights=False)
    vocabulary, size = source.vocabulary or source.info().suggested, draft_vocab_size
    if source.vocabulary is not None and size not in (None, source.vocabulary.size):
        what = f"made for a draft vocabulary of {source.vocabulary.size}, not {size}"
        raise BadInput(what, where=where, fix="another vocabulary needs a cache of hidden states")
    if vocabulary is not None and size not in (None, vocabulary.size):
        vocabulary = None
    if vocabulary is None and (size or over_a_vocabulary):
        tokenizer = load_tokenizer(str(files), trust_remote_code=trust_remote_code)
        trained = itertools.islice(source.rows(), int(old["rows"] - old["held_out_rows"]))
        counts_V = count_supervised(
            ((row.input_ids, row.loss_mask) for row in trained), source.info().vocab_size
        )
        special_ids = special_token_ids(tokenizer)
        vocabulary = select_vocabulary(counts_V, size, special_ids=special_ids)
    manifest: dict[str, Any] = {
        **{key: value for key, value in old.items() if key not in (LATE, "layout")},
        **encoding_facts(options, vocabulary),
        "converted_from": [old["encoding"], old["dtype"]],
    }
    padded_to: int | None = None
    if padded:
        longest = int(source.store.lengths.max(initial=2))
        padded_to = max(longest, old.get("seq_length") or 0)
        manifest |= {"seq_length": padded_to, "layout": LAYOUT}
    rows = source.rows()
    return CacheJob(directory, rows, manifest, options, vocabulary, files, padded_to=padded_to)
