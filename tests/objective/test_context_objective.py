"""Context parallelism: the losses, counts and gradients of the ranks add up to those of one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.core.distributed import join_world
from fledge.rollout.context import ContextRanks
from live_bytes import watch_saved
from objective import naive_mtp
from objective.cases import eagle1, eagle3, peagle
from objective.naive_eagle1 import documents_of
from objective.naive_eagle3 import (
    make_documents,
    make_head,
    packed_batch,
    padded_batch,
    vocabulary,
    with_logits,
    with_probs,
)
from ranks import run_ranks

pytestmark = pytest.mark.ranks

SEED = 7
SUMS = ("loss_sums", "charged", "correct", "step_valid", "step_reached", "step_prefix_hits")
ROWS = [[13, 1, 6], [9, 2], [17]]  # document lengths of packed rows, 20 tokens wide


def case(make, *, checkpointing=False, **options):
    """A module factory, from a rank among those that share its rows."""

    def module(context):
        instance = make(context=context, **options)
        instance.draft_model.gradient_checkpointing = checkpointing
        return instance

    return module


NORMS = {"num_hidden_layers": 3, "fc_norm": True, "norm_output": True, "qk_norm": True}
BIASES = {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}
CASES = {
    "eagle3": case(eagle3),
    "eagle3, three layers, norms": case(eagle3, changes=NORMS),
    "eagle3, biases": case(eagle3, changes=BIASES),
    "eagle3, recomputed": case(eagle3, changes={"num_hidden_layers": 2}, checkpointing=True),
    "eagle3, reference attention": case(eagle3, attention="reference"),
    "eagle3, thinned": case(eagle3, depth_keep=0.6),
    "eagle3, lambda": case(eagle3, loss="lk_lambda"),
    "eagle3, deeper than rows are long": case(eagle3, steps=25),
    "peagle": case(peagle),
    "peagle, three segments": case(peagle, sequence_partitions=3),
    "peagle, balanced lambda": case(peagle, loss="lk_lambda", balance_depths=True),
    "peagle, recomputed": case(peagle, checkpointing=True),
    "eagle1": case(eagle1),
    "eagle1, two layers": case(eagle1, changes={"layers": 2}),
    "mtp": case(naive_mtp.make_module),
}


def packed(rows, make_documents=make_documents, width=20, **options):
    documents = iter(make_documents([n for row in rows for n in row], **options))
    return packed_batch([[next(documents) for _ in row] for row in rows], width)


def batch_of(name):
    if name.startswith(("eagle1", "mtp")):
        return packed(ROWS, documents_of)
    return packed(ROWS)


def reduced_step(make, batch, world, context):
    """This rank's share of a step, summed over all ranks."""
    module = make(context)
    ready = module.prepare_inputs(**batch, seed=SEED)
    normalizer = world.sum_(ready.charged_K.clone())
    out = module.score(ready, normalizer, module.totals([ready], world))
    out.loss.backward()
    trained = {n: p for n, p in module.draft_model.named_parameters() if p.requires_grad}
    world.sum_gradients(list(trained.values()))
    sums = {name: world.sum_(getattr(out, name).clone()) for name in SUMS}
    grads = {name: p.grad for name, p in trained.items()}
    return sums | grads | {"loss": world.sum_(out.loss.detach().clone()), "normalizer": normalizer}


def steps(cases, context):
    """Run on every rank: one step of each case (a module factory and a batch)."""
    world = join_world(torch.device("cpu"), context=context)
    ranks = ContextRanks.of(world)
    return [reduced_step(make, batch, world, ranks) for make, batch in cases]


def assert_matches_one_rank(cases, size):
    alone = steps(cases, 1)
    for rank_results in run_ranks(size, steps, cases, size):
        for i, (expected, actual) in enumerate(zip(alone, rank_results, strict=True)):
            assert expected.keys() == actual.keys()
            for name in expected:
                torch.testing.assert_close(
                    actual[name], expected[name], rtol=1e-11, atol=1e-11,
                    msg=lambda m, at=(i, name): f"{at}: {m}",
                )  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_the_same_rows_match_one_rank(size):
    assert_matches_one_rank([(make, batch_of(name)) for name, make in CASES.items()], size)


def test_every_supervision_encoding_is_split():
    batch, head, (ids, mask) = packed(ROWS), make_head(), vocabulary()
    encodings = [with_logits(batch, head), with_probs(batch, head, ids, mask)]
    padded = padded_batch(make_documents([5, 12, 1]))
    assert_matches_one_rank([(CASES["eagle3"], inputs) for inputs in (*encodings, padded)], 2)


@settings(max_examples=6, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    supervised=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    size=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_any_rows_can_be_split_over_ranks(rows, supervised, size, seed):
    """Includes fewer slots than ranks, no supervision, one document and many."""
    batch = packed(rows, width=36, supervised=supervised, seed=seed)
    kinds = ("eagle3, thinned", "peagle", "peagle, three segments")
    assert_matches_one_rank([(CASES[name], batch) for name in kinds], size)


def test_sampling_without_a_common_seed_is_rejected():
    """Without a seed, every rank would cut the rows at different places."""
    module = peagle(context=ContextRanks(0, 2, None))
    with pytest.raises(ValueError, match="seed: ranks on the same rows must sample alike"):
        module.prepare_inputs(**packed(ROWS))


LONG = 400


def saved_on_rank(kind, context):
    """What a rank saves for the backward pass of one long row: (bytes, shapes, slots on the key
    axis, bytes of keys and values, bytes of the target's answer)."""
    world = join_world(torch.device("cpu"), context=context)
    module = kind(context=ContextRanks.of(world))
    batch = padded_batch(make_documents([LONG], supervised=0.9))
    ready = module.prepare_inputs(**batch, seed=SEED)
    answer = [ready.aux_OD, ready.supervision.hidden_SD]
    weights = [*module.parameters(), *module.buffers(), *answer]
    with watch_saved(weights) as saved:
        out = module.score(ready, world.sum_(ready.charged_K.clone()))
    saved_totals = saved.total_bytes, saved.shapes
    out.loss.backward()
    config, slots = module.draft_model.config, len(ready.plan.slot_T)
    elements = 2 * slots * config.num_key_value_heads * config.head_dim
    key_bytes = 8 * config.num_hidden_layers * elements
    return *saved_totals, slots, key_bytes, sum(x.untyped_storage().nbytes() for x in answer)


@pytest.mark.parametrize("kind", [eagle3, peagle], ids=["eagle3", "peagle"])
def test_memory_per_rank_falls_with_the_number_of_ranks(kind):
    """Keys and values are the only tensors that a rank keeps for all slots."""
    alone_bytes, shapes, slots, key_bytes, answer = saved_on_rank(kind, 1)
    # one rank alone keeps hidden states for all slots, too
    assert any(shape[:1] >= (slots,) and shape[1:] == (12,) for shape in shapes)
    for size in (2, 4):
        for saved_bytes, shapes, _, _, answer_part in run_ranks(size, saved_on_rank, kind, size):
            assert {shape[1:] for shape in shapes if shape[:1] == (slots,)} == {(2, 4)}
            assert saved_bytes < 1.15 * (alone_bytes - key_bytes) / size + 2 * key_bytes
            assert answer_part < 1.3 * answer / size
