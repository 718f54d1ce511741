"""Small caches of any backend and any rows, written by the same job as the commands use; and the
commands themselves."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.core.claims import Claims
from fledge.core.rows import TokenRow
from fledge.data.vocab import DraftVocabulary
from fledge.target.cache.backend import CachedEagle3TargetModel, CacheStore
from fledge.target.cache.format import FORMAT
from fledge.target.cache.job import CacheJob, CacheOptions, plan_cache
from fledge.target.cache.manifest import CLAIMS, dtype_name
from fledge.target.cache.precompute import begin_cache, write_shards


def words_of(**flags):
    """Arguments of precompute_eagle3 for a small float32 cache; a flag of None is left out."""
    values = {
        "seq_length": 64, "dtype": "fp32", "aux_layer_ids": "0,1,2", "num_workers": 1,
        "device": "cpu", **flags,
    }  # fmt: skip
    words = []
    for name, value in values.items():
        if value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words


def verb(*words):
    """The exit code of a `fledge` command."""
    from fledge.cli.main import run

    with pytest.raises(SystemExit) as stop:
        run([str(word) for word in words])
    return stop.value.code or 0


def other_target(directory):
    """The tiny target with another last weight."""
    from train.tiny import make_target  # machines for GPU tests may lack pydantic

    make_target(directory)
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    return directory


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
    more = {"shard_size": 4, "batch_size": 3, **more}
    options = CacheOptions(encoding, dtype, top_k, **more)
    manifest = {
        "format": FORMAT, "encoding": encoding, "dtype": dtype_name(dtype), "top_k": top_k,
        "shard_size": options.shard_size, "rows": len(rows), "held_out_rows": 0,
        "hidden_size": info.hidden_size, "vocab_size": info.vocab_size,
        "aux_layer_ids": list(target.aux_layer_ids),
        "vocabulary": None if vocabulary is None else {"size": width},
    }  # fmt: skip
    return CacheJob(Path(directory), rows, manifest, options, vocabulary)


def write_cache(directory, target, rows, encoding, **more):
    job = make_job(directory, target, rows, encoding, **more)
    plan = plan_cache(job)
    with Claims(job.directory / CLAIMS) as claims:
        begin_cache(job, target, claims)
        write_shards(job, plan, target, claims)
    return Path(directory)


def rewrite_manifest(directory, **fields):
    path = Path(directory) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))


def opened(directory, **options):
    """A cache as a target that answers for the vocabulary it was made with, if it has one."""
    cached = CachedEagle3TargetModel(directory, **options)
    if cached.vocabulary is not None:
        maps = cached.vocabulary.selected_token_ids, cached.vocabulary.t2d
        cached.set_vocab_mapping(*map(torch.from_numpy, maps))
    return cached


def break_row(directory, row):
    store = CacheStore(directory)
    shard, local = store.at(row)
    begin, _ = shard.layout.span("aux_hidden_states", local)
    data = bytearray(shard.path.read_bytes())
    data[begin + 3] ^= 64
    shard.path.write_bytes(data)


def payload(directory):
    """name -> bytes of every file in a cache, including claims that were left behind."""
    files = [p for p in Path(directory).rglob("*") if p.is_file()]
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}
