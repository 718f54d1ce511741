"""A GGUF file is converted once, to a complete directory with the original tokenizer."""

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


def leftovers() -> list[str]:
    """What the model cache holds besides finished directories and locks."""
    return [path.name for path in models_root().glob(".*")]


def directories() -> list[Path]:
    return sorted(models_root().glob("gguf-*[!k]"))


def test_the_converted_model_computes_the_same_logits(file: Path, tmp_path: Path) -> None:
    convert(file, tmp_path / "exact", dtype="float32")
    model, original = load_model(str(tmp_path / "exact")), tiny_llama()
    ids = torch.randint(0, 264, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-6)
    assert not model.training
    assert next(model.parameters()).dtype == torch.float32
    config = load_config(str(tmp_path / "exact"))
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    written = json.loads((tmp_path / "exact" / "config.json").read_text())
    assert written["rope_theta"] == 20_000.0
    assert written.get("rope_parameters", written)["rope_theta"] == 20_000.0  # 4.57 writes none
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    generation = model.generation_config
    assert (generation.eos_token_id, generation.pad_token_id) == (2, 2)


def test_weights_are_stored_in_bfloat16(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = local_model(str(file))
    assert "tiny.gguf: converting to bfloat16 safetensors (once)" in capsys.readouterr().err
    stored, original = load_file(half / "model.safetensors"), tiny_llama().state_dict()
    for name, weight in stored.items():
        torch.testing.assert_close(weight, original[name].bfloat16(), rtol=0, atol=0)


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
    calls = []

    def counted(path: Path, directory: Path) -> None:
        calls.append(directory)
        convert(path, directory)

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


def test_an_unusable_cache_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_file").write_text("")
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "a_file"))
    with pytest.raises(BadInput, match="FLEDGE_CACHE"):
        local_model(str(file))
