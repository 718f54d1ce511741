"""Both ends of a target from its files: embedding, final norm and head, without any layer.

An engine that returns hidden states returns them as its last layer outputs them. What lies between
them and the logits is read from the model's files: transformers builds the model with no layers, so
that only a few tensors of a large target are read, and its own forward shows how the head is used
(`probe`). Callers compare the result with the engine once.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fledge.core.errors import BadInput, UntrustedCode, broken_files, first_line
from fledge.core.head import TargetHead
from fledge.models.progress import quiet_transformers
from fledge.target.capture import muted_head
from fledge.target.hf.loading import check_complete, loader_for
from fledge.target.hf.probe import accepted_options, find_head_module, learn_head
from fledge.target.layers import FinalNorm, describe_final_norm, target_depth, text_config
from fledge.target.weights import is_here


@dataclass(frozen=True)
class ModelEnds:
    """The parts of a target outside its layers."""

    config: Any  # the target's original config, with all its layers
    embedding_VD: Tensor
    norm: nn.Module  # turns the last layer's output into the head's input
    final_norm: FinalNorm
    head: TargetHead

    @torch.no_grad()
    def head_input(self, states_ND: Tensor) -> Tensor:
        """The last hidden state, from the last layer's output."""
        normed_ND: Tensor = self.norm(states_ND)
        return normed_ND

    def to(self, device: torch.device, dtype: torch.dtype) -> "ModelEnds":
        """A copy on the device and in the precision of the states."""
        head, weight_D = self.head.to(device), self.final_norm.weight_D
        bias_V = None if head.bias_V is None else head.bias_V.to(dtype)
        weight_D = None if weight_D is None else weight_D.to(device, dtype)
        return replace(
            self,
            embedding_VD=self.embedding_VD.to(device, dtype),
            norm=self.norm.to(device, dtype),
            final_norm=replace(self.final_norm, weight_D=weight_D),
            head=replace(head, weight_VD=head.weight_VD.to(dtype), bias_V=bias_V),
        )


class UnknownEnds(BadInput):
    """The ends of a target cannot be derived from its files; the engine may still provide them."""


def read_ends(directory: Path, *, trust_remote_code: bool = False) -> ModelEnds:
    """The ends of the model in a directory, as stored, on the CPU."""
    try:
        return _read_ends(directory, trust_remote_code=trust_remote_code)
    except UntrustedCode:
        raise
    except BadInput as error:
        where, fix = str(directory), "target.capture=worker leaves them to vLLM"
        what = f"its norm and head cannot be taken from its files ({error.what})"
        raise UnknownEnds(what, where=where, fix=fix) from error


def _read_ends(directory: Path, *, trust_remote_code: bool) -> ModelEnds:
    config, bare = _load_bare(directory, trust_remote_code=trust_remote_code)
    final_norm = describe_final_norm(bare, bare=True)
    if final_norm is None:
        raise BadInput("there is no norm between its layers and its head")
    norm, few_BT = bare.get_submodule(final_norm.path), torch.arange(4)[None]
    options = accepted_options(bare, use_cache=False)

    def logits() -> Tensor:
        logits_BTV: Tensor = bare(few_BT, **options).logits
        return logits_BTV

    try:
        module = find_head_module(bare)
        head, _ = learn_head(logits, module, model=bare, where=str(directory))
        norm_feeds_head = _norm_feeds_head(logits, norm, module)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        what = f"transformers does not run it without layers: {first_line(error)}"
        raise BadInput(what) from error
    if not norm_feeds_head:
        raise BadInput("there is more than a norm between its layers and its head")
    embedding: Any = bare.get_input_embeddings()  # type: ignore[operator]
    return ModelEnds(config, embedding.weight.detach(), norm, final_norm, head)


def _load_bare(directory: Path, *, trust_remote_code: bool) -> tuple[Any, nn.Module]:
    """(config, model without layers). The model is unquantized, as only layers are quantized."""
    import transformers

    from fledge.models.resolve import wants_trust

    trust = {"trust_remote_code": trust_remote_code}
    try:
        config, bare = (
            transformers.AutoConfig.from_pretrained(directory, **trust) for _ in range(2)
        )
        _remove_layers(bare)
        with quiet_transformers():
            model, report = loader_for(bare).from_pretrained(
                directory, config=bare, output_loading_info=True, ignore_mismatched_sizes=True,
                dtype="auto", **trust,
            )  # fmt: skip
    except broken_files() as error:
        if wants_trust(error):
            raise UntrustedCode.of(str(directory)) from error
        what = f"its embedding and head could not be loaded ({first_line(error)})"
        raise BadInput(what, where=str(directory)) from error
    check_complete(report, str(directory))
    model = model.eval().requires_grad_(False)
    assert all(is_here(weight) for weight in model.parameters())
    return config, model


def _remove_layers(config: Any) -> None:
    """Change a config in place to zero layers, emptying every list with an entry per layer."""
    text = text_config(config)
    depth = target_depth(config)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(text, name, [])
    text.num_hidden_layers = 0
    for part in {id(part): part for part in (config, text)}.values():
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config


@torch.no_grad()
def _norm_feeds_head(run_logits: Any, norm: nn.Module, head: nn.Module) -> bool:
    """Whether the head's input is exactly the norm's output."""
    normed: list[Tensor] = []
    head_inputs: list[Tensor] = []

    def answer(hidden: Tensor) -> Tensor:
        head_inputs.append(hidden)
        return hidden.new_zeros((*hidden.shape[:-1], 1))

    hook = norm.register_forward_hook(lambda _, args, output: normed.append(output))
    try:
        with muted_head(head, answer):
            run_logits()
    finally:
        hook.remove()
    return len(normed) == len(head_inputs) == 1 and torch.equal(normed[0], head_inputs[0])
