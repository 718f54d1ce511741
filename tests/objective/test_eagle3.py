"""The EAGLE-3 objective against a textbook version, and every equality that it promises."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fledge import Eagle3TrainerModule, TargetHead, simulated_accept_length
from fledge.methods.losses.cross_entropy import CrossEntropy
from fledge.methods.losses.hard import HardCrossEntropy
from fledge.methods.losses.kl import KLDivergence
from fledge.methods.losses.lk_alpha import LkAlpha
from fledge.methods.losses.lk_lambda import LkLambda
from fledge.methods.losses.total_variation import TotalVariation
from objective.cases import LOSSES, assert_matches_textbook, assert_same, run
from objective.cases import eagle3 as make_module
from objective.naive_eagle3 import (
    D,
    V,
    W,
    make_documents,
    make_draft,
    make_head,
    naive_eagle3,
    padded_batch,
    reference_loss,
    vocabulary,
    with_logits,
    with_probs,
)

STEPS = 4
LENGTHS = [9, 1, 6, 13, 2]


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
LOSS_OBJECTS = {
    "ce": CrossEntropy(),
    "kl": KLDivergence(),
    "hard": HardCrossEntropy(),
    "alpha": LkAlpha(),
    "lambda": LkLambda(scale=0.7, decay=2.0),
    "tv": TotalVariation(),
}


TWO_LAYERS = {"changes": VARIANTS["two layers"]}
TEXTBOOK = {
    **{name: {"changes": changes} for name, changes in VARIANTS.items()},
    **LOSSES,
    "reference attention": {**TWO_LAYERS, "attention": "reference"},
}


@pytest.mark.parametrize("name", TEXTBOOK)
def test_module_matches_the_textbook(name):
    module, (ids, mask) = make_module(**TEXTBOOK[name]), vocabulary()
    batch = with_logits(padded_batch(make_documents(LENGTHS)), make_head())
    result = out, _ = run(module, batch)
    naive = naive_eagle3(
        module.draft_model, batch, ids=ids, mask=mask, steps=STEPS,
        depth_loss=lambda *depth: reference_loss(*depth, module.loss),
    )  # fmt: skip
    assert_matches_textbook(module, result, naive)
    assert out.valid_tokens.item() == sum(naive.charged)
    torch.testing.assert_close(
        out.accuracy, torch.tensor(sum(naive.correct) / sum(naive.charged)), check_dtype=False
    )
    assert 0 < sum(naive.charged) < STEPS * naive.valid[0]  # some targets are not in the vocabulary


@pytest.mark.parametrize("kind", LOSS_OBJECTS)
def test_a_loss_may_be_given_by_name_or_as_an_object(kind):
    loss = LOSS_OBJECTS[kind]
    assert make_module(**LOSSES[kind]).loss == loss
    assert make_module(loss=loss).loss == loss
    parameters = {"lk_kl_scale": 0.7, "lk_kl_decay": 2.0}
    assert make_module(loss=loss.kind, **parameters).loss == loss


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
    with pytest.raises(ValueError, match="step_valid"):
        simulated_accept_length(hits, [*valid, 1])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lk_loss_type": "beta"}, "lk_loss_type"),
        ({"lk_kl_scale": 1.5}, "lk_kl_scale"),
        ({"lk_kl_decay": -1.0}, "lk_kl_decay"),
        ({"loss": "mse"}, "loss"),
        ({"chunk_rows": 0}, "chunk_rows"),
        *(({"steps": steps}, "ttt_steps") for steps in (0, -1, 1.5, 2.0, True, "3", None)),
        *(({"depth_keep": keep}, "depth_keep") for keep in (0.0, 1.1, -0.5)),
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
        ("attention_mask", lambda x: x[:1]),
        ("aux_hidden_states", lambda x: x[..., 1:]),
        ("target_last_hidden_states", lambda x: x[..., 1:]),
        ("target_logits", lambda x: F.pad(x, (0, 1))),
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
