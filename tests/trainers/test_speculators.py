"""speculators' own training passes compute our losses, counts and gradients (float64).

What differs, and how the two are made equal here (docs/moving.md says what it means for users):

- They train one packed row at a time. Rollouts and blocks run over the end of a document and are
  charged for supervised tokens at the beginning of the next one. Documents therefore begin with an
  unsupervised prompt, except those for P-EAGLE, where our sample has no such rollouts.
- They charge EAGLE-3 also where the target's top token is outside the draft vocabulary. Their loss
  mask gets our coverage.
- They sum EAGLE-3's mean losses of all depths, we take the weighted mean. They divide DFlash's and
  DSpark's weighted losses by the number of charged tokens, we by the sum of the weights. All their
  denominators have a small constant added.
- They compare with the target only. For our losses with the text, documents consist of the
  target's top tokens.
- DSpark's slot that reads token t and predicts token t + 1 is charged by the loss mask of t, with
  half our distance. We charge it by the mask of t + 1, up to the first token that is not
  supervised. Their mask is shifted, answers have no gaps, and their distance has twice the weight.
- They train neither the head of EAGLE-3 and P-EAGLE nor EAGLE-3's embedding. Here both train the
  head, and neither that embedding.
- Sliding windows: see the test.
"""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fledge import Eagle3TrainerModule, PEagleTrainerModule
from fledge.methods.block.objective import DFlashTrainerModule, DSparkTrainerModule
from objective.naive_block import MASK_ID, make_block_documents, make_block_draft, make_spark_draft
from objective.naive_eagle3 import (
    D,
    make_documents,
    make_draft,
    make_head,
    packed_batch,
    vocabulary,
)
from objective.naive_peagle import make_parallel_draft
from trainers.blocks import FP64, GAMMA, SEED, anchors_of, make_ours, our_step, tables, their_config
from trainers.compared import assert_same_step, dense_attention, gradients, sampled_elements

pytestmark = pytest.mark.engine

LENGTHS, PADDING, DEPTHS, DECAY = [17, 3, 40, 1, 25, 60], 9, 4, 0.7
PROMPT = 7  # no rollout and no block is longer
# a draft as wide as the target, which they require
SIZES = {"hidden_size": D, "num_attention_heads": 5, "num_key_value_heads": 1}
BLOCKS = [{}, {"block_size": 7}, {"num_hidden_layers": 3}]
TOLERANCE = 1e-5  # their norms and losses are in float32
LOSSES = {  # theirs: ours
    "kl_div": "kl", "rkl": "reverse_kl", "jsd": "js", "ce": "hard", "tv": "tv", "nla": "lk_alpha",
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "no GQA": {"num_key_value_heads": 5},
}


@pytest.fixture
def speculators(monkeypatch):
    """Their package, with attention that has a backward pass on a CPU, and without compiling."""
    package = pytest.importorskip("speculators", reason="make test-trainers installs it")
    from speculators.models import attention

    monkeypatch.setattr(attention, "flex_attention", dense_attention)
    with torch.compiler.set_stance("force_eager"):
        yield package


def normed(hidden):
    """The target's last states after its norm, which they apply themselves."""
    width = hidden.shape[-1]
    return F.rms_norm(hidden, (width,), norm_weight(width), eps=1e-6)


def norm_weight(width):
    return torch.linspace(0.5, 2, width, dtype=FP64)


def top_tokens(document, head_VE):
    return (normed(document.hidden) @ head_VE.T).argmax(-1)


def with_prompts(documents):
    return [replace(d, loss=d.loss * (torch.arange(len(d.loss)) >= PROMPT)) for d in documents]


