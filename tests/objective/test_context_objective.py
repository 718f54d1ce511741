"""Several ranks on the same rows: their losses, counts and gradients add up to one rank's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_eagle3 import (
    make_documents,
    make_draft,
    make_head,
    packed_batch,
    padded_batch,
    vocabulary,
    with_logits,
    with_probs,
)
from naive_peagle import make_parallel_draft
from test_eagle1 import documents_of
from test_eagle1 import make_draft as make_eagle1_draft
from test_eagle1 import make_module as make_eagle1

from fledge import Eagle3TrainerModule, PEagleTrainerModule
from fledge.bench.saved import watch_saved
from fledge.core.distributed import join_world
from fledge.rollout.context import ContextRanks
from ranks import run_ranks

pytestmark = pytest.mark.ranks

SEED = 7
SUMS = ("loss_sums", "charged", "correct", "step_valid", "step_reached", "step_prefix_hits")
ROWS = [[13, 1, 6], [9, 2], [17]]  # documents of packed rows, 20 tokens wide


def eagle3(context, draft=None, **options):
    ids, mask = vocabulary()
    draft = make_draft(**(draft or {}))
    return Eagle3TrainerModule(
        draft, selected_token_ids=ids, selected_token_mask=mask, target_head=make_head(),
        context=context, **({"ttt_steps": 4} | options),
    )  # fmt: skip


def peagle(context, draft=None, **options):
    ids, mask = vocabulary()
    draft = make_parallel_draft(**(draft or {}))
    return PEagleTrainerModule(
        draft, selected_token_ids=ids, selected_token_mask=mask, target_head=make_head(),
        num_depths=4, context=context, **options,
    )  # fmt: skip


def eagle1(context, layers=1, **options):
    return make_eagle1(make_eagle1_draft(layers=layers), context=context, **options)


def recomputed(make):
    def module(context):
        made = make(context)
        made.draft_model.gradient_checkpointing_enable()
        return made

    return module


CASES = {
    "eagle3": eagle3,
    "eagle3, three layers, norms": lambda c: eagle3(
        c, {"num_hidden_layers": 3, "fc_norm": True, "norm_output": True, "qk_norm": True}
    ),
    "eagle3, biases, not compact": lambda c: eagle3(
        c, {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}, compact=False
    ),
    "eagle3, recomputed": recomputed(lambda c: eagle3(c, {"num_hidden_layers": 2})),
    "eagle3, reference attention": lambda c: eagle3(c, attention="reference"),
    "eagle3, thinned": lambda c: eagle3(c, depth_keep=0.6),
    "eagle3, lambda": lambda c: eagle3(c, loss="lk_lambda"),
    "eagle3, deeper than rows are long": lambda c: eagle3(c, ttt_steps=25),
    "peagle": peagle,
    "peagle, three segments": lambda c: peagle(c, sequence_partitions=3),
    "peagle, balanced lambda": lambda c: peagle(c, loss="lk_lambda", balance_depths=True),
    "peagle, recomputed, capped": recomputed(lambda c: peagle(c, max_anchors=3)),
    "eagle1": eagle1,
    "eagle1, two layers": lambda c: eagle1(c, layers=2),
}


def packed(rows, make_documents=make_documents, width=20, **options):
    documents = iter(make_documents([n for row in rows for n in row], **options))
    return packed_batch([[next(documents) for _ in row] for row in rows], width)


def batch_of(name):
    if name.startswith("eagle1"):
        return packed(ROWS, documents_of)
    return packed(ROWS)


def share_of_a_step(make, batch, world, context):
    """This rank's part, summed over all ranks."""
    module = make(context)
    ready = module.prepare_inputs(**batch, seed=SEED)
    normalizer = world.sum_(ready.charged_K.clone())
    out = module.score(ready, normalizer, module.acceptance([ready], world))
    out.loss.backward()
    trained = {n: p for n, p in module.draft_model.named_parameters() if p.requires_grad}
    world.sum_gradients(list(trained.values()))
    sums = {name: world.sum_(getattr(out, name).clone()) for name in SUMS}
    grads = {name: p.grad for name, p in trained.items()}
    return sums | grads | {"loss": world.sum_(out.loss.detach().clone()), "normalizer": normalizer}


