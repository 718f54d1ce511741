"""The parallel plan and its attention: an exhaustive truth table for every implementation."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from fledge import create_peagle_mask_mod, peagle_draft
from fledge.methods.peagle.draft import parallel_attention, parallel_visible
from fledge.methods.peagle.plan import lay_out_parallel
from fledge.peagle_draft import _peagle_flex_attention, _PeagleDraftMixin
from fledge.rollout import plan as plan_module
from fledge.rollout.slots import Slots

CPU = torch.device("cpu")
block_mask_of = _PeagleDraftMixin.build_peagle_block_mask


def rule(query, key, document):
    """The rule of docs/semantics.md, P-EAGLE; elements are (anchor, depth), -1 is padding."""
    (qa, qd), (ka, kd) = query, key
    same_document = document(qa) == document(ka) and document(qa) != -1
    return same_document and ((kd == 0 and ka <= qa) or (ka == qa and kd <= qd))


def test_truth_table_of_the_mask_exhaustively():
    """Every pair of (anchor, depth) over a row of documents of 2, 3 and 1 tokens and 2 of padding:
    own rollout, earlier anchors, other documents, padding, deeper depths, anchors out of range."""
    lengths, width = [2, 3, 1], 8
    documents = [0, 0, 1, 1, 1, 2, -1, -1]
    elements = [(a, d) for a in range(-1, width + 1) for d in range(4)]
    anchor, depth = torch.tensor(elements).T
    expected = torch.tensor(
        [
            [rule(q, k, lambda a: documents[a] if 0 <= a < width else -1) for k in elements]
            for q in elements
        ]
    )
    index = torch.arange(len(elements))
    for given_lengths in (lengths, torch.tensor(lengths), torch.tensor([lengths])):
        mask_mod = create_peagle_mask_mod(anchor, depth, given_lengths, width)
        actual = mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index[None])
        assert torch.equal(actual, expected)
    assert 0 < expected.sum() < expected.numel()


def test_mask_errors_name_the_field():
    anchor = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="lengths"):
        create_peagle_mask_mod(anchor, anchor, [2, 3], 4)
    with pytest.raises(ValueError, match="depth"):
        create_peagle_mask_mod(anchor, anchor[:1], [2], 2)


# --- plans -------------------------------------------------------------------------------------


def make_slots(lengths, supervised=None):
    size = sum(lengths)
    end = np.repeat(np.cumsum(lengths), lengths)
    start = np.repeat(np.cumsum(lengths) - lengths, lengths)
    index = np.arange(size)
    on = np.ones(size, dtype=bool)
    target = on if supervised is None else np.array(supervised, dtype=bool)
    return Slots(start, end, on, target, end - index, index - start)


def make_plan(lengths, deepest, *, num_depths, partitions=1, supervised=None):
    slots = make_slots(lengths, supervised)
    return lay_out_parallel(
        slots, np.array(deepest), num_depths=num_depths, partitions=partitions, device=CPU
    )


def all_draws(lengths, num_depths):
    """Every nested draw: for each anchor, any depth that stays inside its document."""
    reach = [min(num_depths, n - a) for n in lengths for a in range(n)]
    return itertools.product(*(range(n) for n in reach))


def segment_elements(plan, segment, rows):
    """The (slot, depth) of each row of a segment, depth-0 rows first."""
    slots = plan.slot_T[rows.slot_N].tolist()
    depths = [0] * (len(slots) - sum(segment.counts))
    for depth, count in enumerate(segment.counts, start=1):
        depths += [depth] * count
    return list(zip(slots, depths, strict=True))


DRAWS = st.lists(st.integers(1, 7), min_size=1, max_size=4).flatmap(
    lambda lengths: st.tuples(
        st.just(lengths),
        st.tuples(*(st.integers(0, min(4, n - a) - 1) for n in lengths for a in range(n))),
    )
)


@settings(max_examples=150, deadline=None)
@given(draw=DRAWS, partitions=st.integers(1, 9))
def test_segments_contain_every_element_once_and_in_place(draw, partitions):
    lengths, deepest = draw
    plan = make_plan(lengths, deepest, num_depths=4, partitions=partitions)
    assert 1 <= len(plan.segments) <= partitions
    expected = [(a, d) for a, last in enumerate(deepest) for d in range(last + 1)]
    elements, begin = [], 0
    for segment in plan.segments:
        assert segment.begin == begin < segment.end
        begin = segment.end
        every = segment_elements(plan, segment, segment.every)
        asking = segment_elements(plan, segment, segment.asking)
        assert sorted(every) == sorted(asking)  # all slots are supervised here
        elements += asking
        anchors = plan.slot_T[segment.begin + segment.anchor_N].tolist()
        assert [a for a, d in asking if d == 0] == anchors
        for a, d in asking:
            home_slot = min(a + (d > 0), sum(lengths) - 1)
            assert segment.begin <= home_slot < segment.end
        chains = [[a for a, d in asking if d == depth] for depth in range(1, 4)]
        assert all(deep == shallow[: len(deep)] for shallow, deep in itertools.pairwise(chains))
        places = [a - max(s for s in np.cumsum([0, *lengths]) if s <= a) for a, _ in every]
        chain = slice(segment.end - segment.begin, None)
        assert segment.chain_position_M.tolist() == [
            place + d for place, (_, d) in zip(places[chain], every[chain], strict=True)
        ]
    assert begin == sum(lengths)
    assert sorted(elements) == sorted(expected)
    in_order = plan.in_order(torch.arange(len(elements)))
    slots = torch.cat([plan.slot_T[rows.slot_N] for rows in plan.depths]).tolist()
    depths = [k for k, rows in enumerate(plan.depths) for _ in range(len(rows))]
    assert [elements[i] for i in in_order] == list(zip(slots, depths, strict=True))


def test_the_example_of_the_module_docstring():
    plan = make_plan([6], [0, 2, 1, 0, 0, 0], num_depths=3, partitions=1)
    assert plan.segments[0].counts == (2, 1)
    uneven = make_plan([6], [0, 2, 1, 0, 0, 0], num_depths=3, partitions=2)
    first, second = uneven.segments
    assert (first.begin, first.end, second.end) == (0, 3, 6)
    assert segment_elements(uneven, first, first.every) == [(0, 0), (1, 0), (2, 0), (1, 1), (1, 2)]
    assert segment_elements(uneven, second, second.every) == [(3, 0), (4, 0), (5, 0), (2, 1)]


def test_slots_that_are_never_read_are_not_on_the_key_axis():
    """Prompt slots are keys only; slots after the last anchor are dropped."""
    plan = make_plan(
        [8], [0, 0, 1, 0, 0, 0, 0, 0], num_depths=2, supervised=[0, 0, 0, 1, 0, 0, 0, 0]
    )
    (segment,) = plan.segments
    assert (segment.begin, segment.end, segment.counts) == (0, 4, (1,))
    assert segment_elements(plan, segment, segment.every) == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
        (2, 1),
    ]
    assert segment_elements(plan, segment, segment.asking) == [(2, 0), (3, 0), (2, 1)]
    assert len(plan.head) == 2
    assert plan.step_valid_K.tolist() == [1, 0]  # the rollout of slot 2 is unsupervised at depth 0


# --- attention ---------------------------------------------------------------------------------


def make_inputs(plan, segment, rows, *, heads=4, groups=2, channels=6, dtype=torch.float64, seed=1):
    g = torch.Generator().manual_seed(seed)
    chain = sum(segment.counts)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=dtype).requires_grad_()

    q = random(len(rows), heads, channels)
    prefix = (random(segment.end, groups, channels), random(segment.end, groups, channels))
    return q, prefix, (random(chain, groups, channels), random(chain, groups, channels))


def weighted_gradients(out, inputs):
    """Returns (output, gradients of all inputs) under a fixed random weighting of the output."""
    q, prefix, chain = inputs
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    return out.detach(), torch.autograd.grad((out * weight).sum(), [q, *prefix, *chain])


def assert_same(first, second, tolerance=1e-12):
    torch.testing.assert_close(first[0], second[0], rtol=tolerance, atol=tolerance)
    for got, want in zip(first[1], second[1], strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def brute_force(inputs, queries, keys, document):
    """One query at a time, over a list of the keys that are visible by the rule."""
    q, prefix, chain = inputs
    all_keys, all_values = (torch.cat(pair) for pair in zip(prefix, chain, strict=True))
    rows = []
    for x, query in enumerate(queries):
        visible = [i for i, key in enumerate(keys) if rule(query, key, document)]
        for head in range(q.shape[1]):
            group = head * all_keys.shape[1] // q.shape[1]
            weight = (all_keys[visible, group] @ q[x, head] / q.shape[-1] ** 0.5).softmax(0)
            rows.append(weight @ all_values[visible, group])
    return torch.stack(rows).view(q.shape)


def flex(inputs, queries, keys, lengths):
    """Attend over all elements in one flat sequence under the flex mask and select the queries."""
    q, prefix, chain = inputs
    anchor, depth = torch.tensor(keys).T
    mask = block_mask_of(anchor, depth, lengths, sum(lengths))
    indices = [keys.index(query) for query in queries]
    scattered = q.new_zeros(len(keys), *q.shape[1:]).index_copy(0, torch.tensor(indices), q)

    def by_head(x):
        return x.transpose(0, 1)[None]

    keys_X, values_X = (torch.cat(pair) for pair in zip(prefix, chain, strict=True))
    out = _peagle_flex_attention(
        by_head(scattered), by_head(keys_X), by_head(values_X), mask, q.shape[-1] ** -0.5
    )
    return out[0].transpose(0, 1)[indices]


def check_all_implementations(lengths, deepest, *, num_depths, seed=0):
    plan = make_plan(lengths, deepest, num_depths=num_depths)
    (segment,) = plan.segments
    documents = np.repeat(np.arange(len(lengths)), lengths)
    every = segment_elements(plan, segment, segment.every)
    for rows in (segment.every, segment.asking):
        queries = segment_elements(plan, segment, rows)
        inputs = make_inputs(plan, segment, rows, seed=seed)
        visible = parallel_visible(rows, segment.counts, segment.end)
        expected = [[rule(q, k, lambda a: documents[a]) for k in every] for q in queries]
        assert visible.tolist() == expected
        definition = weighted_gradients(
            brute_force(inputs, queries, every, lambda a: documents[a]), inputs
        )
        for kind in ("fast", "reference"):
            out = parallel_attention(
                *inputs, rows, segment.counts, starts_K=segment.starts_K, kind=kind
            )
            assert_same(weighted_gradients(out, inputs), definition)
        assert_same(weighted_gradients(flex(inputs, queries, every, lengths), inputs), definition)


@pytest.mark.parametrize("lengths", [[3, 2], [1, 3], [4]])
def test_primitive_flex_and_brute_force_agree_on_every_draw(lengths):
    for deepest in all_draws(lengths, 3):
        check_all_implementations(lengths, deepest, num_depths=3)


@settings(max_examples=25, deadline=None)
@given(draw=DRAWS, limits=st.sampled_from([(1, 1), (3, 20), (256, 2**19)]), seed=st.integers(0, 99))
def test_implementations_agree_on_larger_draws_for_any_block_size(draw, limits, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "BLOCK_ROWS", limits[0])
        patch.setattr(plan_module, "BLOCK_SCORES", limits[1])
        check_all_implementations(*draw, num_depths=4, seed=seed)


# --- flex --------------------------------------------------------------------------------------


def flex_inputs(count=150, heads=2, channels=16):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, count, channels, generator=g)
    k, v = (torch.randn(1, 1, count, channels, generator=g) for _ in range(2))
    elements = [(a, d) for d in range(3) for a in range(count // 3)]
    anchor, depth = torch.tensor(elements).T
    lengths = [30, 11]  # 50 anchors, nine of them padding
    return q, k, v, block_mask_of(anchor, depth, lengths, 50)


def test_the_block_mask_works_with_torchs_flex_attention():
    q, k, v, mask = flex_inputs()
    expected = flex_attention(q, k, v, block_mask=mask, scale=0.3, enable_gqa=True)
    actual = _peagle_flex_attention(q, k, v, mask, 0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (actual[:, :, 41:50] == 0).all()  # padding attends to nothing


def test_out_of_memory_is_not_a_failed_compilation(monkeypatch):
    q, k, v, mask = flex_inputs()

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(peagle_draft, "_peagle_compile_supported", lambda *tensors: True)
    monkeypatch.setattr(peagle_draft, "_peagle_flex_attention_compiled", full)
    with pytest.raises(torch.OutOfMemoryError):
        _peagle_flex_attention(q, k, v, mask, 0.3)
    assert not peagle_draft._peagle_flex_attention_compile_failed
