"""P-EAGLE drafts: the extra parameter, the forward passes, files, warm start from EAGLE-3."""

from functools import partial

import pytest
import torch
from test_draft_model import make_config

from fledge import BadInput, LlamaEagle3DraftModel
from fledge.methods.peagle import draft as parallel_draft
from fledge.methods.peagle.draft import peagle_from_eagle3
from fledge.methods.peagle.plan import plan_parallel
from fledge.methods.shared import draft as recompute
from fledge.rollout.plan import plan_rollout
from objective.naive_eagle3 import (
    make_documents,
    make_draft,
    masks_of,
    packed_batch,
    vocabulary,
)
from objective.naive_peagle import MASK_ID, make_parallel_draft

LENGTHS, WIDTH = [5, 9, 2], 18  # two slots of padding
make_parallel = partial(make_parallel_draft, layers=3)


def make_batch():
    """One packed row, as (masks and packing, aux, ids)."""
    batch = packed_batch([make_documents(LENGTHS, supervised=0.8)], WIDTH)
    return masks_of(batch), batch["aux_hidden_states"], batch["input_ids"]


def make_plan(batch, *, num_depths=4, **options):
    sampling = {"ratio": 0.9, "ratio_min": 0.5, "seed": 1}
    return plan_parallel(batch, num_depths=num_depths, **sampling, **options)


def weighted_gradients(draft, out):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    names, parameters = zip(*draft.named_parameters(), strict=True)
    grads = torch.autograd.grad((out * weight).sum(), parameters, allow_unused=True)
    return out.detach(), dict(zip(names, grads, strict=True))


def assert_same(first, second, tolerance=1e-11):
    torch.testing.assert_close(first[0], second[0], rtol=tolerance, atol=tolerance)
    for name, grad in first[1].items():
        assert (grad is None) == (second[1][name] is None), name
        if grad is not None:
            torch.testing.assert_close(grad, second[1][name], rtol=tolerance, atol=tolerance)


def flat_forward(draft, plan, aux, ids, *, shuffle=False):
    """Run the plan's elements through `forward_peagle`, as an outside caller would."""
    real = sum(LENGTHS)
    deeper = [
        (slot, depth)
        for depth, rows in enumerate(plan.depths[1:], start=1)
        for slot in plan.slot_T[rows.slot_N].tolist()
    ]
    elements = [(slot, 0) for slot in range(real)] + deeper
    if shuffle:
        order = torch.randperm(len(elements), generator=torch.Generator().manual_seed(0))
        elements = [elements[i] for i in order]
    anchor, depth = torch.tensor(elements).T
    lengths = torch.tensor(LENGTHS)
    document_start = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    real_depth = (depth == 0)[:, None]
    projected = torch.where(
        real_depth, draft.project_hidden_states(aux[0])[anchor], draft.masked_projected_hidden()
    )
    hidden = draft.forward_peagle(
        torch.where(depth == 0, ids[0][anchor], MASK_ID)[None],
        projected[None],
        (anchor - document_start[anchor] + depth)[None],
        draft.build_peagle_block_mask(anchor, depth, torch.tensor(LENGTHS), WIDTH),
    )
    wanted = [
        elements.index((slot, depth))
        for depth, rows in enumerate(plan.depths)
        for slot in plan.slot_T[rows.slot_N].tolist()
    ]
    return hidden[0][wanted]


def unrolled(draft, plan, aux, ids, **options):
    return parallel_draft.unroll_parallel(
        draft, plan.on_key_axis(aux), plan.on_key_axis(ids), plan, **options
    )