def steps(cases, context):
    """On every rank: one step of each case (a way to make a module, and a batch)."""
    world = join_world(torch.device("cpu"), context=context)
    ranks = ContextRanks.of(world)
    return [share_of_a_step(make, batch, world, ranks) for make, batch in cases]


def assert_as_one(cases, size):
    alone = steps(cases, 1)
    for shared in run_ranks(size, steps, cases, size):
        for i, (one, many) in enumerate(zip(alone, shared, strict=True)):
            assert one.keys() == many.keys()
            for name in one:
                torch.testing.assert_close(
                    many[name], one[name], rtol=1e-11, atol=1e-11,
                    msg=lambda m, at=(i, name): f"{at}: {m}",
                )  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_the_same_rows_are_one(size):
    assert_as_one([(make, batch_of(name)) for name, make in CASES.items()], size)


def test_every_encoding_is_cut():
    batch, head, (ids, mask) = packed(ROWS), make_head(), vocabulary()
    encodings = [with_logits(batch, head), with_probs(batch, head, ids, mask)]
    padded = padded_batch(make_documents([5, 12, 1]))
    assert_as_one([(eagle3, given) for given in (*encodings, padded)], 2)


@settings(max_examples=6, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    supervised=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    size=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_any_rows_are_shared_out(rows, supervised, size, seed):
    """Fewer slots than ranks, nothing supervised, one document, many."""
    batch = packed(rows, width=36, supervised=supervised, seed=seed)
    kinds = ("eagle3, thinned", "peagle", "peagle, three segments")
    assert_as_one([(CASES[name], batch) for name in kinds], size)


def test_sampling_apart_is_refused():
    """Each rank's own generator would cut the rows elsewhere."""
    module = peagle(ContextRanks(0, 2, None))
    with pytest.raises(ValueError, match="seed: ranks on the same rows must sample alike"):
        module.prepare_inputs(**packed(ROWS))


LONG = 400


def kept_on_ranks(kind, context):
    """What a rank keeps for the backward pass of one long row: (bytes, shapes, slots on the key
    axis, bytes of keys and values, bytes of the answer)."""
    world = join_world(torch.device("cpu"), context=context)
    module = kind(ContextRanks.of(world))
    batch = padded_batch(make_documents([LONG], supervised=0.9))
    ready = module.prepare_inputs(**batch, seed=SEED)
    answer = [ready.aux_OD, ready.supervision.hidden_SD]
    weights = [*module.parameters(), *module.buffers(), *answer]
    with watch_saved(weights) as saved:
        out = module.score(ready, world.sum_(ready.charged_K.clone()))
    held = saved.total_bytes, saved.shapes
    out.loss.backward()
    config, slots = module.draft_model.config, len(ready.plan.slot_T)
    numbers = 2 * slots * config.num_key_value_heads * config.head_dim
    keys = 8 * config.num_hidden_layers * numbers
    return *held, slots, keys, sum(x.untyped_storage().nbytes() for x in answer)


@pytest.mark.parametrize("kind", [eagle3, peagle], ids=["eagle3", "peagle"])
def test_what_a_rank_keeps_falls_with_their_number(kind):
    """Of all slots, keys and values are kept, and nothing else."""
    alone, shapes, slots, keys, answer = kept_on_ranks(kind, 1)
    assert any(shape[:1] >= (slots,) and shape[1:] == (12,) for shape in shapes)  # states, too
    for size in (2, 4):
        for kept, shapes, _, _, part in run_ranks(size, kept_on_ranks, kind, size):
            assert {shape[1:] for shape in shapes if shape[:1] == (slots,)} == {(2, 4)}
            assert kept < 1.15 * (alone - keys) / size + 2 * keys
            assert part < 1.3 * answer / size
