"""Both ends of a target, learned from the model itself and not from its class.

After the head's linear layer, architectures multiply (Cohere), divide (Granite) or soft-cap (Gemma)
the logits, and configs use different names for it. So it is measured (`learn_head`): known numbers
replace the head's output, and the model's logits reveal scale and cap.

An engine that returns hidden states returns them as its last layer outputs them. What lies between
them and the logits is read from the model's files (`read_ends`): transformers builds the model with
no layers, so that only a few tensors of a large target are read. Callers compare the result with
the engine once.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fledge.core.errors import BadInput, UntrustedCode, broken_files, first_line
from fledge.core.head import TargetHead
from fledge.models.stored import quiet_transformers
from fledge.target.finite_check import bad_weight, bad_weights, refuse_uniform
from fledge.target.hf.loading import check_complete, loader_for
from fledge.target.layers import (
    FinalNorm,
    describe_final_norm,
    muted_head,
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


class UnknownEnds(BadInput):
    """The ends of a target cannot be derived from its files; the engine may still provide them."""


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
        where, fix = str(directory), "target.capture=worker leaves them to vLLM"
        what = f"its norm and head cannot be taken from its files ({error.what})"
        raise UnknownEnds(what, where=where, fix=fix) from error
    embedding: Any = bare.get_input_embeddings()  # type: ignore[operator]
    return ModelEnds(config, embedding.weight.detach(), norm, final_norm, head)


def _learn_bare_head(bare: nn.Module, norm: nn.Module, *, where: str) -> TargetHead:
    """The head of a model without layers, whose input must be exactly the norm's output."""
    few_BT, options = torch.arange(4)[None], accepted_options(bare, use_cache=False)
    normed: list[Tensor] = []
    given: list[Tensor] = []

    def run() -> Tensor:
        logits_BTV: Tensor = bare(few_BT, **options).logits
        return logits_BTV

    def answer(hidden: Tensor) -> Tensor:
        given.append(hidden)
        return hidden.new_zeros((*hidden.shape[:-1], 1))

    try:
        module = find_head_module(bare)
        head, _ = learn_head(run, module, model=bare, where=where)
        hook = norm.register_forward_hook(lambda _, args, output: normed.append(output))
        with torch.no_grad(), muted_head(module, answer):
            run()
        hook.remove()
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        what = f"transformers does not run it without layers: {first_line(error)}"
        raise BadInput(what) from error
    if not (len(normed) == len(given) == 1 and torch.equal(normed[0], given[0])):
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


_SMALL, _LARGE = 2.0**-20, 2.0**20  # far below and far above any soft cap in use (15 .. 50)
_PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    run_logits: Callable[[], Tensor],
    head: nn.Module,
    *,
    where: str,
    model: nn.Module | None = None,
    alone: bool = True,
) -> tuple[TargetHead, torch.dtype]:
    """The frozen head, checked against the model, and the dtype of its input states.
    `run_logits` runs the whole model over a few tokens and returns its logits [1, few, V]. A head
    that cannot be called `alone`, because its weights are gathered only for the model's forward, is
    called within such a forward."""
    weight_VD, bias_V = _linear_of(head, where=where)
    head_inputs: list[Tensor] = []
    widest = torch.float32 if weight_VD.device.type == "mps" else torch.float64
    wave_V = torch.linspace(-60.0, 60.0, len(weight_VD), dtype=widest)
    wave_V[0], wave_V[-1] = _SMALL, _LARGE
    wave_V = wave_V.to(weight_VD.device)

    def answer(hidden_BTD: Tensor) -> Tensor:
        head_inputs.append(whole_tensor(hidden_BTD))
        return wave_V.expand(*hidden_BTD.shape[:-1], -1)

    with muted_head(head, answer):
        response_V = run_logits()[0, -1]
    if len(head_inputs) != 1 or response_V.shape != wave_V.shape:
        raise BadInput(
            f"its forward called the head {len(head_inputs)} times and returned "
            f"{response_V.shape[-1]} logits of {len(wave_V)}",
            where=where,
            fix="use supervision 'logits'",
        )
    learned = replace(
        _fit_scale_and_cap(wave_V, response_V, where=where), weight_VD=weight_VD, bias_V=bias_V
    )
    call_head = head if alone else partial(_call_within_model, run_logits, head)
    hidden_BTD = _finite_states(head_inputs[0], call_head, model or head, where=where)
    plain = TargetHead(weight_VD, bias_V).logits(hidden_BTD)
    torch_logits = call_head(hidden_BTD)
    if not torch.allclose(torch_logits.float(), plain.float(), rtol=2e-2, atol=1e-3):
        raise BadInput(
            f"its head ({type(head).__name__}) does more than a matrix product",
            where=where,
            fix="use supervision 'logits'",
        )
    refuse_uniform(torch_logits, where=where)
    return learned, hidden_BTD.dtype


