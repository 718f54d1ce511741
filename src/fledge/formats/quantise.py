"""Tensors as the blocks of a GGUF file, and back.

The gguf package writes q8_0 and the old 4- and 5-bit blocks; q4_k and q6_k, which it only reads,
are written here.
"""

from collections.abc import Mapping
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
    blocks_NX = write(values_RX.reshape(-1, SUPER))
    return Blocks(blocks_NX.reshape(len(values_RX), -1), to_type)


def decoded(draft: PlainDraft, types: Mapping[str, str]) -> PlainDraft:
    """The numbers that the file holds, in float32."""
    from gguf import quants

    tensors = dict(draft.to(torch.float32).tensors)
    for name, kind in types.items():
        blocks = encoded(tensors[name], kind)
        tensors[name] = torch.from_numpy(quants.dequantize(blocks.data, blocks.kind))
    return PlainDraft(draft.config, tensors)
