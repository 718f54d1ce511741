"""Checks of the draft vocabulary, and of the weights against the target's embedding and head.

The map determines what a drafted id means. Engines read only `d2t`, as offsets (target id = draft
id + d2t[draft id]); without it, or with absolute ids in it, drafted ids map to the wrong tokens.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.formats.checks.base import Finding, Subject, error, warning
from fledge.formats.foreign import DraftFiles
from fledge.target.base import selection_mask

_UNRELATED = 0.1  # mean cosine below which rows are considered unrelated
_CLOSER = 0.1  # difference of cosines: rows of tokens that the target never saw are nearly equal
_SAMPLE = 256  # rows that are compared with all of the target's
_CHUNK = 8192  # rows of the target's table per product


# --- the map -------------------------------------------------------------------------------------


def d2t(subject: Subject) -> Iterator[Finding]:
    """A map that is missing, absolute, or not a map; or one without the end token."""
    full, width = subject.vocab_size, subject.draft_vocab_size
    stored, mask = (subject.view.state.get(name) for name in ("d2t", "t2d"))
    if width >= full:
        return
    if stored is None:
        evidence = f"no d2t, and the head has {width:,} rows of {full:,}: engines then take draft "
        evidence += "id i for target id i"
        marked = None if mask is None else mask.flatten().bool().nonzero()[:, 0]
        if marked is None or len(marked) != width:
            yield error(evidence, "take the map that the draft was trained with")
        else:
            yield error(evidence, "the map follows from t2d", partial(_set_map, ids=marked))
        return
    if stored.shape != (width,):
        yield error(f"d2t is {list(stored.shape)}, the head has {width:,} rows", "export again")
        return
    ids = _ids(stored.long())
    if _is_absolute(stored.long(), subject):
        beyond, ids = int((ids >= full).sum()), stored.long()
        yield error(
            f"d2t holds target ids ({int(ids[0])}, {int(ids[1])}, ... {int(ids[-1])}), not "
            f"offsets: {beyond:,} of {width:,} drafted ids would lie beyond the vocabulary",
            "write offsets",
            partial(_set_map, ids=ids),
        )
    elif not _is_map(ids, full):
        outside = int(((ids < 0) | (ids >= full)).sum())
        evidence = f"{outside:,} of {width:,} drafted ids fall outside 0..{full - 1}, "
        evidence += f"{width - len({*ids.tolist()}):,} repeat another"
        yield error(evidence, "take the map that the draft was trained with")
    elif (tokenizer := subject.target.tokenizer) and tokenizer.eos_token_id not in {
        None,
        *ids.tolist(),
    }:
        yield warning(
            f"the target's end token {tokenizer.eos_token!r} ({tokenizer.eos_token_id}) is not "
            "among the draft's tokens: no round can end with it, and training never showed it",
            fix="were answers cut or masked before their end? build the vocabulary again",
        )


def _ids(d2t: Tensor) -> Tensor:
    return d2t + torch.arange(len(d2t))


def _is_map(ids: Tensor, full: int) -> bool:
    return bool(((ids >= 0) & (ids < full)).all()) and len({*ids.tolist()}) == len(ids)


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


def _set_map(files: DraftFiles, ids: Tensor) -> None:
    """Write d2t from [W] target ids in draft order."""
    files.put_tensor("d2t", ids - torch.arange(len(ids)))


# --- weights beside the target's -----------------------------------------------------------------
# Embeddings are the target's, or were initialized with them, so their rows point in the same
# directions. A head may start anywhere, so it is judged only if it resembles the target's or a
# fresh initialization.


def embeddings(subject: Subject) -> Iterator[Finding]:
    """embed_tokens that are random, or not those of this target."""
    table = subject.view.state.get("embed_tokens.weight")
    if table is None or subject.view.borrows:
        return
    target_table = subject.target.tables.embedding_VD
    if table.shape != target_table.shape or not table.is_floating_point():
        return
    cosine, right = _mean_cosine(table, target_table), target_table.to(table.dtype)
    seen = f"mean cosine to the target's rows {cosine:.2f}, std {float(table.float().std()):.3f}, "
    seen += f"the target's {float(target_table.float().std()):.3f}"
    if cosine >= _UNRELATED:
        if not torch.equal(table.float(), right.float()):
            evidence = f"embed_tokens were trained ({seen}): SGLang serves with the target's own"
            fix = "serve with vLLM, or train with frozen embeddings"
            yield subject.only_for("sglang", evidence, fix)
    elif not _looks_fresh(table, subject):
        yield error(
            f"embed_tokens are not the target's: {seen}",
            fix="was it trained for another target or tokenizer, or are the target's weights "
            "rotated (QuaRot, SpinQuant, ...)? name the one it was trained for",
        )
    elif subject.view.parallel:
        fix = "P-EAGLE trains its embeddings: export again from the trainer's checkpoint"
        yield error(f"embed_tokens look randomly initialized: {seen}", fix)
    else:
        take = partial(DraftFiles.put_tensor, own="embed_tokens.weight", value=right)
        fix = "use the target's embeddings"
        yield error(f"embed_tokens look randomly initialized: {seen}", fix, take)


def head(subject: Subject) -> Iterator[Finding]:
    """A head that was trained with another map than the file's, or that looks freshly initialized.

    Rows of a head that was initialized with the target's still resemble the target's rows."""
    view, full = subject.view, subject.vocab_size
    own, stored = view.state.get("lm_head.weight"), view.state.get("d2t")
    if own is None or view.borrows or own.ndim != 2 or not own.is_floating_point():
        return
    table, width = subject.target.tables.head_VD, len(own)
    ids = torch.arange(width)
    if width < full and stored is not None and stored.shape == ids.shape:
        ids = _ids(stored.long())
    if own.shape[1] != table.shape[1] or not _is_map(ids, full):
        return
    if abs(_mean_cosine(own, table[ids])) < _UNRELATED and _looks_fresh(own, subject):
        fix = "export again from the trainer's own checkpoint"
        yield error(f"lm_head looks randomly initialized (std {float(own.float().std()):.4f})", fix)
    elif width < full:
        rows = torch.arange(min(width, _SAMPLE)) * width // min(width, _SAMPLE)
        best = _best_cosine(own[rows], table)
        mapped = F.cosine_similarity(own[rows].float(), table[ids][rows].float(), dim=-1)
        elsewhere = int(((best - mapped > _CLOSER) & (best > 0.5)).sum())
        if 10 * int((best > 0.5).sum()) >= 9 * len(rows) and 20 * elsewhere >= len(rows):
            yield error(
                f"{elsewhere} of {len(rows)} sampled rows of the head resemble another token's row "
                "of the target's head than the one they are mapped to: the map was recomputed "
                "after training",
                fix="take the map that the draft was trained with",
            )


def _looks_fresh(tensor_NM: Tensor, subject: Subject) -> bool:
    """Whether a matrix looks freshly initialized.

    Two tests: the deviation is one that initializers use (0.02, the config's own, or torch's
    uniform 1 / sqrt(3 * inputs)) within 2 %, and the largest eigenvalue of the covariance is within
    the Marchenko-Pastur law for independent numbers. Trained weights do not pass both.
    """
    tall_NM = tensor_NM if len(tensor_NM) >= tensor_NM.shape[1] else tensor_NM.t()
    rows = tall_NM[:4096, :1536].float()  # any block of an i.i.d. matrix is i.i.d. too
    count, width = rows.shape
    std = float(rows.std())
    typical = [0.02, subject.view.get("initializer_range", 0.02), (3 * tensor_NM.shape[1]) ** -0.5]
    if width < 8 or not any(abs(std / value - 1) < 0.02 for value in typical if value):
        return False
    largest = float(torch.linalg.eigvalsh(rows.t() @ rows / count)[-1])
    edge = std**2 * (1 + math.sqrt(width / count)) ** 2
    return bool(largest < edge * (1 + 2.5 * width ** (-2 / 3)))


def _mean_cosine(rows_NM: Tensor, target_NM: Tensor) -> float:
    return float(F.cosine_similarity(rows_NM.float(), target_NM.float(), dim=-1).mean())


def _best_cosine(rows_SM: Tensor, table_VM: Tensor) -> Tensor:
    """For each row its cosine to the most similar row of the table; in chunks."""
    rows_SM = F.normalize(rows_SM.float(), dim=-1)
    chunks = (F.normalize(chunk.float(), dim=-1) for chunk in torch.split(table_VM, _CHUNK))
    return torch.stack([(rows_SM @ chunk.t()).amax(-1) for chunk in chunks]).amax(0)
