"""The cache's manifest: what shaped its contents, and whether a run may add to it.

Two caches with equal manifests hold the same rows, encoded alike, from the same target. What the
shards themselves hold is `format`; the target's embedding and head are kept here, once.
"""

import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.files import atomic_file, write_json
from fledge.core.head import TargetHead
from fledge.target.base import InputEmbedding, TargetInfo
from fledge.target.cache import automodel
from fledge.target.cache.format import DTYPES, ENCODINGS, FORMAT, CacheShape, shard_name
from fledge.target.layers import FinalNorm

MANIFEST = "manifest.json"
TARGET = "target.safetensors"
TARGET_FILES = "target"  # config and tokenizer
VOCABULARY = "vocabulary.safetensors"
LOCK = ".lock"
# What every reader relies on; which of it fits which encoding is checked where it is used.
_FIELDS: dict[str, type | UnionType] = {
    "encoding": str, "dtype": str, "hidden_size": int, "vocabulary": dict | None,
    "top_k": int | None, "supervised_only": bool, "rows": int, "held_out_rows": int,
    "shard_size": int, "aux_layer_ids": list, "vocab_size": int, "target": dict,
}  # fmt: skip
_KNOWN = {"encoding": ENCODINGS, "dtype": tuple(DTYPES)}
LATE = "target"  # the one field that is known only when the target is loaded
_SHARD = re.compile(r"shard-(\d{5,})\.safetensors")
# What a config and a tokenizer consist of, of every kind that transformers knows. A list, not a
# pattern: a directory may hold `hf_token.txt` too. No code: a cache or a server carries data only.
_COPIED = frozenset({
    "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
    "vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "encoder.json", "bpe.codes", "dict.txt",
    "tokenizer.model", "tokenizer.model.v3", "tokenizer.model.v7", "tokenizer.model.v11",
    "tekken.json", "tiktoken.model", "qwen.tiktoken", "spiece.model", "spm.model",
    "spm_char.model", "sentencepiece.model", "sentencepiece.bpe.model", "prophetnet.tokenizer",
    "byte_maps.json", "emoji.json", "entity_vocab.json",
})  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_manifest(directory: Path) -> dict[str, Any]:
    """What the manifest says, whatever its version; in AutoModel's layout our part, if any."""
    path = directory / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        manifest.keys()
    except FileNotFoundError:
        raise BadInput(
            "not a cache: it has no manifest.json",
            where=str(directory),
            fix="`fledge precompute` makes one",
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"the manifest cannot be read ({error})", where=str(path)) from None
    own: dict[str, Any] = manifest.get(automodel.OWN, manifest)
    return own if automodel.is_automodel(manifest) else manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a cache: this version's, with everything that a reader relies on."""
    manifest = stored_manifest(directory)
    where, fix = str(directory / MANIFEST), "make the cache again"
    if automodel.is_automodel(manifest):
        manifest = automodel.own_manifest(manifest, where=where)
    if (version := manifest.get("format")) != FORMAT:
        what = f"cache format {version}, this version of fledge reads {FORMAT}"
        raise BadInput(what, where=where, fix=fix)
    for name, kinds in _FIELDS.items():
        value, known = manifest.get(name), _KNOWN.get(name)
        if not isinstance(value, kinds) or (known and value not in known):
            what = f"the manifest is damaged: '{name}' is {value!r}"
            raise BadInput(what, where=where, fix=fix)
    return manifest


def shape_of(manifest: dict[str, Any]) -> CacheShape:
    return CacheShape(
        encoding=manifest["encoding"],
        dtype=DTYPES[manifest["dtype"]],
        hidden_size=manifest["hidden_size"],
        aux_layers=len(manifest["aux_layer_ids"]),
        draft_vocab_size=(manifest["vocabulary"] or {}).get("size", 0),
        top_k=manifest["top_k"] or 0,
        supervised_only=manifest["supervised_only"],
    )


def vocabulary_size(manifest: dict[str, Any]) -> int | None:
    """Of the draft vocabulary that comes with a cache, binding or suggested."""
    kept = manifest["vocabulary"] or manifest.get("suggested_vocabulary")
    return kept["size"] if kept else None


def existing_shards(directory: Path) -> set[int]:
    """Numbers of the shards that are there; a shard has its name only when it is whole."""
    if not directory.is_dir():
        return set()
    matches = (_SHARD.fullmatch(path.name) for path in directory.iterdir())
    return {int(match[1]) for match in matches if match is not None}


