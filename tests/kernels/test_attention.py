"""The blocked attention against the dense definition, and the definition against a plain loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.rollout import plan as plan_module
from fledge.rollout.attention import rollout_attention
from fledge.rollout.plan import plan_rollout
from fledge.rollout.slots import RowMasks


def packed_masks(lengths, loss):
    """Documents packed into one row."""
    return RowMasks(
        loss,
        torch.ones_like(loss),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        seq_lens=torch.tensor([lengths]),
        doc_remaining=torch.cat([torch.arange(n - 1, -1, -1) for n in lengths])[None],
    )


def make_plan(lengths, num_depths, *, seed=0, supervised=0.5, device="cpu"):
    """A random share of slots is supervised."""
    generator = torch.Generator().manual_seed(seed)
    loss = (torch.rand(1, sum(lengths), generator=generator) < supervised).long()
    masks = packed_masks(lengths, loss)
    return plan_rollout(masks, num_depths=num_depths, device=torch.device(device))


def make_inputs(plan, depth, *, heads=4, groups=2, channels=6, dtype=torch.float64, seed=1):
    """Queries of one depth, depth-0 keys, and a chain whose shallower depths have more rows."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=dtype).requires_grad_()

    q = random(plan.counts[depth], heads, channels)
    keys, values = (random(len(plan.slot_T), groups, channels) for _ in range(2))
    chain = [
        (random(plan.counts[k], groups, channels), random(plan.counts[k], groups, channels))
        for k in range(1, depth + 1)
    ]
    return q, keys, values, chain


def attend(plan, depth, inputs, kind):
    """Returns (output, gradients of all inputs) under a fixed random weighting of the output."""
    q, keys, values, chain = inputs
    out = rollout_attention(q, keys, values, plan.depths[depth], chain=chain, kind=kind)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    leaves = [q, keys, values, *(tensor for pair in chain for tensor in pair)]
    return out.detach(), torch.autograd.grad((out * weight).sum(), leaves)


def assert_fast_matches_reference(plan, depth, inputs, *, tolerance=1e-12):
    out, grads = attend(plan, depth, inputs, "fast")
    expected, expected_grads = attend(plan, depth, inputs, "reference")
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("lengths", [[1], [17], [5, 1, 12, 3], [300, 41]])
def test_fast_matches_reference(lengths, depth, heads, groups):
    plan = make_plan(lengths, 4)
    assert_fast_matches_reference(plan, depth, make_inputs(plan, depth, heads=heads, groups=groups))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    depth=st.integers(0, 3),
    supervised=st.sampled_from([0.0, 0.2, 1.1]),
    limits=st.sampled_from([(1, 1), (3, 20), (256, 2**19)]),
    seed=st.integers(0, 1000),
)
def test_fast_matches_reference_for_any_documents_rows_and_blocks(
    lengths, depth, supervised, limits, seed
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "BLOCK_ROWS", limits[0])
        patch.setattr(plan_module, "BLOCK_SCORES", limits[1])
        plan = make_plan(lengths, 4, seed=seed, supervised=supervised)
    assert_fast_matches_reference(plan, depth, make_inputs(plan, depth, seed=seed))


def test_the_definition_matches_a_loop_over_rows():
    """Each row attends to its document's keys up to its anchor, then to its own chain."""
    lengths = [5, 1, 12, 3]
    plan = make_plan(lengths, 3)
    depth, starts = 2, [0, 5, 6, 18]
    q, keys, values, chain = make_inputs(plan, depth)
    out, _ = attend(plan, depth, (q, keys, values, chain), "reference")
    slots = plan.slot_T.tolist()
    for row, key in enumerate(plan.depths[depth].slot_N.tolist()):
        first = slots.index(max(s for s in starts if s <= slots[key]))
        for head in range(4):
            seen_k = [keys[u, head // 2] for u in range(first, key + 1)]
            seen_v = [values[u, head // 2] for u in range(first, key + 1)]
            seen_k += [k[row, head // 2] for k, _ in chain]
            seen_v += [v[row, head // 2] for _, v in chain]
            weight = (torch.stack(seen_k) @ q[row, head] / 6**0.5).softmax(0)
            torch.testing.assert_close(out[row, head], weight @ torch.stack(seen_v))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
def test_low_precision_keeps_its_dtype(dtype, tolerance):
    plan = make_plan([50, 30], 3)
    inputs = make_inputs(plan, 2, dtype=dtype)
    assert attend(plan, 2, inputs, "fast")[0].dtype == dtype
    assert_fast_matches_reference(plan, 2, inputs, tolerance=tolerance)
