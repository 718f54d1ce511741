"""The target behind a server: turns questions into messages, on one thread at a time.

Several questions may share a pass: their rows are padded on the right to the widest question, which
does not affect a causal target, and the answer is split again. Each question gets the answer it
would get alone, up to the rounding of a differently shaped pass.

Two packed rows of width 4 and 6, documents of 3 and of 2 + 3 tokens, padding shown as a dot:

    a b c .          a b c . . .     padding belongs to the row's last document, as elsewhere
    d e f g h .      d e f g h .
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend, check_token_ids
from fledge.target.cache.format import DTYPES
from fledge.target.finite_check import check_answer
from fledge.target.inprocess import InProcessTarget
from fledge.target.layers import longest_text
from fledge.target.packing import find_documents
from fledge.target.remote.protocol import WIRE_ENCODINGS, Question, TooLarge, encode_answer
from fledge.target.remote.server.admission import Limits
from fledge.target.remote.wire import Message, WireError, check_digest, unpack
from fledge.target.runner import RunnerEagle3TargetModel


class Target:
    """A backend that answers hidden states or, if it has nothing else, logits, which never leave
    the server; and the checks on what it is asked."""

    def __init__(self, backend: Eagle3TargetBackend, limits: Limits) -> None:
        if backend.supervision == "probs":
            raise ValueError("a server's target answers hidden states or logits, not probs")
        shows_hidden = backend.supervision == "hidden"
        self.encodings = [e for e in WIRE_ENCODINGS if shows_hidden or e != "hidden"]
        self.backend, self.info = backend, backend.describe()
        self._embedding_rows = len(backend.get_input_embeddings().weight)
        model: Any = self.info.module
        if isinstance(backend, RunnerEagle3TargetModel):
            model = backend.runner.model
        # unlimited if there is no config
        self._limits, self._context = limits, longest_text(getattr(model, "config", None))
        # Answers computed in this process are checked for NaN and infinity here, where that costs
        # next to nothing compared to the pass. Answers that another process computed were checked
        # there, and the client checks them again.
        self._computes = self.info.module is not None or isinstance(backend, InProcessTarget)

    def read(self, body: bytearray) -> Question:
        """Parse and check a question from the network; a ValueError says what is wrong with it."""
        tensors, metadata = unpack(body)
        check_digest(body)
        sizes = {"max_tokens": self._limits.max_tokens, "vocab_size": self.info.vocab_size}
        question = Question.read(tensors, metadata, **sizes)
        self._check(question)
        return question

    def _check(self, question: Question) -> None:
        """Refuse a question that would fail later, in a pass shared with other questions."""
        rows = question.rows
        self._check_lengths(rows)
        check_token_ids(rows.input_ids, self._embedding_rows)
        if not bool(rows.attention_mask.any()):
            raise WireError("attention_mask marks no token at all")
        if question.encoding not in self.encodings:
            raise WireError(f"this target answers {' or '.join(self.encodings)}, no hidden states")
        ids = question.vocabulary
        if ids is not None:
            inside = int(ids.min()) >= 0 and int(ids.max()) < self.info.vocab_size
            if not inside or len(set(ids.tolist())) != len(ids):
                raise WireError(
                    f"vocabulary must be distinct ids of 0 .. {self.info.vocab_size - 1}"
                )

    def _check_lengths(self, rows: TokenBatch) -> None:
        """Bound the cost of attention, which grows with the square of a row's length."""
        documents = find_documents(rows)
        what, longest = "a row", rows.shape[1]
        if documents is not None:
            what, longest = "a document", max(documents.lengths, default=0)
            if (count := len(documents.lengths)) > (limit := self._limits.max_documents):
                raise TooLarge(f"{count} documents in one request, {limit} are allowed")
        if longest > self._context:
            raise WireError(
                f"{what} of {longest} tokens is longer than the target's context, {self._context}"
            )
        if (pairs := rows.tokens * longest) > (limit := self._limits.max_attention):
            raise TooLarge(
                f"{rows.tokens} tokens with {what} of {longest} compare {pairs} pairs of tokens, "
                f"{limit} are allowed: ask about fewer rows at once"
            )

    @torch.no_grad()
    def answer(self, questions: Sequence[Question]) -> list[Message]:
        """Answer all questions in one pass of the target."""
        rows = [question.rows for question in questions]
        batch = self.backend.answer(merge(rows))
        return [
            self._message(part, question)
            for part, question in zip(split(batch, rows), questions, strict=True)
        ]

    def _message(self, batch: Eagle3TargetBatch, question: Question) -> Message:
        """The answer as a message. Raises for NaN and infinity, also where they only result from
        the range of the requested precision."""
        if batch.logits is None:  # probabilities are computed before they are rounded
            batch = batch.to(dtype=DTYPES.get(question.dtype))
        if self._computes:
            check_answer(self.backend, batch, question.rows)
        return encode_answer(batch, question, self.info.head)


# --- several questions in one pass ----------------------------------------------------------------


def may_merge(one: TokenBatch, other: TokenBatch) -> bool:
    """Whether both are packed or both are padded."""
    return (one.seq_lens is None) == (other.seq_lens is None)


def merged_tokens(questions: Sequence[TokenBatch]) -> int:
    """The tokens, padding included, of the pass that these questions make together."""
    return sum(rows.shape[0] for rows in questions) * max(rows.shape[1] for rows in questions)


def merge(questions: Sequence[TokenBatch]) -> TokenBatch:
    """All rows, stacked and padded to a common width."""
    if len(questions) == 1:
        return questions[0]
    width = max(rows.shape[1] for rows in questions)
    lengths = [rows.seq_lens for rows in questions if rows.seq_lens is not None]
    documents = max((seq_lens.shape[1] for seq_lens in lengths), default=0)
    padded = [_widen(rows, width, documents) for rows in questions]
    fields = zip(*(rows.arguments() for rows in padded), strict=True)
    return TokenBatch(*(torch.cat(tensors) for tensors in fields if tensors[0] is not None))


def _widen(rows: TokenBatch, width: int, documents: int) -> TokenBatch:
    padding = width - rows.shape[1]
    tokens = [F.pad(t, (0, padding)) for t in (rows.input_ids, rows.attention_mask, rows.loss_mask)]
    if rows.packing is None:
        return TokenBatch(*tokens)
    position_BT, seq_lens, remaining_BT = rows.packing
    seq_lens = F.pad(seq_lens, (0, documents - seq_lens.shape[1]))
    last_B = (seq_lens > 0).long().cumsum(1).argmax(1)  # the last document of each row
    seq_lens[torch.arange(len(seq_lens)), last_B] += padding
    position_BT = torch.cat([position_BT, position_BT[:, -1:] + 1 + torch.arange(padding)], dim=1)
    remaining_BT = F.pad(remaining_BT, (0, padding))
    return TokenBatch(*tokens, *[position_BT, seq_lens, remaining_BT])


def split(batch: Eagle3TargetBatch, questions: Sequence[TokenBatch]) -> list[Eagle3TargetBatch]:
    """The answer to each question, as if it had been asked alone."""
    if len(questions) == 1:
        return [batch]
    answers, first = [], 0
    for rows in questions:
        count = rows.shape[0]
        answers.append(_cut(batch.rows(slice(first, first + count)), rows))
        first += count
    return answers


def _cut(batch: Eagle3TargetBatch, rows: TokenBatch) -> Eagle3TargetBatch:
    width, supervision = rows.shape[1], {}
    for name in ("logits", "last_hidden_states"):
        if (answer_BTX := getattr(batch, name)) is not None:
            supervision[name] = answer_BTX[:, :width].clone()
            supervision[name][:, -1] = 0  # end of the shift; in the wider batch, a padding token's
    aux_BTD = batch.aux_hidden_states[:, :width]
    return Eagle3TargetBatch.about(rows, aux_hidden_states=aux_BTD, shifted=True, **supervision)
