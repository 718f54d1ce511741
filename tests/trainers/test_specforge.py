"""SpecForge's own trainers compute our losses, metrics and gradients (float64)."""

import pytest
import torch

from fledge import (
    DFlashTrainerModule,
    DSparkTrainerModule,
    Eagle3TrainerModule,
    PEagleTrainerModule,
)
from objective.naive_block import (
    MASK_ID,
    make_block_documents,
    make_block_draft,
    make_spark_draft,
)
from objective.naive_eagle3 import (
    make_documents,
    make_draft,
    make_head,
    padded_batch,
    vocabulary,
    with_logits,
)
from objective.naive_peagle import make_parallel_draft
from trainers.blocks import (
    GAMMA,
    LENGTHS,
    anchors_of,
    make_ours,
    our_step,
    tables,
    their_config,
    unshifted,
)
from trainers.compared import assert_same_step, dense_attention, gradients, sampled_elements

pytestmark = pytest.mark.engine

DEPTHS, SEED = 4, 11


@pytest.fixture
def specforge():
    """Their package, with torch.compile turned off: it compiles for minutes on a CPU."""
    package = pytest.importorskip("specforge", reason="make test-trainers installs it")
    with torch.compiler.set_stance("force_eager"):
        yield package


def their_eagle_draft(kind, draft):
    """Their model with our weights; the only layer of EAGLE-3 drafts is called `midlayer`."""
    model = kind(draft.config).to(draft.dtype)
    state = draft.state_dict()
    if not draft.config.parallel_drafting:
        state = {name.replace("layers.0.", "midlayer."): state[name] for name in state}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"t2d", "d2t"}  # with the whole vocabulary theirs are what they start as
    return model


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True}, {"num_key_value_heads": 4}])
def test_eagle3(specforge, monkeypatch, changes):
    """In float32: their masks overflow in float64. They divide every step's sum by the number of
    slots, we by the number of charged ones. Their `norm_output` is not that of the engines: it is
    on by default and norms only what the head reads."""
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    ids, mask = vocabulary()
    draft = make_draft(dtype=torch.float32, **changes)
    ours = Eagle3TrainerModule(
        draft, selected_token_ids=ids, selected_token_mask=mask, ttt_steps=DEPTHS
    )
    documents = make_documents([9, 1, 6, 13, 2, 21], dtype=torch.float32)
    batch = with_logits(padded_batch(documents), make_head(torch.float32))
    out = ours(**batch)
    out.loss.backward()

    draft.config.norm_output = True  # theirs: see above
    model = their_eagle_draft(LlamaForCausalLMEagle3, draft)
    theirs = eagle3.OnlineEagle3Model(model, length=DEPTHS)
    monkeypatch.setattr(eagle3, "LogSoftmaxLoss", EagerLoss)
    loss_K, _, _, correct_K, *_ = theirs(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        target=batch["target_logits"],
        loss_mask=batch["loss_mask"][..., None],
        hidden_states=batch["aux_hidden_states"],
    )
    share_K = batch["input_ids"].numel() / out.charged.clamp_min(1)
    weight_K = 0.8 ** torch.arange(DEPTHS)
    loss = (weight_K / weight_K.sum() * share_K * torch.stack(loss_K)).sum()
    loss.backward()
    step = loss.detach(), gradients_of_eagle(model)
    assert_same_step(step, step_of(out, draft), tolerance=1e-5)
    assert out.correct.tolist() == torch.stack(correct_K).tolist()


class EagerLoss:
    """Their own definition of the loss, which their Triton kernel computes on a GPU."""

    @staticmethod
    def apply(logits, probs, mask):
        from specforge.core.loss import _compute_loss

        return _compute_loss(logits, probs, mask)


def gradients_of_eagle(model):
    return {name.replace("midlayer.", "layers.0."): g for name, g in gradients(model).items()}


def step_of(out, draft):
    return out.loss.detach(), gradients(draft)


