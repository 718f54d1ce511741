"""The classes of EAGLE-3 and P-EAGLE drafts under the names that other programs use."""

from fledge.methods.eagle3.draft import (
    Eagle3LlamaAttention,
    Eagle3LlamaDecoderLayer,
    Eagle3LlamaPeagleLayer,
    LlamaEagle3DraftModel,
)
from fledge.peagle_draft import (
    _PeagleAttentionMixin,
    _PeagleDecoderLayerMixin,
    _PeagleDraftMixin,
    _PeagleVanillaLayerMixin,
)

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
