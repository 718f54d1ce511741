"""Checks of block drafts (DFlash, DSpark) by their files; `block_decoding` has those by decoding.

Engines load most of these faults without a warning: a missing norm stays at ones, a wrong mask
token is embedded like any other, and acceptance falls to that of a random draft.
"""

from collections.abc import Iterator
from functools import partial

import torch

from fledge.core.errors import BadInput
from fledge.core.text import counted
from fledge.diagnosis.block_view import BlockView
from fledge.diagnosis.checks.base import Finding, Subject, check, error, warning, wrong_key
from fledge.diagnosis.checks.tensors import drop_tensors
from fledge.diagnosis.foreign import DraftFiles
from fledge.draft.mask_token import check_mask_token_id
from fledge.export.formats import set_path

_LAYER = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
_W1, _W2 = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
_CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
_TABLES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
_SPEC_TOKENS = "speculators_config.proposal_methods.0.speculative_tokens"


def view_of(subject: Subject) -> BlockView:
    assert isinstance(subject.view, BlockView)
    return subject.view


def _required(view: BlockView) -> list[str]:
    names = ["fc.weight", "hidden_norm.weight", "norm.weight"]
    layers = range(max(view.layer_numbers, default=-1) + 1)
    names += [f"layers.{i}.{part}.weight" for i in layers for part in _LAYER]
    return names + ([_W1, _W2] if view.spark else [])


