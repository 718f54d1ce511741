"""The target inside vLLM through vLLM's public interfaces: its `extract_hidden_states` method keeps
the states of some layers, and a connector writes those of each request to a file.

Nothing in vLLM is replaced, and no private function is called, so this works with any version that
has the two. vLLM returns its layers' outputs; final norm, head and embedding come from the model's
files (`read_ends`), and the first answer is compared with the token that vLLM itself generates.

Layers: vLLM's id i is the residual stream after i layers, so our layer i is its i + 1, and its id n
(of n layers) is the final norm's input. States come in ascending order, without duplicates.

    ours, of 8 layers      vLLM captures      places of [6, 0, 7] in a file
    [6, 0, 7]              1, 7, 8            1, 0, 2; the last hidden state is norm(place 2)

Every row or packed document is one request with a unique cache salt: prefix caching, if enabled,
finds no match, and so can neither shorten a capture nor return states of other layers.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fledge.core.errors import BadInput, in_words
from fledge.core.head import TargetHead
from fledge.core.machine import find_device
from fledge.models.resolve import local_model
from fledge.target.hf.embedding_and_head import read_ends
from fledge.target.layers import FinalNorm, target_depth
from fledge.target.vllm import engine as engines
from fledge.target.vllm.engine import Captured
from fledge.target.weights import quantisation_method

_CPU_CONNECTOR = "fledge.target.vllm.cpu_connector"
_PROBE_LENGTHS = (8, 3)  # tokens of the rows for the first comparison
_TOLERANCE = 0.05  # share of the distance from the mean logit to the largest, for rounding only


def layer_settings(vllm_ids: Sequence[int]) -> dict[str, Any]:
    """The `speculative_config` that makes vLLM keep the states of these layers (vLLM's ids)."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(vllm_ids)}},
    }


