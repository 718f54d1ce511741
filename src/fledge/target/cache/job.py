"""What a precompute or a conversion will write: a `CacheJob`, its manifest and its size.

Nothing here loads weights; `begin_cache` adds the facts that require the loaded target.
"""

import hashlib
import itertools
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
    copied_files,
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

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SAMPLE_BYTES = 1 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True)
class CacheOptions:
    """The user's choices about a cache."""

    encoding: Encoding = "hidden"
    dtype: torch.dtype = torch.bfloat16
    top_k: int | None = None
    supervised_only: bool = False
    shard_size: int = 256
    batch_size: int = 4
    resume: bool = False
    quota_bytes: int | None = None


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

    if encoding not in ENCODINGS:
        hint = nearest(encoding, list(ENCODINGS))
        raise BadInput(f"{encoding!r} is not an encoding", where="--encoding", fix=hint)
    if (encoding == "topk") != bool(top_k):
        what = f"the topk encoding and {top_k_flag} belong together"
        raise BadInput(what, where="--encoding")
    name = spelt_out(dtype)
    if name != "auto" and name not in DTYPES:
        hint = nearest(dtype, ["auto", *DTYPES])
        raise BadInput(f"{dtype!r} is not a dtype", where="--dtype", fix=hint)
    if quota_gb is not None and not 0 < quota_gb < 1e9:
        raise BadInput(f"{quota_gb} is not a disk size", where="--quota-gb", fix="500, say")
    return CacheOptions(
        encoding=encoding,
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
    head_bytes: int = 0  # everything but the shards: an estimate until the target is loaded

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
    """The size of a cache, to the byte, before the job starts."""

    shard_bytes: tuple[int, ...]
    head_bytes: int  # everything but the shards: an estimate until the target is loaded
    done: frozenset[int]  # shards that already exist
    allowed: int  # how many shards fit the quota
    rows: int
    tokens: int

    @property
    def total_bytes(self) -> int:
        return sum(self.shard_bytes) + self.head_bytes

    @property
    def missing(self) -> list[int]:
        return [i for i in range(len(self.shard_bytes)) if i not in self.done]

    @property
    def wanted(self) -> list[int]:
        """The missing shards within the quota."""
        return [i for i in self.missing if i < self.allowed]


def size_of_head(config: "PretrainedConfig", directory: Path, dtype: torch.dtype) -> int:
    """The approximate size of all but the shards: the weights' dtype is not known yet."""
    tables = 1 if getattr(config, "tie_word_embeddings", False) else 2
    weights = tables * config.vocab_size * config.hidden_size * dtype.itemsize
    files = sum(path.stat().st_size for path in copied_files(directory))
    return int(weights) + files + (1 << 16)  # norm, headers, manifest


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
        "supervised_only": options.supervised_only,
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
    if extra := existing - set(range(len(sizes))):
        what = f"{shard_name(min(extra))} is beyond the {len(sizes)} shards of these rows"
        raise BadInput(what, where=str(job.directory))
    quota = math.inf if job.options.quota_bytes is None else job.options.quota_bytes
    allowed = sum(job.head_bytes + used <= quota for used in itertools.accumulate(sizes))
    return CachePlan(tuple(sizes), job.head_bytes, frozenset(done), allowed, len(job.rows), tokens)


def check_disk(job: CacheJob, plan: CachePlan) -> int:
    """The free bytes on the cache's disk; raises if they are too few for what will be written."""
    existing = job.directory
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    needed = sum(plan.shard_bytes[i] for i in plan.wanted) + plan.head_bytes
    if needed > free:
        what = f"{needed / 1e9:.2f} GB would be written, {free / 1e9:.2f} GB are free"
        fix = "use a smaller encoding, fewer rows or another disk"
        raise BadInput(what, where=str(job.directory), fix=fix)
    return free


def describe_plan(job: CacheJob, plan: CachePlan, free: int) -> list[str]:
    """A readable summary of what will be written; all figures about the shards are exact."""
    shards = len(plan.shard_bytes)
    per_row = sum(plan.shard_bytes) / plan.rows
    lines = [
        f"{counted(plan.rows, 'row')}, {counted(plan.tokens, 'token')} as {job.shape.encoding} "
        f"({job.manifest['dtype']}): {readable(per_row)} a row, "
        f"{sum(plan.shard_bytes) / plan.tokens:,.0f} bytes a token, "
        f"{readable(plan.total_bytes)} in {counted(shards, 'shard')}, embedding and head included; "
        f"{readable(free)} are free",
    ]
    if plan.done:
        lines.append(f"{len(plan.done):,} of {counted(shards, 'shard')} already exist")
    if plan.allowed < shards:
        lines.append(
            f"the quota of {readable(job.options.quota_bytes or 0)} stops it after "
            f"{counted(plan.allowed, 'shard')}"
        )
    return lines


def readable(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.2f} TB"


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
    # supervision that is not in the source cannot be written
    options = replace(options, supervised_only=options.supervised_only or source.shape.compact)
    named = model if lacks_target(source.store.directory, old) else None
    files = local_model(named or target_files(source.store.directory), weights=False)
    vocabulary = _vocabulary_of(source, draft_vocab_size)
    if vocabulary is None and (draft_vocab_size or over_a_vocabulary):
        tokenizer = load_tokenizer(str(files), trust_remote_code=trust_remote_code)
        trained = itertools.islice(source.rows(), int(old["rows"] - old["held_out_rows"]))
        counts_V = count_supervised(
            ((row.input_ids, row.loss_mask) for row in trained), source.info().vocab_size
        )
        special_ids = special_token_ids(tokenizer)
        vocabulary = select_vocabulary(counts_V, draft_vocab_size, special_ids=special_ids)
    manifest: dict[str, Any] = {
        **{key: value for key, value in old.items() if key not in (LATE, "layout")},
        **encoding_facts(options, vocabulary),
        "converted_from": [old["encoding"], old["dtype"]],
    }
    embedding_VD, head_VD = source.get_input_embeddings().weight, source.info().head.weight_VD
    head_bytes = embedding_VD.nbytes + head_VD.nbytes
    padded_to: int | None = None
    if padded:
        head_bytes += 4 * embedding_VD.numel()  # stored in float32, too
        longest = int(source.store.lengths.max(initial=2))
        padded_to = max(longest, old.get("seq_length") or 0)
        manifest |= {"seq_length": padded_to, "layout": LAYOUT}
    return CacheJob(
        directory, source.rows(), manifest, options, vocabulary, files,
        padded_to=padded_to, head_bytes=head_bytes,
    )  # fmt: skip


def _vocabulary_of(source: CachedEagle3TargetModel, size: int | None) -> DraftVocabulary | None:
    """The source's own vocabulary, if it has one of the requested size."""
    required, suggested = source.vocabulary, source.info().suggested
    if required is not None and size not in (None, required.size):
        what = f"made for a draft vocabulary of {required.size}, not {size}"
        fix = "another vocabulary needs a cache of hidden states"
        raise BadInput(what, where=str(source.store.directory), fix=fix)
    vocabulary = required or suggested
    return vocabulary if vocabulary is not None and size in (None, vocabulary.size) else None
