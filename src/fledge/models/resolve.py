"""Models by name: what a user may give as a target, and the local directory it stands for.

A name is a local directory, a GGUF file, an embedded name (`smollm2-135m`) or a hub id (`org/name`,
`org/name@revision`); the rest of fledge sees a Hugging Face directory on the local disk. torch and
transformers are imported on use. Not for drafts, which have their own reader.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.core.errors import BadInput, UntrustedCode, broken_files, first_line, nearest
from fledge.core.reading import Expected, FileName, MapOf, Maybe, Table, Text, Whole, read_json
from fledge.core.terminal import counted
from fledge.models import embedded, gguf

if TYPE_CHECKING:
    import torch

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")

# Numbers from which transformers builds lists or modules before it reads any weights.
_COUNTS: dict[str, Expected] = {
    "num_labels": Maybe(Whole(0, 2**20)),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), Maybe(Whole(0, 2**12))),
}
_CONFIG = Table(optional={**_COUNTS, "text_config": Maybe(Table(optional=_COUNTS))})


def local_model(name: str, *, weights: bool = True) -> Path:
    """The local directory of a model, which is fetched or converted once if needed.

    With `weights=False` only the configuration and the tokenizer are needed, so that gigabytes of
    weights are not fetched for a hub id.
    """
    if name in embedded.MODELS:
        return embedded.embedded_directory(name)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _checked_directory(path, name)
    if path.suffix.lower() == ".gguf" or gguf.is_gguf(path):
        return gguf.converted_directory(path)
    if path.is_file():
        raise BadInput(
            f"'{name}' is a file, but not a GGUF file",
            where="model",
            fix="name the directory that holds config.json",
        )
    if match := _HUB_ID.fullmatch(name):
        return _snapshot(match["id"], revision=match["revision"], weights=weights)
    raise BadInput(f"no such model '{name}'", where="model", fix=_name_hint(name))


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def public_name(name: str) -> str:
    """The name of a model for others: a hub id, or else a name without local directories."""
    if name in embedded.MODELS:
        return embedded.MODELS[name].public_name
    path = Path(name).expanduser()
    if path.is_file():
        return next(filter(is_hub_id, gguf.repositories(path)), path.stem)
    if not path.exists():
        return name if is_hub_id(name) else path.name
    parts = path.resolve().parts
    repository = next((part for part in parts if part.startswith("models--")), "")
    if repository.count("--") == 2:  # a snapshot in the hub's cache: models--org--name
        return repository.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def load_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """The model's transformers configuration."""
    from transformers import AutoConfig

    directory = local_model(name, weights=False)
    with _load_errors("configuration", name):
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer, chat template included."""
    from transformers import AutoTokenizer

    directory = local_model(name, weights=False)
    with _load_errors("tokenizer", name):
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def load_model(
    name: str,
    *,
    dtype: "torch.dtype | str" = "auto",
    device: "torch.device | str" = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The causal language model, in eval mode on `device`; `auto` keeps the stored dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    if dtype != "auto":
        dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        if not isinstance(dtype, torch.dtype):
            raise BadInput(f"'{dtype}' is not a dtype", where="dtype", fix="for example bfloat16")
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    directory = local_model(name)
    with _load_errors("model", name):
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=trust_remote_code, **options
        )
    return model.to(device).eval()


def _checked_directory(path: Path, name: str) -> Path:
    for file in path.iterdir():
        if file.is_fifo() or file.is_socket() or file.is_char_device() or file.is_block_device():
            raise BadInput("a pipe or a device, not a file of a model", where=str(file))
    if (config := path / "config.json").is_file():
        read_json(config, _CONFIG, what="the model's config", fix="is it a model?", finite=False)
        return path.resolve()
    files = sorted(path.glob("*.gguf"))
    fix = f"name the file itself: {files[0]}" if files else "it must hold a Hugging Face model"
    raise BadInput(f"directory '{name}' has no config.json", where="model", fix=fix)


def _name_hint(name: str) -> str:
    names = sorted(embedded.MODELS)
    if not re.fullmatch(r"[\w.-]+", name):
        return (
            f"give a directory, a .gguf file, an embedded name ({names[-1]}) or a hub id (org/name)"
        )
    hint = nearest(name, names)  # a mistyped embedded name, or a bare hub name
    if hint.startswith("did you mean"):
        return f"{hint} (hub ids are written org/name)"
    return f"embedded models: {', '.join(names)}; hub ids are written org/name"


def wants_trust(error: Exception) -> bool:
    """Whether transformers refused because it would have to run code that comes with the model."""
    return isinstance(error, ValueError) and "`trust_remote_code=True`" in str(error)


@contextlib.contextmanager
def _load_errors(part: str, name: str) -> Iterator[None]:
    """Turn errors of transformers about a broken directory into one BadInput."""
    try:
        yield
    except broken_files() as error:
        if wants_trust(error):
            raise UntrustedCode.of(name) from error
        raise BadInput(
            f"cannot load the {part} of '{name}'", where="model", fix=first_line(error)
        ) from error


# --- hub -----------------------------------------------------------------------------------------


_SMALL = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]  # configuration, tokenizer, custom code
_WEIGHTS = ["*.safetensors"]


def _snapshot(repo: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The local directory of a hub repository at a revision, downloaded if it is missing.

    huggingface_hub keeps it in its own cache, checks the hub for updates, and falls back to the
    local files if the hub cannot be reached, so what was fetched once works offline.
    """
    from huggingface_hub import errors, snapshot_download

    name = repo if revision is None else f"{repo}@{revision}"
    options: dict[str, Any] = {"allow_patterns": _SMALL + _WEIGHTS if weights else _SMALL}
    try:
        try:
            local = snapshot_download(repo, revision=revision, **options)
        except _connection_errors():  # the library does not fall back for a commit hash
            local = snapshot_download(repo, revision=revision, local_files_only=True, **options)
    except errors.LocalEntryNotFoundError as error:
        raise _offline(name, "it is not on the disk, and the hub cannot be reached") from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        faults: dict[type[Exception], tuple[str, str]] = {
            errors.GatedRepoError: (
                f"'{name}' is gated",
                "accept its license on the hub, then log in with 'hf auth login' or set HF_TOKEN",
            ),
            errors.RevisionNotFoundError: (
                f"'{repo}' has no revision '{revision}'",
                "check the part after the @",
            ),
            errors.RepositoryNotFoundError: (
                f"no '{repo}' on the hub",
                "check the spelling; for a private one set HF_TOKEN; local paths may start with ./",
            ),
            errors.HFValidationError: (f"'{name}' is not a hub id", first_line(error)),
            errors.HfHubHTTPError: (f"the hub failed on '{name}'", first_line(error)),
        }
        what, fix = next(faults[kind] for kind in faults if isinstance(error, kind))
        raise BadInput(what, where="model", fix=fix) from error
    directory = Path(local)
    _check_snapshot(directory, name, weights=weights)
    return directory


