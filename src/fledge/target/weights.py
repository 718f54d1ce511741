"""Which weights answered: a fingerprint of them and of the tokenizer, and the dtypes they have.

A draft fits one target. Caches, servers and checkpoints carry these strings so that supervision
from other weights, or from the same weights at another precision, is noticed.
"""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

_COLUMNS = 4096


def weights_fingerprint(model: nn.Module) -> str:
    """16 hex digits over every parameter and buffer that is saved: name, dtype, shape, content.

    Contents enter as integer checksums computed where the weights lie (exact, so CPU and GPU agree;
    sensitive to order), and not byte by byte: an 8B target takes a fraction of a second. This
    guards against mix-ups, not against forgery.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type == "meta":
            raise ValueError(f"{name} has no data (meta device): load the weights first")
        entry = [name, str(tensor.dtype), list(tensor.shape), _checksum(tensor)]
        digest.update(json.dumps(entry).encode())
    return digest.hexdigest()[:16]


def _checksum(tensor: Tensor) -> list[int]:
    """Sums of the raw bits by row and by column of a [R, 4096] view, weighted by their index."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    if raw.numel() % 4:
        raw = torch.cat([raw, raw.new_zeros(4 - raw.numel() % 4)])
    words = raw.view(torch.int32)
    body = words[: words.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
    tail = words[body.numel() :].long()
    by_row, by_column = body.sum(1, dtype=torch.long), body.sum(0, dtype=torch.long)
    return [
        int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())
        for sums in (by_row, by_column, tail)
    ]


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
        name = str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.nbytes
    total = sum(sizes.values())
    return {name: size / total for name, size in sorted(sizes.items(), key=lambda item: -item[1])}


def describe_weights(model: nn.Module) -> str:
    """One line for logs and manifests, such as `bfloat16 100.0 %` or `uint8 81.2 %, ... (nf4)`."""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in dtype_shares(model).items())
    quantisation = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantisation is None:
        return shares
    if not isinstance(quantisation, dict):
        quantisation = quantisation.to_dict()
    method = quantisation.get("quant_method", "quantised")
    return f"{shares} ({getattr(method, 'value', method)})"
