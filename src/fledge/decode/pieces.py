"""Token ids as text, token by token: pieces that, joined, are exactly the decoded text."""

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"  # what a tokenizer decodes an incomplete character to


class Pieces:
    """Decodes ids as they come. A character spread over several tokens belongs to the last one."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._pending: list[int] = []  # ids since the last complete character
        self._shown = ""  # the part of their text that was returned already

    def add(self, token_ids: Sequence[int]) -> list[str]:
        """One piece per id; "" while a character is incomplete."""
        return [self._add(token) for token in token_ids]

    def rest(self) -> str:
        """The text of a character that was never completed."""
        return self._text(self._pending)[len(self._shown) :]

    def _add(self, token: int) -> str:
        self._pending.append(token)
        text = self._text(self._pending)
        if text.endswith(_BROKEN):
            return ""
        piece = text[len(self._shown) :]
        # Keep one id as context: some tokenizers decode the first id of a sequence differently.
        self._pending = self._pending[-1:]
        self._shown = self._text(self._pending)
        return piece

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text
