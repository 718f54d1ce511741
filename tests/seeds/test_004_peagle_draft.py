"""The P-EAGLE parts of the draft, used as their specification describes.

Each test quotes the sentence of the specification that it checks.
"""

import inspect
import subprocess
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig

from fledge import (
    LlamaEagle3DraftModel,
    PEagleTrainerModule,
    create_peagle_mask_mod,
    draft_llama,
    generate_cod_sample_indices,
)
from fledge import peagle_draft as module
from fledge.methods.shared import draft as recompute

MASK_ID, WIDTH = 22, 7


def make_draft(**changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "target_hidden_size": 10, "draft_vocab_size": 9, "num_aux_hidden_states": 3,
        "parallel_drafting": True, "mask_token_id": MASK_ID,
    }  # fmt: skip
    draft = LlamaEagle3DraftModel(LlamaConfig(**settings | changes)).double()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    draft.set_vocab_mapping(torch.tensor([0, 2, 3, 7, 11, 12, 18, 20, 22]))
    return draft


def test_the_drafts_inherit_the_mixins():
    """ "The P-EAGLE forward path is provided as mixins so the EAGLE-3 draft classes in
    draft_llama.py opt into it by inheritance"; "the dependency stays one-way"."""
    for mixin, host in (
        ("_PeagleAttentionMixin", draft_llama.Eagle3LlamaAttention),
        ("_PeagleDecoderLayerMixin", draft_llama.Eagle3LlamaDecoderLayer),
        ("_PeagleVanillaLayerMixin", draft_llama.Eagle3LlamaPeagleLayer),
        ("_PeagleDraftMixin", draft_llama.LlamaEagle3DraftModel),
    ):
        assert issubclass(host, getattr(module, mixin))
        assert host.forward_peagle is getattr(module, mixin).forward_peagle
    draft = make_draft()
    kinds = [draft_llama.Eagle3LlamaDecoderLayer, draft_llama.Eagle3LlamaPeagleLayer]
    assert [type(layer) for layer in draft.layers] == kinds
    assert {type(layer.self_attn) for layer in draft.layers} == {draft_llama.Eagle3LlamaAttention}
    methods = ("_init_peagle_parameters", "_run_draft_layer", "build_peagle_block_mask",
               "masked_projected_hidden")  # fmt: skip
    for name in methods:
        assert getattr(type(draft), name) is getattr(module._PeagleDraftMixin, name)
    code = "import sys, fledge.peagle_draft; sys.exit('fledge.draft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_placeholder_can_be_registered_by_itself():
    """ "Register the learnable P-EAGLE mask_hidden placeholder": `num_aux_hidden_states *
    target_hidden_size == model.fc.in_features`."""
    draft = make_draft(parallel_drafting=False)
    draft._init_peagle_parameters(draft.config)
    assert draft.state_dict()["mask_hidden"].shape == (1, 1, draft.fc.in_features)


def test_the_placeholder_is_one_parameter_before_fc():
    """ "Shape [1, 1, 3 * H] and the on-disk key mask_hidden"; "only when parallel_drafting is set
    so EAGLE-3 / EAGLE-3.1 checkpoints round-trip with no extra keys." """
    draft = make_draft()
    assert draft.state_dict()["mask_hidden"].shape == (1, 1, 3 * 10)
    assert draft.mask_hidden.numel() == draft.fc.in_features
    assert draft.mask_hidden.requires_grad
    for norms in ({}, {"fc_norm": True, "norm_output": True}):
        plain = make_draft(parallel_drafting=False, mask_token_id=None, **norms)
        assert "mask_hidden" not in plain.state_dict()
        # "Only valid when the draft was built with config.parallel_drafting=True."
        with pytest.raises(ValueError, match="parallel_drafting"):
            plain.masked_projected_hidden()


@pytest.mark.parametrize("fc_norm", [False, True])
def test_the_placeholder_is_projected_like_aux_states(fc_norm):
    """ "Returns a [1, hidden_size] tensor obtained by running the placeholder through the same
    project_hidden_states path (fc plus optional fc_norm)" """
    draft = make_draft(fc_norm=fc_norm)
    projected = draft.masked_projected_hidden()
    assert projected.shape == (1, 16)
    assert torch.equal(projected, draft.project_hidden_states(draft.mask_hidden)[0])


def elements(generator=3):
    """A row of documents of 4 and 3 tokens, all depths flattened: (anchor_pos, depth)."""
    parts = []
    for begin, length in ((0, 4), (4, 3)):
        anchor, depth = generate_cod_sample_indices(
            length, torch.ones(length), 3, 1.0, generator=torch.Generator().manual_seed(generator)
        )
        parts.append(torch.stack([anchor + begin, depth]))
    return torch.cat(parts, dim=1)


