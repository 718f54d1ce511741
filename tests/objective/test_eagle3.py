"""The EAGLE-3 objective against a textbook version, and every equality that it promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fledge import Eagle3TrainerModule, TargetHead, simulated_accept_length
from fledge.methods.losses.base import reference_loss
from fledge.methods.losses.cross_entropy import CrossEntropy
from fledge.methods.losses.hard import HardCrossEntropy
from fledge.methods.losses.kl import KLDivergence
from fledge.methods.losses.lk_alpha import LkAlpha
from fledge.methods.losses.lk_lambda import LkLambda
from fledge.methods.losses.total_variation import TotalVariation
from fledge.rollout.slots import RowMasks
from objective.naive_eagle3 import (
    D,
    E,
    V,
    W,
    check_autocast,
    make_documents,
    make_draft,
    make_head,
    naive_eagle3,
    packed_batch,
    padded_batch,
    vocabulary,
    with_logits,
    with_probs,
)

STEPS = 4
LENGTHS = [9, 1, 6, 13, 2]


def make_module(draft=None, *, steps=STEPS, **options):
    ids, mask = vocabulary()
    return Eagle3TrainerModule(
        draft if draft is not None else make_draft(),
        selected_token_ids=ids,
        selected_token_mask=mask,
        ttt_steps=steps,
        **({"target_head": make_head()} | options),
    )


def run(module, batch, **extra):
    """Returns (output, gradients by parameter name)."""
    return backward(module, module(**batch, **extra))


def backward(module, out):
    module.zero_grad()
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in module.draft_model.named_parameters()}


def assert_same(first, second, *, tolerance=1e-11, metrics=True):
    (out_a, grads_a), (out_b, grads_b) = first, second
    torch.testing.assert_close(out_a.loss, out_b.loss, rtol=tolerance, atol=tolerance)
    assert grads_a.keys() == grads_b.keys()
    for name in grads_a:
        torch.testing.assert_close(
            grads_a[name],
            grads_b[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: n + m,
        )
    if metrics:
        for field in ("step_prefix_hits", "step_valid", "step_reached", "charged", "correct"):
            assert getattr(out_a, field).tolist() == getattr(out_b, field).tolist(), field
        torch.testing.assert_close(out_a.loss_sums, out_b.loss_sums, rtol=tolerance, atol=tolerance)
        assert out_a.valid_tokens == out_b.valid_tokens
        assert out_a.accuracy == out_b.accuracy


VARIANTS = {
    "one layer": {},
    "two layers": {"num_hidden_layers": 2},
    "three layers, fc_norm": {"num_hidden_layers": 3, "fc_norm": True},
    "fc_norm": {"fc_norm": True},
    "q/k norms": {"num_hidden_layers": 2, "qk_norm": True},
    "biases": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True, "num_hidden_layers": 2},
    "both, two layers": {"fc_norm": True, "norm_output": True, "num_hidden_layers": 2},
    "partial rotary": {"partial_rotary_factor": 0.5},
    "no GQA": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
}
LOSSES = {
    "ce": {},
    "kl": {"loss": "kl"},
    "hard": {"loss": "hard"},
    "alpha": {"lk_loss_type": "alpha"},
    "lambda": {"lk_loss_type": "lambda", "lk_kl_scale": 0.7, "lk_kl_decay": 2.0},
    "tv": {"loss": "tv"},
}
LOSS_OBJECTS = {
    "ce": CrossEntropy(),
    "kl": KLDivergence(),
    "hard": HardCrossEntropy(),
    "alpha": LkAlpha(),
    "lambda": LkLambda(scale=0.7, decay=2.0),
    "tv": TotalVariation(),
}


def check_against_textbook(changes, loss, kind, **options):
    module = make_module(make_draft(**changes), **loss, **options)
    ids, mask = vocabulary()
    batch = with_logits(padded_batch(make_documents(LENGTHS)), make_head())
    result = run(module, batch)
    module.zero_grad()
    reference = LOSS_OBJECTS[kind]
    naive = naive_eagle3(
        module.draft_model, batch, ids=ids, mask=mask, steps=STEPS,
        depth_loss=lambda logits, probs, charged: reference_loss(logits, probs, charged, reference),
    )  # fmt: skip
    naive.loss.backward()
    out, grads = result
    torch.testing.assert_close(out.loss, naive.loss, rtol=1e-10, atol=1e-10)
    for name, parameter in module.draft_model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-11)
        assert parameter.grad.abs().max() > 0, name
    assert out.charged.tolist() == naive.charged
    assert out.correct.tolist() == naive.correct
    assert out.step_prefix_hits.tolist() == naive.hits
    assert out.step_valid.tolist() == naive.valid
    assert out.valid_tokens.item() == sum(naive.charged)
    torch.testing.assert_close(
        out.accuracy, torch.tensor(sum(naive.correct) / sum(naive.charged)), check_dtype=False
    )
    assert 0 < sum(naive.charged) < STEPS * naive.valid[0]  # some targets are not in the vocabulary


@pytest.mark.parametrize("variant", VARIANTS)
def test_module_matches_the_textbook(variant):
    check_against_textbook(VARIANTS[variant], {}, "ce")


@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_matches_the_textbook(kind):
    check_against_textbook({}, LOSSES[kind], kind)


@pytest.mark.parametrize("kind", LOSS_OBJECTS)
def test_a_loss_may_be_given_by_name_or_as_an_object(kind):
    loss = LOSS_OBJECTS[kind]
    assert make_module(**LOSSES[kind]).loss == loss
    assert make_module(loss=loss).loss == loss
    parameters = {"lk_kl_scale": 0.7, "lk_kl_decay": 2.0}
    assert make_module(loss=loss.kind, **parameters).loss == loss


@pytest.mark.parametrize("attention", ["fast", "reference"])
@pytest.mark.parametrize("compact", [True, False])
def test_reference_implementations_match_the_textbook(attention, compact):
    check_against_textbook({"num_hidden_layers": 2}, {}, "ce", attention=attention, compact=compact)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", LOSSES)
def test_packed_equals_padded(layers, kind):
    module = make_module(make_draft(num_hidden_layers=layers), **LOSSES[kind])
    documents = make_documents(LENGTHS)
    padded = run(module, padded_batch(documents))
    rows = [documents[:3], documents[3:]]
    assert_same(padded, run(module, packed_batch(rows, 20)))
    assert_same(padded, run(module, packed_batch([documents], sum(LENGTHS))))
    assert_same(padded, run(module, packed_batch([[d] for d in documents], 15)))
    assert_same(padded, run(module, padded_batch(documents, width=40)))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    pad=st.integers(0, 3),
    supervised=st.sampled_from([0.2, 0.6, 1.1]),
    seed=st.integers(0, 999),
)
def test_packed_equals_padded_for_any_documents(rows, pad, supervised, seed):
    module = make_module(make_draft(num_hidden_layers=2), steps=3)
    packs = [
        make_documents(row, seed=seed + i, supervised=supervised) for i, row in enumerate(rows)
    ]
    width = max(sum(row) for row in rows) + pad
    padded = padded_batch([document for pack in packs for document in pack])
    assert_same(run(module, padded), run(module, packed_batch(packs, width)))


def test_packed_equals_padded_when_everything_is_supervised():
    """The shift moves the next document's first token into the last slot; it is never charged."""
    module = make_module()
    documents = make_documents(LENGTHS, supervised=1.1)
    padded = run(module, padded_batch(documents))
    assert padded[0].step_valid.tolist() == [
        sum(max(0, n - 1 - k) for n in LENGTHS) for k in range(STEPS)
    ]
    assert_same(padded, run(module, packed_batch([documents], 33)))


