"""Other trainers' own Domino, DFlash 2, XPress and JetSpec compute our losses and gradients (fp64).

What differs, and how the two are made equal here:

- AutoModel excludes slots whose right token is no candidate; so does our `missing="skip"`.
- speculators divides by the number of tokens, we by the sum of the weights; it compares with the
  target's top token, as ours does with a loss against the target's distribution.
- speculators' XPress reads the token before the block's first one in slot 0, vLLM the first one
  itself, as ours does: their tokens are replaced.
"""

import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fledge.methods.block.heads.domino import DominoTrainerModule
from fledge.methods.block.heads.selector import DFlash2TrainerModule
from fledge.methods.block.heads.xpress import XPressTrainerModule
from fledge.methods.block.objective import DFlashTrainerModule
from objective.naive_block import MASK_ID, make_block_documents, make_head_draft
from objective.naive_eagle3 import padded_batch
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
from trainers.compared import assert_same_step, gradients
from trainers.test_speculators import LENGTHS as PROMPTED
from trainers.test_speculators import (
    assert_same_blocks,
    speculators,
    their_block_model,
    with_prompts,
)

__all__ = ["speculators"]  # a fixture
pytestmark = pytest.mark.engine
SELECTOR = {
    "candidate_head": "selector", "candidates": 4, "selector_rank": 5, "conv_kernel_size": 2,
    "conv_group_size": 4,
}  # fmt: skip
DOMINO = {"token_head": "domino", "markov_rank": 5, "gru_hidden_dim": 6}
WINDOWS = {"sliding_layers": [0, 1], "sliding_window": 64, "sliding_both_ways": True}


def named_as_theirs(gradients, **prefixes):
    """Our gradients under their names."""
    renamed = dict(gradients)
    for ours, theirs in prefixes.items():
        renamed = {re.sub(rf"^{ours}\.", theirs, name): grad for name, grad in renamed.items()}
    return renamed


def inputs_of(ours, documents):
    batch = padded_batch(documents)
    given = unshifted([[d] for d in documents], batch)
    return batch, given, anchors_of(ours, batch)


@pytest.fixture(scope="module")
def automodel():
    return pytest.importorskip(
        "nemo_automodel.components.speculative", reason="make test-trainers installs it"
    )


def their_trainer(kind, draft, model, anchors, **options):
    state = {name.removeprefix("domino_head."): x for name, x in draft.state_dict().items()}
    model.double().load_state_dict(state)
    trainer = kind(
        model, *tables(), mask_token_id=MASK_ID, block_size=draft.config.block_size,
        attention_backend="sdpa", **options,
    )  # fmt: skip
    trainer._sample_anchor_positions = lambda *_, **__: anchors
    return trainer


def domino_config(draft):
    config = their_config(draft)
    config.dflash_config |= {
        "projector_type": "domino", "emb_dim": 5, "gru_hidden_dim": 6, "pure_draft_prefix_len": 1,
        "shift_label": draft.config.sample_from_anchor,
    }  # fmt: skip
    return config


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("trainer", ["automodel", "specforge"])
def test_domino(trainer, shift, request):
    if trainer == "automodel":
        request.getfixturevalue("automodel")
        from nemo_automodel.components.speculative.dflash.domino_core import (
            DominoTrainerModule as T,
        )
        from nemo_automodel.components.speculative.dflash.draft_qwen3 import (
            Qwen3DFlashDraftModel as Draft,
        )
    else:
        pytest.importorskip("specforge", reason="make test-trainers installs it")
        from specforge.algorithms.common.dflash_family_model import OnlineDominoModel as T
        from specforge.modeling.draft.domino import DominoDraftModel as Draft

    draft = make_head_draft(sample_from_anchor=shift, **DOMINO)
    documents = make_block_documents(LENGTHS)
    ours = make_ours(DominoTrainerModule, draft, plain_weight=0.5)
    ours.begin_step(0.5)
    batch, given, anchors = inputs_of(ours, documents)
    _, (loss, step) = our_step(ours, batch)
    model = Draft(domino_config(draft))
    theirs = their_trainer(T, draft, model, anchors, shift_label=shift, loss_decay_gamma=GAMMA)
    out = theirs(given["ids"], batch["aux_hidden_states"], given["loss"].double(), lambda_base=0.25)
    their_loss = out[0] if isinstance(out, tuple) else out.loss
    their_loss.backward()
    ours_named = named_as_theirs(step, domino_head="")
    assert_same_step((their_loss.detach(), gradients(model)), (loss, ours_named))


