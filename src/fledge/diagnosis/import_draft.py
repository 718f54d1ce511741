"""Convert foreign drafts: the same numbers under our names, ready for eval, warm start and export.

What the files leave to the engine is filled in from the target (its embeddings, its head, the aux
layers that engines assume). EAGLE-1 drafts are served with the target's embeddings and head, so
they get those even where the files hold some. What our draft cannot be is refused with the reason;
what is broken is left to `fledge diagnose`.
"""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError  # what a config of transformers raises
from torch import Tensor
from transformers import LlamaConfig

from fledge.core.errors import BadInput
from fledge.core.install import fledge_command
from fledge.core.text import counted
from fledge.diagnosis.block_view import BlockView
from fledge.diagnosis.checks.base import Subject, TargetFiles
from fledge.diagnosis.config_keys import BIAS_KEYS, CONFIG_KEYS
from fledge.diagnosis.foreign import read_files, tokens_marked
from fledge.diagnosis.import_block import build_block
from fledge.diagnosis.layouts import OWN_AUX_KEY
from fledge.draft.base import DraftModel
from fledge.draft.config import check_draft_config, depths_key, trained_depths
from fledge.draft.files import CONFIG_NAME

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Written anew, decided below, or not ours.
_NOT_KEPT = {
    "architectures", "model_type", "norm_before_residual", "norm_before_fc", "speculators_config",
    "eagle_config", "dflash_config", "transformer_layer_config", "type", "rope_type", "factor",
    "eagle_version", *BIAS_KEYS,
}  # fmt: skip


def import_draft(source: Path, out: Path, *, target: str, trust_remote_code: bool = False) -> Path:
    """Write `source`, in whatever layout, as a draft of ours into `out` (whole or not at all)."""
    from fledge.diagnosis.diagnose import run_checks

    if out.exists():
        raise BadInput("exists already", where=str(out), fix="name a new directory for --out")
    subject = Subject(read_files(source), TargetFiles(target, trust_remote_code))
    findings = run_checks(subject, ("static",))
    if faults := [finding for finding in findings if finding.severity == "error"]:
        repair = fledge_command("diagnose", source, "--target", target, "--fix", "REPAIRED")
        raise BadInput(
            f"{counted(len(faults), 'fault')}, the first: {faults[0].evidence}",
            where=str(source),
            fix=f"{repair}, and import that",
        )
    build_draft(subject).save_pretrained(out)
    return out


def build_draft(subject: Subject) -> DraftModel:
    """The draft in memory, as our own model, in the dtype of the files (the widest, if several)."""
    where = subject.directory
    if isinstance(subject.view, BlockView):
        return build_block(subject)
    if refusal := next(_refusals(subject), None):
        raise BadInput(refusal, where=str(where))
    state, config = own_state(subject), own_config(subject)
    dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    dtype = reduce(torch.promote_types, dtypes)  # holds every weight exactly
    draft_type = subject.view.method.draft_type()
    try:
        return draft_type.from_tensors(config, state, where=where, dtype=dtype).eval()
    except ValueError as error:  # what only this kind of draft refuses
        raise BadInput(str(error), where=str(where / CONFIG_NAME)) from None


def _refusals(subject: Subject) -> Iterator[str]:
    """What the files ask for and our draft does not do."""
    view = subject.view
    if view.get("norm_before_fc"):
        yield "norm_before_fc is true: our drafts norm each aux state by itself (fc_norm)"
    usual = view.method.aux_layers()
    listened = view.get("num_aux_hidden_states", usual)
    if listened != usual:
        yield f"{listened} aux states: our {view.method.title} drafts listen to {usual}"
    if subject.aux_layer_ids is None:
        yield "the files do not say which layers the draft listens to, and the target is shallow"
    if "fc.weight" not in view.state:
        yield "fc.weight is missing"


def own_config(subject: Subject) -> Any:
    """A Llama config with our own keys, from whatever layout."""
    view = subject.view
    known = CONFIG_KEYS - _NOT_KEPT
    values = {key: value for key, value in view.flat.items() if key in known and value is not None}
    values |= {key: view.get(key) for key in _TOKENS}  # Llama's own defaults are its own tokens
    values |= {
        "vocab_size": subject.vocab_size,
        "draft_vocab_size": subject.draft_vocab_size or subject.vocab_size,
        "tie_word_embeddings": False,
        "norm_before_residual": view.norm_before_residual,
        **view.layer_extras,
        **view.method_settings,
        OWN_AUX_KEY: subject.aux_layer_ids,
    }
    values.setdefault("target_hidden_size", int(subject.target.text.hidden_size))
    if view.merges:
        values |= {"num_aux_hidden_states": 1, "norm_before_residual": False}
    try:
        config = LlamaConfig(**values)
        check_draft_config(config)
        if trained_depths(config) is None and view.speculative_tokens is not None:
            setattr(config, depths_key(config), view.speculative_tokens)
        return config
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        first = str(error).splitlines()[-1].strip()
        raise BadInput(first, where=str(subject.directory / CONFIG_NAME)) from None


def own_state(subject: Subject) -> dict[str, Tensor]:
    """Our tensors; what engines would share with the target is copied from it."""
    state = dict(subject.view.state)
    dtype = state["fc.weight"].dtype
    if subject.view.merges:
        tables = subject.target.tables
        state["embed_tokens.weight"] = tables.embedding_VD.to(dtype)
        state["lm_head.weight"] = tables.head_VD.to(dtype)
        if subject.view.fc_bias is None:
            state.pop("fc.bias", None)
        return state
    width, full = subject.draft_vocab_size or subject.vocab_size, subject.vocab_size
    ids = torch.arange(full)
    if width < full:
        if "d2t" not in state:
            raise BadInput("no map d2t for a smaller vocabulary", where=str(subject.directory))
        ids = state["d2t"].long() + torch.arange(width)
        state |= {"d2t": state["d2t"].long(), "t2d": tokens_marked(ids, full)}
    else:  # the identity: some write it out
        state.pop("d2t", None)
        state.pop("t2d", None)
    if "embed_tokens.weight" not in state:
        state["embed_tokens.weight"] = subject.target.tables.embedding_VD.to(dtype)
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = subject.target.tables.head_VD[ids].to(dtype)
    if "mask_hidden" in state:
        state["mask_hidden"] = state["mask_hidden"].reshape(1, 1, -1)
    return state
