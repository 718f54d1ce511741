"""A GGUF file becomes a plain Hugging Face directory: bfloat16 safetensors and a tokenizer.

transformers dequantizes the weights. `$FLEDGE_GGUF_DTYPE=float32` keeps what rounding to bfloat16
would lose, in twice the space. Whoever only wants to tokenise gets the tokenizer and the
configuration alone, from the file's metadata. The tokenizer is built here from the file's own
tables: transformers' conversion loses the pre-tokenizer (without SmolLM2's, 2 % of prompts tokenise
differently) and the end-of-turn token (it reports the bos token as eos).
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, nearest
from fledge.core.files import write_json
from fledge.models.progress import Percentages, phase
from fledge.models.stored import is_whole, models_root, need_free, stored

DTYPE_VARIABLE = "FLEDGE_GGUF_DTYPE"
_MAGIC = b"GGUF"
_BYTES = {"bfloat16": 2, "float32": 4}  # of a weight, by the precision it is stored in
_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType, as stored in tokenizer.ggml.token_type

# `tokenizer.ggml.pre` -> how text is cut before byte-pair merging. Names that share a rule share
# a value. A name that is not here is refused: a wrong cut would go unnoticed until serving.
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


@dataclass(frozen=True)
class _Facts:
    """The file's metadata."""

    fields: dict[str, Any]
    n_parameters: int
    data_offset: int  # where the metadata ends and the weights begin

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(key, default)

    def token(self, key: str) -> str | None:
        """The text of a special token that the file names by id."""
        index = self.get(f"tokenizer.ggml.{key}_token_id")
        tokens = self.get("tokenizer.ggml.tokens", [])
        return tokens[index] if isinstance(index, int) and index < len(tokens) else None


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as handle:
        return handle.read(4) == _MAGIC


def directory_name(sha256: str, dtype: str = "float32") -> str:
    """v2 is this file's way of converting: raise it when the output changes."""
    return f"gguf-v2-{sha256}" + ("" if dtype == "float32" else f"-{dtype}")


def converted_directory(path: Path) -> Path:
    """The converted directory of a GGUF file, made on first use and keyed by its contents."""
    _check(path)
    sha256 = _noted(path, "file", _sha256)
    dtype = _asked_dtype()
    if dtype is None:  # a conversion that is there already is good, and a run may depend on it
        exact = is_whole(models_root() / directory_name(sha256))
        dtype = "float32" if exact else "bfloat16"
    source = {"name": path.name, "source": str(path.resolve()), "sha256": sha256}

    def make(directory: Path) -> None:
        convert(path, directory, name=path.name, dtype=dtype)

    return stored(directory_name(sha256, dtype), make, source=source)


def tokenizer_directory(path: Path) -> Path:
    """Tokenizer and configuration of a GGUF file, in files equal to those of its conversion. Keyed
    by its metadata: the weights are not even read."""
    _check(path)
    sha256 = _noted(path, "metadata", _metadata_sha256)
    source = {"name": path.name, "source": str(path.resolve()), "metadata_sha256": sha256}

    def make(directory: Path) -> None:
        from transformers import AutoConfig

        with phase(f"{path.name}: reading its tokenizer (once)") as tell, _quietly(path, tell):
            _tokenizer(path, _read(path)).save_pretrained(directory)
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            config.save_pretrained(directory)
            _make_portable(directory)

    return stored(f"gguf-v2-tokenizer-{sha256}", make, source=source)


def public_name(path: Path) -> str:
    """The hub repository that the file says it was made from, or else its own name."""
    with _readable(path):
        facts = _read(path)
    places = (
        "general.source.huggingface.repository",
        "general.source.repo_url",
        "general.base_model.0.repo_url",
    )
    urls = (str(facts.get(place) or "") for place in places)
    ids = ("/".join(url.rstrip("/").split("/")[-2:]) for url in urls)
    return next((name for name in ids if name.count("/") == 1), path.stem)


def _check(path: Path) -> None:
    if not path.is_file():
        fix = "check the path; relative paths start at the current directory"
        raise BadInput("no such file", where=str(path), fix=fix)
    if not is_gguf(path):
        raise BadInput("not a GGUF file (it does not start with GGUF)", where=str(path))


def _asked_dtype() -> str | None:
    asked = os.environ.get(DTYPE_VARIABLE) or None
    if asked is not None and asked not in _BYTES:
        fix = nearest(asked, list(_BYTES))
        raise BadInput(f"'{asked}' is not a precision", where=DTYPE_VARIABLE, fix=fix)
    return asked


