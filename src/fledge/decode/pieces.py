"""Token ids as text, token by token: pieces that, joined, are exactly the decoded text."""

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"  # what a tokenizer prints for bytes that are not yet a whole character


class Pieces:
    """Takes ids as they come. A character that several tokens share belongs to the last of them."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._pending: list[int] = []  # from the last whole character on
        self._shown = ""  # the text of all pending ids but the newest ones

    def add(self, token_ids: Sequence[int]) -> list[str]:
        """One piece per id; "" while a character is not whole."""
        return [self._add(token) for token in token_ids]

    def rest(self) -> str:
        """What was never made whole."""
        return self._text(self._pending)[len(self._shown) :]

    def _add(self, token: int) -> str:
        self._pending.append(token)
        text = self._text(self._pending)
        if text.endswith(_BROKEN):
            return ""
        piece = text[len(self._shown) :]
        # One id of context stays: some tokenizers treat the first of a sequence differently.
        self._pending = self._pending[-1:]
        self._shown = self._text(self._pending)
        return piece

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text
