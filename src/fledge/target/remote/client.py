"""The target in other processes or on other machines: a client of `fledge serve-target`.

Each call becomes one question with its own id, which is retried, on another server if possible,
until a complete reply arrives. Calls made in sequence are answered in sequence.
"""

import hashlib
import itertools
import os
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.core.files import atomic_file
from fledge.core.reading import shown
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend, InputEmbedding, TargetInfo, check_token_ids
from fledge.target.cache.manifest import assemble_target, is_copied
from fledge.target.layers import validate_aux_layer_ids
from fledge.target.packing import find_documents
from fledge.target.remote.fleet import Fleet, ServerState
from fledge.target.remote.http import Buffers, Refused, Server, ServerFault, check_token
from fledge.target.remote.protocol import (
    Question,
    WireEncoding,
    WireShape,
    decode_answer,
)
from fledge.target.remote.wire import unpack

RemoteSupervision = Literal["hidden", "probs", "topk", "logits"]


class RemoteEagle3TargetModel(Eagle3TargetBackend):
    """Target backend over one or more target servers.

    `supervision` selects what the trainer gets and what is sent: `hidden` states (default), `probs`
    over the draft vocabulary, or `topk` of them (returned as probs); `logits` are computed locally
    from hidden states. Up to `prefetch` calls of `answer_async` run concurrently.

    A request may take `timeout_s` over all its attempts, and wait for up to `wait_s` more while no
    server is up; then it raises `TargetUnreachable`.
    """

    supports_async = True

    def __init__(
        self,
        urls: Sequence[str | Server] | str,
        *,
        supervision: RemoteSupervision = "hidden",
        aux_layer_ids: Sequence[int] | None = None,
        token: str | None = None,
        top_k: int = 64,
        dtype: str = "auto",
        prefetch: int = 2,
        timeout_s: float = 240.0,
        retries: int = 5,
        wait_s: float = 300.0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__("probs" if supervision == "topk" else supervision)
        self._encoding: WireEncoding = "hidden" if supervision == "logits" else supervision
        self._top_k, self._dtype = top_k, dtype
        self._pin, self.prefetch = pin_memory, prefetch
        addresses = [urls] if isinstance(urls, str) else list(dict.fromkeys(urls))
        buffers = Buffers(keep=max(1, prefetch) + 1)
        servers = [
            url if isinstance(url, Server) else Server(url, token=token, buffers=buffers)
            for url in addresses
        ]
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._fleet = Fleet(servers, timeout_s=timeout_s, wait_s=wait_s, retries=retries, rank=rank)
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(max(1, prefetch), thread_name_prefix="fledge-remote")
        self._lock = threading.Lock()
        self._target: tuple[InputEmbedding, TargetInfo] | None = None
        try:
            self.server_info = self._fleet.open()
            self.aux_layer_ids: list[int] = self.server_info["aux_layer_ids"]
            self._check_target(aux_layer_ids)
        except BaseException:
            self.close()
            raise

    def _check_target(self, aux_layer_ids: Sequence[int] | None) -> None:
        """Refuse a target that does not answer as this client needs it."""
        if aux_layer_ids is not None:
            ids = validate_aux_layer_ids(aux_layer_ids, self.server_info["depth"], count=None)
            if ids != self.aux_layer_ids:
                raise BadInput(
                    f"the servers capture aux layers {self.aux_layer_ids}, {ids} are wanted",
                    where="target.aux_layer_ids",
                    fix=f"fledge serve-target --aux-layer-ids {','.join(map(str, ids))}",
                )

    def get_input_embeddings(self) -> InputEmbedding:
        self._check_open()
        return self._fetch_target()[0]

    def info(self) -> TargetInfo:
        self._check_open()
        return self._fetch_target()[1]

    def fetch_files(self, directory: Path) -> None:
        """Write the target's config and tokenizer files into `directory`."""
        self._check_open()
        files = self._get("/v1/files", 1 << 28)
        wrong = [name for name in files if not is_copied(name) or files[name].dtype != torch.uint8]
        if wrong or "config.json" not in files:
            what = f"offers a file {shown(wrong[0])}" if wrong else "has no config.json to offer"
            raise BadInput(f"the server {what}", fix="name the model it serves as target.model")
        for name, content in files.items():
            with atomic_file(directory / name) as handle:
                handle.write(content.numpy().tobytes())

    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        """Ask a server about these rows. The batch is on the CPU."""
        return self.answer_async(rows).result()

    def answer_async(self, rows: TokenBatch) -> Future[Eagle3TargetBatch]:
        """Ask in the background, `prefetch` calls at a time; further calls are queued."""
        self._check_open()
        rows = rows.map(lambda tensor: tensor.detach().cpu())
        find_documents(rows)
        check_token_ids(rows.input_ids, self.server_info["vocab_size"])
        vocabulary = None
        if self._encoding != "hidden":
            vocabulary = self._vocab_mapping(torch.device("cpu"))[0]
        shared = self.askers > 1
        question = Question(
            request_id=self._digest(rows, vocabulary) if shared else secrets.token_hex(16),
            rows=rows,
            encoding=self._encoding,
            dtype=self._dtype,
            top_k=self._top_k if self._encoding == "topk" else 0,
            vocabulary=vocabulary,
            fingerprint=self.server_info["weights_fingerprint"],
            askers=self.askers,
        )
        # Ranks with the same questions number them equally, and so ask the same server.
        number = next(self._numbers) if shared else None
        return self._threads.submit(self._answer, question, number)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._fleet.close()
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._target = None

    def _digest(self, rows: TokenBatch, vocabulary: Tensor | None) -> str:
        """An id that all ranks give to the same question."""
        form = repr((self._encoding, self._dtype, self._top_k))
        digest = hashlib.blake2b(form.encode(), digest_size=16)
        for tensor in (*rows.arguments(), vocabulary):
            digest.update(b"-" if tensor is None else str(tuple(tensor.shape)).encode())
            digest.update(b"" if tensor is None else tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _answer(self, question: Question, number: int | None) -> Eagle3TargetBatch:
        def ask(state: ServerState, left_s: float) -> Eagle3TargetBatch:
            return self._ask(state, question, left_s)

        batch = self._fleet.ask(ask, prefer=number)
        if self.supervision == "logits":
            batch = batch.with_logits(self.info().head)
        return batch.pin_memory() if self._pin else batch

    def _ask(self, state: ServerState, question: Question, timeout_s: float) -> Eagle3TargetBatch:
        """Make one attempt at one server."""
        shape = WireShape.of(
            question,
            hidden_size=self.server_info["hidden_size"],
            aux_layers=len(self.aux_layer_ids),
            dtype=getattr(torch, self.server_info["dtype"]),
        )
        supervised = int(question.rows.loss_mask[:, 1:].bool().sum())
        max_bytes = shape.answer_bytes(question.rows.tokens, supervised)
        try:
            body = question.to_message().to_bytes()
            reply = state.server.exchange("/v1/generate", body, timeout_s, max_bytes)
            return decode_answer(*unpack(reply), question, shape)
        except Refused as error:
            if error.status == 409:  # restarted with other weights: the fleet will detect it
                raise ServerFault(str(error)) from error
            raise

    def _get(self, path: str, max_bytes: int) -> dict[str, Tensor]:
        def fetch(state: ServerState, left_s: float) -> dict[str, Tensor]:
            return unpack(state.server.exchange(path, None, left_s, max_bytes))[0]

        return self._fleet.ask(fetch)

    def _fetch_target(self) -> tuple[InputEmbedding, TargetInfo]:
        """The embedding and the target's info, fetched once."""
        with self._lock:
            if self._target is None:
                facts = self.server_info
                size = facts["hidden_size"]
                max_bytes = 8 * size * (facts["vocab_size"] + 2) + (1 << 20)
                tensors = self._get("/v1/embeddings", max_bytes) | self._get("/v1/head", max_bytes)
                self._target = assemble_target(tensors, facts, hidden_size=size)
            return self._target


def token_from(name: str | None) -> str | None:
    """The bearer token from an environment variable; never from a file or the command line."""
    if name is None:
        return None
    token = os.environ.get(name, "").strip()
    if not token:
        raise BadInput(f"the environment variable {name} holds no token", fix=f"export {name}=...")
    check_token(token, where=f"the environment variable {name}")
    return token
