"""What a loss is: its definition, its gradient rows, and optionally a kernel that computes both.

A new loss is a frozen dataclass in a file of its own and one line in `registry.py`. Its fields are
what a recipe may say under `objective.loss`. These files import neither torch nor pydantic when
loaded: recipes are read without the one, steps run without the other.

Shapes: N rows of one loss, J rows of a chunk, W draft vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


def parameter(default: float, about: str, **bounds: float) -> Any:
    """A field of a loss: what it means, and what pydantic's `Field` should hold it to (ge, le)."""
    return field(default=default, metadata={"about": about, "bounds": bounds})


class Loss(ABC):
    """One number a row, from the draft's logits and the target's probabilities."""

    kind: ClassVar[str]
    """Its name in recipes."""

    kernel: ClassVar[str | None] = None
    """Its name in `kernels.head_rows`; None: `rows` runs on a GPU too."""

    needs_acceptance: ClassVar[bool] = False
    """Rows are weighed by the mean acceptance of all rows: see `weight`."""

    @abstractmethod
    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        """[N] losses in plain autograd: what `rows` and the kernel are tested against."""

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        """Losses [J] and their gradients with respect to the logits [J, W], which are used up.

        Derived from the definition, which must treat every row by itself. A loss that writes its
        gradient out is faster and needs less memory.
        """
        import torch

        assert not self.needs_acceptance, f"{self.kind}: a weighed loss writes its rows itself"
        with torch.enable_grad():
            logits_JW = logits_JW.detach().requires_grad_()
            loss_J = self.definition(logits_JW, probs_JW)
            (dlogits_JW,) = torch.autograd.grad(loss_J.sum(), logits_JW)
        return loss_J.detach(), dlogits_JW

    def weight(self, mean_acceptance: "Tensor") -> "Tensor":
        """What `rows` is given as `weight_J`, where the loss needs acceptance; no gradient.

        The mean is taken over all micro-batches and ranks of an optimizer step, so that the
        gradient does not depend on how the step is cut.
        """
        raise NotImplementedError


def reference_loss(
    logits_NW: "Tensor", probs_NW: "Tensor", charged_N: "Tensor", loss: Loss
) -> "Tensor":
    """The loss of one depth: the mean over charged rows; 0 when there are none."""
    logits_NW, probs_NW = logits_NW[charged_N], probs_NW[charged_N].to(logits_NW.dtype)
    return loss.definition(logits_NW, probs_NW).sum() / max(len(logits_NW), 1)
