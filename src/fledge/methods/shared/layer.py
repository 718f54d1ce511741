"""One decoder layer of the draft: its parameters, and its arithmetic as plain functions.

EAGLE-3's layer 0 is fused: q, k and v read [input_layernorm(embedding); hidden_norm(hidden)], twice
as wide. EAGLE-1 merges the two before its layer 0, with fc([embedding; hidden]), and does not norm
the result; a native multi-token head norms both first. A product with a concatenation is the sum of
two products, and the embedding half depends only on the token: it is computed once per token and
read by offset at every depth. Deeper layers are ordinary pre-norm Llama layers.

The modules hold parameters under the names that engines read. `LayerWeights` are the weights that a
step computes with: cast once per step, so that fp32 masters can be trained in bf16, or, for a
single pass, cast where they are used (`late_linear`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.core import products
from fledge.kernels.gate import kernel_runs
from fledge.methods.shared.config import DraftConfig
from fledge.methods.shared.norms import Renormed, late_linear, rms_norm, weight_grad
from fledge.methods.shared.rotary import Turn, rotate


def linear(in_features: int, out_features: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=bias)


class DraftAttention(nn.Module):
    def __init__(self, config: DraftConfig, *, in_features: int) -> None:
        super().__init__()
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.biased = bias = config.attention_bias
        self.q_proj = linear(in_features, q_size, bias=bias)
        self.k_proj = linear(in_features, kv_size, bias=bias)
        self.v_proj = linear(in_features, kv_size, bias=bias)
        self.o_proj = linear(q_size, config.hidden_size, bias=config.output_bias)
        self.channels = config.head_dim
        self.normed = config.qk_norm
        if self.normed:  # as in Qwen3: over the channels of a head
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)


class DraftMLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.biased = bias = config.mlp_bias
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.biased:
            out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
            return out
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        return gated_mlp(x.flatten(0, -2), *weights).view_as(x)


class DraftLayer(nn.Module):
    attention: ClassVar[type[DraftAttention]] = DraftAttention

    def __init__(self, config: DraftConfig, *, fused: bool = False, normed: bool = True) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fused = fused
        # some other trainers use the normed state as the residual, EAGLE-3 the state itself
        self.norm_residual = fused and config.norm_before_residual
        self.self_attn = self.attention(config, in_features=2 * size if fused else size)
        self.mlp = DraftMLP(config)
        self.normed = normed
        if normed:
            self.input_layernorm = nn.RMSNorm(size, eps=eps)
        if fused:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def weights(
        self, dtype: torch.dtype, *, recompute_mlp: bool = False, used_once: bool = False
    ) -> "LayerWeights":
        """The weights for computing in `dtype`. `used_once` is for a single pass that is
        differentiated and should keep little memory for its backward pass."""
        attn, mlp = self.self_attn, self.mlp
        late = used_once and not mlp.biased  # cast where they are used
        mlp_dtype = mlp.gate_proj.weight.dtype if late else dtype
        late_attention = used_once and not (attn.biased or self.fused)
        first = self.input_layernorm.weight.to(dtype) if self.normed else None
        return LayerWeights(
            **(self._late_projections() if late_attention else self._projections(dtype)),
            token_norm=first if self.fused else None,
            state_norm=self.hidden_norm.weight.to(dtype) if self.fused else first,
            q_norm=attn.q_norm.weight.to(dtype) if attn.normed else None,
            k_norm=attn.k_norm.weight.to(dtype) if attn.normed else None,
            q_size=attn.q_proj.out_features,
            channels=attn.channels,
            norm_residual=self.norm_residual,
            mlp_norm=self.post_attention_layernorm.weight.to(dtype),
            gate=mlp.gate_proj.weight.to(mlp_dtype),
            up=mlp.up_proj.weight.to(mlp_dtype),
            down=mlp.down_proj.weight.to(mlp_dtype),
            mlp_biases=tuple(
                proj.bias.to(dtype)
                for proj in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
                if mlp.biased
            ),
            eps=self.post_attention_layernorm.eps or 0.0,
            recompute_mlp=recompute_mlp,
            used_once=used_once,
        )

    def _projections(self, dtype: torch.dtype) -> dict[str, Any]:
        """q, k and v as one matrix, and o, cast once for all passes of a step."""
        attn, size = self.self_attn, self.mlp.gate_proj.in_features
        projections = (attn.q_proj, attn.k_proj, attn.v_proj)
        qkv = torch.cat([proj.weight.to(dtype) for proj in projections])
        out: dict[str, Any] = {"o": attn.o_proj.weight.to(dtype)}
        bias = None
        if attn.biased:
            bias = torch.cat([proj.bias.to(dtype) for proj in projections])
            out["o_bias"] = None if attn.o_proj.bias is None else attn.o_proj.bias.to(dtype)
        if not self.fused:
            return out | {"state_qkv": qkv, "state_bias": bias}
        token = {"token_weight": qkv[:, :size], "token_bias": bias}
        return out | token | {"state_qkv": qkv[:, size:]}

    def _late_projections(self) -> dict[str, Any]:
        """The master weights themselves: cast where they are used; the casts are not kept."""
        attn = self.self_attn
        masters = (attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight)
        return {"late_qkv": masters, "o": attn.o_proj.weight}


class FusedDraftLayer(DraftLayer):
    """Layer 0: q, k and v read the embedding and the hidden state side by side."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, fused=True)


