"""Registries by name: algorithms, losses, kinds of targets, ways of drafting.

A registry stores fledge's own entries as import paths and imports one on first access, so that
listing the names costs nothing. Code outside fledge adds entries with `add`.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from fledge.core.errors import BadInput, nearest

Entry = TypeVar("Entry")


def imported(path: str) -> Any:
    """What an import path ("package.module:attribute") names."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


class Registry(Mapping[str, Entry], Generic[Entry]):
    """A mapping from names to entries, in the order in which they were added."""

    def __init__(self, what: str, paths: Mapping[str, str]) -> None:
        self.what = what  # what an entry is, for messages: "objective.kind"
        self._entries: dict[str, Entry | str] = dict(paths)  # "package.module:attribute"

    def add(self, name: str, entry: Entry) -> None:
        """Register `entry` under a new name."""
        if name in self._entries:
            raise ValueError(f"{self.what} {name!r} is taken")
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Remove an entry, for tests that added one."""
        del self._entries[name]

    def __getitem__(self, name: str) -> Entry:
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._entries[name] = cast(Entry, imported(entry))
        return entry

    def named(self, name: str) -> Entry:
        """The entry of that name; an unknown name is refused with the valid or nearest names."""
        if name not in self._entries:
            fix = nearest(name, list(self._entries))
            raise BadInput(f"unknown {self.what} '{name}'", where=self.what, fix=fix)
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
