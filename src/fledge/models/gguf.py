"""GGUF files, converted to plain Hugging Face directories: bfloat16 safetensors and a tokenizer.

transformers dequantizes the weights. `$FLEDGE_GGUF_DTYPE=float32` keeps what rounding to bfloat16
would lose, in twice the space. The tokenizer is built here, from the file's own tables.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, first_line, nearest
from fledge.core.files import write_json
from fledge.core.reading import Flag, ListOf, Table, Text, Whole, check, open_regular, read_json
from fledge.models.stored import is_whole, models_root, need_free, phase, stored

DTYPE_VARIABLE = "FLEDGE_GGUF_DTYPE"
_BYTES = {"bfloat16": 2, "float32": 4}  # per weight, by the precision of the output
_MAX_GROWTH = 2  # limit of model size / size of the file's tensors: tied tables become two
_TOKEN_ID = Whole(0, 2**32)
_MOST_TOKENS = 2**24
_TOKENIZER = "tokenizer.ggml"
# The metadata that this module reads.
_FIELDS = Table(
    {"general.architecture": Text(64)},
    optional={
        **dict.fromkeys((f"{_TOKENIZER}.model", f"{_TOKENIZER}.pre"), Text(64)),
        f"{_TOKENIZER}.tokens": ListOf(Text(), most=_MOST_TOKENS),
        f"{_TOKENIZER}.merges": ListOf(Text(), most=_MOST_TOKENS),
        f"{_TOKENIZER}.token_type": ListOf(Whole(0, 2**31), most=_MOST_TOKENS),
        f"{_TOKENIZER}.add_bos_token": Flag(),
        "tokenizer.chat_template": Text(2**24),
        **{
            f"{_TOKENIZER}.{name}_token_id": _TOKEN_ID
            for name in ("bos", "eos", "padding", "unknown")
        },
    },
)


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as handle:
        return handle.read(4) == b"GGUF"


def directory_name(sha256: str, dtype: str = "float32") -> str:
    """Name of the converted directory. v2 is the version of this conversion: raise it when the
    output changes."""
    return f"gguf-v2-{sha256}" + ("" if dtype == "float32" else f"-{dtype}")


def converted_directory(path: Path) -> Path:
    """The converted directory of a GGUF file, created on first use and keyed by its contents."""
    if not path.is_file():
        fix = "check the path; relative paths start at the current directory"
        raise BadInput("no such file", where=str(path), fix=fix)
    if not is_gguf(path):
        raise BadInput("not a GGUF file (it does not start with GGUF)", where=str(path))
    sha256 = _cached_sha256(path)
    dtype = os.environ.get(DTYPE_VARIABLE)
    if not dtype:  # reuse an existing float32 conversion: a run may depend on it
        dtype = "float32" if is_whole(models_root() / directory_name(sha256)) else "bfloat16"
    if dtype not in _BYTES:
        fix = nearest(dtype, list(_BYTES))
        raise BadInput(f"'{dtype}' is not a precision", where=DTYPE_VARIABLE, fix=fix)
    source = {"name": path.name, "source": str(path.resolve()), "sha256": sha256}

    def make(directory: Path) -> None:
        convert(path, directory, name=path.name, dtype=dtype)

    return stored(directory_name(sha256, dtype), make, source=source)


def _cached_sha256(path: Path) -> str:
    """The hash of the file, cached by path, size and time: large files are read only once."""
    stat, location = path.stat(), str(path.resolve())
    state = [location, stat.st_size, stat.st_mtime_ns, stat.st_ino]
    key = hashlib.sha256(location.encode()).hexdigest()[:24]
    file = models_root() / "hashes" / f"{key}.json"
    with contextlib.suppress(BadInput):  # missing or unreadable
        cached = read_json(file, Table({"sha256": Text(64)}))
        if cached.get("state") == state:
            return str(cached["sha256"])
    with path.open("rb") as handle:
        sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # not essential: real cache problems show up later
        write_json(file, {"state": state, "sha256": sha256})
    return sha256


def repositories(path: Path) -> list[str]:
    """The repositories that the file names as its source, likelier ones first, unchecked."""
    with _readable(path):
        facts = read_facts(path)
    keys = ("source.huggingface.repository", "source.repo_url", "base_model.0.repo_url")
    urls = (str(facts.get(f"general.{key}") or "") for key in keys)
    return ["/".join(url.rstrip("/").split("/")[-2:]) for url in urls]


def convert(path: Path, directory: Path, *, name: str, dtype: str) -> None:
    """Write `path` as a Hugging Face directory; the caller makes the result appear atomically."""
    with _readable(path):
        facts = read_facts(path)
        _check_sizes(path, facts)
    n_bytes = _BYTES[dtype] * facts.n_parameters
    need_free(n_bytes, what=f"converting {name}")
    sizes = f"{_size(path.stat().st_size)} to {_size(n_bytes)} of {dtype} safetensors"
    # The bars of the libraries would disrupt our line.
    with (
        phase(f"{name}: converting {sizes} (once)"),
        _readable(path),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        tokenizer = make_tokenizer(path, facts)
        tokenizer.save_pretrained(directory)
        _save_model(path, directory, tokenizer, dtype)
        _make_portable(directory)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{max(1, round(n_bytes / 1e6))} MB"


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


# --- metadata -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """The file's metadata."""

    fields: dict[str, Any]
    n_parameters: int
    blocks: int  # number of layers that have tensors

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(key, default)

    def token(self, key: str) -> str | None:
        """The text of a special token, which the file stores by id."""
        index = self.get(f"{_TOKENIZER}.{key}_token_id")
        tokens = self.get(f"{_TOKENIZER}.tokens", [])
        return tokens[index] if index is not None and index < len(tokens) else None


