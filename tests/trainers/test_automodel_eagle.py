"""NeMo AutoModel's own EAGLE trainers compute our losses, metrics and gradients (float64)."""

import copy

import pytest
import torch
from torch import nn

from fledge import (
    Eagle1TrainerModule,
    Eagle3TrainerModule,
    PEagleTrainerModule,
    generate_cod_sample_indices,
)
from objective import naive_eagle1 as eagle1
from objective.naive_eagle3 import (
    make_documents,
    make_draft,
    make_head,
    packed_batch,
    padded_batch,
    vocabulary,
    with_logits,
    with_probs,
)
from objective.naive_peagle import MASK_ID, make_parallel_draft
from trainers.compared import assert_same_step, dense_attention, gradients, sampled_elements

pytestmark = pytest.mark.engine

REASON = "make test-trainers installs it"
LENGTHS, DEPTHS, SEED = [9, 1, 6, 13, 2, 21], 4, 11
VARIANTS = {
    "plain": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "no GQA": {"num_key_value_heads": 4},
}
ROWS = {
    "padded": padded_batch(make_documents(LENGTHS)),
    "packed": packed_batch([make_documents(LENGTHS[:3]), make_documents(LENGTHS[3:])], 37),
}


@pytest.fixture(scope="module")
def automodel():
    pytest.importorskip("nemo_automodel", reason=REASON)
    from nemo_automodel.components.speculative import eagle
    from nemo_automodel.components.speculative.eagle import core_v12, draft_llama_v12, peagle_data

    del core_v12, draft_llama_v12, peagle_data  # imported so that `eagle` has them
    return eagle


def their_draft(automodel, draft):
    """Their model with our weights. Its keys are ours behind `model.`, apart from four of them."""
    config = copy.deepcopy(draft.config)
    config._attn_implementation = "eager"
    model = automodel.draft_llama.LlamaEagle3DraftModel(config).to(draft.dtype)
    outside = ("lm_head.", "d2t", "t2d", "mask_hidden")
    state = draft.state_dict()
    named = {name if name.startswith(outside) else f"model.{name}": state[name] for name in state}
    model.load_state_dict(named)
    return model


