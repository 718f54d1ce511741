"""All ranks of an SGLang engine: one here, and with tensor parallelism a process for each other.

The ranks of a tensor-parallel model run collectives, so all must make the same calls. A call is
sent to the other ranks through pipes and then made here; only this rank's result is kept.

In a torch.distributed process group of `tp_size` ranks, the ranks are the caller's own: each
builds a runner, and all make the same calls. Nothing is started, and the group outlives the engine.
"""

import contextlib
import multiprocessing
import secrets
import signal
import socket
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fledge.target.sglang.engine import SGLangEngine, engine_class, joined_rank

_PORTS = range(20_000, 32_000)


class SGLangRanks:
    """The engine of rank 0 in this process, and its peers; or that of the caller's own rank."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._pipes: list[Connection] = []
        self._peers: list[BaseProcess] = []
        joined, port = joined_rank(int(options["tp_size"])), free_port()
        processes = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        for rank in range(1, int(options["tp_size"]) if joined is None else 1):
            own_end, peer_end = processes.Pipe()
            # a daemon: it must not outlive rank 0, for whose calls it waits
            arguments = (peer_end, options, rank, port)
            peer: BaseProcess = processes.Process(target=_run_peer, args=arguments, daemon=True)
            peer.start()
            peer_end.close()
            self._pipes.append(own_end)
            self._peers.append(peer)
        try:
            engine = engine_class(options["device"])
            self.engine: SGLangEngine = engine(options, rank=joined or 0, port=port)
        except BaseException:
            for peer in self._peers:
                peer.terminate()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Make a call on every rank at once; returns this rank's result."""
        for rank, (pipe, peer) in enumerate(zip(self._pipes, self._peers, strict=True), 1):
            if not peer.is_alive():  # a collective would wait for it forever
                raise RuntimeError(
                    f"rank {rank} of the SGLang target ended with code {peer.exitcode}: "
                    "its own message is above"
                )
            pipe.send((method, args))
        return getattr(self.engine, method)(*args)

    def close(self) -> None:
        """Close every rank. A second call does nothing."""
        for pipe in self._pipes:
            pipe.close()  # the peers get EOF, and end
        self._pipes = []
        self.engine.close()
        for peer in self._peers:
            peer.join(timeout=30)
            peer.terminate()
        self._peers = []


def _run_peer(pipe: Connection, options: dict[str, Any], rank: int, port: int) -> None:
    """Run another rank: repeat rank 0's calls until its pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all ranks; rank 0 handles it
    engine = engine_class(options["device"])(options, rank=rank, port=port)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            break
        getattr(engine, method)(*args)
    engine.close()


def free_port() -> int:
    """A port below those that systems hand out themselves: between this call and its use, another
    process would have to ask for this very one."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