def read_facts(path: Path) -> Facts:
    reader = _open(path)
    keys = (key for key in reader.fields if not key.startswith("GGUF."))
    fields = {key: reader.fields[key].contents() for key in keys}
    check(fields, _FIELDS, where=str(path), what="its metadata")
    names = (tensor.name.split(".") for tensor in reader.tensors)
    blocks = {parts[1] for parts in names if parts[0] == "blk" and len(parts) > 1}
    return Facts(fields, sum(int(tensor.n_elements) for tensor in reader.tensors), len(blocks))


def _open(path: Path) -> Any:
    """The file in gguf's reader, with what that does not check: beyond the end of the file it reads
    empty values, an array of 2^60 of them for ever, and tensors may lie upon each other. Any damage
    is some kind of exception."""
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]  # a library without types
        def _get(self, offset: int, dtype: Any, count: Any = 1, *order: Any, **more: Any) -> Any:
            end = int(offset) + int(count) * dtype().itemsize
            if end > len(self.data):
                raise ValueError(f"its header says {end:,} bytes, it has {len(self.data):,}")
            return super()._get(offset, dtype, count, *order, **more)

    open_regular(path).close()
    reader = Reader(path)
    if sum(int(tensor.n_bytes) for tensor in reader.tensors) > len(reader.data):
        raise ValueError("its tensors overlap")
    return reader


def _check_sizes(path: Path, facts: Facts) -> None:
    """Refuse metadata that describe a far larger model than the file's tensors, before memory is
    allocated for it: the model is built on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = Table({f"{facts.get('general.architecture')}.block_count": Whole(1, facts.blocks)})
    check(facts.fields, fields, where=str(path), what="its metadata")
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    described = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if described > _MAX_GROWTH * facts.n_parameters + 2**20:
        what = f"its metadata describe {described:,} numbers, it holds {facts.n_parameters:,}"
        raise BadInput(what, where=str(path), fix="the file is damaged: fetch it again")


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
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(path: Path, facts: Facts) -> Any:
    """A fast tokenizer with the special tokens and the chat template of the file."""
    from tokenizers import processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if facts.get("tokenizer.ggml.model") == "gpt2":
        backend = _byte_level_bpe(path, facts)
    else:  # SentencePiece families: the conversion in transformers keeps their rules
        backend = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        ).backend_tokenizer
    bos = facts.token("bos")
    if facts.get("tokenizer.ggml.add_bos_token") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B:1",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
    special = {
        "bos_token": bos,
        "eos_token": facts.token("eos"),
        "pad_token": facts.token("padding") or facts.token("eos"),
        "unk_token": facts.token("unknown"),
    }
    architecture = facts.get("general.architecture", "")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=facts.get("tokenizer.chat_template"),
        model_max_length=facts.get(f"{architecture}.context_length", int(1e30)),
        clean_up_tokenization_spaces=False,
        **{key: token for key, token in special.items() if token is not None},
    )


def _byte_level_bpe(path: Path, facts: Facts) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    pre = facts.get("tokenizer.ggml.pre", "gpt-2")
    rule = _PRE_TOKENIZER.get(pre)
    if rule is None:
        raise BadInput(
            f"its pre-tokenizer '{pre}' is not known, and guessing would tokenize text wrongly",
            where=str(path),
            fix="use the model's Hugging Face directory or hub id instead",
        )
    tokens: list[str] = facts.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in facts.get("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule == "llama3"))
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = facts.get("tokenizer.ggml.token_type", [])
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
    pattern = Regex(_SPLIT_PATTERN % ("{1,3}" if rule == "llama3" else ""))
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), bytes_])
