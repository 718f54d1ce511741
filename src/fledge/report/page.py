"""One self-contained HTML file: template, style, script and data in one.

`page.html`, `page.css`, `charts.js` and `page.js` are next to this file and written by hand;
there is no build step and no library. A content security policy in the page forbids every request.
"""

import json
import math
from html import escape
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def render(data: dict[str, Any]) -> str:
    """The page as text."""
    # "<" is escaped, so that no text in the data can end the surrounding script element.
    embedded = json.dumps(_finite(data), ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "title": escape(f"{data['name']} · fledge report", quote=False),
        "style": (_HERE / "page.css").read_text(),
        "script": "\n".join((_HERE / name).read_text() for name in ("charts.js", "page.js")),
        "data": embedded,
    }
    page = (_HERE / "page.html").read_text()
    pieces = page.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:  # in one pass, so that inserted text is never read as a placeholder
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled).encode(errors="replace").decode()  # a lone surrogate cannot be encoded


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which are not JSON, by None: a diverged run's curve has gaps."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