def run(module, batch, **extra):
    out = module(**batch, **extra)
    out.loss.backward()
    return out, (out.loss.detach(), gradients(module.draft_model, prefix="model."))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("loss", [None, "alpha", "lambda"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle3(automodel, variant, loss, rows):
    ids, mask = vocabulary()
    draft = make_draft(**VARIANTS[variant])
    settings = {
        "selected_token_ids": ids, "selected_token_mask": mask, "ttt_steps": DEPTHS,
        "lk_loss_type": loss,
    }  # fmt: skip
    ours = Eagle3TrainerModule(draft, **settings)  # which sets the draft's vocabulary
    theirs = automodel.core.Eagle3TrainerModule(their_draft(automodel, draft), **settings)
    batch = with_logits(ROWS[rows], make_head())
    (their_out, their_step), (our_out, our_step) = run(theirs, batch), run(ours, batch)
    assert_same_step(their_step, our_step)
    assert our_out.step_valid.tolist() == their_out.step_valid.tolist()
    assert our_out.step_prefix_hits.tolist() == their_out.step_prefix_hits.tolist()
    assert our_out.valid_tokens == their_out.valid_tokens > 0
    torch.testing.assert_close(our_out.accuracy, their_out.accuracy.to(our_out.accuracy.dtype))


@pytest.mark.parametrize("flag", ["norm_output", "fc_norm"])
def test_a_wrong_flag_is_noticed(automodel, flag):
    ids, mask = vocabulary()
    draft = make_draft(fc_norm=True, norm_output=True)
    settings = {"selected_token_ids": ids, "selected_token_mask": mask, "ttt_steps": DEPTHS}
    ours = Eagle3TrainerModule(draft, **settings)
    model = their_draft(automodel, draft)
    setattr(model.config, flag, False)
    batch = with_logits(ROWS["padded"], make_head())
    theirs = run(automodel.core.Eagle3TrainerModule(model, **settings), batch)[1]
    with pytest.raises(AssertionError, match="not close"):
        assert_same_step(theirs, run(ours, batch)[1])


def test_eagle3_from_probabilities(automodel):
    ids, mask = vocabulary()
    draft = make_draft()
    settings = {"selected_token_ids": ids, "selected_token_mask": mask, "ttt_steps": DEPTHS}
    ours = Eagle3TrainerModule(draft, **settings)
    theirs = automodel.core.Eagle3TrainerModule(their_draft(automodel, draft), **settings)
    batch = with_probs(ROWS["packed"], make_head(), ids, mask)
    assert_same_step(run(theirs, batch)[1], run(ours, batch)[1])


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("layers", [1, 3])
def test_peagle(automodel, monkeypatch, layers, partitions):
    """With our sample in place of theirs, in one pass and in segments. They train one row after
    another and do not pack."""
    ids, mask = vocabulary()
    draft, documents = make_parallel_draft(layers=layers), make_documents(LENGTHS)
    settings = {
        "selected_token_ids": ids, "selected_token_mask": mask, "num_depths": DEPTHS,
        "mask_token_id": MASK_ID, "sequence_partitions": partitions,
    }  # fmt: skip
    ours = PEagleTrainerModule(draft, **settings)
    batch = with_logits(padded_batch(documents), make_head())
    our_out, our_step = run(ours, batch, seed=SEED)
    model = their_draft(automodel, draft)
    theirs = automodel.peagle_trainer.PEagleTrainerModule(model, **settings)
    monkeypatch.setattr(automodel.peagle_draft, "_peagle_flex_attention", dense_attention)
    samples = iter(
        sampled_elements(documents, width=batch["input_ids"].shape[1], depths=DEPTHS, seed=SEED)
    )
    monkeypatch.setattr(
        automodel.peagle_data, "generate_cod_sample_indices", lambda **_: next(samples)
    )
    segments = [None]
    if partitions > 1:
        plan = theirs.build_peagle_plan(batch["loss_mask"])
        segments = [(plan, i) for i in range(len(plan.units))]
        assert len(segments) > len(documents)
    loss = correct = charged = 0
    for segment in segments:
        out = theirs(**batch, peagle_segment=segment)
        out.loss.backward()
        loss, charged = loss + out.loss.detach(), charged + out.valid_tokens
        correct += out.accuracy * out.valid_tokens
    assert_same_step((loss, gradients(model, prefix="model.")), our_step)
    assert our_out.valid_tokens == charged > 0
    # where the target's top token is outside the draft vocabulary, we count the draft as wrong
    assert our_out.correct.sum() <= correct


def test_the_number_of_sampled_elements(automodel):
    """Deeper pools depend on what was drawn."""
    torch.manual_seed(0)
    for length in (1, 2, 17, 64, 333):
        for share in (0.0, 0.3, 0.9, 1.0):
            settings = (length, (torch.rand(1, length) < share).long(), 8, 0.7, 0.2)
            ours, theirs = (
                torch.bincount(sample(*settings)[1], minlength=2)[:2].tolist()
                for sample in (
                    generate_cod_sample_indices,
                    automodel.peagle_data.generate_cod_sample_indices,
                )
            )
            assert ours == theirs, (length, share)


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("fc_bias", [False, True])
def test_eagle1(automodel, fc_bias, rows):
    """Without noise, which is drawn differently, and without two norms that only they have."""
    draft = eagle1.make_draft(fc_bias=fc_bias)
    options = {"feature_weight": 0.7, "token_weight": 0.3}
    ours = eagle1.make_module(draft, feature_noise=0.0, **options)
    assert isinstance(ours, Eagle1TrainerModule)
    documents = eagle1.documents_of()
    batch = padded_batch(documents)
    if rows == "packed":
        batch = packed_batch([documents[:2], documents[2:]], 25)
    our_out, our_step = run(ours, batch)

    config = copy.deepcopy(draft.config)
    config.bias = fc_bias
    model = automodel.draft_llama_v12.LlamaEagleDraftModel(config).double()
    head = nn.Linear(eagle1.D, eagle1.V, bias=False).double().requires_grad_(False)
    head.load_state_dict({"weight": draft.lm_head.weight})
    model.norm = model.layers[0].input_layernorm = nn.Identity()  # which the engines' class lacks
    state = {name: value for name, value in draft.state_dict().items() if name != "lm_head.weight"}
    model.load_state_dict(state)
    model.freeze_embeddings()
    theirs = automodel.core_v12.EagleTrainerModule(
        model, target_lm_head=head, hidden_loss_weight=0.7, token_loss_weight=0.3
    )
    names = {"aux_hidden_states": "input_hidden_states"}
    names["target_last_hidden_states"] = "target_hidden_states"
    given = {names.get(name, name): value for name, value in batch.items()}
    given["target_logits"] = head(given["target_hidden_states"])
    their_out, their_step = run(theirs, given)
    assert_same_step(their_step, our_step)
    assert our_out.valid_tokens == their_out.valid_tokens > 0
    torch.testing.assert_close(our_out.accuracy, their_out.accuracy.to(our_out.accuracy.dtype))