def test_the_packing_example_of_semantics_section_5():
    batch = packed_batch([make_documents([3, 2], supervised=1.1)], 8)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch["doc_remaining"].tolist() == [[2, 1, 0, 1, 0, 0, 0, 0]]
    assert batch["seq_lens"].tolist() == [[3, 5]]
    prepared = make_module().prepare_inputs(**batch)
    assert prepared.plan.step_valid_K.tolist() == [3, 1, 0, 0]


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 1000])
@pytest.mark.parametrize("kind", ["ce", "lambda"])
def test_chunk_sizes_do_not_matter(chunk_rows, kind):
    draft = make_draft()
    batch = padded_batch(make_documents(LENGTHS))
    whole = run(make_module(draft, **LOSSES[kind]), batch)
    assert_same(whole, run(make_module(draft, chunk_rows=chunk_rows, **LOSSES[kind]), batch))


def test_compaction_changes_nothing():
    draft = make_draft(num_hidden_layers=2)
    batch = packed_batch([make_documents(LENGTHS)], 40)
    compact, full = make_module(draft), make_module(draft, compact=False)
    assert_same(run(compact, batch), run(full, batch))
    compact_counts, full_counts = (
        module.prepare_inputs(**batch).plan.counts for module in (compact, full)
    )
    assert sum(compact_counts) < sum(full_counts)