class DeepDraftLayer(DraftLayer):
    """Any deeper layer: an ordinary pre-norm Llama layer."""


# From queries [N, H, C], keys and values [N, G, C] of some rows to what they attend to, [N, H, C].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """What the first layer reads: a token's part, computed from its embedding, beside a state or
    merged with it."""

    eps: float
    token_norm: Tensor | None = None
    token_weight: Tensor | None = None
    token_bias: Tensor | None = None
    # where fc merges token and state before layer 0: the half that reads the state, and its norm
    merge_EE: Tensor | None = None
    merge_norm: Tensor | None = None

    def token_part(self, embedding_TE: Tensor) -> Tensor | None:
        """The embedding half of q, k, v side by side, or of fc; computed once per token."""
        if self.token_weight is None:
            return None
        normed_TE = rms_norm(embedding_TE, self.token_norm, self.eps)
        return products.linear(normed_TE, self.token_weight, self.token_bias)

    def enter(self, state_NE: Tensor, token_N: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The state that the layer reads, and the token's part that `project` still has to add."""
        if self.merge_EE is None or token_N is None:
            return state_NE, token_N
        state_NE = rms_norm(state_NE, self.merge_norm, self.eps)
        return torch.addmm(token_N, state_NE, self.merge_EE.t()), None

    def through(
        self, state_NE: Tensor, token_N: Tensor | None, turn: Turn, attend: Attend
    ) -> Tensor:
        """The whole layer."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LayerWeights(LayerInput):
    """A layer's weights in the dtype of the step; fused weights are split into their two halves."""

    q_size: int
    channels: int  # of a head
    norm_residual: bool  # use the normed state as the residual
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    mlp_biases: tuple[Tensor, ...]  # of gate, up and down
    state_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    state_qkv: Tensor | None = None  # None: `late_qkv` is used instead
    state_bias: Tensor | None = None  # of q, k, v if there is no token's part
    o_bias: Tensor | None = None
    late_qkv: tuple[Tensor, Tensor, Tensor] | None = None  # masters of q, k, v; `o` is one as well
    recompute_mlp: bool = False  # recompute the MLP's activations, to save memory in long batches
    used_once: bool = False  # recompute norms too; what is kept serves only one backward pass
    checkpointed: bool = False  # keep nothing that torch does not know of: it reruns the layer

    def normed(self, state_NE: Tensor) -> Tensor:
        return rms_norm(state_NE, self.state_norm, self.eps)

    def project_normed(self, state_NE: Tensor) -> Tensor:
        """All q, k, v outputs of a state. With `late_qkv`, the norm is not kept either."""
        if self.late_qkv is None:
            return self.project(self.normed(state_NE), None, slice(None))
        return late_linear(state_NE, self.late_qkv, self.state_norm, self.eps)

    def project_keys(self, context_NE: Tensor) -> Tensor:
        """k and v outputs of context that is not normed and has no queries."""
        return self.project(context_NE, None, slice(self.q_size, None))

    def project(self, normed_NE: Tensor, token_N: Tensor | None, columns: slice) -> Tensor:
        """All q, k, v outputs, or those of q, or of k and v; `token_N` holds the embedding half of
        all of them."""
        if self.late_qkv is not None:
            begin, end = 1 if columns.start else 0, 1 if columns.stop == self.q_size else 3
            return late_linear(normed_NE, self.late_qkv[begin:end])
        assert self.state_qkv is not None
        weight = self.state_qkv[columns]
        if token_N is None:
            bias = self.state_bias
            return products.linear(normed_NE, weight, None if bias is None else bias[columns])
        return products.linear_onto(token_N[:, columns], normed_NE, weight)

    def queries(self, q_NHC: Tensor) -> Tensor:
        """Queries before rotation: normed per head if the draft has q and k norms."""
        return rms_norm(q_NHC, self.q_norm, self.eps)

    def keys(self, k_NGC: Tensor) -> Tensor:
        return rms_norm(k_NGC, self.k_norm, self.eps)

    def through(
        self, state_NE: Tensor, token_N: Tensor | None, turn: Turn, attend: Attend
    ) -> Tensor:
        state_NE, token_N = self.enter(state_NE, token_N)
        qkv = self.project(self.normed(state_NE), token_N, slice(None))
        kv_size = (qkv.shape[1] - self.q_size) // 2
        parts = torch.split(qkv, [self.q_size, kv_size, kv_size], dim=1)  # its gradient is one cat
        q, keys, values = (self.heads(part) for part in parts)
        q, keys = rotate(self.queries(q), *turn), rotate(self.keys(keys), *turn)
        return self.finish(state_NE, attend(q, keys, values))

    def heads(self, x_NX: Tensor) -> Tensor:
        """[N, heads, C]: projections, split into heads."""
        return x_NX.reshape(len(x_NX), x_NX.shape[1] // self.channels, self.channels)

    def finish(self, residual_NE: Tensor, attended_NHC: Tensor) -> Tensor:
        """Output projection and SwiGLU, with their residuals."""
        if self.norm_residual:
            residual_NE = self.normed(residual_NE)
        state_NE = residual_NE + self.out(attended_NHC.flatten(1))
        return state_NE + self._mlp(state_NE)

    def out(self, attended_NX: Tensor) -> Tensor:
        if self.late_qkv is not None:
            return late_linear(attended_NX, (self.o,))
        return products.linear(attended_NX, self.o, self.o_bias)

    def _mlp(self, state_NE: Tensor) -> Tensor:
        norm, recompute = (self.mlp_norm, self.eps), self.recompute_mlp
        weights = (self.gate, self.up, self.down)
        if self.used_once and not self.mlp_biases:
            once = not self.checkpointed
            return gated_mlp(state_NE, *weights, norm=norm, recompute=recompute, once=once)
        x_NE = rms_norm(state_NE, *norm)
        if not self.mlp_biases:
            return gated_mlp(x_NE, *weights, recompute=recompute)
        gate, up, down = self.mlp_biases  # rare, so left to autograd
        gated_NI = F.silu(F.linear(x_NE, self.gate, gate)) * F.linear(x_NE, self.up, up)
        return F.linear(gated_NI, self.down, down)


# --- SwiGLU, and how much of it is kept for the backward pass -------------------------------------


Norm = tuple[Tensor, float]  # weight [E] and eps


class _GatedMlp(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)), keeping only the two products: half of what autograd would keep.

    They are the widest activations of a step, and there is one pair per depth. With `recompute` not
    even they are kept, and the backward pass computes them again. With a norm, x is normed first,
    and the backward pass recomputes the norm as well. Weights wider than x are cast where they are
    used, each time: that costs less than keeping the cast weights between the passes.

    With `once` there is only one backward pass. It reuses the memory of kept tensors for gradients
    and frees each as soon as possible: this is when a step has the least memory to spare.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NE: Tensor,
        norm_E: Tensor | None,
        gate_IE: Tensor,
        up_IE: Tensor,
        down_EI: Tensor,
        eps: float,
        recompute: bool,
        once: bool,
    ) -> Tensor:
        ctx.eps, ctx.recompute, dtype = eps, recompute, x_NE.dtype
        read_NE = rms_norm(x_NE, norm_E, eps)
        gate_NI, up_NI = (products.matmul(read_NE, w.to(dtype).t()) for w in (gate_IE, up_IE))
        kept = () if recompute else (gate_NI, up_NI)
        # torch holds saved tensors until the backward pass ends; these can be freed during it
        ctx.kept = list(kept) if once else None
        ctx.save_for_backward(x_NE, norm_E, gate_IE, up_IE, down_EI, *(() if once else kept))
        if kernel_runs(gate_NI, what="SwiGLU"):
            from fledge.kernels.elementwise import gate

            return products.matmul(gate(gate_NI, up_NI), down_EI.to(dtype).t())
        return products.matmul(F.silu(gate_NI).mul_(up_NI), down_EI.to(dtype).t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout_NE,) = grads
        x_NE, norm_E, gate_IE, up_IE, down_EI, *kept = ctx.saved_tensors
        once = ctx.kept is not None
        if once:
            kept, ctx.kept = ctx.kept, []
            if not kept and not ctx.recompute:
                raise RuntimeError("backward: a second pass is not possible with once=True")
        normed = None if norm_E is None else Renormed(x_NE, norm_E, ctx.eps)
        read_NE, dtype = x_NE if normed is None else normed.out, x_NE.dtype
        gate_NI, up_NI = kept or (
            products.matmul(read_NE, w.to(dtype).t()) for w in (gate_IE, up_IE)
        )
        dgated_NI = products.matmul(dout_NE, down_EI.to(dtype))
        gated_NI, dgate_NI, dup_NI = _gate_backward(
            gate_NI, up_NI, dgated_NI, use_up=once or not kept
        )
        del gate_NI, up_NI, kept, dgated_NI
        ddown_EI = weight_grad(dout_NE, gated_NI, down_EI.dtype)
        del gated_NI  # free it for what follows: it is as wide as the others
        dgate_IE = weight_grad(dgate_NI, read_NE, gate_IE.dtype)
        dup_IE = weight_grad(dup_NI, read_NE, up_IE.dtype)
        dx_NE = products.matmul(dgate_NI, gate_IE.to(dtype))
        products.add_product(dx_NE, dup_NI, up_IE.to(dtype))
        del dgate_NI, dup_NI
        dinput = (dx_NE, None) if normed is None else normed.back(dx_NE)
        return *dinput, dgate_IE, dup_IE, ddown_EI, None, None, None


