"""Reads and writes cache directories in AutoModel's own layout; its shards are `PaddedLayout`.

    manifest.json                   AutoModel's fields; if fledge wrote it, ours under "fledge"
    target_embeddings.safetensors   the target's input embedding: `weight` [V, D], float32
    shard-000000.safetensors        padded rows

Such a cache only names its target and holds no config, tokenizer or output head: they come from
the named model, or from files that fledge adds to the directory and AutoModel ignores.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from fledge.core import reading
from fledge.core.errors import BadInput, broken_files
from fledge.core.head import TargetHead
from fledge.core.rows import TokenRow
from fledge.data.vocab import DraftVocabulary, count_supervised
from fledge.models.resolve import load_config, local_model
from fledge.models.weight_files import read_target_tables
from fledge.target.base import InputEmbedding, TargetInfo
from fledge.target.cache.format import (
    FORMAT,
    KEY_BYTES,
    SAFETENSORS,
    CacheShape,
    raw_bytes,
    row_key,
)
from fledge.target.cache.shard import Layout, Piece, row_facts
from fledge.target.layers import target_depth

LAYOUT = "automodel"  # "layout" in our manifest of such a directory
OWN = "fledge"  # the key in their manifest under which ours is stored
EMBEDDINGS = "target_embeddings.safetensors"
_VERSION, _VERSIONS = 2, (1, 2)  # the version written; those read (1 has no top-k)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNKNOWN = "not recorded"


def is_automodel(stored: dict[str, Any]) -> bool:
    """Whether a manifest is one of AutoModel's."""
    return "format_version" in stored and "num_samples" in stored


