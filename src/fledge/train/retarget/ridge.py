"""Corrects a linear map as little as the rows require: ridge regression in closed form.

A row (x, r) is an input of the map, and the amount by which its output should change there. The
change C [E, X] minimizes

    sum over rows of |C x - r|^2  +  penalty * sum over inputs j of g_j |C_j|^2,    C z = 0

where g_j = sum of x_j^2, so that the penalty does not depend on the scale of an input, and z are
inputs at which nothing may change. Only G = sum x x^T, R = sum r x^T and sum |r|^2 are kept, in
float64: they need the same memory for any number of rows, and those of two sets of rows add up to
those of their union.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PENALTIES = tuple(10.0**power for power in range(-14, 2))  # `solve` rejects those too small


@dataclass
class Moments:
    """The sums over rows that a fit needs; `add` includes more rows."""

    xx_XX: Tensor
    rx_EX: Tensor
    rr: Tensor  # []
    rows: Tensor  # [], their number

    @classmethod
    def like(cls, map_EX: Tensor) -> "Moments":
        """Sums over no rows, for a map of this shape and on its device."""
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
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Moments(*(a + b for a, b in pairs))

    def error(self, change_EX: Tensor) -> float:
        """The root mean square of C x - r, over rows and outputs."""
        reduction = (change_EX @ self.xx_XX - 2 * self.rx_EX) * change_EX
        outputs = self.rows.clamp_min(1) * len(self.rx_EX)
        return float(((reduction.sum() + self.rr).clamp_min(0) / outputs).sqrt())

    def solve(self, penalty: float, kept_MX: Tensor | None = None) -> Tensor | None:
        """The change [E, X]; None if it is numerically underdetermined by the rows."""
        power_X = self.xx_XX.diagonal()
        # for inputs that are always zero
        floor = 1e-12 * power_X.mean().clamp_min(torch.finfo(torch.float64).tiny)
        factor_XX, failed = torch.linalg.cholesky_ex(
            self.xx_XX + torch.diag(penalty * power_X.clamp_min(float(floor)))
        )
        if bool(failed):
            return None
        change_EX: Tensor = torch.cholesky_solve(self.rx_EX.t(), factor_XX).t()
        if kept_MX is None:
            return change_EX
        z_MX = kept_MX.double()
        solved_MX = torch.cholesky_solve(z_MX.t(), factor_XX).t()
        # Lagrange multipliers that cancel, at each z, the change of the unconstrained solution.
        multiplier_ME = torch.linalg.solve(z_MX @ solved_MX.t(), z_MX @ change_EX.t())
        change_EX -= multiplier_ME.t() @ solved_MX
        return change_EX


@dataclass(frozen=True)
class Fitted:
    """The result of a fit. Errors are on the rows that chose the penalty, before fitting them."""

    change_EX: Tensor
    penalty: float | None  # None: no penalty improved on leaving the map unchanged
    error: float
    error_before: float  # without any change


def fit_change(fitted: Moments, judged: Moments, kept_MX: Tensor | None = None) -> Fitted:
    """Fit with every penalty, choose the one that is best on the `judged` rows, then refit with it
    on all rows. The change is zero at the inputs `kept_MX`."""
    zero_EX = torch.zeros_like(fitted.rx_EX)
    before = judged.error(zero_EX)
    best: tuple[float, float | None] = (before, None)
    for penalty in PENALTIES:
        change_EX = fitted.solve(penalty, kept_MX)
        if change_EX is not None:
            best = min(best, (judged.error(change_EX), penalty), key=lambda pair: pair[0])
    error, chosen = best
    change = None if chosen is None else (fitted + judged).solve(chosen, kept_MX)
    if change is None:
        return Fitted(zero_EX, None, before, before)
    return Fitted(change, chosen, error, before)
