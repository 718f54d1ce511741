"""The target behind a server: questions in, messages out, one thread at a time."""

from collections.abc import Sequence

import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.target.base import Eagle3TargetBackend, check_token_ids
from fledge.target.cache.format import DTYPES
from fledge.target.finite import check_answer
from fledge.target.packing import find_documents
from fledge.target.remote.protocol import Question, encode_answer
from fledge.target.remote.server.merge import merge, split
from fledge.target.remote.wire import Message, WireError


class Target:
    """A backend with hidden supervision, and what is asked of it."""

    def __init__(self, backend: Eagle3TargetBackend) -> None:
        if backend.supervision != "hidden":
            raise ValueError(f"a server's target answers hidden states, not {backend.supervision}")
        self.backend, self.info = backend, backend.info()
        self._known_ids = len(backend.get_input_embeddings().weight)

    def check(self, question: Question) -> None:
        """Refuse now what would fail later, in a pass with the questions of others."""
        rows = question.rows
        if rows.seq_lens is not None and rows.seq_lens.shape[1] > rows.shape[1]:
            raise WireError("seq_lens has room for more documents than a row has tokens")
        find_documents(rows)
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
        check_answer(self.backend, batch, question.rows)
        return encode_answer(batch, question, self.info.head)