def test_encodings_agree_and_logits_equal_probs_bitwise():
    module = make_module(make_draft(dtype=torch.float32), target_head=make_head(torch.float32))
    ids, mask = vocabulary()
    hidden = padded_batch(make_documents(LENGTHS, dtype=torch.float32))
    from_logits = run(module, with_logits(hidden, module.target_head))
    from_probs = run(module, with_probs(hidden, module.target_head, ids, mask))
    assert_same(from_logits, from_probs, tolerance=0)
    assert_same(from_logits, run(module, hidden), tolerance=2e-6)


def test_a_full_vocabulary_needs_no_map():
    draft = make_draft(draft_vocab_size=V)
    module = Eagle3TrainerModule(
        draft,
        selected_token_ids=torch.arange(V),
        selected_token_mask=torch.ones(V, dtype=torch.bool),
        ttt_steps=2,
        target_head=make_head(),
    )
    batch = padded_batch(make_documents(LENGTHS))
    by_hidden = run(module, batch)
    assert_same(by_hidden, run(module, with_logits(batch, make_head())))
    assert by_hidden[0].charged[0] == by_hidden[0].step_valid[0]


@pytest.mark.parametrize("kind", ["ce", "kl", "hard", "alpha"])
def test_micro_batches_add_up_to_one_batch(kind):
    module = make_module(**LOSSES[kind])
    documents = make_documents(LENGTHS)
    whole = run(module, padded_batch(documents))
    micro = [padded_batch(documents[:2]), packed_batch([documents[2:]], 30)]
    prepared = [module.prepare_inputs(**batch) for batch in micro]
    normalizer = sum(p.charged_K for p in prepared)
    assert normalizer.tolist() == whole[0].charged.tolist()
    assert not torch.equal(prepared[0].charged_K, prepared[1].charged_K)
    module.zero_grad()
    outs = [module.score(ready, normalizer) for ready in prepared]
    for out in outs:
        out.loss.backward()
    torch.testing.assert_close(sum(o.loss for o in outs), whole[0].loss, rtol=1e-12, atol=1e-12)
    for name, parameter in module.draft_model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[1][name], rtol=1e-11, atol=1e-12)
    assert sum(o.step_prefix_hits for o in outs).tolist() == whole[0].step_prefix_hits.tolist()


def test_a_plan_made_in_advance_gives_the_same_result():
    module = make_module()
    batch = packed_batch([make_documents(LENGTHS)], 40)
    fields = ("loss_mask", "attention_mask", "position_ids", "seq_lens", "doc_remaining")
    plan = module.plan(RowMasks(**{name: batch[name] for name in fields}))
    planned = backward(module, module.score(module.prepare_inputs(**batch, plan=plan)))
    assert_same(run(module, batch), planned, tolerance=0)


def test_a_batch_without_supervision_gives_zero_and_zero_gradients():
    module = make_module(make_draft(num_hidden_layers=2))
    for kind in LOSSES.values():
        module.loss = make_module(**kind).loss
        out, grads = run(module, padded_batch(make_documents(LENGTHS, supervised=-1)))
        assert out.loss == 0
        assert all(bool((g == 0).all()) for g in grads.values())
        assert simulated_accept_length(out.step_prefix_hits, out.step_valid) == 1.0


def test_a_target_outside_the_vocabulary_is_a_rejection():
    """All probability is on a token outside the draft vocabulary: uncharged, valid, never a hit."""
    module = make_module()
    _, mask = vocabulary()
    batch = with_logits(padded_batch(make_documents([8], supervised=1.1)), make_head())
    outside = int((~mask).nonzero()[0])
    batch["target_logits"][..., outside] = 1e6
    out = module(**batch)
    assert out.charged.tolist() == [0] * STEPS
    assert out.step_prefix_hits.tolist() == [0] * STEPS
    assert out.step_valid.tolist() == [7, 6, 5, 4]
    assert out.loss == 0


def test_depths_are_weighted_by_powers_of_the_decay():
    module = make_module(step_decay=0.5)
    out = module(**padded_batch(make_documents(LENGTHS)))
    means = out.loss_sums / out.charged
    expected = sum(0.5**k * means[k] for k in range(STEPS)) / sum(0.5**k for k in range(STEPS))
    torch.testing.assert_close(out.loss, expected.to(out.loss.dtype), rtol=1e-6, atol=1e-6)


