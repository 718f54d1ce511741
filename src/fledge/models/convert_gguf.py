"""A GGUF file becomes a plain Hugging Face directory: bfloat16 safetensors and a tokenizer.

transformers dequantizes the weights. `$FLEDGE_GGUF_DTYPE=float32` keeps what rounding to bfloat16
would lose, in twice the space. Whoever only wants to tokenise gets the tokenizer and the
configuration alone, from the file's metadata.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, first_line, nearest
from fledge.core.expected import Table, Text, Whole
from fledge.core.files import write_json
from fledge.core.reading import check, read_json
from fledge.models.gguf_facts import Facts, read_facts
from fledge.models.gguf_header import MAGIC
from fledge.models.gguf_tokenizer import make_tokenizer
from fledge.models.progress import Percentages, phase
from fledge.models.stored import is_whole, models_root, need_free, stored

DTYPE_VARIABLE = "FLEDGE_GGUF_DTYPE"
_BYTES = {"bfloat16": 2, "float32": 4}  # of a weight, by the precision it is stored in
_BLOAT = 2  # how many times larger than the file's tensors a model may be: tied tables are two


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as handle:
        return handle.read(4) == MAGIC


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
            facts = read_facts(path)
            _check_sizes(path, facts)
            make_tokenizer(path, facts).save_pretrained(directory)
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            config.save_pretrained(directory)
            _make_portable(directory)

    return stored(f"gguf-v2-tokenizer-{sha256}", make, source=source)


def repositories(path: Path) -> list[str]:
    """The repositories that the file says it was made from, likelier ones first, unchecked."""
    with _readable(path):
        facts = read_facts(path)
    places = (
        "general.source.huggingface.repository",
        "general.source.repo_url",
        "general.base_model.0.repo_url",
    )
    urls = (str(facts.get(place) or "") for place in places)
    return ["/".join(url.rstrip("/").split("/")[-2:]) for url in urls]


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
        facts = read_facts(path)
        _check_sizes(path, facts)
    n_bytes = _BYTES[dtype] * facts.n_parameters
    need_free(n_bytes, what=f"converting {name}")
    sizes = f"{_size(path.stat().st_size)} to {_size(n_bytes)} of {dtype} safetensors"
    with phase(f"{name}: converting {sizes} (once)") as tell, _quietly(path, tell):
        tokenizer = make_tokenizer(path, facts)
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
    """gguf and transformers raise all kinds of errors for a damaged file, and tokenizers nothing
    more precise than an Exception."""
    try:
        yield
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # whatever the three raise: see above
        fix = "the file may be damaged or of an architecture that transformers cannot load"
        what = f"cannot convert ({first_line(error)})"
        raise BadInput(what, where=str(path), fix=fix) from error


def _check_sizes(path: Path, facts: Facts) -> None:
    """Refuse metadata that describe a far larger model than the tensors make up, before memory is
    spent on it: the model is built of its shapes alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = facts.get("general.architecture")
    layers = Whole(1, facts.blocks)
    fields = Table({f"{architecture}.block_count": layers})
    check(facts.fields, fields, where=str(path), what="its metadata")
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    promised = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    if promised > _BLOAT * facts.n_parameters + 2**20:
        what = f"its metadata describe {promised:,} numbers, it holds {facts.n_parameters:,}"
        raise BadInput(what, where=str(path), fix="the file is damaged: fetch it again")


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
    # Chat models of Qwen's kind end a turn with one token and a document with another, which also
    # pads: after either there is nothing more to say.
    ends = [end for end in (ids["eos_token_id"], ids["pad_token_id"]) if end is not None]
    if len(set(ends)) > 1:
        ids["eos_token_id"] = ends
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(directory)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _metadata_sha256(path: Path) -> str:
    """All that stands before the weights."""
    with _readable(path):
        size = read_facts(path).data_offset
    with path.open("rb") as handle:
        return hashlib.sha256(handle.read(size)).hexdigest()


def _noted(path: Path, what: str, digest: Callable[[Path], str]) -> str:
    """A hash of the file, remembered by path, size and time: large files are read only once."""
    stat = path.stat()
    place = str(path.resolve())
    state = [place, stat.st_size, stat.st_mtime_ns, stat.st_ino]
    key = hashlib.sha256(place.encode()).hexdigest()[:24]
    note = models_root() / "hashes" / (f"{key}.json" if what == "file" else f"{key}-{what}.json")
    with contextlib.suppress(BadInput):  # no note, or none that can be read
        noted = read_json(note, Table({"sha256": Text(64)}))
        if noted.get("state") == state:
            return str(noted["sha256"])
    sha256 = digest(path)
    with contextlib.suppress(OSError):  # only a note: a real problem with the cache shows later
        write_json(note, {"state": state, "sha256": sha256})
    return sha256
