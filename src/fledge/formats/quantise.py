"""Tensors as the blocks of a GGUF file, and back.

The gguf package writes q8_0 and the old 4- and 5-bit blocks; q4_k and q6_k, which it only reads,
are written here.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.formats.codec import PlainDraft

Floats = NDArray[np.float32]
SUPER = 256  # values of a k-quant's block
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "Q4_K": 15, "BF16": 32}  # general.file_type


class Blocks(NamedTuple):
    data: NDArray[Any]
    kind: Any  # of gguf.GGMLQuantizationType


def file_type(types: Mapping[str, str], dtype: torch.dtype) -> int:
    """What llama.cpp prints about the file: the type of most tensors."""
    if types:
        return _FILE_TYPES["Q8_0" if set(types.values()) == {"Q8_0"} else "Q4_K"]
    return _FILE_TYPES[_PLAIN[dtype]]


_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def encoded(tensor: Tensor, kind: str = "") -> Blocks:
    """The tensor's bytes as this type; "": as it is, but vectors, which are norms, in float32."""
    from gguf import GGMLQuantizationType, quants

    if not kind:
        vector = tensor.ndim == 1 and tensor.is_floating_point()
        tensor = (tensor.float() if vector else tensor).contiguous()
        plain = GGMLQuantizationType[_PLAIN[tensor.dtype]]
        if tensor.dtype == torch.bfloat16:  # numpy has none
            return Blocks(tensor.view(torch.uint8).numpy(), plain)
        return Blocks(tensor.numpy(), plain)
    values_RX = tensor.float().contiguous().numpy()
    write = {"Q4_K": _q4_k, "Q6_K": _q6_k}.get(kind)
    to_type = GGMLQuantizationType[kind]
    if write is None:
        return Blocks(quants.quantize(values_RX, to_type), to_type)
    values_NX = values_RX.reshape(-1, SUPER)
    parts = np.array_split(values_NX, 1 + len(values_NX) // 2**14)  # bounds the memory it takes
    blocks_NX = np.concatenate([write(part) for part in parts])
    return Blocks(blocks_NX.reshape(len(values_RX), -1), to_type)


def decoded(draft: PlainDraft, types: Mapping[str, str]) -> PlainDraft:
    """The numbers that the file holds, in float32."""
    from gguf import quants

    tensors = dict(draft.to(torch.float32).tensors)
    for name, kind in types.items():
        blocks = encoded(tensors[name], kind)
        tensors[name] = torch.from_numpy(quants.dequantize(blocks.data, blocks.kind))
    return PlainDraft(draft.config, tensors)


# --- which type each tensor gets ------------------------------------------------------------------

KINDS = ("q8_0", "q4_k_m")
AUTO = "auto"  # the smallest file that loses at most `MAY_LOSE` of the acceptance length
MAY_LOSE = 0.01
_BITS = {"F32": 32.0, "F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.5625, "Q5_0": 5.5, "Q4_K": 4.5}
# q4_k_m spends more on what all others read: values, the MLP's output, the head
_FINER = ("v_proj.weight", "down_proj.weight", "lm_head.weight")


def types_of(draft: PlainDraft, kind: str, ignored: Collection[str]) -> dict[str, str]:
    """The type of each tensor of a file of this kind; tensors that are not named keep float32.

    As in llama.cpp, rows that k-quants' blocks do not divide get the next larger type.
    """
    types = {}
    for name, tensor in draft.tensors.items():
        rows, width = tensor.shape if tensor.ndim == 2 else (0, 0)
        if rows < 2 or width % 32 or name in ignored:
            continue
        if kind == "q8_0":
            types[name] = "Q8_0"
        elif name.endswith(_FINER):
            types[name] = "Q8_0" if width % SUPER else "Q6_K"
        else:
            types[name] = "Q5_0" if width % SUPER else "Q4_K"
    return types


def file_bytes(draft: PlainDraft, types: Mapping[str, str], ignored: Collection[str] = ()) -> int:
    """What the tensors of such a file take."""
    sizes = {name: t.numel() for name, t in draft.tensors.items() if name not in ignored}
    return int(sum(n * _BITS[types.get(name, "F32")] for name, n in sizes.items()) / 8)


@dataclass(frozen=True)
class Choice:
    """The types of a file, and what they cost: acceptance lengths by replay."""

    types: dict[str, str]
    length: float | None = None  # None: not measured
    full_length: float | None = None  # with nothing quantised
    each: dict[str, float] = field(default_factory=dict)  # with this tensor alone quantised


# The lengths of the draft with each of some sets of types.
Measure = Callable[[Sequence[Mapping[str, str]]], list[float]]


def choose_types(
    draft: PlainDraft, kind: str, ignored: Collection[str], measure: Measure | None
) -> Choice:
    """The types of a kind; for `auto`, q4_k_m with as few tensors in q8_0 as are needed."""
    small = types_of(draft, "q4_k_m" if kind == AUTO else kind, ignored)
    if measure is None:
        return Choice(small)
    alone = [{name: type_} for name, type_ in small.items()]
    full, length, *lengths = measure([{}, small, *alone])
    each = dict(zip(small, lengths, strict=True))
    if kind != AUTO:
        return Choice(small, length, full, each)
    large, harmful = types_of(draft, "q8_0", ignored), sorted(each, key=lambda name: each[name])
    # the most harmful first; the last candidate is q8_0 throughout
    candidates = [
        small | {name: large[name] for name in harmful[:count]} for count in range(len(small) + 1)
    ]
    measured = [length, *measure(candidates[1:])]
    pairs = list(zip(candidates, measured, strict=True))
    fits = [pair for pair in pairs if pair[1] >= (1 - MAY_LOSE) * full]
    types, length = min(fits, key=lambda pair: file_bytes(draft, pair[0])) if fits else pairs[-1]
    return Choice(types, length, full, each)


# --- k-quants -------------------------------------------------------------------------------------


def _q4_k(values_NX: Floats) -> NDArray[np.uint8]:
    """[N, 144] from [N, 256]: 8 runs of 32, each value = d s q - m t with q of 4 bits, and s and t
    of 6 bits for each run."""
    runs_NRC = values_NX.reshape(-1, 8, 32)
    step_NR, low_NR = _fit_affine(runs_NRC)
    d_N1, sc_NR = _shared(step_NR, 63)
    dmin_N1, m_NR = _shared(low_NR, 63)
    step_NR, low_NR = d_N1 * sc_NR, dmin_N1 * m_NR
    q_NRC = _divided(runs_NRC + low_NR[..., None], step_NR[..., None]).clip(0, 15).astype(np.uint8)
    low_q, high_q = sc_NR[:, :4], sc_NR[:, 4:]
    low_m, high_m = m_NR[:, :4], m_NR[:, 4:]
    scales_NB = np.concatenate(
        [low_q | (high_q >> 4) << 6, low_m | (high_m >> 4) << 6, high_q & 15 | (high_m & 15) << 4],
        axis=1,
    )
    pairs_N42C = q_NRC.reshape(-1, 4, 2, 32)
    nibbles_NB = (pairs_N42C[:, :, 0] | pairs_N42C[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([_half(d_N1), _half(dmin_N1), scales_NB, nibbles_NB], axis=1)


def _q6_k(values_NX: Floats) -> NDArray[np.uint8]:
    """[N, 210] from [N, 256]: 16 runs of 16, each value = d s q with q in -32 .. 31 and s of a
    signed byte for each run."""
    runs_NRC = values_NX.reshape(-1, 16, 16)
    step_NR = _fit_scale(runs_NRC, 32)
    most_N1 = np.abs(step_NR).max(1, keepdims=True)
    d_N1 = (most_N1 / 127).astype(np.float16).astype(np.float32)
    sc_NR = _divided(step_NR, d_N1).clip(-128, 127)
    q_NRC = _divided(runs_NRC, (d_N1 * sc_NR)[..., None]).clip(-32, 31)
    u_N8C = (q_NRC + 32).astype(np.uint8).reshape(-1, 8, 32)
    low_N22C, high_N24C = (u_N8C & 15).reshape(-1, 2, 2, 64), (u_N8C >> 4).reshape(-1, 2, 4, 32)
    low = (low_N22C[:, :, 0] | low_N22C[:, :, 1] << 4).reshape(-1, 128)
    high = np.bitwise_or.reduce([high_N24C[:, :, j] << 2 * j for j in range(4)]).reshape(-1, 64)
    return np.concatenate([low, high, sc_NR.astype(np.int8).view(np.uint8), _half(d_N1)], axis=1)


def _fit_affine(runs_NRC: Floats) -> tuple[Floats, Floats]:
    """Step and offset of each run, both positive, with the least squared error: of some steps near
    the range's, each refitted to the codes that it gives."""
    low, high = np.minimum(runs_NRC.min(2), 0), runs_NRC.max(2)
    best = np.full(low.shape, np.inf, np.float32)
    step_best, low_best = np.zeros_like(low), np.zeros_like(low)
    for shrink in np.linspace(0.85, 1.05, 9, dtype=np.float32):
        step = (high - low) / 15 * shrink
        q_NRC = _divided(runs_NRC - low[..., None], step[..., None]).clip(0, 15)
        mean_q, mean_x = q_NRC.mean(2), runs_NRC.mean(2)
        spread = (q_NRC * q_NRC).mean(2) - mean_q * mean_q
        slope = _ratio((q_NRC * runs_NRC).mean(2) - mean_q * mean_x, spread)
        offset = np.minimum(mean_x - slope * mean_q, 0)
        slope = np.where(offset < 0, slope, _ratio((q_NRC * runs_NRC).sum(2), (q_NRC**2).sum(2)))
        error = ((slope[..., None] * q_NRC + offset[..., None] - runs_NRC) ** 2).sum(2)
        better = error < best
        best = np.where(better, error, best)
        step_best, low_best = np.where(better, slope, step_best), np.where(better, offset, low_best)
    return np.maximum(step_best, 0), -low_best


def _fit_scale(runs_NRC: Floats, most: int) -> Floats:
    """The step of each run, of either sign, with the least squared error."""
    at = np.abs(runs_NRC).argmax(2)[..., None]
    extreme = np.take_along_axis(runs_NRC, at, 2)[..., 0]
    best, step_best = np.full(extreme.shape, np.inf, np.float32), np.zeros_like(extreme)
    for range_ in np.linspace(most - 2.5, most + 1.5, 9, dtype=np.float32):
        q_NRC = _divided(runs_NRC, -extreme[..., None] / range_).clip(-most, most - 1)
        step = _ratio((q_NRC * runs_NRC).sum(2), (q_NRC * q_NRC).sum(2))
        error = ((step[..., None] * q_NRC - runs_NRC) ** 2).sum(2)
        better = error < best
        best, step_best = np.where(better, error, best), np.where(better, step, step_best)
    return step_best


def _shared(step_NR: Floats, most: int) -> tuple[Floats, NDArray[np.uint8]]:
    """One positive factor for all runs of a block, in half precision, and a multiple for each."""
    d_N1 = (step_NR.max(1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    return d_N1, _divided(step_NR, d_N1).clip(0, most).astype(np.uint8)


def _divided(a: Floats, b: Floats) -> Floats:
    """a / b to the nearest whole number; 0 where b is 0."""
    return np.rint(_ratio(a, b))


def _ratio(a: Floats, b: Floats) -> Floats:
    return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape, np.float32), where=b != 0)


def _half(values_N1: Floats) -> NDArray[np.uint8]:
    return values_N1.astype(np.float16).view(np.uint8)