def test_gradient_checkpointing_changes_nothing():
    draft = make_draft(num_hidden_layers=2)
    module = make_module(draft)
    batch = packed_batch([make_documents(LENGTHS)], 40)
    plain = run(module, batch)
    draft.gradient_checkpointing = True
    assert_same(plain, run(module, batch), tolerance=1e-13)


def test_backward_twice_with_a_scaled_loss():
    module = make_module()
    out = module(**padded_batch(make_documents(LENGTHS)))
    head = module.draft_model.lm_head.weight
    (once,) = torch.autograd.grad(out.loss, head, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * out.loss, head)
    torch.testing.assert_close(thrice, 3 * once)


def test_bf16_compute_trains_fp32_masters():
    draft = make_draft(dtype=torch.float32)
    batch = padded_batch(make_documents(LENGTHS, dtype=torch.float32))
    head = make_head(torch.float32)
    out, grads = run(make_module(draft, target_head=head), batch)
    low = make_module(draft, target_head=head, compute_dtype=torch.bfloat16)
    out_low, grads_low = run(low, batch)
    assert out_low.loss.dtype == torch.float32
    torch.testing.assert_close(out_low.loss, out.loss, rtol=0.03, atol=0.03)
    for name, grad in grads_low.items():
        assert grad.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(grad.flatten(), grads[name].flatten(), dim=0)
        assert cosine > 0.97, name


def test_autocast_sets_the_compute_dtype():
    draft, head = make_draft(dtype=torch.float32), make_head(torch.float32)
    batch = padded_batch(make_documents(LENGTHS, dtype=torch.float32))
    check_autocast(lambda dtype: make_module(draft, target_head=head, compute_dtype=dtype), batch)


def test_evaluation_without_gradients_gives_the_same_loss():
    module = make_module()
    batch = padded_batch(make_documents(LENGTHS))
    with torch.no_grad():
        evaluated = module(**batch)
    assert not evaluated.loss.requires_grad
    assert evaluated.loss == module(**batch).loss


def test_conditional_accuracies_multiply_to_the_prefix_accuracy():
    out = make_module()(**padded_batch(make_documents([40, 40], supervised=1.1)))
    assert out.step_reached[0] == out.step_valid[0]
    assert (out.step_reached[1:] <= out.step_prefix_hits[:-1]).all()
    torch.testing.assert_close(
        out.conditional_accuracy * out.step_reached.clamp_min(1), out.step_prefix_hits.float()
    )


@pytest.mark.parametrize(
    ("hits", "valid", "tau"),
    [
        ([4, 4, 4], [4, 4, 4], 4.0),
        ([2, 1], [4, 4], 1.75),
        ([0, 0], [0, 0], 1.0),
        ([3, 0], [4, 0], 1.75),
        ([0.25, 0.0], [0.5, 0.0], 1.5),  # means over ranks are fractions
        ([], [], 1.0),
    ],
)
def test_tau_of_hand_computed_cases(hits, valid, tau):
    assert simulated_accept_length(torch.tensor(hits), torch.tensor(valid)) == tau
    assert simulated_accept_length(hits, valid) == tau


def test_tau_rejects_counts_of_different_lengths():
    with pytest.raises(ValueError, match="step_valid"):
        simulated_accept_length([1], [2, 3])


@pytest.mark.parametrize("steps", [0, -1, 1.5, 2.0, True, "3", None])
def test_ttt_steps_must_be_a_positive_int(steps):
    with pytest.raises(ValueError, match="ttt_steps"):
        make_module(steps=steps)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lk_loss_type": "beta"}, "lk_loss_type"),
        ({"lk_kl_scale": 1.5}, "lk_kl_scale"),
        ({"lk_kl_decay": -1.0}, "lk_kl_decay"),
        ({"loss": "mse"}, "loss"),
        ({"chunk_rows": 0}, "chunk_rows"),
    ],
)
def test_errors_name_the_bad_option(options, field):
    with pytest.raises(ValueError, match=field):
        make_module(**options)


def test_exactly_one_supervision_encoding_is_required():
    module = make_module()
    batch = padded_batch(make_documents([5]))
    neither = {k: v for k, v in batch.items() if k != "target_last_hidden_states"}
    both = batch | with_logits(batch, make_head())
    half = neither | {"target_probs": torch.zeros(1, 5, W)}
    for bad in (neither, both, half):
        with pytest.raises(ValueError, match="supervision"):
            module(**bad)
    with pytest.raises(ValueError, match="target_head"):
        make_module(target_head=None)(**batch)


