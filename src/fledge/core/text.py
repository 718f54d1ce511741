"""Text from outside on its way to a terminal: shown, never obeyed.

Roles, file names, answers of models and servers may hold what a terminal takes for orders: clear
the screen, change the title, write over the line, run from right to left. Here such characters
become what they are in source code (`\\x1b`). `core.terminal` applies it to all
that commands print.
"""

import json
import logging
import re
from typing import Any

# C0 but tab and newline, DEL, C1; marks that turn the direction of writing, line and paragraph
# separators, annotations; half of a surrogate pair, which cannot even be written.
_ORDERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with characters that a terminal would obey written out; tabs and newlines stay."""
    return _ORDERS.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def counted(count: int, one: str, many: str = "") -> str:
    """A number with its noun: `1 row`, `2,000 rows`; `many` where it is not just one more s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Readable JSON whose strings hold nothing that a terminal would obey, and mean the same."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _ORDERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class VisibleFormatter(logging.Formatter):
    """What libraries and servers say in a log is text from outside, too."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
