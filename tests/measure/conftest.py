"""The same targets, drafts and answers as the decoder's tests have."""

from decode.conftest import answers, asked, drafts, target

__all__ = ["answers", "asked", "drafts", "target"]
