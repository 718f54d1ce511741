"""A draft's reading moved from one target to another: what it made of the old target's states, it
is to make of the new one's.

    fc' = the map nearest to fc with   fc' (new states of a token)  =  fc (its old states)

in the sense of `ridge.py`, over all tokens of some rows. Every token counts alike, however large
its state is: both sides are divided by the size of what the draft makes of the old one, for norms
follow. Nothing else of the draft changes. So where the new states are a linear function of the old
ones, the draft says what it said; where they are not, it says the nearest that one map can.

EAGLE-1 and EAGLE-2 read their own states by the same map, deeper in a round, and those stay what
they were: their map is fitted to both, and gains less. Tables that a draft has from its target
(embedding, head) become the new one's.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.decode.strategies.registry import rollouts_of
from fledge.draft.base import DraftModel
from fledge.draft.reading import Reading
from fledge.measure.figures import Acceptance
from fledge.measure.packed import target_picks
from fledge.measure.replay import replay_held_out
from fledge.methods.registry import method_of
from fledge.target.base import Eagle3TargetBackend, InputEmbedding
from fledge.target.finite import check_answer, checked_answer
from fledge.train.retarget.ridge import Fitted, Moments, fit_change

_TINY = 1e-12  # size below which a draft makes nothing of a token


@dataclass(frozen=True)
class Targets:
    """The same rows before and after."""

    old: Eagle3TargetBackend
    new: Eagle3TargetBackend


def reading_of(draft: DraftModel, where: str = "") -> Reading:
    """How a draft reads its target, or one line that it cannot be refitted."""
    method = method_of(draft.config)
    reading = method.reading(draft)
    if reading is None:
        what = f"a draft of {method.title} does not read its target by one linear map"
        raise BadInput(what, where=where, fix="train it on the new target: draft.init_from")
    return reading


@torch.no_grad()
def refit(
    draft: DraftModel,
    targets: Targets,
    *,
    fitted: Iterable[TokenBatch],
    judged: Iterable[TokenBatch],
    on_pack: Callable[[], None] = lambda: None,
) -> Fitted:
    """Change the draft in place. The penalty is the one that is best on the `judged` packs; then
    they are fitted as well."""
    reading = reading_of(draft)
    sums = [_moments(reading, targets, packs, on_pack) for packs in (fitted, judged)]
    found = fit_change(sums[0], sums[1], reading.fixed_MX)
    before_EX = reading.weight_EX.to(torch.float64, copy=True)
    reading.weight_EX.copy_(before_EX + found.change_EX)
    if reading.own_MX is not None:
        _move_along(reading.own_MX, before_EX, reading.weight_EX.double())
    return found


def _move_along(own_MX: Tensor, before_EX: Tensor, after_EX: Tensor) -> None:
    """The draft's own inputs, as near to themselves as reads like before."""
    off_ME = own_MX.double() @ (before_EX - after_EX).t()
    own_MX += (off_ME @ torch.linalg.pinv(after_EX).t()).to(own_MX.dtype)


def _moments(
    reading: Reading, targets: Targets, packs: Iterable[TokenBatch], on_pack: Callable[[], None]
) -> Moments:
    weight_EX = reading.weight_EX.double()
    sums = Moments.like(weight_EX)
    for old_NX, new_NX in _inputs(reading, targets, packs):
        made_NE = old_NX @ weight_EX.t()
        size_N1 = made_NE.square().mean(-1, keepdim=True).sqrt().clamp_min(_TINY)
        off_NE = (old_NX - new_NX) @ weight_EX.t()
        sums.add(new_NX / size_N1, off_NE / size_N1)
        if reading.feeds_back:
            sums.add(old_NX / size_N1, torch.zeros_like(off_NE))
        on_pack()
    return sums


def _inputs(
    reading: Reading, targets: Targets, packs: Iterable[TokenBatch]
) -> Iterator[tuple[Tensor, Tensor]]:
    """[N, X] of every real token of a pack, from both targets, in float64."""
    device = reading.weight_EX.device
    for tokens in packs:
        real_BT = tokens.attention_mask.bool()
        pair = []
        for target in (targets.old, targets.new):
            answer = target.features(tokens)
            check_answer(target, answer, tokens)
            aux_BTD = answer.aux_hidden_states.to(device)
            pair.append(reading.inputs(aux_BTD[real_BT.to(device)]).double())
        yield pair[0], pair[1]


@torch.no_grad()
def take_tables(draft: DraftModel, targets: Targets) -> list[str]:
    """Where the draft has the old target's embedding or head, number for number, give it the new
    one's: engines would do so. Not one in another basis, which the draft could not read: it keeps
    its own. Block drafts have neither, and borrow both."""
    if draft.embed_tokens.weight.is_meta:
        return []
    ids = draft.selected_token_ids
    assert ids is not None
    taken = []
    tables = [target.get_input_embeddings().weight for target in (targets.old, targets.new)]
    if _same(draft.embed_tokens.weight, tables[0]) and _alike(*tables):
        draft.copy_embeddings_from_target(InputEmbedding(tables[1]))
        taken.append("embedding")
    heads = [target.info().head.weight_VD for target in (targets.old, targets.new)]
    if _same(draft.lm_head.weight, heads[0][ids.to(heads[0].device)]) and _alike(*heads):
        draft.copy_head_from_target(InputEmbedding(heads[1]))
        taken.append("head")
    return taken


def _same(own: Tensor, theirs: Tensor) -> bool:
    return own.shape == theirs.shape and torch.equal(own, theirs.to(own.device, own.dtype))


def _alike(old_VD: Tensor, new_VD: Tensor) -> bool:
    """Whether one is the other, tuned or rounded: off by less than half of its size. Rows that are
    turned into another basis are off by 1.4 times of it."""
    old, new = (table.to(old_VD.device, torch.float32) for table in (old_VD, new_VD))
    return bool((new - old).norm() < 0.5 * old.norm())


@dataclass(frozen=True)
class Lengths:
    """Rounds through the same held-out rows, replayed.

    A changed target costs a draft two things. It has other states: a refit wins that back, as far
    as one map can. And it says other things, which the draft has not learnt, and which the rows, if
    others wrote them, do not say: training does. `with_old_states` lies between the two.
    """

    old: Acceptance  # the draft with the old target
    before: Acceptance  # with the new one
    with_old_states: Acceptance  # judged by the new one, having heard the old one
    refitted: Acceptance  # the refitted draft with the new one


@torch.no_grad()
def measure(
    targets: Targets,
    drafts: tuple[DraftModel, DraftModel, DraftModel],  # beside the old; beside the new; refitted
    held_out: Iterable[TokenBatch],
    *,
    num_draft_tokens: int,
) -> Lengths:
    with_old, with_new, refitted = (rollouts_of(draft, num_draft_tokens) for draft in drafts)
    found = [Acceptance.none(with_old.depths)] * 4
    heads = targets.old.info().head, targets.new.info().head
    ids_W = with_old.selected_token_ids
    for tokens in held_out:
        old, new = (checked_answer(target, tokens) for target in (targets.old, targets.new))
        said, says = (
            target_picks(answer, tokens, head, ids_W)
            for answer, head in zip((old, new), heads, strict=True)
        )
        replayed = (
            replay_held_out(old, tokens, with_old, said),
            replay_held_out(new, tokens, with_new, says),
            replay_held_out(old, tokens, with_new, says),
            replay_held_out(new, tokens, refitted, says),
        )
        found = [total + more for total, more in zip(found, replayed, strict=True)]
    return Lengths(*found)
