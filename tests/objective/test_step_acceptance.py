"""LK-lambda weights by the mean acceptance of the whole step, so splitting it changes nothing."""

from dataclasses import dataclass

import pytest
import torch

from fledge import Eagle3TargetBatch
from fledge.core.distributed import World, join_world
from fledge.data.pack import Piece, TokenBatch, collate
from fledge.methods.losses.lk_lambda import LkLambda
from fledge.methods.losses.registry import LOSSES
from objective.cases import eagle3, peagle
from objective.naive_eagle3 import D, V, make_documents, shift
from ranks import run_ranks

LENGTHS = [9, 4, 6, 13, 2, 11, 8, 5]
WIDTH, SEED = 20, 7
LOSS = LkLambda(scale=0.9, decay=1.5)
KINDS = ["eagle3", "eagle3 thinned", "peagle", "peagle balanced"]


def make_module(kind, loss=LOSS):
    if kind.startswith("eagle3"):
        return eagle3(steps=3, depth_keep=0.6 if "thinned" in kind else 1.0, loss=loss)
    return peagle(balance_depths="balanced" in kind, loss=loss)


@dataclass
class Row:
    input_ids: list[int]
    loss_mask: list[int]
    place: str = ""


def step_rows(*, packed) -> list[tuple[TokenBatch, Eagle3TargetBatch]]:
    """The documents of a step, one batch per row, with two documents per row or one."""
    documents = make_documents(LENGTHS)
    rows = [Row(document.ids.tolist(), document.loss.tolist()) for document in documents]
    per_row = 2 if packed else 1
    row_indices = [range(i, i + per_row) for i in range(0, len(rows), per_row)]
    return [
        with_answer(collate(rows, [[Piece(i, 0, LENGTHS[i]) for i in indices]], WIDTH, 0))
        for indices in row_indices
    ]


def with_answer(tokens):
    """Rows and a pretend target's answer, which depends on each token and its position."""
    g = torch.Generator().manual_seed(5)
    table_VX, place_TX = (torch.randn(n, 4 * D, generator=g).double() for n in (V, WIDTH))
    states = table_VX[tokens.input_ids] + place_TX[tokens.position_ids]
    answer = Eagle3TargetBatch(
        aux_hidden_states=states[..., : 3 * D],
        input_ids=shift(tokens.input_ids),
        attention_mask=tokens.attention_mask,
        loss_mask=shift(tokens.loss_mask),
        last_hidden_states=shift(states[..., 3 * D :]),
        position_ids=tokens.position_ids,
        seq_lens=tokens.seq_lens,
        doc_remaining=tokens.doc_remaining,
    )
    return tokens, answer


def join(rows):
    """Several rows as one micro-batch."""
    tokens, answers = zip(*rows, strict=True)
    fields = ("input_ids", "attention_mask", "loss_mask", "position_ids", "seq_lens")
    merged = {f: torch.cat([getattr(t, f) for t in tokens]) for f in (*fields, "doc_remaining")}
    answer = {
        name: torch.cat([getattr(a, name) for a in answers]) for name, _ in answers[0].tensors()
    }
    return TokenBatch(**merged, places=()), Eagle3TargetBatch(**answer)


def gradients(module, micro_batches, world=World()):  # noqa: B008
    """A step's loss and gradients, computed as `train_step` does."""
    ready = [module.prepare(rows, answer, SEED) for rows, answer in micro_batches]
    normalizer = world.sum_(sum(batch.charged_K for batch in ready))
    totals = module.totals(ready, world)
    parameters = list(module.draft_model.parameters())
    module.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for batch in ready:
        output = module.score(batch, normalizer, totals)
        output.loss.backward()
        loss += output.loss.detach()
    world.sum_gradients(parameters)
    return [world.sum_(loss), *(parameter.grad.clone() for parameter in parameters)]


def split(rows, parts):
    size = len(rows) // parts
    return [join(rows[i : i + size]) for i in range(0, len(rows), size)]


def assert_equal(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_and_packing_change_nothing(kind):
    module = make_module(kind)
    whole = gradients(module, split(step_rows(packed=True), 1))
    assert sum(grad.abs().max() > 0 for grad in whole[1:]) == len(whole) - 1
    for packed in (True, False):
        for parts in (1, 2, 4):
            assert_equal(gradients(module, split(step_rows(packed=packed), parts)), whole)


def test_acceptance_per_micro_batch_would_differ():
    """The test above is not vacuous: acceptance differs between the parts of the step."""
    module = make_module("eagle3")
    whole = gradients(module, split(step_rows(packed=True), 1))
    module.totals = lambda ready, world: None
    parts = gradients(module, split(step_rows(packed=True), 4))
    assert (parts[0] - whole[0]).abs() > 1e-4


def test_only_losses_that_need_acceptance_get_an_extra_forward():
    rows = step_rows(packed=True)
    for name in LOSSES:
        module = make_module("eagle3", loss=name)
        ready = [module.prepare(*row, SEED) for row in rows]
        totals = module.totals(ready, World())
        assert (totals is not None) == (name == "lk_lambda")
        assert module.totals(ready[:1], World()) is None


def step_on_rank(kind):
    """Three rows and one: ranks with unequal work, one of them with a single micro-batch."""
    world, rows = join_world(torch.device("cpu")), step_rows(packed=True)
    batches = split(rows[:3], 3) if world.rank == 0 else split(rows[3:], 1)
    return gradients(make_module(kind), batches, world)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_two_ranks_match_one(kind):
    whole = gradients(make_module(kind), split(step_rows(packed=True), 1))
    assert_equal(run_ranks(2, step_on_rank, kind)[0], whole)
