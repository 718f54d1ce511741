"""When a text ends: at an end token, a stop string, or the maximum number of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Stops:
    """A text ends with the first token that ends it; that token is part of the text.

    `decode` turns token ids into text and is needed for stop strings only.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be positive, got {self.max_new_tokens}")
        if self.stop_strings and self.decode is None:
            raise ValueError("stop_strings: need `decode`, which turns tokens into text")
        if "" in self.stop_strings:
            raise ValueError("stop_strings: an empty string stops everything")

    def cut(self, new_ids: Sequence[int], checked: int) -> tuple[int, Finish | None]:
        """How many of the new tokens to keep, and why the text ends there (None: it does not).

        The first `checked` tokens are known not to end it.
        """
        for count in range(checked + 1, len(new_ids) + 1):
            if new_ids[count - 1] in self.eos_token_ids:
                return count, "eos"
            if self._has_stop_string(new_ids[:count]):
                return count, "stop"
            if count == self.max_new_tokens:
                return count, "length"
        return len(new_ids), None

    def _has_stop_string(self, new_ids: Sequence[int]) -> bool:
        if not self.stop_strings or self.decode is None:
            return False
        longest = max(len(stop.encode()) for stop in self.stop_strings)
        # a token is at least one byte; 4 more for a character that the cut may break
        tail = self.decode(new_ids[-longest - 4 :])
        return any(stop in tail for stop in self.stop_strings)


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer: the generation config's and the tokenizer's."""
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int))


# --- pieces --------------------------------------------------------------------------------------
# Token ids as text, token by token: pieces that, joined, are exactly the decoded text.


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
