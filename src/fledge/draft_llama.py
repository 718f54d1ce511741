"""The classes of EAGLE-3 and P-EAGLE drafts under the names that other programs use."""

from fledge.compat.peagle_draft import (
    _PeagleAttentionMixin,
    _PeagleDecoderLayerMixin,
    _PeagleDraftMixin,
    _PeagleVanillaLayerMixin,
)
from fledge.draft.eagle3 import LlamaEagle3DraftModel
from fledge.draft.layer import DeepDraftLayer as Eagle3LlamaPeagleLayer
from fledge.draft.layer import DraftAttention as Eagle3LlamaAttention
from fledge.draft.layer import FusedDraftLayer as Eagle3LlamaDecoderLayer

__all__ = [
    "Eagle3LlamaAttention",
    "Eagle3LlamaDecoderLayer",
    "Eagle3LlamaPeagleLayer",
    "LlamaEagle3DraftModel",
    "_PeagleAttentionMixin",
    "_PeagleDecoderLayerMixin",
    "_PeagleDraftMixin",
    "_PeagleVanillaLayerMixin",
]
