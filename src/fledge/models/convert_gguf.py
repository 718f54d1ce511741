"""Converts a GGUF file to a plain Hugging Face directory: bfloat16 safetensors and a tokenizer.

transformers dequantizes the weights. `$FLEDGE_GGUF_DTYPE=float32` keeps what rounding to bfloat16
would lose, in twice the space. For tokenization alone, only the tokenizer and the configuration are
extracted, from the file's metadata.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, first_line, nearest
from fledge.core.files import write_json
from fledge.core.reading import Table, Text, Whole, check, read_json
from fledge.models.gguf import MAGIC, Facts, make_tokenizer, read_facts
from fledge.models.stored import Percentages, is_whole, models_root, need_free, phase, stored

DTYPE_VARIABLE = "FLEDGE_GGUF_DTYPE"
_BYTES = {"bfloat16": 2, "float32": 4}  # per weight, by the precision of the output
_MAX_GROWTH = 2  # limit of model size / size of the file's tensors: tied tables become two


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as handle:
        return handle.read(4) == MAGIC


def directory_name(sha256: str, dtype: str = "float32") -> str:
    """Name of the converted directory. v2 is the version of this conversion: raise it when the
    output changes."""
    return f"gguf-v2-{sha256}" + ("" if dtype == "float32" else f"-{dtype}")


def converted_directory(path: Path) -> Path:
    """The converted directory of a GGUF file, created on first use and keyed by its contents."""
    _check(path)
    sha256 = _cached_digest(path, "file", _sha256)
    dtype = _requested_dtype()
    if dtype is None:  # reuse an existing float32 conversion: a run may depend on it
        exact = is_whole(models_root() / directory_name(sha256))
        dtype = "float32" if exact else "bfloat16"
    source = {"name": path.name, "source": str(path.resolve()), "sha256": sha256}

    def make(directory: Path) -> None:
        convert(path, directory, name=path.name, dtype=dtype)

    return stored(directory_name(sha256, dtype), make, source=source)


def tokenizer_directory(path: Path) -> Path:
    """Tokenizer and configuration of a GGUF file, in files equal to those of its conversion. Keyed
    by its metadata, so the weights are not read at all."""
    _check(path)
    sha256 = _cached_digest(path, "metadata", _metadata_sha256)
    source = {"name": path.name, "source": str(path.resolve()), "metadata_sha256": sha256}

    def make(directory: Path) -> None:
        from transformers import AutoConfig

        with phase(f"{path.name}: reading its tokenizer (once)") as tell, _relay_bars(path, tell):
            facts = read_facts(path)
            _check_sizes(path, facts)
            make_tokenizer(path, facts).save_pretrained(directory)
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            config.save_pretrained(directory)
            _make_portable(directory)

    return stored(f"gguf-v2-tokenizer-{sha256}", make, source=source)


def repositories(path: Path) -> list[str]:
    """The repositories that the file names as its source, likelier ones first, unchecked."""
    with _readable(path):
        facts = read_facts(path)
    keys = (
        "general.source.huggingface.repository",
        "general.source.repo_url",
        "general.base_model.0.repo_url",
    )
    urls = (str(facts.get(key) or "") for key in keys)
    return ["/".join(url.rstrip("/").split("/")[-2:]) for url in urls]


def _check(path: Path) -> None:
    if not path.is_file():
        fix = "check the path; relative paths start at the current directory"
        raise BadInput("no such file", where=str(path), fix=fix)
    if not is_gguf(path):
        raise BadInput("not a GGUF file (it does not start with GGUF)", where=str(path))


def _requested_dtype() -> str | None:
    dtype = os.environ.get(DTYPE_VARIABLE) or None
    if dtype is not None and dtype not in _BYTES:
        fix = nearest(dtype, list(_BYTES))
        raise BadInput(f"'{dtype}' is not a precision", where=DTYPE_VARIABLE, fix=fix)
    return dtype


def convert(path: Path, directory: Path, *, name: str, dtype: str) -> None:
    """Write `path` as a Hugging Face directory; the caller makes the result appear atomically."""
    with _readable(path):
        facts = read_facts(path)
        _check_sizes(path, facts)
    n_bytes = _BYTES[dtype] * facts.n_parameters
    need_free(n_bytes, what=f"converting {name}")
    sizes = f"{_size(path.stat().st_size)} to {_size(n_bytes)} of {dtype} safetensors"
    with phase(f"{name}: converting {sizes} (once)") as tell, _relay_bars(path, tell):
        tokenizer = make_tokenizer(path, facts)
        tokenizer.save_pretrained(directory)
        _save_model(path, directory, tokenizer, dtype)
        _make_portable(directory)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{max(1, round(n_bytes / 1e6))} MB"


@contextlib.contextmanager
def _relay_bars(path: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Show the progress of the libraries in our line, which their own bars would disrupt."""
    with _readable(path), contextlib.redirect_stderr(Percentages(tell)):
        yield


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors about a damaged file into one BadInput: gguf and transformers raise all kinds of
    errors, and tokenizers nothing more specific than Exception."""
    try:
        yield
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # see above
        fix = "the file may be damaged or of an architecture that transformers cannot load"
        what = f"cannot convert ({first_line(error)})"
        raise BadInput(what, where=str(path), fix=fix) from error


def _check_sizes(path: Path, facts: Facts) -> None:
    """Refuse metadata that describe a far larger model than the file's tensors, before memory is
    allocated for it: the model is built on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = facts.get("general.architecture")
    layers = Whole(1, facts.blocks)
    fields = Table({f"{architecture}.block_count": layers})
    check(facts.fields, fields, where=str(path), what="its metadata")
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    described = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if described > _MAX_GROWTH * facts.n_parameters + 2**20:
        what = f"its metadata describe {described:,} numbers, it holds {facts.n_parameters:,}"
        raise BadInput(what, where=str(path), fix="the file is damaged: fetch it again")


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


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _metadata_sha256(path: Path) -> str:
    """Digest of everything before the weights."""
    with _readable(path):
        size = read_facts(path).data_offset
    with path.open("rb") as handle:
        return hashlib.sha256(handle.read(size)).hexdigest()


def _cached_digest(path: Path, what: str, digest: Callable[[Path], str]) -> str:
    """A hash of the file, cached by path, size and time: large files are read only once."""
    stat = path.stat()
    location = str(path.resolve())
    state = [location, stat.st_size, stat.st_mtime_ns, stat.st_ino]
    key = hashlib.sha256(location.encode()).hexdigest()[:24]
    file = models_root() / "hashes" / (f"{key}.json" if what == "file" else f"{key}-{what}.json")
    with contextlib.suppress(BadInput):  # missing or unreadable
        cached = read_json(file, Table({"sha256": Text(64)}))
        if cached.get("state") == state:
            return str(cached["sha256"])
    sha256 = digest(path)
    with contextlib.suppress(OSError):  # not essential: real cache problems show up later
        write_json(file, {"state": state, "sha256": sha256})
    return sha256
