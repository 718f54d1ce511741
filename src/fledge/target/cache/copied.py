"""The files of a model that a cache copies and a server sends: config and tokenizer only."""

from pathlib import Path

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
    files = (path for path in sorted(model_dir.iterdir()) if is_copied(path.name))
    return [path for path in files if _lies_in(model_dir, path)]


def is_copied(name: str) -> bool:
    """Whether a file of this name belongs to a config or a tokenizer; False for any path."""
    return name in _COPIED


def _lies_in(model_dir: Path, path: Path) -> bool:
    """Whether `path` is a file that lies in the directory itself. Links are refused, with one
    exception: the hub's cache links REPOSITORY/snapshots/REVISION/name to REPOSITORY/blobs/X."""
    if not path.is_file():
        return False
    if not path.is_symlink():
        return True
    snapshots = model_dir.resolve().parent
    return snapshots.name == "snapshots" and path.resolve().parent == snapshots.parent / "blobs"


def code_files(model_dir: Path) -> list[Path]:
    """The Python files of a model with custom code. A cache keeps them with config and tokenizer,
    which cannot be loaded without them; they run only if the user trusts remote code."""
    for name in ("config.json", "tokenizer_config.json"):
        path = model_dir / name
        if path.is_file() and '"auto_map"' in path.read_text(errors="replace"):
            return [path for path in sorted(model_dir.glob("*.py")) if _lies_in(model_dir, path)]
    return []


def kept_files(model_dir: Path | None) -> list[Path]:
    """All files of a model that a cache keeps."""
    return [] if model_dir is None else sorted({*copied_files(model_dir), *code_files(model_dir)})
