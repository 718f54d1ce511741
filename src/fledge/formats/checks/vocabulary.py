"""Checks of the draft vocabulary: the map between its ids and the target's, embeddings and head.

The map determines what a drafted id means. Engines read only `d2t`, as offsets (target id = draft
id + d2t[draft id]); without it, or with absolute ids in it, drafted ids map to the wrong tokens.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.formats.checks.base import Finding, Subject, check, error, warning, wrong_key
from fledge.formats.checks.tensors import fresh_std
from fledge.formats.foreign import DraftFiles
from fledge.target.base import selection_mask

_UNRELATED = 0.1  # mean cosine below which rows are considered unrelated
_CLOSER = 0.1  # difference of cosines: rows of tokens that the target never saw are nearly equal
_SAMPLE = 256  # rows that are compared with all of the target's
_CHUNK = 8192  # rows of the target's table per product


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
    wanted = selection_mask(ids, subject.vocab_size)
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
        absolute, relative = selection_mask(d2t, full), selection_mask(_ids(d2t), full)
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
        files.put_tensor("t2d", selection_mask(ids, len(mask)))


def _map_from_t2d(files: DraftFiles) -> None:
    set_map(files, files.view.state["t2d"].bool().nonzero()[:, 0])


def _sort_by_target(files: DraftFiles) -> None:
    view = files.view
    ids, order = torch.sort(_ids(view.state["d2t"].long()))
    files.put_tensor("lm_head.weight", view.state["lm_head.weight"][order].contiguous())
    set_map(files, ids)


# --- embeddings and head -------------------------------------------------------------------------
# Compared with the target's, the only weights read from it. Embeddings are the target's, or were
# initialized with them, so their rows point in the same directions. A head may start anywhere, so
# it is judged only if it resembles the target's or a fresh initialization.


@check("embeddings", "numeric", "embed_tokens that are random, rotated, or another tokenizer's",
       repairs=True)  # fmt: skip
def embeddings(subject: Subject) -> Iterator[Finding]:
    table, target_table = (
        subject.view.state.get("embed_tokens.weight"),
        subject.target.tables.embedding_VD,
    )
    if table is None or table.shape != target_table.shape or not table.is_floating_point():
        return
    cosine = _mean_cosine(table, target_table)
    spread = (
        f"std {float(table.float().std()):.3f}, "
        f"the target's {float(target_table.float().std()):.3f}"
    )
    if cosine >= _UNRELATED:
        if not torch.equal(table.float(), target_table.to(table.dtype).float()):
            evidence = (
                f"embed_tokens were trained (mean cosine {cosine:.3f}, {spread}): SGLang serves "
                "with the target's own"
            )
            fix = "serve with vLLM, or train with frozen embeddings"
            yield subject.only_for("sglang", error(evidence, fix))
        return
    rows = _sample(len(table))
    nearest, best = _nearest(table[rows], target_table)
    elsewhere = int(((nearest != rows) & (best > 0.9)).sum())
    if 2 * elsewhere > len(rows):
        yield error(
            f"embed_tokens are the target's rows in another order: {elsewhere} of {len(rows)} "
            f"sampled rows equal the row of another token",
            fix="the draft was made for another tokenizer: name its target",
        )
    elif _same_gram(table[rows], target_table[rows]):
        yield error(
            f"embed_tokens are the target's in a rotated basis: mean cosine {cosine:.2f}, yet all "
            "lengths and angles between rows agree",
            fix="the served weights were rotated (QuaRot, SpinQuant, ...): train on those weights, "
            "or serve the unrotated ones",
        )
    else:
        frozen, right = not subject.view.parallel, target_table.to(table.dtype)
        take = partial(DraftFiles.put_tensor, own="embed_tokens.weight", value=right)
        yield error(
            f"embed_tokens look randomly initialized: {spread}, mean cosine to the target's rows "
            f"{cosine:.2f}",
            fix="use the target's embeddings"
            if frozen
            else "P-EAGLE trains its embeddings: export again from the trainer's checkpoint",
            repair=take if frozen else None,
        )


@check("head-random", "numeric", "an lm_head that looks freshly initialized")
def head_random(subject: Subject) -> Iterator[Finding]:
    head, target_rows = _heads(subject)
    if head is None:
        return
    std = fresh_std(head, subject)
    cosine = None if target_rows is None else _mean_cosine(head, target_rows)
    if std is not None and (cosine is None or abs(cosine) < _UNRELATED):
        near = "" if cosine is None else f", mean cosine to the target's rows {cosine:.2f}"
        yield error(
            f"lm_head looks randomly initialized: std {std:.4f}, no direction stands out{near}",
            fix="export again from the trainer's own checkpoint",
        )


@check("head-map", "numeric", "a head that was trained with another map than the file's",
       repairs=True)  # fmt: skip
def head_map(subject: Subject) -> Iterator[Finding]:
    """Only for heads initialized with the target's: their rows still resemble the target's rows."""
    head, target_rows = _heads(subject)
    ids = sound_ids(subject)
    table = subject.target.tables.head_VD
    if head is None or target_rows is None or ids is None or head.shape[1] != table.shape[1]:
        return
    rows = _sample(len(head))
    _, best = _nearest(head[rows], table)
    alike = best > 0.5
    mapped = F.cosine_similarity(head[rows].float(), target_rows[rows].float(), dim=-1)
    elsewhere = int(((best - mapped > _CLOSER) & alike).sum())
    if 10 * int(alike.sum()) < 9 * len(rows) or 20 * elsewhere < len(rows):
        return
    nearest_ids, cosines = _nearest(head, table)
    certain = bool((cosines > 0.5).all()) and bool((nearest_ids.diff() > 0).all())
    yield error(
        f"{elsewhere} of {len(rows)} sampled rows of the head resemble another token's row of the "
        "target's head than the one they are mapped to: the map was recomputed after training",
        fix="the map that the head was trained with can be read off it"
        if certain
        else "take the map that the draft was trained with",
        repair=(lambda files: set_map(files, nearest_ids)) if certain else None,
    )


def _heads(subject: Subject) -> tuple[Tensor | None, Tensor | None]:
    """The draft's head, and the target's rows of the same tokens where they can be compared."""
    head, table = subject.view.state.get("lm_head.weight"), subject.target.tables.head_VD
    if head is None or head.ndim != 2 or not head.is_floating_point():
        return None, None
    ids = sound_ids(subject) if len(head) < subject.vocab_size else torch.arange(len(table))
    if ids is None or head.shape[1] != table.shape[1] or len(ids) != len(head):
        return head, None
    return head, table[ids]


def _mean_cosine(rows_NM: Tensor, target_NM: Tensor) -> float:
    return float(F.cosine_similarity(rows_NM.float(), target_NM.float(), dim=-1).mean())


def _sample(count: int) -> Tensor:
    """Indices of rows spread evenly over the table."""
    return torch.arange(min(count, _SAMPLE)) * count // min(count, _SAMPLE)


def _nearest(rows_SM: Tensor, table_VM: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the index of the most similar table row, and their cosine; in chunks."""
    best_S = torch.full((len(rows_SM),), -2.0)
    index_S = torch.zeros(len(rows_SM), dtype=torch.long)
    rows_SM = F.normalize(rows_SM.float(), dim=-1)
    for start in range(0, len(table_VM), _CHUNK):
        chunk = F.normalize(table_VM[start : start + _CHUNK].float(), dim=-1)
        closest = (rows_SM @ chunk.t()).max(dim=-1)
        closer_S = closest.values > best_S
        best_S = torch.where(closer_S, closest.values, best_S)
        index_S = torch.where(closer_S, closest.indices + start, index_S)
    return index_S, best_S


def _same_gram(rows_SM: Tensor, target_SM: Tensor) -> bool:
    rows, target = rows_SM.double(), target_SM.double()
    gap = (rows @ rows.t() - target @ target.t()).norm() / (target @ target.t()).norm()
    return bool(gap < 0.05)
