"""`target.backend=remote`: the target on servers. Importing this does not import torch."""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from fledge.core.errors import BadInput
from fledge.core.settings import Count, NonNegative, Positive, PositiveCount, Text, Texts
from fledge.target.kinds import TargetKind, TargetSection

if TYPE_CHECKING:
    import torch

    from fledge.target.remote.client import RemoteEagle3TargetModel


class RemoteTarget(TargetSection):
    """The target on servers started with `fledge serve-target`."""

    backend: Literal["remote"] = "remote"
    """Target and draft in separate processes, on one machine or on many."""

    model: Text | None = None
    """Where config and tokenizer come from; null: from the servers."""

    urls: Annotated[Texts, Field(min_length=1)] = ("http://127.0.0.1:8700",)
    """One or more servers with the same target; requests go to the least loaded."""

    supervision: Literal["hidden", "probs", "topk"] = "hidden"
    """What travels: hidden states by default, probabilities or top-k on thin links."""

    top_k: PositiveCount = 64
    """Probabilities that travel for each token (topk)."""

    wire_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of what travels; auto: the target's own, which loses nothing."""

    token_env: Text | None = None
    """Name of the environment variable that holds the bearer token; null: none is sent."""

    prefetch: PositiveCount = 2
    """Batches asked for ahead of the trainer."""

    timeout_s: Positive = 240.0
    """How long one request may take over all its attempts; each gets half of what is left."""

    retries: Count = 5
    """Attempts after the first one, each after a longer pause."""

    wait_s: NonNegative = 300.0
    """How long to wait, in addition, while no server is up before the run stops, resumable."""

    @field_validator("urls")
    @classmethod
    def _http(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"'{url}' must start with http:// or https://")
        return urls


class RemoteKind(TargetKind[RemoteTarget]):
    name = "remote"
    section = RemoteTarget

    def open(
        self, section: RemoteTarget, *, device: "torch.device", aux_layers: int
    ) -> "RemoteEagle3TargetModel":
        """The client that a recipe describes; batches are pinned if `device` is a GPU."""
        return _client(section, pin_memory=device.type == "cuda")

    def model_name(self, section: RemoteTarget) -> str:
        return section.model or str(_files(section))

    def aux_layer_ids(self, section: RemoteTarget) -> Sequence[int] | None:
        return section.aux_layer_ids or _facts(section)["aux_layer_ids"]

    def dtype(self, section: RemoteTarget, device: "torch.device") -> "torch.dtype":
        from fledge.target.cache.format import DTYPES

        wire = section.wire_dtype
        return DTYPES[_facts(section)["dtype"] if wire == "auto" else wire]


def _client(section: RemoteTarget, *, pin_memory: bool = False) -> "RemoteEagle3TargetModel":
    from fledge.target.remote.client import RemoteEagle3TargetModel, token_from

    not_passed = {"backend", "model", "token_env", "wire_dtype", "trust_remote_code"}
    options = section.model_dump(exclude=not_passed)
    options |= {"token": token_from(section.token_env), "dtype": section.wire_dtype}
    return RemoteEagle3TargetModel(**options, pin_memory=pin_memory)


@functools.cache
def _facts(section: RemoteTarget) -> dict[str, Any]:
    """The servers' description of their target, requested once per process."""
    with _client(section) as target:
        return target.server_info


@functools.cache
def _files(section: RemoteTarget) -> Path:
    """A directory with the config and tokenizer of the servers, fetched once per process."""
    from fledge.core.files import cache_dir
    from fledge.target.cache.manifest import names_code

    with _client(section) as target:
        facts = target.server_info
        identity = f"{facts['weights_fingerprint']}-{facts['tokenizer_fingerprint']}"
        name = hashlib.sha256(identity.encode()).hexdigest()[:24]  # whatever a server sends
        directory = cache_dir() / "remote" / name
        target.fetch_files(directory)
    if section.trust_remote_code and names_code(directory):  # perhaps a repository's
        raise BadInput(
            "the servers' config names Python code (auto_map), which is never run for a server",
            where="target.trust_remote_code",
            fix="name the model they serve as target.model",
        )
    return directory


REMOTE = RemoteKind()
