"""Remember where an export's target is on this machine, in the cache and not in the export.

An export uses the public name of its target, so that it can be moved and shared. Serving it on this
machine should not require the target's directory again.
"""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.core.expected import Table, Text
from fledge.core.files import cache_dir, write_json
from fledge.core.reading import read_json
from fledge.models.resolve import is_hub_id


def note_target(export: Path, name: str) -> None:
    """Remember what to give an engine on this machine as the target of this export."""
    path = _note_path(export)
    with contextlib.suppress(OSError):  # only a convenience: --target does the same
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"export": str(export.resolve()), "target": name})


def target_here(export: Path, record: Mapping[str, Any]) -> str:
    """What to give an engine as the target: the noted place, or a hub id; "" if unknown."""
    with contextlib.suppress(BadInput):
        noted = str(read_json(_note_path(export), Table({"target": Text(4096)}))["target"])
        if is_hub_id(noted) or Path(noted).exists():
            return noted
    public = str(record["target"]["served_as"])
    return public if is_hub_id(public) or Path(public).is_absolute() else ""


def _note_path(export: Path) -> Path:
    key = hashlib.sha256(str(export.resolve()).encode()).hexdigest()[:24]
    return cache_dir() / "exports" / f"{key}.json"
