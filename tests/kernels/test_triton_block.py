"""The block attention kernels against the definition, on a GPU or interpreted."""

import pytest
import torch

import interpreted_triton  # before the kernels
from fledge.methods.block.attention import Sight, fused_blocks, reference_blocks
from fledge.methods.block.plan import BlockRows
from kernels.compare import HALF_DTYPES, assert_close, assert_error_at_most_twice, exact
from kernels.test_block_attention import KEYS, SIGHTS, make_inputs, make_rows, results

DEVICE = interpreted_triton.DEVICE


def check(inputs, rows, sight, tolerance=1e-5):
    both = (results(function, inputs, rows, sight) for function in (fused_blocks, reference_blocks))
    assert_close(*both, tolerance)


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_fused_matches_reference(sight):
    for size in (1, 7):
        rows = make_rows(size, DEVICE)
        check(make_inputs(rows, heads=2, groups=1, dtype=torch.float32), rows, sight)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("sight", [Sight(), Sight(causal=True, window=6)], ids=str)
def test_16_bit_error_is_at_most_twice_that_of_the_reference(dtype, sight):
    rows = make_rows(4, DEVICE)
    inputs = make_inputs(rows, heads=2, groups=1, channels=64, dtype=dtype)
    fused, reference = (results(f, inputs, rows, sight) for f in (fused_blocks, reference_blocks))
    truth = results(reference_blocks, exact(inputs), rows, sight)
    assert_error_at_most_twice(fused, reference, truth)


def test_strided_keys_and_no_blocks_at_all():
    """Keys and values lie side by side in one tensor, as a projection returns them."""
    rows = make_rows(4, DEVICE)
    q, k, v, keys, values = make_inputs(rows, dtype=torch.float32)
    joined = [torch.cat(pair, dim=-2).detach() for pair in ((k, v), (keys, values))]
    views = [part.requires_grad_() for x in joined for part in x.chunk(2, dim=-2)]
    actual = results(fused_blocks, [q, *views], rows, Sight())
    assert_close(actual, results(reference_blocks, [q, k, v, keys, values], rows, Sight()))
    no_rows = rows.part(0, 0)
    result = results(fused_blocks, make_inputs(no_rows, dtype=torch.float32), no_rows, Sight())
    assert result[0].numel() == 0
    assert all(bool((grad == 0).all()) for grad in result[1:])


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_padding_blocks_without_host_side_ends(sight):
    """As in a recorded step: many padding blocks on one key after the others, its own document."""
    real_rows = make_rows(4, DEVICE)
    padding = real_rows.slot_N.new_full((9,), KEYS)
    ends = (torch.cat([ends_N, padding]) for ends_N in (real_rows.slot_N, real_rows.first_N))
    rows = BlockRows(*ends, 4)
    inputs = make_inputs(rows, keys=KEYS + 7, heads=2, groups=1, dtype=torch.float32)
    check(inputs, rows, sight)
