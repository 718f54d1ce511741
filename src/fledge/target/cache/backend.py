"""The target backend that reads answers from disk, as written by `fledge precompute`.

Each document is looked up by its tokens, however it is packed; the target itself is never loaded.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch, Supervision
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch, TokenRow
from fledge.data.rows import KnownRows, RowView
from fledge.data.vocab import DraftVocabulary
from fledge.target.base import Eagle3TargetBackend, InputEmbedding, TargetInfo
from fledge.target.cache import automodel
from fledge.target.cache.automodel import PaddedShard, padded_shard_name
from fledge.target.cache.format import decode_states, row_key
from fledge.target.cache.manifest import (
    VOCABULARY,
    check_complete,
    read_manifest,
    read_target,
    shape_of,
    shard_name,
    shards_of,
    vocabulary_size,
)
from fledge.target.cache.shard import Shard
from fledge.target.packing import Documents, find_documents, right_padded

AnyShard = Shard | PaddedShard


class CacheStore:
    """Random access to the rows of a cache, memory-mapped."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).expanduser()
        self.manifest = read_manifest(self.directory)
        check_complete(self.directory, self.manifest)
        self.shape = shape_of(self.manifest)
        numbers = range(shards_of(self.manifest))
        self.shards: list[AnyShard] = []
        if self.manifest.get("layout") != automodel.LAYOUT:
            self.shards += [Shard(self.directory / shard_name(n), self.shape) for n in numbers]
        else:
            order_W = automodel.column_order(self.manifest)
            paths = (self.directory / padded_shard_name(number) for number in numbers)
            self.shards += [PaddedShard(path, self.shape, order_W) for path in paths]
        self._first = np.cumsum([0, *(len(shard) for shard in self.shards)])
        if len(self) != self.manifest["rows"]:
            what = f"{len(self)} rows in the shards, {self.manifest['rows']} in the manifest"
            fix = "the directory holds shards of another cache"
            raise BadInput(what, where=str(self.directory), fix=fix)
        lengths = (shard.lengths for shard in self.shards)
        self.lengths: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *lengths])
        self._whole: dict[int, bool] = {}  # of the rows checked so far

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

    @cached_property
    def _rows_by_key(self) -> dict[bytes, list[int]]:
        rows_by_key: dict[bytes, list[int]] = {}
        keys = itertools.chain.from_iterable(shard.keys for shard in self.shards)
        for row, key in enumerate(keys):
            rows_by_key.setdefault(key.tobytes(), []).append(row)
        return rows_by_key

    def find(self, input_ids: NDArray[np.int32]) -> list[int]:
        """The rows with exactly these tokens."""
        return self._rows_by_key.get(row_key(input_ids), [])

    def is_whole(self, row: int) -> bool:
        """Whether a row's checksum fits; read and computed once."""
        if row not in self._whole:
            shard, local = self.at(row)
            self._whole[row] = shard.is_whole(local)
        return self._whole[row]


