"""Reads and writes cache directories in AutoModel's own layout; see `padded` for the shards.

    manifest.json                   AutoModel's fields; if fledge wrote it, ours under "fledge"
    target_embeddings.safetensors   the target's input embedding: `weight` [V, D], float32
    shard-000000.safetensors        padded rows

Such a cache only names its target and holds no config, tokenizer or output head: they come from
the named model, or from files that fledge adds to the directory and AutoModel ignores.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from fledge.core import reading
from fledge.core.errors import BadInput
from fledge.core.files import atomic_file
from fledge.core.head import TargetHead
from fledge.data.vocab import DraftVocabulary, count_supervised
from fledge.models.resolve import load_config, local_model
from fledge.models.weight_files import read_target_tables
from fledge.target.base import InputEmbedding, TargetInfo
from fledge.target.cache.format import FORMAT
from fledge.target.layers import target_depth, text_config

LAYOUT = "automodel"  # "layout" in our manifest of such a directory
OWN = "fledge"  # the key in their manifest under which ours is stored
EMBEDDINGS = "target_embeddings.safetensors"
_VERSION, _VERSIONS = 2, (1, 2)  # the version written; those read (1 has no top-k)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNKNOWN = "not recorded"


def is_automodel(stored: dict[str, Any]) -> bool:
    """Whether a manifest is one of AutoModel's."""
    return "format_version" in stored and "num_samples" in stored


