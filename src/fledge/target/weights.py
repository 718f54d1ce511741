"""Identify a target's weights: fingerprints of them and of the tokenizer, and their dtypes.

A draft fits one target. Caches, servers and checkpoints carry these strings so that supervision
from other weights, or from the same weights at another precision, is detected.
"""

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_COLUMNS = 4096


def is_here(tensor: Tensor) -> bool:
    """Whether this process holds all of a tensor."""
    from torch.distributed.tensor import DTensor

    return not isinstance(tensor, DTensor)


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or, if it is sharded, the full tensor gathered from all ranks."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor.detach()
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)  # silence its advice on how to gather faster
    try:
        return tensor.full_tensor().detach()
    finally:
        logger.setLevel(level)


def take_apart(model: nn.Module) -> None:
    """Reshard the modules of an FSDP2 model, which may stay unsharded after a pass, in memory that
    FSDP2 reuses later: call this before reading weights that will be kept. Not a collective."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local().detach()


def weights_fingerprint(model: nn.Module) -> str:
    """16 hex digits over every parameter and buffer that is saved: name, dtype, shape, content.

    Contents enter as integer checksums computed on the weights' device (exact, so CPU and GPU
    agree; sensitive to order) rather than byte by byte: an 8B target takes a fraction of a second.
    This guards against mix-ups, not against forgery. Sharded weights are read whole, one tensor at
    a time, so the fingerprint does not depend on how a model is placed in memory.
    """
    digest = hashlib.sha256()
    sums: dict[tuple[Any, ...], list[int]] = {}
    for name, tensor in sorted(model.state_dict().items()):
        for part in stored_tensors(tensor) if isinstance(tensor, Tensor) else ():
            key = (local_part(part).data_ptr(), part.dtype, part.shape)
            if key not in sums:  # a tied weight is read once
                sums[key] = _checksum(whole_tensor(part))
            entry = [name, str(part.dtype), list(part.shape), sums[key]]
            digest.update(json.dumps(entry).encode())
    return digest.hexdigest()[:16]


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor stores: itself, or the parts that a quantized subclass wraps. A
    sharded tensor is returned as it is."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in stored_tensors(getattr(tensor, name))]


def _checksum(tensor: Tensor) -> list[int]:
    """Sums of the raw bits by row and by column of a [R, 4096] view, weighted by their index."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    if raw.numel() % 4:
        raw = torch.cat([raw, raw.new_zeros(4 - raw.numel() % 4)])
    values = raw.view(torch.int32)
    body = values[: values.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    tail = values[body.numel() :].long()
    by_row, by_column = _sums(body, 1), _sums(body, 0)
    return [
        int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())
        for sums in (by_row, by_column, tail)
    ]


def _sums(values: Tensor, axis: int) -> Tensor:
    if values.device.type == "cpu":  # numpy adds integers eight times faster than torch does
        return torch.from_numpy(values.numpy().sum(axis, dtype=np.int64))
    return values.sum(axis, dtype=torch.long)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits over a transformers tokenizer: vocabulary, special tokens, chat template."""
    parts = [
        sorted(tokenizer.get_vocab().items()),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        tokenizer.chat_template,
    ]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    if tokenizer.is_fast:
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()[:16]


def describe_weights(model: nn.Module) -> str:
    """Share of the weights' bytes by dtype, largest first, for logs and manifests: `bfloat16
    100.0%`. Tied weights count once."""
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        for part in stored_tensors(parameter):
            name = str(part.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + part.nbytes
    total, by_size = sum(sizes.values()), sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / total:.1%}" for name, size in by_size)


def quantisation_method(config: "PretrainedConfig") -> str | None:
    """The name of the quantization a transformers config declares: `fp8`, `bitsandbytes`, ..."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return None
    method = (declared if isinstance(declared, dict) else declared.to_dict()).get("quant_method")
    return str(getattr(method, "value", method))
