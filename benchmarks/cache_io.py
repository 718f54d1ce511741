"""Timed writing and reading of caches, shared by the verbs of `bench_cache.py`."""

import gc
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch

from fledge.core.claims import Claims
from fledge.data.rows import RowView
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.backend import CachedEagle3TargetModel, CachedRows
from fledge.target.cache.job import CacheJob, plan_cache
from fledge.target.cache.manifest import CLAIMS
from fledge.target.cache.precompute import begin_cache, write_shards
from fledge.training.batches import PackStream


def write(job: CacheJob, target: Eagle3TargetBackend) -> float:
    """Seconds to fill the shards of a new cache; its directory is removed first."""
    shutil.rmtree(job.directory, ignore_errors=True)
    plan = plan_cache(job)
    with Claims(job.directory / CLAIMS) as claims:
        begin_cache(job, target, claims)
        begin = time.perf_counter()
        write_shards(job, plan, target, claims)
        return time.perf_counter() - begin


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("shard-*"))


def size_of(directory: Path) -> int:
    """Bytes of a cache's shards."""
    return sum(path.stat().st_size for path in shards(directory))


def forget(paths: list[Path]) -> None:
    """Push files out of the page cache, so that the next read comes from the disk."""
    gc.collect()  # pages that are still mapped would stay
    for path in paths:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
            for _ in range(3):  # a few pages are busy the first time
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(paths: list[Path]) -> float:
    """Seconds to read whole files, 8 MB at a time."""
    buffer = bytearray(8 << 20)
    begin = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass
    return time.perf_counter() - begin


def feed(directory: Path, *, tokens: int, device: torch.device | str = "cpu") -> float:
    """Seconds in which the reader delivers every batch of shuffled packs, without training."""
    with CachedEagle3TargetModel(directory, device=device) as target:
        rows = RowView(CachedRows(target.store, reading=True), np.arange(len(target.store)))
        stream = PackStream(rows, tokens=tokens, pad_id=0, seed=0)
        if target.vocabulary is not None:
            ids, mask = target.vocabulary.selected_token_ids, target.vocabulary.t2d
            target.set_vocab_mapping(torch.from_numpy(ids), torch.from_numpy(mask))
        begin = time.perf_counter()
        for step in stream.prefetched(0, 2):
            for batch in step.micro:
                if batch is not None:
                    target.answer(batch)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin
