"""The target behind a server: turns questions into messages, on one thread at a time.

Questions of one width may share a pass, and the answer is split again. Each gets the answer it
would get alone, up to the rounding of a differently shaped pass.
"""

import itertools
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
from fledge.target.remote.server.queue import Limits
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


def merge(questions: Sequence[TokenBatch]) -> TokenBatch:
    """All rows, which have one width and the same fields, as one batch."""

    def join(*parts: torch.Tensor | None) -> torch.Tensor | None:
        tensors = [part for part in parts if part is not None]
        width = max((len(tensor[0]) for tensor in tensors), default=0)  # documents may differ
        padded = [F.pad(tensor, (0, width - len(tensor[0]))) for tensor in tensors]
        return torch.cat(padded) if padded else None

    fields: Any = map(join, *(rows.arguments() for rows in questions))
    return TokenBatch(*fields)


def split(batch: Eagle3TargetBatch, questions: Sequence[TokenBatch]) -> list[Eagle3TargetBatch]:
    """The answer to each question, as if it had been asked alone."""
    ends = itertools.accumulate((rows.shape[0] for rows in questions), initial=0)
    return [batch.rows(slice(begin, end)) for begin, end in itertools.pairwise(ends)]
