"""A target's tokenizer as keys of a GGUF file: llama.cpp wants it in the draft's file too."""

import json
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.models.gguf import SPLIT_PATTERN, is_gguf, read_facts
from fledge.models.resolve import load_tokenizer, local_model

_PREFIX = "tokenizer.ggml"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_KNOWN = "SmolLM2's and StarCoder's, GPT-2's, Llama 3's, Qwen2's, and SentencePiece with bytes"


def tokenizer_keys(target: str, vocab_size: int, *, trust: bool = False) -> dict[str, Any]:
    """The keys of a GGUF target's own file; of others, derived from tokenizer.json."""
    path = Path(target).expanduser()
    if is_gguf(path):
        return {key: v for key, v in read_facts(path).items() if key.startswith(f"{_PREFIX}.")}
    file = local_model(target, weights=False) / "tokenizer.json"
    if not file.is_file():
        raise _unknown(target, "it has no tokenizer.json")
    values = json.loads(file.read_text())
    model = values["model"]
    if model["type"] != "BPE":
        raise _unknown(target, f"its tokenizer is {model['type']}")
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    for token, index in model["vocab"].items():
        tokens[index], kinds[index] = token, _NORMAL
    for added in values["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER
    keys: dict[str, Any] = {f"{_PREFIX}.tokens": tokens, f"{_PREFIX}.token_type": kinds}
    if model.get("byte_fallback"):
        keys |= _sentencepiece(values, kinds, tokens)
    else:
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        keys |= {f"{_PREFIX}.model": "gpt2", f"{_PREFIX}.pre": _pre_tokenizer(target, values)}
        keys[f"{_PREFIX}.merges"] = merges
    tokenizer = load_tokenizer(target, trust_remote_code=trust)
    for ours, theirs in _SPECIAL.items():
        if (index := getattr(tokenizer, f"{ours}_token_id")) is not None:
            keys[f"{_PREFIX}.{theirs}_token_id"] = index
    starts = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return keys | {f"{_PREFIX}.add_bos_token": starts, f"{_PREFIX}.add_eos_token": False}


def _sentencepiece(values: dict[str, Any], kinds: list[int], tokens: list[str]) -> dict[str, Any]:
    """Merged by rank: a lower id is merged first."""
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x"):
            kinds[index] = _BYTE
        elif token == values["model"].get("unk_token"):
            kinds[index] = _UNKNOWN
    prepends = "Prepend" in json.dumps(values["normalizer"])
    return {
        f"{_PREFIX}.model": "llama",
        f"{_PREFIX}.pre": "default",
        f"{_PREFIX}.scores": [-float(index) for index in range(len(tokens))],
        f"{_PREFIX}.add_space_prefix": prepends,
    }


def _pre_tokenizer(target: str, values: dict[str, Any]) -> str:
    """llama.cpp's name for how text is split before merging; a wrong one would go unnoticed."""
    outer = values["pre_tokenizer"] or {}
    parts = outer.get("pretokenizers", [outer])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        pattern = str(parts[0]["pattern"].get("Regex", ""))
        for name, count in (("llama-bpe", "{1,3}"), ("qwen2", "")):
            if pattern == SPLIT_PATTERN % count:
                return name
    raise _unknown(target, "how its tokenizer splits text has no name that we know")


def _unknown(target: str, why: str) -> BadInput:
    return BadInput(
        f"{why}, and llama.cpp needs the tokenizer in the draft's file",
        where=target,
        fix=f"known: {_KNOWN}; or name the target's GGUF file with --target",
    )
