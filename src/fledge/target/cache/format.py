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
n - 1 slots of last hidden states, or probabilities for each supervised token after the first:

    token                 x0   x1   x2   x3   x4   x5
    loss_mask             0    0    1    1    1    1
    aux_hidden_states     a0   a1   a2   a3   a4   a5
    last_hidden_states         h1   h2   h3   h4   h5
    target_probs, topk_probs             p2   p3   p4   p5       supervised slots only

Shapes: R rows of a shard, N their tokens, M their supervised slots, D target hidden, W draft
vocabulary, K kept probabilities.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.core.head import TargetHead
from fledge.target.base import by_layer
from fledge.target.finite_check import finite_rows

FORMAT = 2  # increment when the meaning of the files changes
Encoding = Literal["hidden", "hidden-fp8", "probs", "topk"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
OVER_A_VOCABULARY: tuple[Encoding, ...] = ("probs", "topk")  # the others serve any vocabulary
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEY_BYTES = 16
_FP8 = torch.float8_e4m3fn
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

    def __post_init__(self) -> None:
        if not self.is_hidden and self.draft_vocab_size < 1:
            raise BadInput(f"the {self.encoding} encoding needs a draft vocabulary")
        if self.encoding == "topk" and not 1 <= self.top_k <= self.draft_vocab_size:
            what = f"{self.top_k} probabilities of a draft vocabulary of {self.draft_vocab_size}"
            fix = "give a top-k from 1 to the size of the draft vocabulary"
            raise BadInput(f"{what} cannot be kept", fix=fix)

    @property
    def is_hidden(self) -> bool:
        """Whether states are kept, at all slots; probabilities are only at supervised ones."""
        return self.encoding not in OVER_A_VOCABULARY

    def fields(self) -> "list[Field]":
        return [*self.token_fields(), *self.slot_fields()]

    def token_fields(self) -> "list[Field]":
        """The fields kept for every token."""
        width = self.aux_layers * self.hidden_size
        if self.encoding != "hidden-fp8":
            return [Field("aux_hidden_states", self.dtype, width)]
        scales = Field("aux_scale", torch.float32, self.aux_layers)
        return [Field("aux_hidden_states", _FP8, width), scales]

    def slot_fields(self) -> "list[Field]":
        """The fields kept for every slot with supervision."""
        if self.encoding == "hidden":
            return [Field("last_hidden_states", self.dtype, self.hidden_size)]
        if self.encoding == "hidden-fp8":
            scale = Field("last_scale", torch.float32, 1)
            return [Field("last_hidden_states", _FP8, self.hidden_size), scale]
        position = Field("position_mask", torch.uint8, 1)
        if self.encoding == "probs":
            return [Field("target_probs", self.dtype, self.draft_vocab_size), position]
        top_ids = Field("topk_ids", torch.int32, self.top_k)
        return [Field("topk_probs", self.dtype, self.top_k), top_ids, position]

    def slots(self, loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The slots of one row whose supervision is kept, in ascending order."""
        if self.is_hidden:
            return np.arange(max(0, len(loss_mask) - 1), dtype=np.int64)
        return np.flatnonzero(loss_mask[1:])


@dataclass(frozen=True)
class Field:
    """One tensor of a shard, with `width` values for each token, slot or row."""

    name: str
    dtype: torch.dtype
    width: int = 0  # 0: one value, without a dimension of its own

    @property
    def row_bytes(self) -> int:
        return max(1, self.width) * self.dtype.itemsize


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


# --- codec: a target's answer as the tensors that the cache stores, and back ---------------------
#
# Probabilities come from `target_distribution`, the function that the trainer itself calls, so a
# cached answer equals the live one. Everything here runs on the device of the batch.


_FP8_MAX = torch.finfo(_FP8).max
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
    states_NCX = states_ND.view(rows, chunks, width // chunks)
    out_NCX = torch.empty(states_NCX.shape, dtype=dtype, device=states_ND.device)
    block = max(1, (_GPU_BLOCK if states_ND.is_cuda else _CPU_BLOCK) // width)
    for begin in range(0, rows, block):
        part = slice(begin, begin + block)
        out_NCX[part] = states_NCX[part].float().mul_(scale_NC[part, :, None])
    return out_NCX.flatten(1)


@torch.no_grad()
def unsound(stored: dict[str, Tensor], shape: CacheShape) -> tuple[Tensor, Tensor]:
    """bool [N, A] and [M]: which aux layers of which tokens, and which supervised slots, are stored
    with a value that is not finite. A chunk with such a value has such a scale."""
    if shape.encoding == "hidden-fp8":
        return ~stored["aux_scale"].isfinite(), ~stored["last_scale"][:, 0].isfinite()
    names = {"hidden": "last_hidden_states", "probs": "target_probs", "topk": "topk_probs"}
    aux_NAD = by_layer(stored["aux_hidden_states"], shape.aux_layers)
    return ~finite_rows(aux_NAD), ~finite_rows(stored[names[shape.encoding]])


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
    width, device = batch.input_ids.shape[1], batch.aux_hidden_states.device
    token_N = torch.cat([row * width + torch.arange(n) for row, n in enumerate(lengths)]).to(device)
    slot_M = torch.cat([row * width + slot for row, slot in enumerate(slots)]).to(device)
    aux_ND = batch.aux_hidden_states.flatten(0, 1)[token_N]
    if shape.is_hidden:
        assert batch.last_hidden_states is not None, "see `check_target`"
        hidden_MD = batch.last_hidden_states.flatten(0, 1)[slot_M]
        if shape.encoding == "hidden":
            aux_ND, hidden_MD = aux_ND.to(shape.dtype), hidden_MD.to(shape.dtype)
            return {"aux_hidden_states": aux_ND, "last_hidden_states": hidden_MD}
        names = ("aux_hidden_states", "aux_scale", "last_hidden_states", "last_scale")
        coded = (*to_fp8(aux_ND, shape.aux_layers), *to_fp8(hidden_MD, 1))
        return dict(zip(names, coded, strict=True))
    if batch.target_probs is None:
        assert vocabulary is not None, "probabilities are over a draft vocabulary"
        batch = batch.with_probs(head, *vocabulary)
    assert batch.target_probs is not None
    assert batch.position_mask is not None
    supervision = encode_probs(
        batch.target_probs.flatten(0, 1)[slot_M],
        batch.position_mask.flatten(0, 1)[slot_M],
        shape.dtype,
        shape.top_k if shape.encoding == "topk" else None,
    )
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
def keep_top(probs_NW: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k largest probabilities [N, K], renormalized, and their draft ids."""
    top_NK, ids_NK = probs_NW.float().topk(top_k, dim=-1)
    total_N1 = top_NK.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return top_NK / total_N1, ids_NK


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
