"""The target behind a server: turns questions into messages, on one thread, one at a time."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fledge.target.base import Eagle3TargetBackend, check_token_ids
from fledge.target.cache.format import DTYPES
from fledge.target.finite_check import check_answer
from fledge.target.inprocess import InProcessTarget
from fledge.target.layers import longest_text
from fledge.target.packing import find_documents
from fledge.target.remote.protocol import Question, encode_answer
from fledge.target.remote.wire import Message, WireError, check_digest, unpack
from fledge.target.runner import RunnerEagle3TargetModel

_KEPT = 8  # answers kept for ranks that may never ask for them, having asked another server


class Target:
    """A backend that answers hidden states, and the checks on what it is asked."""

    def __init__(self, backend: Eagle3TargetBackend, max_tokens: int) -> None:
        if backend.supervision != "hidden":
            raise ValueError(f"a server's target answers hidden states, not {backend.supervision}")
        self.backend, self.info, self.max_tokens = backend, backend.info(), max_tokens
        self._embedding_rows = len(backend.get_input_embeddings().weight)
        model: Any = self.info.module
        if isinstance(backend, RunnerEagle3TargetModel):
            model = backend.runner.model
        self._context = longest_text(getattr(model, "config", None))  # unlimited without a config
        # Answers computed in this process are checked for NaN and infinity here, where that costs
        # next to nothing compared to the pass. Answers that another process computed were checked
        # there, and the client checks them again.
        self._computes = self.info.module is not None or isinstance(backend, InProcessTarget)

    def read(self, body: bytearray) -> Question:
        """Parse and check a question from the network; a ValueError says what is wrong with it."""
        check_digest(body)
        question = Question.read(*unpack(body))
        rows, ids = question.rows, question.vocabulary
        check_token_ids(rows.input_ids, self._embedding_rows)
        if rows.tokens > self.max_tokens:
            raise WireError(f"{rows.tokens} tokens in one request, {self.max_tokens} are allowed")
        documents = find_documents(rows)
        longest = max(documents.lengths, default=0) if documents else rows.shape[1]
        if longest > self._context:
            what = f"a {'document' if documents else 'row'} of {longest} tokens"
            raise WireError(f"{what} is longer than the target's context, {self._context}")
        if not bool(rows.attention_mask.any()):
            raise WireError("attention_mask marks no token at all")
        if question.encoding != "hidden" and ids is not None:
            check_token_ids(ids, self.info.vocab_size)
            if len(set(ids.tolist())) < len(ids):
                raise WireError("an id is twice in the vocabulary")
        return question

    @torch.no_grad()
    def answer(self, question: Question) -> Message:
        """The answer as a message. Raises for NaN and infinity, also where they only result from
        the range of the requested precision."""
        batch = self.backend.answer(question.rows).to(dtype=DTYPES.get(question.dtype))
        if self._computes:
            check_answer(self.backend, batch, question.rows)
        return encode_answer(batch, question, self.info.head)


class AnswerQueue:
    """Questions in front of the one thread that runs the target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fledge-target")
        self._shared: dict[str, tuple[int, asyncio.Future[Message]]] = {}
        self.counts = {"questions": 0.0, "tokens": 0.0, "seconds": 0.0}  # answered, so far

    async def answer(self, question: Question) -> Message:
        """Wait for the answer; a caller that is cancelled leaves the queue. What several ranks ask
        is computed once, and kept until all of them have asked."""
        if question.askers == 1:
            return await self._submit(question)
        asked, call = self._shared.pop(question.request_id, (0, None))
        call = call or self._submit(question)
        if asked + 1 < question.askers:
            self._shared[question.request_id] = asked + 1, call
            if len(self._shared) > _KEPT:
                del self._shared[next(iter(self._shared))]  # the oldest
        return await asyncio.shield(call)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _submit(self, question: Question) -> "asyncio.Future[Message]":
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, self._compute, question)

    def _compute(self, question: Question) -> Message:
        begin = time.monotonic()
        message = self._target.answer(question)
        self.counts["questions"] += 1
        self.counts["tokens"] += question.rows.tokens
        self.counts["seconds"] += time.monotonic() - begin
        return message
