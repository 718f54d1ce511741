"""Drafts that work with their target's own embedding and head: shared, never trained, and not in
their files."""

from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.layer import linear
from fledge.target.base import Eagle3TargetBackend


class BorrowingDraftModel(DraftModel):
    """A draft with an `fc`, whose embedding and head are set by `borrow_from`."""

    fc: nn.Linear
    typical_weight = "fc.weight"  # the head is not in the file

    def _borrow_later(self) -> None:
        """Add embedding and head without values, until the target's are set."""
        spec = self.spec
        with torch.device("meta"):
            self._attach_shared("embed_tokens", nn.Embedding(spec.vocab_size, spec.hidden_size))
            self._attach_shared("lm_head", linear(spec.hidden_size, spec.draft_vocab_size))

    def _attach_shared(self, name: str, table: nn.Module) -> None:
        """Set an attribute without registering it as a submodule: not trained, saved or cast."""
        table.requires_grad_(False)
        object.__setattr__(self, name, table)

    @property
    def whole(self) -> bool:
        """Whether the target's embedding and head are set."""
        return not any(t.weight.is_meta for t in (self.embed_tokens, self.lm_head))

    def check_whole(self) -> None:
        """Raise ValueError if the target's embedding and head are not set."""
        if not self.whole and self.device.type != "meta":
            raise ValueError(
                "embed_tokens: this draft works with its target's embedding and head: "
                "borrow_from(target) gives it both"
            )

    def borrow_from(self, target: Eagle3TargetBackend) -> None:
        self.copy_embeddings_from_target(target.get_input_embeddings())
        self.copy_head_from_target(SimpleNamespace(weight=target.info().head.weight_VD))

    def _set_weight(self, table: nn.Embedding | nn.Linear, weight: Tensor) -> None:
        """Use the target's weight; it is not copied if it is on the draft's device already."""
        table.weight = nn.Parameter(weight.detach().to(self.device), requires_grad=False)

    def freeze_embeddings(self) -> None:
        """Do nothing: the embeddings are never trained."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for table in (self.embed_tokens, self.lm_head):
            if not table.weight.is_meta:  # move it with the draft, but keep the target's dtype
                table.to(self.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def embed(self, token: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., E] the embeddings of tokens in `dtype`."""
        self.check_whole()
        return F.embedding(token, self.embed_tokens.weight).to(dtype)