def own_manifest(stored: dict[str, Any], *, where: str) -> dict[str, Any]:
    """AutoModel's manifest converted to ours."""
    if (version := stored["format_version"]) not in _VERSIONS:
        what = f"AutoModel's cache format {version}, this version of fledge reads 1 and 2"
        raise BadInput(what, where=where)
    try:
        width, top_k = int(stored["draft_vocab_size"]), int(stored.get("target_probs_topk") or 0)
        compressed, ids = 0 < top_k < width, [int(i) for i in stored["selected_token_ids"]]
        layers = [int(layer) for layer in stored["aux_layer_ids"]]
        hidden_size, remainder = divmod(int(stored["aux_hidden_dim"]), len(layers))
        vocab_size = int(stored["target_vocab_size"])
        if remainder or len({*ids}) != width or not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError("its sizes contradict each other")
        return {
            "format": FORMAT,
            "layout": LAYOUT,
            "encoding": "topk" if compressed else "probs",
            "dtype": _DTYPES[stored["dtype"]],
            "top_k": top_k if compressed else None,
            "shard_size": int(stored["shard_size"]),
            "vocabulary": {"size": width, "selected_token_ids": ids},
            "rows": int(stored["num_samples"]),
            "held_out_rows": 0,
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "aux_layer_ids": layers,
            "seq_length": int(stored["seq_length"]),
            "target_model": str(stored["target_model"]),
            "target": {"weight_dtypes": _UNKNOWN, "weights_fingerprint": _UNKNOWN},
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"AutoModel's manifest is damaged ({type(error).__name__}: {error})"
        raise BadInput(what, where=where) from None


def their_manifest(own: dict[str, Any], vocabulary: DraftVocabulary, files: Path) -> dict[str, Any]:
    """Our manifest converted to AutoModel's, with all of ours included. `files` is the directory
    with config and tokenizer, used as the target's name if the manifest has none."""
    short_names = {name: short for short, name in _DTYPES.items()}
    return {
        "format_version": _VERSION,
        "target_model": str(own.get("target_model") or files.absolute()),
        "target_vocab_size": own["vocab_size"],
        "draft_vocab_size": vocabulary.size,
        "seq_length": own["seq_length"],
        "dtype": short_names[own["dtype"]],
        "num_samples": own["rows"],
        "shard_size": own["shard_size"],
        "target_probs_topk": own["top_k"] or 0,
        "aux_hidden_dim": own["hidden_size"] * len(own["aux_layer_ids"]),
        "aux_layer_ids": own["aux_layer_ids"],
        "selected_token_ids": vocabulary.selected_token_ids.tolist(),
        "input_data": str(own.get("data", _UNKNOWN)),
        "split": None,
        "shuffle_seed": own.get("shuffle_seed") or 0,
        "mask_reasoning_content": bool((own.get("tokenise") or {}).get("mask_reasoning", False)),
        "mask_generation_prompt": False,
        OWN: own,
    }


def column_order(manifest: dict[str, Any]) -> NDArray[np.int64] | None:
    """The permutation that sorts their columns by target id; None if they are sorted already."""
    ids_W = np.array(manifest["vocabulary"].get("selected_token_ids", ()), dtype=np.int64)
    order_W: NDArray[np.int64] = np.argsort(ids_W)
    return None if np.array_equal(order_W, np.arange(len(ids_W))) else order_W


def vocabulary_of(
    manifest: dict[str, Any], rows: Iterable[tuple[NDArray[np.int32], NDArray[np.uint8]]]
) -> DraftVocabulary:
    """Their selection in our order. They do not record its coverage: it is counted on `rows`."""
    ids_W = np.sort(np.array(manifest["vocabulary"]["selected_token_ids"], dtype=np.int64))
    counts_V = count_supervised(rows, manifest["vocab_size"])
    covered = float(counts_V[ids_W].sum() / max(1, counts_V.sum()))
    return DraftVocabulary(ids_W, manifest["vocab_size"], covered, LAYOUT)


def read_embedding(directory: Path) -> Tensor:
    path = directory / EMBEDDINGS
    tensors = reading.load_tensors(path, what="the file of the target's embedding")
    weight_VD: Tensor | None = tensors.get("weight")
    if weight_VD is None:
        raise BadInput("it holds no tensor 'weight'", where=str(path))
    return weight_VD


def read_named_target(
    directory: Path, manifest: dict[str, Any], name: str | None, *, trust_remote_code: bool
) -> tuple[InputEmbedding, TargetInfo]:
    """The target of a directory without fledge's files: the embedding comes from the directory, the
    rest from the model `name` or, by default, from the one that the manifest names."""
    embedding_VD, name = read_embedding(directory), name or manifest["target_model"]
    config = load_config(name, trust_remote_code=trust_remote_code)
    rows, width = manifest["vocab_size"], manifest["hidden_size"]
    tables = read_target_tables(local_model(name))
    named = tables.embedding_VD.float()
    same = list(embedding_VD.shape) == list(named.shape) == [rows, width]
    if not same or not torch.allclose(named, embedding_VD, rtol=2**-7, atol=1e-6):
        fix = "target.model=MODEL names the right one"
        raise BadInput(f"made from another model than {name}", where=str(directory), fix=fix)
    weights = hashlib.sha256(embedding_VD.contiguous().view(torch.uint8).numpy().data)
    info = TargetInfo(
        head=TargetHead(tables.head_VD),
        final_norm=None,
        hidden_size=width,
        vocab_size=rows,
        depth=target_depth(config),
        dtype=getattr(torch, manifest["dtype"]),
        weight_dtypes=_UNKNOWN,
        weights_fingerprint=weights.hexdigest()[:16],
        tokenizer_fingerprint=None,
    )
    return InputEmbedding(embedding_VD), info


# --- padded --------------------------------------------------------------------------------------
# A shard in AutoModel's own layout: rows padded to one length, every field stacked.
#
# Rows are stored the way a trainer reads them: shifted (`core.batch`). Example: a row of four
# tokens with prompt `x0 x1`, padded to six:
#
#     token                    x0   x1   x2   x3
#     input_ids [R, S]         x1   x2   x3   0    0    0     int64
#     attention_mask [R, S]    1    1    1    1    0    0     int64
#     loss_mask [R, S]         0    1    1    0    0    0     int64, of the token after
#     aux_hidden_states        a0   a1   a2   a3   0    0     [R, S, 3D]
#     target_probs             .    p2   p3   .    .    .     [R, S, W], about the token after
#     position_mask            .    m2   m3   .    .    .     [R, S, 1], bool
#
# or, instead of `target_probs`, `target_probs_values` and `target_probs_indices` (int32) [R, S, K].
# So a row's first token is in none of the fields; nothing is trained on it. In shards written by
# fledge it is in the header (which AutoModel does not read), along with the places of the rows; in
# others it is taken to be 0.
#
# Shapes: R rows of a shard, S their padded length, D target hidden, W draft vocabulary, K kept
# probabilities.


# AutoModel's names for our fields, where they differ.
_AUTOMODEL_NAMES = {"topk_probs": "target_probs_values", "topk_ids": "target_probs_indices"}
_INTEGERS = ("input_ids", "attention_mask", "loss_mask")


def padded_shard_name(index: int) -> str:
    return f"shard-{index:06d}.safetensors"


def their_fields(shape: CacheShape) -> dict[str, tuple[torch.dtype, int]]:
    """AutoModel's fields: name -> (dtype, values per slot)."""
    fields = dict.fromkeys(_INTEGERS, (torch.int64, 1))
    for field in shape.fields():
        dtype = torch.bool if field.name == "position_mask" else field.dtype
        fields[_AUTOMODEL_NAMES.get(field.name, field.name)] = dtype, field.width
    return fields


class PaddedLayout(Layout):
    """The byte layout of a padded shard with the given rows."""

    def __init__(self, shape: CacheShape, rows: Sequence[TokenRow], width: int) -> None:
        self.shape, self.width = shape, width
        fields = their_fields(shape)
        self._slot_bytes = {
            name: values * dtype.itemsize for name, (dtype, values) in fields.items()
        }
        tensors = [
            (name, dtype, [len(rows), width, *(() if name in _INTEGERS else (values,))])
            for name, (dtype, values) in fields.items()
        ]
        tensors.sort(key=lambda tensor: (-tensor[1].itemsize, tensor[0]))
        first = [[int(row.input_ids[0]), int(row.loss_mask[0])] for row in rows]
        super().__init__(tensors, {**row_facts(rows), "first": first})

    def _at(self, name: str, row: int, slot: int = 0) -> int:
        return self.extent[name][0] + (row * self.width + slot) * self._slot_bytes[name]

    def pieces(self, row: int, tokens: TokenRow, payload: dict[str, Tensor]) -> Iterator[Piece]:
        ids, mask = (np.asarray(x, dtype=np.int64) for x in (tokens.input_ids, tokens.loss_mask))
        yield self._at("input_ids", row), ids[1:]
        yield self._at("loss_mask", row), mask[1:]
        yield self._at("attention_mask", row), np.ones_like(ids)
        for field in self.shape.token_fields():
            yield self._at(field.name, row), raw_bytes(payload[field.name])
        slots = self.shape.slots(np.asarray(tokens.loss_mask))
        runs = np.split(np.arange(len(slots)), np.flatnonzero(np.diff(slots) != 1) + 1)
        for field in self.shape.slot_fields() if len(slots) else ():
            data = raw_bytes(payload[field.name]).reshape(len(slots), field.row_bytes)
            name = _AUTOMODEL_NAMES.get(field.name, field.name)
            for run in runs:
                yield self._at(name, row, int(slots[run[0]])), data[run[0] : run[-1] + 1]


class PaddedShard:
    """A finished padded shard, read as it is needed, with the interface of `Shard`.

    `order_W` sorts its columns by ascending target id, which is our order; None if they already
    are. There are no checksums: every row is assumed to be whole.
    """

    def __init__(self, path: Path, shape: CacheShape, order_W: NDArray[np.int64] | None) -> None:
        self.path, self._shape, self._order_W = path, shape, order_W
        try:
            self._file = cast(Any, safe_open(str(path), framework="pt"))
            facts_json = (self._file.metadata() or {}).get("fledge", "{}")
            facts = reading.parse_json(facts_json, where=str(path))
            rows, width = self._file.get_slice("input_ids").get_shape()
            for name, (dtype, values) in their_fields(shape).items():
                field, expected = self._file.get_slice(name), [rows, width, values]
                fits = field.get_shape() == (expected[:2] if name in _INTEGERS else expected)
                if field.get_dtype() != SAFETENSORS[dtype] or not fits:
                    raise ValueError(f"{name} does not fit the manifest")
            default_places = [f"{path.name}:{row + 1}" for row in range(rows)]
            self.places: list[str] = facts.get("places") or default_places
            self.truncated: list[bool] = facts.get("truncated") or [False] * rows
            self._first_R2 = np.array(facts.get("first") or [[0, 0]] * rows).reshape(rows, 2)
        except broken_files() as error:
            raise BadInput(f"the shard cannot be read ({error})", where=str(path)) from None
        real_RS = self._file.get_tensor("attention_mask").numpy()
        self.lengths: NDArray[np.int64] = real_RS.sum(1)
        if not np.array_equal(real_RS, np.arange(width) < self.lengths[:, None]):
            raise BadInput("attention_mask is not right-padded", where=str(path))

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def keys(self) -> NDArray[np.uint8]:
        keys = b"".join(row_key(self.tokens(row)[0]) for row in range(len(self)))
        return np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)

    def tokens(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        later, (first, supervised) = max(0, int(self.lengths[row]) - 1), self._first_R2[row]
        ids, mask = (self._file.get_slice(n)[row, :later] for n in ("input_ids", "loss_mask"))
        ids = np.concatenate([[first], ids.numpy()])
        mask = np.concatenate([[supervised], mask.numpy() != 0])
        return ids.astype(np.int32), mask.astype(np.uint8)

    def payload(self, name: str, row: int) -> NDArray[np.uint8]:
        """The bytes of one row in one of our payload tensors."""
        field = self._file.get_slice(_AUTOMODEL_NAMES.get(name, name))
        data_SX: Tensor = field[row, : int(self.lengths[row])]
        if name == "aux_hidden_states":
            return raw_bytes(data_SX)
        kept_MX = data_SX[torch.from_numpy(self._shape.slots(self.tokens(row)[1]))]
        if self._order_W is not None and name == "target_probs":
            kept_MX = kept_MX[:, torch.from_numpy(self._order_W)]
        elif self._order_W is not None and name == "topk_ids":
            rank_W = torch.from_numpy(np.argsort(self._order_W).astype(np.int32))
            kept_MX = rank_W[kept_MX.long()]
        return raw_bytes(kept_MX)

    def is_whole(self, row: int) -> bool:
        """True for every row of the shard: there is no checksum to compare."""
        return 0 <= row < len(self)
