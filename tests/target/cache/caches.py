"""Small caches of any backend and any rows, written by the same job as the commands use."""

from pathlib import Path

import numpy as np
import torch

from fledge.core.claims import Claims
from fledge.core.rows import TokenRow
from fledge.data.vocab import DraftVocabulary
from fledge.target.cache.format import FORMAT, CacheShape
from fledge.target.cache.job import CacheJob, CacheOptions, plan_cache
from fledge.target.cache.manifest import CLAIMS, dtype_name
from fledge.target.cache.precompute import begin_cache, write_shards


def token_row(ids, mask=None, place="row"):
    ids = np.asarray(ids, dtype=np.int32)
    mask = np.ones(len(ids), np.uint8) if mask is None else np.asarray(mask, np.uint8)
    return TokenRow(ids, mask, place, False)


def every_third(vocab_size):
    return DraftVocabulary(np.arange(0, vocab_size, 3), vocab_size, 1.0, "test")


def make_job(directory, target, rows, encoding, *, dtype=torch.float32, top_k=None, **more):
    info = target.info()
    vocabulary = every_third(info.vocab_size) if encoding in ("probs", "topk") else None
    width = 0 if vocabulary is None else vocabulary.size
    supervised_only = more.pop("supervised_only", False)
    layers = len(target.aux_layer_ids)
    shape = CacheShape(
        encoding, dtype, info.hidden_size, layers, width, top_k or 0, supervised_only
    )
    more = {"shard_size": 4, "batch_size": 3, **more}
    options = CacheOptions(encoding, dtype, top_k, supervised_only, **more)
    manifest = {
        "format": FORMAT, "encoding": encoding, "dtype": dtype_name(dtype), "top_k": top_k,
        "supervised_only": supervised_only, "shard_size": options.shard_size, "rows": len(rows),
        "held_out_rows": 0, "hidden_size": info.hidden_size, "vocab_size": info.vocab_size,
        "aux_layer_ids": list(target.aux_layer_ids),
        "vocabulary": None if vocabulary is None else {"size": width},
    }  # fmt: skip
    return CacheJob(Path(directory), rows, shape, manifest, options, vocabulary)


def write_cache(directory, target, rows, encoding, **more):
    job = make_job(directory, target, rows, encoding, **more)
    plan = plan_cache(job)
    with Claims(job.directory / CLAIMS) as claims:
        begin_cache(job, target, claims)
        write_shards(job, plan, target, claims)
    return Path(directory)


def payload(directory):
    """name -> bytes of every file in a cache, including claims that were left behind."""
    files = [p for p in Path(directory).rglob("*") if p.is_file()]
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}
