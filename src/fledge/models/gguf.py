"""GGUF files, converted to plain Hugging Face directories: bfloat16 safetensors and a tokenizer.

transformers dequantizes the weights. The tokenizer is built here, from the file's own tables.
"""

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, first_line
from fledge.core.files import write_json
from fledge.models.stored import phase, stored

_TOKENIZER = "tokenizer.ggml"


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as handle:
        return handle.read(4) == b"GGUF"


def directory_name(key: str, dtype: str = "float32") -> str:
    """Name of the converted directory. v2 is the version of this conversion: raise it when the
    output changes."""
    return f"gguf-v2-{key}" + ("" if dtype == "float32" else f"-{dtype}")


def converted_directory(path: Path) -> Path:
    """The converted directory of a GGUF file, created on first use."""
    if not path.is_file():
        fix = "check the path; relative paths start at the current directory"
        raise BadInput("no such file", where=str(path), fix=fix)
    if not is_gguf(path):
        raise BadInput("not a GGUF file (it does not start with GGUF)", where=str(path))
    source, stat = path.resolve(), path.stat()
    state = f"{source}:{stat.st_size}:{stat.st_mtime_ns}"
    name = directory_name(hashlib.sha256(state.encode()).hexdigest()[:24], "bfloat16")
    return stored(name, lambda directory: convert(path, directory), source=str(source))


def convert(path: Path, directory: Path, *, dtype: str = "bfloat16") -> None:
    """Write `path` as a Hugging Face directory; the caller makes the result appear atomically."""
    # The bars of the libraries would disrupt our line.
    with (
        phase(f"{path.name}: converting to {dtype} safetensors (once)"),
        _readable(path),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        tokenizer = make_tokenizer(path, read_facts(path))
        tokenizer.save_pretrained(directory)
        _save_model(path, directory, tokenizer, dtype)
        _make_portable(directory)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors about a damaged file into one BadInput: gguf and transformers raise all kinds of
    errors, and tokenizers nothing more specific than Exception."""
    try:
        yield
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # tokenizers raises no narrower class
        fix = "the file may be damaged or of an architecture that transformers cannot load"
        what = f"cannot convert ({first_line(error)})"
        raise BadInput(what, where=str(path), fix=fix) from error


def read_facts(path: Path) -> dict[str, Any]:
    """The file's metadata."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    return {key: fields[key].contents() for key in fields if not key.startswith("GGUF.")}


# --- weights --------------------------------------------------------------------------------------


def _save_model(path: Path, directory: Path, tokenizer: Any, dtype: str) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    options: dict[str, Any] = {}
    try:  # newer transformers keep GGUF blocks by default; older ones always unpack
        from transformers import GgufConfig
    except ImportError:
        pass
    else:
        options["quantization_config"] = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=getattr(torch, dtype),
        trust_remote_code=False,
        **options,
    )
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    for key, value in ids.items():
        setattr(model.config, key, value)
    eps = getattr(model.config, "rms_norm_eps", None)
    if eps is not None:  # stored as float32: 9.999999747378752e-06 stands for 1e-05
        model.config.rms_norm_eps = float(str(np.float32(eps)))
    vars(model.config).pop("_model_name_or_path", None)  # the file's title, not a path
    # Chat models such as Qwen end a turn with one token and a document with another, which is also
    # the pad token: generation stops at either.
    ends = [end for end in (ids["eos_token_id"], ids["pad_token_id"]) if end is not None]
    if len(set(ends)) > 1:
        ids["eos_token_id"] = ends
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(directory)


def _make_portable(directory: Path) -> None:
    """Rewrite the files of transformers 5 so that 4.57 can read them, too.

    It does not have the tokenizer's class, adds token types (which decoders refuse) unless the
    inputs are listed, and without `rope_theta` uses a rotary base of 10,000.
    """
    file = directory / "tokenizer_config.json"
    inputs = ["input_ids", "attention_mask"]
    portable = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs}
    write_json(file, {**json.loads(file.read_text()), **portable})
    file = directory / "config.json"
    config = json.loads(file.read_text())
    rotary = config.get("rope_parameters") or {}
    if "rope_theta" in rotary:
        config["rope_theta"] = rotary["rope_theta"]
    if rotary.get("rope_type", "default") != "default":
        config["rope_scaling"] = rotary
    write_json(file, config)


# --- tokenizer ------------------------------------------------------------------------------------
# The conversion in transformers loses the pre-tokenizer (without SmolLM2's, 2 % of prompts tokenize
# differently) and the end-of-turn token (it reports the bos token as eos).


_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType, as stored in tokenizer.ggml.token_type

# `tokenizer.ggml.pre` -> how text is split before byte-pair merging. Names that share a rule share
# a value. Other names are refused: a wrong split would go unnoticed until serving.
_PRE_TOKENIZER = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), "gpt2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
}
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(path: Path, facts: dict[str, Any]) -> Any:
    """A fast tokenizer with the special tokens and the chat template of the file."""
    from tokenizers import processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if facts.get(f"{_TOKENIZER}.model") == "gpt2":
        backend = _byte_level_bpe(path, facts)
    else:  # SentencePiece families: the conversion in transformers keeps their rules
        backend = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        ).backend_tokenizer
    bos = _special_token(facts, "bos")
    if facts.get(f"{_TOKENIZER}.add_bos_token") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B:1",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
    special = {
        "bos_token": bos,
        "eos_token": _special_token(facts, "eos"),
        "pad_token": _special_token(facts, "padding") or _special_token(facts, "eos"),
        "unk_token": _special_token(facts, "unknown"),
    }
    architecture = facts.get("general.architecture", "")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=facts.get("tokenizer.chat_template"),
        model_max_length=facts.get(f"{architecture}.context_length", int(1e30)),
        clean_up_tokenization_spaces=False,
        **{key: token for key, token in special.items() if token is not None},
    )


def _special_token(facts: dict[str, Any], name: str) -> str | None:
    """The text of a special token, which the file stores by id."""
    index = facts.get(f"{_TOKENIZER}.{name}_token_id")
    return None if index is None else str(facts[f"{_TOKENIZER}.tokens"][index])


def _byte_level_bpe(path: Path, facts: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    pre = facts.get(f"{_TOKENIZER}.pre", "gpt-2")
    rule = _PRE_TOKENIZER.get(pre)
    if rule is None:
        raise BadInput(
            f"its pre-tokenizer '{pre}' is not known, and guessing would tokenize text wrongly",
            where=str(path),
            fix="use the model's Hugging Face directory or hub id instead",
        )
    tokens: list[str] = facts[f"{_TOKENIZER}.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts[f"{_TOKENIZER}.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule == "llama3"))
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = facts.get(f"{_TOKENIZER}.token_type", [])
    pairs = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, k in pairs if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, k in pairs if k == _USER_DEFINED]
    )
    return tokenizer


def _pre_tokenizer(rule: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    use_regex = rule in ("gpt2", "digits")  # ByteLevel then splits by GPT-2's pattern
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    if rule == "gpt2":
        return bytes_
    if rule == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    pattern = Regex(SPLIT_PATTERN % ("{1,3}" if rule == "llama3" else ""))
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), bytes_])
