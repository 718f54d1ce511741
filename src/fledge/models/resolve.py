"""Models by name: what a user may give as a target, and the local directory it stands for.

A name is a local directory, a GGUF file, an embedded name (`smollm2-135m`) or a hub id (`org/name`,
`org/name@revision`); the rest of fledge sees a Hugging Face directory on the local disk. torch and
transformers are imported on use. Not for drafts, which have their own reader.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.core.errors import BadInput, UntrustedCode, broken_files, first_line, nearest
from fledge.core.reading import read_json
from fledge.models import embedded, gguf

if TYPE_CHECKING:
    import torch

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")


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


def comes_as_gguf(name: str) -> bool:
    """Whether its weights were stored in few bits and are float32 only since they were read."""
    path = Path(name).expanduser()
    return name in embedded.MODELS or path.suffix.lower() == ".gguf" or gguf.is_gguf(path)


def gguf_file(name: str) -> Path:
    """The GGUF file of a model that comes as one: what llama.cpp reads."""
    if name in embedded.MODELS:
        return embedded.embedded_file(name)
    path = Path(name).expanduser()
    if not gguf.is_gguf(path):
        raise BadInput("llama.cpp reads GGUF files", where=name, fix="give --target MODEL.gguf")
    return path.resolve()


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def public_name(name: str) -> str:
    """The name of a model for others: a hub id, or else a name without local directories."""
    if name in embedded.MODELS:
        return embedded.MODELS[name].public_name
    path = Path(name).expanduser()
    if path.is_file():
        return path.stem
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
    from transformers import AutoModelForCausalLM

    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    directory = local_model(name)
    with _load_errors("model", name):
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=trust_remote_code, **options
        )
    return model.to(device).eval()


def _checked_directory(path: Path, name: str) -> Path:
    if (config := path / "config.json").is_file():
        read_json(config, what="the model's config", fix="is it a model?")
        return path.resolve()
    files = sorted(path.glob("*.gguf"))
    fix = f"name the file itself: {files[0]}" if files else "it must hold a Hugging Face model"
    raise BadInput(f"directory '{name}' has no config.json", where="model", fix=fix)


def _name_hint(name: str) -> str:
    """What to give instead; a bare name may be a mistyped embedded one."""
    forms = "give a directory, a .gguf file, an embedded name or a hub id (org/name)"
    return forms if "/" in name else f"{nearest(name, sorted(embedded.MODELS))} {forms}"


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
    import httpx
    from huggingface_hub import errors, snapshot_download

    name = repo if revision is None else f"{repo}@{revision}"
    options: dict[str, Any] = {"allow_patterns": _SMALL + _WEIGHTS if weights else _SMALL}
    try:
        try:
            local = snapshot_download(repo, revision=revision, **options)
        except (ConnectionError, TimeoutError, httpx.TransportError):
            # the library itself does not fall back for a commit hash
            local = snapshot_download(repo, revision=revision, local_files_only=True, **options)
    except errors.LocalEntryNotFoundError as error:
        fix = "connect once, or copy the model here and give its directory"
        if os.environ.get("HF_HUB_OFFLINE"):
            fix = f"unset HF_HUB_OFFLINE to download it; {fix}"
        what = f"'{name}': it is not on the disk, and the hub cannot be reached"
        raise BadInput(what, where="model", fix=fix) from error
    except errors.GatedRepoError as error:
        fix = "accept its license on the hub, then log in with 'hf auth login' or set HF_TOKEN"
        raise BadInput(f"'{name}' is gated", where="model", fix=fix) from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        what = f"the hub has no '{name}', or failed ({first_line(error)})"
        fix = "check the spelling; for a private model set HF_TOKEN"
        raise BadInput(what, where="model", fix=fix) from error
    return Path(local)
