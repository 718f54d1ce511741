"""The P-EAGLE objective against a textbook version, and every equality that it promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge import (
    Eagle3TargetBatch,
    Eagle3TrainerModule,
    PEagleTrainerModule,
    simulated_accept_length,
)
from fledge.methods.losses import registry
from fledge.rollout.slots import RowMasks
from objective.naive_eagle3 import (
    V,
    check_autocast,
    make_documents,
    make_draft,
    make_head,
    packed_batch,
    padded_batch,
    vocabulary,
    with_logits,
    with_probs,
)
from objective.naive_peagle import MASK_ID, make_parallel_draft, naive_peagle, sampled_depths

DEPTHS, SEED = 4, 11
LENGTHS = [9, 1, 6, 13, 2, 21]


def make_module(draft=None, *, depths=DEPTHS, **options):
    ids, mask = vocabulary()
    settings = {"mask_token_id": MASK_ID, "target_head": make_head()}
    return PEagleTrainerModule(
        draft if draft is not None else make_parallel_draft(),
        selected_token_ids=ids,
        selected_token_mask=mask,
        num_depths=depths,
        **(settings | options),
    )


def run(module, batch, *, seed=SEED, **extra):
    """Returns (output, gradients by parameter name)."""
    return backward(module, module(**batch, seed=seed, **extra))


def backward(module, out):
    module.zero_grad()
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in module.draft_model.named_parameters()}


COUNTS = ("step_prefix_hits", "step_valid", "step_reached", "charged", "correct")


def assert_same(first, second, *, tolerance=1e-11):
    (out_a, grads_a), (out_b, grads_b) = first, second
    torch.testing.assert_close(out_a.loss, out_b.loss, rtol=tolerance, atol=tolerance)
    assert grads_a.keys() == grads_b.keys()
    for name, grad in grads_a.items():
        torch.testing.assert_close(
            grad, grads_b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )
    for field in COUNTS:
        assert getattr(out_a, field).tolist() == getattr(out_b, field).tolist(), field
    torch.testing.assert_close(out_a.loss_sums, out_b.loss_sums, rtol=tolerance, atol=tolerance)
    assert out_a.valid_tokens == out_b.valid_tokens
    assert out_a.accuracy == out_b.accuracy


VARIANTS = {
    "one layer": {"layers": 1},
    "two layers": {"layers": 2},
    "four layers": {"layers": 4},
    "fc_norm": {"layers": 2, "fc_norm": True},
    "q/k norms": {"layers": 2, "qk_norm": True},
    "biases": {"layers": 2, "attention_bias": True, "mlp_bias": True},
    "norm_output": {"layers": 2, "norm_output": True},
    "partial rotary": {"partial_rotary_factor": 0.5},
    "no GQA": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
}
LOSSES = {
    "kl": {},
    "ce": {"loss": "ce"},
    "hard": {"loss": "hard"},
    "lk_alpha": {"lk_loss_type": "alpha"},
    "lk_lambda": {"lk_loss_type": "lambda"},  # one mean acceptance over all elements
    "tv": {"loss": "tv"},
}


def check_against_textbook(changes, loss, kind, **options):
    module = make_module(make_parallel_draft(**changes), **loss, **options)
    documents = make_documents(LENGTHS)
    out, grads = run(module, padded_batch(documents))
    module.zero_grad()
    ids, mask = vocabulary()
    deepest = sampled_depths(documents, num_depths=DEPTHS, ratio=0.7, ratio_min=0.2, seed=SEED)
    naive = naive_peagle(
        module.draft_model, documents, deepest, head=make_head(), ids=ids, mask=mask,
        num_depths=DEPTHS, loss=registry.LOSSES[kind](),
        balance=options.get("balance_depths", False),
    )  # fmt: skip
    naive.loss.backward()
    torch.testing.assert_close(out.loss, naive.loss, rtol=1e-10, atol=1e-10)
    for name, parameter in module.draft_model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-11)
        assert parameter.grad.abs().max() > 0, name  # including mask_hidden and every layer
    assert out.charged.tolist() == naive.charged
    assert out.correct.tolist() == naive.correct
    assert out.step_prefix_hits.tolist() == naive.hits
    assert out.step_valid.tolist() == naive.valid
    assert min(naive.charged) > 0
    assert out.valid_tokens.item() == sum(naive.charged)


@pytest.mark.parametrize("variant", VARIANTS)
def test_module_matches_the_textbook(variant):
    check_against_textbook(VARIANTS[variant], {}, "kl")


@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_matches_the_textbook(kind):
    check_against_textbook({}, LOSSES[kind], kind)


@pytest.mark.parametrize("kind", ["kl", "lk_lambda"])
def test_balanced_depths_match_the_textbook(kind):
    check_against_textbook({}, LOSSES[kind], kind, balance_depths=True)


@pytest.mark.parametrize("partitions", [1, 3])
def test_the_reference_attention_matches_the_textbook(partitions):
    check_against_textbook({}, {}, "kl", attention="reference", sequence_partitions=partitions)


@pytest.mark.parametrize("partitions", [2, 4, 7, 1000])
@pytest.mark.parametrize("layers", [1, 3])
def test_partitioned_equals_flat(layers, partitions):
    draft = make_parallel_draft(layers=layers)
    documents = make_documents(LENGTHS)
    for batch in (padded_batch(documents), packed_batch([documents[:4], documents[4:]], 32)):
        flat = run(make_module(draft), batch)
        module = make_module(draft, sequence_partitions=partitions)
        assert_same(flat, run(module, batch))
        segments = len(module.prepare_inputs(**batch, seed=SEED).plan.segments)
        assert segments == min(partitions, segments) > 1


@pytest.mark.parametrize("partitions", [2, 4, 7])
def test_partitioned_equals_flat_in_fp32(partitions):
    draft = make_parallel_draft(layers=4, dtype=torch.float32, spread=0.1)
    head = make_head(torch.float32)
    batch = padded_batch(make_documents([120, 90], dtype=torch.float32))
    flat_out, flat = run(make_module(draft, depths=8, target_head=head), batch)
    module = make_module(draft, depths=8, target_head=head, sequence_partitions=partitions)
    out, grads = run(module, batch)
    torch.testing.assert_close(out.loss, flat_out.loss, rtol=0, atol=1e-5)
    for name, grad in grads.items():
        assert (grad - flat[name]).norm() <= 1e-4 * flat[name].norm(), name
    assert out.charged.tolist() == flat_out.charged.tolist()


@pytest.mark.parametrize("kind", ["kl", "lambda"])
def test_partitioned_equals_flat_with_checkpointed_layers_and_any_loss(kind):
    draft = make_parallel_draft(layers=2)
    options = {"lk_loss_type": "lambda"} if kind == "lambda" else {}
    batch = packed_batch([make_documents(LENGTHS)], 60)
    flat = run(make_module(draft, **options), batch)
    draft.gradient_checkpointing = True
    assert_same(flat, run(make_module(draft, **options), batch), tolerance=1e-13)
    assert_same(flat, run(make_module(draft, sequence_partitions=3, **options), batch))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("balance", [False, True])
def test_packed_equals_padded(layers, balance):
    module = make_module(make_parallel_draft(layers=layers), balance_depths=balance)
    documents = make_documents(LENGTHS)
    padded = run(module, padded_batch(documents))
    assert_same(padded, run(module, packed_batch([documents[:3], documents[3:]], 40)))
    assert_same(padded, run(module, packed_batch([documents], sum(LENGTHS))))
    assert_same(padded, run(module, packed_batch([[d] for d in documents], 23)))
    assert_same(padded, run(module, padded_batch(documents, width=40)))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    pad=st.integers(0, 3),
    supervised=st.sampled_from([0.2, 0.6, 1.1]),
    partitions=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_packed_equals_padded_for_any_documents(rows, pad, supervised, partitions, seed):
    draft = make_parallel_draft()
    packs = [
        make_documents(row, seed=seed + i, supervised=supervised) for i, row in enumerate(rows)
    ]
    width = max(sum(row) for row in rows) + pad
    padded = padded_batch([document for pack in packs for document in pack])
    packed = make_module(draft, sequence_partitions=partitions)
    assert_same(
        run(make_module(draft), padded, seed=seed),
        run(packed, packed_batch(packs, width), seed=seed),
    )


@pytest.mark.parametrize("balance", [False, True])
def test_micro_batches_add_up_to_one_batch(balance):
    """With one seed per step, a document's rollouts do not depend on how the step is split."""
    module = make_module(balance_depths=balance)
    documents = make_documents(LENGTHS)
    whole = run(module, packed_batch([documents], 60))
    one_by_one = [padded_batch([document]) for document in documents]
    halves = [padded_batch(documents[:2]), packed_batch([documents[:1:-1]], 50)]
    for micro in (one_by_one, halves):
        prepared = [module.prepare_inputs(**batch, seed=SEED) for batch in micro]
        normalizer = sum(p.charged_K for p in prepared)
        assert normalizer.tolist() == whole[0].charged.tolist()
        module.zero_grad()
        outs = [module.score(ready, normalizer) for ready in prepared]
        total = sum(out.loss for out in outs)
        total.backward()
        torch.testing.assert_close(total, whole[0].loss, rtol=1e-12, atol=1e-12)
        for name, parameter in module.draft_model.named_parameters():
            torch.testing.assert_close(parameter.grad, whole[1][name], rtol=1e-11, atol=1e-12)
        for field in COUNTS:
            assert (
                sum(getattr(o, field) for o in outs).tolist() == getattr(whole[0], field).tolist()
            )


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_chunk_sizes_do_not_matter(chunk_rows):
    draft, batch = make_parallel_draft(), padded_batch(make_documents(LENGTHS))
    whole = run(make_module(draft), batch)
    assert_same(whole, run(make_module(draft, chunk_rows=chunk_rows), batch))