def connector_settings(directory: Path, *, on_cpu: bool = False) -> dict[str, Any]:
    """The `kv_transfer_config` that makes vLLM write states to files in this directory."""
    vllm_connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    cpu_connector = {"kv_connector": "CpuHiddenStates", "kv_connector_module_path": _CPU_CONNECTOR}
    return {
        **(cpu_connector if on_cpu else vllm_connector),
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


def serve_flags(vllm_ids: Sequence[int], directory: Path) -> str:
    """Flags of `vllm serve` for a server that captures these layers."""
    return (
        f"--speculative-config '{json.dumps(layer_settings(vllm_ids))}' "
        f"--kv-transfer-config '{json.dumps(connector_settings(directory))}'"
    )


class ConnectorRunner(ABC):
    """A `HiddenTargetRunner` on states that vLLM writes; a subclass sends the requests and locates
    the files.

    Layers are fixed when vLLM starts: `set_aux_layers` starts it, unless it is running already.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        trust_remote_code: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.directory = local_model(str(model))
        # as stored; in vLLM's precision after the first answer
        self._ends = read_ends(self.directory, trust_remote_code=trust_remote_code)
        self._device = find_device(device)
        self._ids: list[int] = []  # of the captured layers, as vLLM numbers them
        self._order: list[int] = []  # the index of each aux layer in `_ids`
        self._requested_dtype = engines.vllm_dtype(dtype)
        self._dtype: torch.dtype | None = None  # known after the first answer

    @property
    def model(self) -> Any:
        """A substitute for the module, which is inside vLLM: its config and embedding only."""
        return SimpleNamespace(
            config=self._ends.config, parameters=lambda: [self._ends.embedding_VD]
        )

    @abstractmethod
    def _ensure_running(self, vllm_ids: list[int]) -> None:
        """Make sure that vLLM runs and captures these layers."""

    @abstractmethod
    def _capture(self, rows: Sequence[list[int]]) -> Iterator[Captured]:
        """The states of every row that is not empty, in the order of arrival."""

    @abstractmethod
    def _longest(self) -> int:
        """Maximum number of tokens of a request, including generated ones."""

    @abstractmethod
    def close(self) -> None: ...

    def set_aux_layers(self, aux_layer_ids: list[int]) -> None:
        depth = target_depth(self._ends.config)
        self._ids = sorted({layer_id + 1 for layer_id in aux_layer_ids} | {depth})
        self._order = [self._ids.index(layer_id + 1) for layer_id in aux_layer_ids]
        self._ensure_running(self._ids)
        self._compare_with_vllm()

    def forward_eagle3(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states_BTD, aux_BTD = self.forward_eagle3_hidden(input_ids, attention_mask)
        return self._ends.head.logits(states_BTD), aux_BTD

    def forward_eagle3_hidden(
        self, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = engines.real_tokens(input_ids, attention_mask)
        engines.check_longest(rows, self._longest())
        captured = (
            replace(one, states_NKD=self._check_states(one.states_NKD).to(self._device))
            for one in self._capture(rows)
        )
        return engines.assemble(captured, input_ids, self._order, self._ends.head_input)

    def input_embedding_weight(self) -> Tensor:
        return self._ends.embedding_VD

    def target_head(self) -> TargetHead:
        return self._ends.head

    def final_norm(self) -> FinalNorm | None:
        return self._ends.final_norm

    def describe_weights(self) -> str:
        """The precision of the weights inside vLLM, and how they are quantized, if they are."""
        name = str(self._dtype).removeprefix("torch.")
        method = self._quantization()
        return f"{name} 100.0%" if method is None else f"{name} ({method})"

    def weights_fingerprint(self) -> str:
        """A fingerprint of the files and of how vLLM loads them."""
        from fledge.target.cache.job import files_fingerprint

        parts = ["vllm", files_fingerprint(self.directory), self.describe_weights()]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def _quantization(self) -> str | None:
        return quantisation_method(self._ends.config)

    def _compare_with_vllm(self) -> None:
        """Ask about a few tokens, and check that our logits from the last state agree with the
        token that vLLM generates next."""
        vocab_size = len(self._ends.embedding_VD)
        rows = [[(7 * i + 3) % vocab_size for i in range(length)] for length in _PROBE_LENGTHS]
        for captured in self._capture(rows):
            states_NKD = captured.states_NKD
            if self._dtype is None:
                self._adopt_dtype(states_NKD.dtype)
            last_KD = self._check_states(states_NKD)[-1].to(self._device)
            logits_V = self._ends.head.logits(self._ends.head_input(last_KD[-1:]))[0].float()
            gap = float(logits_V.max() - logits_V[captured.next_token])
            # NaN compares as false: non-finite states are detected later, in real answers
            if gap > _TOLERANCE * float(logits_V.max() - logits_V.mean()):
                raise BadInput(
                    "the last hidden state that vLLM returns does not lead to the token that vLLM "
                    "generates next",
                    where=str(self.directory),
                    fix=self._how_to_match(),
                )

    def _adopt_dtype(self, dtype: torch.dtype) -> None:
        """Compute in vLLM's precision, which must be the requested one."""
        if self._requested_dtype not in ("auto", str(dtype).removeprefix("torch.")):
            what = f"vLLM computes in {dtype}, and {self._requested_dtype} was asked for"
            raise BadInput(what, where="target.dtype", fix="auto takes what vLLM has")
        self._dtype = dtype
        self._ends = self._ends.to(self._device, dtype)

    def _check_states(self, states_NKD: Tensor) -> Tensor:
        expected = (len(self._ids), self._ends.head.weight_VD.shape[1])
        if states_NKD.shape[1:] != expected or states_NKD.dtype != self._dtype:
            actual = "x".join(map(str, states_NKD.shape[1:]))
            raise BadInput(
                f"vLLM returns {actual} {states_NKD.dtype} for each token, expected "
                f"{in_words(expected[0])} layers of {expected[1]}",
                where=str(self.directory),
                fix=self._how_to_match(),
            )
        return states_NKD

    def _how_to_match(self) -> str:
        """How vLLM would have to be configured, for error messages."""
        return f"vLLM must capture its layers {self._ids} of this model"
