"""The best tokens of every element, from the sweep over the vocabulary (`head_loss.py`): what
heads that choose among candidates are trained on. The gradients of their logits, and of the sum
over the whole vocabulary, take no second sweep.

Shapes as there; C candidates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.head import CHUNK_SCORES
from fledge.core.products import matmul
from fledge.methods.losses.base import SMALLEST
from fledge.rollout.plan import HeadElements


@dataclass(frozen=True)
class TopTokens:
    """Which tokens of every element are wanted."""

    count: int
    with_label: bool = False  # put the label in place of the last one if it is not among them
    normalizer: bool = False  # also the log of the sum over the whole vocabulary
    target: bool = False  # also the target's log-probabilities


@dataclass(frozen=True)
class Candidates:
    """The best C tokens of every element, likeliest first. Gradients flow through the draft's
    numbers into the states."""

    id_NC: Tensor  # as draft ids
    logit_NC: Tensor
    label_N: Tensor  # what the element is trained to predict, as a draft id
    normalizer_N: Tensor | None
    # no gradient; a float32 probability of 0 counts as the smallest one
    target_NC: Tensor | None
    target_label_N: Tensor | None


class BestTokens:
    """The best tokens of all elements, filled chunk by chunk."""

    def __init__(
        self, top: TopTokens, hidden_PE: Tensor, elements: HeadElements, *, with_grad: bool
    ) -> None:
        self.top, self.elements, wide = (
            top,
            elements,
            torch.promote_types(hidden_PE.dtype, torch.float32),
        )
        shape = (len(elements), top.count)
        self.label_N = torch.zeros_like(elements.depth_N)
        self.id_NC = self.label_N.new_zeros(shape)
        self.logit_NC = hidden_PE.new_zeros(shape, dtype=wide)
        self.normalizer_N = self.logit_NC.new_zeros(shape[0]) if top.normalizer else None
        self.target_NC = self.logit_NC.new_zeros(shape) if top.target else None
        self.target_label_N = self.logit_NC.new_zeros(shape[0]) if top.target else None
        # the mean row of the head under the draft's distribution: the normalizer's gradient
        self.mean_NE: Tensor | None = None
        if top.normalizer and with_grad:
            self.mean_NE = hidden_PE.new_zeros(shape[0], hidden_PE.shape[1])

    def take(
        self,
        part: slice,
        logits_JW: Tensor,
        head_WE: Tensor,
        label_J: Tensor,
        probs_JW: Tensor | None,
    ) -> None:
        label_J1 = label_J[:, None]
        id_JC = logits_JW.topk(self.top.count, dim=-1).indices
        if self.top.with_label:
            missing_J = (id_JC != label_J1).all(-1)
            id_JC[:, -1] = torch.where(missing_J, label_J, id_JC[:, -1])
        self.id_NC[part], self.label_N[part] = id_JC, label_J
        self.logit_NC[part] = logits_JW.gather(1, id_JC).to(self.logit_NC.dtype)
        if self.normalizer_N is not None:
            wide_JW = logits_JW.to(self.logit_NC.dtype)
            lse_J = self.normalizer_N[part] = wide_JW.logsumexp(-1)
            if self.mean_NE is not None:
                q_JW = (wide_JW - lse_J[:, None]).exp().to(head_WE.dtype)
                self.mean_NE[part] = matmul(q_JW, head_WE)
        if self.target_NC is not None and self.target_label_N is not None:
            assert probs_JW is not None
            probs_JW = probs_JW.clamp_min(SMALLEST)
            self.target_NC[part] = probs_JW.gather(1, id_JC).log()
            self.target_label_N[part] = probs_JW.gather(1, label_J1)[:, 0].log()

    def results(self) -> tuple[Tensor | None, ...]:
        """The fields of `Candidates`."""
        numbers = (self.id_NC, self.logit_NC, self.label_N, self.normalizer_N)
        return *numbers, self.target_NC, self.target_label_N

    def add_gradient(
        self,
        into_PE: Tensor,
        head_WE: Tensor,
        dlogit_NC: Tensor,
        dnormalizer_N: Tensor | None,
    ) -> None:
        """Add the gradient of the states that flows through the candidates' numbers."""
        rows = max(1, CHUNK_SCORES // (8 * self.top.count * head_WE.shape[1]))
        for begin in range(0, len(self.id_NC), rows):
            part = slice(begin, begin + rows)
            rows_JCE = F.embedding(self.id_NC[part], head_WE)
            grad_JE = torch.einsum("jc,jce->je", dlogit_NC[part].to(head_WE.dtype), rows_JCE)
            if self.mean_NE is not None and dnormalizer_N is not None:
                grad_JE += dnormalizer_N[part, None].to(grad_JE.dtype) * self.mean_NE[part]
            into_PE.index_add_(0, self.elements.element_N[part], grad_JE)