def differing_fields(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """`field: theirs -> ours` for every field in which two manifests differ, nested ones dotted."""
    lines = []
    for key in sorted({*ours, *theirs}):
        old, new = theirs.get(key), ours.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += [f"{key}.{line}" for line in differing_fields(new, old)]
        elif old != new:
            lines.append(f"{key}: {old!r} -> {new!r}")
    return lines


def ensure_resumable(directory: Path, manifest: dict[str, Any], shards: Iterable[int]) -> None:
    """Refuse to add to a cache that was made otherwise; without a shard there is none to spoil.
    `manifest` may lack what only the loaded target knows; that is compared later."""
    shards = set(shards)
    if not shards:
        return
    if not (directory / MANIFEST).exists():
        raise BadInput(
            f"{len(shards)} shards without a manifest: what they hold is unknown",
            where=str(directory),
            fix="remove them, or give another output directory",
        )
    stored = stored_manifest(directory)
    if LATE not in manifest:
        stored = {key: value for key, value in stored.items() if key != LATE}
    if lines := differing_fields(manifest, stored):
        raise BadInput(
            f"this cache was made with another configuration: {'; '.join(lines)}",
            where=str(directory),
            fix="give another output directory, or the configuration it was made with",
        )


def ensure_free(directory: Path, *, resume: bool) -> None:
    """Without `resume` the directory must hold no cache; with or without, nothing foreign."""
    if directory.exists() and not directory.is_dir():
        raise BadInput("not a directory", where=str(directory))
    if not directory.is_dir():
        return
    names = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
    ours = {name for name in names if _SHARD.fullmatch(name)} | {MANIFEST}
    foreign = sorted(names - ours - {TARGET, TARGET_FILES, VOCABULARY, automodel.EMBEDDINGS})
    if foreign:
        raise BadInput(
            f"not empty, and '{foreign[0]}' is not part of a cache",
            where=str(directory),
            fix="give a new directory",
        )
    if names & ours and not resume:
        raise BadInput(
            "a cache is here already",
            where=str(directory),
            fix="continue it with --resume, or give another directory",
        )


def remove_temporary_files(directory: Path) -> None:
    """Temporary files of runs that were killed."""
    for path in directory.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


def target_facts(info: TargetInfo, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What the manifest says of a loaded target."""
    head, norm = info.head, info.final_norm
    return {
        "depth": info.depth,
        "dtype": dtype_name(info.dtype),
        "weight_dtypes": info.weight_dtypes,
        "weights_fingerprint": info.weights_fingerprint,
        "tokenizer_fingerprint": info.tokenizer_fingerprint,
        "vocab_size": info.vocab_size,
        "head": {"scale": head.scale, "softcap": head.softcap, "divisor": head.divisor},
        "final_norm": None if norm is None else [norm.path, norm.kind, norm.eps],
        "crc": {name: _crc(tensor) for name, tensor in sorted(tensors.items())},
    }


def target_tensors(info: TargetInfo, embedding_VD: Tensor) -> dict[str, Tensor]:
    """Embedding and head on the CPU; a tied head is kept once."""
    head, norm = info.head, info.final_norm
    tensors = {"embed_tokens": embedding_VD.detach().cpu().contiguous()}
    weight_VD = head.weight_VD.detach().cpu().contiguous()
    same_kind = weight_VD.dtype == tensors["embed_tokens"].dtype
    if not (same_kind and torch.equal(weight_VD, tensors["embed_tokens"])):
        tensors["lm_head"] = weight_VD
    if head.bias_V is not None:
        tensors["lm_head_bias"] = head.bias_V.detach().cpu().contiguous()
    if norm is not None and norm.weight_D is not None:
        tensors["final_norm"] = norm.weight_D.detach().cpu().contiguous()
    return tensors


def copied_files(model_dir: Path) -> list[Path]:
    """A model's config and tokenizer: what training reads of it besides the cache."""
    files = (path for path in sorted(model_dir.iterdir()) if is_copied(path.name))
    return [path for path in files if path.is_file() and _lies_in(model_dir, path)]


def is_copied(name: str) -> bool:
    """Whether a file of this name belongs to a config or a tokenizer; never a path."""
    return name in _COPIED


def _lies_in(model_dir: Path, path: Path) -> bool:
    """Whether the file itself is in the directory. A link leads elsewhere, with one exception: the
    hub's cache keeps REPOSITORY/snapshots/REVISION/name as a link to REPOSITORY/blobs/DIGEST."""
    if not path.is_symlink():
        return True
    snapshots = model_dir.resolve().parent
    return snapshots.name == "snapshots" and path.resolve().parent == snapshots.parent / "blobs"


def code_files(model_dir: Path) -> list[Path]:
    """The Python files of a model that brings code of its own. A cache keeps them beside config and
    tokenizer, which cannot be read without them; they run only where the user trusts them."""
    for name in ("config.json", "tokenizer_config.json"):
        path = model_dir / name
        if path.is_file() and '"auto_map"' in path.read_text(errors="replace"):
            return sorted(model_dir.glob("*.py"))
    return []


def _kept_files(model_dir: Path | None) -> list[Path]:
    return [] if model_dir is None else sorted({*copied_files(model_dir), *code_files(model_dir)})


def target_files(directory: Path) -> str:
    """The name of the model whose config and tokenizer a cache is read with: its own copy of them,
    or, of AutoModel's caches, which have none, the target that they name."""
    own = directory / TARGET_FILES
    return str(own if own.is_dir() else read_manifest(directory).get("target_model", own))


def write_head(
    directory: Path, manifest: dict[str, Any], tensors: dict[str, Tensor], model_dir: Path | None
) -> None:
    """All of a cache but its shards; the manifest last."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in _kept_files(model_dir):
        with atomic_file(directory / TARGET_FILES / path.name) as handle:
            handle.write(path.read_bytes())
    with atomic_file(directory / TARGET) as handle:
        handle.write(save(tensors))
    write_json(directory / MANIFEST, manifest)


def has_head(directory: Path, model_dir: Path | None) -> bool:
    """Whether all files of `write_head` are there; what they hold is checked when they are read."""
    kept = (directory / TARGET_FILES / path.name for path in _kept_files(model_dir))
    places = [directory / TARGET, *kept]
    return all(place.is_file() for place in places)


def lacks_target(directory: Path, manifest: dict[str, Any]) -> bool:
    """Whether a cache has no files about its target but AutoModel's embedding."""
    return manifest.get("layout") == automodel.LAYOUT and not (directory / TARGET).exists()


def read_target(
    directory: Path,
    manifest: dict[str, Any],
    model: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[InputEmbedding, TargetInfo]:
    """The target's embedding and everything else a trainer asks of a target; `model` is asked for
    what the cache lacks, instead of the one that it names."""
    if lacks_target(directory, manifest):
        return automodel.read_named_target(
            directory, manifest, model, trust_remote_code=trust_remote_code
        )
    path, facts = directory / TARGET, manifest[LATE]
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"the target's embedding and head are damaged ({error})", where=str(path)
        ) from None
    for name, crc in facts["crc"].items():
        if name not in tensors or _crc(tensors[name]) != crc:
            raise BadInput(f"{name} is damaged", where=str(path), fix="make the cache again")
    return assemble_target(tensors, facts, hidden_size=manifest["hidden_size"])


def assemble_target(
    tensors: dict[str, Tensor], facts: dict[str, Any], *, hidden_size: int
) -> tuple[InputEmbedding, TargetInfo]:
    """The inverse of `target_tensors` and `target_facts`."""
    embedding_VD, norm = tensors["embed_tokens"], facts["final_norm"]
    head = TargetHead(
        tensors.get("lm_head", embedding_VD), tensors.get("lm_head_bias"), **facts["head"]
    )
    info = TargetInfo(
        head=head,
        final_norm=norm and FinalNorm(norm[0], norm[1], norm[2], tensors.get("final_norm")),
        hidden_size=hidden_size,
        vocab_size=facts["vocab_size"],
        depth=facts["depth"],
        dtype=getattr(torch, facts["dtype"]),
        weight_dtypes=facts["weight_dtypes"],
        weights_fingerprint=facts["weights_fingerprint"],
        tokenizer_fingerprint=facts["tokenizer_fingerprint"],
    )
    return InputEmbedding(embedding_VD), info


def shards_of(manifest: dict[str, Any]) -> int:
    return -(-int(manifest["rows"]) // int(manifest["shard_size"]))


def check_complete(directory: Path, manifest: dict[str, Any]) -> None:
    """A cache with a shard missing is not read at all."""
    missing = set(range(shards_of(manifest))) - existing_shards(directory)
    if missing:
        raise BadInput(
            f"unfinished: {len(missing)} of {shards_of(manifest)} shards are missing, "
            f"{shard_name(min(missing))} first",
            where=str(directory),
            fix="run the same precompute with --resume",
        )


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
