"""The target inside vLLM: the draft learns from the very numbers that vLLM will serve.

vLLM's own `extract_hidden_states` keeps the states of some layers, and its connector writes those
of each request to a file. Nothing in vLLM is replaced, so this works with any version that has the
two. vLLM returns its layers' outputs; final norm, head and embedding come from the model's files
(`read_ends`). Every row or packed document is one request of a prompt and one token, so padding is
never computed.

Layers: vLLM's id i is the residual stream after i layers, so our layer i is its i + 1, and its id n
(of n layers) is the final norm's input. States come in ascending order, without duplicates.

    ours, of 8 layers      vLLM captures      places of [6, 0, 7] in a file
    [6, 0, 7]              1, 7, 8            1, 0, 2; the last hidden state is norm(place 2)

Every request has a unique cache salt: prefix caching, if enabled, finds no match, and so can
neither shorten a capture nor return states of other layers.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from itertools import count
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from fledge.core.head import TargetHead
from fledge.core.machine import find_device
from fledge.models.resolve import local_model
from fledge.target.hf.embedding_and_head import read_ends
from fledge.target.layers import FinalNorm, target_depth
from fledge.target.runner import EngineEagle3TargetModel
from fledge.target.vllm import engine as engines
from fledge.target.vllm.engine import StatesPlace, discard, take_states
from fledge.target.weights import quantisation_method

_WRITTEN_S = 60.0  # how long states may take to appear after their request has finished


class VLLMTargetRunner:
    """A `HiddenTargetRunner` over vLLM in this process, one engine at a time. It starts in
    `set_aux_layers`, with any number of layers."""

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        trust_remote_code: bool = False,
        shared_dir: str | PathLike[str] | None = None,
        device: torch.device | str | None = None,
        **engine_kwargs: Any,
    ) -> None:
        engines.require_vllm()
        engines.check_alone()
        fixed = {"skip_tokenizer_init": True, "pipeline_parallel_size": 1, "data_parallel_size": 1}
        arguments = engines.with_fixed(engine_kwargs, fixed)
        arguments.setdefault("enforce_eager", True)  # prompts of any length, each run once
        arguments.setdefault("enable_prefix_caching", False)
        arguments |= {"dtype": engines.vllm_dtype(dtype), "trust_remote_code": trust_remote_code}
        self._engine_args = arguments
        self.directory = local_model(str(model))
        # as stored; in vLLM's precision once the engine has started
        self._ends = read_ends(self.directory, trust_remote_code=trust_remote_code)
        self._device = find_device(device)
        self._place = StatesPlace(None if shared_dir is None else Path(shared_dir))
        self._engine: Any = None
        self._ids: list[int] = []  # vLLM's ids of the layers that the engine captures
        self._order: list[int] = []  # the index of each aux layer in `_ids`
        self._request_numbers = count()

    @classmethod
    def build(cls, model: str | PathLike[str], **options: Any) -> Self:
        """Prepare a target by any name that `fledge.local_model` accepts.

        `dtype` None keeps the checkpoint's own. Options other than the constructor's are passed to
        vLLM's `EngineArgs` under their own names (`max_model_len`, `gpu_memory_utilization`,
        `quantization`, ...). Rows may be as long as the model and the engine's memory allow, unless
        `max_model_len` is less.
        """
        return cls(model, **options)

    @property
    def model(self) -> Any:
        """A substitute for the module, which is inside vLLM: its config and embedding only."""
        return SimpleNamespace(
            config=self._ends.config, parameters=lambda: [self._ends.embedding_VD]
        )

    def set_aux_layers(self, aux_layer_ids: list[int]) -> None:
        depth = target_depth(self._ends.config)
        ids = sorted({layer_id + 1 for layer_id in aux_layer_ids} | {depth})
        self._order = [ids.index(layer_id + 1) for layer_id in aux_layer_ids]
        if ids == self._ids:
            return
        self._stop()
        capture = engines.capture_settings(ids, self._place.make())
        arguments = engines.with_fixed(self._engine_args, capture)
        self._engine, self._ids = engines.start(self.directory, **arguments), ids
        self._ends = self._ends.to(self._device, self._engine.model_config.dtype)

    def forward_eagle3(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states_BTD, aux_BTD = self.forward_eagle3_hidden(input_ids, attention_mask)
        return self._ends.head.logits(states_BTD), aux_BTD

    def forward_eagle3_hidden(
        self, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = engines.real_tokens(input_ids, attention_mask)
        engines.check_longest(rows, self._engine.model_config.max_model_len)
        batch: tuple[Tensor, Tensor] | None = None
        for row, states_NKD in self._capture(rows):
            length, _, width = states_NKD.shape
            states_NKD = states_NKD.to(self._device)
            if batch is None:
                hidden_BTD = states_NKD.new_zeros((*input_ids.shape, width))
                aux_BTD = states_NKD.new_zeros((*input_ids.shape, width * len(self._order)))
                batch = hidden_BTD, aux_BTD
            hidden_BTD[row, :length] = self._ends.head_input(states_NKD[:, -1])
            aux_BTD[row, :length] = states_NKD[:, self._order].flatten(1)
        if batch is None:
            raise ValueError("attention_mask marks no token at all")
        return batch

    def _capture(self, rows: Sequence[list[int]]) -> Iterator[tuple[int, Tensor]]:
        """The number and states [N, K, D] of every row that is not empty, in order of arrival."""
        waiting: dict[str, int] = {}  # request id -> row
        written: dict[str, Path] = {}  # request id -> file
        try:
            for row, prompt, params in engines.requests(rows):
                request_id = str(next(self._request_numbers))
                self._engine.add_request(request_id, prompt, params)
                waiting[request_id] = row
            deadline = time.monotonic() + _WRITTEN_S
            while waiting:
                for output in self._engine.step():
                    if output.finished and output.request_id in waiting:
                        path = Path(output.kv_transfer_params["hidden_states_path"])
                        written[output.request_id] = path
                arrived = []
                for request_id, path in list(written.items()):
                    states_NKD = take_states(path, rows[waiting[request_id]])
                    if states_NKD is not None:
                        del written[request_id]
                        arrived.append((waiting.pop(request_id), states_NKD))
                yield from arrived
                # a request's states are written in a step after the one that finished it
                if arrived or self._engine.has_unfinished_requests():
                    deadline = time.monotonic() + _WRITTEN_S
                elif time.monotonic() > deadline:
                    raise RuntimeError(f"vLLM wrote no states for {len(waiting)} rows")
        finally:
            if waiting:
                self._engine.abort_request(list(waiting))
                for path in written.values():
                    discard(path)

    def input_embedding_weight(self) -> Tensor:
        return self._ends.embedding_VD

    def target_head(self) -> TargetHead:
        return self._ends.head

    def final_norm(self) -> FinalNorm | None:
        return self._ends.final_norm

    def describe_weights(self) -> str:
        """The precision of the weights inside vLLM, and how they are quantized, if they are."""
        name = str(self._ends.embedding_VD.dtype).removeprefix("torch.")
        method = self._engine_args.get("quantization") or quantisation_method(self._ends.config)
        return f"{name} 100.0%" if method is None else f"{name} ({method})"

    def weights_fingerprint(self) -> str:
        """A fingerprint of the files and of how vLLM loads them."""
        from fledge.target.cache.job import files_fingerprint

        parts = ["vllm", files_fingerprint(self.directory), self.describe_weights()]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def close(self) -> None:
        self._stop()
        self._place.remove()

    def _stop(self) -> None:
        if self._engine is not None:
            self._engine, self._ids = None, []
            engines.stop()


class VLLMEagle3TargetModel(EngineEagle3TargetModel):
    """EAGLE-3 target backend on a vLLM engine. Beside the arguments common to all engines,
    `from_pretrained` takes those of vLLM's `EngineArgs`."""

    runner: VLLMTargetRunner
    runner_type = VLLMTargetRunner

    def _get_ready(self) -> None:
        self.overhead_tokens = 2**40  # padding is never run: as few calls as memory allows

    def _describe_weights(self) -> str:
        return self.runner.describe_weights()

    def _fingerprint_weights(self) -> str:
        return self.runner.weights_fingerprint()