def test_encodings_agree_and_logits_equal_probs_bitwise():
    head = make_head(torch.float32)
    module = make_module(make_parallel_draft(dtype=torch.float32), target_head=head)
    ids, mask = vocabulary()
    hidden = padded_batch(make_documents(LENGTHS, dtype=torch.float32))
    from_logits = run(module, with_logits(hidden, head))
    from_probs = run(module, with_probs(hidden, head, ids, mask))
    assert_same(from_logits, from_probs, tolerance=0)
    assert_same(from_logits, run(module, hidden), tolerance=2e-6)


@pytest.mark.parametrize("partitions", [1, 3])
def test_left_padding_equals_right_padding(partitions):
    """Sampling does not depend on where a document lies in its row."""
    batch = padded_batch(make_documents(LENGTHS), max(LENGTHS) + 1)
    left = {
        name: torch.stack([row.roll(len(row) - n, 0) for row, n in zip(x, LENGTHS, strict=True)])
        for name, x in batch.items()
    }
    module = make_module(sequence_partitions=partitions)
    assert_same(run(module, left), run(module, batch))


def test_target_batches_of_every_encoding_go_straight_into_the_module():
    """As in a user's script: a target's batch, in any encoding, goes straight into the module."""
    inputs = padded_batch(make_documents(LENGTHS))
    hidden = inputs.pop("target_last_hidden_states")
    batch = Eagle3TargetBatch(**inputs, last_hidden_states=hidden)
    module = make_module()
    module.draft_model.eval()
    ids, mask = vocabulary()
    outs = [
        module(**encoded.to_trainer_inputs())
        for encoded in (
            batch,
            batch.with_logits(make_head()),
            batch.with_probs(make_head(), ids, mask),
        )
    ]
    for out in outs:
        torch.testing.assert_close(out.loss, outs[0].loss, rtol=1e-6, atol=1e-6)
        assert out.step_prefix_hits.tolist() == outs[0].step_prefix_hits.tolist()