def own_manifest(stored: dict[str, Any], *, where: str) -> dict[str, Any]:
    """AutoModel's manifest converted to ours."""
    if (version := stored["format_version"]) not in _VERSIONS:
        what = f"AutoModel's cache format {version}, this version of fledge reads 1 and 2"
        raise BadInput(what, where=where)
    try:
        width, top_k = int(stored["draft_vocab_size"]), int(stored.get("target_probs_topk") or 0)
        compressed, ids = 0 < top_k < width, [int(i) for i in stored["selected_token_ids"]]
        layers = [int(layer) for layer in stored["aux_layer_ids"]]
        hidden_size, remainder = divmod(int(stored["aux_hidden_dim"]), len(layers))
        vocab_size = int(stored["target_vocab_size"])
        if remainder or len(ids) != width or len({*ids}) != width or not min(ids) >= 0:
            raise ValueError("its sizes contradict each other")
        if max(ids) >= vocab_size:
            raise ValueError(f"token {max(ids)} is outside the vocabulary of {vocab_size}")
        return {
            "format": FORMAT,
            "layout": LAYOUT,
            "encoding": "topk" if compressed else "probs",
            "dtype": _DTYPES[stored["dtype"]],
            "top_k": top_k if compressed else None,
            "supervised_only": False,
            "shard_size": int(stored["shard_size"]),
            "vocabulary": {"size": width, "selected_token_ids": ids},
            "rows": int(stored["num_samples"]),
            "held_out_rows": 0,
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "aux_layer_ids": layers,
            "seq_length": int(stored["seq_length"]),
            "target_model": str(stored["target_model"]),
            "target": {"weight_dtypes": _UNKNOWN, "weights_fingerprint": _UNKNOWN},
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"AutoModel's manifest is damaged ({type(error).__name__}: {error})"
        raise BadInput(what, where=where) from None


def their_manifest(own: dict[str, Any], vocabulary: DraftVocabulary, files: Path) -> dict[str, Any]:
    """Our manifest converted to AutoModel's, with all of ours included. `files` is the directory
    with config and tokenizer, used as the target's name if the manifest has none."""
    short_names = {name: short for short, name in _DTYPES.items()}
    return {
        "format_version": _VERSION,
        "target_model": str(own.get("target_model") or files.absolute()),
        "target_vocab_size": own["vocab_size"],
        "draft_vocab_size": vocabulary.size,
        "seq_length": own["seq_length"],
        "dtype": short_names[own["dtype"]],
        "num_samples": own["rows"],
        "shard_size": own["shard_size"],
        "target_probs_topk": own["top_k"] or 0,
        "aux_hidden_dim": own["hidden_size"] * len(own["aux_layer_ids"]),
        "aux_layer_ids": own["aux_layer_ids"],
        "selected_token_ids": vocabulary.selected_token_ids.tolist(),
        "input_data": str(own.get("data", _UNKNOWN)),
        "split": None,
        "shuffle_seed": own.get("shuffle_seed") or 0,
        "mask_reasoning_content": bool((own.get("tokenise") or {}).get("mask_reasoning", False)),
        "mask_generation_prompt": False,
        OWN: own,
    }


def column_order(manifest: dict[str, Any]) -> NDArray[np.int64] | None:
    """The permutation that sorts their columns by target id; None if they are sorted already."""
    ids_W = np.array(manifest["vocabulary"].get("selected_token_ids", ()), dtype=np.int64)
    order_W: NDArray[np.int64] = np.argsort(ids_W)
    return None if np.array_equal(order_W, np.arange(len(ids_W))) else order_W


def vocabulary_of(
    manifest: dict[str, Any], rows: Iterable[tuple[NDArray[np.int32], NDArray[np.uint8]]]
) -> DraftVocabulary:
    """Their selection in our order. They do not record its coverage: it is counted on `rows`."""
    ids_W = np.sort(np.array(manifest["vocabulary"]["selected_token_ids"], dtype=np.int64))
    counts_V = count_supervised(rows, manifest["vocab_size"])
    covered = float(counts_V[ids_W].sum() / max(1, counts_V.sum()))
    return DraftVocabulary(ids_W, manifest["vocab_size"], covered, LAYOUT)


def write_embedding(directory: Path, embedding_VD: Tensor) -> None:
    with atomic_file(directory / EMBEDDINGS) as handle:
        handle.write(save({"weight": embedding_VD.detach().float().cpu().contiguous()}))


def read_embedding(directory: Path) -> Tensor:
    path = directory / EMBEDDINGS
    tensors = reading.load_tensors(path, what="the file of the target's embedding")
    weight_VD: Tensor | None = tensors.get("weight")
    if weight_VD is None:
        raise BadInput("it holds no tensor 'weight'", where=str(path))
    return weight_VD


def read_named_target(
    directory: Path, manifest: dict[str, Any], name: str | None, *, trust_remote_code: bool
) -> tuple[InputEmbedding, TargetInfo]:
    """The target of a directory without fledge's files: the embedding comes from the directory, the
    rest from the model `name` or, by default, from the one that the manifest names."""
    embedding_VD, name = read_embedding(directory), name or manifest["target_model"]
    config = load_config(name, trust_remote_code=trust_remote_code)
    expected = [manifest["vocab_size"], manifest["hidden_size"]]
    sizes = [int(text_config(config).vocab_size), int(text_config(config).hidden_size)]
    if not list(embedding_VD.shape) == sizes == expected:
        what = f"made from a target of {expected[0]} tokens and width {expected[1]}, "
        what += f"{name} has {sizes[0]} and {sizes[1]}"
        raise BadInput(what, where=str(directory), fix="target.model=MODEL names the right one")
    weights = hashlib.sha256(embedding_VD.contiguous().view(torch.uint8).numpy().data)
    info = TargetInfo(
        head=TargetHead(_head(name, embedding_VD, directory)),
        final_norm=None,
        hidden_size=sizes[1],
        vocab_size=sizes[0],
        depth=target_depth(config),
        dtype=getattr(torch, manifest["dtype"]),
        weight_dtypes=_UNKNOWN,
        weights_fingerprint=weights.hexdigest()[:16],
        tokenizer_fingerprint=None,
    )
    return InputEmbedding(embedding_VD), info


def _head(name: str, embedding_VD: Tensor, directory: Path) -> Tensor:
    """The named model's head. Its embedding must match the cache's, within the run's precision."""
    tables = read_target_tables(local_model(name))
    sample = slice(None, None, max(1, len(embedding_VD) // 1024))
    named, cached = tables.embedding_VD[sample].float(), embedding_VD[sample]
    if named.shape != cached.shape or not torch.allclose(named, cached, rtol=2**-7, atol=1e-6):
        what = f"made from another model than {name} (different embeddings)"
        raise BadInput(what, where=str(directory), fix="target.model=MODEL names the right one")
    return tables.head_VD
