"""LK-lambda weighs by the mean acceptance of the whole step, so cutting a step changes nothing."""

import multiprocessing
import os
import socket
from dataclasses import dataclass

import pytest
import torch
from naive_eagle3 import D, V, make_documents, make_draft, make_head, shift, vocabulary
from naive_peagle import MASK_ID, make_parallel_draft

from fledge import Eagle3TargetBatch, Eagle3TrainerModule, PEagleTrainerModule
from fledge.core.distributed import World, join_world, leave_world
from fledge.data.pack import Piece, TokenBatch, collate
from fledge.objective.losses.lk_lambda import LkLambda
from fledge.objective.losses.registry import LOSSES

LENGTHS = [9, 4, 6, 13, 2, 11, 8, 5]
WIDTH, SEED = 20, 7
LOSS = LkLambda(scale=0.9, decay=1.5)
KINDS = ["eagle3", "eagle3 thinned", "peagle", "peagle balanced"]


def make_module(kind, loss=LOSS):
    ids, mask = vocabulary()
    given = {
        "selected_token_ids": ids, "selected_token_mask": mask, "target_head": make_head(),
        "loss": loss,
    }  # fmt: skip
    if kind.startswith("eagle3"):
        keep = 0.6 if "thinned" in kind else 1.0
        return Eagle3TrainerModule(make_draft(), ttt_steps=3, depth_keep=keep, **given)
    return PEagleTrainerModule(
        make_parallel_draft(), num_depths=4, mask_token_id=MASK_ID,
        balance_depths="balanced" in kind, **given,
    )  # fmt: skip


@dataclass
class Row:
    input_ids: list[int]
    loss_mask: list[int]
    place: str = ""


def step_rows(*, packed) -> list[tuple[TokenBatch, Eagle3TargetBatch]]:
    """The documents of a step, one row at a time: two documents a row, or one."""
    documents = make_documents(LENGTHS)
    rows = [Row(document.ids.tolist(), document.loss.tolist()) for document in documents]
    per_row = 2 if packed else 1
    cuts = [range(i, i + per_row) for i in range(0, len(rows), per_row)]
    return [
        together(collate(rows, [[Piece(i, 0, LENGTHS[i]) for i in cut]], WIDTH, 0)) for cut in cuts
    ]


def together(tokens):
    """Rows, and what a target would say of them: of a token and its place in its document."""
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


def gradients(module, micro, world=World()):  # noqa: B008
    """A step's loss and gradients, as `train_step` takes them."""
    ready = [module.prepare(rows, answer, SEED) for rows, answer in micro]
    normalizer = world.sum_(sum(batch.charged_K for batch in ready))
    acceptance = module.acceptance(ready, world)
    parameters = list(module.draft_model.parameters())
    module.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for batch in ready:
        output = module.score(batch, normalizer, acceptance)
        output.loss.backward()
        loss += output.loss.detach()
    world.sum_gradients(parameters)
    return [world.sum_(loss), *(parameter.grad.clone() for parameter in parameters)]


def cut(rows, parts):
    size = len(rows) // parts
    return [join(rows[i : i + size]) for i in range(0, len(rows), size)]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_and_packing_change_nothing(kind):
    module = make_module(kind)
    whole = gradients(module, cut(step_rows(packed=True), 1))
    assert sum(grad.abs().max() > 0 for grad in whole[1:]) == len(whole) - 1
    for packed in (True, False):
        for parts in (1, 2, 4):
            assert_equal(gradients(module, cut(step_rows(packed=packed), parts)), whole)


def test_each_micro_batch_by_itself_would_differ():
    """The test above can fail: acceptance differs between the parts of the step."""
    module = make_module("eagle3")
    whole = gradients(module, cut(step_rows(packed=True), 1))
    module.acceptance = lambda ready, world: None
    parts = gradients(module, cut(step_rows(packed=True), 4))
    assert (parts[0] - whole[0]).abs() > 1e-4


def test_only_a_loss_that_asks_gets_a_forward_in_advance():
    rows = step_rows(packed=True)
    for name in LOSSES:
        module = make_module("eagle3", loss=name)
        ready = [module.prepare(*row, SEED) for row in rows]
        found = module.acceptance(ready, World())
        assert (found is not None) == (name == "lk_lambda")
        assert module.acceptance(ready[:1], World()) is None


def rank_step(rank, port, kind, queue):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    world = join_world(torch.device("cpu"))
    rows = step_rows(packed=True)
    # three rows and one: unequal ranks, and one of them has a single micro-batch
    mine = cut(rows[:3], 3) if rank == 0 else cut(rows[3:], 1)
    found = gradients(make_module(kind), mine, world)
    if rank == 0:
        queue.put([tensor.tolist() for tensor in found])
    leave_world(world)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_two_ranks_are_one(kind):
    whole = gradients(make_module(kind), cut(step_rows(packed=True), 1))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=rank_step, args=(r, port, kind, queue)) for r in range(2)]
    for process in ranks:
        process.start()
    found = [torch.tensor(values, dtype=torch.float64) for values in queue.get(timeout=60)]
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert_equal(found, whole)
