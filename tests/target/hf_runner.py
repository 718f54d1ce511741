"""A target runner for tests: the runner protocol over a plain Hugging Face model.

It stands in for an engine, so the contract layer can be tested without one. It shares
no code with the co-located backend's capture: states come from `output_hidden_states`, so that
comparing the two backends tests both. One limitation: transformers returns the *last*
layer's state already normed, so that layer cannot be captured here.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fledge.core.head import TargetHead
from fledge.target.hf.embedding_and_head import learn_head
from fledge.target.layers import FinalNorm, describe_final_norm, target_depth


class LogitsRunner:
    """Exactly `TargetRunner`: no hidden states, no head, no close."""

    def __init__(self, model: Any) -> None:
        self.model = self._module = model
        self.aux_layers: list[int] = []
        self.masks: list[Tensor] = []  # that it was asked with

    def set_aux_layers(self, aux_layer_ids: list[int]) -> None:
        self.aux_layers = aux_layer_ids

    @torch.no_grad()
    def forward_eagle3(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        self.masks.append(attention_mask)
        output = self._module(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        states = [output.hidden_states[i + 1] for i in self.aux_layers]
        return output.logits, torch.cat(states, dim=-1)

    def input_embedding_weight(self) -> Tensor:
        weight: Tensor = self._module.get_input_embeddings().weight.detach()
        return weight


class HFTargetRunner:
    """Runs a transformers causal LM as an engine would: unshifted logits or states, and aux."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.closed = False
        self._aux_layer_ids: list[int] | None = None

    def set_aux_layers(self, aux_layer_ids: list[int]) -> None:
        if max(aux_layer_ids) >= target_depth(self.model.config) - 1:
            raise ValueError(f"layer {max(aux_layer_ids)} is the last: this runner cannot show it")
        self._aux_layer_ids = aux_layer_ids

    def forward_eagle3(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        output = self._run(self.model, input_ids, attention_mask)
        return output.logits, self._aux(output)

    def forward_eagle3_hidden(
        self, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        base = self.model.base_model
        if base is self.model:  # Gemma 3 in transformers 4.57 defines no base model
            base = self.model.model
        output = self._run(base, input_ids, attention_mask)
        return output.last_hidden_state, self._aux(output)

    @staticmethod
    @torch.no_grad()
    def _run(module: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return module(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=False,
            output_hidden_states=True,
        )

    def _aux(self, output: Any) -> Tensor:
        assert self._aux_layer_ids is not None, "set_aux_layers comes first"
        return torch.cat([output.hidden_states[i + 1] for i in self._aux_layer_ids], dim=-1)

    def input_embedding_weight(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight.detach()
        return weight

    def target_head(self) -> TargetHead:
        probe_BT = torch.arange(4)[None]

        def logits() -> Tensor:
            output: Tensor = self.model(probe_BT).logits
            return output

        return learn_head(self.model, logits, where="HFTargetRunner")[0]

    def final_norm(self) -> FinalNorm | None:
        return describe_final_norm(self.model)

    def close(self) -> None:
        self.closed = True
