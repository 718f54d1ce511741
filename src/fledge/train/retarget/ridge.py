"""A linear map corrected as little as the rows ask for: ridge regression in closed form.

Rows (x, r) say what the map reads, and by how much its output should change there. The change C
[E, X] minimizes

    sum over rows of |C x - r|^2  +  penalty * sum over inputs j of g_j |C_j|^2,    C z = 0

where g_j = sum of x_j^2, so that the penalty does not depend on the unit of an input, and z are
inputs at which nothing may change. Of the rows only G = sum x x^T, R = sum r x^T and sum |r|^2 are
kept, in float64: they take the same memory for any number of rows, and those of two sets of rows
add up to those of both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PENALTIES = tuple(10.0**power for power in range(-14, 2))  # those too small are not solved


@dataclass
class Moments:
    """What is kept of rows; `add` counts more of them in."""

    xx_XX: Tensor
    rx_EX: Tensor
    rr: Tensor  # []
    rows: Tensor  # [], how many

    @classmethod
    def like(cls, map_EX: Tensor) -> "Moments":
        """Of no rows yet, for a map of this shape, where it lies."""
        outputs, inputs = map_EX.shape
        shapes = ((inputs, inputs), (outputs, inputs), (), ())
        return cls(*(map_EX.new_zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, x_NX: Tensor, r_NE: Tensor) -> None:
        x_NX, r_NE = x_NX.double(), r_NE.double()
        self.xx_XX.addmm_(x_NX.t(), x_NX)
        self.rx_EX.addmm_(r_NE.t(), x_NX)
        self.rr += r_NE.square().sum()
        self.rows += len(x_NX)

    def __add__(self, other: "Moments") -> "Moments":
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return Moments(*(a + b for a, b in both))

    def error(self, change_EX: Tensor) -> float:
        """The root of the mean of (C x - r)^2, over rows and outputs."""
        explained = (change_EX @ self.xx_XX - 2 * self.rx_EX) * change_EX
        outputs = self.rows.clamp_min(1) * len(self.rx_EX)
        return float(((explained.sum() + self.rr).clamp_min(0) / outputs).sqrt())

    def solve(self, penalty: float, kept_MX: Tensor | None = None) -> Tensor | None:
        """The change [E, X]; None: the rows leave it open, numerically."""
        own_X = self.xx_XX.diagonal()
        floor = 1e-12 * own_X.mean().clamp_min(torch.finfo(torch.float64).tiny)  # silent inputs
        factor_XX, failed = torch.linalg.cholesky_ex(
            self.xx_XX + torch.diag(penalty * own_X.clamp_min(float(floor)))
        )
        if bool(failed):
            return None
        change_EX: Tensor = torch.cholesky_solve(self.rx_EX.t(), factor_XX).t()
        if kept_MX is None:
            return change_EX
        z_MX = kept_MX.double()
        solved_MX = torch.cholesky_solve(z_MX.t(), factor_XX).t()
        # the multipliers that take back, at each z, what the rows alone would have changed there
        multiplier_ME = torch.linalg.solve(z_MX @ solved_MX.t(), z_MX @ change_EX.t())
        change_EX -= multiplier_ME.t() @ solved_MX
        return change_EX


@dataclass(frozen=True)
class Fitted:
    """A change, the penalty that it was found with, and its error on rows that it had not been
    fitted to when the penalty was chosen; and the error without any change."""

    change_EX: Tensor
    penalty: float | None  # None: no change is better than any
    error: float
    error_before: float


def fit_change(fitted: Moments, judged: Moments, kept_MX: Tensor | None = None) -> Fitted:
    """Fit under every penalty, take the one that is best on other rows, then fit it to all."""
    none_EX = torch.zeros_like(fitted.rx_EX)
    before = judged.error(none_EX)
    best: tuple[float, float | None] = (before, None)
    for penalty in PENALTIES:
        change_EX = fitted.solve(penalty, kept_MX)
        if change_EX is not None:
            best = min(best, (judged.error(change_EX), penalty), key=lambda pair: pair[0])
    error, chosen = best
    change = None if chosen is None else (fitted + judged).solve(chosen, kept_MX)
    if change is None:
        return Fitted(none_EX, None, before, before)
    return Fitted(change, chosen, error, before)
