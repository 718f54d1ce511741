"""This process as part of a Ray cluster, and what of ours lives there under a name.

Everything of fledge is in one namespace; a run's workers and its board carry the run's name.
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
_joined: str | None = None  # the address by which this process joined its cluster itself


class Connection:
    """A connection to a cluster, closed by whoever made it: inside a Ray worker there is one, and
    so there may be in a notebook; then nothing is opened, and nothing closed."""

    def __init__(self, address: str) -> None:
        global _joined
        ray = import_ray()
        self._ours = not ray.is_initialized()
        if self._ours:
            _join(ray, address)
            _joined = address
            sys.stdout = _WithoutRay(sys.stdout)
        elif _joined is not None and address not in ("auto", _joined):
            what = f"this process is part of the cluster at {_joined} already, not of {address!r}"
            raise BadInput(what, where="address", fix="use one cluster at a time")

    def close(self) -> None:
        global _joined
        if self._ours:
            self._ours, _joined = False, None
            with contextlib.redirect_stdout(sys.stderr):  # it says what it has held back
                import_ray().shutdown()
            if isinstance(sys.stdout, _WithoutRay):
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


class _WithoutRay:
    """stdout without what Ray's own threads say of the cluster, which goes to stderr: results go to
    stdout, and `fledge ... --json | jq` must work while machines die."""

    def __init__(self, stdout: Any) -> None:
        self.stdout = stdout

    def write(self, text: str) -> Any:
        ray_speaks = threading.current_thread().name.startswith("ray_")
        return (sys.stderr if ray_speaks else self.stdout).write(text)

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
    in_main = threading.current_thread() is threading.main_thread()
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
        if in_main and handler is not None:  # Ray ends the process at SIGTERM; a run saves first
            signal.signal(signal.SIGTERM, handler)