def inputs(draft, anchor, depth):
    """ "real token ids at depth-0 slots, the masked mask_token_id at depth >= 1 slots";
    "fc-projected target aux states at depth-0 slots, the projected mask_hidden placeholder
    elsewhere"; "anchor_pos + depth (the reference position)"."""
    random = torch.Generator().manual_seed(1)
    aux = torch.randn(WIDTH, 30, generator=random, dtype=torch.float64)
    tokens = torch.randint(0, 20, (WIDTH,), generator=random)
    starts = torch.tensor([0, 0, 0, 0, 4, 4, 4])
    projected = draft.project_hidden_states(aux)[anchor]
    hidden = torch.where((depth == 0)[:, None], projected, draft.masked_projected_hidden())
    ids = torch.where(depth == 0, tokens[anchor], MASK_ID)
    return ids[None], hidden[None], (anchor - starts[anchor] + depth)[None]


@pytest.mark.parametrize("norm_output", [False, True])
def test_one_pass_over_all_depths_equals_a_pass_for_each_element(norm_output):
    """ "P-EAGLE flattens all COD depths into one sequence and attends in a single pass";
    "Cross-depth visibility is enforced entirely by block_mask"; "Returns the pre-logits hidden
    states (post-norm when config.norm_output is set), one row per sampled element." """
    draft = make_draft(norm_output=norm_output)
    anchor, depth = elements()
    mask = draft.build_peagle_block_mask(
        anchor_pos=anchor, depth=depth, lengths=[4, 3], total_seq_len=WIDTH
    )
    ids, hidden, positions = inputs(draft, anchor, depth)
    out = draft.forward_peagle(
        sampled_input_ids=ids, sampled_projected_hidden=hidden, position_ids=positions,
        block_mask=mask,
    )  # fmt: skip
    assert out.shape == (1, len(anchor), 16)
    assert depth.max() == 2
    for index, (a, d) in enumerate(zip(anchor.tolist(), depth.tolist(), strict=True)):
        # as in serving: the verified tokens of its document, then its mask slots, all causal
        begin = 0 if a < 4 else 4
        anchors = torch.tensor([*range(begin, a + 1), *[a] * d])
        depths = torch.tensor([0] * (a + 1 - begin) + [*range(1, d + 1)])
        causal = create_block_mask(
            lambda b, h, q, kv: q >= kv, None, None, len(anchors), len(anchors), device="cpu"
        )
        element_inputs = inputs(draft, anchors, depths)
        expected = draft.forward_peagle(*element_inputs, causal)[0, -1]
        torch.testing.assert_close(out[0, index], expected, rtol=1e-9, atol=1e-9)
    logits = draft.compute_logits(out)
    assert logits.shape == (1, len(anchor), 9)
    head_input = out if norm_output else draft.norm(out)
    torch.testing.assert_close(logits, head_input @ draft.lm_head.weight.T)


def test_the_block_mask_uses_the_documented_mask_function():
    """ "Construct the COD flex_attention block mask for one sequence" "(see
    create_peagle_mask_mod)"."""
    anchor, depth = elements()
    draft = make_draft()
    block = draft.build_peagle_block_mask(anchor, depth, torch.tensor([4, 3]), WIDTH)
    index, zero = torch.arange(len(anchor)), torch.tensor(0)
    expected = create_peagle_mask_mod(anchor, depth, [4, 3], WIDTH)(
        zero, zero, index[:, None], index[None]
    )
    actual = block.mask_mod(zero, zero, index[:, None], index[None])
    assert torch.equal(actual, expected)
    assert 0 < expected.sum() < expected.numel()


def test_the_layers_have_their_own_peagle_forwards():
    """ "Decoder-layer variant for the P-EAGLE single parallel forward": "same norms, residuals, MLP
    and [embeds, hidden] concatenation"; "Standard pre-norm Llama block over H hidden states with
    the COD mask." """
    draft = make_draft()
    anchor, depth = elements()
    mask = draft.build_peagle_block_mask(anchor, depth, [4, 3], WIDTH)
    ids, hidden, positions = inputs(draft, anchor, depth)
    fused, plain = draft.layers
    assert [*inspect.signature(fused.forward_peagle).parameters] == [
        "input_embeds", "hidden_states", "position_ids", "block_mask",
    ]  # fmt: skip
    assert [*inspect.signature(plain.forward_peagle).parameters] == [
        "hidden_states", "position_ids", "block_mask",
    ]  # fmt: skip
    embeds = draft.embed_tokens(ids)
    combined = torch.cat([fused.input_layernorm(embeds), fused.hidden_norm(hidden)], dim=-1)
    attended = fused.self_attn.forward_peagle(
        combined_states=combined, position_ids=positions, block_mask=mask
    )
    state = hidden + attended
    state = state + fused.mlp(fused.post_attention_layernorm(state))
    first = fused.forward_peagle(embeds, hidden, positions, mask)
    torch.testing.assert_close(first, state)
    attended = plain.self_attn.forward_peagle(plain.input_layernorm(state), positions, mask)
    state = state + attended
    state = state + plain.mlp(plain.post_attention_layernorm(state))
    torch.testing.assert_close(plain.forward_peagle(first, positions, mask), state)
    torch.testing.assert_close(draft.forward_peagle(ids, hidden, positions, mask), state)


