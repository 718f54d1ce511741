"""The same drafts as the export's tests have."""

from export.conftest import answering, place

__all__ = ["answering", "place"]
