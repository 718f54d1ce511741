"""NeMo AutoModel's own DFlash and DSpark trainers compute our losses and gradients (float64)."""

import pytest

from fledge import DFlashTrainerModule, DSparkTrainerModule
from objective.naive_block import (
    MASK_ID,
    make_block_documents,
    make_block_draft,
    make_spark_draft,
)
from objective.naive_eagle3 import packed_batch, padded_batch
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

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def automodel():
    return pytest.importorskip(
        "nemo_automodel.components.speculative", reason="make test-trainers installs it"
    )


@pytest.mark.parametrize("changes", [{}, {"block_size": 7}, {"num_hidden_layers": 3}])
def test_dflash(automodel, monkeypatch, changes):
    from nemo_automodel.components.speculative.dflash import core, draft_qwen3

    draft, documents = make_block_draft(**changes), make_block_documents(LENGTHS)
    ours, batch = make_ours(DFlashTrainerModule, draft), padded_batch(documents)
    out, step = our_step(ours, batch)

    model = draft_qwen3.Qwen3DFlashDraftModel(their_config(draft)).double()
    model.load_state_dict(draft.state_dict())
    theirs = core.DFlashTrainerModule(
        model,
        *tables(),
        mask_token_id=MASK_ID,
        block_size=draft.config.block_size,
        attention_backend="sdpa",
        loss_decay_gamma=GAMMA,
    )
    anchors = anchors_of(ours, batch)
    monkeypatch.setattr(theirs, "_sample_anchor_positions", lambda *_, **__: anchors)
    given = unshifted([[d] for d in documents], batch)
    their_out = theirs(given["ids"], batch["aux_hidden_states"], given["loss"].double())
    their_out.loss.backward()
    assert_same_step((their_out.loss.detach(), gradients(model)), step)
    assert out.valid_tokens == their_out.valid_tokens > 0
    assert out.correct.sum() == their_out.correct_tokens


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("changes", [{}, {"block_size": 7}])
def test_dspark(automodel, monkeypatch, changes, rows):
    from nemo_automodel.components.speculative.dspark import core, draft_qwen3

    draft, documents = make_spark_draft(**changes), make_block_documents(LENGTHS)
    ours, layout = make_ours(DSparkTrainerModule, draft), [[d] for d in documents]
    batch = padded_batch(documents)
    if rows == "packed":
        layout = [documents[:4], documents[4:]]
        batch = packed_batch(layout, 40)
    out, step = our_step(ours, batch)

    config = their_config(
        draft, num_anchors=64, enable_confidence_head=True, confidence_head_with_markov=True,
        markov_rank=draft.config.markov_rank, markov_head_type="vanilla",
    )  # fmt: skip
    model = draft_qwen3.Qwen3DSparkModel(config).double()
    head, embedding = tables()
    model.initialize_embeddings_and_head(embed_tokens=embedding, lm_head=head)
    missing, unexpected = model.load_state_dict(draft.state_dict(), strict=False)
    assert set(missing) == {"embed_tokens.weight", "lm_head.weight"}
    assert not unexpected
    anchors = anchors_of(ours, batch)
    monkeypatch.setattr(draft_qwen3, "sample_anchor_positions", lambda **_: anchors)
    theirs = core.DSparkTrainerModule(model, loss_decay_gamma=GAMMA)
    given = unshifted(layout, batch)
    packing = {n: batch.get(n) for n in ("position_ids", "seq_lens", "doc_remaining")}
    their_out = theirs(
        given["ids"], batch["aux_hidden_states"], given["loss"], given["hidden"], **packing
    )
    their_out.loss.backward()
    assert_same_step((their_out.loss.detach(), gradients(model)), step)
    assert out.charged.tolist() == their_out.accept_rate_per_pos_den.tolist()
