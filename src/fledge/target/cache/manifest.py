"""The cache's manifest: what determined its contents, and whether a run may add to them.

Two caches with equal manifests hold the same rows in the same encoding from the same target. This
module also stores the target's embedding and head, once per cache.
"""

import re
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fledge.core import reading
from fledge.core.errors import BadInput
from fledge.core.files import atomic_file, write_json
from fledge.core.head import TargetHead
from fledge.core.reading import (
    Anything,
    Choice,
    Expected,
    ListOf,
    MapOf,
    Maybe,
    Number,
    Table,
    Text,
    Whole,
    shown,
)
from fledge.core.terminal import counted
from fledge.target.base import InputEmbedding, TargetInfo
from fledge.target.cache import automodel
from fledge.target.cache.format import DTYPES, ENCODINGS, FORMAT, CacheShape
from fledge.target.layers import FinalNorm

MANIFEST = "manifest.json"
TARGET = "target.safetensors"
TARGET_FILES = "target"  # config and tokenizer
VOCABULARY = "vocabulary.safetensors"
CLAIMS = ".claims"  # which process is writing which shard
SIZE = Whole(1, 2**24)  # of a state or a vocabulary
# The description of a target, in a manifest or from a server.
AUX_LAYERS = ListOf(Whole(0, 2**16), least=1, most=2**10)
TARGET_FACTS = Table(
    {
        "depth": Whole(1, 2**16),
        "dtype": Choice((*DTYPES, "float64")),
        "weight_dtypes": Text(),
        "weights_fingerprint": Text(256),
        "tokenizer_fingerprint": Maybe(Text(256)),
        "vocab_size": SIZE,
        "head": Table({"scale": Number(), "softcap": Maybe(Number()), "divisor": Number()}),
        "final_norm": Maybe(ListOf(Anything(), least=3, most=3)),
    },
    optional={"crc": MapOf(Whole(0, 2**32 - 1))},
)
# The fields every reader relies on; whether they suit the encoding is checked where they are used.
_MANIFEST: dict[str, Expected] = {
    "encoding": Choice(ENCODINGS),
    "dtype": Choice(tuple(DTYPES)),
    "hidden_size": SIZE,
    "vocabulary": Maybe(Table({"size": SIZE})),
    "top_k": Maybe(SIZE),
    "rows": Whole(),
    "held_out_rows": Whole(),
    "shard_size": Whole(1),
    "aux_layer_ids": AUX_LAYERS,
    "vocab_size": SIZE,
    "target": TARGET_FACTS,
}
LATE = "target"  # the one field that is known only once the target is loaded
_SHARD = re.compile(r"shard-(\d{5,})\.safetensors")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def stored_manifest(directory: Path) -> dict[str, Any]:
    """The manifest's contents, whatever its version; in AutoModel's layout our section, if any."""
    path = directory / MANIFEST
    if not path.exists():
        fix = "`fledge precompute` makes one"
        raise BadInput("not a cache: it has no manifest.json", where=str(directory), fix=fix)
    manifest: dict[str, Any] = reading.read_json(path, what="the manifest")
    own: dict[str, Any] = manifest.get(automodel.OWN, manifest)
    return own if automodel.is_automodel(manifest) else manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a cache, checked for the current format and every field readers rely on."""
    manifest = stored_manifest(directory)
    where, fix = str(directory / MANIFEST), "make the cache again"
    if automodel.is_automodel(manifest):
        manifest = automodel.own_manifest(manifest, where=where)
    if (version := manifest.get("format")) != FORMAT:
        what = f"cache format {shown(version)}, this version of fledge reads {FORMAT}"
        raise BadInput(what, where=where, fix=fix)
    fields = dict(_MANIFEST)
    if lacks_target(directory, manifest):
        fields["target"] = Table()
    reading.check(manifest, Table(fields), where=where, what="the manifest", fix=fix)
    return manifest


def shape_of(manifest: dict[str, Any]) -> CacheShape:
    return CacheShape(
        encoding=manifest["encoding"],
        dtype=DTYPES[manifest["dtype"]],
        hidden_size=manifest["hidden_size"],
        aux_layers=len(manifest["aux_layer_ids"]),
        draft_vocab_size=(manifest["vocabulary"] or {}).get("size", 0),
        top_k=manifest["top_k"] or 0,
    )


def vocabulary_size(manifest: dict[str, Any]) -> int | None:
    """The size of the draft vocabulary that comes with a cache, required or suggested."""
    vocabulary = manifest["vocabulary"] or manifest.get("suggested_vocabulary")
    return vocabulary["size"] if vocabulary else None


def shards_of(manifest: dict[str, Any]) -> int:
    return -(-int(manifest["rows"]) // int(manifest["shard_size"]))


def existing_shards(directory: Path) -> set[int]:
    """The numbers of the existing shards; a shard gets its name only once it is complete."""
    if not directory.is_dir():
        return set()
    return {int(match[1]) for path in directory.iterdir() if (match := _SHARD.fullmatch(path.name))}


def check_complete(directory: Path, manifest: dict[str, Any]) -> None:
    """Refuse a cache with missing shards."""
    total, existing = shards_of(manifest), existing_shards(directory)
    if missing := total - sum(number < total for number in existing):
        what = f"unfinished: {missing} of {total} shards are missing"
        fix = "run the same precompute with --resume"
        raise BadInput(what, where=str(directory), fix=fix)


def differing_fields(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """`field: theirs -> ours` for every field that differs; nested fields have dotted names."""
    lines = []
    for key in sorted({*ours, *theirs}):
        old, new = theirs.get(key), ours.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += [f"{key}.{line}" for line in differing_fields(new, old)]
        elif old != new:
            lines.append(f"{key}: {old!r} -> {new!r}")
    return lines


def ensure_resumable(
    directory: Path, manifest: dict[str, Any], shards: set[int], *, before_loading: bool = False
) -> None:
    """Refuse to add to a cache that was made with another configuration, even before its first
    shard. `before_loading` leaves out the field that needs the loaded target."""
    where = str(directory)
    if not (directory / MANIFEST).exists():
        if shards:
            what = f"{counted(len(shards), 'shard')} without a manifest: the contents are unknown"
            raise BadInput(what, where=where, fix="remove them, or give another output directory")
        return
    stored = stored_manifest(directory)
    if before_loading:
        stored = {key: value for key, value in stored.items() if key != LATE}
    if lines := differing_fields(manifest, stored):
        what = f"this cache was made with another configuration: {'; '.join(lines)}"
        fix = "give another output directory, or the configuration it was made with"
        raise BadInput(what, where=where, fix=fix)


def ensure_free(directory: Path, *, resume: bool) -> None:
    """Refuse a directory with foreign files or, without `resume`, with an existing cache."""
    if not directory.exists():
        return
    where = str(directory)
    if not directory.is_dir():
        raise BadInput("not a directory", where=where)
    names = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
    begun = {name for name in names if name == MANIFEST or _SHARD.fullmatch(name)}
    ours = begun | {TARGET, TARGET_FILES, VOCABULARY, automodel.EMBEDDINGS}
    if foreign := sorted(names - ours):
        what = f"not empty, and '{foreign[0]}' is not part of a cache"
        raise BadInput(what, where=where, fix="give a new directory")
    if begun and not resume:
        fix = "continue it with --resume, or give another directory"
        raise BadInput("a cache is here already", where=where, fix=fix)


# --- the target's own files ----------------------------------------------------------------------


def target_facts(info: TargetInfo, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The manifest's description of a loaded target, and a server's."""
    head, norm = info.head, info.final_norm
    plain = ("depth", "weight_dtypes", "weights_fingerprint", "tokenizer_fingerprint", "vocab_size")
    return {
        **{name: getattr(info, name) for name in plain},
        "dtype": dtype_name(info.dtype),
        "head": {"scale": head.scale, "softcap": head.softcap, "divisor": head.divisor},
        "final_norm": None if norm is None else [norm.path, norm.kind, norm.eps],
        "crc": {name: _crc(tensor) for name, tensor in sorted(tensors.items())},
    }