def test_gradient_checkpointing_trades_one_forward_for_memory(monkeypatch, caplog):
    """ "When gradient_checkpointing is enabled (training only), the layer's activations are freed
    after the forward and recomputed during the backward"; "use_reentrant=False is required"; "With
    the flag off (the default, and in eval) the layer runs directly" """
    draft = make_draft().train()
    assert not draft.gradient_checkpointing
    anchor, depth = elements()
    mask = draft.build_peagle_block_mask(anchor, depth, [4, 3], WIDTH)
    calls, original = [], recompute.checkpoint

    def counted(*args, **kwargs):
        calls.append(kwargs["use_reentrant"])
        return original(*args, **kwargs)

    monkeypatch.setattr(recompute, "checkpoint", counted)

    def gradient():
        draft.zero_grad()
        ids, hidden, positions = inputs(draft, anchor, depth)
        draft.forward_peagle(ids, hidden, positions, mask).square().sum().backward()
        return [p.grad.clone() for p in draft.parameters() if p.grad is not None]

    expected = gradient()
    assert calls == []
    draft.gradient_checkpointing_enable()
    actual = gradient()
    assert calls == [False, False]
    assert all(map(torch.equal, actual, expected))
    draft.eval()
    gradient()
    draft.train()
    draft.gradient_checkpointing_disable()
    gradient()
    assert calls == [False, False]
    draft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert draft.gradient_checkpointing
    draft.gradient_checkpointing_enable({"use_reentrant": True})  # as trainers of transformers do
    assert "use_reentrant=False" in caplog.text
    gradient()
    assert set(calls) == {False}
    with pytest.raises(ValueError, match="determinism_check"):
        draft.gradient_checkpointing_enable({"determinism_check": "none"})
    assert draft._run_draft_layer(lambda x, y=0: x + y, 2, y=3) == 5


def test_compiled_only_where_inductor_supports_the_tensors():
    """ "Run the P-EAGLE flex attention, compiling only when Inductor supports it." """
    q = torch.randn(1, 4, 5, 16)
    assert not module._peagle_compile_supported(q, q, q)  # on a CPU
    assert module._peagle_flex_attention_compile_failed is False
    assert callable(module._peagle_flex_attention_compiled)
    assert module.logger.name == module.__name__


def test_the_compiled_function_has_the_documented_options(monkeypatch):
    """`torch.compile(flex_attention, mode='max-autotune-no-cudagraphs', dynamic=True)`, with dense
    scores where it fails."""
    compiled = []

    def compile_nothing(function, **options):
        compiled.append((function, options))
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(module, "_peagle_compile_supported", lambda *tensors: True)
    monkeypatch.setattr(module, "_peagle_flex_attention_compile_failed", False)
    module._compiled.cache_clear()
    q = torch.randn(1, 4, 5, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, device="cpu")
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    for _ in range(2):  # a failure is not repeated
        actual = module._peagle_flex_attention(q=q, k=q, v=q, block_mask=mask, scale=0.25)
        torch.testing.assert_close(actual, expected)
    options = {"mode": "max-autotune-no-cudagraphs", "dynamic": True}
    assert compiled == [(flex_attention, options)]
    assert module._peagle_flex_attention_compile_failed


def test_training_reaches_the_placeholder_and_is_recorded_in_the_config(tmp_path):
    """ "The P-EAGLE trainer scatters the result into every masked COD depth"; the checkpoint
    records the training settings, and the embeddings may be frozen."""
    draft = make_draft().float()
    draft.freeze_embeddings()
    ids = draft.selected_token_ids
    trainer = PEagleTrainerModule(
        draft, selected_token_ids=ids, selected_token_mask=draft.t2d, num_depths=3,
        mask_token_id=MASK_ID,
    )  # fmt: skip
    ones = torch.ones(2, WIDTH).long()
    out = trainer(
        input_ids=ones, attention_mask=ones, loss_mask=ones, seed=0,
        aux_hidden_states=torch.randn(2, WIDTH, 30), target_logits=torch.randn(2, WIDTH, 23),
    )  # fmt: skip
    out.loss.backward()
    assert draft.embed_tokens.weight.grad is None
    assert draft.mask_hidden.grad.abs().max() > 0
    draft.save_pretrained(tmp_path / "draft")
    config = LlamaEagle3DraftModel.from_pretrained(tmp_path / "draft").config
    assert (config.num_depths, config.down_sample_ratio, config.down_sample_ratio_min) == (
        3, 0.7, 0.2,
    )  # fmt: skip
    assert (config.parallel_drafting, config.mask_token_id) == (True, MASK_ID)


def test_cod_sampling_has_the_documented_defaults():
    parameters = inspect.signature(generate_cod_sample_indices).parameters
    assert [parameters[name].default for name in (
        "num_depths", "down_sample_ratio", "down_sample_ratio_min",
    )] == [8, 0.7, 0.2]  # fmt: skip
    anchor, depth = generate_cod_sample_indices(12, torch.ones(12))
    assert torch.bincount(depth)[:3].tolist() == [12, 7, 4]
    assert ((anchor + depth) < 12).all()
