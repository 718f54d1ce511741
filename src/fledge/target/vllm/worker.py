"""Code that runs inside vLLM's workers, to return states from memory rather than through files.

vLLM loads this module by name (`kv_connector_module_path`, `worker_extension_cls`); nothing else
imports it. Its hidden-state extraction passes a finished request's pages to a connector:

- `InMemoryStates`, that connector, gathers them into one tensor [N, A + 1, D] (A aux layers and the
  head's input) on their device. vLLM's own example writes files, and needs CUDA for that.
- `StatesExtension` is mixed into the worker and serves our calls. It appends one more state to
  those that the model returns: the output head's input, captured where the head would run. So final
  norms and scalings in front of a head need not be reimplemented for any architecture.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from fledge.core.head import TargetHead
from fledge.target.hf.embedding_and_head import find_head_module, learn_head
from fledge.target.layers import FinalNorm, describe_final_norm
from fledge.target.vllm.cpu_connector import gather
from fledge.target.weights import describe_weights, weights_fingerprint


class InMemoryStates(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Keeps the states of finished requests in memory, by request id."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gathered: dict[str, Tensor] = {}

    def wait_for_save(self) -> None:
        """Does nothing: no file is written."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        cache = self._kv_cache
        assert cache is not None
        self.gathered[pending.req_id] = gather(cache, pending)
        # replaces the event of an asynchronous copy: the gather is ordered by its stream
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)

    def shutdown(self) -> None:
        self.gathered.clear()
        super().shutdown()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        if current_platform.is_cpu():  # has one layout and rejects any request to change it
            return None
        return cast(str | None, super().get_required_kvcache_layout(vllm_config))


class StatesExtension:
    """Methods of the worker, called by name through `collective_rpc`, on every rank at once. Ranks
    above 0 take part in collectives, and return None where a result is for the caller only."""

    model_runner: Any  # set by the worker

    def fledge_capture(self, layer_ids: Sequence[int]) -> None:
        """From now on, capture these layers (vLLM's ids) and, after them, the head's input."""
        model = self.fledge_model()
        model.set_aux_hidden_state_layers(tuple(layer_ids))  # type: ignore[operator]
        if "forward" not in model.__dict__:
            model.forward = _with_head_input(model)

    def fledge_take(self) -> dict[str, Tensor]:
        """States [N, A + 1, D] of the requests that have finished since the last call, by id."""
        connector = get_kv_transfer_group()
        gathered: dict[str, Tensor] = connector.gathered
        connector.gathered = {}
        return {request_id: _to_caller(states_NKD) for request_id, states_NKD in gathered.items()}

    def fledge_model(self) -> nn.Module:
        """The model itself; only for a worker in the caller's process."""
        return cast(nn.Module, self.model_runner.get_model())

    def fledge_fingerprint(self) -> str:
        """The fingerprint of the weights on this rank."""
        return weights_fingerprint(self.fledge_model())

    def fledge_dtypes(self) -> str:
        return describe_weights(self.fledge_model())

    def fledge_embedding(self) -> Tensor | None:
        """The input embedding [V, D]."""
        embedding = next(
            module
            for module in text_model(self.fledge_model()).modules()
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        )
        weight_VD = _gathered(embedding.weight.detach(), 0)[: embedding.org_vocab_size]
        return _to_caller(weight_VD) if _is_rank_zero() else None

    def fledge_head(self) -> TargetHead | None:
        head = learn_engine_head(self.fledge_model())
        if not _is_rank_zero():
            return None
        bias_V = None if head.bias_V is None else _to_caller(head.bias_V)
        return replace(head, weight_VD=_to_caller(head.weight_VD), bias_V=bias_V)

    def fledge_logits(self, input_ND: Tensor) -> Tensor | None:
        """Logits [N, V] of the head's inputs, including all that vLLM does after the head."""
        model: Any = self.fledge_model()
        head = EngineHead(text_model(model))
        input_ND = input_ND.to(head.weight.device)
        product_NV = head(input_ND)
        with _replaced_head(model, lambda _: product_NV):
            logits_NV = model.compute_logits(input_ND)
        return _to_caller(logits_NV) if _is_rank_zero() else None

    def fledge_final_norm(self) -> FinalNorm | None:
        norm = describe_final_norm(self.fledge_model())
        if norm is None or norm.weight_D is None:
            return norm
        return replace(norm, weight_D=_to_caller(norm.weight_D))


