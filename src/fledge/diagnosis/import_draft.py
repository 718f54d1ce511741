"""Convert foreign drafts: the same weights under our names, ready for eval, warm start and export.

What the files leave to the engine is filled in from the target (its embeddings, its head, the aux
layers that engines assume). EAGLE-1 drafts are served with the target's embeddings and head, so
they get those even if the files have their own. Faults with a certain repair, such as the target's
number of layers in every config that AutoModel writes, are repaired on the way. Other broken files
are left to `fledge diagnose`, and drafts that our network cannot represent are refused with the
reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError  # raised by configs of transformers
from torch import Tensor
from transformers import LlamaConfig

from fledge.core.errors import BadInput
from fledge.core.install import fledge_command
from fledge.core.text import counted
from fledge.diagnosis.block_view import BlockView
from fledge.diagnosis.checks.base import Finding, Subject, TargetFiles
from fledge.diagnosis.config_keys import BIAS_KEYS, CONFIG_KEYS
from fledge.diagnosis.foreign import read_files, tokens_marked
from fledge.diagnosis.import_block import build_block
from fledge.diagnosis.layouts import OWN_AUX_KEY
from fledge.draft.base import DraftModel
from fledge.draft.config import check_draft_config, depths_key, trained_depths
from fledge.draft.files import CONFIG_NAME

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Not copied: rewritten, decided below, or not part of our config.
_NOT_KEPT = {
    "architectures", "model_type", "norm_before_residual", "norm_before_fc", "speculators_config",
    "eagle_config", "dflash_config", "transformer_layer_config", "type", "rope_type", "factor",
    "eagle_version", *BIAS_KEYS,
}  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """A converted draft, and what was wrong with the files that it was made from."""

    directory: Path
    repairs: tuple[Finding, ...]


def import_draft(source: Path, out: Path, *, target: str, trust_remote_code: bool = False) -> Path:
    """Convert `source`, in any layout, to a draft of ours in `out` (written atomically)."""
    return convert_draft(source, out, target=target, trust_remote_code=trust_remote_code).directory


def convert_draft(
    source: Path, out: Path, *, target: str, trust_remote_code: bool = False
) -> Imported:
    """`import_draft`, with the repairs that it made."""
    from fledge.diagnosis.diagnose import Diagnosis, repair_and_recheck

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
    if left_out := sorted(diagnosis.files.view.state.keys() - subject.view.state.keys()):
        repair = fledge_command("diagnose", source, "--target", target, "--fix", "REPAIRED")
        raise BadInput(
            f"{counted(len(left_out), 'tensor')} that no draft of ours has: {left_out[0]} ...",
            where=str(source),
            fix=f"if the draft works without: {repair}, and import that",
        )
    build_draft(subject).save_pretrained(out)
    return Imported(out, tuple(f for f in diagnosis.findings if f.repair is not None))


def build_draft(subject: Subject) -> DraftModel:
    """Build the draft in memory as our own model, in the files' dtype (the widest, if several)."""
    where = subject.directory
    if isinstance(subject.view, BlockView):
        return build_block(subject)
    if refusal := next(_refusals(subject), None):
        raise BadInput(refusal, where=str(where))
    state, config = own_state(subject), own_config(subject)
    dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    dtype = reduce(torch.promote_types, dtypes)  # represents every weight exactly
    draft_type = subject.view.method.draft_type()
    try:
        return draft_type.from_tensors(config, state, where=where, dtype=dtype).eval()
    except ValueError as error:  # a limit of this kind of draft alone
        raise BadInput(str(error), where=str(where / CONFIG_NAME)) from None


def _refusals(subject: Subject) -> Iterator[str]:
    """Reasons why our draft cannot represent these files."""
    view = subject.view
    if view.get("norm_before_fc"):
        yield "norm_before_fc is true: our drafts normalize each aux state separately (fc_norm)"
    supported = view.method.aux_layers()
    count = view.get("num_aux_hidden_states", supported)
    if count != supported:
        yield f"{count} aux states: our {view.method.title} drafts read {supported}"
    if subject.aux_layer_ids is None:
        yield "the files do not name the aux layers, and the target is too shallow for the default"
    if "fc.weight" not in view.state:
        yield "fc.weight is missing"


def own_config(subject: Subject) -> Any:
    """The draft as a Llama config with our own keys, from any layout."""
    view = subject.view
    copied = CONFIG_KEYS - _NOT_KEPT
    values = {key: value for key, value in view.flat.items() if key in copied and value is not None}
    values |= {key: view.get(key) for key in _TOKENS}  # else LlamaConfig sets Llama's token ids
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
        reason = str(error).splitlines()[-1].strip()
        raise BadInput(reason, where=str(subject.directory / CONFIG_NAME)) from None


def own_state(subject: Subject) -> dict[str, Tensor]:
    """The tensors of our draft; what engines share with the target is copied from it."""
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
    else:  # some trainers write the identity map
        state.pop("d2t", None)
        state.pop("t2d", None)
    if "embed_tokens.weight" not in state:
        state["embed_tokens.weight"] = subject.target.tables.embedding_VD.to(dtype)
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = subject.target.tables.head_VD[ids].to(dtype)
    if "mask_hidden" in state:
        state["mask_hidden"] = state["mask_hidden"].reshape(1, 1, -1)
    return state