def convert(path: Path, directory: Path, *, name: str, dtype: str) -> None:
    """Write `path` as a Hugging Face directory; the caller sees to it that it appears whole."""
    with _readable(path):
        facts = _read(path)
    n_bytes = _BYTES[dtype] * facts.n_parameters
    need_free(n_bytes, what=f"converting {name}")
    sizes = f"{_size(path.stat().st_size)} to {_size(n_bytes)} of {dtype} safetensors"
    with phase(f"{name}: converting {sizes} (once)") as tell, _quietly(path, tell):
        tokenizer = _tokenizer(path, facts)
        tokenizer.save_pretrained(directory)
        _save_model(path, directory, tokenizer, dtype)
        _make_portable(directory)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{max(1, round(n_bytes / 1e6))} MB"


@contextlib.contextmanager
def _quietly(path: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """The libraries' bars would cut through our line: it says how far they are."""
    with _readable(path), contextlib.redirect_stderr(Percentages(tell)):
        yield


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """gguf and transformers raise all kinds of errors for a damaged file."""
    try:
        yield
    except BadInput:
        raise
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError, ImportError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        fix = "the file may be damaged or of an architecture that transformers cannot load"
        raise BadInput(f"cannot convert ({first})", where=str(path), fix=fix) from error


def _read(path: Path) -> _Facts:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    wanted = (key for key in reader.fields if not key.startswith("GGUF."))
    fields = {key: reader.fields[key].contents() for key in wanted}
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return _Facts(fields, parameters, int(reader.data_offset))


def _tokenizer(path: Path, facts: _Facts) -> Any:
    """A fast tokenizer with the special tokens and the chat template that the file names."""
    from tokenizers import processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if facts.get("tokenizer.ggml.model") == "gpt2":
        backend = _byte_level_bpe(path, facts)
    else:  # SentencePiece families: transformers' conversion keeps their rules
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


def _byte_level_bpe(path: Path, facts: _Facts) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    pre = facts.get("tokenizer.ggml.pre", "gpt-2")
    rule = _PRE_TOKENIZER.get(pre)
    if rule is None:
        raise BadInput(
            f"its pre-tokenizer '{pre}' is not known, and guessing would tokenise text wrongly",
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
    named = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, k in named if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, k in named if k == _USER_DEFINED]
    )
    return tokenizer


def _pre_tokenizer(rule: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    own = rule in ("gpt2", "digits")  # bytes are cut by GPT-2's own pattern
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)
    if rule == "gpt2":
        return bytes_
    if rule == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    pattern = Regex(_SPLIT_PATTERN % ("{1,3}" if rule == "llama3" else ""))
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), bytes_])


def _make_portable(directory: Path) -> None:
    """Say what transformers 5 writes in a way that 4.57 understands too.

    It does not know the tokenizer's class, would add token types (which decoders refuse) unless the
    inputs are named, and without `rope_theta` turns at a base of 10,000.
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
    if eps is not None:  # the file holds float32: 9.999999747378752e-06 was meant as 1e-05
        model.config.rms_norm_eps = float(str(np.float32(eps)))
    vars(model.config).pop("_model_name_or_path", None)  # the file's title, not a place
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(directory)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _metadata_sha256(path: Path) -> str:
    """All that stands before the weights."""
    with _readable(path):
        size = _read(path).data_offset
    with path.open("rb") as handle:
        return hashlib.sha256(handle.read(size)).hexdigest()


def _noted(path: Path, what: str, digest: Callable[[Path], str]) -> str:
    """A hash of the file, remembered by path, size and time: large files are read only once."""
    stat = path.stat()
    place = str(path.resolve())
    state = [place, stat.st_size, stat.st_mtime_ns, stat.st_ino]
    key = hashlib.sha256(place.encode()).hexdigest()[:24]
    note = models_root() / "hashes" / (f"{key}.json" if what == "file" else f"{key}-{what}.json")
    try:
        noted = json.loads(note.read_text())
    except (OSError, ValueError):
        noted = None
    if isinstance(noted, dict) and noted.get("state") == state:
        return str(noted["sha256"])
    sha256 = digest(path)
    with contextlib.suppress(OSError):  # only a note: a real problem with the cache shows later
        write_json(note, {"state": state, "sha256": sha256})
    return sha256
