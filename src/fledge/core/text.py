"""Untrusted text on its way to a terminal: shown, never interpreted.

Roles, file names, and answers of models and servers may contain characters that a terminal
interprets: clear the screen, change the title, overwrite the line, write from right to left. Here
such characters are escaped as in source code (`\\x1b`). `core.terminal` applies this to everything
that commands print.
"""

import json
import logging
import re
from typing import Any

# C0 except tab and newline, DEL, C1; bidirectional controls, line and paragraph separators,
# annotation marks; lone surrogates, which cannot even be encoded.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with control characters escaped; tabs and newlines stay."""
    return _CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def counted(count: int, one: str, many: str = "") -> str:
    """A number with its noun: `1 row`, `2,000 rows`; `many` is the plural if it is irregular."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Readable JSON with control characters escaped, so that it parses to the same value."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class VisibleFormatter(logging.Formatter):
    """Escapes log messages: those of libraries and servers are untrusted text, too."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
