"""A finished cache: access to rows by number or by tokens, with a check on first read.

`codec` interprets a row's bytes; `backend` builds batches from rows.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.rows import TokenRow
from fledge.data.vocab import DraftVocabulary
from fledge.target.cache import automodel
from fledge.target.cache.codec import unsound
from fledge.target.cache.format import shard_name
from fledge.target.cache.manifest import (
    VOCABULARY,
    check_complete,
    read_manifest,
    shape_of,
    shards_of,
    vocabulary_size,
)
from fledge.target.cache.padded import PaddedShard, padded_shard_name
from fledge.target.cache.shard import Shard, row_key
from fledge.target.finite import Fault

OnDamage = Literal["fail", "skip"]
AnyShard = Shard | PaddedShard
logger = logging.getLogger(__name__)


def open_shards(
    directory: Path, manifest: dict[str, Any], numbers: Iterable[int]
) -> list[AnyShard]:
    """Open some shards of a cache, in whichever of the two layouts it has."""
    shape = shape_of(manifest)
    if manifest.get("layout") != automodel.LAYOUT:
        paths = (directory / shard_name(number) for number in numbers)
        return [Shard(path, shape, manifest["vocab_size"]) for path in paths]
    order_W = automodel.column_order(manifest)
    paths = (directory / padded_shard_name(number) for number in numbers)
    return [PaddedShard(path, shape, order_W) for path in paths]


class CacheStore:
    """Random access to the rows of a cache, memory-mapped."""

    def __init__(self, directory: str | Path, *, on_damage: OnDamage = "fail") -> None:
        if on_damage not in ("fail", "skip"):
            raise BadInput(f"on_damage is fail or skip, not {on_damage!r}")
        self.directory = Path(directory).expanduser()
        self.manifest = read_manifest(self.directory)
        check_complete(self.directory, self.manifest)
        self.shape = shape_of(self.manifest)
        self.on_damage = on_damage
        self.shards = open_shards(self.directory, self.manifest, range(shards_of(self.manifest)))
        self._first = np.cumsum([0, *(len(shard) for shard in self.shards)])
        if len(self) != self.manifest["rows"]:
            raise BadInput(
                f"{len(self)} rows in the shards, {self.manifest['rows']} in the manifest",
                where=str(self.directory),
                fix="the directory holds shards of another cache",
            )
        lengths = [np.diff(shard.layout.row_start) for shard in self.shards]
        self.lengths: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *lengths])
        self._checked = np.zeros(len(self), dtype=np.int8)  # 0: not yet, 1: whole, 2: damaged
        self._rows_by_key: dict[bytes, list[int]] | None = None
        self._pending_checks: dict[int, Future[bool]] = {}  # rows being checked ahead of their use
        self._checker = ThreadPoolExecutor(1, "fledge-cache")

    def __len__(self) -> int:
        return int(self._first[-1])

    def vocabulary(self) -> DraftVocabulary | None:
        """The draft vocabulary of its answers or, with hidden states, the suggested one, if any."""
        if vocabulary_size(self.manifest) is None:
            return None
        path = self.directory / VOCABULARY
        if self.manifest.get("layout") == automodel.LAYOUT and not path.exists():
            rows = ((row.input_ids, row.loss_mask) for row in CachedRows(self))
            return automodel.vocabulary_of(self.manifest, rows)
        return DraftVocabulary.load(path)

    def at(self, row: int) -> tuple[AnyShard, int]:
        """The shard that holds a row, and the row's number within that shard."""
        index = int(np.searchsorted(self._first, row, side="right")) - 1
        return self.shards[index], int(row - self._first[index])

    def name(self, row: int) -> str:
        shard, local = self.at(row)
        return f"row {row} ({shard.places[local]}; {shard.path.name}, row {local})"

    def find(self, input_ids: NDArray[np.int32]) -> list[int]:
        """The rows with exactly these tokens."""
        if self._rows_by_key is None:
            rows_by_key: dict[bytes, list[int]] = {}
            for first, shard in zip(self._first[:-1].tolist(), self.shards, strict=True):
                for local, key in enumerate(shard.keys):
                    rows_by_key.setdefault(key.tobytes(), []).append(first + local)
            self._rows_by_key = rows_by_key
        return self._rows_by_key.get(row_key(input_ids), [])

    def check(self, row: int) -> bool:
        """Whether a row is whole; checked once. A damaged row raises unless it is to be skipped."""
        if not self._checked[row]:
            pending = self._pending_checks.pop(row, None)
            whole = self._is_whole(row) if pending is None else pending.result()
            self._checked[row] = 1 if whole else 2
            if not whole and self.on_damage == "skip":
                logger.warning("skipping a damaged row of the cache: %s", self.name(row))
        if self._checked[row] == 2 and self.on_damage == "fail":
            raise BadInput(
                f"{self.name(row)} is damaged: its checksum does not fit",
                where=str(self.directory),
                fix="make the cache again, or leave such rows out with target.on_damage=skip",
            )
        return bool(self._checked[row] == 1)

    def fault(self, row: int) -> Fault | None:
        """The first place in a row that is stored as NaN or infinity, or None."""
        shard, local = self.at(row)
        stored = {}
        for field in (*self.shape.token_fields(), *self.shape.slot_fields()):
            raw = torch.from_numpy(shard.payload(field.name, local).copy())
            stored[field.name] = raw.view(field.dtype).view(-1, field.width)
        slots = self.shape.slots(shard.tokens(local)[1])
        return row_fault(row, *unsound(stored, self.shape), slots, self.manifest["aux_layer_ids"])

    def _is_whole(self, row: int) -> bool:
        shard, local = self.at(row)
        return shard.is_whole(local)

    def read_ahead(self, row: int) -> bool:
        """Start fetching a row, and checking it on a thread, before it is needed. With
        `on_damage="skip"`, waits for the check and returns False for a damaged row."""
        shard, local = self.at(row)
        shard.read_ahead(local)
        if self.on_damage == "skip":
            return self.check(row)
        if not self._checked[row] and row not in self._pending_checks:
            self._pending_checks[row] = self._checker.submit(self._is_whole, row)
        return True

    def close(self) -> None:
        self._checker.shutdown(wait=True, cancel_futures=True)

    def damaged(self) -> Iterator[int]:
        """Yield every row that is not whole; reads the whole cache."""
        for first, shard in zip(self._first[:-1].tolist(), self.shards, strict=True):
            yield from (first + local for local in range(len(shard)) if not shard.is_whole(local))


