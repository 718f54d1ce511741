"""What preparing data takes from a tokenizer: plain values, which worker processes are given."""

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from fledge.core.errors import BadInput
from fledge.core.files import cache_dir, write_json
from fledge.core.install import version_of

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
_ANY_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*")
_READERS = ("fledge", "transformers", "tokenizers")


@dataclass(frozen=True)
class TokenizerFacts:
    """What rendering a conversation takes from a tokenizer, and what encoding it does."""

    name: str
    template: str | None
    token_names: dict[str, Any]  # those that templates may refer to: bos_token, ...
    special_tokens: list[str]  # all control tokens
    backend: str | None = None  # the JSON of the tokenizers library; None: not of that library
    bos: str = ""  # what plain text begins with; may be empty

    @classmethod
    def load(cls, model_dir: str | Path, *, trust_remote_code: bool = False) -> Self:
        """The facts of a local model's tokenizer. They are kept, because reading them anew takes
        seconds of imports; those that a repository's own code decides are not."""
        from fledge.models.resolve import load_tokenizer

        directory = Path(model_dir)
        kept = cache_dir() / "tokenizers" / f"{_fingerprint_of_all(directory)}.json"
        if not trust_remote_code:
            with contextlib.suppress(OSError, ValueError, TypeError):  # absent or damaged
                known = json.loads(kept.read_text())
                return cls(**{**known, "name": str(directory.resolve())})
        facts = cls.of(load_tokenizer(str(directory), trust_remote_code=trust_remote_code))
        if not trust_remote_code:
            with contextlib.suppress(OSError):  # a cache that cannot be written
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_json(kept, asdict(facts))
        return facts

    @classmethod
    def of(cls, tokenizer: Any, *, encoding: bool = True) -> Self:
        """The facts of a Hugging Face tokenizer; without `encoding` those of its template only."""
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        added = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        facts = cls(
            name=str(tokenizer.name_or_path),
            template=template if isinstance(template, str) else None,
            token_names=dict(tokenizer.special_tokens_map),
            special_tokens=sorted(added | set(tokenizer.all_special_tokens)),
        )
        if not encoding:
            return facts
        fast = getattr(tokenizer, "is_fast", False)
        first = tokenizer("x")["input_ids"][:1] if tokenizer.bos_token else []
        return replace(
            facts,
            backend=tokenizer.backend_tokenizer.to_str() if fast else None,
            bos=tokenizer.bos_token if first == [tokenizer.bos_token_id] else "",
        )


def _fingerprint_of_all(model_dir: Path) -> str:
    """A digest of all files that a tokenizer may be made of, and of what reads them."""
    digest = hashlib.sha256(repr([version_of(name) for name in _READERS]).encode())
    names = (name for pattern in _ANY_FILES for name in model_dir.glob(pattern))
    for path in sorted(names):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def tokenizer_files_fingerprint(model_dir: Path) -> str:
    """A digest of the files that make up a tokenizer and its template."""
    digest = hashlib.sha256()
    names = [name for name in _TOKENIZER_FILES if (model_dir / name).is_file()]
    if not names:
        raise BadInput("no tokenizer files", where=str(model_dir), fix="is this a model directory?")
    for name in names:
        digest.update(name.encode() + b"\0" + (model_dir / name).read_bytes() + b"\0")
    return digest.hexdigest()
