"""Qwen2 GGUF files: tokenizer, end tokens and biases; the real Qwen2.5-Coder answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from textbook_bpe import CUTS, TEXTS, TextbookBPE
from tiny_gguf import CONTROL, MERGES, USER_DEFINED, tiny_qwen2, vocabulary, write_gguf

from fledge.decode.stops import eos_token_ids
from fledge.models import embedded
from fledge.models.gguf import convert
from fledge.models.resolve import load_model, load_tokenizer

NAME = "qwen2.5-coder-0.5b"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("qwen2") / "tiny.gguf"
    return write_gguf(place, tiny_qwen2(), pre="qwen2")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_tokenizer(str(file))


@pytest.fixture(scope="session")
def real() -> str:
    if not embedded.MODELS[NAME].directory.is_dir():
        pytest.skip(f"{NAME} is not in the cache: 491 MB are not downloaded for a test")
    return NAME


@pytest.mark.usefixtures("own_cache")
def test_biases_head_and_rope_base_are_converted(file: Path, tmp_path: Path) -> None:
    convert(file, tmp_path / "exact", dtype="float32")
    model, original = load_model(str(tmp_path / "exact")), tiny_qwen2()
    ids = torch.randint(0, 264, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-6)
    assert not model.config.tie_word_embeddings


@pytest.mark.usefixtures("own_cache")
def test_end_of_turn_and_end_of_text_both_end_an_answer(file: Path) -> None:
    model, tokenizer = load_model(str(file)), load_tokenizer(str(file))
    assert [tokenizer.eos_token, tokenizer.pad_token] == ["<|im_end|>", "<|endoftext|>"]
    assert eos_token_ids(model, tokenizer) == {2, 0}
    assert model.generation_config.eos_token_id == [2, 0]  # end of turn first
    assert model.config.eos_token_id == 2
    assert tokenizer("hi")["input_ids"] == tokenizer("hi", add_special_tokens=False)["input_ids"]


TINY = TextbookBPE(
    {token: index for index, token in enumerate(vocabulary())}, MERGES, [*CONTROL, USER_DEFINED]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text("aZ19 '\n\r\tsTlLrEvé\u0301中½!.\u00a0_") | st.sampled_from(TEXTS))
def test_text_is_split_and_merged_as_in_the_reference(tokenizer: Any, text: str) -> None:
    cuts = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cuts] == CUTS.findall(text)
    assert tokenizer(text)["input_ids"] == TINY(text)


def test_the_real_tokenizer_equals_the_reference(real: str) -> None:
    tokenizer = load_tokenizer(real)
    stored = json.loads((embedded.MODELS[real].directory / "tokenizer.json").read_text())
    model = stored["model"]
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    added = [token["content"] for token in stored["added_tokens"]]
    reference = TextbookBPE(model["vocab"], merges, added)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == reference(text), text
    assert len(tokenizer) == 151_936
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