class CachedRows(Sequence[TokenRow]):
    """The token rows of a cache, as training and packing read them.

    With `reading`, indexing a row also reads and checks the target's answer for it, so collating
    batches ahead of the trainer warms the cache.
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
        if self._reading:
            self.store.is_whole(row)
        return TokenRow(ids, mask, shard.places[local], shard.truncated[local])


@dataclass(frozen=True)
class _CachedDocument:
    """A document of the batch and the cache row with its answer."""

    start: int  # flat slot of its first token
    row: int
    slots: NDArray[np.int64]  # slots of the row whose supervision is kept


class CachedEagle3TargetModel(Eagle3TargetBackend):
    """Backend over an offline cache.

    A cache of hidden states serves every kind of supervision; a cache of probabilities serves only
    `probs` over the draft vocabulary it was made for. States are returned in their stored precision
    (`hidden-fp8`: in the target's own). A damaged row raises. AutoModel's caches are supported too;
    `model` replaces the target they name.
    """

    def __init__(
        self,
        cached_target_path: str | Path,
        *,
        supervision: Supervision | None = None,
        device: torch.device | str = "cpu",
        model: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.store = CacheStore(cached_target_path)
        self.shape, manifest = self.store.shape, self.store.manifest
        natural: Supervision = "hidden" if self.shape.is_hidden else "probs"
        super().__init__(natural if supervision is None else supervision)
        if not self.shape.is_hidden and self.supervision != "probs":
            what = f"a cache of {self.shape.encoding} holds no {self.supervision}"
            fix = "ask for probs, or make a cache with the hidden encoding"
            raise BadInput(what, where=str(self.store.directory), fix=fix)
        self.aux_layer_ids = list(manifest["aux_layer_ids"])
        self._device = torch.device(device)
        self._embedding, info = read_target(
            self.store.directory, manifest, model, trust_remote_code=trust_remote_code
        )
        vocabulary, is_hidden = self.store.vocabulary(), self.shape.is_hidden
        self._info = replace(
            info,
            head=info.head.to(self._device),
            vocabulary=None if is_hidden else vocabulary,  # hidden states need none
            suggested=vocabulary if is_hidden else None,
        )

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The draft vocabulary that the cache was made for, if its encoding depends on one."""
        return self._info.vocabulary

    def rows(self, *, reading: bool = False) -> CachedRows:
        self._check_open()
        return CachedRows(self.store, reading=reading)

    def known_rows(self) -> KnownRows:
        manifest = self.store.manifest
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        return KnownRows(self.rows(), int(manifest["held_out_rows"]), f"cache:{digest}")

    def read_ahead(self, rows: RowView) -> RowView:
        return rows.through(self.rows(reading=True))

    def get_input_embeddings(self) -> InputEmbedding:
        self._check_open()
        return self._embedding

    def info(self) -> TargetInfo:
        self._check_open()
        return self._info

    def set_vocab_mapping(
        self, selected_token_ids: Tensor, selected_token_mask: Tensor | None = None
    ) -> None:
        super().set_vocab_mapping(selected_token_ids, selected_token_mask)
        vocabulary, ids = self.vocabulary, selected_token_ids.cpu().numpy()
        if vocabulary is not None and not np.array_equal(vocabulary.selected_token_ids, ids):
            other = f"another draft vocabulary ({vocabulary.size} tokens, digest "
            what = f"made for {other}{vocabulary.digest()[:12]}); {len(ids)} tokens are asked for"
            fix = "train with the cache's vocabulary, or use a cache of hidden states"
            raise BadInput(what, where=str(self.store.directory), fix=fix)

    @torch.no_grad()
    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        """Look up the documents of these rows; an unpacked row is one document."""
        self._check_open()
        documents = find_documents(rows)
        mapping = self._vocab_mapping(self._device) if self.supervision == "probs" else None
        if documents is None:  # each right-padded row is one
            lengths, width = right_padded(rows.attention_mask).sum(1).tolist(), rows.shape[1]
            kept = [(row * width, length) for row, length in enumerate(lengths) if length]
            documents = Documents(*zip(*kept, strict=True)) if kept else Documents((), ())
        cached = self._find(rows, documents)
        for document in cached:
            if not self.store.is_whole(document.row):
                what = f"{self.store.name(document.row)} is damaged: its checksum does not fit"
                raise BadInput(what, where=str(self.store.directory), fix="make the cache again")
        flat = self._states(rows.tokens, cached)
        states = {name: tensor.view(*rows.shape, -1) for name, tensor in flat.items()}
        batch = Eagle3TargetBatch.about(rows, **states, shifted=True)
        if batch.position_mask is not None:
            position_BT1 = batch.position_mask & batch.loss_mask.bool()[..., None]
            batch = replace(batch, position_mask=position_BT1)
        if mapping is not None and self.shape.is_hidden:
            return batch.with_probs(self._info.head, *mapping)
        return batch.with_logits(self._info.head) if self.supervision == "logits" else batch

    def _find(self, rows: TokenBatch, documents: Documents) -> list[_CachedDocument]:
        """For each document the first row of its tokens whose supervision covers what it wants."""
        flat_ids = rows.input_ids.cpu().flatten().numpy().astype(np.int32)
        flat_mask = rows.loss_mask.cpu().flatten().numpy() != 0
        cached = []
        for start, length in zip(documents.starts, documents.lengths, strict=True):
            ids, wanted = (flat[start : start + length] for flat in (flat_ids, flat_mask))
            equal_rows = self.store.find(ids)
            for row in equal_rows:
                shard, local = self.store.at(row)
                _, mask = shard.tokens(local)
                if self.shape.is_hidden or not (wanted[1:] & (mask[1:] == 0)).any():
                    cached.append(_CachedDocument(start, row, self.shape.slots(mask)))
                    break
            else:
                if equal_rows:
                    what = f"loss_mask supervises tokens of {self.store.name(equal_rows[0])} that "
                    what += "were not supervised when the cache was made"
                    raise ValueError(f"{what}; it keeps supervised slots only")
                tokens = f"the {length} tokens {ids[:8].tolist()} ..."
                what = f"input_ids: no row of the cache {self.store.directory} has {tokens}"
                raise ValueError(f"{what}; train on the cache's own rows")
        return cached

    def _states(self, total: int, documents: list[_CachedDocument]) -> dict[str, Tensor]:
        """Everything stored for the documents (ascending), decoded, at their places among `total`
        flat slots; all others are zero. Bytes are copied to a GPU as they are and decoded there."""
        pinned = self._device.type == "cuda"
        stored: dict[str, Tensor] = {}
        per_token = {field.name for field in self.shape.token_fields()}
        for field in self.shape.fields():
            # then every slot of a document has a value, and only the gaps between them are zeroed
            in_runs = field.name in per_token or self.shape.is_hidden
            raw = torch.empty((total, field.row_bytes), dtype=torch.uint8, pin_memory=pinned)
            into, end = raw.numpy(), 0
            if not in_runs:
                into[:] = 0
            for document in documents:
                shard, local = self.store.at(document.row)
                data = shard.payload(field.name, local).reshape(-1, field.row_bytes)
                if in_runs:
                    into[end : document.start] = 0
                    end = document.start + len(data)
                    into[document.start : end] = data
                else:
                    into[document.start + document.slots] = data
            if in_runs:
                into[end:] = 0
            stored[field.name] = raw.to(self._device, non_blocking=pinned).view(field.dtype)
        return decode_states(stored, self.shape, self._info.dtype)
