"""P-EAGLE drafts: the extra parameter, the forward passes, files, warm start from EAGLE-3."""

from functools import partial

import pytest
import torch
from test_draft_model import make_config

from fledge import LlamaEagle3DraftModel
from fledge.methods.peagle import draft as parallel_draft
from fledge.methods.peagle.plan import plan_parallel
from fledge.methods.shared import draft as recompute
from objective.naive_eagle3 import (
    make_documents,
    masks_of,
    packed_batch,
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
