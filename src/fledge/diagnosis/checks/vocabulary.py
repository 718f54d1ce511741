"""Checks of the draft vocabulary: sizes, and the map between the draft's ids and the target's.

The map determines what a drafted id means. Engines read only `d2t`, as offsets (target id = draft
id + d2t[draft id]); without it, or with absolute ids in it, drafted ids map to the wrong tokens.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fledge.diagnosis.checks.base import Finding, Subject, check, error, warning, wrong_key
from fledge.diagnosis.foreign import DraftFiles, tokens_marked


@check("vocab-size", "static", "vocab_size, embeddings or t2d of another size than the target's",
       repairs=True)  # fmt: skip
def vocab_size(subject: Subject) -> Iterator[Finding]:
    full, state = subject.vocab_size, subject.view.state
    names = ["embed_tokens.weight", "lm_head.weight" if subject.view.merges else "t2d"]
    shown = {name: len(state[name]) for name in names if name in state and state[name].ndim}
    wrong = {name: rows for name, rows in shown.items() if rows != full}
    if wrong:
        seen = ", ".join(f"{name} has {rows:,} rows" for name, rows in wrong.items())
        fix = "name the target it was trained for"
        yield error(f"{seen}; the target has {full:,} tokens", fix)
    elif (declared := subject.view.get("vocab_size")) != full:
        evidence = f"vocab_size is {declared}, the target's {full:,}: engines size embeddings by it"
        yield wrong_key("vocab_size", full, evidence)


@check("draft-vocab-size", "static", "draft_vocab_size other than the head's rows", repairs=True)
def draft_vocab_size(subject: Subject) -> Iterator[Finding]:
    head = subject.view.state.get("lm_head.weight")
    declared = subject.view.get("draft_vocab_size")
    if subject.view.merges:
        if declared not in (None, full := subject.vocab_size):
            evidence = f"draft_vocab_size is {declared}, EAGLE-1 uses all {full:,} tokens"
            yield wrong_key("draft_vocab_size", full, evidence)
        return
    if head is None or head.ndim != 2 or (declared is None and len(head) == subject.vocab_size):
        return
    if declared != (rows := len(head)):
        evidence = f"draft_vocab_size is {declared}, the head has {rows:,} rows"
        yield wrong_key("draft_vocab_size", rows, evidence)


@check("d2t-missing", "static", "no map although the draft vocabulary is smaller", repairs=True)
def d2t_missing(subject: Subject) -> Iterator[Finding]:
    width = _reduced_width(subject)
    if width is None or "d2t" in subject.view.state:
        return
    mask = subject.view.state.get("t2d")
    sure = mask is not None and mask.ndim == 1 and int(mask.bool().sum()) == width
    evidence = (
        f"no d2t, and the head has {width:,} rows of {subject.vocab_size:,}: engines then take "
        "draft id i for target id i"
    )
    yield _wrong_map(evidence, "t2d marks exactly as many ids: the map follows from it", sure)


@check("d2t-type", "static", "maps that are not int64 / bool", repairs=True)
def d2t_type(subject: Subject) -> Iterator[Finding]:
    for name, wanted in (("d2t", torch.int64), ("t2d", torch.bool)):
        tensor = subject.view.state.get(name)
        if tensor is None or tensor.dtype == wanted:
            continue
        cast = tensor.to(wanted)
        sure = torch.equal(cast.double(), tensor.double())
        yield (error if name == "d2t" else warning)(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, engines read "
            f"{str(wanted).removeprefix('torch.')}",
            fix="convert it" if sure else "its values are not integers: take the trainer's map",
            repair=partial(DraftFiles.put_tensor, own=name, value=cast) if sure else None,
        )


@check("d2t-absolute", "static", "target ids in d2t instead of offsets", repairs=True)
def d2t_absolute(subject: Subject) -> Iterator[Finding]:
    d2t = _integral_d2t(subject)
    if d2t is None or not _is_absolute(d2t, subject):
        return
    offsets = d2t - torch.arange(len(d2t))
    beyond = int((_ids(d2t) >= subject.vocab_size).sum())
    yield error(
        f"d2t holds target ids ({int(d2t[0])}, {int(d2t[1])}, ... {int(d2t[-1])}), not offsets: "
        f"{beyond:,} of {len(d2t):,} drafted ids would lie beyond the vocabulary",
        fix="subtract the draft id from each",
        repair=partial(DraftFiles.put_tensor, own="d2t", value=offsets),
    )


@check("d2t-range", "static", "offsets that lead outside the vocabulary, or twice to one token",
       repairs=True)  # fmt: skip
def d2t_range(subject: Subject) -> Iterator[Finding]:
    d2t = _integral_d2t(subject)
    if d2t is None or _is_absolute(d2t, subject):
        return
    ids, full = _ids(d2t), subject.vocab_size
    outside = (ids < 0) | (ids >= full)
    repeated = len(ids) - len(set(ids.tolist()))
    if not outside.any() and not repeated:
        return
    mask = subject.view.state.get("t2d")
    sure = False
    if mask is not None and mask.shape == (full,) and int(mask.bool().sum()) == len(ids):
        # the ids that are still valid must agree with the ascending map that t2d implies
        agree = ids == mask.bool().nonzero()[:, 0]
        sure = bool(2 * int(agree.sum()) >= len(ids))
    evidence = (
        f"{int(outside.sum()):,} of {len(ids):,} drafted ids fall outside 0..{full - 1}, "
        f"{repeated:,} repeat another"
    )
    yield _wrong_map(evidence, "t2d agrees with the rest: rebuild the map from it", sure)


@check("d2t-order", "static", "a map that does not ascend", repairs=True)
def d2t_order(subject: Subject) -> Iterator[Finding]:
    ids = sound_ids(subject)
    if ids is not None and (falls := int((ids.diff() < 0).sum())):
        yield error(
            f"the draft's ids do not follow the target's: {falls:,} of {len(ids) - 1:,} steps fall",
            fix="sort the rows of the head and the map together",
            repair=_sort_by_target,
        )


@check("t2d-mismatch", "static", "t2d that marks other tokens than d2t leads to", repairs=True)
def t2d_mismatch(subject: Subject) -> Iterator[Finding]:
    ids, mask = sound_ids(subject), subject.view.state.get("t2d")
    if ids is None or mask is None or mask.shape != (subject.vocab_size,):
        return
    wanted = tokens_marked(ids, subject.vocab_size)
    if differ := int((wanted != mask.bool()).sum()):
        yield error(
            f"t2d and d2t disagree on {differ:,} tokens ({int(mask.bool().sum()):,} marked, "
            f"{len(ids):,} mapped): was one of them recomputed for a warm start?",
            fix="engines follow d2t: rebuild t2d from it (head-map checks d2t itself)",
            repair=partial(DraftFiles.put_tensor, own="t2d", value=wanted),
        )


@check("end-token", "static", "an end token that the draft cannot propose")
def end_token(subject: Subject) -> Iterator[Finding]:
    ids, tokenizer = sound_ids(subject), subject.target.tokenizer
    if ids is None or tokenizer is None or tokenizer.eos_token_id is None:
        return
    if not bool((ids == tokenizer.eos_token_id).any()):
        yield warning(
            f"the target's end token {tokenizer.eos_token!r} ({tokenizer.eos_token_id}) is not "
            "among the draft's tokens: no round can end with it, and training never showed it",
            fix="were answers cut or masked before their end? build the vocabulary again",
        )


# --- maps ----------------------------------------------------------------------------------------


def _wrong_map(evidence: str, fix: str, sure: bool) -> Finding:
    """An error about an unusable map; `sure` means that t2d implies the right one."""
    if sure:
        return error(evidence, fix, _map_from_t2d)
    return error(evidence, "take the map that the draft was trained with")


def _reduced_width(subject: Subject) -> int | None:
    width = subject.draft_vocab_size or subject.vocab_size
    return width if width < subject.vocab_size else None


def _integral_d2t(subject: Subject) -> Tensor | None:
    """d2t as int64; None unless the draft vocabulary is reduced and has a map."""
    d2t, width = subject.view.state.get("d2t"), _reduced_width(subject)
    if d2t is None or width is None or d2t.ndim != 1 or len(d2t) < 2:
        return None
    return d2t.long()


def _ids(d2t: Tensor) -> Tensor:
    return d2t + torch.arange(len(d2t))


def _is_map(ids: Tensor, full: int) -> bool:
    return bool(((ids >= 0) & (ids < full)).all()) and len(set(ids.tolist())) == len(ids)


def _is_absolute(d2t: Tensor, subject: Subject) -> bool:
    """Whether d2t holds target ids instead of offsets.

    Read as ids it must be a valid map. Read as offsets it must be invalid, contradict t2d, or map
    no two of more than a thousand tokens to adjacent ids.
    """
    full, mask = subject.vocab_size, subject.view.state.get("t2d")
    if not _is_map(d2t, full):
        return False
    if not _is_map(_ids(d2t), full):
        return True
    if mask is not None and mask.shape == (full,):
        absolute, relative = tokens_marked(d2t, full), tokens_marked(_ids(d2t), full)
        return torch.equal(absolute, mask.bool()) and not torch.equal(relative, mask.bool())
    return len(d2t) > 1000 and bool((d2t.diff() > 0).all())


def sound_ids(subject: Subject) -> Tensor | None:
    """[W] target ids of the draft's tokens; None unless the map is valid."""
    d2t = _integral_d2t(subject)
    if d2t is None or _is_absolute(d2t, subject) or not _is_map(_ids(d2t), subject.vocab_size):
        return None
    return _ids(d2t)


def set_map(files: DraftFiles, ids: Tensor) -> None:
    """Write d2t, and t2d if the file has one, from [W] target ids in draft order."""
    files.put_tensor("d2t", ids - torch.arange(len(ids)))
    if (mask := files.view.state.get("t2d")) is not None:
        files.put_tensor("t2d", tokens_marked(ids, len(mask)))


def _map_from_t2d(files: DraftFiles) -> None:
    set_map(files, files.view.state["t2d"].bool().nonzero()[:, 0])


def _sort_by_target(files: DraftFiles) -> None:
    view = files.view
    ids, order = torch.sort(_ids(view.state["d2t"].long()))
    files.put_tensor("lm_head.weight", view.state["lm_head.weight"][order].contiguous())
    set_map(files, ids)
