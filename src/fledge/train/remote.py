"""From a recipe's `remote` section to its client, and to the tokenizer that the servers have."""

import functools
from pathlib import Path
from typing import Any

import torch

from fledge.core.files import cache_dir
from fledge.recipe.target import RemoteTarget
from fledge.target.remote.client import RemoteEagle3TargetModel, token_from


def open_remote(section: RemoteTarget, device: torch.device) -> RemoteEagle3TargetModel:
    """The client that a recipe describes; batches lie where a copy to `device` is fast."""
    return RemoteEagle3TargetModel(
        section.urls,
        supervision=section.supervision,
        aux_layer_ids=section.aux_layer_ids,
        token=token_from(section.token_env),
        ca_file=section.ca_file,
        top_k=section.top_k,
        dtype=section.wire_dtype,
        merge=section.merge,
        prefetch=section.prefetch,
        timeout_s=section.timeout_s,
        retries=section.retries,
        wait_s=section.wait_s,
        shared_memory=section.shared_memory,
        pin_memory=device.type == "cuda",
    )


@functools.cache
def remote_facts(section: RemoteTarget) -> dict[str, Any]:
    """What the servers say of their target, asked once a process."""
    with open_remote(section, torch.device("cpu")) as target:
        return target.server_info


@functools.cache
def remote_files(section: RemoteTarget) -> Path:
    """A directory with the config and tokenizer of the servers' target, fetched once a process."""
    with open_remote(section, torch.device("cpu")) as target:
        facts = target.server_info
        name = f"{facts['weights_fingerprint']}-{facts['tokenizer_fingerprint']}"
        directory = cache_dir() / "remote" / name
        target.fetch_files(directory)
    return directory
