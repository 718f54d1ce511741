"""Where on this machine an export's target lies: a note in the cache, not in the export.

An export names its target as others know it, so that it can be moved and shared. Whoever serves it
here should not have to say the directory again.
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
    """Remember what an engine on this machine is to be given for this export."""
    note = _note(export)
    with contextlib.suppress(OSError):  # only a note: --target says it too
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {"export": str(export.resolve()), "target": name})


def target_here(export: Path, record: Mapping[str, Any]) -> str:
    """What an engine is to be given: the place noted, or a hub id; "": nobody knows."""
    with contextlib.suppress(BadInput):
        noted = str(read_json(_note(export), Table({"target": Text(4096)}))["target"])
        if is_hub_id(noted) or Path(noted).exists():
            return noted
    public = str(record["target"]["served_as"])
    return public if is_hub_id(public) or Path(public).is_absolute() else ""


def _note(export: Path) -> Path:
    key = hashlib.sha256(str(export.resolve()).encode()).hexdigest()[:24]
    return cache_dir() / "exports" / f"{key}.json"
