"""Convert foreign drafts: the same weights under our names, ready for eval, warm start and export.

What the files leave to the engine is filled in from the target. Faults with a certain repair are
repaired on the way, other broken files are left to `fledge diagnose`, and drafts that our network
cannot represent are refused with the reason.
"""

from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError  # raised by configs of transformers
from torch import Tensor
from transformers import LlamaConfig

from fledge.core.errors import BadInput
from fledge.core.install import fledge_command
from fledge.core.terminal import counted
from fledge.formats.checks.base import Subject, TargetFiles
from fledge.formats.codec import TOKEN_KEYS, TRAINED
from fledge.formats.foreign import read_files
from fledge.formats.layouts import OWN_AUX_KEY
from fledge.methods.shared.config import depths_key, trained_depths
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.files import CONFIG_NAME
from fledge.target.base import selection_mask

if TYPE_CHECKING:
    from fledge.formats.diagnose import Diagnosis

# Copied with the keys of the typed config: of transformers, and what training recorded.
_KEPT = (
    "max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling",
    "partial_rotary_factor", *TRAINED,
)  # fmt: skip


def import_draft(source: Path, out: Path, *, target: str, trust_remote_code: bool = False) -> Path:
    """Convert `source`, in any layout, to a draft of ours in `out` (written atomically)."""
    convert_draft(source, out, target=target, trust_remote_code=trust_remote_code)
    return out


def convert_draft(
    source: Path, out: Path, *, target: str, trust_remote_code: bool = False
) -> "Diagnosis":
    """`import_draft`; returns what it found in the files, and repaired."""
    from fledge.formats.diagnose import Diagnosis, repair_and_recheck

    if out.exists():
        raise BadInput("exists already", where=str(out), fix="name a new directory for --out")
    diagnosis = Diagnosis(read_files(source), target)
    subject = Subject(diagnosis.files.copy(), TargetFiles(target, trust_remote_code))
    subject = repair_and_recheck(subject, ("static",), diagnosis)
    if faults := [finding for finding in diagnosis.of("error") if finding.repair is None]:
        raise BadInput(
            f"{counted(len(faults), 'fault')}, the first: {faults[0].evidence}",
            where=str(source),
            fix=faults[0].fix or fledge_command("diagnose", source, "--target", target),
        )
    build_draft(subject).save_pretrained(out)
    return diagnosis


def build_draft(subject: Subject) -> DraftModel:
    """A foreign draft without errors as our own model, in the files' dtype (the widest of them)."""
    view, where = subject.view, subject.directory
    if refusal := next(view.refusals(), None):
        raise BadInput(refusal, where=str(where))
    state, config = _own_state(subject), own_config(subject)
    dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    dtype = reduce(torch.promote_types, dtypes)  # represents every weight exactly
    draft_type = view.method.draft_type()
    return draft_type.from_tensors(config, state, where=where, dtype=dtype).eval()


def own_config(subject: Subject) -> LlamaConfig:
    """The draft as a Llama config with our own keys, from any layout."""
    view, ids = subject.view, subject.aux_layer_ids or []
    config_type = view.method.draft_type().config_type
    kept = (*_KEPT, *(field.name for field in fields(config_type)))
    values = {
        "target_hidden_size": int(subject.target.text.hidden_size),
        **{key: value for key in kept if (value := view.get(key)) is not None},
        **{key: view.get(key) for key in TOKEN_KEYS},  # else LlamaConfig sets Llama's token ids
        "vocab_size": subject.vocab_size,
        "draft_vocab_size": subject.draft_vocab_size,
        "tie_word_embeddings": False,
        "norm_before_residual": view.norm_before_residual,
        **view.layer_extras,
        **view.method_settings,
        "num_aux_hidden_states": len(ids),
        OWN_AUX_KEY: ids,
    }
    try:
        config = LlamaConfig(**values)
        config_type.of(config)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise BadInput(reason, where=str(subject.directory / CONFIG_NAME)) from None
    if trained_depths(config) is None and view.stated_tokens is not None:
        setattr(config, depths_key(config), view.stated_tokens)
    return config


def _own_state(subject: Subject) -> dict[str, Tensor]:
    """The tensors of our draft; what engines share with the target is copied from it."""
    view, target = subject.view, subject.target  # whose tables are read only where needed
    state = dict(view.state)
    dtype, ids = state["fc.weight"].dtype, _own_maps(subject, state)
    if view.merges or view.borrows:  # even if a trainer saved a copy
        for name in ("embed_tokens.weight", "lm_head.weight"):
            state.pop(name, None)
    if view.borrows:
        return state
    if "embed_tokens.weight" not in state:
        state["embed_tokens.weight"] = target.tables.embedding_VD.to(dtype)
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = target.tables.head_VD[ids].to(dtype)
    if view.fc_bias is None:
        state.pop("fc.bias", None)
    if "mask_hidden" in state:
        state["mask_hidden"] = state["mask_hidden"].reshape(1, 1, -1)
    return state


def _own_maps(subject: Subject, state: dict[str, Tensor]) -> Tensor:
    """Put the maps of a smaller vocabulary into our form, and drop others (some trainers write the
    identity); returns [W] the target ids of the draft's tokens."""
    width, full = subject.draft_vocab_size, subject.vocab_size
    d2t, _ = state.pop("d2t", None), state.pop("t2d", None)
    if d2t is None or width == full:
        return torch.arange(full)
    ids: Tensor = d2t.long() + torch.arange(width)
    state |= {"d2t": d2t.long(), "t2d": selection_mask(ids, full)}
    return ids
