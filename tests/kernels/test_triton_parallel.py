"""The kernels on all depths at once against the dense definition: P-EAGLE.

This covers what EAGLE-3 never exercises: several rows per anchor, and keys that end with a segment.
"""

from itertools import accumulate

import pytest
import torch

import interpreted_triton  # noqa: F401  (before the kernels)
from fledge.methods.peagle import draft as parallel
from fledge.methods.peagle.draft import parallel_attention, reference_parallel
from fledge.methods.peagle.plan import plan_parallel
from fledge.rollout.attention_triton import fused_parallel
from fledge.rollout.plan import QueryRows
from kernels.compare import (
    DEVICE,
    HALF_DTYPES,
    assert_close,
    assert_error_at_most_twice,
    exact,
    random,
    results,
)
from kernels.test_attention import packed_masks

SLOTS = 50


def make_rows(counts):
    """All slots are queries at depth 0; rollout i begins at slot 3 * i of the only document."""
    chain = [3 * torch.arange(count) for count in counts]
    slot_X = torch.cat([torch.arange(SLOTS), *chain])
    return QueryRows(*(x.to(DEVICE) for x in (slot_X, slot_X * 0, torch.argsort(slot_X))))


def make_inputs(counts, *, queries=None, slots=SLOTS, heads=6, groups=2, channels=16, **options):
    chain = sum(counts)
    sizes = [(queries or slots + chain, heads), *[(slots, groups)] * 2, *[(chain, groups)] * 2]
    return [random(*size, channels, seed=i, **options) for i, size in enumerate(sizes)]


def run(function, inputs, counts):
    starts = [torch.tensor([0, *accumulate(counts)], device=DEVICE)]

    def attend(q, k, v, keys, values):
        more = starts if function is fused_parallel else []
        return function(q, (k, v), (keys, values), make_rows(counts), counts, *more)

    return results(attend, inputs)


@pytest.mark.parametrize("counts", [(), (0, 0), (1,), (16, 9, 9, 2, 0), (16,) * 10])
def test_fused_matches_reference(counts):
    inputs = make_inputs(counts)
    assert_close(run(fused_parallel, inputs, counts), run(reference_parallel, inputs, counts))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_16_bit_error_is_at_most_twice_that_of_the_reference(dtype):
    counts = (16, 9, 4)
    inputs = make_inputs(counts, channels=64, dtype=dtype)
    fused, reference = (run(f, inputs, counts) for f in (fused_parallel, reference_parallel))
    assert_error_at_most_twice(fused, reference, run(reference_parallel, exact(inputs), counts))


def test_scores_far_below_zero():
    """A missing key contributes nothing, not exp(0 - a very negative log-sum-exp)."""
    counts = (16, 4)
    q, *rest = (x.detach().abs() for x in make_inputs(counts))
    inputs = [x.requires_grad_() for x in (q * -100, *rest)]
    result = run(fused_parallel, inputs, counts)
    assert all(x.isfinite().all() for x in result)
    assert_close(result, run(reference_parallel, inputs, counts), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("partitions", "quantum"), [(1, 0), (3, 0), (1, 32)])
@pytest.mark.parametrize("lengths", [[70], [5, 1, 40, 3]])
def test_kernels_match_the_definition_on_real_plans(monkeypatch, lengths, partitions, quantum):
    masks = packed_masks(lengths, torch.ones(1, sum(lengths)))
    plan = plan_parallel(
        masks, num_depths=4, ratio=0.7, ratio_min=0.2, seed=1, partitions=partitions,
        quantum=quantum, device=torch.device(DEVICE),
    )  # fmt: skip
    monkeypatch.setattr(parallel, "kernel_runs", lambda *tensors: True)
    assert len(plan.segments) == partitions
    real_slots = sum(lengths) - len(lengths)  # the last slot of a document has no target

    def attend(segment, rows, kind):
        def run(q, k, v, keys, values):
            out = parallel_attention(
                q, (k, v), (keys, values), rows, segment.counts, starts_K=segment.starts_K,
                kind=kind,
            )  # fmt: skip
            assert (out.grad_fn.name() == "_FusedAttentionBackward") is (kind == "fast")
            # padding rows, all on one slot, attend to each other in the definition only
            return out * (rows.slot_N < real_slots)[:, None, None]

        return run

    for segment in plan.segments:
        for rows in (segment.every, segment.asking):
            inputs = make_inputs(segment.counts, queries=len(rows), slots=segment.end, heads=4)
            kinds = (attend(segment, rows, kind) for kind in ("fast", "reference"))
            assert_close(*(results(function, inputs) for function in kinds))