@pytest.mark.parametrize("layers", [1, 3])
def test_peagle(specforge, monkeypatch, layers):
    """With our sample in place of theirs, one row at a time. They charge only covered elements: we
    give both a vocabulary that covers all."""
    from specforge.algorithms.peagle import model as peagle
    from specforge.modeling.draft import peagle as draft_of_peagle

    draft = make_parallel_draft(layers=layers, draft_vocab_size=31)
    [document] = make_documents([21])
    settings = {"num_depths": DEPTHS, "mask_token_id": MASK_ID}
    everything = torch.arange(31), torch.ones(31, dtype=torch.bool)
    ours = PEagleTrainerModule(
        draft, selected_token_ids=everything[0], selected_token_mask=everything[1], **settings
    )
    batch = with_logits(padded_batch([document]), make_head())
    out = ours(**batch, seed=SEED)
    out.loss.backward()

    model = their_eagle_draft(draft_of_peagle.PEagleDraftModel, draft)
    theirs = peagle.OnlinePEagleModel(model, **settings)
    [sample] = sampled_elements([document], width=21, depths=DEPTHS, seed=SEED)
    monkeypatch.setattr(peagle, "LogSoftmaxLoss", EagerLoss)
    monkeypatch.setattr(peagle, "generate_cod_sample_indices", lambda **_: sample)
    monkeypatch.setattr(
        draft_of_peagle, "compile_friendly_flex_attention",
        lambda query, key, value, **rest: dense_attention(query, key, value, **rest),
    )  # fmt: skip
    entropy, metrics = theirs(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        target=batch["target_logits"],
        loss_mask=batch["loss_mask"],
        hidden_states=batch["aux_hidden_states"],
    )
    entropy.backward()
    # theirs is a cross entropy, ours a divergence: the gradients are the same
    loss = entropy.detach() - _target_entropy(batch, sample)
    assert_same_step((loss, gradients(model)), step_of(out, draft))
    assert out.valid_tokens == metrics["full_acc_total"] > 0
    assert out.correct.sum() == metrics["full_acc_sum"]


def _target_entropy(batch, sample):
    """The mean entropy of the target's distributions at charged elements."""
    position = sample[0] + sample[1]
    probs = batch["target_logits"][0, position].softmax(-1)
    entropy = -(probs * probs.log()).sum(-1)
    return entropy[batch["loss_mask"][0, position].bool()].mean()


def their_trainer(kind, draft, model, anchors, **options):
    """Their trainer of a block draft, with our anchors in place of theirs."""
    model.double().load_state_dict(draft.state_dict())
    trainer = kind(
        model, *tables(), mask_token_id=MASK_ID, block_size=draft.config.block_size,
        attention_backend="sdpa", loss_decay_gamma=GAMMA, **options,
    )  # fmt: skip
    trainer._sample_anchor_positions = lambda *_, **__: anchors
    return trainer


@pytest.mark.parametrize(
    "changes", [{}, {"block_size": 7}, {"sliding_layers": [1], "sliding_window": 4}]
)
@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_dflash(specforge, weights, changes):
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    draft, documents = make_block_draft(**changes), make_block_documents(LENGTHS)
    ours = make_ours(DFlashTrainerModule, draft, weights=weights)
    batch = padded_batch(documents)
    out, step = our_step(ours, batch)

    model, anchors = DFlashDraftModel(their_config(draft)), anchors_of(ours, batch)
    loss_type = {"decay": "dflash", "dpace": "dpace"}[weights]
    theirs = their_trainer(OnlineDFlashModel, draft, model, anchors, loss_type=loss_type)
    given = unshifted([[d] for d in documents], batch)
    loss, _, metrics = theirs(given["ids"], batch["aux_hidden_states"], given["loss"].double())
    if weights == "dpace":  # they divide by the number of rows, we by the sum of the weights
        loss = loss * (step[0] / loss.detach())
    loss.backward()
    assert_same_step((loss.detach(), gradients(model)), step)
    correct, charged = metrics["ratio_metrics"]["acc"]
    assert (out.correct.sum(), out.valid_tokens) == (correct, charged)


@pytest.mark.parametrize("changes", [{}, {"block_size": 7}])
def test_dspark(specforge, changes):
    from specforge.algorithms.common.dflash_family_model import OnlineDSparkModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    draft, documents = make_spark_draft(**changes), make_block_documents(LENGTHS)
    ours, batch = make_ours(DSparkTrainerModule, draft), padded_batch(documents)
    out, step = our_step(ours, batch)

    config = their_config(draft)
    config.dflash_config |= {
        "markov_rank": draft.config.markov_rank, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    model = DSparkDraftModel(config)
    theirs = their_trainer(OnlineDSparkModel, draft, model, anchors_of(ours, batch))
    given = unshifted([[d] for d in documents], batch)
    loss, *_ = theirs(
        given["ids"], batch["aux_hidden_states"], given["loss"],
        target_last_hidden_states=given["hidden"],
    )  # fmt: skip
    loss.backward()
    assert_same_step((loss.detach(), gradients(model)), step)
    assert out.valid_tokens > 0