def _gate_backward(
    gate_NI: Tensor, up_NI: Tensor, dgated_NI: Tensor, *, use_up: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up, recomputed, and the gradients of gate and up. dgated is overwritten; with
    `use_up`, on a GPU, so are gate and up."""
    if kernel_runs(gate_NI, what="SwiGLU"):
        from fledge.kernels.elementwise import gate_backward

        return gate_backward(gate_NI, up_NI, dgated_NI, use_up=use_up)
    act_NI = F.silu(gate_NI)
    gated_NI = act_NI * up_NI
    dup_NI = act_NI.mul_(dgated_NI)
    dgate_NI = torch.ops.aten.silu_backward(dgated_NI.mul_(up_NI), gate_NI)
    return gated_NI, dgate_NI, dup_NI


def gated_mlp(
    x_NE: Tensor,
    gate_IE: Tensor,
    up_IE: Tensor,
    down_EI: Tensor,
    *,
    norm: Norm | None = None,
    recompute: bool = False,
    once: bool = False,
) -> Tensor:
    """SwiGLU of x, or of norm(x). `once`: there will be at most one backward pass."""
    kind = x_NE.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # cast here, because the hand-written backward pass runs outside of autocast
        dtype = torch.get_autocast_dtype(kind)
        x_NE, gate_IE, up_IE, down_EI = (x.to(dtype) for x in (x_NE, gate_IE, up_IE, down_EI))
    norm_E, eps = norm or (None, 0.0)
    out_NE: Tensor = _GatedMlp.apply(  # type: ignore[no-untyped-call]
        x_NE, norm_E, gate_IE, up_IE, down_EI, eps, recompute, once
    )
    return out_NE


def kept_mlps(
    config: DraftConfig, rows: int, dtype: torch.dtype, *, layers: int, kept_gib: float
) -> int:
    """The number of layers whose MLPs, over `rows` rows each, together keep at most `kept_gib` for
    the backward pass. The others should be recomputed: that costs a twentieth of a step's time and
    saves a third of its memory. The last layers' are kept, which the backward pass frees first."""
    per_layer = rows * 2 * config.intermediate_size * dtype.itemsize
    return layers if per_layer == 0 else min(layers, int(kept_gib * 2**30 // per_layer))
