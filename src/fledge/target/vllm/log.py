"""vLLM's log: into a file, and only its errors onto the screen.

By itself vLLM writes hundreds of lines to stdout, where the results of a command stand (`--json`).
It reads a logging configuration when it is first imported, and so does each process it starts.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fledge.core.files import cache_dir, write_json

_CONFIG = "VLLM_LOGGING_CONFIG_PATH"
# Whoever sets one of these wants to see the log as vLLM shows it, or has a place for it.
_USERS_OWN = (_CONFIG, "VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_STREAM")
_MOST_BYTES = 10_000_000  # then the file is set aside, and the one before it goes


def log_file() -> Path:
    return cache_dir() / "logs" / "vllm.log"


def send_log_to_file() -> None:
    """To be called before vLLM is imported; afterwards it changes nothing."""
    if any(name in os.environ for name in _USERS_OWN):
        return
    path = log_file().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "%(levelname)s %(asctime)s pid=%(process)d [%(name)s:%(lineno)d] %(message)s"
    handlers = {
        "file": {
            "class": "logging.handlers.RotatingFileHandler",
            "filename": str(path),
            "maxBytes": _MOST_BYTES,
            "backupCount": 1,
            "formatter": "plain",
        },
        "screen": {
            "class": "logging.StreamHandler",
            "stream": "ext://sys.stderr",
            "level": "ERROR",
            "formatter": "plain",
        },
    }
    config = path.with_suffix(".json")
    write_json(
        config,
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": text}},
            "handlers": handlers,
            "loggers": {"vllm": {"handlers": [*handlers], "level": "INFO", "propagate": False}},
        },
    )
    os.environ[_CONFIG] = str(config)


def where_to_look() -> str:
    """For the end of an error message."""
    named = os.environ.get(_CONFIG) == str(log_file().absolute().with_suffix(".json"))
    return f"its log: {log_file()}" if named else "see its log"


@contextmanager
def quiet_start() -> Iterator[None]:
    """While open, remarks of the libraries below vLLM on its own code stay away."""
    below = logging.getLogger("torch._library.triton")
    level = below.level
    below.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        below.setLevel(level)
