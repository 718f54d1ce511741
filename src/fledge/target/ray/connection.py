"""The connection of this process to a Ray cluster.

All actors of fledge are in one namespace; a run's workers and its board are named after the run.
"""

import contextlib
import signal
import sys
import threading
from types import TracebackType
from typing import Any

from fledge.core.errors import BadInput, MissingPackage, first_line
from fledge.core.install import install_extra

NAMESPACE = "fledge"
_joined: str | None = None  # address of the cluster, if this process joined it itself


class Connection:
    """A connection to a cluster. If the process is connected already, as inside a Ray worker or
    perhaps a notebook, nothing is opened, and nothing closed."""

    def __init__(self, address: str) -> None:
        global _joined
        ray = import_ray()
        self._opened = not ray.is_initialized()
        if self._opened:
            _join(ray, address)
            _joined = address
            sys.stdout = _StdoutWithoutRay(sys.stdout)
        elif _joined is not None and address not in ("auto", _joined):
            what = f"this process is part of the cluster at {_joined} already, not of {address!r}"
            raise BadInput(what, where="address", fix="use one cluster at a time")

    def close(self) -> None:
        global _joined
        if self._opened:
            self._opened, _joined = False, None
            with contextlib.redirect_stdout(sys.stderr):  # it flushes buffered messages
                import_ray().shutdown()
            if isinstance(sys.stdout, _StdoutWithoutRay):
                sys.stdout = sys.stdout.stdout

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


class _StdoutWithoutRay:
    """stdout without the messages of Ray's own threads, which go to stderr: results go to stdout,
    and `fledge ... --json | jq` must work even while machines fail."""

    def __init__(self, stdout: Any) -> None:
        self.stdout = stdout

    def write(self, text: str) -> Any:
        from_ray = threading.current_thread().name.startswith("ray_")
        return (sys.stderr if from_ray else self.stdout).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stdout, name)


def import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        fix = install_extra("cluster")
        raise MissingPackage("ray is not installed", fix=fix) from error
    return ray


def _join(ray: Any, address: str) -> None:
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"no Ray cluster answers at {address!r} ({first_line(error)})",
            where="address",
            fix="ray start --head starts one here; or name the head of a running one, HOST:6379",
        ) from error
    finally:
        # Ray's handler would end the process at SIGTERM; ours lets the run save first
        if in_main_thread and handler is not None:
            signal.signal(signal.SIGTERM, handler)
