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
from fledge.formats.foreign import DraftView, read_files
from fledge.formats.layouts import OWN_AUX_KEY
from fledge.methods.shared.config import depths_key, trained_depths
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.files import CONFIG_NAME, check_tensors
from fledge.target.base import selection_mask

if TYPE_CHECKING:
    from fledge.formats.diagnose import Diagnosis

# Copied with the keys of the typed config: of transformers, and what training recorded.
_KEPT = (
    "max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling",
    "partial_rotary_factor", *TRAINED,
)  # fmt: skip
_MAPS = ("d2t", "t2d")
_TABLES = _EMBEDDINGS, _HEAD = ("embed_tokens.weight", "lm_head.weight")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def import_draft(source: Path, out: Path, *, target: str, trust_remote_code: bool = False) -> Path:
    """Convert `source`, in any layout, to a draft of ours in `out` (written atomically)."""
    convert_draft(source, out, target=target, trust_remote_code=trust_remote_code)
    return out


def convert_draft(
    source: Path, out: Path, *, target: str, trust_remote_code: bool = False
) -> "Diagnosis":
    """`import_draft`; returns what it found in the files, and repaired."""
    from fledge.formats.diagnose import STATIC, Diagnosis, repair_and_recheck, stuck_on

    if out.exists():
        raise BadInput("exists already", where=str(out), fix="name a new directory for --out")
    diagnosis = Diagnosis(read_files(source), target)
    subject = Subject(diagnosis.files.copy(), TargetFiles(target, trust_remote_code))
    subject = repair_and_recheck(subject, STATIC, diagnosis)
    if faults := stuck_on(diagnosis):
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
    check_network(subject)
    state, config = _own_state(subject), own_config(subject)
    dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    dtype = reduce(torch.promote_types, dtypes)  # represents every weight exactly
    draft_type = view.method.draft_type()
    return draft_type.from_tensors(config, state, where=where, dtype=dtype).eval()


def check_network(subject: Subject) -> None:
    """Refuse files that do not hold the tensors of our network, apart from those that engines take
    from the target. Networks that we do not have are none of its business."""
    view, where = subject.view, subject.directory
    if any(view.refusals()):
        return
    want = view.method.draft_type().expected(own_config(subject), where=where)
    have = own_tensors(view)
    for name, tensor in have.items():
        if tensor.dtype not in _FLOATS:
            fix = "serve bf16, fp16 or fp32 weights"
            raise BadInput(f"{name} holds {tensor.dtype}", where=str(where), fix=fix)
    shared = set(_MAPS)
    shared |= {_EMBEDDINGS} if subject.draft_vocab_size < subject.vocab_size else {*_TABLES}
    want = {name: tensor for name, tensor in want.items() if name in have or name not in shared}
    check_tensors(where, want=want, have=have)


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
    state, width, full = own_tensors(view), subject.draft_vocab_size, subject.vocab_size
    d2t = view.state.get("d2t")
    if d2t is not None and width < full:  # some trainers write the identity
        ids = d2t.long() + torch.arange(width)
        state |= {"d2t": d2t.long(), "t2d": selection_mask(ids, full)}
    if view.borrows:
        return state
    if view.merges:  # even if a trainer saved a copy
        state = {name: tensor for name, tensor in state.items() if name not in _TABLES}
    dtype = state["fc.weight"].dtype
    if _EMBEDDINGS not in state:
        state[_EMBEDDINGS] = target.tables.embedding_VD.to(dtype)
    if _HEAD not in state:
        state[_HEAD] = target.tables.head_VD.to(dtype)
    return state


def own_tensors(view: DraftView) -> dict[str, Tensor]:
    """The tensors of the files in our form, without the maps."""
    left_out = {*_MAPS, *(_TABLES if view.borrows else ())}
    left_out |= {"fc.bias"} if view.fc_bias is None else set()
    state = {name: tensor for name, tensor in view.state.items() if name not in left_out}
    if "mask_hidden" in state:
        state["mask_hidden"] = state["mask_hidden"].reshape(1, 1, -1)
    return state
