"""The token id that stands for a draft's learned placeholder.

The tokenizer must never emit it: otherwise the draft would take a real token for a placeholder.
Candidates, in this order: ids without a token (padded embedding rows), reserved names, unused
special tokens, bytes that no UTF-8 text contains. An explicit id must obey the same rule.
"""

import re
from collections.abc import Iterator
from typing import Any

from fledge.core.errors import BadInput
from fledge.methods.shared.config import PLACEHOLDER_KEY

_RESERVED = re.compile(
    r"[<\[].*(reserved|unused|extra_|place.?holder|dummy|special_\d|control_\d).*[>\]]",
    re.IGNORECASE,
)
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token")
# Byte-level vocabularies write these bytes as Latin-1 characters, byte-fallback ones as <0xF5>.
_IMPOSSIBLE_BYTES = (0xC0, 0xC1, *range(0xF5, 0x100))


def choose_placeholder(tokenizer: Any, vocab_size: int) -> int:
    """The lowest id of the best kind of candidate. `vocab_size` is the number of rows of the
    target's embedding table."""
    emitted = _Emitted(tokenizer, vocab_size)
    for token_id in emitted.candidates():
        if emitted.because(token_id) is None:
            return token_id
    what = "the tokenizer has no token that it never emits"
    raise BadInput(what, where=PLACEHOLDER_KEY, fix="add a reserved token to the tokenizer")


def check_placeholder(token_id: int, tokenizer: Any, vocab_size: int) -> int:
    """Returns the id; raises BadInput if it can also occur as a real token."""
    reason = _Emitted(tokenizer, vocab_size).because(token_id)
    if reason is not None:
        raise BadInput(
            f"{token_id} cannot be the mask token: {reason}",
            where=PLACEHOLDER_KEY,
            fix="leave it out, and one that the tokenizer never emits is chosen",
        )
    return token_id


def placeholder(asked: int | None, tokenizer: Any, vocab_size: int) -> dict[str, int]:
    """The entry of a draft's config for its placeholder: the id that a recipe asks for or, if it
    asks for none, one that the tokenizer never emits. Without a tokenizer (random weights), the
    last id."""
    if tokenizer is None:
        return {PLACEHOLDER_KEY: vocab_size - 1}
    if asked is None:
        return {PLACEHOLDER_KEY: choose_placeholder(tokenizer, vocab_size)}
    return {PLACEHOLDER_KEY: check_placeholder(asked, tokenizer, vocab_size)}


class _Emitted:
    """Which ids a tokenizer may emit, and why."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.vocab_size, vocabulary = vocab_size, tokenizer.get_vocab()
        self.token_of: dict[int, str] = {token_id: token for token, token_id in vocabulary.items()}
        self.role_of = {getattr(tokenizer, role, None): role for role in _ROLES}
        template = tokenizer.chat_template or ""
        self.template = " ".join(template.values()) if isinstance(template, dict) else template
        added = tokenizer.added_tokens_decoder
        self.special = set(tokenizer.all_special_ids)
        self.special |= {token_id for token_id, token in added.items() if token.special}
        self.impossible = set(_impossible(tokenizer, vocabulary))

    def candidates(self) -> Iterator[int]:
        """Ids that may be suitable, best kind first."""
        yield from (i for i in range(self.vocab_size) if i not in self.token_of)
        yield from (i for i, token in sorted(self.token_of.items()) if _RESERVED.fullmatch(token))
        yield from sorted(self.special)
        yield from sorted(self.impossible)

    def because(self, token_id: int) -> str | None:
        """Why the tokenizer may emit this id; None if it never does."""
        token = self.token_of.get(token_id)
        if not 0 <= token_id < self.vocab_size:
            return f"the target has ids 0..{self.vocab_size - 1}"
        if token is None:
            return None
        if token in self.role_of:
            return f"{token!r} is the tokenizer's {self.role_of[token]}"
        if token in self.template:
            return f"the chat template writes {token!r}"
        if token_id in self.special or _RESERVED.fullmatch(token):
            return None  # it occurs only in a text that spells it out
        return None if token_id in self.impossible else f"{token!r} is an ordinary token"


def _impossible(tokenizer: Any, vocabulary: dict[str, int]) -> Iterator[int]:
    for byte in _IMPOSSIBLE_BYTES:
        if (fallback := vocabulary.get(f"<0x{byte:02X}>")) is not None:
            yield fallback
        letter = vocabulary.get(chr(byte))
        # in a vocabulary of characters this is the letter itself, which the tokenizer emits
        if letter is not None and letter not in tokenizer.encode(
            chr(byte), add_special_tokens=False
        ):
            yield letter
