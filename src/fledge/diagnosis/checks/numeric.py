"""Checks of the draft's embeddings and head against the target's, the only weights read from it.

Embeddings are the target's, or were initialized with them, so their rows point in the same
directions. A head may start anywhere, so it is judged only if it resembles the target's or a fresh
initialization.
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

_UNRELATED = 0.1  # mean cosine below which rows are considered unrelated
_CLOSER = 0.1  # difference of cosines: rows of tokens that the target never saw are nearly equal
_SAMPLE = 256  # rows that are compared with all of the target's
_CHUNK = 8192  # rows of the target's table per product


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
