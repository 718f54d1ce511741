"""All ranks of an SGLang engine: one here, and with tensor parallelism one process for each other.

The ranks of a tensor-parallel model meet in collectives, so all must make the same calls. A call
goes to the other ranks through pipes and is then made here; only this rank's answer is kept.

In a torch.distributed process group of `tp_size` ranks, the ranks are the caller's own: each
builds a runner, and all make the same calls. Nothing is started, and the group outlives the engine.
"""

import multiprocessing
import signal
import socket
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fledge.target.sglang.engine import SGLangEngine, engine_class, joined_rank


class SGLangRanks:
    """The engine of rank 0 in this process, and its peers; or that of the caller's own rank."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._pipes: list[Connection] = []
        self._peers: list[BaseProcess] = []
        joined, port = joined_rank(int(options["tp_size"])), free_port()
        processes = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        for rank in range(1, int(options["tp_size"]) if joined is None else 1):
            ours, theirs = processes.Pipe()
            # a peer waits for rank 0's next call: as a daemon it does not outlive it
            arguments = (theirs, options, rank, port)
            peer: BaseProcess = processes.Process(target=_follow, args=arguments, daemon=True)
            peer.start()
            theirs.close()
            self._pipes.append(ours)
            self._peers.append(peer)
        try:
            engine = engine_class(options["device"])
            self.engine: SGLangEngine = engine(options, rank=joined or 0, port=port)
        except BaseException:
            for peer in self._peers:
                peer.terminate()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Make a call on every rank at once; this rank's answer."""
        for rank, (pipe, peer) in enumerate(zip(self._pipes, self._peers, strict=True), 1):
            if not peer.is_alive():  # in a collective we would wait for it for ever
                raise RuntimeError(
                    f"rank {rank} of the SGLang target ended with code {peer.exitcode}: "
                    "its own message is above"
                )
            pipe.send((method, args))
        return getattr(self.engine, method)(*args)

    def close(self) -> None:
        """Close every rank. Twice is fine."""
        for pipe in self._pipes:
            pipe.close()  # the peers read the end of their pipe, and leave
        self._pipes = []
        self.engine.close()
        for peer in self._peers:
            peer.join(timeout=30)
            peer.terminate()
        self._peers = []


def _follow(pipe: Connection, options: dict[str, Any], rank: int, port: int) -> None:
    """The life of another rank: make rank 0's calls until its pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, and rank 0 decides
    engine = engine_class(options["device"])(options, rank=rank, port=port)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            break
        getattr(engine, method)(*args)
    engine.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
