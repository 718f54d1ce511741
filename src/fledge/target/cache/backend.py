"""The target backend that reads answers from disk, as written by `fledge precompute`.

Each document is looked up by its tokens, however it is packed; the target itself is never loaded.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch, Supervision
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.data.rows import KnownRows, RowView
from fledge.data.vocab import DraftVocabulary
from fledge.target.base import Eagle3TargetBackend, InputEmbedding, TargetInfo
from fledge.target.cache.codec import decode_states
from fledge.target.cache.format import Field
from fledge.target.cache.manifest import read_target
from fledge.target.cache.store import CachedRows, CacheStore, OnDamage
from fledge.target.packing import Documents, find_documents, right_padded


@dataclass(frozen=True)
class _CachedDocument:
    """A document of the batch and the cache row with its answer."""

    start: int  # flat slot of its first token
    length: int
    row: int
    slots: NDArray[np.int64]  # slots of the row whose supervision is kept


class CachedEagle3TargetModel(Eagle3TargetBackend):
    """Backend over an offline cache.

    A cache of hidden states serves every kind of supervision; a cache of probabilities serves only
    `probs` over the draft vocabulary it was made for. States are returned in their stored precision
    (`hidden-fp8`: in the target's own). A damaged row raises or, with `on_damage="skip"`, is left
    unsupervised. AutoModel's caches are supported too; `model` replaces the target they name.
    """

    def __init__(
        self,
        cached_target_path: str | Path,
        *,
        supervision: Supervision | None = None,
        device: torch.device | str = "cpu",
        on_damage: OnDamage = "fail",
        model: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.store = CacheStore(cached_target_path, on_damage=on_damage)
        self.shape, manifest = self.store.shape, self.store.manifest
        natural: Supervision = "hidden" if self.shape.is_hidden else "probs"
        super().__init__(natural if supervision is None else supervision)
        if not self.shape.is_hidden and self.supervision != "probs":
            raise BadInput(
                f"a cache of {self.shape.encoding} holds no {self.supervision}",
                where=str(self.store.directory),
                fix="ask for probs, or make a cache with the hidden encoding",
            )
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
        """The token rows in the cache; see `CachedRows` for `reading`."""
        self._check_open()
        return CachedRows(self.store, reading=reading)

    def known_rows(self) -> KnownRows:
        manifest = self.store.manifest
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        held_out = int(manifest["held_out_rows"])
        return KnownRows(self.rows(), held_out, f"cache:{digest}")

    def read_ahead(self, rows: RowView) -> RowView:
        return rows.through(self.rows(reading=True))

    def get_input_embeddings(self) -> InputEmbedding:
        self._check_open()
        return self._embedding

    def info(self) -> TargetInfo:
        self._check_open()
        return self._info

    def close(self) -> None:
        if not self._closed:
            self.store.close()
        super().close()

    def set_vocab_mapping(
        self, selected_token_ids: Tensor, selected_token_mask: Tensor | None = None
    ) -> None:
        super().set_vocab_mapping(selected_token_ids, selected_token_mask)
        vocabulary = self.vocabulary
        if vocabulary is None:
            return
        if not np.array_equal(vocabulary.selected_token_ids, selected_token_ids.cpu().numpy()):
            raise BadInput(
                f"made for another draft vocabulary ({vocabulary.size} tokens, digest "
                f"{vocabulary.digest()[:12]}); {len(selected_token_ids)} tokens are asked for",
                where=str(self.store.directory),
                fix="train with the cache's vocabulary, or use a cache of hidden states",
            )

    @torch.no_grad()
    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        """Look up the documents of these rows; an unpacked row is one document."""
        self._check_open()
        documents = find_documents(rows)
        mapping = self._vocab_mapping(self._device) if self.supervision == "probs" else None
        if documents is None:
            documents = _rows_as_documents(rows.attention_mask)
        cached = self._find(rows, documents)
        whole = [document for document in cached if self.store.check(document.row)]
        if len(whole) < len(cached):  # skipped on request: no answer, so no supervision
            rows = replace(rows, loss_mask=_only_within(rows.loss_mask, whole))
        states = {
            name: tensor.view(*rows.shape, -1)
            for name, tensor in self._states(rows.tokens, whole).items()
        }
        batch = Eagle3TargetBatch.about(rows, **states, shifted=True)
        if batch.position_mask is not None:
            position_BT1 = batch.position_mask & batch.loss_mask.bool()[..., None]
            batch = replace(batch, position_mask=position_BT1)
        if mapping is not None and self.shape.is_hidden:
            return batch.with_probs(self._info.head, *mapping)
        if self.supervision == "logits":
            return batch.with_logits(self._info.head)
        return batch

    def _find(self, rows: TokenBatch, documents: Documents) -> list[_CachedDocument]:
        flat_ids = rows.input_ids.cpu().flatten().numpy()
        flat_mask = rows.loss_mask.cpu().flatten().numpy() != 0
        cached = []
        for start, length in zip(documents.starts, documents.lengths, strict=True):
            span = slice(start, start + length)
            equal_rows = self.store.find(flat_ids[span].astype(np.int32))
            if not equal_rows:
                raise ValueError(
                    f"input_ids: no row of the cache {self.store.directory} has the {length} "
                    f"tokens {flat_ids[span][:8].tolist()} ...; train on the cache's own rows"
                )
            cached.append(self._first_covering(equal_rows, start, flat_mask[span]))
        return cached

    def _first_covering(
        self, rows: list[int], start: int, wanted: NDArray[np.bool_]
    ) -> _CachedDocument:
        """The first of several equal rows whose stored supervision covers the wanted tokens."""
        for row in rows:
            shard, local = self.store.at(row)
            _, mask = shard.tokens(local)
            if not self.shape.compact or not (wanted[1:] & (mask[1:] == 0)).any():
                return _CachedDocument(start, len(mask), row, self.shape.slots(mask))
        raise ValueError(
            f"loss_mask supervises tokens of {self.store.name(rows[0])} that were not supervised "
            "when the cache was made; it keeps supervised slots only"
        )

    def _states(self, total: int, documents: list[_CachedDocument]) -> dict[str, Tensor]:
        """Everything stored for the documents, decoded, at their places among `total` flat slots.
        Bytes are copied to a GPU as they are stored and decoded there."""
        pinned = self._device.type == "cuda"
        stored: dict[str, Tensor] = {}
        per_token = {field.name for field in self.shape.token_fields()}
        for field in (*self.shape.token_fields(), *self.shape.slot_fields()):
            in_runs = field.name in per_token or not self.shape.compact
            raw = torch.empty((total, field.row_bytes), dtype=torch.uint8, pin_memory=pinned)
            fill = self._fill_runs if in_runs else self._fill_slots
            fill(raw.numpy(), field, documents)
            stored[field.name] = raw.to(self._device, non_blocking=pinned).view(field.dtype)
        return decode_states(stored, self.shape, self._info.dtype)

    def _fill_runs(
        self, into: NDArray[np.uint8], field: Field, documents: list[_CachedDocument]
    ) -> None:
        """Copy each document as one contiguous run of slots; only the gaps between are zeroed."""
        at = 0
        for document in documents:  # ascending
            shard, local = self.store.at(document.row)
            data = shard.payload(field.name, local).reshape(-1, field.row_bytes)
            into[at : document.start] = 0
            at = document.start + len(data)
            into[document.start : at] = data
        into[at:] = 0

    def _fill_slots(
        self, into: NDArray[np.uint8], field: Field, documents: list[_CachedDocument]
    ) -> None:
        """Copy supervised slots only; all others are zero."""
        into[:] = 0
        for document in documents:
            shard, local = self.store.at(document.row)
            data = shard.payload(field.name, local).reshape(-1, field.row_bytes)
            into[document.start + document.slots] = data


def _only_within(loss_mask: Tensor, documents: list[_CachedDocument]) -> Tensor:
    """The loss mask [B, T] within these documents, 0 elsewhere."""
    inside_S = torch.zeros(loss_mask.numel(), dtype=torch.bool)
    for document in documents:
        inside_S[document.start : document.start + document.length] = True
    return loss_mask * inside_S.view_as(loss_mask).to(loss_mask.device)


def _rows_as_documents(attention_mask: Tensor) -> Documents:
    """Each right-padded row as one document."""
    lengths, width = right_padded(attention_mask).sum(1).tolist(), attention_mask.shape[1]
    starts = tuple(row * width for row, length in enumerate(lengths) if length)
    return Documents(starts, tuple(length for length in lengths if length))
