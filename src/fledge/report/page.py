"""One HTML file that needs nothing else: template, style, script and data in one.

`page.html`, `page.css`, `charts.js` and `page.js` lie beside this file and are written by hand;
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
    # "<" escaped: no text inside the data can end the script element it lies in.
    embedded = json.dumps(_finite(data), ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "title": escape(f"{data['name']} · fledge report", quote=False),
        "style": (_HERE / "page.css").read_text(),
        "script": "\n".join((_HERE / name).read_text() for name in ("charts.js", "page.js")),
        "data": embedded,
    }
    page = (_HERE / "page.html").read_text()
    pieces = page.split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:  # filled once, so that what is put in is never read as a place
        name, _, rest = piece.partition("}}")
        out += [parts[name], rest]
    return "".join(out).encode(errors="replace").decode()  # half a surrogate pair is no text


def _finite(value: Any) -> Any:
    """NaN and infinity are not JSON; a diverged run's curve has gaps there."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
