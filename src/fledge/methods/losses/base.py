"""The base of all losses: a definition, gradient rows, and optionally a kernel that computes both.

A new loss is a frozen dataclass in a file of its own and one line in `registry.py`. Its fields are
the settings that a recipe may give under `objective.loss`; its docstring is what recipes print.
Importing these files imports neither torch nor pydantic: recipes are read without the former, steps
run without the latter.

Shapes: N rows of one loss, J rows of a chunk, W draft vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST = 2.0**-126  # the smallest float32 that no device flushes to 0


def parameter(default: float, about: str, **bounds: float) -> Any:
    """A field of a loss: what recipes say about it, and its bounds as pydantic spells them (ge, gt,
    le, lt)."""
    return field(default=default, metadata={"about": about, "bounds": bounds})


class Loss(ABC):
    """One number per row, from the draft's logits and the target's probabilities."""

    kind: ClassVar[str]
    """Its name in recipes."""

    kernel: ClassVar[str | None] = None
    """Its name in `kernels.head_rows`; None if there is no kernel and `rows` also runs on GPUs."""

    needs_acceptance: ClassVar[bool] = False
    """Whether rows are weighted by the mean acceptance of all rows: see `weight`."""

    @abstractmethod
    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        """[N] losses in plain autograd: what `rows` and the kernel are tested against.

        A row's probabilities may sum to less than 1 (the rest is outside the draft vocabulary), and
        where one is 1 and the logits agree, loss and gradient are exactly 0, not NaN.
        """

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        """Losses [J] and their gradients with respect to the logits [J, W]; the logits may be
        overwritten.

        This default differentiates the definition, which must treat every row independently. A
        loss with a hand-written gradient is faster and needs less memory.
        """
        import torch

        assert not self.needs_acceptance, f"{self.kind}: a weighted loss must define rows()"
        with torch.enable_grad():
            logits_JW = logits_JW.detach().requires_grad_()
            loss_J = self.definition(logits_JW, probs_JW)
            (dlogits_JW,) = torch.autograd.grad(loss_J.sum(), logits_JW)
        return loss_J.detach(), dlogits_JW

    def weight(self, mean_acceptance: "Tensor") -> "Tensor":
        """The weight that `rows` is passed as `weight_J`, for losses that need acceptance. No
        gradient flows through it.

        The mean is taken over all micro-batches and ranks of an optimizer step, so that the
        gradient does not depend on how the step is split.
        """
        raise NotImplementedError


# --- acceptance ----------------------------------------------------------------------------------
# Acceptance: not a loss itself, but the quantity that the LK losses maximize.


def acceptance(logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
    """alpha = sum min(p, q): the probability that speculative sampling accepts a drafted token."""
    return probs_NW.minimum(logits_NW.softmax(dim=-1)).sum(-1)


def acceptance_rows(q_JW: "Tensor", probs_JW: "Tensor") -> "tuple[Tensor, Tensor]":
    """alpha [J] and its gradient with respect to the logits (half where p = q)."""
    alpha_J = probs_JW.minimum(q_JW).sum(-1)
    below_JW = 0.5 * ((q_JW < probs_JW).to(q_JW.dtype) + (q_JW <= probs_JW).to(q_JW.dtype))
    inner_J1 = (q_JW * below_JW).sum(-1, keepdim=True)
    return alpha_J, q_JW * (below_JW - inner_J1)