def target_tensors(info: TargetInfo, embedding_VD: Tensor) -> dict[str, Tensor]:
    """The embedding and head on the CPU; a tied head is stored only once."""
    head, norm = info.head, info.final_norm
    tensors = {
        "embed_tokens": embedding_VD,
        "lm_head": head.weight_VD,
        "lm_head_bias": head.bias_V,
        "final_norm": None if norm is None else norm.weight_D,
    }
    kept = {n: t.detach().cpu().contiguous() for n, t in tensors.items() if t is not None}
    embedding_VD, weight_VD = kept["embed_tokens"], kept["lm_head"]
    if weight_VD.dtype == embedding_VD.dtype and torch.equal(weight_VD, embedding_VD):
        del kept["lm_head"]
    return kept


def target_files(directory: Path) -> str:
    """The model whose config and tokenizer are used with a cache: the cache's own copy of them or,
    for AutoModel's caches, which have no copy, the target that they name."""
    copy = directory / TARGET_FILES
    return str(copy if copy.is_dir() else read_manifest(directory).get("target_model", copy))


def write_head(
    directory: Path, manifest: dict[str, Any], tensors: dict[str, Tensor], model_dir: Path | None
) -> None:
    """Write everything of a cache except its shards; the manifest last."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in kept_files(model_dir):
        with atomic_file(directory / TARGET_FILES / path.name) as handle:
            handle.write(path.read_bytes())
    with atomic_file(directory / TARGET) as handle:
        handle.write(save(tensors))
    write_json(directory / MANIFEST, manifest)


def lacks_target(directory: Path, manifest: dict[str, Any]) -> bool:
    """Whether a cache has no files of its target other than AutoModel's embedding."""
    return manifest.get("layout") == automodel.LAYOUT and not (directory / TARGET).exists()


