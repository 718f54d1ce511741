"""Which files of a model a cache keeps and a server hands out: config and tokenizer, no more."""

from pathlib import Path

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


def copied_files(model_dir: Path) -> list[Path]:
    """A model's config and tokenizer: what training reads of it besides the cache."""
    files = (path for path in sorted(model_dir.iterdir()) if is_copied(path.name))
    return [path for path in files if _lies_in(model_dir, path)]


def is_copied(name: str) -> bool:
    """Whether a file of this name belongs to a config or a tokenizer; never a path."""
    return name in _COPIED


def _lies_in(model_dir: Path, path: Path) -> bool:
    """Whether it is a file, and itself in the directory. A link leads elsewhere, but for one kind:
    the hub's cache keeps REPOSITORY/snapshots/REVISION/name as a link to REPOSITORY/blobs/X."""
    if not path.is_file():
        return False
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
            return [path for path in sorted(model_dir.glob("*.py")) if _lies_in(model_dir, path)]
    return []


def kept_files(model_dir: Path | None) -> list[Path]:
    """What a cache keeps of a model."""
    return [] if model_dir is None else sorted({*copied_files(model_dir), *code_files(model_dir)})
