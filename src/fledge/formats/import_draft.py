"""Convert foreign drafts: the same weights under our names, ready for eval, warm start and export.

What the files leave to the engine is filled in from the target. Faults with a certain repair are
repaired on the way, other broken files are left to `fledge diagnose`, and drafts that our network
cannot represent are refused with the reason.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError  # raised by configs of transformers
from torch import Tensor
from transformers import LlamaConfig

from fledge.core.errors import BadInput
from fledge.core.install import fledge_command
from fledge.core.terminal import counted
from fledge.formats.checks.base import Subject, TargetFiles
from fledge.formats.codec import TOKEN_KEYS
from fledge.formats.foreign import BIAS_KEYS, CONFIG_KEYS, OWN_AUX_KEY, read_files, tokens_marked
from fledge.methods.shared.config import DraftConfig, depths_key, trained_depths
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.files import CONFIG_NAME

if TYPE_CHECKING:
    from fledge.formats.diagnose import Diagnosis

# Not copied: rewritten, decided below, or not part of our config.
_NOT_KEPT = {
    "architectures", "model_type", "norm_before_residual", "norm_before_fc", "speculators_config",
    "eagle_config", "dflash_config", "transformer_layer_config", "type", "rope_type", "factor",
    "eagle_version", *BIAS_KEYS,
}  # fmt: skip


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
    if left_out := sorted(diagnosis.files.view.state.keys() - subject.view.state.keys()):
        repair = fledge_command("diagnose", source, "--target", target, "--fix", "REPAIRED")
        raise BadInput(
            f"{counted(len(left_out), 'tensor')} that no draft of ours has: {left_out[0]} ...",
            where=str(source),
            fix=f"if the draft works without: {repair}, and import that",
        )
    subject.view.build(subject).save_pretrained(out)
    return diagnosis


def build_chain(subject: Subject) -> DraftModel:
    """Build an EAGLE or P-EAGLE draft in memory."""
    where = subject.directory
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
    values = own_values(subject, CONFIG_KEYS - _NOT_KEPT) | {
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
        DraftConfig.of(config)
        if trained_depths(config) is None and view.speculative_tokens is not None:
            setattr(config, depths_key(config), view.speculative_tokens)
        return config
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise BadInput(reason, where=str(subject.directory / CONFIG_NAME)) from None


def own_values(subject: Subject, kept: Iterable[str]) -> dict[str, Any]:
    """What the configs of all drafts have: the `kept` keys of the files, and the vocabulary."""
    view = subject.view
    return {
        **{key: value for key in kept if (value := view.get(key)) is not None},
        **{key: view.get(key) for key in TOKEN_KEYS},  # else LlamaConfig sets Llama's token ids
        "vocab_size": subject.vocab_size,
        "draft_vocab_size": subject.draft_vocab_size or subject.vocab_size,
        "tie_word_embeddings": False,
    }


def own_state(subject: Subject) -> dict[str, Tensor]:
    """The tensors of our draft; what engines share with the target is copied from it."""
    view, target = subject.view, subject.target  # whose tables are read only where needed
    state = dict(view.state)
    dtype = state["fc.weight"].dtype
    if view.merges:
        state["embed_tokens.weight"] = target.tables.embedding_VD.to(dtype)
        state["lm_head.weight"] = target.tables.head_VD.to(dtype)
        if view.fc_bias is None:
            state.pop("fc.bias", None)
        return state
    ids = own_maps(subject, state)
    if "embed_tokens.weight" not in state:
        state["embed_tokens.weight"] = target.tables.embedding_VD.to(dtype)
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = target.tables.head_VD[ids].to(dtype)
    if "mask_hidden" in state:
        state["mask_hidden"] = state["mask_hidden"].reshape(1, 1, -1)
    return state


def own_maps(subject: Subject, state: dict[str, Tensor]) -> Tensor:
    """Put the maps of a smaller vocabulary into our form, and drop others (some trainers write the
    identity); returns [W] the target ids of the draft's tokens."""
    width, full = subject.draft_vocab_size or subject.vocab_size, subject.vocab_size
    d2t, ids = state.pop("d2t", None), torch.arange(full)
    state.pop("t2d", None)
    if width < full:
        if d2t is None:
            raise BadInput("no map d2t for a smaller vocabulary", where=str(subject.directory))
        ids = d2t.long() + torch.arange(width)
        state |= {"d2t": d2t.long(), "t2d": tokens_marked(ids, full)}
    return ids