def read_target(
    directory: Path,
    manifest: dict[str, Any],
    model: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[InputEmbedding, TargetInfo]:
    """The target's embedding and everything else a trainer needs to know of a target. What the
    cache lacks is read from `model` or, by default, from the model that the cache names."""
    if lacks_target(directory, manifest):
        return automodel.read_named_target(
            directory, manifest, model, trust_remote_code=trust_remote_code
        )
    path, facts = directory / TARGET, manifest[LATE]
    tensors = reading.load_tensors(path, what="the file of the target's embedding and head")
    for name, crc in facts.get("crc", {}).items():
        if name not in tensors or _crc(tensors[name]) != crc:
            raise BadInput(f"{name} is damaged", where=str(path), fix="make the cache again")
    return assemble_target(tensors, facts, hidden_size=manifest["hidden_size"], where=str(path))


def assemble_target(
    tensors: dict[str, Tensor], facts: dict[str, Any], *, hidden_size: int, where: str = "target"
) -> tuple[InputEmbedding, TargetInfo]:
    """Build the embedding and info of a target: the inverse of `target_tensors`, `target_facts`."""
    embedding_VD, norm = tensors["embed_tokens"], facts["final_norm"]
    scales = {name: facts["head"][name] for name in ("scale", "softcap", "divisor")}
    head = TargetHead(tensors.get("lm_head", embedding_VD), tensors.get("lm_head_bias"), **scales)
    size, expected = list(head.weight_VD.shape), [facts["vocab_size"], hidden_size]
    if size != expected:
        raise BadInput(f"its head is {size}, the target's sizes are {expected}", where=where)
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


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


# The files of every kind of config and tokenizer that transformers supports. A list rather than a
# pattern, since a directory may also hold `hf_token.txt`. No code: only data is copied or sent.
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


def copied_files(model_dir: Path) -> list[Path]:
    """A model's config and tokenizer files, which training reads besides the cache."""
    return [p for p in sorted(model_dir.iterdir()) if is_copied(p.name) and p.is_file()]


def is_copied(name: str) -> bool:
    """Whether a file of this name belongs to a config or a tokenizer; False for any path."""
    return name in _COPIED


def code_files(model_dir: Path) -> list[Path]:
    """The Python files of a model with custom code. A cache keeps them with config and tokenizer,
    which cannot be loaded without them; they run only if the user trusts remote code."""
    return sorted(model_dir.glob("*.py")) if names_code(model_dir) else []


def names_code(model_dir: Path) -> bool:
    """Whether a model's config or tokenizer names Python code, its own or a repository's."""
    paths = (model_dir / name for name in ("config.json", "tokenizer_config.json"))
    return any('"auto_map"' in path.read_text(errors="replace") for path in paths if path.is_file())


def kept_files(model_dir: Path | None) -> list[Path]:
    """All files of a model that a cache keeps."""
    return [] if model_dir is None else sorted({*copied_files(model_dir), *code_files(model_dir)})
