"""Which weights answered: a fingerprint of them and of the tokenizer, and their dtypes.

A draft fits one target. Caches, servers and checkpoints carry these strings so that supervision
from other weights, or from the same weights at another precision, is noticed.
"""

import hashlib
import json
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fledge.core.errors import BadInput

_COLUMNS = 4096


def refuse_missing(model: nn.Module) -> None:
    """Weights on the meta device are nowhere, unless offloading keeps them somewhere else."""
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" and _keeper(model, name) is None:
            raise BadInput(
                f"its weights are not here: {name} is on the meta device",
                where=type(model).__name__,
                fix="load the weights first",
            )


def is_here(tensor: Tensor) -> bool:
    """Whether a tensor lies in this process, and all of it."""
    from torch.distributed.tensor import DTensor

    return not isinstance(tensor, DTensor) and tensor.device.type != "meta"


def whole_weight(model: nn.Module, name: str) -> Tensor:
    """One parameter or buffer as one process would have it.

    Gathered where ranks hold a part each (FSDP2, tensor parallelism): every rank must ask for it.
    Fetched where accelerate's offloading keeps it in host memory or on disk.
    """
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    tensor = getattr(module, attribute)
    assert isinstance(tensor, Tensor)
    return whole_tensor(tensor if tensor.device.type != "meta" else _fetched(model, name))


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or what the ranks that share it hold together."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    quiet = logging.getLogger("torch.distributed.tensor._redistribute")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # it would advise on how to gather faster
    try:
        return tensor.full_tensor()
    finally:
        quiet.setLevel(level)


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor lies in this process."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part.detach()


def is_offloaded(model: nn.Module) -> bool:
    """Whether accelerate brings weights in when they are needed."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def runs_on(model: nn.Module) -> torch.device:
    """Where its tokens must lie: beside its weights, or where offloading runs it."""
    for module in model.modules() if is_offloaded(model) else ():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _keeper(model: nn.Module, name: str) -> nn.Module | None:
    """The module whose accelerate hook brings this weight in, the owner or one above it."""
    if not is_offloaded(model):
        return None
    from accelerate.utils import has_offloaded_params

    path = name
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        if has_offloaded_params(module):
            return module
    return None


def _fetched(model: nn.Module, name: str) -> Tensor:
    keeper = _keeper(model, name)
    if keeper is None:
        raise ValueError(f"{name} has no data (meta device): load the weights first")
    from accelerate.utils import align_module_device

    path, _, attribute = name.rpartition(".")
    with align_module_device(keeper, torch.device("cpu")):
        tensor: Tensor = getattr(model.get_submodule(path), attribute).detach()
    return tensor


def weights_fingerprint(model: nn.Module) -> str:
    """16 hex digits over every parameter and buffer that is saved: name, dtype, shape, content.

    Contents enter as integer checksums computed where the weights lie (exact, so CPU and GPU agree;
    sensitive to order), and not byte by byte: an 8B target takes a fraction of a second. This
    guards against mix-ups, not against forgery. Sharded and offloaded weights are looked at whole,
    one tensor at a time: how a model is spread over memory does not change it.
    """
    digest = hashlib.sha256()
    sums: dict[tuple[Any, ...], list[int]] = {}
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        away = tensor.device.type == "meta"
        for part in stored_tensors(_fetched(model, name) if away else tensor):
            place = (name if away else local_part(part).data_ptr(), part.dtype, part.shape)
            if place not in sums:  # a tied weight is read once
                sums[place] = _checksum(whole_tensor(part))
            entry = [name, str(part.dtype), list(part.shape), sums[place]]
            digest.update(json.dumps(entry).encode())
    return digest.hexdigest()[:16]


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """What a tensor keeps in memory: itself, or the parts that a quantised subclass wraps. One that
    ranks share is left as it is."""
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