# --- against EAGLE-3 ---------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
def test_one_depth_equals_one_step_of_eagle3(layers):
    """With a full vocabulary, both charge the same elements, so all numbers agree."""
    draft = make_parallel_draft(layers=layers, draft_vocab_size=V)
    full = {
        "selected_token_ids": torch.arange(V),
        "selected_token_mask": torch.ones(V, dtype=torch.bool),
        "target_head": make_head(),
    }
    batch = packed_batch([make_documents(LENGTHS)], 60)
    parallel = PEagleTrainerModule(draft, num_depths=1, mask_token_id=MASK_ID, **full)
    peagle_result = run(parallel, batch)
    eagle3 = Eagle3TrainerModule(draft, ttt_steps=1, loss="kl", **full)
    eagle3.zero_grad()
    eagle3_out = eagle3(**batch)
    eagle3_out.loss.backward()
    grads = {n: p.grad for n, p in draft.named_parameters() if n != "mask_hidden"}
    assert (peagle_result[1].pop("mask_hidden") == 0).all()
    assert_same(peagle_result, (eagle3_out, grads), tolerance=1e-12)


def test_tau_equals_that_of_eagle3_with_one_depth():
    """Charges differ (EAGLE-3 skips targets outside its vocabulary), acceptance does not."""
    draft = make_parallel_draft()
    batch = padded_batch(make_documents(LENGTHS))
    ids, mask = vocabulary()
    options = {"selected_token_ids": ids, "selected_token_mask": mask, "target_head": make_head()}
    peagle = make_module(draft, depths=1)(**batch)
    eagle3 = Eagle3TrainerModule(draft, ttt_steps=1, **options)(**batch)
    assert peagle.charged[0] == peagle.step_valid[0] > eagle3.charged[0]
    assert peagle.step_valid.tolist() == eagle3.step_valid.tolist()
    assert peagle.step_prefix_hits.tolist() == eagle3.step_prefix_hits.tolist()
    assert peagle.step_prefix_hits[0] > 0


