"""A draft that starts as the end of its target.

A fresh EAGLE-3 draft knows the target's embeddings and head, and nothing in between. The target's
own last layers do nearly what it has to learn: they turn the states that it hears into states that
the head reads. So its layers can start as copies of them, its norm as the target's, and fc as the
one that hands the last of the heard states on. With the embedding's half of the first layer set to
nothing, such a draft says what the target says (if it hears the states before those layers).
Biases of the target's projections are left out where the draft has none.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fledge.core.errors import BadInput
from fledge.draft.layer import DraftLayer
from fledge.target.layers import describe_final_norm, find_layers
from fledge.target.weights import is_here

if TYPE_CHECKING:
    from fledge.draft.eagle3 import LlamaEagle3DraftModel

WHERE = "draft.layers_from_target"
_FIX = f"{WHERE}=false"


@torch.no_grad()
def start_as_target(draft: "LlamaEagle3DraftModel", model: nn.Module) -> None:
    """Copy the target's last layers, as many as the draft has, and what stands around them."""
    theirs = find_layers(model)[-len(draft.layers) :]
    if len(theirs) < len(draft.layers):
        what = f"the draft has {len(draft.layers)} layers, the target {len(theirs)}"
        raise BadInput(what, where=WHERE, fix=_FIX)
    for own, layer in zip(draft.layers, theirs, strict=True):
        assert isinstance(own, DraftLayer)
        for name, into in _slots(own):
            _copy(name, into, _weight(layer, name))
    norm = describe_final_norm(model)
    if norm is None:
        raise BadInput("the target has no norm in front of its head", where=WHERE, fix=_FIX)
    _copy("norm", draft.norm.weight, _scales(model.get_submodule(norm.path)))
    size = draft.config.hidden_size
    if draft.config.target_hidden_size != size:
        what = f"the draft's hidden size is {size}, the target's {draft.config.target_hidden_size}"
        raise BadInput(what, where=WHERE, fix=_FIX)
    draft.fc.weight.zero_()
    draft.fc.weight[:, -size:].fill_diagonal_(1.0)


def _slots(layer: DraftLayer) -> Iterator[tuple[str, Tensor]]:
    """Where a layer of the draft takes each of the target's tensors: those of q, k and v go to the
    half that reads the state, where there are two."""
    size = layer.mlp.gate_proj.in_features
    for name in ("q_proj", "k_proj", "v_proj"):
        yield f"self_attn.{name}", getattr(layer.self_attn, name).weight[:, -size:]
    if layer.self_attn.normed:
        for name in ("q_norm", "k_norm"):
            yield f"self_attn.{name}", getattr(layer.self_attn, name).weight
    yield "self_attn.o_proj", layer.self_attn.o_proj.weight
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield f"mlp.{name}", getattr(layer.mlp, name).weight
    before = layer.hidden_norm if layer.fused else layer.input_layernorm
    yield "input_layernorm", before.weight
    yield "post_attention_layernorm", layer.post_attention_layernorm.weight


def _weight(layer: nn.Module, name: str) -> Tensor:
    """A tensor of one of the target's layers, under the name that Llama gives it."""
    try:
        module = layer.get_submodule(name)
    except AttributeError:
        module = None
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, Tensor) or not weight.dtype.is_floating_point:
        what = f"the target's layers ({type(layer).__name__}) have no plain weight {name}"
        raise BadInput(what, where=WHERE, fix=_FIX)
    if not is_here(weight):
        what = "the target is not whole in this process: sharded, or offloaded"
        raise BadInput(what, where=WHERE, fix=_FIX)
    return _scales(module) if weight.ndim == 1 else weight


def _scales(norm: nn.Module) -> Tensor:
    """What an RMS norm multiplies by, however it stores that (some add one): what it makes of ones,
    whose root mean square is one."""
    scales: Tensor = norm(torch.ones_like(next(norm.parameters())))
    return scales


def _copy(name: str, own: Tensor, theirs: Tensor) -> None:
    if own.shape != theirs.shape:
        what = f"{name}: the target's is {tuple(theirs.shape)}, the draft's {tuple(own.shape)}"
        raise BadInput(what, where=WHERE, fix=_FIX)
    own.copy_(theirs)
