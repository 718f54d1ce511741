"""A GGUF file is converted once, to a complete directory with the original tokenizer."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import TEMPLATE, tiny_llama, write_gguf

from fledge.core.errors import BadInput
from fledge.models import gguf
from fledge.models.gguf import convert
from fledge.models.resolve import load_config, load_model, load_tokenizer, local_model
from fledge.models.stored import models_root


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama())


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def leftovers() -> list[str]:
    """What the model cache holds besides finished directories, locks and recorded hashes."""
    return [path.name for path in models_root().glob(".*")]


def directories() -> list[Path]:
    return sorted(models_root().glob("gguf-*[!k]"))


def test_the_converted_model_computes_the_same_logits(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_GGUF_DTYPE", "float32")
    model, original = load_model(str(file)), tiny_llama()
    ids = torch.randint(0, 264, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-6)
    assert not model.training
    assert next(model.parameters()).dtype == torch.float32
    config = load_config(str(file))
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    written = json.loads((local_model(str(file)) / "config.json").read_text())
    assert written["rope_theta"] == 20_000.0
    assert written.get("rope_parameters", written)["rope_theta"] == 20_000.0  # 4.57 writes none
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    generation = model.generation_config
    assert (generation.eos_token_id, generation.pad_token_id) == (2, 2)


def test_weights_are_stored_in_bfloat16_by_default(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = local_model(str(file))
    messages = capsys.readouterr().err
    assert "tiny.gguf: converting 1 MB to 1 MB of bfloat16 safetensors (once)" in messages
    stored, original = load_file(half / "model.safetensors"), tiny_llama().state_dict()
    for name, weight in stored.items():
        torch.testing.assert_close(weight, original[name].bfloat16(), rtol=0, atol=0)
    monkeypatch.setenv("FLEDGE_GGUF_DTYPE", "float32")
    exact = local_model(str(file))
    assert exact.name == f"gguf-v2-{sha256_of(file)}"  # the name from before there was a choice
    assert load_file(exact / "model.safetensors").popitem()[1].dtype == torch.float32
    monkeypatch.delenv("FLEDGE_GGUF_DTYPE")
    assert local_model(str(file)) == exact  # it exists: runs that started with it continue
    monkeypatch.setenv("FLEDGE_GGUF_DTYPE", "float33")
    with pytest.raises(BadInput, match="FLEDGE_GGUF_DTYPE: 'float33' is not a precision; did you"):
        local_model(str(file))


def test_the_tokenizer_splits_digits_and_has_its_special_tokens(file: Path) -> None:
    tokenizer = load_tokenizer(str(file))
    written = json.loads((local_model(str(file)) / "tokenizer_config.json").read_text())
    assert written["model_input_names"] == ["input_ids", "attention_mask"]  # 4.57 adds token types
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(" 1234 hi\n")["input_ids"])
    assert pieces == ["Ġ", "1", "2", "3", "4", "Ġhi", "Ċ"]
    assert tokenizer.decode(tokenizer(" 12 hi é\n")["input_ids"]) == " 12 hi é\n"
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 128
    assert tokenizer("<|im_start|>hi<|im_end|>")["input_ids"][0] == 1
    saved = (local_model(str(file)) / "tokenizer_config.json").read_text()
    assert "PreTrainedTokenizerFast" in saved  # known to both transformers 4 and 5


def tokenizer_of(tmp_path: Path, pre: str, **options: Any) -> Any:
    path = write_gguf(tmp_path / f"{pre}.gguf", tiny_llama(), pre=pre, **options)
    return load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "1234 hi", ["123", "4", "Ġhi"]),
        ("llama-bpe", "1234 hi", ["123", "4", "Ġhi"]),  # up to three digits per piece
        ("qwen2", "1234 hi", ["1", "2", "3", "4", "Ġhi"]),  # more in test_qwen2_files
        ("smollm", "zq<tool>", ["z", "q", "<tool>"]),  # no merges lead to zq
        ("llama-bpe", "zq<tool>", ["zq", "<tool>"]),
        ("sentencepiece", "hi é", ["▁hi", "▁", "<0xC3>", "<0xA9>"]),
    ],
)
def test_each_family_splits_text_by_its_own_rules(
    tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    tokenizer = tokenizer_of(tmp_path, pre)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    if pre == "sentencepiece":
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    else:  # a token that the user defined is text
        ids = tokenizer("hi<tool><|im_end|>")["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "hi<tool>"


@pytest.mark.parametrize(
    ("pre", "pieces"), [("smollm", ["<|im_start|>", "hi"]), ("sentencepiece", ["<s>", "▁hi"])]
)
def test_bos_is_added_where_the_file_says_so(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_of(tmp_path, pre, add_bos=True)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hi")["input_ids"]) == pieces
    plain = tokenizer("hi", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(plain) == pieces[1:]


def test_an_unknown_pre_tokenizer_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf", tiny_llama(), pre="martian")
    with pytest.raises(BadInput, match="pre-tokenizer 'martian' is not known"):
        local_model(str(path))
    assert directories() == []
    assert leftovers() == []


def test_a_file_is_converted_once_and_found_by_its_content(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = local_model(str(file))
    monkeypatch.setattr(gguf, "convert", None)  # a second conversion would fail
    assert local_model(str(file)) == first
    moved = file.rename(tmp_path / "renamed.GGUF")
    assert local_model(str(moved)) == first
    assert first.name == f"gguf-v2-{sha256_of(moved)}-bfloat16"


@pytest.mark.parametrize("damage", ["missing", "short", "unsealed"])
def test_a_damaged_directory_is_converted_again(file: Path, damage: str) -> None:
    directory = local_model(str(file))
    weights = directory / "model.safetensors"
    whole = weights.stat().st_size
    if damage == "missing":
        weights.unlink()
    elif damage == "short":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        (directory / "fledge_source.json").write_text("{")
    assert local_model(str(file)) == directory
    assert weights.stat().st_size == whole
    assert leftovers() == []


KILLED = """
import os, sys
from fledge.models import gguf
from fledge.models.resolve import local_model
gguf._save_model = lambda *_: os._exit(9)
local_model(sys.argv[1])
"""


def test_the_next_conversion_removes_leftovers_of_a_killed_one(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(file)], env=os.environ, capture_output=True, check=False
    )
    assert done.returncode == 9, done.stderr
    assert directories() == []
    assert len(leftovers()) == 1
    load_tokenizer(str(file))
    assert leftovers() == []


def test_concurrent_callers_convert_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert, calls = gguf.convert, []

    def counted(path: Path, directory: Path, *, name: str, dtype: str) -> None:
        calls.append(directory)
        convert(path, directory, name=name, dtype=dtype)

    monkeypatch.setattr(gguf, "convert", counted)
    converted: list[Path] = []
    threads = [
        threading.Thread(target=lambda: converted.append(local_model(str(file)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert converted == [directories()[0]] * 4


@pytest.mark.parametrize("keep", [4, 100, 4000])
def test_a_truncated_file_is_refused_in_one_line(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"tiny\.gguf: cannot convert") as caught:
        local_model(str(file))
    assert "\n" not in str(caught.value)
    assert directories() == []


def test_missing_and_non_gguf_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        local_model(str(tmp_path / "missing.gguf"))
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(BadInput, match="not a GGUF file"):
        local_model(str(tmp_path / "text.gguf"))
    (tmp_path / "weights.bin").write_text("hello")
    with pytest.raises(BadInput, match="is a file, but not a GGUF file"):
        local_model(str(tmp_path / "weights.bin"))


def test_a_full_disk_or_unusable_cache_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 1000})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage)
        with pytest.raises(BadInput, match="FLEDGE_CACHE"):
            local_model(str(file))
    (tmp_path / "a_file").write_text("")
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "a_file"))
    with pytest.raises(BadInput, match="FLEDGE_CACHE"):
        local_model(str(file))


def overwritten(file: Path, name: bytes, number: int, *, after: int, width: int) -> None:
    """Overwrite the number that is `after` bytes behind a name in the header."""
    data = bytearray(file.read_bytes())
    at = data.index(name) + len(name) + after
    data[at : at + width] = number.to_bytes(width, "little")
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "number", "after", "width"),
    [
        # more tensors, keys, characters, items, dimensions or weights than the file has bytes
        (b"GGUF", 2**63, 4, 8),
        (b"GGUF", 2**62, 12, 8),
        (b"general.name", 2**60, 4, 8),
        (b"tokenizer.ggml.tokens", 2**50, 8, 8),
        (b"tokenizer.ggml.token_type", 2**40, 8, 8),
        (b"token_embd.weight", 2**31, 0, 4),
        (b"token_embd.weight", 2**50, 4, 8),
        (b"token_embd.weight", 2**60, 24, 8),
        # types that there are not
        (b"tokenizer.ggml.tokens", 9, 4, 4),
        (b"token_embd.weight", 77, 20, 4),
        # metadata of another model than that of the tensors
        (b"llama.block_count", 10**6, 4, 4),
        (b"llama.block_count", 0, 4, 4),
        (b"llama.embedding_length", 2**24, 4, 4),
        (b"llama.feed_forward_length", 2**30, 4, 4),
        (b"llama.vocab_size", 2**31, 4, 4),
    ],
)
def test_a_header_that_contradicts_the_file_is_refused(
    file: Path, tmp_path: Path, name: bytes, number: int, after: int, width: int
) -> None:
    """Before any memory is allocated: the largest of these would take exabytes."""
    overwritten(file, name, number, after=after, width=width)
    with pytest.raises(BadInput) as caught:
        convert(file, tmp_path / "out", name="tiny", dtype="bfloat16")
    assert str(file) in str(caught.value)
    assert not (tmp_path / "out").exists()