VARIANTS = {
    "one layer": {"layers": 1},
    "three layers": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "partial rotary": {"partial_rotary_factor": 0.5, "head_dim": 8},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "q/k norms": {"qk_norm": True},
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_forward_passes_agree(variant, shuffle):
    """One is a flat sequence under a flex mask, in any order, the other `unroll_parallel`."""
    draft = make_parallel(**VARIANTS[variant])
    batch, aux, ids = make_batch()
    plan = make_plan(batch)
    assert min(plan.counts) > 0
    flat = flat_forward(draft, plan, aux, ids, shuffle=shuffle)
    logits = draft.compute_logits(flat)
    states = unrolled(draft, plan, aux, ids)
    assert_same(
        weighted_gradients(draft, logits),
        weighted_gradients(draft, torch.nn.functional.linear(states, draft.lm_head.weight)),
    )


# --- gradient checkpointing --------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("way", ["flat", "plan"])
def test_gradient_checkpointing_is_exact_and_off_in_evaluation(monkeypatch, way, partitions):
    draft = make_parallel()
    batch, aux, ids = make_batch()
    plan = make_plan(batch, partitions=partitions)
    forward = flat_forward if way == "flat" else unrolled
    plain = weighted_gradients(draft, forward(draft, plan, aux, ids))
    calls = []
    original = parallel_draft.checkpoint

    def counted(*args, **kwargs):
        calls.append(kwargs["use_reentrant"])
        return original(*args, **kwargs)

    for module in (parallel_draft, recompute):
        monkeypatch.setattr(module, "checkpoint", counted)
    draft.gradient_checkpointing = True
    segments = len(plan.segments) if way == "plan" else 1
    out = forward(draft, plan, aux, ids)
    segment_calls = segments if segments > 1 else 0  # several segments are checkpointed themselves
    assert calls == [False] * (3 * segments + segment_calls)
    assert_same(plain, weighted_gradients(draft, out), tolerance=0)
    calls.clear()
    draft.eval()
    assert_same(plain, weighted_gradients(draft, forward(draft, plan, aux, ids)), tolerance=0)
    assert len(calls) == segment_calls


def test_the_flat_forward_runs_under_autocast():
    draft = make_parallel(dtype=torch.float32)
    batch, aux, ids = make_batch()
    plan = make_plan(batch)
    full = flat_forward(draft, plan, aux.float(), ids)
    with torch.autocast("cpu", torch.bfloat16):
        out = flat_forward(draft, plan, aux.float(), ids)
    assert torch.nn.functional.cosine_similarity(out, full, dim=-1).min() > 0.99
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in draft.layers.parameters())


# --- the parameter and the files ---------------------------------------------------------------


def test_mask_hidden_starts_as_unit_noise():
    torch.manual_seed(0)
    config = make_config(parallel_drafting=True, target_hidden_size=5000)
    noise = LlamaEagle3DraftModel(config).mask_hidden
    assert noise.requires_grad
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03


def test_the_mask_token_must_be_a_valid_id():
    with pytest.raises(ValueError, match="mask_token_id"):
        LlamaEagle3DraftModel(make_config(parallel_drafting=True, mask_token_id=23))
    draft = LlamaEagle3DraftModel(make_config(parallel_drafting=True))
    batch, aux, ids = make_batch()
    with pytest.raises(ValueError, match="mask_token_id"):
        unrolled(draft, make_plan(batch), aux, ids)


# --- from EAGLE-3 ------------------------------------------------------------------------------


def test_a_warm_start_from_eagle3_carries_everything_over():
    eagle3 = make_draft(fc_norm=True, seed=3)
    eagle3.set_vocab_mapping(*vocabulary())
    draft = peagle_from_eagle3(eagle3, make_parallel(fc_norm=True).config)
    new = draft.state_dict()
    for name, tensor in eagle3.state_dict().items():
        assert torch.equal(new[name], tensor), name
    fresh = set(new) - set(eagle3.state_dict())
    assert {name.split(".")[1] for name in fresh if name != "mask_hidden"} == {"1", "2"}
    assert new["mask_hidden"].std() > 0.5
    assert torch.equal(draft.selected_token_ids, vocabulary()[0])
    batch, aux, ids = make_batch()
    plan, parallel = plan_rollout(batch, num_depths=1), make_plan(batch)
    (before,) = eagle3.unroll(plan.on_key_axis(aux), plan.on_key_axis(ids), plan)
    slots = parallel.slot_T[parallel.depths[0].slot_N].tolist()
    rows = [slots.index(slot) for slot in plan.slot_T[plan.depths[0].slot_N].tolist()]
    states = unrolled(draft, parallel, aux, ids)
    torch.testing.assert_close(states[rows], before, rtol=1e-12, atol=1e-12)
    grads = weighted_gradients(draft, states)[1]
    # the new layers do not change the output yet, but they can learn
    assert grads["layers.2.mlp.down_proj.weight"].abs().max() > 0


def test_an_incompatible_warm_start_reports_why():
    eagle3 = LlamaEagle3DraftModel(make_config(num_hidden_layers=2))
    with pytest.raises(ValueError, match="parallel_drafting"):
        peagle_from_eagle3(eagle3, make_config(num_hidden_layers=2))
    for change, word in (
        ({"num_hidden_layers": 1}, "layers"),
        ({"intermediate_size": 24}, "intermediate_size"),
        ({"draft_vocab_size": 8}, "draft_vocab_size"),
        ({"rope_theta": 5.0}, "rope_parameters"),
        ({"fc_norm": True}, "fc_norm"),
    ):
        settings = {"num_hidden_layers": 2, "parallel_drafting": True, "mask_token_id": 1}
        with pytest.raises(BadInput, match=word):
            peagle_from_eagle3(eagle3, make_config(**(settings | change)))