def test_modelopts_domino():
    """It runs the target itself: a tiny one, with our embedding and head."""
    speculative = pytest.importorskip(
        "modelopt.torch.speculative", reason="make test-trainers installs it"
    )
    draft = make_head_draft(sample_from_anchor=True, **DOMINO)
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    )
    sizes = {name: getattr(draft.config, name) for name in names}
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4)).double()
    head, embedding = tables()
    target.lm_head.weight, target.model.embed_tokens.weight = head.weight, embedding.weight
    documents = []
    for document in make_block_documents([20, 24, 16]):  # whole blocks of 4
        with torch.no_grad():
            states = target.model(document.ids[None], output_hidden_states=True).hidden_states
        documents.append(replace(document, aux=torch.cat([states[1][0], states[2][0]], dim=-1)))
    ours = make_ours(DominoTrainerModule, draft, plain_weight=0.5)
    ours.begin_step(0.5)
    rows = padded_batch(documents)
    _, (loss, step) = our_step(ours, rows)
    layers = {
        **{name: sizes[name] for name in names[2:6]}, "num_hidden_layers": 2,
        "target_layer_ids": [0, 1], **domino_config(draft).dflash_config,
    }  # fmt: skip
    settings = {
        "dflash_block_size": 4, "dflash_mask_token_id": MASK_ID, "dflash_use_torch_compile": False,
        "dflash_loss_decay_factor": GAMMA, "dflash_architecture_config": layers,
    }  # fmt: skip
    speculative.convert(target, [("dflash", settings)])
    model, anchors = target.dflash_module, anchors_of(ours, rows)
    state = {name.removeprefix("domino_head."): x for name, x in draft.state_dict().items()}
    model.double().load_state_dict(state, strict=False)
    target.train()
    target._lambda_base = 0.25
    target._sample_anchor_positions = lambda *_: anchors
    given = unshifted([[d] for d in documents], rows)
    labels = torch.where(given["loss"].bool(), given["ids"], -100)
    out = target(given["ids"], attention_mask=rows["attention_mask"], labels=labels)
    out.loss.backward()
    ours_named = named_as_theirs(step, domino_head="")
    assert_same_step((out.loss.detach(), gradients(model)), (loss, ours_named))


@pytest.mark.parametrize("changes", [{}, {"block_size": 7}])
def test_automodels_dflash2(automodel, changes):
    from nemo_automodel.components.speculative.dflash.dflash2_core import DFlash2TrainerModule as T
    from nemo_automodel.components.speculative.dflash.draft_qwen3_dflash2 import (
        Qwen3DFlash2DraftModel,
    )

    draft = make_head_draft(**SELECTOR, **changes)
    documents = make_block_documents(LENGTHS)
    ours = make_ours(DFlash2TrainerModule, draft, missing="skip", selector_weight=0.7)
    batch, given, anchors = inputs_of(ours, documents)
    _, step = our_step(ours, batch)
    config = their_config(draft)
    config.dflash_config |= {
        "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 4,
        "block_size": draft.config.block_size,
    }  # fmt: skip
    model = Qwen3DFlash2DraftModel(config)
    theirs = their_trainer(
        T, draft, model, anchors, selector_loss_weight=0.7, loss_decay_gamma=GAMMA
    )
    out = theirs(given["ids"], batch["aux_hidden_states"], given["loss"].double())
    out.loss.backward()
    assert_same_step((out.loss.detach(), gradients(model)), step)


def test_automodels_jetspec(automodel):
    """It is DFlash with causal blocks, the target's distribution and equal weights."""
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel
    from nemo_automodel.components.speculative.dflash.jetspec_core import JetSpecTrainerModule

    draft, documents = make_head_draft(causal=True), make_block_documents(LENGTHS)
    ours = make_ours(DFlashTrainerModule, draft, loss="kl")
    ours.gamma = 1e12
    batch, given, anchors = inputs_of(ours, documents)
    _, step = our_step(ours, batch)
    model = Qwen3DFlashDraftModel(their_config(draft))
    theirs = their_trainer(JetSpecTrainerModule, draft, model, anchors)
    logits = given["hidden"] @ tables()[0].weight.T
    out = theirs(given["ids"], batch["aux_hidden_states"], given["loss"].double(), logits)
    out.loss.backward()
    # theirs may be a cross entropy: the gradients are the same
    assert_same_step((step[0], gradients(model)), step)
    assert out.loss > 0


@pytest.mark.parametrize("changes", [{}, WINDOWS])
def test_speculators_dflash2(speculators, monkeypatch, changes):
    from speculators.losses import resolve_loss_config

    draft = make_head_draft(**SELECTOR, **changes)
    documents = with_prompts(make_block_documents(PROMPTED))
    ours = make_ours(DFlash2TrainerModule, draft, loss="kl")
    model = their_block_model(
        speculators, "dflash2", draft, conv_kernel_size=2, conv_group_size=4, selector_rank=5,
        selector_top_k=4,
    )  # fmt: skip
    [(tv_loss, _)] = resolve_loss_config("tv", "eager").values()
    assert_same_blocks(
        model, ours, documents, documents, monkeypatch, "kl_div", tv_loss_fn=tv_loss, counts=False
    )


def test_speculators_xpress(speculators, monkeypatch):
    draft = make_head_draft(token_head="xpress", markov_rank=5, num_jacobi_passes=3)
    documents = with_prompts(make_block_documents(PROMPTED, supervised=1.0))
    ours = make_ours(XPressTrainerModule, draft)
    model = their_block_model(speculators, "xpress", draft, xpress_rank=5)
    bias = model.refiner_head.block_bias

    def as_served(previous, **rest):
        return bias(torch.cat([previous[:, 1:2], previous[:, 1:]], dim=1), **rest)

    monkeypatch.setattr(model.refiner_head, "block_bias", as_served)
    assert_same_blocks(
        model, ours, documents, documents, monkeypatch, '{"ce": 0.1, "tv": 0.9}', counts=False
    )