def _call_within_model(run_logits: Callable[[], Tensor], head: nn.Module, hidden: Tensor) -> Tensor:
    """The head's output for these states, passed to it in place of the model's own."""
    outputs: list[Tensor] = []
    hooks = (
        head.register_forward_pre_hook(lambda _, args: (hidden, *args[1:]), prepend=True),
        head.register_forward_hook(lambda _, args, output: outputs.append(whole_tensor(output))),
    )
    try:
        run_logits()
    finally:
        for hook in hooks:
            hook.remove()
    return outputs[0]


def _finite_states(
    hidden: Tensor, head: Callable[[Tensor], Tensor], model: nn.Module, *, where: str
) -> Tensor:
    """States to compare two heads on: the model's own, or a ramp if these are not finite or the
    head overflows on them. Such faults say nothing about the head's arithmetic and are reported for
    real answers; but weights that hold NaN are rejected here."""
    if bool(torch.isfinite(hidden).all()) and bool(torch.isfinite(head(hidden)).all()):
        return hidden
    if (tensor := bad_weight(model)) is not None:
        raise bad_weights(*tensor, owner="the target", where=where)
    wave = torch.linspace(-1.0, 1.0, hidden.numel(), device=hidden.device)
    return wave.view(hidden.shape).to(hidden.dtype)


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


def _fit_scale_and_cap(wave_V: Tensor, response_V: Tensor, *, where: str) -> TargetHead:
    """A head of width 1 that turns the wave into the response, by scale or divisor, and cap.

    The slope near 0 is the factor; the output for large inputs is the cap. Multiplying by 1/13 and
    dividing by 13 round differently, so both are tried and the closer one is used.
    """
    factor = float(response_V[0]) / _SMALL
    top = float(response_V[-1])
    capped = abs(top - factor * _LARGE) > 1e-2 * abs(factor) * _LARGE
    wave = TargetHead(wave_V[:, None], None, 1.0, abs(top) if capped else None)
    candidates = [wave]
    if factor != 0.0:
        candidates += [replace(wave, scale=value) for value in (factor, _round(factor))]
        candidates += [replace(wave, divisor=value) for value in (1 / factor, _round(1 / factor))]
    ones_11 = wave_V.new_ones(1, 1)
    wanted_V = response_V.to(wave_V.dtype)
    errors = [float((head.logits(ones_11)[0] - wanted_V).abs().max()) for head in candidates]
    best = candidates[errors.index(min(errors))]
    tolerance = 1e-9 if response_V.dtype == torch.float64 else 1e-2
    if not torch.allclose(wanted_V, best.logits(ones_11)[0], rtol=tolerance, atol=1e-6):
        raise BadInput(
            "its logits are not a scaled and soft-capped matrix product",
            where=where,
            fix="use supervision 'logits'",
        )
    return best


def _round(value: float) -> float:
    return float(f"{value:.12g}")


def accepted_options(model: nn.Module, **options: Any) -> dict[str, Any]:
    """The `options` that the model's forward names. Any `**kwargs` take them too if the model is
    one of transformers; another model may pass them on to a layer that does not know them."""
    from transformers import PreTrainedModel

    parameters = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    any_name = open_ended and isinstance(model, PreTrainedModel)
    return {name: value for name, value in options.items() if any_name or name in parameters}
