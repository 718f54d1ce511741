"""Packed documents in one forward pass, where an architecture allows it (docs/target.md).

Everything but attention works token by token, so the flattened batch can be one row [1, B * T].
Attention is replaced by the rollout's own kernel, which keeps the documents apart without a mask.
Every pack then has the same shape, so layers compile once and passes can be recorded.

Only for architectures of transformers that are known to attend causally, with or without a window
(`attends_plainly`); documents of any other are run as separate rows (`packing`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fledge.rollout.attention import attend_documents, kernel_runs
from fledge.rollout.plan import to_device
from fledge.target.packing import Documents, Group
from fledge.target.weights import local_part

NAME, CAUSAL = "fledge_documents", "fledge_causal"
# Values of `model_type` whose layers are causal attention, with or without a window, and nothing
# else that mixes tokens: no sinks, soft caps, states or convolutions.
_PLAIN = {"cohere", "cohere2", "gemma", "gemma3_text", "glm", "glm4", "gpt2", "granite"}
_PLAIN |= {"granitemoe", "llama", "mistral", "ministral", "mixtral", "olmo", "olmo2", "olmo3"}
_PLAIN |= {"olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"}
_PLAIN |= {"starcoder2"}
FIRST, SLOT = "fledge_first", "fledge_slot"  # keyword arguments that models pass on to attention


@dataclass(frozen=True, eq=False)
class WholeRow(Group):
    """The flattened batch as one row [1, S]; padding slots are documents of one token."""

    position_ids_1N: Tensor
    first_N: Tensor  # slot where each slot's document begins
    real_N: Tensor  # bool: not padding

    def put(self, states_NLD: Tensor, into_BTD: Tensor) -> None:
        into_SD = into_BTD.flatten(0, 1)
        into_SD.copy_(states_NLD[0]).masked_fill_(~self.real_N[:, None], 0)

    def options(self) -> dict[str, Tensor]:
        """Arguments of the model's forward besides the tokens."""
        return {"position_ids": self.position_ids_1N, FIRST: self.first_N, SLOT: self.slots}

    def with_options(self, options: dict[str, Tensor]) -> "WholeRow":
        """The same row with its tensors replaced by these."""
        first_N, slots = options[FIRST], options[SLOT]
        return replace(self, position_ids_1N=options["position_ids"], first_N=first_N, slots=slots)


def whole_row(documents: Documents, slots: int, *, device: torch.device) -> WholeRow:
    """The documents at their original places among `slots` slots."""
    slot = np.arange(slots)
    first, real = slot.copy(), np.zeros(slots, dtype=np.int64)
    for start, length in zip(documents.starts, documents.lengths, strict=True):
        first[start : start + length] = start
        real[start : start + length] = 1
    on_device = to_device([slot, first, slot - first, real], device)
    slot_N, first_N, position_N, real_N = on_device
    return WholeRow(
        slots_NL=slot_N[None],
        attention_mask_NL=real_N[None],
        cells=slot_N,
        slots=slot_N,
        position_ids_1N=position_N[None],
        first_N=first_N,
        real_N=real_N.bool(),
    )


def attend(
    module: nn.Module,
    query_1HNC: Tensor,
    key_1GNC: Tensor,
    value_1GNC: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: each document attends to itself, causally."""
    first_N, slot_N = options[FIRST], options[SLOT]
    query_NHC, key_NGC, value_NGC = (
        states[0].transpose(0, 1) for states in (query_1HNC, key_1GNC, value_1GNC)
    )
    if sliding_window is not None:
        first_N = torch.maximum(first_N, slot_N - (sliding_window - 1))
    channels = query_NHC.shape[-1]
    if scaling is not None and scaling != channels**-0.5:
        query_NHC = query_NHC * (scaling * channels**0.5)
    return attend_documents(query_NHC, key_NGC, value_NGC, first_N, slot_N)[None], None


def attends_plainly(model: nn.Module) -> bool:
    """Whether the model is one of transformers' own whose attention can be replaced."""
    from torch.distributed.fsdp import FSDPModule

    original = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return original.__module__.startswith("transformers.models.") and kind in _PLAIN


def kernel_takes(model: nn.Module) -> bool:
    """Whether the rollout's attention kernel supports this model's heads on its device."""
    weight = local_part(next(model.parameters()))
    dims: set[Any] = {getattr(module, "head_dim", None) for module in model.modules()} - {None}
    return len(dims) == 1 and kernel_runs(weight.new_empty((0, 1, dims.pop())))


def needs_no_mask(model: nn.Module) -> bool:
    """Whether rows of whole documents need only SDPA's own causal rule, and no further mask."""
    return attends_plainly(model) and all(
        config._attn_implementation == "sdpa"
        and getattr(config, "sliding_window", None) is None
        and "sliding_attention" not in (getattr(config, "layer_types", None) or ())
        for config in _attention_configs(model)
    )


@contextmanager
def documents_apart(model: nn.Module) -> Iterator[None]:
    """While open, the model's attention keeps the documents of a `WholeRow` apart."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    with lent_attention(model, NAME):
        yield


@contextmanager
def causal_rows(model: nn.Module) -> Iterator[None]:
    """While open, no mask is built: to find out that none is needed, transformers would read the
    positions and so synchronize with the GPU. Only where `needs_no_mask`."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    with lent_attention(model, CAUSAL):
        yield


@contextmanager
def lent_attention(model: nn.Module, name: str) -> Iterator[None]:
    """While open, the model uses this attention implementation of transformers' registry.
    transformers builds masks only for its own implementations: for ours it builds none."""
    configs = [(config, config._attn_implementation) for config in _attention_configs(model)]
    try:
        for config, _ in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in configs:
            config._attn_implementation = implementation


def _attention_configs(model: nn.Module) -> list[Any]:
    """Every config object that the model's modules read their attention implementation from."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]