@pytest.mark.parametrize("compact", [True, False])
def test_left_padding_equals_right_padding(compact):
    """Rolling a right-padded row to the right makes it left-padded. The last row is all padding."""
    documents = make_documents(LENGTHS, supervised=1.1)
    batch = {name: F.pad(x, [0, 0] * (x.ndim - 1) + [0, 1]) for name, x in
             padded_batch(documents, max(LENGTHS) + 2).items()}  # fmt: skip
    left = {
        name: torch.stack(
            [row.roll(len(row) - n, 0) for row, n in zip(x, [*LENGTHS, 0], strict=True)]
        )
        for name, x in batch.items()
    }
    for row, length in enumerate(LENGTHS):
        left["loss_mask"][row, :-length] = 1  # the contents of padding must not matter
        left["aux_hidden_states"][row, :-length] = 9.0
    module = make_module(make_draft(num_hidden_layers=2), compact=compact)
    assert_same(run(module, left), run(module, batch))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
def test_masks_may_have_any_dtype(dtype):
    """Every nonzero value means supervised, fractions included."""
    batch = padded_batch(make_documents(LENGTHS))
    expected = run(make_module(), batch)
    factor = 0.5 if dtype.is_floating_point else 1
    masks = {name: batch[name].to(dtype) * factor for name in ("loss_mask", "attention_mask")}
    assert_same(run(make_module(), batch | masks), expected, tolerance=0)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("loss_mask", lambda x: x[:, :-1]),
        ("loss_mask", lambda x: x[..., None]),
        ("attention_mask", lambda x: x[:1]),
        ("aux_hidden_states", lambda x: x[..., 1:]),
        ("aux_hidden_states", lambda x: x[:, 1:]),
        ("target_last_hidden_states", lambda x: x[..., 1:]),
        ("target_last_hidden_states", lambda x: x[:1]),
        ("target_logits", lambda x: F.pad(x, (0, 1))),
        ("target_logits", lambda x: x[..., :-1]),
        ("target_probs", lambda x: x[..., :-1]),
        ("position_mask", lambda x: x[:, :-1]),
    ],
)
def test_shape_errors_name_the_field(field, change):
    batch = padded_batch(make_documents(LENGTHS))
    if field == "target_logits":
        batch = with_logits(batch, make_head())
    elif field in ("target_probs", "position_mask"):
        batch = with_probs(batch, make_head(), *vocabulary())
    with pytest.raises(ValueError, match=f"^{field}: must be"):
        make_module()(**batch | {field: change(batch[field])})


def test_padding_inside_a_document_is_rejected():
    batch = padded_batch(make_documents([6, 6], supervised=1.1))
    batch["attention_mask"][0, 2] = 0
    with pytest.raises(ValueError, match="attention_mask"):
        make_module()(**batch)


def test_a_target_head_may_be_a_module_or_a_tensor():
    """The model's output module or its weight, neither of which is trained or saved."""
    head = make_head()
    module = nn.Linear(D, V, bias=False, dtype=torch.float64)
    module.weight = nn.Parameter(head.weight_VD.clone())
    batch = padded_batch(make_documents(LENGTHS))
    expected = run(make_module(target_head=head), batch)
    for offered in (module, module.weight, module.weight.detach()):
        trainer = make_module(target_head=offered)
        assert_same(run(trainer, batch), expected, tolerance=0)
        assert {name.partition(".")[0] for name, _ in trainer.named_parameters()} == {"draft_model"}
    biased = nn.Linear(D, V, dtype=torch.float64)
    assert torch.equal(TargetHead.of(biased).bias_V, biased.bias)
    for bad in (nn.Identity(), torch.zeros(V), "lm_head", torch.zeros(V + 1, D)):
        with pytest.raises(ValueError, match="target_head"):
            make_module(target_head=bad)


def test_a_draft_keeps_its_vocabulary_map():
    draft = make_draft()
    make_module(draft)
    other, mask = vocabulary(seed=9)
    with pytest.raises(ValueError, match="another map"):
        Eagle3TrainerModule(draft, selected_token_ids=other, selected_token_mask=mask, ttt_steps=1)


def test_sizes_in_this_file_are_all_different():
    """Mixed-up dimensions would go unnoticed if their sizes were equal."""
    assert len({V, W, D, E, 3 * D}) == 5
