"""The names that other programs import from here; as in `fledge`, they load lazily."""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Eagle3TargetBatch": "fledge.core.batch",
    "HFEagle3TargetModel": "fledge.target.hf.model",
    "_shift_left_with_zero": "fledge.target.hf.model",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fledge.target' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
