"""Which weights answered: a fingerprint of them and of the tokenizer, and their dtypes.

A draft fits one target. Caches, servers and checkpoints carry these strings so that supervision
from other weights, or from the same weights at another precision, is noticed.
"""

import hashlib
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fledge.core.errors import BadInput

_COLUMNS = 4096
_WHOLE = "run it whole on one device, or inside an engine (target.backend=sglang or vllm)"


def refuse_offloaded(model: nn.Module) -> None:
    """Weights that offloading keeps elsewhere (on the meta device) cannot be run or read here."""
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise BadInput(
            "its weights are not here (meta device): offloaded models are not supported yet",
            where=type(model).__name__,
            fix=_WHOLE,
        )


def refuse_sharded(module: nn.Module, what: str, *, where: str) -> None:
    """Weights of which each rank holds a part (FSDP2, tensor parallelism) cannot be read here."""
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise BadInput(
            f"{what} sharded over ranks, which hidden, probs and info() do not support yet",
            where=where,
            fix=f"use supervision 'logits', or {_WHOLE}",
        )


def weights_fingerprint(model: nn.Module) -> str:
    """16 hex digits over every parameter and buffer that is saved: name, dtype, shape, content.

    Contents enter as integer checksums computed where the weights lie (exact, so CPU and GPU agree;
    sensitive to order), and not byte by byte: an 8B target takes a fraction of a second. This
    guards against mix-ups, not against forgery.
    """
    digest = hashlib.sha256()
    sums: dict[tuple[Any, ...], list[int]] = {}
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type == "meta":
            raise ValueError(f"{name} has no data (meta device): load the weights first")
        for part in stored_tensors(tensor):
            place = (part.data_ptr(), part.dtype, part.shape)
            if place not in sums:  # a tied weight is read once
                sums[place] = _checksum(part)
            entry = [name, str(part.dtype), list(part.shape), sums[place]]
            digest.update(json.dumps(entry).encode())
    return digest.hexdigest()[:16]


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """What a tensor keeps in memory: itself, or the parts that a quantised subclass wraps."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in stored_tensors(getattr(tensor, name))]


def _checksum(tensor: Tensor) -> list[int]:
    """Sums of the raw bits by row and by column of a [R, 4096] view, weighted by their index."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    if raw.numel() % 4:
        raw = torch.cat([raw, raw.new_zeros(4 - raw.numel() % 4)])
    words = raw.view(torch.int32)
    body = words[: words.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    tail = words[body.numel() :].long()
    by_row, by_column = _sums(body, 1), _sums(body, 0)
    return [
        int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())
        for sums in (by_row, by_column, tail)
    ]


def _sums(words: Tensor, axis: int) -> Tensor:
    if words.device.type == "cpu":  # numpy adds integers eight times faster than torch does
        return torch.from_numpy(words.numpy().sum(axis, dtype=np.int64))
    return words.sum(axis, dtype=torch.long)


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


def dtype_shares(model: nn.Module) -> dict[str, float]:
    """Share of the weights' bytes by dtype, largest first; tied weights count once."""
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        for part in stored_tensors(parameter):
            name = str(part.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + part.nbytes
    total = sum(sizes.values())
    return {name: size / total for name, size in sorted(sizes.items(), key=lambda item: -item[1])}


def describe_weights(model: nn.Module, *, stored_as: str | None = None) -> str:
    """One line for logs and manifests: `bfloat16 100.0%`, or `uint8 80.1%, ... (bitsandbytes)`.
    `stored_as` is the checkpoint's quantisation; a model that runs without it was dequantised."""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in dtype_shares(model).items())
    method = quantisation_method(getattr(model, "config", None))
    if method is not None and not _dequantised(model):
        return f"{shares} ({method})"
    return shares if stored_as is None else f"{shares} (dequantised from {stored_as})"


def quantisation_method(config: Any) -> str | None:
    """The name of the quantisation a transformers config declares: `fp8`, `bitsandbytes`, ..."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return None
    method = (declared if isinstance(declared, dict) else declared.to_dict()).get("quant_method")
    return str(getattr(method, "value", method))


def _dequantised(model: nn.Module) -> bool:
    """Every matrix is plain floating point, even if the config says otherwise."""
    return set(dtype_shares(model)) <= {"float64", "float32", "bfloat16", "float16"}