def _is_rank_zero() -> bool:
    return bool(get_tensor_model_parallel_rank() == 0)


def _gathered(shard: Tensor, axis: int) -> Tensor:
    """A tensor that is split over the ranks, gathered on each of them."""
    return cast(Tensor, tensor_model_parallel_all_gather(shard, axis))


def _to_caller(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy on the CPU if the caller is another process."""
    return tensor.cpu() if get_tensor_model_parallel_world_size() > 1 else tensor


def _with_head_input(model: nn.Module) -> Callable[..., Any]:
    """The model's forward with one more aux state, the head's input. vLLM keeps inspected functions
    forever, so this one holds only a weak reference to the model."""
    model_ref = weakref.ref(model)

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
        model = model_ref()
        assert model is not None
        hidden_ND, aux = type(model).forward(model, *args, **kwargs)
        return hidden_ND, [*aux, head_input(model, hidden_ND)]

    return run


def head_input(model: nn.Module, hidden_ND: Tensor) -> Tensor:
    """The output head's input for these outputs of the model: for most models the outputs
    themselves."""
    head_inputs: list[Tensor] = []

    def keep(input_ND: Tensor) -> Tensor:
        head_inputs.append(input_ND)
        return input_ND.new_zeros((len(input_ND), 1))

    with _replaced_head(model, keep):
        model.compute_logits(hidden_ND)  # type: ignore[operator]
    return head_inputs[0]


def learn_engine_head(model: nn.Module) -> TargetHead:
    """The head as a `TargetHead`, learned from vLLM's own `compute_logits`."""
    head = EngineHead(text_model(model))
    few_ND = torch.randn(1, head.weight.shape[1], generator=torch.Generator().manual_seed(0))
    few_ND = few_ND.to(head.weight)

    def logits() -> Tensor:
        # cloned: vLLM scales the head's output in place
        with _replaced_head(model, lambda input_ND: head(input_ND).clone()):
            logits_NV: Tensor = model.compute_logits(few_ND)  # type: ignore[operator]
        return logits_NV[None]

    return learn_head(logits, head, model=model, where=type(model).__name__)[0]


class EngineHead(nn.Module):
    """vLLM's output head, which has no forward and whose rows are split and padded, as a plain
    module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        head: Any = find_head_module(model)
        rows, bias = head.org_vocab_size, getattr(head, "bias", None)
        self.weight = _gathered(head.weight.detach(), 0)[:rows]
        self.bias = None if bias is None else _gathered(bias.detach(), 0)[:rows]
        self._product = partial(head.quant_method.apply, head, bias=bias)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        return _gathered(self._product(hidden_ND), -1)[..., : len(self.weight)]


@contextmanager
def _replaced_head(model: nn.Module, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While open, replace the head's computation with `answer`, which gets the head's input."""
    head: Any = find_head_module(text_model(model))
    method, tp_size = head.quant_method, head.tp_size
    # vLLM calls `apply` to compute logits; tp_size 1, as the answer needs no gathering
    replacement = SimpleNamespace(apply=lambda _layer, hidden_ND, bias=None: answer(hidden_ND))
    head.quant_method, head.tp_size = replacement, 1
    try:
        yield
    finally:
        head.quant_method, head.tp_size = method, tp_size


def text_model(model: nn.Module) -> nn.Module:
    """The language model inside a multimodal one; a text model is returned as it is."""
    get_model: Any = getattr(model, "get_language_model", None)
    return cast(nn.Module, get_model()) if callable(get_model) else model
