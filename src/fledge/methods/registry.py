"""All methods, and the heads of block drafts. A new one needs one line here."""

from pathlib import Path
from typing import TYPE_CHECKING

from fledge.core.errors import BadInput
from fledge.core.registry import Registry
from fledge.methods.base import Method

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from fledge.methods.block.heads.base import CandidateHead, TokenHead
    from fledge.methods.section import ObjectiveSection
    from fledge.methods.shared.draft import DraftModel

METHODS: Registry[Method] = Registry(
    "objective.kind",
    {
        "eagle3": "fledge.methods.eagle3.method:EAGLE3",
        "peagle": "fledge.methods.peagle.method:PEAGLE",
        "eagle1": "fledge.methods.eagle1.method:EAGLE1",
        "eagle2": "fledge.methods.eagle1.method:EAGLE2",
        "dflash": "fledge.methods.block.method:DFLASH",
        "dspark": "fledge.methods.block.method:DSPARK",
        "domino": "fledge.methods.block.method:DOMINO",
        "xpress": "fledge.methods.block.method:XPRESS",
        "dflash2": "fledge.methods.block.method:DFLASH2",
        "lilicorr": "fledge.methods.block.method:LILICORR",
        "mtp": "fledge.methods.mtp.method:MTP",
    },
)
DEFAULT_METHOD = "eagle3"
_HEADS = "fledge.methods.block.heads"
TOKEN_HEADS: "Registry[type[TokenHead]]" = Registry(
    "objective.token_head",
    {
        "markov": f"{_HEADS}.markov:MarkovHead",
        "domino": f"{_HEADS}.domino:DominoHead",
        "xpress": f"{_HEADS}.xpress:XPressHead",
    },
)
CANDIDATE_HEADS: "Registry[type[CandidateHead]]" = Registry(
    "candidate_head",
    {
        "selector": f"{_HEADS}.selector:Selector",
        "lilicorr": f"{_HEADS}.lilicorr:LiliCorr",
    },
)


def objective_sections() -> "dict[str, type[ObjectiveSection]]":
    """The recipe sections by name of method."""
    return {name: method.section for name, method in METHODS.items()}


def method_of(config: "PretrainedConfig") -> Method:
    """The method that a draft's config belongs to: the last listed that claims it."""
    for name in reversed(list(METHODS)):
        if METHODS[name].owns(config):
            return METHODS[name]
    raise BadInput("the draft belongs to no known method", fix=f"known: {', '.join(METHODS)}")


def load_draft(directory: str | Path, *, dtype: "torch.dtype | None" = None) -> "DraftModel":
    """Load the draft in a directory, of any method."""
    from fledge.methods.shared.files import read_draft_config

    method = method_of(read_draft_config(Path(directory)))
    return method.draft_type().from_pretrained(directory, dtype=dtype)
