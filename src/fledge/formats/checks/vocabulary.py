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

from fledge.core.terminal import counted
from fledge.formats.checks.base import Finding, Subject, check, error, warning, wrong_key
from fledge.formats.checks.tensors import first_few, floats_of
from fledge.formats.foreign import DraftFiles
from fledge.target.base import selection_mask

_UNRELATED = 0.1  # mean cosine below which rows are considered unrelated
_CLOSER = 0.1  # difference of cosines: rows of tokens that the target never saw are nearly equal
_SAMPLE = 256  # rows that are compared with all of the target's
_CHUNK = 8192  # rows of the target's table per product


@check("vocab-size", "static", "vocabulary sizes other than the target's, or than the head's rows",
       repairs=True)  # fmt: skip
def vocab_size(subject: Subject) -> Iterator[Finding]:
    view, full, state = subject.view, subject.vocab_size, subject.view.state
    names = ["embed_tokens.weight", "lm_head.weight" if view.merges else "t2d"]
    shown = {name: len(state[name]) for name in names if name in state and state[name].ndim}
    wrong = {name: rows for name, rows in shown.items() if rows != full}
    if wrong:
        seen = ", ".join(f"{name} has {rows:,} rows" for name, rows in wrong.items())
        yield error(f"{seen}; the target has {full:,} tokens", "name the target it was trained for")
    elif (declared := view.get("vocab_size")) != full:
        evidence = f"vocab_size is {declared}, the target's {full:,}: engines size embeddings by it"
        yield wrong_key("vocab_size", full, evidence)
    rows, declared = subject.draft_vocab_size, view.get("draft_vocab_size")
    if declared != rows and (declared is not None or rows != full):
        evidence = f"draft_vocab_size is {declared}, the head has {rows:,} rows"
        yield wrong_key("draft_vocab_size", rows, evidence)


# --- the map -------------------------------------------------------------------------------------


@check("d2t", "static", "a map that is missing, absolute, out of range, unsorted, of another type, "
       "at odds with t2d, or without the end token", repairs=True)  # fmt: skip
def d2t(subject: Subject) -> Iterator[Finding]:
    full, width = subject.vocab_size, subject.draft_vocab_size
    stored, mask = (subject.view.state.get(name) for name in ("d2t", "t2d"))
    marked = None if mask is None or mask.shape != (full,) else mask.bool().nonzero()[:, 0]
    implied = marked if marked is not None and len(marked) == width else None
    if width >= full:
        return
    if stored is None:
        evidence = f"no d2t, and the head has {width:,} rows of {full:,}: engines then take "
        yield _unusable(evidence + "draft id i for target id i", implied)
        return
    if stored.ndim != 1 or len(stored) < 2:
        return  # `shape` reports it
    offsets, faults = stored.long(), []
    if not torch.equal(offsets.double(), stored.double()):
        yield _unusable("d2t holds numbers that are not integers", None)
        return
    for name, tensor, kind in (("d2t", stored, torch.int64), ("t2d", mask, torch.bool)):
        if tensor is not None and tensor.dtype != kind:
            faults.append(f"{name} is {tensor.dtype}, engines read {kind}")
    ids = _ids(offsets)
    if _is_absolute(offsets, subject):
        beyond, ids = int((ids >= full).sum()), offsets
        examples = f"{int(ids[0])}, {int(ids[1])}, ... {int(ids[-1])}"
        faults.append(
            f"d2t holds target ids ({examples}), not offsets: {beyond:,} of {len(ids):,} drafted "
            "ids would lie beyond the vocabulary"
        )
    elif not _is_map(ids, full):
        outside, repeated = (
            int(((ids < 0) | (ids >= full)).sum()),
            len(ids) - len(set(ids.tolist())),
        )
        agrees = implied is not None and 2 * int((ids == implied).sum()) >= len(ids)
        evidence = f"{outside:,} of {len(ids):,} drafted ids fall outside 0..{full - 1}, "
        yield _unusable(f"{evidence}{repeated:,} repeat another", implied if agrees else None)
        return
    if falls := int((ids.diff() < 0).sum()):
        faults.append(f"the draft's ids do not ascend: {falls:,} of {len(ids) - 1:,} steps fall")
    if marked is not None and not torch.equal(marked, ids.sort().values):
        faults.append(f"t2d marks {len(marked):,} tokens, other ones than the {len(ids):,} of d2t")
    if faults:
        fix = "write sorted offsets, with the rows of the head and t2d to match"
        yield error("; ".join(faults), fix, partial(_set_map, ids=ids))
    elif (tokenizer := subject.target.tokenizer) and tokenizer.eos_token_id not in {
        None,
        *ids.tolist(),
    }:
        yield warning(
            f"the target's end token {tokenizer.eos_token!r} ({tokenizer.eos_token_id}) is not "
            "among the draft's tokens: no round can end with it, and training never showed it",
            fix="were answers cut or masked before their end? build the vocabulary again",
        )


def _unusable(evidence: str, implied: Tensor | None) -> Finding:
    """An error about an unusable map; `implied` are the ids that t2d marks, if it can stand in."""
    if implied is None:
        return error(evidence, "take the map that the draft was trained with")
    return error(evidence, "the map follows from t2d", partial(_set_map, ids=implied))


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


def _sound_ids(subject: Subject) -> Tensor | None:
    """[W] target ids of the draft's tokens; None unless they are known."""
    width, d2t = subject.draft_vocab_size, subject.view.state.get("d2t")
    if width >= subject.vocab_size:
        return torch.arange(width)
    if d2t is None or d2t.shape != (width,) or _is_absolute(d2t.long(), subject):
        return None
    ids = _ids(d2t.long())
    return ids if _is_map(ids, subject.vocab_size) else None


