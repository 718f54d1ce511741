"""Checks of the draft's two big tables against the target's, which are all that is read of it.

Embeddings are the target's own, or started there; so their rows point the target's way. A head may
start anywhere, so it is judged only where it resembles the target's or an initialisation.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.diagnosis.checks.base import Finding, Subject, check, error
from fledge.diagnosis.checks.tensors import fresh_std
from fledge.diagnosis.checks.vocabulary import set_map, sound_ids
from fledge.diagnosis.foreign import DraftFiles

_UNRELATED = 0.1  # mean cosine below which rows have nothing to do with each other
_SAMPLE = 256  # rows that are compared with all of the target's
_PIECE = 8192


@check("embeddings", "numeric", "embed_tokens that are random, rotated, or another tokenizer's",
       repairs=True)  # fmt: skip
def embeddings(subject: Subject) -> Iterator[Finding]:
    own, theirs = subject.view.state.get("embed_tokens.weight"), subject.target.tables.embedding_VD
    if own is None or own.shape != theirs.shape or not own.is_floating_point():
        return
    cosine = _mean_cosine(own, theirs)
    spread = f"std {float(own.float().std()):.3f}, the target's {float(theirs.float().std()):.3f}"
    if cosine >= _UNRELATED:
        if not torch.equal(own.float(), theirs.to(own.dtype).float()):
            evidence = (
                f"embed_tokens were trained (mean cosine {cosine:.3f}, {spread}): SGLang serves "
                "with the target's own"
            )
            fix = "serve with vLLM, or train with frozen embeddings"
            yield subject.only_for("sglang", error(evidence, fix))
        return
    rows = _sample(len(own))
    nearest, best = _nearest(own[rows], theirs)
    elsewhere = int(((nearest != rows) & (best > 0.9)).sum())
    if 2 * elsewhere > len(rows):
        yield error(
            f"embed_tokens are the target's rows in another order: {elsewhere} of {len(rows)} "
            f"sampled rows equal the row of another token",
            fix="the draft was made for another tokenizer: name its target",
        )
    elif _same_gram(own[rows], theirs[rows]):
        yield error(
            f"embed_tokens are the target's in a rotated basis: mean cosine {cosine:.2f}, yet all "
            "lengths and angles between rows agree",
            fix="the served weights were rotated (QuaRot, SpinQuant, ...): train on those weights, "
            "or serve the unrotated ones",
        )
    else:
        frozen, right = not subject.view.parallel, theirs.to(own.dtype)
        take = partial(DraftFiles.put_tensor, own="embed_tokens.weight", value=right)
        yield error(
            f"embed_tokens look randomly initialised: {spread}, mean cosine to the target's rows "
            f"{cosine:.2f}",
            fix="use the target's embeddings"
            if frozen
            else "P-EAGLE trains its embeddings: export again from the trainer's checkpoint",
            repair=take if frozen else None,
        )


@check("head-random", "numeric", "an lm_head that looks freshly initialised")
def head_random(subject: Subject) -> Iterator[Finding]:
    head, theirs = _heads(subject)
    if head is None:
        return
    std = fresh_std(head, subject)
    cosine = None if theirs is None else _mean_cosine(head, theirs)
    if std is not None and (cosine is None or abs(cosine) < _UNRELATED):
        near = "" if cosine is None else f", mean cosine to the target's rows {cosine:.2f}"
        yield error(
            f"lm_head looks randomly initialised: std {std:.4f}, no direction stands out{near}",
            fix="export again from the trainer's own checkpoint",
        )


@check("head-map", "numeric", "a head that was trained with another map than the file's",
       repairs=True)  # fmt: skip
def head_map(subject: Subject) -> Iterator[Finding]:
    """Only heads that started from the target's can say: their rows still resemble their tokens."""
    head, theirs = _heads(subject)
    ids = sound_ids(subject)
    table = subject.target.tables.head_VD
    if head is None or theirs is None or ids is None or head.shape[1] != table.shape[1]:
        return
    rows = _sample(len(head))
    nearest, best = _nearest(head[rows], table)
    alike = best > 0.5
    elsewhere = int(((nearest != ids[rows]) & alike).sum())
    if 10 * int(alike.sum()) < 9 * len(rows) or 20 * elsewhere < len(rows):
        return
    everywhere, sure = _nearest(head, table)
    certain = bool((sure > 0.5).all()) and bool((everywhere.diff() > 0).all())
    yield error(
        f"{elsewhere} of {len(rows)} sampled rows of the head resemble another token's row of the "
        "target's head than the one they are mapped to: the map was recomputed after training",
        fix="the map that the head was trained with can be read off it"
        if certain
        else "take the map that the draft was trained with",
        repair=(lambda files: set_map(files, everywhere)) if certain else None,
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


def _mean_cosine(own_NM: Tensor, theirs_NM: Tensor) -> float:
    return float(F.cosine_similarity(own_NM.float(), theirs_NM.float(), dim=-1).mean())


def _sample(count: int) -> Tensor:
    """Rows spread over the table."""
    return torch.arange(min(count, _SAMPLE)) * count // min(count, _SAMPLE)


def _nearest(rows_SM: Tensor, table_VM: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the most similar one of the table, and their cosine; the table in pieces."""
    best_S = torch.full((len(rows_SM),), -2.0)
    place_S = torch.zeros(len(rows_SM), dtype=torch.long)
    rows_SM = F.normalize(rows_SM.float(), dim=-1)
    for begin in range(0, len(table_VM), _PIECE):
        piece = F.normalize(table_VM[begin : begin + _PIECE].float(), dim=-1)
        closest = (rows_SM @ piece.t()).max(dim=-1)
        closer_S = closest.values > best_S
        best_S = torch.where(closer_S, closest.values, best_S)
        place_S = torch.where(closer_S, closest.indices + begin, place_S)
    return place_S, best_S


def _same_gram(own_SM: Tensor, theirs_SM: Tensor) -> bool:
    own, theirs = own_SM.double(), theirs_SM.double()
    gap = (own @ own.t() - theirs @ theirs.t()).norm() / (theirs @ theirs.t()).norm()
    return bool(gap < 0.05)
