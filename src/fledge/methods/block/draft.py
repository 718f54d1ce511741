"""`BlockDraftModel`: a few layers that attend to the target.

    context = hidden_norm(fc(the target's features)), once for all layers
    block   = [newest token, MASK, MASK, ...] -> layers -> norm -> the target's own head

In every layer, queries come from the block only, keys and values from the context and the block.
The context has no queries and is not normed again, so its keys and values are computed once for
each token and layer, in training and in serving. Embedding and head are the target's own tensors:
shared, never trained, and not in the draft's files.

A small head may follow (`heads/base.py`): a token head makes a token depend on those before it, a
candidate head chooses among the best tokens of every slot. Their files import this one's users, so
they are found by name.

Shapes: N blocks of J slots, T key axis.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from fledge.core import products
from fledge.methods.block.attention import Again, Sight, block_attention
from fledge.methods.block.config import BlockConfig
from fledge.methods.block.heads.base import CandidateHead, StepHead, TokenHead
from fledge.methods.block.heads.convolution import ConvolvedLayer, GatedConvolution
from fledge.methods.block.heads.markov import ConfidenceHead
from fledge.methods.block.plan import BlockRows
from fledge.methods.registry import CANDIDATE_HEADS, TOKEN_HEADS
from fledge.methods.shared.borrowing import BorrowingDraftModel
from fledge.methods.shared.layer import DeepDraftLayer, LayerWeights, linear
from fledge.methods.shared.norms import rms_norm
from fledge.methods.shared.rotary import Rotary, Turn, split_heads
from fledge.rollout.attention import AttentionKind, KeysValues

KEPT_MLP_GIB = 4.5  # MLP activations that are kept even if little memory is free


class BlockDraftModel(BorrowingDraftModel):
    """fc, hidden_norm, Qwen3-style layers, norm; optionally a token head and a confidence head.

    `config` is a Llama-style transformers config plus the keys of `BlockConfig`,
    `confidence_threshold` and `confidence_temperatures` (one for each calibrated depth).
    """

    architecture = "FledgeBlockDraftModel"
    config_type = BlockConfig
    spec: BlockConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        spec = self.spec
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.fc = linear(spec.fc_inputs, size)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        layer_type = ConvolvedLayer if spec.conv_kernel_size else DeepDraftLayer
        self.layers = nn.ModuleList(layer_type(spec) for _ in range(spec.num_hidden_layers))
        self.norm = nn.RMSNorm(size, eps=eps)
        if spec.markov_rank:
            self.add_module(spec.token_head + "_head", TOKEN_HEADS[spec.token_head](spec))
        self.confidence_head = ConfidenceHead(spec) if spec.confidence_head else None
        if spec.candidate_head:
            candidate_type = CANDIDATE_HEADS[spec.candidate_head]
            self.add_module(candidate_type.module_name, candidate_type(spec))
        self._register_vocabulary(spec)
        self.rotary = Rotary(config)
        self._init_weights()
        self._borrow_later()

    def _init_weights(self) -> None:
        super()._init_weights()
        for module in self.modules():
            if isinstance(module, TokenHead | CandidateHead | GatedConvolution):
                module.start()
        if self.confidence_head is not None:
            nn.init.zeros_(self.confidence_head.proj.bias)

    @property
    def token_head(self) -> TokenHead | None:
        return cast("TokenHead | None", self._modules.get(self.spec.token_head + "_head"))

    @property
    def candidate_head(self) -> CandidateHead | None:
        heads = (module for module in self._modules.values() if isinstance(module, CandidateHead))
        return next(heads, None)

    @property
    def reads_blocks(self) -> bool:
        """Whether a head reads the states of all slots of a block."""
        return self.token_head is not None and self.token_head.whole_blocks

    # --- the layout of a block ------------------------------------------------------------------

    @property
    def drafts(self) -> int:
        """The number of tokens that a block proposes."""
        return self.spec.drafts

    def sights(self) -> list[Sight]:
        """Which keys each layer sees."""
        config, full = self.spec, Sight(self.spec.causal)
        causal = config.causal or not config.sliding_both_ways
        sliding = Sight(causal, config.sliding_window)
        return [sliding if i in config.sliding_layers else full for i in range(len(self.layers))]

    def block_tokens(self, newest_N: Tensor) -> Tensor:
        """[N, J]: the newest token, followed by placeholders."""
        rest = newest_N.new_full((len(newest_N), self.spec.size - 1), self.spec.mask_id)
        return torch.cat([newest_N[:, None], rest], dim=1)

    # --- computing ------------------------------------------------------------------------------

    def norm_weight(self, dtype: torch.dtype) -> Tensor:
        return self.norm.weight.to(dtype)

    def project_hidden_states(self, aux: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., K * D] the target's features -> [..., E] the context that all layers read."""
        dtype = dtype or self.dtype
        state = products.linear(aux.to(dtype), self.fc.weight.to(dtype))
        return rms_norm(state, self.hidden_norm.weight.to(dtype), self.spec.rms_norm_eps)

    def context_keys(self, layer: LayerWeights, context_NE: Tensor, turn: Turn) -> KeysValues:
        """[N, G, C] keys and values that a layer computes from context tokens."""
        _, keys, values = self.split(layer, layer.project_keys(context_NE), turn)
        return keys, values

    def enter_layer(
        self, number: int, layer: LayerWeights, state_NE: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A layer's q, k and v outputs of the blocks' own slots, and the gates of its
        convolutions."""
        convolved = self.layers[number]
        if isinstance(convolved, ConvolvedLayer):
            return convolved.project(layer, state_NE, self.spec.size)
        return layer.project_normed(state_NE), None

    def leave_layer(
        self,
        number: int,
        layer: LayerWeights,
        state_NE: Tensor,
        attended_NHC: Tensor,
        gates: Tensor | None,
    ) -> Tensor:
        convolved = self.layers[number]
        if isinstance(convolved, ConvolvedLayer) and gates is not None:
            return convolved.leave(layer, state_NE, attended_NHC, gates)
        return layer.finish(state_NE, attended_NHC)

    def _project_tokens(self, layer: LayerWeights, newest_N: Tensor, dtype: torch.dtype) -> Tensor:
        """The first layer's projections. Its slots hold only their token, so the placeholders are
        all equal and one of them is projected for all."""
        token_M = torch.cat([newest_N, newest_N.new_full((1,), self.spec.mask_id)])
        qkv_MX = layer.project_normed(self.embed(token_M, dtype))
        rest = self.spec.size - 1
        masked_NJX = qkv_MX[-1:, None].expand(len(newest_N), rest, -1)
        return torch.cat([qkv_MX[:-1, None], masked_NJX], dim=1).flatten(0, 1)

    def split(self, layer: LayerWeights, x_NX: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, C], keys and values [N, G, C]."""
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        groups = self.spec.num_key_value_heads
        return split_heads(x_NX, layer.q_norm, layer.k_norm, turn, eps=layer.eps, groups=groups)

    def forward(
        self,
        aux_TD: Tensor,  # [T, K * D] on the plan's key axis
        newest_N: Tensor,  # the token that each block starts with
        position_T: Tensor,
        rows: BlockRows,
        *,
        wanted_P: Tensor | None = None,  # indices of slots, all blocks end to end; None: all slots
        compute_dtype: torch.dtype | None = None,
        attention: AttentionKind = "fast",
    ) -> Tensor:
        """Head inputs, after the final norm: [N, J, E] of all slots, or [P, E] of `wanted_P`."""
        dtype = compute_dtype or self.dtype
        context_TE = self.project_hidden_states(aux_TD, dtype)
        turn_T = self.rotary(position_T, dtype)
        position_N = position_T.index_select(0, rows.slot_N) + 1
        position_NJ = position_N[:, None] + torch.arange(rows.size, device=position_N.device)
        turn = self.rotary(position_NJ.flatten(), dtype)
        state = self.embed(self.block_tokens(newest_N), dtype).flatten(0, 1)
        sights, kept_gib = self.sights(), KEPT_MLP_GIB
        weights = self.step_weights(dtype, len(state), kept_gib=kept_gib, used_once=True)
        common = (context_TE, turn_T, turn, rows, attention)
        for number, (layer, sight) in enumerate(zip(weights, sights, strict=True)):
            state = self._run_draft_layer(
                self._layer, number, layer, sight, state, *common,
                newest_N=newest_N if number == 0 and not self.spec.conv_kernel_size else None,
                wanted_P=wanted_P if number == len(weights) - 1 else None,
            )  # fmt: skip
        state = rms_norm(state, self.norm_weight(dtype), self.spec.rms_norm_eps)
        return state if wanted_P is not None else state.view(len(rows), rows.size, state.shape[1])

    def _layer(
        self,
        number: int,
        layer: LayerWeights,
        sight: Sight,
        state: Tensor,
        context_TE: Tensor,
        turn_T: Turn,
        turn: Turn,
        rows: BlockRows,
        attention: AttentionKind,
        *,
        newest_N: Tensor | None,  # first layer only: see `_project_tokens`
        wanted_P: Tensor | None,  # last layer only: its other slots are not used
    ) -> Tensor:
        gates = None
        if newest_N is None:
            qkv_NX, gates = self.enter_layer(number, layer, state)
        else:
            qkv_NX = self._project_tokens(layer, newest_N, state.dtype)
        projected = (layer.project_keys(context_TE), qkv_NX)

        def make(kv_TX: Tensor, qkv_NX: Tensor) -> tuple[Tensor, ...]:
            _, *context = self.split(layer, kv_TX, turn_T)
            block = self.split(layer, qkv_NX, turn)
            q, *keys_values = (x.view(len(rows), rows.size, *x.shape[1:]) for x in block)
            return q, *context, *keys_values

        q, k, v, *block_kv = make(*projected)
        out = block_attention(
            q, (k, v), (block_kv[0], block_kv[1]), rows, sight, kind=attention,
            again=Again(projected, make) if layer.used_once else None,
        ).flatten(0, 1)  # fmt: skip
        if wanted_P is not None and gates is None:
            state, out, wanted_P = _pick(state, wanted_P), _pick(out, wanted_P), None
        state = self.leave_layer(number, layer, state, out, gates)
        return state if wanted_P is None else _pick(state, wanted_P)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, index_P: Tensor) -> Tensor:
        ctx.save_for_backward(index_P)
        ctx.shape = x_N.shape
        return x_N.index_select(0, index_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index_P,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy_(0, index_P, grads[0]), None


def _pick(x_N: Tensor, index_P: Tensor) -> Tensor:
    """Distinct rows of x. Because none occurs twice, gradients are copied instead of added."""
    picked: Tensor = _Pick.apply(x_N, index_P)  # type: ignore[no-untyped-call]
    return picked


def step_head(draft: BlockDraftModel) -> StepHead:
    assert isinstance(draft.token_head, StepHead)
    return draft.token_head


@torch.no_grad()
def grown(draft: BlockDraftModel, config: PretrainedConfig) -> BlockDraftModel | None:
    """A new block draft with `config` and all weights that it has in common with `draft`. For
    example, a DSpark draft can start from a DFlash draft: its heads are new, and the token head
    adds nothing to the logits yet. Returns None if the weights do not fit."""
    new = BlockDraftModel(config).to(device=draft.device, dtype=draft.dtype)
    state, new_state = draft.state_dict(), new.state_dict()
    shared = {name: state[name] for name in new_state if name in state}
    missing = [name for name in new_state if name not in state and "_head." not in name]
    if missing or any(new_state[name].shape != shared[name].shape for name in shared):
        return None
    new.load_state_dict(new_state | shared)
    return new
