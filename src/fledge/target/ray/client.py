"""The target on a Ray cluster as a trainer sees it: rows in, one batch out, requested in advance.

`prefetch` questions per worker are in flight at once, over all ranks. The others wait here, so a
slow trainer fills neither the workers' queues nor the object store, which an answer leaves as soon
as it arrives.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

import torch
import torch.distributed as dist

from fledge.core.batch import Eagle3TargetBatch, Supervision
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend, InputEmbedding, TargetInfo, check_token_ids
from fledge.target.cache.manifest import assemble_target
from fledge.target.packing import find_documents
from fledge.target.ray.fleet import Fleet
from fledge.target.ray.worker import Array, Question


class RayEagle3TargetModel(Eagle3TargetBackend):
    """Target backend over the workers of a cluster. Closing it closes the fleet."""

    supports_async = True

    def __init__(
        self,
        fleet: Fleet,
        *,
        supervision: Supervision = "hidden",
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(supervision)
        self._fleet, self._pin = fleet, pin_memory
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.prefetch = -(-prefetch * len(fleet) // ranks)
        self._threads = ThreadPoolExecutor(self.prefetch, thread_name_prefix="fledge-ray")
        self._lock = threading.Lock()
        self._target: tuple[InputEmbedding, TargetInfo] | None = None
        self._question_numbers: Iterator[int] = count()
        self._facts = fleet.open()
        self.aux_layer_ids = list(self._facts["aux_layer_ids"])

    def get_input_embeddings(self) -> InputEmbedding:
        self._check_open()
        return self._fetch_target()[0]

    def info(self) -> TargetInfo:
        self._check_open()
        return self._fetch_target()[1]

    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        """Ask a worker about these rows. The returned batch is on the CPU."""
        return self.answer_async(rows).result()

    def answer_async(self, rows: TokenBatch) -> Future[Eagle3TargetBatch]:
        """Ask in the background, with at most `prefetch` questions in flight."""
        self._check_open()
        rows = rows.map(lambda tensor: tensor.detach().cpu())
        documents = find_documents(rows)
        if documents is not None and not documents.lengths:
            raise ValueError("attention_mask marks no token at all")
        check_token_ids(rows.input_ids, int(self._facts["embeddings"]))
        vocabulary = None
        if self.supervision == "probs":
            vocabulary = Array.of(self._vocab_mapping(torch.device("cpu"))[0])
        parts = tuple(None if part is None else Array.of(part) for part in rows.arguments())
        question = Question(parts, vocabulary, self.askers)
        # Ranks with the same questions number them equally, and so ask the same worker.
        number = next(self._question_numbers) if self.askers > 1 else None
        return self._threads.submit(self._answer, rows, question, number)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._fleet.close()
            self._threads.shutdown(wait=True)
            self._target = None

    def _answer(
        self, rows: TokenBatch, question: Question, number: int | None
    ) -> Eagle3TargetBatch:
        arrays = self._fleet.ask(lambda worker: worker.answer.remote(question), prefer=number)
        states = {name: array.tensor(pin_memory=self._pin) for name, array in arrays.items()}
        del arrays  # frees their memory in the object store
        aux = states.pop("aux_hidden_states")
        return Eagle3TargetBatch.about(rows, aux_hidden_states=aux, shifted=True, **states)

    def _fetch_target(self) -> tuple[InputEmbedding, TargetInfo]:
        with self._lock:
            if self._target is None:
                arrays = self._fleet.ask(lambda worker: worker.tables.remote())
                tensors = {name: array.tensor() for name, array in arrays.items()}
                facts, size = self._facts, int(self._facts["hidden_size"])
                self._target = assemble_target(tensors, facts, hidden_size=size)
            return self._target
