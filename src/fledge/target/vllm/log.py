"""Send vLLM's log to a file, and only its errors to the screen.

By default vLLM writes hundreds of lines to stdout, where commands print their results (`--json`).
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
# A user who sets one of these has chosen how vLLM logs.
_USER_SETTINGS = (_CONFIG, "VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_STREAM")
_MAX_BYTES = 10_000_000  # then the file is rotated, and the previous one deleted


def log_file() -> Path:
    return cache_dir() / "logs" / "vllm.log"


def send_log_to_file() -> None:
    """Configure vLLM's log; must be called before vLLM is imported, and has no effect later."""
    if any(name in os.environ for name in _USER_SETTINGS):
        return
    path = log_file().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "%(levelname)s %(asctime)s pid=%(process)d [%(name)s:%(lineno)d] %(message)s"
    handlers = {
        "file": {
            "class": "logging.handlers.RotatingFileHandler",
            "filename": str(path),
            "maxBytes": _MAX_BYTES,
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
    """Where vLLM's log is, for the end of an error message."""
    configured = os.environ.get(_CONFIG) == str(log_file().absolute().with_suffix(".json"))
    return f"its log: {log_file()}" if configured else "see its log"


@contextmanager
def quiet_start() -> Iterator[None]:
    """While open, suppress warnings that libraries emit about vLLM's own code."""
    logger = logging.getLogger("torch._library.triton")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
