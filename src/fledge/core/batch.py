"""A target's answer about one batch of rows: the contract between every backend and every trainer.

Elsewhere: how it is computed (`hf`, `runner`) and how supervision is derived from states (`head`).

One row of six tokens, `x0 x1` the prompt and `x2 .. x5` the answer (loss mask 0 0 1 1 1 1). The
target ran once over the row; `a_t` are its aux states and `h_t` its last hidden state at token t,
so `p(. | x<=t) = softmax(head(h_t))`. The batch holds ids, loss mask and supervision shifted left
by one with a zero tail, and everything else unshifted:

    slot t               0    1    2    3    4    5
    aux_hidden_states    a0   a1   a2   a3   a4   a5     unshifted
    attention_mask       1    1    1    1    1    1      unshifted
    input_ids            x1   x2   x3   x4   x5   0      shifted
    loss_mask            0    1    1    1    1    0      shifted
    last_hidden_states   h1   h2   h3   h4   h5   0      shifted (logits and target_probs alike)

So slot t at step k of a rollout reads token x[t+1+k], carries a_t (k = 0) or the draft's own state,
and predicts p(. | x<=t+1+k); it is supervised iff the loss mask of x[t+1+k] is set:

    slot t    step 0                      step 1                      step 2
    0         reads x1, prompt: no loss   reads x2, says p(.|x<=2)    reads x3, says p(.|x<=3)
    1         reads x2, says p(.|x<=2)    reads x3, says p(.|x<=3)    reads x4, says p(.|x<=4)
    2         reads x3, says p(.|x<=3)    reads x4, says p(.|x<=4)    reads x5, says p(.|x<=5)
    3         reads x4, says p(.|x<=4)    reads x5, says p(.|x<=5)    past the row: no loss
    4         reads x5, says p(.|x<=5)    past the row: no loss       past the row: no loss
    5         past the row: no loss       past the row: no loss       past the row: no loss

The mask is keyed on the token that is *read*: x2, the first answer token, is never a prediction
target, whereas the token after x5 is. Values at padding slots are meaningless and never enter the
loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from fledge.core.head import TargetHead, target_distribution, target_distribution_from_hidden
from fledge.core.rows import (
    TokenBatch,
    check_shape,
    check_tensor,
    check_tokens,
    count_remaining,
    shift_left,
)

Supervision = Literal["logits", "probs", "hidden"]
SUPERVISIONS: tuple[Supervision, ...] = ("logits", "probs", "hidden")


@dataclass(frozen=True, eq=False)
class Eagle3TargetBatch:
    """The target's answer about B rows of T tokens, with exactly one supervision encoding.

    The constructor checks shapes and dtypes, and its error names the offending field. Values are
    checked only where this needs no synchronization: `seq_lens` on the CPU must sum to the width.
    In packed batches `doc_remaining` may be omitted: it is derived from the other fields.
    """

    aux_hidden_states: Tensor  # [B, T, A * D], the outputs of A decoder layers, unshifted
    input_ids: Tensor  # [B, T], shifted
    attention_mask: Tensor  # [B, T], 1 at real tokens, unshifted
    loss_mask: Tensor  # [B, T], shifted
    logits: Tensor | None = None  # [B, T, V], shifted
    target_probs: Tensor | None = None  # [B, T, W] over the draft vocabulary, shifted
    position_mask: Tensor | None = None  # [B, T, 1], supervised, top token in draft vocabulary
    position_ids: Tensor | None = None  # [B, T], restart at 0 with each document, unshifted
    seq_lens: Tensor | None = None  # [B, max_docs], 0-padded; every row sums to T
    doc_remaining: Tensor | None = None  # [B, T], real tokens after the slot in its document
    last_hidden_states: Tensor | None = None  # [B, T, D], the head's input, shifted
    # [B, T, 1] bool, optional beside them: `position_mask`, of a target that remembers it
    covered: Tensor | None = None

    def __post_init__(self) -> None:
        check_tokens(
            *(self.input_ids, self.attention_mask, self.loss_mask),
            *(self.position_ids, self.seq_lens, self.doc_remaining),
        )
        if self.doc_remaining is None and self.seq_lens is not None:
            remaining = count_remaining(self.attention_mask, self.seq_lens)
            object.__setattr__(self, "doc_remaining", remaining)
        rows_BT = tuple(self.input_ids.shape)
        _check_states("aux_hidden_states", self.aux_hidden_states, rows_BT)
        self._check_one_encoding()
        for name in ("logits", "target_probs", "last_hidden_states"):
            states = getattr(self, name)
            if states is not None:
                _check_states(name, states, rows_BT)
        for name in ("position_mask", "covered"):
            if (mask := getattr(self, name)) is not None:
                check_shape(name, mask, (*rows_BT, 1))
        if self.last_hidden_states is not None:
            hidden, aux = self.last_hidden_states.shape[-1], self.aux_hidden_states.shape[-1]
            if aux == 0 or aux % hidden:
                raise ValueError(
                    f"aux_hidden_states is {aux} wide, which is not a whole number of layers of "
                    f"last_hidden_states' {hidden}"
                )

    @classmethod
    def about(
        cls,
        rows: TokenBatch,
        *,
        aux_hidden_states: Tensor,
        shifted: bool = False,
        **supervision: Tensor | None,
    ) -> "Eagle3TargetBatch":
        """Build the answer about `rows` on the states' device; only here is a batch shifted.

        Supervision is passed as the target computes it (slot t describes token t) and is shifted
        left here together with ids and loss mask. `shifted` means that it already is, as in cached
        or received answers.
        """
        rows = rows.to(aux_hidden_states.device)
        if not shifted:
            supervision = {n: t if t is None else shift_left(t) for n, t in supervision.items()}
        return cls(
            aux_hidden_states=aux_hidden_states,
            input_ids=shift_left(rows.input_ids),
            attention_mask=rows.attention_mask,
            loss_mask=shift_left(rows.loss_mask),
            position_ids=rows.position_ids,
            seq_lens=rows.seq_lens,
            doc_remaining=rows.doc_remaining,
            **supervision,
        )

    def _check_one_encoding(self) -> None:
        if (self.target_probs is None) != (self.position_mask is None):
            raise ValueError("target_probs and position_mask belong together: give both or neither")
        encodings = ("logits", "target_probs", "last_hidden_states")
        given = [name for name in encodings if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "exactly one supervision encoding is needed, one of logits, target_probs (with "
                f"position_mask), last_hidden_states; got {' and '.join(given) or 'none'}"
            )

    @property
    def supervision(self) -> Supervision:
        """The encoding that this batch carries."""
        if self.logits is not None:
            return "logits"
        return "probs" if self.target_probs is not None else "hidden"

    def to_trainer_inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of the trainer modules; packing keys only when the batch has them."""
        renamed = {name: f"target_{name}" for name in ("logits", "last_hidden_states")}
        return {renamed.get(name, name): tensor for name, tensor in self.tensors()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The fields that are present, by name."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                yield field.name, tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> "Eagle3TargetBatch":
        """Move every field; `dtype` recasts states and logits, never probabilities (fp32)."""
        cast = {"aux_hidden_states", "logits", "last_hidden_states"} if dtype is not None else set()
        moved = {
            name: tensor.to(
                device, dtype=dtype if name in cast else None, non_blocking=non_blocking
            )
            for name, tensor in self.tensors()
        }
        return replace(self, **moved)

    def pin_memory(self) -> "Eagle3TargetBatch":
        """A copy in pinned memory, so that `to(device, non_blocking=True)` is asynchronous."""
        return replace(self, **{name: tensor.pin_memory() for name, tensor in self.tensors()})

    @torch.no_grad()
    def with_logits(self, head: TargetHead, *, chunk_rows: int = 1024) -> "Eagle3TargetBatch":
        """The same batch with full-vocabulary logits, computed from last hidden states."""
        if self.logits is not None:
            return self
        if self.last_hidden_states is None:
            raise ValueError(
                "logits cannot be derived from target_probs: a projection to the draft vocabulary "
                "does not go back; keep last_hidden_states"
            )
        hidden_ND = self.last_hidden_states.flatten(0, 1)
        logits_NV = hidden_ND.new_empty(
            (len(hidden_ND), head.weight_VD.shape[0]), dtype=head.weight_VD.dtype
        )
        for begin in range(0, len(hidden_ND), chunk_rows):
            rows = slice(begin, begin + chunk_rows)
            logits_NV[rows] = head.logits(hidden_ND[rows])
        logits_BTV = logits_NV.view(*self.input_ids.shape, -1)
        logits_BTV[:, -1] = 0.0  # zero in every encoding, even where the head has a bias
        return replace(self, logits=logits_BTV, last_hidden_states=None)

    @torch.no_grad()
    def with_probs(
        self,
        head: TargetHead | None,
        selected_token_ids: Tensor,
        selected_token_mask: Tensor,
        *,
        chunk_rows: int = 1024,
    ) -> "Eagle3TargetBatch":
        """The same batch with draft-vocabulary probabilities and `position_mask`.

        Only supervised positions are computed, `chunk_rows` at a time; the others stay 0 and are
        never read. `head` may be None when the batch carries logits.
        """
        supervised_BT, rows_BT = self.loss_mask.bool(), self.input_ids.shape
        probs_NW, covered_N = self.supervised_probs(
            head, selected_token_ids, selected_token_mask, chunk_rows=chunk_rows
        )
        probs_BTW = probs_NW.new_zeros((*rows_BT, len(selected_token_ids)))
        probs_BTW[supervised_BT] = probs_NW
        position_BT1 = torch.zeros((*rows_BT, 1), dtype=torch.bool, device=probs_BTW.device)
        position_BT1[supervised_BT] = covered_N[:, None]
        return replace(
            self, logits=None, last_hidden_states=None,
            target_probs=probs_BTW, position_mask=position_BT1,
        )  # fmt: skip

    @torch.no_grad()
    def supervised_probs(
        self,
        head: TargetHead | None,
        selected_token_ids: Tensor,
        selected_token_mask: Tensor,
        *,
        chunk_rows: int = 1024,
    ) -> tuple[Tensor, Tensor]:
        """`target_distribution` of the supervised slots alone, rows end to end: [N, W] and [N]."""
        supervised_BT = self.loss_mask.bool()
        vocabulary = (selected_token_ids, selected_token_mask)
        if self.target_probs is not None:
            raise ValueError("target_probs is already there, made for one draft vocabulary")
        if self.logits is not None:
            return target_distribution(self.logits[supervised_BT], *vocabulary)
        if head is None or self.last_hidden_states is None:
            raise ValueError("head is needed to turn last_hidden_states into probabilities")
        return target_distribution_from_hidden(
            self.last_hidden_states[supervised_BT], head, *vocabulary, chunk_rows=chunk_rows
        )


def _check_states(name: str, tensor: Tensor, rows_BT: tuple[int, ...]) -> None:
    check_tensor(name, tensor)
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
    if tensor.ndim != 3 or tuple(tensor.shape[:2]) != rows_BT:
        raise ValueError(
            f"{name} must be [{rows_BT[0]}, {rows_BT[1]}, width] like input_ids, got "
            f"{list(tensor.shape)}"
        )