@check("block-missing", "static", "DFlash, DSpark: tensors that an engine leaves random or at ones")
def missing(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    absent = [name for name in _required(view) if name not in view.state]
    if not view.layer_numbers:
        yield error("no layer of a draft in the file", last=True)
    elif absent:
        examples = ", ".join(absent[:4]) + (" ..." if absent[4:] else "")
        why = ""
        if "hidden_norm.weight" in absent:
            why = ": the target's features then enter every layer unscaled"
        fix = "export again from the trainer's checkpoint"
        yield error(
            f"{counted(len(absent), 'tensor is', 'tensors are')} missing ({examples}){why}", fix
        )


@check("block-unexpected", "static", "DFlash, DSpark: tensors that vLLM refuses and SGLang skips",
       repairs=True)  # fmt: skip
def unexpected(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    expected = {*_required(view), *_TABLES, *(_CONFIDENCE if view.spark else ())}
    extra = [view.names[name] for name in view.state if name not in expected]
    if extra:
        yield error(
            f"{counted(len(extra), 'tensor belongs', 'tensors belong')} to no block draft: "
            f"{', '.join(extra[:4])}",
            fix="leave them out",
            repair=partial(drop_tensors, doomed=extra),
        )


@check("markov-transposed", "static", "DSpark: a transposed factor of the Markov head",
       repairs=True)  # fmt: skip
def markov_transposed(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    rank = view.setting("markov_rank")
    rows = {_W1: subject.vocab_size, _W2: subject.draft_vocab_size or subject.vocab_size}
    for name, count in rows.items():
        factor = view.state.get(name)
        if factor is None or factor.ndim != 2 or type(rank) is not int or rank == count:
            continue
        if tuple(factor.shape) == (rank, count):
            yield error(
                f"{name} is {list(factor.shape)}: engines read [tokens, rank] = {[count, rank]}",
                fix="transpose it",
                repair=partial(DraftFiles.put_tensor, own=name, value=factor.t().contiguous()),
            )
        elif tuple(factor.shape) != (count, rank):
            evidence = (
                f"{name} is {list(factor.shape)}, not [tokens, markov_rank] = {[count, rank]}"
            )
            yield error(evidence, fix="was it trained for another target or rank?")


@check("block-layers", "static", "DFlash, DSpark: aux layers that are not written, not as many "
       "as fc reads, out of range or out of order", repairs=True)  # fmt: skip
def listened_layers(subject: Subject) -> Iterator[Finding]:
    view, depth = view_of(subject), subject.target.depth
    ids, fc = view.aux_layer_ids, view.state.get("fc.weight")
    if not ids:
        fix = "write the layers that it was trained on"
        yield error("the files name no layers of the target (target_layer_ids)", fix)
        return
    width = int(subject.target.text.hidden_size)
    if fc is not None and fc.ndim == 2 and fc.shape[1] != len(ids) * width:
        reads = fc.shape[1] / width
        yield error(f"{len(ids)} layers are named, fc reads {reads:g} states of {width}")
    outside = [layer for layer in ids if not 0 <= layer < depth]
    if outside:
        lower = [layer - 1 for layer in ids]
        evidence = f"aux layers {ids}: the target's layers are 0 .. {depth - 1}"
        off_by_one = max(outside) == depth and min(lower) >= 0
        fix = "they are counted from 1: subtract 1 from each" if off_by_one else "name its target"
        repair = partial(DraftFiles.put_aux, layer_ids=lower) if off_by_one else None
        yield error(evidence, fix, repair)
    elif ids != sorted(set(ids)):
        evidence = f"aux layers {ids}: engines pass features in ascending order"
        sure = fc is not None and len(set(ids)) == len(ids) and fc.shape[1] == len(ids) * width
        yield error(evidence, "sort them, and fc's columns with them", _sort if sure else None)


def _sort(files: DraftFiles) -> None:
    ids, fc = files.view.aux_layer_ids, files.view.state["fc.weight"]
    assert ids is not None
    order = sorted(range(len(ids)), key=lambda i: ids[i])
    chunks = fc.chunk(len(ids), dim=1)
    files.put_tensor("fc.weight", torch.cat([chunks[i] for i in order], dim=1).contiguous())
    files.put_aux([ids[i] for i in order])


@check("block-size", "static", "DFlash, DSpark: a block size that is absent, or does not match "
       "the tokens that a round proposes", repairs=True)  # fmt: skip
def block_size(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    size, first = view.setting("block_size"), view.first_place
    stated = view.speculative_tokens
    if type(size) is not int or size <= first:
        certain = stated is not None
        repair = partial(DraftFiles.put, key="block_size", value=(stated or 0) + first)
        fix = f"block_size: {stated + first}" if stated else "the size that it was trained with"
        yield error(f"block_size is {size}", fix, repair if certain else None)
    elif stated is not None and stated != size - first:
        yield error(
            f"blocks of {size} slots propose {size - first} tokens, the file says {stated}: a "
            "block of another length is served than was trained",
            fix=f"speculative_tokens: {size - first}",
            repair=lambda files: set_path(files.config, _SPEC_TOKENS, size - first),
        )


@check("block-mask", "static", "DFlash, DSpark: no placeholder, or a real token for it")
def mask_token(subject: Subject) -> Iterator[Finding]:
    token = view_of(subject).mask_token_id
    if type(token) is not int or not 0 <= token < subject.vocab_size:
        evidence = f"mask_token_id is {token}, the target has {subject.vocab_size:,} tokens"
        yield error(evidence, fix="the id that the draft was trained with")
    elif subject.target.tokenizer is not None:
        try:
            check_mask_token_id(token, subject.target.tokenizer, subject.vocab_size)
        except BadInput as refused:
            fix = "the decoding checks try likelier tokens; without them, ask its trainer"
            yield warning(refused.what + ": was the draft trained with it?", fix)


@check("block-places", "static", "DFlash, DSpark: two keys of one config that disagree",
       repairs=True)  # fmt: skip
def places(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    ids = {place.path: view.aux_at(place) for place in view.written_aux}
    if len({str(layers) for layers in ids.values()}) > 1:
        listed = ", ".join(f"{path} {layers}" for path, layers in ids.items())
        evidence = f"aux layers, as outputs: {listed}; engines take the first"
        right = view.aux_layer_ids
        repair = None if right is None else partial(DraftFiles.put_aux, layer_ids=right)
        yield error(evidence, "write the same everywhere (block-layers-shifted tries them)", repair)
    count, depth = view.setting("num_target_layers"), subject.target.depth
    if count is not None and count != depth:
        evidence = f"num_target_layers is {count}, the target has {depth}"
        yield wrong_key("num_target_layers", depth, evidence)


@check("block-direction", "static", "DFlash: a key that makes vLLM serve causal blocks",
       repairs=True)  # fmt: skip
def direction(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    if view.get("sliding_window_non_causal") is False and not view.sliding_layers:
        evidence = (
            "sliding_window_non_causal is false: the trainer means sliding layers, of which there "
            "are none; vLLM 0.32 applies it to all layers, and slots no longer see later ones"
        )
        put = partial(DraftFiles.put, key="sliding_window_non_causal", value=None)
        yield subject.only_for("vllm", error(evidence, "leave the key out", put))


@check("confidence-flags", "static", "DSpark: a confidence head whose flag and tensors disagree",
       repairs=True)  # fmt: skip
def confidence_flags(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    if not view.spark or view.layout.name == "fledge":
        return
    present, declared = view.confidence_head, view.declares_confidence
    if present != declared:
        evidence = f"enable_confidence_head is {str(declared).lower()}, the file has " + (
            "such a head: vLLM drops it" if present else "none"
        )
        yield wrong_key("enable_confidence_head", present, evidence)
    weight, width = view.state.get(_CONFIDENCE[0]), view.state.get("norm.weight")
    if weight is not None and width is not None and weight.ndim == 2:
        reads_both = weight.shape[1] > len(width)
        by_default = view.setting("use_confidence_head", False)  # ModelOpt's always reads both
        if declared and reads_both != bool(view.setting("confidence_head_with_markov", by_default)):
            evidence = f"the confidence head reads {weight.shape[1]} values, the states have "
            evidence += (
                f"{len(width)}: confidence_head_with_markov is {str(not reads_both).lower()}"
            )
            yield wrong_key("confidence_head_with_markov", reads_both, evidence)
