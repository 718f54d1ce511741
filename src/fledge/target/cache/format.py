"""The on-disk format of the offline cache: the tensors in a shard and the position of every byte.

    cache/
      manifest.json             what determines the contents; written before the first shard
      target.safetensors        the target's input embedding and output head, stored once
      target/                   its config and tokenizer: all else that training needs of it
      vocabulary.safetensors    the draft vocabulary: required by probs and topk; with hidden
                                states only a suggestion, if one was requested
      shard-00000.safetensors   rows 0 .. shard_size - 1, unpadded, end to end

Row lengths are known before the target runs, so the layout of each shard, and hence the exact size
of the whole cache, is known before anything is written, and rows can be written in any order.

Example: a row of six tokens, with prompt `x0 x1` and answer `x2 .. x5`. Aux states are kept for
every token. The supervision in slot t is about token t + 1 (`core.batch`), so a row of n tokens has
n - 1 supervision slots or, in compact form, one for each supervised token after the first:

    token                 x0   x1   x2   x3   x4   x5
    loss_mask             0    0    1    1    1    1
    aux_hidden_states     a0   a1   a2   a3   a4   a5
    last_hidden_states         h1   h2   h3   h4   h5       all slots
                                    h2   h3   h4   h5       compact (`supervised_only`, probs, topk)

Shapes: R rows of a shard, N their tokens, M their supervised slots, D target hidden, W draft
vocabulary, K kept probabilities.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fledge.core.errors import BadInput, nearest

FORMAT = 2  # increment when the meaning of the files changes
Encoding = Literal["hidden", "hidden-fp8", "probs", "topk"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
OVER_A_VOCABULARY: tuple[Encoding, ...] = ("probs", "topk")  # the others serve any vocabulary
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEY_BYTES = 16
_HEADER_ALIGNMENT = 64

# The names of dtypes in a safetensors header.
SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True)
class CacheShape:
    """Everything that determines how many bytes a token takes."""

    encoding: Encoding
    dtype: torch.dtype
    hidden_size: int
    aux_layers: int
    draft_vocab_size: int = 0  # probs and topk
    top_k: int = 0  # topk
    supervised_only: bool = False  # keep supervision at supervised slots only
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(DTYPES.values())  # allowed for states

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            fix = nearest(str(self.encoding), list(ENCODINGS))
            raise BadInput(f"{self.encoding!r} is not an encoding of the cache", fix=fix)
        if self.dtype not in self.dtypes:
            raise BadInput(
                f"states are not kept as {self.dtype}", fix=f"one of {', '.join(DTYPES)}"
            )
        if self.encoding in ("probs", "topk") and self.draft_vocab_size < 1:
            raise BadInput(f"the {self.encoding} encoding needs a draft vocabulary")
        if self.encoding == "topk" and not 1 <= self.top_k <= self.draft_vocab_size:
            raise BadInput(
                f"{self.top_k} probabilities of a draft vocabulary of {self.draft_vocab_size} "
                "cannot be kept",
                fix="give a top-k from 1 to the size of the draft vocabulary",
            )

    @property
    def compact(self) -> bool:
        """Whether supervision is kept for supervised slots only: probabilities are 0 elsewhere."""
        return self.supervised_only or self.encoding in ("probs", "topk")

    @property
    def is_hidden(self) -> bool:
        return self.encoding in ("hidden", "hidden-fp8")

    def token_fields(self) -> "list[Field]":
        """The fields kept for every token."""
        states = torch.float8_e4m3fn if self.encoding == "hidden-fp8" else self.dtype
        fields = [Field("aux_hidden_states", states, self.aux_layers * self.hidden_size)]
        if self.encoding == "hidden-fp8":
            fields.append(Field("aux_scale", torch.float32, self.aux_layers))
        return fields

    def slot_fields(self) -> "list[Field]":
        """The fields kept for every slot with supervision."""
        if self.encoding == "hidden":
            return [Field("last_hidden_states", self.dtype, self.hidden_size)]
        if self.encoding == "hidden-fp8":
            return [
                Field("last_hidden_states", torch.float8_e4m3fn, self.hidden_size),
                Field("last_scale", torch.float32, 1),
            ]
        position = Field("position_mask", torch.uint8, 1)
        if self.encoding == "probs":
            return [Field("target_probs", self.dtype, self.draft_vocab_size), position]
        return [
            Field("topk_probs", self.dtype, self.top_k),
            Field("topk_ids", torch.int32, self.top_k),
            position,
        ]

    def slots(self, loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The slots of one row whose supervision is kept, in ascending order."""
        if self.compact:
            return np.flatnonzero(loss_mask[1:])
        return np.arange(max(0, len(loss_mask) - 1), dtype=np.int64)


