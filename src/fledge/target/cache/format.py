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

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.core.head import TargetHead
from fledge.core.rows import TokenRow
from fledge.target.base import by_layer
from fledge.target.finite_check import finite_rows

FORMAT = 2  # increment when the meaning of the files changes
Encoding = Literal["hidden", "hidden-fp8", "probs", "topk"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
OVER_A_VOCABULARY: tuple[Encoding, ...] = ("probs", "topk")  # the others serve any vocabulary
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEY_BYTES = 16
Piece = tuple[int, NDArray[Any]]  # where a file is written to, and with what
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

    def __post_init__(self) -> None:
        if not self.is_hidden and self.draft_vocab_size < 1:
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
        return self.supervised_only or not self.is_hidden

    @property
    def is_hidden(self) -> bool:
        return self.encoding not in OVER_A_VOCABULARY

    def fields(self) -> "list[Field]":
        return [*self.token_fields(), *self.slot_fields()]

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


class Layout(ABC):
    """The byte layout of a file of tensors, stored end to end, and how rows are written to it."""

    def __init__(
        self, tensors: Sequence[tuple[str, torch.dtype, list[int]]], facts: dict[str, Any]
    ) -> None:
        self.header = safetensors_header(tensors, {"fledge": json.dumps(facts, sort_keys=True)})
        self.extent: dict[str, tuple[int, int]] = {}  # the bytes [begin, end) of each tensor
        at = len(self.header)
        for name, dtype, shape in tensors:
            begin, at = at, at + math.prod(shape) * dtype.itemsize
            self.extent[name] = begin, at
        self.n_bytes = at

    row_start: NDArray[np.int64]  # the token at which each row begins, and the number of tokens

    @abstractmethod
    def before(self, rows: Sequence[TokenRow]) -> Iterator[Piece]:
        """What is written before the target has run."""

    @abstractmethod
    def pieces(self, row: int, tokens: TokenRow, payload: dict[str, Tensor]) -> Iterator[Piece]:
        """What is written for one row: the fields of its tokens and slots."""

    def after(self, digests_R: NDArray[np.int64]) -> Iterator[Piece]:
        """What is written last."""
        return iter(())


class ShardLayout(Layout):
    """The byte layout of a shard with the given rows."""

    def __init__(
        self, shape: CacheShape, tokens: Sequence[int], slots: Sequence[int], facts: dict[str, Any]
    ) -> None:
        self.shape = shape
        self.row_start, self.slot_start = starts_of(tokens), starts_of(slots)
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
        tensors = [
            (field.name, field.dtype, [n] if field.name in _FLAT else [n, field.width])
            for field, n in counted
        ]
        super().__init__(tensors, facts)
        by_token = {f.name: (self.row_start, f.row_bytes) for f in shape.token_fields()}
        by_slot = {f.name: (self.slot_start, f.row_bytes) for f in shape.slot_fields()}
        self._payload = by_token | by_slot
        self.payload_names = sorted(self._payload)

    def span(self, name: str, row: int) -> tuple[int, int]:
        """The byte range [begin, end) of one row in a payload tensor."""
        (begin, _), (starts, width) = self.extent[name], self._payload[name]
        return begin + int(starts[row]) * width, begin + int(starts[row + 1]) * width

    def before(self, rows: Sequence[TokenRow]) -> Iterator[Piece]:
        ids = [np.asarray(row.input_ids, dtype=np.int32) for row in rows]
        masks = [np.asarray(row.loss_mask, dtype=np.uint8) for row in rows]
        keys = np.frombuffer(b"".join(map(row_key, ids)), dtype=np.uint8)
        for name, values in (
            ("row_start", self.row_start), ("slot_start", self.slot_start),
            ("input_ids", np.concatenate(ids)), ("loss_mask", np.concatenate(masks)),
            ("row_key", keys),
        ):  # fmt: skip
            yield self.extent[name][0], values

    def pieces(self, row: int, tokens: TokenRow, payload: dict[str, Tensor]) -> Iterator[Piece]:
        for name in self.payload_names:
            (begin, end), data = self.span(name, row), raw_bytes(payload[name])
            if len(data) != end - begin:
                raise ValueError(f"{name} of row {row} has {len(data)} bytes, not {end - begin}")
            yield begin, data

    def after(self, digests_R: NDArray[np.int64]) -> Iterator[Piece]:
        yield self.extent["row_digest"][0], digests_R


_FLAT = {"input_ids", "loss_mask", "row_start", "slot_start", "row_digest"}  # one value per row


def layout_of(shape: CacheShape, rows: Sequence[TokenRow]) -> ShardLayout:
    """The layout of a shard with these rows, which does not depend on the target's answers."""
    slots = [len(shape.slots(row.loss_mask)) for row in rows]
    return ShardLayout(shape, [len(row.input_ids) for row in rows], slots, row_facts(rows))


def row_facts(rows: Sequence[TokenRow]) -> dict[str, Any]:
    """What a shard's header says of its rows."""
    truncated = [bool(row.truncated) for row in rows]
    return {"places": [row.place for row in rows], "truncated": truncated}


def starts_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def row_key(input_ids: NDArray[np.int32]) -> bytes:
    """A hash of the token ids: equal token rows have equal keys."""
    ids = np.ascontiguousarray(input_ids, dtype=np.int32)
    return hashlib.blake2b(ids.data, digest_size=KEY_BYTES).digest()


def raw_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    raw: NDArray[np.uint8] = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return raw


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


# --- codec ---------------------------------------------------------------------------------------
# Encodes a target's answer as the tensors that the cache stores, and decodes them again.
#
# Probabilities come from `target_distribution`, the function that the trainer itself calls, so a
# cached answer equals the live one. Everything here runs on the device of the batch.


_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_FP16_TOO_SMALL_BY = 2.0**8  # see `_scaled_down_fp16`
_CPU_BLOCK, _GPU_BLOCK = 1 << 19, 1 << 24  # values decoded at once


@torch.no_grad()
def to_fp8(states_ND: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """8-bit floats [N, D] and their scales [N, chunks]: each chunk's largest magnitude becomes 448.

    There is one scale per token and layer, because tokens differ by orders of magnitude (above all
    the first one of a row); the exponent bits cover the differences between channels.
    """
    grouped_NCX = states_ND.float().reshape(len(states_ND), chunks, states_ND.shape[-1] // chunks)
    scale_NC = grouped_NCX.abs().amax(-1) / _FP8_MAX
    scale_NC = torch.where(scale_NC == 0, 1.0, scale_NC)  # NaN stays: `unsound` detects it
    # with a subnormal scale the quotient can round past the largest value: clamp before the cast
    scaled_NCX = (grouped_NCX / scale_NC[..., None]).clamp(-_FP8_MAX, _FP8_MAX)
    return scaled_NCX.flatten(-2).to(_FP8), scale_NC


@torch.no_grad()
def from_fp8(states_ND: Tensor, scale_NC: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_fp8`: each value times its chunk's scale in float32, rounded once. Works
    in blocks of rows, so that intermediates fit a CPU's cache and stay small on a GPU."""
    (rows, chunks), width = scale_NC.shape, states_ND.shape[-1]
    shape_NCX = (rows, chunks, width // chunks)
    states_NCX, scale_NC1 = states_ND.view(shape_NCX), scale_NC[..., None]
    if on_cpu := states_ND.device.type == "cpu":
        scale_NC1 = scale_NC1 * _FP16_TOO_SMALL_BY
    out_NCX = torch.empty(shape_NCX, dtype=dtype, device=states_ND.device)
    block = max(1, (_CPU_BLOCK if on_cpu else _GPU_BLOCK) // width)
    for begin in range(0, rows, block):
        part = states_NCX[begin : begin + block]
        fp16 = _scaled_down_fp16(part) if on_cpu else part.to(torch.float16)
        out_NCX[begin : begin + block] = fp16.float().mul_(scale_NC1[begin : begin + block])
    return out_NCX.flatten(1)


def _scaled_down_fp16(states: Tensor) -> Tensor:
    """e4m3 -> float16, too small by a factor of 2^8; on a CPU eight times as fast as torch's cast.

    Sign, exponent and mantissa are moved to their positions in a float16. This preserves the value,
    also of subnormal numbers, except that the exponent is off by the difference of the biases,
    15 - 7. (NaN is not preserved, but it is never written.) Making up for the factor in the scale
    is exact, since no scale exceeds 2^120.

        e4m3       s eeee mmm
        extended   ssss ssss seee emmm     int16
        shifted    ssee eemm m000 0000     << 7
        float16    s0ee eemm m000 0000     & ~0x4000
    """
    bits = states.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    return bits.bitwise_and_(~0x4000).view(torch.float16)


@torch.no_grad()
def unsound(stored: dict[str, Tensor], shape: CacheShape) -> tuple[Tensor, Tensor]:
    """bool [N, A] and [M]: which aux layers of which tokens, and which supervised slots, are stored
    with a value that is not finite."""
    aux_NAD = by_layer(stored["aux_hidden_states"], shape.aux_layers)
    if shape.encoding == "hidden-fp8":
        bad_NA = ~stored["aux_scale"].isfinite() | _fp8_nan(aux_NAD)
        bad_M = ~stored["last_scale"][:, 0].isfinite() | _fp8_nan(stored["last_hidden_states"])
        return bad_NA, bad_M
    names = {"hidden": "last_hidden_states", "probs": "target_probs", "topk": "topk_probs"}
    return ~finite_rows(aux_NAD), ~finite_rows(stored[names[shape.encoding]])


def _fp8_nan(states: Tensor) -> Tensor:
    """[..., D] -> [...]: whether any 8-bit float is NaN, i.e. has all bits but the sign set."""
    return ((states.view(torch.uint8) & 0x7F) == 0x7F).any(-1)


@torch.no_grad()
def keep_top(probs_NW: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k largest probabilities [N, K], renormalized, and their draft ids."""
    top_NK, ids_NK = probs_NW.float().topk(top_k, dim=-1)
    total_N1 = top_NK.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return top_NK / total_N1, ids_NK


@torch.no_grad()
def encode_rows(
    batch: Eagle3TargetBatch,
    shape: CacheShape,
    lengths: list[int],
    slots: list[Tensor],
    *,
    head: TargetHead | None = None,
    vocabulary: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The payload of a batch with one document per row, rows end to end: name -> [N or M, ...].
    `lengths` are the token counts of the rows, `slots` their slots whose supervision is kept."""
    width = batch.input_ids.shape[1]
    token_N = torch.cat([row * width + torch.arange(n) for row, n in enumerate(lengths)])
    slot_M = torch.cat([row * width + slot for row, slot in enumerate(slots)])
    device = batch.aux_hidden_states.device
    token_N, slot_M = token_N.to(device), slot_M.to(device)
    aux_ND = batch.aux_hidden_states.flatten(0, 1)[token_N]
    if shape.is_hidden:
        assert batch.last_hidden_states is not None, "see `check_target`"
        hidden_MD = batch.last_hidden_states.flatten(0, 1)[slot_M]
        if shape.encoding == "hidden":
            aux_ND, hidden_MD = aux_ND.to(shape.dtype), hidden_MD.to(shape.dtype)
            return {"aux_hidden_states": aux_ND, "last_hidden_states": hidden_MD}
        aux8_ND, aux_scale = to_fp8(aux_ND, shape.aux_layers)
        hidden8_MD, last_scale = to_fp8(hidden_MD, 1)
        return {
            "aux_hidden_states": aux8_ND,
            "aux_scale": aux_scale,
            "last_hidden_states": hidden8_MD,
            "last_scale": last_scale,
        }
    if batch.target_probs is None:
        assert vocabulary is not None, "probabilities are over a draft vocabulary"
        batch = batch.with_probs(head, *vocabulary)
    assert batch.target_probs is not None
    assert batch.position_mask is not None
    probs_MW = batch.target_probs.flatten(0, 1)[slot_M]
    position_M1 = batch.position_mask.flatten(0, 1)[slot_M]
    top_k = shape.top_k if shape.encoding == "topk" else None
    supervision = encode_probs(probs_MW, position_M1, shape.dtype, top_k)
    return {"aux_hidden_states": aux_ND.to(shape.dtype), **supervision}


def encode_probs(
    probs_MW: Tensor, sayable_M1: Tensor, dtype: torch.dtype, top_k: int | None
) -> dict[str, Tensor]:
    """The stored form of probabilities: the `top_k` largest, or all of them."""
    mask = {"position_mask": sayable_M1.to(torch.uint8)}
    if top_k is None:
        return {**mask, "target_probs": probs_MW.to(dtype)}
    top_MK, ids_MK = keep_top(probs_MW, top_k)
    return {**mask, "topk_probs": top_MK.to(dtype), "topk_ids": ids_MK.to(torch.int32)}


@torch.no_grad()
def decode_states(
    stored: dict[str, Tensor], shape: CacheShape, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Decode stored tensors [S, ...] of any S slots to the fields of a batch, still flat."""
    aux_SD = stored["aux_hidden_states"]
    if shape.is_hidden:
        hidden_SD = stored["last_hidden_states"]
        if shape.encoding == "hidden-fp8":
            aux_SD = from_fp8(aux_SD, stored["aux_scale"], dtype)
            hidden_SD = from_fp8(hidden_SD, stored["last_scale"], dtype)
        return {"aux_hidden_states": aux_SD, "last_hidden_states": hidden_SD}
    if shape.encoding == "probs":
        probs_SW = stored["target_probs"].float()
    else:
        top_SK = stored["topk_probs"].float()
        probs_SW = top_SK.new_zeros((len(top_SK), shape.draft_vocab_size))
        probs_SW.scatter_add_(1, stored["topk_ids"].long(), top_SK)
    return {
        "aux_hidden_states": aux_SD,
        "target_probs": probs_SW,
        "position_mask": stored["position_mask"] != 0,
    }
