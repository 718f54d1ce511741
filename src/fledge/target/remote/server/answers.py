"""The target behind a server: questions in, messages out, one thread at a time."""

from collections.abc import Sequence

import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend, TargetInfo, check_token_ids
from fledge.target.cache.format import DTYPES
from fledge.target.finite import check_answer
from fledge.target.inprocess import InProcessTarget
from fledge.target.layers import longest_text
from fledge.target.packing import find_documents
from fledge.target.remote.protocol import Question, TooLarge, encode_answer
from fledge.target.remote.server.admission import Limits
from fledge.target.remote.server.merge import merge, split
from fledge.target.remote.wire import Message, WireError, check_digest, unpack
from fledge.target.runner import RunnerEagle3TargetModel


class Target:
    """A backend with hidden supervision, and what is asked of it."""

    def __init__(self, backend: Eagle3TargetBackend, limits: Limits) -> None:
        if backend.supervision != "hidden":
            raise ValueError(f"a server's target answers hidden states, not {backend.supervision}")
        self.backend, self.info = backend, backend.info()
        self._known_ids = len(backend.get_input_embeddings().weight)
        self._limits, self._context = limits, _context(backend, self.info)
        # What is computed here is looked at here, where that costs next to nothing beside the pass.
        # What merely passes through was looked at before, and is again by whoever asked.
        self._computes = self.info.module is not None or isinstance(backend, InProcessTarget)

    def read(self, body: bytearray) -> Question:
        """A question from the network; a ValueError says why it is none."""
        tensors, metadata = unpack(body)
        check_digest(body)
        sizes = {"max_tokens": self._limits.max_tokens, "vocab_size": self.info.vocab_size}
        question = Question.read(tensors, metadata, **sizes)
        self._check(question)
        return question

    def _check(self, question: Question) -> None:
        """Refuse now what would fail later, in a pass with the questions of others."""
        rows = question.rows
        self._check_lengths(rows)
        check_token_ids(rows.input_ids, self._known_ids)
        if not bool(rows.attention_mask.any()):
            raise WireError("attention_mask marks no token at all")
        ids = question.vocabulary
        if ids is not None:
            inside = int(ids.min()) >= 0 and int(ids.max()) < self.info.vocab_size
            if not inside or len(set(ids.tolist())) != len(ids):
                raise WireError(
                    f"vocabulary must be distinct ids of 0 .. {self.info.vocab_size - 1}"
                )

    def _check_lengths(self, rows: TokenBatch) -> None:
        """What attention compares grows with the square of a row's length."""
        documents = find_documents(rows)
        what, longest = "a row", rows.shape[1]
        if documents is not None:
            what, longest = "a document", max(documents.lengths, default=0)
            if (count := len(documents.lengths)) > self._limits.max_documents:
                most = self._limits.max_documents
                raise TooLarge(f"{count} documents in one request, {most} are allowed")
        if longest > self._context:
            raise WireError(
                f"{what} of {longest} tokens is longer than the target's context, {self._context}"
            )
        if (pairs := rows.tokens * longest) > self._limits.max_attention:
            most = self._limits.max_attention
            raise TooLarge(
                f"{rows.tokens} tokens with {what} of {longest} compare {pairs} pairs of tokens, "
                f"{most} are allowed (--max-attention): ask about fewer rows at once"
            )

    @torch.no_grad()
    def answer(self, questions: Sequence[Question]) -> list[Message]:
        """One pass for all of them."""
        rows = [question.rows for question in questions]
        batch = self.backend.answer(merge(rows))
        return [
            self._message(part, question)
            for part, question in zip(split(batch, rows), questions, strict=True)
        ]

    def _message(self, batch: Eagle3TargetBatch, question: Question) -> Message:
        """The answer as it travels; NaN and infinity do not, also where only the precision that
        was asked for is too narrow."""
        batch = batch.to(dtype=DTYPES.get(question.dtype))
        if self._computes:
            check_answer(self.backend, batch, question.rows)
        return encode_answer(batch, question, self.info.head)


def _context(backend: Eagle3TargetBackend, info: TargetInfo) -> int:
    """The longest row that the target was made for; practically unlimited where nobody says."""
    if isinstance(backend, RunnerEagle3TargetModel):
        return longest_text(backend.runner.model.config)
    return longest_text(getattr(info.module, "config", None))