@dataclass(frozen=True)
class Field:
    """One tensor of a shard, with `width` values in each of its rows."""

    name: str
    dtype: torch.dtype
    width: int

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Placed:
    """A field at its position in the file: `count` rows, starting at byte `begin`."""

    field: Field
    count: int
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.count * self.field.row_bytes


class ShardLayout:
    """The byte layout of a shard with the given rows."""

    def __init__(
        self, shape: CacheShape, tokens: Sequence[int], slots: Sequence[int], facts: dict[str, Any]
    ) -> None:
        self.shape = shape
        self.row_start = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int64)
        self.slot_start = np.concatenate([[0], np.cumsum(slots)]).astype(np.int64)
        rows, n_tokens, n_slots = len(tokens), int(self.row_start[-1]), int(self.slot_start[-1])
        counted = [
            *((field, n_tokens) for field in shape.token_fields()),
            *((field, n_slots) for field in shape.slot_fields()),
            (Field("input_ids", torch.int32, 1), n_tokens),
            (Field("loss_mask", torch.uint8, 1), n_tokens),
            (Field("row_start", torch.int64, 1), rows + 1),
            (Field("slot_start", torch.int64, 1), rows + 1),
            (Field("row_key", torch.uint8, KEY_BYTES), rows),
            (Field("row_digest", torch.int64, 1), rows),
        ]
        # widest dtypes first: every tensor then starts at a multiple of its item size
        counted.sort(key=lambda item: (-item[0].dtype.itemsize, item[0].name))
        entries = (
            (field.name, field.dtype, [count] if field.name in _FLAT else [count, field.width])
            for field, count in counted
        )
        self.header = safetensors_header(entries, {"fledge": json.dumps(facts, sort_keys=True)})
        self.places: dict[str, Placed] = {}
        at = len(self.header)
        for field, count in counted:
            self.places[field.name] = Placed(field, count, at)
            at = self.places[field.name].end
        self.n_bytes = at
        self._by_token = {field.name for field in shape.token_fields()}

    def span(self, name: str, row: int) -> tuple[int, int]:
        """The byte range [begin, end) of one row in a payload tensor."""
        place = self.places[name]
        starts = self.row_start if name in self._by_token else self.slot_start
        first, last = int(starts[row]), int(starts[row + 1])
        width = place.field.row_bytes
        return place.begin + first * width, place.begin + last * width


_FLAT = {"input_ids", "loss_mask", "row_start", "slot_start", "row_digest"}  # one value per row


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, list[int]]], metadata: dict[str, str]
) -> bytes:
    """The header for tensors stored end to end, padded with spaces as the format allows."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def padded_layout_bytes(rows: int, seq_length: int, aux_width: int, draft_vocab_size: int) -> int:
    """The size of padded rows with draft-vocabulary probabilities in bf16, for comparison. Each
    padded position has aux states, probabilities, ids, two masks (int64) and the position mask."""
    per_position = 2 * (aux_width + draft_vocab_size) + 3 * 8 + 1
    return rows * seq_length * per_position