def _connection_errors() -> tuple[type[Exception], ...]:
    """Exceptions of a missing network; huggingface_hub 1 uses httpx, 0.x requests."""
    kinds: list[type[Exception]] = [ConnectionError, TimeoutError]
    for library, name in (("httpx", "TransportError"), ("requests", "ConnectionError")):
        with contextlib.suppress(ImportError):
            kinds.append(getattr(import_module(library), name))
    return tuple(kinds)


def _offline(name: str, reason: str) -> BadInput:
    fix = "connect once, or copy the model here and give its directory"
    if os.environ.get("HF_HUB_OFFLINE"):
        fix = f"unset HF_HUB_OFFLINE to download it; {fix}"
    return BadInput(f"'{name}': {reason}", where="model", fix=fix)


def _check_snapshot(directory: Path, name: str, *, weights: bool) -> None:
    """Check that a snapshot is complete: an offline one has only what was fetched before."""
    if not (directory / "config.json").is_file():
        fix = "for a GGUF repository download the .gguf file and give its path"
        raise BadInput(f"'{name}' has no config.json", where="model", fix=fix)
    if not weights:
        return
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        kind = Table({"weight_map": MapOf(FileName(), keys=Text())})
        contents = read_json(index, kind, what="the index of the weights", max_bytes=1 << 28)
        needed = sorted(set(contents["weight_map"].values()))
    else:
        needed = [file.name for file in directory.glob("*.safetensors")] or ["model.safetensors"]
    missing = [file for file in needed if not (directory / file).is_file()]
    if missing:
        files = counted(len(missing), "weight file is", "weight files are")
        reason = f"{files} missing, the first is {missing[0]}"
        raise _offline(name, reason)