def test_without_down_sampling_valid_counts_equal_those_of_eagle3():
    """Without down-sampling, the slots that count for tau are EAGLE-3's, depth by depth."""
    batch = padded_batch(make_documents([40, 25], supervised=1.1))
    module = make_module(down_sample_ratio=1.0, down_sample_ratio_min=1.0)
    ids, mask = vocabulary()
    eagle3 = Eagle3TrainerModule(
        make_draft(), selected_token_ids=ids, selected_token_mask=mask, ttt_steps=DEPTHS
    )
    eagle3_plan = eagle3.plan(RowMasks(batch["loss_mask"], batch["attention_mask"]))
    peagle_plan = module.plan(RowMasks(batch["loss_mask"], batch["attention_mask"]), seed=0)
    assert peagle_plan.step_valid_K.tolist() == eagle3_plan.step_valid_K.tolist()


# --- what a step is made of --------------------------------------------------------------------


def test_balanced_depths_have_equal_weight():
    out = make_module(balance_depths=True)(**padded_batch(make_documents(LENGTHS)), seed=3)
    torch.testing.assert_close(out.loss, (out.loss_sums / out.charged).mean())


def test_the_loss_is_the_mean_over_charged_elements():
    out = make_module()(**padded_batch(make_documents(LENGTHS)), seed=3)
    torch.testing.assert_close(out.loss, out.loss_sums.sum() / out.charged.sum())
    assert out.charged.sum() == out.valid_tokens


def test_a_target_outside_the_vocabulary_is_charged_and_rejected():
    module = make_module()
    _, mask = vocabulary()
    batch = with_logits(padded_batch(make_documents([30], supervised=1.1)), make_head())
    batch["target_logits"][..., int((~mask).nonzero()[0])] = 1e6
    out = module(**batch, seed=1)
    assert (out.charged > 0).all()
    assert out.step_valid.tolist() == out.charged.tolist()
    assert out.correct.tolist() == [0] * DEPTHS
    assert out.loss > 0
    assert simulated_accept_length(out.step_prefix_hits, out.step_valid) == 1.0


def test_a_batch_without_supervision_gives_zero_and_zero_gradients():
    for partitions in (1, 3):
        module = make_module(sequence_partitions=partitions)
        for documents in (make_documents(LENGTHS, supervised=-1), make_documents([1, 1])):
            out, grads = run(module, padded_batch(documents))
            assert out.loss == 0
            assert all(bool((g == 0).all()) for g in grads.values())


# --- sampling ----------------------------------------------------------------------------------


def test_the_seed_decides_what_is_sampled():
    module = make_module()
    batch = padded_batch(make_documents([40, 30]))
    assert_same(run(module, batch, seed=1), run(module, batch, seed=1), tolerance=0)
    assert run(module, batch, seed=1)[0].loss != run(module, batch, seed=2)[0].loss
    assert run(module, batch, seed=-1)[0].loss == run(module, batch, seed=2**64 - 1)[0].loss
    planned = module.plan(RowMasks(batch["loss_mask"], batch["attention_mask"]), seed=2)
    ready = module.prepare_inputs(**batch, plan=planned)
    assert_same(run(module, batch, seed=2), backward(module, module.score(ready)))


