"""Snapshots from the Hugging Face hub: the files a target needs, or one line that says why not."""

import json
from pathlib import Path

from fledge.errors import BadInput

_SMALL = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]  # configuration, tokenizer, own code
_WEIGHTS = ["*.safetensors"]


def snapshot(repo: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The local directory of a hub repository at a revision, downloaded where it is missing.

    huggingface_hub keeps it under its own cache, asks the hub for news, and falls back to what is
    on the disk when it cannot: so what was fetched once works offline.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = repo if revision is None else f"{repo}@{revision}"
    patterns = _SMALL + _WEIGHTS if weights else _SMALL
    try:
        directory = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        fix = "accept its licence on the hub, then log in with 'hf auth login' or set HF_TOKEN"
        raise BadInput(f"'{name}' is gated", where="model", fix=fix) from error
    except RevisionNotFoundError as error:
        fix = "check the part after the @"
        raise BadInput(f"'{repo}' has no revision '{revision}'", where="model", fix=fix) from error
    except RepositoryNotFoundError as error:
        fix = "check the spelling; for a private one set HF_TOKEN; local paths may start with ./"
        raise BadInput(f"no '{repo}' on the hub", where="model", fix=fix) from error
    except LocalEntryNotFoundError as error:
        raise _offline(name, "it is neither on the disk nor can the hub be reached") from error
    except HFValidationError as error:
        raise BadInput(f"'{name}' is not a hub id", where="model", fix=str(error)) from error
    except HfHubHTTPError as error:
        raise BadInput(f"the hub failed on '{name}'", where="model", fix=str(error)) from error
    _check(directory, name, weights=weights)
    return directory


def _offline(name: str, reason: str) -> BadInput:
    return BadInput(
        f"'{name}': {reason}",
        where="model",
        fix="connect once, or copy the model here and give its directory"
        " (HF_HUB_OFFLINE must not be set while downloading)",
    )


def _check(directory: Path, name: str, *, weights: bool) -> None:
    """An offline snapshot holds whatever was fetched before: see that it is enough."""
    if not (directory / "config.json").is_file():
        fix = "for a GGUF repository download the .gguf file and give its path"
        raise BadInput(f"'{name}' has no config.json", where="model", fix=fix)
    if not weights:
        return
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        needed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        needed = [file.name for file in directory.glob("*.safetensors")] or ["model.safetensors"]
    missing = [file for file in needed if not (directory / file).is_file()]
    if missing:
        reason = f"{len(missing)} weight file(s) are missing, the first is {missing[0]}"
        raise _offline(name, reason)
