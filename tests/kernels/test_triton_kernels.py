"""The rollout attention GPU kernels against the dense definition.

Without a GPU they are interpreted, so sizes are tiny. They cover what a tile can contain: documents
that share a tile or fill several, rows of one document in several tiles, padded head dims.
"""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import interpreted_triton  # noqa: F401  (before the kernels)
from fledge.kernels.gate import GRANULE, TILES_FP32, Tile
from fledge.rollout import attention as blocked
from fledge.rollout.attention import reference_attention, rollout_attention
from fledge.rollout.attention_triton import Chain, Job, fused_attention
from fledge.rollout.plan import QueryRows
from kernels import test_attention
from kernels.compare import (
    DEVICE,
    HALF_DTYPES,
    assert_close,
    assert_equal,
    assert_error_at_most_twice,
    exact,
)

pytestmark = pytest.mark.slow

make_plan = partial(test_attention.make_plan, device=DEVICE)


def make_inputs(plan, depth, *, heads, groups, channels, dtype=torch.float32, seed=1):
    """q, k, v and the chain's keys and values; shallower depths of the chain have more rows."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(plan.counts[depth], heads, channels)] + [(len(plan.slot_T), groups, channels)] * 2
    shapes += [(plan.counts[k], groups, channels) for k in range(1, depth + 1) for _ in range(2)]
    return [torch.randn(*shape, generator=g).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def results(function, rows, inputs):
    """The output, and the gradients of all inputs under a fixed random weighting of it."""
    q, k, v, *chain = inputs
    if function is reference_attention:
        chain = [x[: len(rows)] for x in chain]
    out = function(q, k, v, rows, list(zip(chain[::2], chain[1::2], strict=True)))
    g = torch.Generator().manual_seed(7)
    weight = torch.randn(out.shape, generator=g).to(DEVICE, out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def assert_fused_matches_reference(rows, inputs, tolerance=1e-5):
    both = (results(function, rows, inputs) for function in (fused_attention, reference_attention))
    assert_close(*both, tolerance)


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (3, 1), (8, 2)])
@pytest.mark.parametrize("depth", [0, 1, 6])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 12, 3], [101, 41]])
def test_fused_matches_reference(lengths, depth, heads, groups):
    plan = make_plan(lengths, 7)
    inputs = make_inputs(plan, depth, heads=heads, groups=groups, channels=16)
    assert_fused_matches_reference(plan.depths[depth], inputs)


@pytest.mark.parametrize("channels", [16, 24, 64, 96, 128, 256])
def test_head_dims(channels):
    plan = make_plan([30, 9], 3)
    inputs = make_inputs(plan, 2, heads=3, groups=1, channels=channels)
    assert_fused_matches_reference(plan.depths[2], inputs)


TILES = st.sampled_from([Tile(16, 32, 4, 1), Tile(64, 32, 4, 1), Tile(16, 64, 4, 1)])


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    depth=st.integers(0, 3),
    supervised=st.sampled_from([0.0, 0.2, 1.1]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    tile=TILES,
    seed=st.integers(0, 1000),
)
def test_fused_matches_reference_for_any_documents_rows_and_tiles(
    lengths, depth, supervised, heads, tile, seed
):
    plan = make_plan(lengths, 4, seed=seed, supervised=supervised)
    inputs = make_inputs(plan, depth, heads=heads[0], groups=heads[1], channels=16, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TILES_FP32, 64, tile)
        assert_fused_matches_reference(plan.depths[depth], inputs)


def test_row_bounds():
    """Rows with slot < key, first < key and first <= key, for every GRANULE-th key."""
    plan = make_plan([1, 31, 32, 70, 40], 3, supervised=1.1)
    rows = plan.depths[1]
    q, k, v, *chain = make_inputs(plan, 1, heads=2, groups=1, channels=16)
    bounds = Job(q, k, v, rows, Chain.of(chain))._row_bounds()
    key = GRANULE * torch.arange(bounds.shape[1], device=DEVICE)[:, None]
    assert key[-1] >= len(plan.slot_T)
    expected = [rows.slot_N < key, rows.first_N < key, rows.first_N <= key]
    assert torch.equal(bounds.long(), torch.stack([selected.sum(1) for selected in expected]))


def test_keys_without_rows_get_no_gradient():
    """The rows of a depth may skip whole documents, whose keys are on the key axis all the same."""
    plan = make_plan([40, 40, 40], 2, supervised=1.1)
    rows = plan.depths[0]
    middle = int(rows.first_N.unique()[1])
    keep = rows.first_N != middle
    slot_N = rows.slot_N[keep]
    few = QueryRows(slot_N, rows.first_N[keep], torch.argsort(slot_N))
    q, k, v = make_inputs(plan, 0, heads=2, groups=1, channels=16)
    inputs = [q[keep].detach().requires_grad_(), k, v]
    assert_fused_matches_reference(few, inputs)
    assert not results(fused_attention, few, inputs)[2][middle : 2 * middle].any()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("heads", "groups", "channels"), [(9, 3, 64), (4, 1, 128)])
def test_16_bit_error_is_at_most_twice_that_of_the_reference(dtype, heads, groups, channels):
    plan = make_plan([70, 33], 4)
    inputs = make_inputs(plan, 3, heads=heads, groups=groups, channels=channels, dtype=dtype)
    rows = plan.depths[3]
    fused, reference = (results(f, rows, inputs) for f in (fused_attention, reference_attention))
    assert_error_at_most_twice(fused, reference, results(reference_attention, rows, exact(inputs)))


def strided(x):
    """The same values, strided in memory like one part of a fused projection."""
    rows, heads, channels = x.shape
    wide = x.new_empty(rows, 2 * heads + 1, channels)
    wide[:, heads : 2 * heads] = x
    return wide[:, heads : 2 * heads]


def test_strided_inputs():
    plan = make_plan([40, 9], 4)
    inputs = make_inputs(plan, 3, heads=4, groups=2, channels=16)

    def fused_on_views(q, k, v, rows, chain):
        pairs = [(keys, strided(values)) for keys, values in chain]
        return fused_attention(strided(q), k, strided(v), rows, pairs)

    actual = results(fused_on_views, plan.depths[3], inputs)
    expected = results(fused_attention, plan.depths[3], inputs)
    assert_equal(actual, expected)


def test_dispatch_uses_the_kernels(monkeypatch):
    monkeypatch.setattr(blocked, "triton_runs", lambda x, *, what, unsupported: not unsupported)
    plan = make_plan([40, 9], 3)
    rows, (q, k, v, *chain) = plan.depths[2], make_inputs(plan, 2, heads=2, groups=1, channels=16)
    pairs = list(zip(chain[::2], chain[1::2], strict=True))

    def path(*tensors, **kwargs):
        return rollout_attention(*tensors, rows, **kwargs).grad_fn.name()

    assert path(q, k, v, chain=pairs) == "_FusedAttentionBackward"
    assert path(q, k, v, chain=pairs, kind="reference") != "_FusedAttentionBackward"
    assert path(q.double(), k.double(), v.double()) == "_BlockedAttentionBackward"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_kernels_are_compiled_once_for_all_sizes():
    from fledge.rollout.attention_kernels import attend, query_grad
    from fledge.rollout.key_grad_kernels import chain_grad, key_grad, row_bounds

    def compiled():
        kernels = (attend, query_grad, row_bounds, key_grad, chain_grad)
        caches = [kernel.device_caches for kernel in kernels]
        return [len(cache[torch.cuda.current_device()][0]) for cache in caches]

    counts = []
    for lengths in ([33], [1], [16, 16], [100, 28, 7]):
        plan = make_plan(lengths, 7, supervised=1.1)
        for depth in (1, 0, 2, 6):
            results(
                fused_attention,
                plan.depths[depth],
                make_inputs(plan, depth, heads=4, groups=2, channels=48, dtype=torch.bfloat16),
            )
        counts.append(compiled())
    assert counts[0] == counts[-1]
