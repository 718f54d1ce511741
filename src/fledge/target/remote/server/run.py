"""Runs a server until it is told to stop: the socket, and a drain that loses nothing."""

import ipaddress
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from fledge.core.errors import BadInput
from fledge.target.remote.server.app import TargetServer

_KEEP_ALIVE_S = 120  # longer than trainers pause between requests
_DRAIN_S = 60  # for accepted requests, after SIGTERM


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str = "127.0.0.1"
    port: int = 8700

    def check(self, *, token: str | None, insecure: bool) -> None:
        """Refuse to be open to a network by accident."""
        try:
            loopback = self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            loopback = False
        if not loopback and token is None and not insecure:
            raise BadInput(
                f"{self.host} can be reached from other machines, and no token is set",
                where="--host",
                fix="give --token-env NAME, or --insecure on a network that you trust",
            )

    def bind(self) -> socket.socket:
        """The listening socket, bound before the model is loaded: a busy port fails at once."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio sets TCP_NODELAY only on sockets whose protocol is explicitly TCP
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
        except OSError as error:
            bound.close()
            raise BadInput(
                f"cannot listen on {self.host}:{self.port} ({error.strerror})",
                where="--port",
                fix="choose another port",
            ) from error
        return bound

    def url(self, bound: socket.socket) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{bound.getsockname()[1]}"


def make_uvicorn(server: TargetServer, *, drain_s: int = _DRAIN_S) -> uvicorn.Server:
    """uvicorn with the httptools parser and asyncio's own event loop, which send large pieces
    without copying them (uvloop and h11 are half as fast, see benchmarks/results/remote.md)."""
    config = uvicorn.Config(
        server,
        http="httptools",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="error",  # any client can cause warnings, e.g. by invalid HTTP
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the client is always the peer of the connection
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_s,
    )
    return uvicorn.Server(config)


def serve(
    server: TargetServer,
    address: Address,
    bound: socket.socket,
    *,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGINT or SIGTERM, then finish the accepted requests and accept no new ones."""
    web = make_uvicorn(server)
    bound.listen(2048)
    on_ready(address.url(bound))
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn replaces these handlers while it runs, and raises the signal again at its end: a
        # drained server should exit with code 0
        signal.signal(number, lambda *_: None)
    try:
        web.run(sockets=[bound])
    finally:
        server.queue.close()
        server.target.backend.close()