def test_without_a_seed_training_varies_and_evaluation_does_not():
    module = make_module()
    batch = padded_batch(make_documents([40, 30]))
    torch.manual_seed(0)
    first, second = module(**batch).loss, module(**batch).loss
    assert first != second
    torch.manual_seed(0)
    assert module(**batch).loss == first
    module.draft_model.eval()  # as the training loop does
    before = torch.random.get_rng_state()
    with torch.no_grad():
        assert module(**batch).loss == module(**batch).loss
    assert torch.equal(before, torch.random.get_rng_state())


def test_max_anchors_caps_the_rollouts_of_each_row():
    batch = padded_batch(make_documents([40, 30], supervised=1.1))
    free, capped = make_module(), make_module(max_anchors=5)
    assert capped.prepare_inputs(**batch, seed=0).charged_K.tolist()[:2] == [68, 10]
    assert free.prepare_inputs(**batch, seed=0).charged_K[1] > 10


# --- the rest ----------------------------------------------------------------------------------


def test_bf16_compute_trains_fp32_masters():
    draft = make_parallel_draft(dtype=torch.float32)
    batch = padded_batch(make_documents(LENGTHS, dtype=torch.float32))
    head = make_head(torch.float32)
    out, grads = run(make_module(draft, target_head=head), batch)
    for partitions in (1, 3):
        low = make_module(
            draft, target_head=head, compute_dtype=torch.bfloat16, sequence_partitions=partitions
        )
        out_low, grads_low = run(low, batch)
        assert out_low.loss.dtype == torch.float32
        torch.testing.assert_close(out_low.loss, out.loss, rtol=0.03, atol=0.03)
        for name, grad in grads_low.items():
            assert grad.dtype == torch.float32
            cosine = torch.nn.functional.cosine_similarity(
                grad.flatten(), grads[name].flatten(), dim=0
            )
            assert cosine > 0.97, name


def test_autocast_sets_the_compute_dtype():
    draft, head = make_parallel_draft(dtype=torch.float32), make_head(torch.float32)
    batch = padded_batch(make_documents(LENGTHS, dtype=torch.float32))
    check_autocast(
        lambda dtype: make_module(draft, target_head=head, compute_dtype=dtype), batch, seed=SEED
    )


def test_evaluation_without_gradients_gives_the_same_loss():
    for partitions in (1, 3):
        module = make_module(sequence_partitions=partitions)
        batch = padded_batch(make_documents(LENGTHS))
        with torch.no_grad():
            evaluated = module(**batch, seed=0)
        assert not evaluated.loss.requires_grad
        torch.testing.assert_close(evaluated.loss, module(**batch, seed=0).loss.detach())


def test_a_few_steps_lower_the_loss_of_every_depth():
    """A few steps on one batch improve every depth, the deeper ones through mask_hidden."""
    module = make_module(make_parallel_draft(spread=0.05), down_sample_ratio_min=0.7)
    batch = padded_batch(make_documents([40, 40], supervised=1.1))
    optimizer = torch.optim.Adam(module.parameters(), lr=5e-3)
    losses = []
    for step in range(60):
        out = module(**batch, seed=step)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append((out.loss_sums / out.charged).tolist())
    first, last = torch.tensor(losses[:3]).mean(0), torch.tensor(losses[-3:]).mean(0)
    assert (last < 0.8 * first).all()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"depths": 0}, "num_depths"),
        ({"depths": 2.0}, "num_depths"),
        ({"mask_token_id": V}, "mask_token_id"),
        ({"mask_token_id": 3}, "mask_token_id"),  # the draft was built with another id
        ({"down_sample_ratio": 1.5}, "down_sample_ratio"),
        ({"down_sample_ratio_min": -1}, "down_sample_ratio_min"),
        ({"sequence_partitions": 0}, "sequence_partitions"),
        ({"max_anchors": 0}, "max_anchors"),
        ({"lk_loss_type": "beta"}, "lk_loss_type"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"draft": make_draft()}, "parallel_drafting"),
    ],
)
def test_errors_name_the_bad_option(options, field):
    with pytest.raises(ValueError, match=field):
        make_module(**options)


def test_the_mask_token_is_kept_in_the_config():
    draft = make_draft(parallel_drafting=True)
    with pytest.raises(ValueError, match="mask_token_id"):
        make_module(draft, mask_token_id=None)
    make_module(draft)
    assert draft.config.mask_token_id == MASK_ID
    make_module(draft, mask_token_id=None)
