"""Serving until asked to stop: the socket, TLS, and a drain in which nothing is lost."""

import ipaddress
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from fledge.core.errors import BadInput
from fledge.target.remote.segment import remove_leftovers
from fledge.target.remote.server.app import TargetServer

_KEEP_ALIVE_S = 120  # longer than trainers pause between requests
_MAX_CONNECTIONS = 1024


@dataclass(frozen=True)
class Address:
    """Where a server listens, and how it may be reached."""

    host: str = "127.0.0.1"
    port: int = 8700
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def is_loopback(self) -> bool:
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self, *, token: str | None, insecure: bool) -> None:
        """Refuse to be open to a network by accident."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadInput("a certificate and its key belong together", where="--tls-cert")
        for path in (self.tls_cert, self.tls_key):
            if path is not None and not path.is_file():
                raise BadInput("not a file", where=str(path))
        if self.tls_cert is not None:
            try:
                ssl.create_default_context().load_cert_chain(self.tls_cert, self.tls_key)
            except ssl.SSLError as error:
                raise BadInput(
                    f"no certificate chain with its key ({error.reason})",
                    where=f"{self.tls_cert}, {self.tls_key}",
                    fix="give both in PEM form",
                ) from None
        if not self.is_loopback and token is None and not insecure:
            raise BadInput(
                f"{self.host} can be reached from other machines, and no token is set",
                where="--host",
                fix="give --token-env NAME, or --insecure on a network that you trust",
            )

    def bind(self) -> socket.socket:
        """The listening socket, taken before the model is loaded: a busy port is known at once."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # named as TCP: asyncio sends small packets at once only where it can tell
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
        scheme = "http" if self.tls_cert is None else "https"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{bound.getsockname()[1]}"


def make_uvicorn(server: TargetServer, address: Address, *, drain_s: float) -> uvicorn.Server:
    """uvicorn on its httptools parser and asyncio's own loop: the pair that sends large pieces
    without copying them (uvloop and h11 reach half of it, see benchmarks/results/remote.md)."""
    config = uvicorn.Config(
        server.app,
        http="httptools",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        limit_concurrency=_MAX_CONNECTIONS,
        ssl_certfile=None if address.tls_cert is None else str(address.tls_cert),
        ssl_keyfile=None if address.tls_key is None else str(address.tls_key),
    )
    return uvicorn.Server(config)


def serve(
    server: TargetServer,
    address: Address,
    bound: socket.socket,
    *,
    drain_s: float = 60.0,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Answer until SIGINT or SIGTERM; then finish what was accepted, and take nothing new."""
    remove_leftovers()
    web = make_uvicorn(server, address, drain_s=drain_s)
    bound.listen(2048)
    on_ready(address.url(bound))
    try:
        with _signals_end_quietly():
            web.run(sockets=[bound])
    finally:
        server.queue.close()
        server.target.backend.close()


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """uvicorn raises the signal that stopped it again at the end; a drained server should end with
    code 0."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
