"""A target with precomputed answers, for benchmarks of their transport to a trainer; and a plain
socket, the lower bound of moving bytes between two processes. Each is served by its own process."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.head import TargetHead
from fledge.target.base import Eagle3TargetBackend, InputEmbedding, TargetInfo

VOCABULARY = 40_000


class Ready(Eagle3TargetBackend):
    """Returns states of the right shape, computed once, for any rows."""

    def __init__(self, tokens: int, hidden: int = 4096) -> None:
        super().__init__("hidden")
        self.aux_layer_ids, self._hidden = [1, 15, 28], hidden
        self._states = torch.randn(tokens, 4 * hidden).bfloat16()
        self._weight = torch.randn(VOCABULARY, hidden).bfloat16()

    def answer(self, rows):
        states, hidden = self._states[: rows.tokens].flatten(), self._hidden
        return Eagle3TargetBatch.about(
            rows,
            aux_hidden_states=states[: 3 * hidden * rows.tokens].view(*rows.shape, -1),
            last_hidden_states=states[: hidden * rows.tokens].view(*rows.shape, -1),
            shifted=True,
        )

    def get_input_embeddings(self):
        return InputEmbedding(self._weight)

    def info(self):
        return TargetInfo(
            head=TargetHead(self._weight),
            final_norm=None,
            hidden_size=self._hidden,
            vocab_size=VOCABULARY,
            depth=32,
            dtype=torch.bfloat16,
            weight_dtypes="bfloat16 100.0%",
            weights_fingerprint="0" * 16,
            tokenizer_fingerprint=None,
        )


def serve_states(tokens: int, hidden: int) -> None:
    from fledge.target.remote.server.app import TargetServer
    from fledge.target.remote.server.run import Address, serve

    address = Address(port=0)
    with address.bind() as bound:
        server = TargetServer(Ready(tokens, hidden), model=f"hidden {hidden}")
        serve(server, address, bound, on_ready=lambda url: print(url, flush=True))


def serve_bytes() -> None:
    """A plain socket: is first sent a count, then replies to every byte with that many bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        data = memoryview(np.ones(int(connection.recv(64)), np.uint8))
        connection.sendall(b"!")
        while connection.recv(1):
            connection.sendall(data)


def started(kind: str, tokens: int, hidden: int = 4096) -> tuple[subprocess.Popen[str], str]:
    """Start a process that serves `states` or `bytes`; returns it and its URL or port."""
    command = [sys.executable, str(Path(__file__)), kind, str(tokens), str(hidden)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


class Plain:
    """The client of `serve_bytes`; receives into a reused buffer."""

    def __init__(self, port: int, nbytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(str(nbytes).encode())
        self._socket.recv(1)
        self._view = memoryview(np.empty(nbytes, np.uint8))

    def copy(self) -> None:
        self._socket.sendall(b"?")
        received = 0
        while received < len(self._view):
            received += self._socket.recv_into(self._view[received : received + (1 << 20)])


def rows(tokens: int, supervised_share: float = 0.5) -> tuple[torch.Tensor, ...]:
    ids_BT = torch.arange(tokens)[None] % VOCABULARY
    loss_BT = (torch.arange(tokens)[None] >= tokens * (1 - supervised_share)).long()
    return ids_BT, torch.ones_like(ids_BT), loss_BT


if __name__ == "__main__":
    kind, tokens, hidden = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    serve_bytes() if kind == "bytes" else serve_states(tokens, hidden)
