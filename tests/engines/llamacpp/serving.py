"""A real llama.cpp server in a process of its own: it may abort, and there is no torch there."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fledge.decode.llamacpp import LlamaServer

HERE = Path(__file__).parent
ENVIRONMENT = Path(os.environ.get("LLAMACPP_PYTHON", HERE.parents[2] / ".venv-llamacpp/bin/python"))


@contextmanager
def serve(**asked: Any) -> Iterator[LlamaServer]:
    """`asked`: what `server_process.py` reads."""
    command = [str(ENVIRONMENT), str(HERE / "server_process.py"), json.dumps(asked)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        lines: list[str] = []
        for line in it.stdout:
            lines.append(line)
            if line.startswith("http"):
                break
        else:
            raise RuntimeError("llama.cpp did not start:\n" + "".join(lines[-20:]))
        try:
            yield LlamaServer(line.strip())
        finally:
            it.kill()
