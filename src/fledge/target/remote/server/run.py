"""Runs a server until it is told to stop: the socket, TLS, and a drain that loses nothing."""

import ipaddress
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from fledge.core.errors import BadInput
from fledge.target.remote.server.app import TargetServer

_KEEP_ALIVE_S = 120  # longer than trainers pause between requests
_MAX_CONNECTIONS = 1024  # beyond them, requests are answered with 503


@dataclass(frozen=True)
class Address:
    """Where a server listens, with or without TLS."""

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
        """Check the certificate, and refuse to be open to a network by accident."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadInput("a certificate and its key belong together", where="--tls-cert")
        if self.tls_cert is not None:
            self._check_certificate(self.tls_cert)
        if not self.is_loopback and token is None and not insecure:
            raise BadInput(
                f"{self.host} can be reached from other machines, and no token is set",
                where="--host",
                fix="give --token-env NAME, or --insecure on a network that you trust",
            )

    def _check_certificate(self, cert: Path) -> None:
        def no_password() -> str:  # otherwise OpenSSL prompts for one on the terminal
            what = "the key is encrypted, and there is no way to enter its password"
            fix = "decrypt it: openssl pkey -in KEY -out NEW"
            raise BadInput(what, where=str(self.tls_key), fix=fix)

        try:
            ssl.create_default_context().load_cert_chain(cert, self.tls_key, no_password)
        except OSError as error:  # includes SSLError
            reason = getattr(error, "reason", None) or error.strerror
            raise BadInput(
                f"no certificate chain with its key ({reason})",
                where=f"{cert}, {self.tls_key}",
                fix="give both in PEM form",
            ) from None

    def bind(self) -> socket.socket:
        """The listening socket, bound before the model is loaded: a busy port fails at once."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio sets TCP_NODELAY only on sockets whose protocol is explicitly TCP
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # accepted sockets inherit it, so that clients whose machine is gone are detected
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
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
    """uvicorn with the httptools parser and asyncio's own event loop, which send large pieces
    without copying them (uvloop and h11 are half as fast, see benchmarks/results/remote.md)."""
    config = uvicorn.Config(
        server.app(address.host if address.is_loopback and server.token is None else None),
        http="httptools",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="error",  # any client can cause warnings, e.g. by invalid HTTP
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the client is always the peer of the connection
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_s,  # type: ignore[arg-type]  # accepts any number
        ssl_certfile=address.tls_cert,
        ssl_keyfile=address.tls_key,
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
    """Serve until SIGINT or SIGTERM, then finish the accepted requests and accept no new ones."""
    web = make_uvicorn(server, address, drain_s=drain_s)
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
