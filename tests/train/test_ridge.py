"""The closed form is penalized least squares, streamed or not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fledge.training.refit import PENALTIES, Moments, fit_change


def problem(seed, rows, inputs, outputs):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return draw(rows, inputs) * draw(inputs).exp(), draw(rows, outputs)


def moments(x_NX, r_NE, pieces=1):
    sums = Moments.like(torch.empty(r_NE.shape[1], x_NX.shape[1]))
    for x, r in zip(x_NX.tensor_split(pieces), r_NE.tensor_split(pieces), strict=True):
        sums.add(x, r)
    return sums


sizes = {
    "seed": st.integers(0, 10**6), "rows": st.integers(1, 23), "inputs": st.integers(1, 13),
    "outputs": st.integers(1, 5),
}  # fmt: skip


@given(**sizes, penalty=st.sampled_from([1e-6, 1e-3, 0.3, 10.0]), pieces=st.integers(1, 5))
def test_solve_is_least_squares_with_the_penalty_as_extra_rows(
    seed, rows, inputs, outputs, penalty, pieces
):
    """With fewer rows than inputs, with more, or with one; streamed or whole."""
    x_NX, r_NE = problem(seed, rows, inputs, outputs)
    weight_X = (penalty * x_NX.square().sum(0)).sqrt()
    stacked = (
        torch.cat([x_NX, torch.diag(weight_X)]),
        torch.cat([r_NE, torch.zeros(inputs, outputs)]),
    )
    [wanted_XE, *_] = torch.linalg.lstsq(*(part.double() for part in stacked))
    sums = moments(x_NX, r_NE, pieces)
    change_EX = sums.solve(penalty)
    torch.testing.assert_close(change_EX.t(), wanted_XE, rtol=1e-6, atol=1e-6)
    error = (x_NX @ change_EX.t() - r_NE).square().mean().sqrt()
    assert sums.error(change_EX) == pytest.approx(float(error), rel=1e-6, abs=1e-7)


def test_moments_of_parts_add_up_to_those_of_the_whole():
    x_NX, r_NE = problem(0, 30, 7, 3)
    whole, added = (
        moments(x_NX, r_NE),
        moments(x_NX[:11], r_NE[:11]) + moments(x_NX[11:], r_NE[11:]),
    )
    for actual, expected in zip(vars(added).values(), vars(whole).values(), strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_penalty_is_chosen_on_held_out_rows():
    """The smallest one for an exactly linear relation; for pure noise a large one, or no change."""
    x_NX, noise_NE = problem(0, 200, 20, 3)
    map_EX, _ = problem(1, 3, 20, 1)
    exact_NE = x_NX @ map_EX.t()
    exact = fit_change(moments(x_NX[:150], exact_NE[:150]), moments(x_NX[150:], exact_NE[150:]))
    assert exact.penalty == PENALTIES[0]
    torch.testing.assert_close(exact.change_EX, map_EX, rtol=1e-6, atol=1e-6)
    assert exact.error < 1e-6 * exact.error_before
    noisy = fit_change(moments(x_NX[:25], noise_NE[:25]), moments(x_NX[150:], noise_NE[150:]))
    assert noisy.penalty is None or noisy.penalty >= 1.0
    assert noisy.error <= noisy.error_before


def test_inputs_that_are_always_zero_keep_their_weights():
    x_NX, r_NE = problem(0, 30, 6, 2)
    x_NX[:, 2] = 0.0
    change_EX = moments(x_NX, r_NE).solve(1e-6)
    assert bool(change_EX.isfinite().all())
    assert float(change_EX[:, 2].abs().max()) == 0.0
    assert moments(torch.zeros(4, 3), torch.zeros(4, 2)).solve(1e-6) is None
