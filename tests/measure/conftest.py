"""The target, drafts and answers of the decoding tests."""

from decode.conftest import answers, asked, drafts, target

__all__ = ["answers", "asked", "drafts", "target"]
