"""Snapshots from the Hugging Face hub: the files a target needs, or one line that says why not."""

import os
from importlib import import_module
from pathlib import Path

from fledge.core.errors import BadInput
from fledge.core.reading import FileName, MapOf, Table, Text, read_json
from fledge.core.terminal import counted

_SMALL = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]  # configuration, tokenizer, custom code
_WEIGHTS = ["*.safetensors"]


def snapshot(repo: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The local directory of a hub repository at a revision, downloaded if it is missing.

    huggingface_hub keeps it in its own cache, checks the hub for updates, and falls back to the
    local files if the hub cannot be reached, so what was fetched once works offline.
    """
    from huggingface_hub import errors, snapshot_download

    name = repo if revision is None else f"{repo}@{revision}"
    patterns = _SMALL + _WEIGHTS if weights else _SMALL
    try:
        try:
            local = snapshot_download(repo, revision=revision, allow_patterns=patterns)
        except _connection_errors():  # the library does not fall back for a commit hash
            local = snapshot_download(
                repo, revision=revision, allow_patterns=patterns, local_files_only=True
            )
    except errors.GatedRepoError as error:
        fix = "accept its license on the hub, then log in with 'hf auth login' or set HF_TOKEN"
        raise BadInput(f"'{name}' is gated", where="model", fix=fix) from error
    except errors.RevisionNotFoundError as error:
        fix = "check the part after the @"
        raise BadInput(f"'{repo}' has no revision '{revision}'", where="model", fix=fix) from error
    except errors.RepositoryNotFoundError as error:
        fix = "check the spelling; for a private one set HF_TOKEN; local paths may start with ./"
        raise BadInput(f"no '{repo}' on the hub", where="model", fix=fix) from error
    except errors.LocalEntryNotFoundError as error:
        raise _offline(name, "it is not on the disk, and the hub cannot be reached") from error
    except errors.HFValidationError as error:
        raise BadInput(f"'{name}' is not a hub id", where="model", fix=str(error)) from error
    except errors.HfHubHTTPError as error:
        raise BadInput(f"the hub failed on '{name}'", where="model", fix=str(error)) from error
    directory = Path(local)
    _check(directory, name, weights=weights)
    return directory


def _connection_errors() -> tuple[type[Exception], ...]:
    """Exceptions of a missing network; huggingface_hub 1 uses httpx, 0.x requests."""
    kinds: list[type[Exception]] = [ConnectionError, TimeoutError]
    for library, name in (("httpx", "TransportError"), ("requests", "ConnectionError")):
        try:
            kinds.append(getattr(import_module(library), name))
        except ImportError:
            continue
    return tuple(kinds)


def _offline(name: str, reason: str) -> BadInput:
    fix = "connect once, or copy the model here and give its directory"
    if os.environ.get("HF_HUB_OFFLINE"):
        fix = f"unset HF_HUB_OFFLINE to download it; {fix}"
    return BadInput(f"'{name}': {reason}", where="model", fix=fix)


def _check(directory: Path, name: str, *, weights: bool) -> None:
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