def their_model(speculators, kind, draft, layers, target_head, **settings):
    """Their model with our weights, `layers` as its config, and the target's head and norm."""
    layers._attn_implementation = "simple_flex_attention"
    config = speculators.SpeculatorModelConfig.from_dict({
        "speculators_model_type": kind, "transformer_layer_config": layers,
        "draft_vocab_size": draft.config.draft_vocab_size, **settings,
    })  # fmt: skip
    model = speculators.SpeculatorModel.registered_model_class_from_config(config)(config)
    state = {
        name.replace("xpress_head.", "refiner_head."): x for name, x in draft.state_dict().items()
    }
    state |= {"verifier_lm_head.weight": target_head}
    state["verifier_norm.weight"] = norm_weight(target_head.shape[1])
    for name in ("lm_head", "embed_tokens"):  # which block drafts share with the target
        state.setdefault(f"{name}.weight", getattr(draft, name).weight)
    model.double().load_state_dict(state)
    return model


def their_eagle_model(speculators, draft, **changes):
    head = make_head().weight_VD[vocabulary()[0]]
    names = ("norm_before_residual", "fc_norm", "norm_output", "mask_token_id")
    settings = {name: getattr(draft.config, name) for name in names} | changes
    kind = "peagle" if draft.config.parallel_drafting else "eagle3"
    settings["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    model = their_model(speculators, kind, draft, copy.deepcopy(draft.config), head, **settings)
    model.lm_head.requires_grad_(True)
    return model


def our_batch(documents):
    """One packed row."""
    row = [replace(d, hidden=normed(d.hidden)) for d in documents]
    return packed_batch([row], sum(LENGTHS) + PADDING)


def their_batch(documents, preprocess=None):
    """The same row, packed by their code."""
    from speculators.train.data import CollateFn

    samples = [
        {
            "input_ids": d.ids,
            "hidden_states": d.aux,
            "verifier_last_hidden_states": d.hidden,
            "loss_mask": d.loss,
            "lengths": torch.tensor([len(d.ids)]),
            "position_ids": torch.arange(len(d.ids)),
        }
        for d in documents
    ]
    return CollateFn(sum(LENGTHS) + PADDING, 0, dtype=FP64, preprocess=preprocess)(samples)


def their_pass(model, batch, terms, **options):
    from speculators.losses import resolve_loss_config

    loss_config = resolve_loss_config(terms, "eager")
    return model(**batch, loss_config=loss_config, **options)[1:]


def eagle3_steps(speculators, draft, documents, terms="kl_div", **changes):
    """Our output, their metrics, and the steps of both."""
    from speculators.models.eagle3.data import shift_batch

    draft.freeze_embeddings()
    ids, mask = vocabulary()
    ours = Eagle3TrainerModule(
        draft, selected_token_ids=ids, selected_token_mask=mask, ttt_steps=DEPTHS,
        step_decay=DECAY, loss=LOSSES[terms], target_head=make_head(),
    )  # fmt: skip
    model = their_eagle_model(speculators, draft, **changes)
    out, step = our_step(ours, our_batch(documents))
    head_VE = make_head().weight_VD
    covered = [replace(d, loss=d.loss * mask[top_tokens(d, head_VE)]) for d in documents]
    loss, metrics = their_pass(
        model, their_batch(covered, shift_batch), terms,
        ttt_steps=DEPTHS, ttt_step_loss_decay=DECAY,
    )  # fmt: skip
    loss = loss / sum(DECAY**k for k in range(DEPTHS))
    loss.backward()
    return out, metrics, (loss.detach(), gradients(model)), step


@pytest.mark.parametrize("terms", LOSSES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle3(speculators, variant, terms):
    draft = make_draft(**(SIZES | VARIANTS[variant]))
    documents = with_prompts(make_documents(LENGTHS))
    out, metrics, theirs, ours = eagle3_steps(speculators, draft, documents, terms)
    assert_same_step(theirs, ours, tolerance=TOLERANCE)
    assert out.charged.tolist() == [metrics[f"full_acc_{k}_total"] for k in range(DEPTHS)]
    assert out.correct[0] == metrics["full_acc_0_sum"]


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_wrong_flag_is_detected(speculators, flag):
    draft, documents = make_draft(**SIZES), with_prompts(make_documents(LENGTHS))
    _, _, theirs, ours = eagle3_steps(speculators, draft, documents, **{flag: True})
    with pytest.raises(AssertionError, match="not close"):
        assert_same_step(theirs, ours, tolerance=TOLERANCE)


def test_their_rollouts_run_into_the_next_document(speculators):
    """Without prompts they charge more from depth 1 on."""
    documents = make_documents(LENGTHS, supervised=1.0)
    out, metrics, *_ = eagle3_steps(speculators, make_draft(**SIZES), documents)
    more = [int(metrics[f"full_acc_{k}_total"] - out.charged[k]) for k in range(DEPTHS)]
    assert more[0] == 0 < more[1] <= more[2] <= more[3]


@pytest.mark.parametrize("terms", LOSSES)
@pytest.mark.parametrize("layers", [1, 3])
def test_peagle(speculators, monkeypatch, layers, terms):
    """With our sample in place of theirs. A document has one slot less in their rows."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.models.peagle import core

    draft, documents = make_parallel_draft(**SIZES, layers=layers), make_documents(LENGTHS)
    ids, mask = vocabulary()
    ours = PEagleTrainerModule(
        draft, selected_token_ids=ids, selected_token_mask=mask, num_depths=DEPTHS,
        mask_token_id=MASK_ID, loss=LOSSES[terms], target_head=make_head(),
    )  # fmt: skip
    model = their_eagle_model(speculators, draft)
    out, step = our_step(ours, our_batch(documents))

    batch = their_batch(documents, shift_batch)
    width, start = batch["input_ids"].shape[1], 0
    sample = [(torch.arange(width), torch.zeros(width, dtype=torch.long))]
    options = {"width": 0, "depths": DEPTHS, "seed": SEED}
    elements = sampled_elements(documents, **options)
    for document, (anchor, depth) in zip(documents, elements, strict=True):
        sample.append((anchor + start, depth))
        start += len(document.ids) - 1
    sample = tuple(map(torch.cat, zip(*sample, strict=True)))
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: sample)
    loss, metrics = their_pass(model, batch, terms, num_depths=DEPTHS)
    loss.backward()
    assert_same_step((loss.detach(), gradients(model)), step, tolerance=TOLERANCE)
    assert out.charged.tolist() == [metrics[f"position_{k}_acc_total"] for k in range(DEPTHS)]
    # where the target's top token is outside the draft vocabulary, we count the draft as wrong
    assert out.correct.sum() <= metrics["full_acc_sum"]


def answered(documents):
    """Documents whose tokens are the target's top tokens."""
    head, _ = tables()
    tops = [top_tokens(d, head.weight) for d in documents]
    return [
        replace(d, ids=torch.cat([d.ids[:1], top[:-1]]))
        for d, top in zip(documents, tops, strict=True)
    ]


def their_block_model(speculators, kind, draft, **more):
    settings = {"block_size": draft.config.block_size, "mask_token_id": MASK_ID}
    settings["aux_hidden_state_layer_ids"] = list(range(draft.config.num_aux_hidden_states))
    if kind == "dspark":
        settings["markov_rank"] = draft.config.markov_rank
    head, _ = tables()
    layers = their_config(draft)
    return their_model(speculators, kind, draft, layers, head.weight, **settings, **more)


def recorded(monkeypatch, module, name):
    """What a function of theirs will return."""
    function, results = getattr(module, name), []

    def recording(*args, **kwargs):
        results.append(function(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(module, name, recording)
    return results


def assert_same_blocks(
    model, ours, documents, their_documents, monkeypatch, terms, *, counts=True, **options
):
    """Compare steps, with our anchors in place of theirs, and their loss divided as ours is."""
    from speculators.models import dflash

    row = our_batch(documents)
    out, step = our_step(ours, row)
    [anchor_N], [kept_N] = anchors_of(ours, row)
    monkeypatch.setattr(dflash.core, "select_anchors", lambda *_: (anchor_N, kept_N))
    weights = recorded(monkeypatch, dflash.metrics, "dpace_loss_decay")
    loss, metrics = their_pass(
        model, their_batch(their_documents), terms,
        gamma=GAMMA, max_anchors=len(anchor_N), **options,
    )  # fmt: skip
    if not weights:
        weights = [(-torch.arange(len(out.charged)) / GAMMA).exp() * out.charged]
    loss = loss * out.charged.sum() / weights[0].sum()
    loss.backward()
    found = {n.replace("refiner_head.", "xpress_head."): x for n, x in gradients(model).items()}
    assert_same_step((loss.detach(), found), step, tolerance=TOLERANCE)
    if not counts:
        return
    places = range(ours.draft_model.spec.first_place, model.block_size)
    assert out.charged.tolist() == [metrics[f"position_{k}_acc_total"] for k in places]
    assert out.correct.tolist() == [metrics[f"position_{k}_acc_sum"] for k in places]
    assert out.step_prefix_hits.sum() == metrics["eal_sum"] - metrics["eal_total"]


@pytest.mark.parametrize("terms", LOSSES)
@pytest.mark.parametrize("changes", BLOCKS)
def test_dflash(speculators, monkeypatch, changes, terms):
    draft = make_block_draft(**changes)
    documents = with_prompts(make_block_documents(LENGTHS))
    ours = make_ours(DFlashTrainerModule, draft, loss=LOSSES[terms])
    model = their_block_model(speculators, "dflash", draft)
    assert_same_blocks(model, ours, documents, documents, monkeypatch, terms)


@pytest.mark.parametrize("weights", ["fixed-exp-decay", "dpace"])
@pytest.mark.parametrize("changes", BLOCKS)
def test_dflash_by_text(speculators, monkeypatch, changes, weights):
    draft = make_block_draft(**changes)
    documents = answered(with_prompts(make_block_documents(LENGTHS)))
    ours = make_ours(DFlashTrainerModule, draft, weights=weights.removeprefix("fixed-exp-"))
    model = their_block_model(speculators, "dflash", draft)
    assert_same_blocks(
        model, ours, documents, documents, monkeypatch, "ce", per_position_loss_weight=weights
    )


@pytest.mark.parametrize(
    ("window", "same"), [(64, nullcontext()), (4, pytest.raises(AssertionError, match="not close"))]
)
def test_their_windows_start_at_the_block(speculators, monkeypatch, window, same):
    """All slots of a sliding layer see the same `sliding_window` tokens before the block. Ours
    counts from each slot: equal only where the window is longer than every document."""
    draft = make_block_draft(sliding_layers=[1], sliding_window=window)
    documents = with_prompts(make_block_documents(LENGTHS))
    ours = make_ours(DFlashTrainerModule, draft, loss="kl")
    model = their_block_model(speculators, "dflash", draft)
    with same:
        assert_same_blocks(model, ours, documents, documents, monkeypatch, "kl_div")


@pytest.mark.parametrize("changes", BLOCKS)
def test_dspark(speculators, monkeypatch, changes):
    from speculators.losses import resolve_loss_config

    draft = make_spark_draft(**changes)
    documents = answered(with_prompts(make_block_documents(LENGTHS, supervised=1.0)))
    shifted = [replace(d, loss=F.pad(d.loss[1:], (0, 1))) for d in documents]
    ours = make_ours(DSparkTrainerModule, draft)
    model = their_block_model(speculators, "dspark", draft)
    [(tv_loss, _)] = resolve_loss_config("tv", "eager").values()
    assert_same_blocks(
        model, ours, documents, shifted, monkeypatch, '{"ce": 0.1, "tv": 1.8}', tv_loss_fn=tv_loss
    )