def _set_map(files: DraftFiles, ids: Tensor) -> None:
    """Write d2t from [W] target ids in draft order, t2d if the file has one, and sort the head."""
    state = files.view.state
    ids, order = ids.sort()
    files.put_tensor("d2t", ids - torch.arange(len(ids)))
    if "t2d" in state:
        files.put_tensor("t2d", selection_mask(ids, len(state["t2d"])))
    if "lm_head.weight" in state:
        files.put_tensor("lm_head.weight", state["lm_head.weight"][order].contiguous())


# --- weights beside the target's -----------------------------------------------------------------
# Embeddings are the target's, or were initialized with them, so their rows point in the same
# directions. A head may start anywhere, so it is judged only if it resembles the target's or a
# fresh initialization.


@check("embeddings", "numeric", "embed_tokens that are random, or not those of this target",
       repairs=True)  # fmt: skip
def embeddings(subject: Subject) -> Iterator[Finding]:
    table = subject.view.state.get("embed_tokens.weight")
    target_table = subject.target.tables.embedding_VD
    if table is None or table.shape != target_table.shape or not table.is_floating_point():
        return
    cosine, right = _mean_cosine(table, target_table), target_table.to(table.dtype)
    seen = f"mean cosine to the target's rows {cosine:.2f}, std {float(table.float().std()):.3f}, "
    seen += f"the target's {float(target_table.float().std()):.3f}"
    if cosine >= _UNRELATED:
        if not torch.equal(table.float(), right.float()):
            evidence = f"embed_tokens were trained ({seen}): SGLang serves with the target's own"
            fix = "serve with vLLM, or train with frozen embeddings"
            yield subject.only_for("sglang", evidence, fix)
    elif _fresh_std(table, subject) is None:
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


@check("head-map", "numeric", "a head that was trained with another map than the file's")
def head_map(subject: Subject) -> Iterator[Finding]:
    """Only for heads initialized with the target's: their rows still resemble the target's rows."""
    head, target_rows = _heads(subject)
    if head is None or target_rows is None or len(head) >= subject.vocab_size:
        return
    rows = torch.arange(min(len(head), _SAMPLE)) * len(head) // min(len(head), _SAMPLE)
    best = _best_cosine(head[rows], subject.target.tables.head_VD)
    alike = best > 0.5
    mapped = F.cosine_similarity(head[rows].float(), target_rows[rows].float(), dim=-1)
    elsewhere = int(((best - mapped > _CLOSER) & alike).sum())
    if 10 * int(alike.sum()) >= 9 * len(rows) and 20 * elsewhere >= len(rows):
        yield error(
            f"{elsewhere} of {len(rows)} sampled rows of the head resemble another token's row of "
            "the target's head than the one they are mapped to: the map was recomputed after "
            "training",
            fix="take the map that the draft was trained with",
        )


@check("random-weights", "numeric", "a head or matrices that look freshly initialized")
def random_weights(subject: Subject) -> Iterator[Finding]:
    head, target_rows = _heads(subject)
    judged: dict[str, Tensor] = {}
    if head is not None:
        cosine = 0.0 if target_rows is None else _mean_cosine(head, target_rows)
        judged |= {"lm_head.weight": head} if abs(cosine) < _UNRELATED else {}
    tables = ("embed_tokens.weight", "lm_head.weight")
    judged |= {n: t for n, t in floats_of(subject) if t.ndim == 2 and n not in tables}
    fresh = [
        f"{name} (std {std:.4f}, no direction stands out)"
        for name, tensor in judged.items()
        if (std := _fresh_std(tensor, subject)) is not None
    ]
    if fresh:
        count = counted(len(fresh), "matrix looks", "matrices look")
        fix = "export again from the trainer's own checkpoint"
        # an untrained head accepts nothing, other matrices may be hardly trained
        severity = error if fresh[0].startswith("lm_head") else warning
        yield severity(f"{count} randomly initialized: {first_few(fresh)}", fix)


def _fresh_std(tensor_NM: Tensor, subject: Subject) -> float | None:
    """The standard deviation of a matrix that looks freshly initialized; None if trained.

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
        return None
    largest = float(torch.linalg.eigvalsh(rows.t() @ rows / count)[-1])
    edge = std**2 * (1 + math.sqrt(width / count)) ** 2
    return std if largest < edge * (1 + 2.5 * width ** (-2 / 3)) else None


def _heads(subject: Subject) -> tuple[Tensor | None, Tensor | None]:
    """The draft's head, and the target's rows of the same tokens where they can be compared."""
    head = subject.view.state.get("lm_head.weight")
    if head is None or head.ndim != 2 or not head.is_floating_point():
        return None, None
    table, ids = subject.target.tables.head_VD, _sound_ids(subject)
    if ids is None or head.shape != (len(ids), table.shape[1]) or len(ids) > len(table):
        return head, None
    return head, table[ids]


def _mean_cosine(rows_NM: Tensor, target_NM: Tensor) -> float:
    return float(F.cosine_similarity(rows_NM.float(), target_NM.float(), dim=-1).mean())


def _best_cosine(rows_SM: Tensor, table_VM: Tensor) -> Tensor:
    """For each row its cosine to the most similar row of the table; in chunks."""
    rows_SM = F.normalize(rows_SM.float(), dim=-1)
    chunks = (F.normalize(chunk.float(), dim=-1) for chunk in torch.split(table_VM, _CHUNK))
    return torch.stack([(rows_SM @ chunk.t()).amax(-1) for chunk in chunks]).amax(0)
