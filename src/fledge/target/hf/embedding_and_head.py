"""Both ends of a target: its embedding, its final norm and its output head.

After the head's linear layer, architectures multiply (Cohere), divide (Granite) or soft-cap (Gemma)
the logits, by numbers in their configs (`learn_head`). The head is compared once with the model's
own logits, so that one which does anything else is refused.

An engine that returns hidden states returns them as its last layer outputs them. What lies between
them and the logits is read from the model's files (`read_ends`): transformers builds the model with
no layers, so that only a few tensors of a large target are read. Callers compare the result with
the engine once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fledge.core.errors import BadInput, UntrustedCode, broken_files, first_line
from fledge.core.head import TargetHead
from fledge.models.stored import quiet_transformers
from fledge.target.finite_check import bad_weight, bad_weights
from fledge.target.hf.loading import check_complete, loader_for
from fledge.target.layers import (
    FinalNorm,
    describe_final_norm,
    target_depth,
    text_config,
)
from fledge.target.weights import whole_tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ModelEnds:
    """The parts of a target outside its layers."""

    config: "PretrainedConfig"  # the target's original config, with all its layers
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


def read_ends(directory: Path, *, trust_remote_code: bool = False) -> ModelEnds:
    """The ends of the model in a directory, as stored, on the CPU."""
    try:
        config, bare = _load_bare(directory, trust_remote_code=trust_remote_code)
        final_norm = describe_final_norm(bare, bare=True)
        if final_norm is None:
            raise BadInput("there is no norm between its layers and its head")
        norm = bare.get_submodule(final_norm.path)
        head = _learn_bare_head(bare, norm, where=str(directory))
    except UntrustedCode:
        raise
    except BadInput as error:
        what = f"its norm and head cannot be taken from its files ({error.what})"
        raise BadInput(what, where=str(directory), fix="use target.backend=hf") from error
    embedding: Any = bare.get_input_embeddings()  # type: ignore[operator]
    return ModelEnds(config, embedding.weight.detach(), norm, final_norm, head)


@torch.no_grad()
def _learn_bare_head(bare: nn.Module, norm: nn.Module, *, where: str) -> TargetHead:
    """The head of a model without layers, whose input must be exactly the norm's output."""
    few_BT, options = torch.arange(4)[None], without_cache(bare)
    normed: list[Tensor] = []
    hook = norm.register_forward_hook(lambda _, args, output: normed.append(output))
    try:
        head, given_ND = learn_head(bare, lambda: bare(few_BT, **options).logits, where=where)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        what = f"transformers does not run it without layers: {first_line(error)}"
        raise BadInput(what) from error
    finally:
        hook.remove()
    if not (len(normed) == 1 and torch.equal(normed[0][0], given_ND)):
        raise BadInput("there is more than a norm between its layers and its head")
    return head


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
    return config, model


def _remove_layers(config: "PretrainedConfig") -> None:
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


_PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What configs call the numbers that are applied to the logits.
_SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")


def find_head_module(model: nn.Module) -> nn.Module:
    """The module that computes logits: the model's output embeddings, or `lm_head`."""
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    for name in ("lm_head", "embed_out", "output"):
        head = head if head is not None else getattr(model, name, None)
    if not isinstance(head, nn.Module):
        raise BadInput(
            f"{type(model).__name__} has no output head that could be found",
            fix="use supervision 'logits'",
        )
    return head


@torch.no_grad()
def learn_head(
    model: nn.Module, run_logits: Callable[[], Tensor], *, where: str
) -> tuple[TargetHead, Tensor]:
    """The frozen head, checked against the model, and its input states [few, D] in that check.
    `run_logits` runs the whole model over a few tokens and returns its logits [1, few, V]."""
    module = find_head_module(model)
    plain = TargetHead(*_linear_of(module, where=where))  # before FSDP2 gathers it for a forward
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(
        lambda _, args: inputs.append(whole_tensor(args[0])), prepend=True
    )
    try:
        logits_NV = run_logits()[0]
    finally:
        hook.remove()
    config = text_config(getattr(model, "config", None))
    named = replace(
        plain,
        scale=_named(config, _SCALES) or 1.0,
        softcap=_named(config, _SOFTCAPS),
        divisor=_named(config, _DIVISORS) or 1.0,
    )
    states_ND = inputs[0][0]
    if not (logits_NV.isfinite().all() and named.logits(states_ND).isfinite().all()):
        # an overflow says nothing about the head's arithmetic, and is reported for real answers
        if (tensor := bad_weight(model)) is not None:
            raise bad_weights(tensor, owner="the target", where=where)
        return named, states_ND
    for head in (named, plain):  # MiniCPM3 applies its divisor to the head's input
        expected_NV = head.logits(states_ND).float()
        if torch.allclose(logits_NV.float(), expected_NV, rtol=2e-2, atol=1e-3):
            return head, states_ND
    what = f"its head ({type(module).__name__}) does more than a matrix product, scale and cap"
    raise BadInput(what, where=where, fix="use supervision 'logits'")


def _named(config: Any, names: Sequence[str]) -> float | None:
    """The first of these numbers that a config holds."""
    values = (getattr(config, name, None) for name in names)
    return next((float(value) for value in values if value is not None), None)


def _linear_of(head: nn.Module, *, where: str) -> tuple[Tensor, Tensor | None]:
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.dtype not in _PLAIN_DTYPES:
        stored = weight.dtype if isinstance(weight, Tensor) else type(head).__name__
        raise BadInput(
            f"its output head is stored as {stored}, not as a plain matrix",
            where=where,
            fix="keep the head unquantized (modules_to_not_convert) or use supervision 'logits'",
        )
    return whole_tensor(weight), None if bias is None else whole_tensor(bias)


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The options of a forward that returns logits only. A model that is not one of transformers
    may not know them."""
    from transformers import PreTrainedModel

    own = isinstance(model, PreTrainedModel)
    return {"use_cache": False, "output_hidden_states": False} if own else {}