def row_fault(
    row: int,
    bad_NA: Tensor,
    bad_M: Tensor,
    slots: NDArray[np.int64],  # [M], where supervision is kept
    aux_layer_ids: Sequence[int],
) -> Fault | None:
    """The fault that `codec.unsound` found in one row: its lowest bad layer, else supervision."""
    bad_A = [flags.nonzero() for flags in bad_NA.bool().T]
    for layer_id, where in sorted(zip(aux_layer_ids, bad_A, strict=True), key=lambda pair: pair[0]):
        if len(where):
            return Fault(f"layer {layer_id}", row, int(where[0]))
    if len(where := bad_M.bool().nonzero()):
        return Fault("supervision", row, int(slots[int(where[0])]) + 1)
    return None


class CachedRows(Sequence[TokenRow]):
    """The token rows of a cache, as training and packing read them.

    With `reading`, indexing a row also starts fetching and checking the target's answer for it, so
    collating batches ahead of the trainer warms the cache. A damaged row that is to be skipped
    comes out without supervised tokens.
    """

    def __init__(self, store: CacheStore, *, reading: bool = False) -> None:
        self.store, self._reading = store, reading
        self.lengths = store.lengths

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(index)
        shard, local = self.store.at(row)
        ids, mask = shard.tokens(local)
        if self._reading and not self.store.read_ahead(row):
            mask = np.zeros_like(mask)
        return TokenRow(ids, mask, shard.places[local], shard.truncated[local])
