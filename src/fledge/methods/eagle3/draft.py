"""`LlamaEagle3DraftModel`: the draft network of EAGLE-3, EAGLE-3.1 and P-EAGLE.

Its rollout in training is in `shared/unroll.py`, P-EAGLE's in `peagle/draft.py`. P-EAGLE's
placeholder and its pass through flex attention come from the mixins of `fledge.peagle_draft`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from fledge.core import products
from fledge.core.errors import BadInput
from fledge.methods.shared.layer import DraftLayer, linear
from fledge.methods.shared.norms import rms_norm
from fledge.methods.shared.rotary import Rotary
from fledge.peagle_draft import (
    _PeagleAttentionMixin,
    _PeagleDecoderLayerMixin,
    _PeagleDraftMixin,
    _PeagleVanillaLayerMixin,
)
from fledge.target.layers import describe_final_norm, find_layers
from fledge.target.weights import is_here


class Eagle3LlamaAttention(_PeagleAttentionMixin):
    """The attention of both kinds of layers."""


class Eagle3LlamaDecoderLayer(_PeagleDecoderLayerMixin):
    attention = Eagle3LlamaAttention


class Eagle3LlamaPeagleLayer(_PeagleVanillaLayerMixin):
    attention = Eagle3LlamaAttention


class LlamaEagle3DraftModel(_PeagleDraftMixin):
    """fc over the target's aux states, a fused first layer, deeper Llama layers, norm, head.

    `config` is a Llama-style transformers config plus the keys of `DraftConfig`, all optional.
    """

    architecture = "LlamaForCausalLMEagle3"

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        spec = self.spec
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.embed_tokens = nn.Embedding(spec.vocab_size, size)
        self.fc = linear(spec.fc_inputs, size)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(spec.target_hidden_size, eps=eps)
                for _ in range(spec.num_aux_hidden_states)
            )
        deeper = [Eagle3LlamaPeagleLayer(spec) for _ in range(spec.num_hidden_layers - 1)]
        layers = [Eagle3LlamaDecoderLayer(spec), *deeper]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(size, eps=eps)
        self.lm_head = linear(size, spec.draft_vocab_size)
        self._register_vocabulary(spec)
        if spec.parallel_drafting:
            self._init_peagle_parameters(spec)
        self.rotary = Rotary(config)
        for layer in layers:
            assert isinstance(layer.self_attn, Eagle3LlamaAttention)
            layer.self_attn.rotary = self.rotary
        self._init_weights()

    # --- the pieces ----------------------------------------------------------------------------

    def project_hidden_states(self, aux: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., 3 * D] aux states of the target -> [..., E]."""
        dtype = dtype or self.fc.weight.dtype
        return products.linear(self.fc_inputs(aux.to(dtype)), self.fc.weight.to(dtype))

    def fc_inputs(self, aux: Tensor) -> Tensor:
        """[..., 3 * D] aux states as fc reads them: each layer's normed separately if `fc_norm`."""
        if not self.spec.fc_norm:
            return aux
        chunks = aux.chunk(self.spec.num_aux_hidden_states, dim=-1)
        return torch.cat(
            [
                rms_norm(chunk, weight.to(aux.dtype), self.spec.rms_norm_eps)
                for chunk, weight in zip(chunks, self.fc_norm.parameters(), strict=True)
            ],
            dim=-1,
        )

    @torch.no_grad()
    def start_as_target(self, model: nn.Module) -> None:
        """Copy the target's last layers, as many as the draft has, and its final norm; set fc to
        pass on the last aux state."""
        copy_last_layers(self.layers, self.norm, model)
        size, target_size = self.spec.hidden_size, self.spec.target_hidden_size
        if target_size != size:
            raise _refused(f"the draft's hidden size is {size}, the target's {target_size}")
        self.fc.weight.zero_()
        self.fc.weight[:, -size:].fill_diagonal_(1.0)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[..., E] as carried from depth to depth -> [..., W]. Normed here unless `norm_output`,
        with which the carried states are already normed."""
        if not self.spec.norm_output:
            hidden = self.norm(hidden)
        return F.linear(hidden, self.lm_head.weight)

    def norm_weight(self, dtype: torch.dtype) -> Tensor:
        return self.norm.weight.to(dtype)


# --- start as target ------------------------------------------------------------------------------
# A new EAGLE-3 draft has the target's embeddings and head, and random weights in between. The
# target's own last layers do nearly what it has to learn: they turn the aux states that it reads
# into states that the head reads. So its layers can start as copies of them, its norm as a copy
# of the target's, and fc as a projection that passes on the last aux state. With the embedding's
# half of the first layer set to zero, such a draft predicts exactly what the target does,
# provided that it reads the states before those layers. Biases of the target's projections are
# left out if the draft has none.


WHERE = "draft.layers_from_target"


def _refused(what: str) -> BadInput:
    return BadInput(what, where=WHERE, fix=f"{WHERE}=false")


@torch.no_grad()
def copy_last_layers(layers: nn.ModuleList, norm: nn.RMSNorm, model: nn.Module) -> None:
    """Copy the target's last layers, as many as there are, and its final norm."""
    target_layers = find_layers(model)[-len(layers) :]
    if len(target_layers) < len(layers):
        what = f"the draft has {len(layers)} layers, the target {len(target_layers)}"
        raise _refused(what)
    for layer, target_layer in zip(layers, target_layers, strict=True):
        assert isinstance(layer, DraftLayer)
        for name, destination in _destinations(layer):
            _copy(name, destination, _weight(target_layer, name))
    found = describe_final_norm(model)
    if found is None:
        raise _refused("the target has no norm in front of its head")
    _copy("norm", norm.weight, _scales(model.get_submodule(found.path)))


def _destinations(layer: DraftLayer) -> Iterator[tuple[str, Tensor]]:
    """The names of the target's tensors, and where each goes in a layer of the draft. In a fused
    layer, q, k and v go to the half that reads the state."""
    size = layer.mlp.gate_proj.in_features
    for name in ("q_proj", "k_proj", "v_proj"):
        yield f"self_attn.{name}", getattr(layer.self_attn, name).weight[:, -size:]
    norms = ("self_attn.q_norm", "self_attn.k_norm") if layer.self_attn.normed else ()
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    for name in (*norms, "self_attn.o_proj", *mlp, "post_attention_layernorm"):
        yield name, layer.get_parameter(f"{name}.weight")
    yield "input_layernorm", (layer.hidden_norm if layer.fused else layer.input_layernorm).weight


def _weight(layer: nn.Module, name: str) -> Tensor:
    """A tensor of one of the target's layers, by its name in Llama."""
    try:
        module = layer.get_submodule(name)
    except AttributeError:
        module = None
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, Tensor) or not weight.dtype.is_floating_point:
        raise _refused(f"the target's layers ({type(layer).__name__}) have no plain weight {name}")
    if not is_here(weight):
        raise _refused("the target is not whole in this process: sharded")
    return _scales(module) if weight.ndim == 1 else weight


def _scales(norm: nn.Module) -> Tensor:
    """The scales of an RMS norm, however it stores them (some add one). They are its output for a
    vector of ones, whose root mean square is one."""
    scales: Tensor = norm(torch.ones_like(next(norm.parameters())))
    return scales


def _copy(name: str, weight: Tensor, source: Tensor) -> None:
    if weight.shape != source.shape:
        theirs, ours = tuple(source.shape), tuple(weight.shape)
        raise _refused(f"{name}: the target's is {theirs}, the draft's {ours}")
    weight.copy_(source)
