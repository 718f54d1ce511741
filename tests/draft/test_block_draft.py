"""The DFlash and DSpark draft: its states against a textbook version, its files, shared tables."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from fledge.core.errors import BadInput
from fledge.methods.block.plan import BlockRows
from fledge.methods.registry import load_draft, method_of
from fledge.methods.shared.layer import LayerWeights
from objective.naive_block import (
    Table,
    V,
    block_states,
    make_block_documents,
    make_block_draft,
    make_spark_draft,
)

VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "sliding": {"sliding_layers": [0], "sliding_window": 5},
    "a window within the block": {"sliding_layers": [0, 1], "sliding_window": 2},
    "one kv head, 3 layers": {"num_key_value_heads": 1, "num_hidden_layers": 3},
    "blocks of 7": {"block_size": 7},
    "partial rotary": {"partial_rotary_factor": 0.5},
    "DSpark": {"sample_from_anchor": True, "markov_rank": 4},
}


@pytest.mark.parametrize("kind", ["fast", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_states_match_the_textbook(variant, kind):
    """Two documents on one key axis, with blocks at the start, in the middle and at the end."""
    draft = make_block_draft(**VARIANTS[variant])
    documents = make_block_documents([9, 12])
    starts = [(0, 1), (0, 4), (0, 8), (1, 2), (1, 11)]  # document and anchor
    document_begin = [0, 9]
    slot = np.array([document_begin[d] + a - 1 for d, a in starts])
    rows = BlockRows.of(
        slot,
        np.array([document_begin[d] for d, _ in starts]),
        draft.config.block_size,
        torch.device("cpu"),
    )
    aux = torch.cat([d.aux for d in documents])
    position = torch.cat([torch.arange(9), torch.arange(12)])
    newest = torch.stack([documents[d].ids[a] for d, a in starts])
    states = draft(aux, newest, position, rows, attention=kind)
    expected = torch.stack([block_states(draft, documents[d], a) for d, a in starts])
    torch.testing.assert_close(states, expected, rtol=1e-10, atol=1e-11)
    wanted = torch.tensor([17, 3, 8, 4])
    selected = draft(aux, newest, position, rows, wanted_P=wanted, attention=kind)
    torch.testing.assert_close(selected, expected.flatten(0, 1)[wanted], rtol=1e-10, atol=1e-11)


def test_the_context_is_computed_once_for_each_token_and_layer(monkeypatch):
    draft = make_block_draft()
    calls = []
    plain = LayerWeights.project_keys
    monkeypatch.setattr(
        LayerWeights,
        "project_keys",
        lambda self, context: calls.append(context.shape) or plain(self, context),
    )
    document = make_block_documents([12])[0]
    rows = BlockRows.of(np.array([3, 4, 9]), np.zeros(3, np.int64), 4, torch.device("cpu"))
    draft(document.aux, document.ids[:3], torch.arange(12), rows)
    assert calls == [(12, draft.config.hidden_size)] * len(draft.layers)


@pytest.mark.parametrize("make", [make_block_draft, make_spark_draft])
def test_files_contain_the_draft_but_no_tables_of_the_target(make, tmp_path):
    draft = make(dtype=torch.float32, sliding_layers=[1], sliding_window=9, causal=True)
    draft.save_pretrained(tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft")
    names = set(draft.state_dict())
    assert names == set(loaded.state_dict())
    assert not {"embed_tokens.weight", "lm_head.weight"} & names
    layer = {f"layers.0.self_attn.{x}.weight" for x in ("q_norm", "k_norm", "q_proj", "o_proj")}
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", *layer} <= names
    assert all(torch.equal(a, b) for a, b in zip(
        draft.state_dict().values(), loaded.state_dict().values(), strict=True))  # fmt: skip
    for key in ("block_size", "mask_token_id", "causal", "sliding_layers", "sliding_window",
                "sample_from_anchor", "markov_rank", "draft_tokens"):  # fmt: skip
        assert getattr(loaded.config, key) == getattr(draft.config, key), key
    assert method_of(loaded.config) is method_of(draft.config)
    assert method_of(loaded.config).name == ("dspark" if draft.token_head else "dflash")
    with pytest.raises(ValueError, match="its target's embedding and head"):
        loaded.embed(torch.tensor([1]), torch.float32)


def test_the_targets_tables_are_shared_and_never_trained():
    draft = make_block_draft(dtype=torch.float32, tables=False)
    table = Table(V, torch.bfloat16)
    draft.copy_embeddings_from_target(table)
    draft.copy_head_from_target(table)
    assert draft.lm_head.weight.data_ptr() == table.weight.data_ptr()
    assert draft.to(torch.float64).lm_head.weight.dtype == torch.bfloat16  # tables are not cast
    assert not {id(draft.embed_tokens.weight), id(draft.lm_head.weight)} & {
        id(p) for p in draft.parameters()
    }
    with pytest.raises(ValueError, match="embedding: the target's is"):
        draft.copy_embeddings_from_target(Table(V + 1, torch.float32))


def test_a_reduced_vocabulary_uses_its_rows_of_the_head():
    draft = make_block_draft(draft_vocab_size=5)
    with pytest.raises(ValueError, match="vocabulary mapping"):
        draft.copy_head_from_target(Table(V, torch.float64))
    ids = torch.tensor([2, 3, 9, 20, 30])
    draft.set_vocab_mapping(ids)
    draft.copy_head_from_target(Table(V, torch.float64))
    assert torch.equal(draft.lm_head.weight, Table(V, torch.float64).weight[ids])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"block_size": 1}, "block_size: at least 2"),
        ({"target_hidden_size": 10}, "hidden_size: must be the target's"),
        ({"sliding_layers": [2], "sliding_window": 4}, "sliding_layers: of 0 .. 1"),
        ({"sliding_layers": [0]}, "sliding_window: needed"),
        ({"fc_norm": True}, "fc_norm: block drafts have none"),
        ({"mask_token_id": V}, "mask_token_id"),
    ],
)
def test_invalid_configs_are_rejected(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_block_draft(**changes)


def test_a_dspark_draft_can_grow_from_a_dflash_draft():
    dflash = make_block_draft(dtype=torch.float32)
    config = LlamaConfig(**make_spark_draft().config.to_dict())
    grown = method_of(config).grow(dflash, config)
    assert torch.equal(grown.fc.weight, dflash.fc.weight)
    assert not grown.token_head.markov_w2.weight.any()
    wider = LlamaConfig(**make_spark_draft(intermediate_size=24).config.to_dict())
    assert method_of(wider).grow(dflash, wider) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [("1", "block_size: at least 2"), ('"x"', "'block_size' is 'x', expected a whole number")],
)
def test_an_invalid_config_file_is_rejected(tmp_path, value, message):
    make_block_draft(dtype=torch.float32).save_pretrained(tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    path.write_text(path.read_text().replace('"block_size": 4', f'"block_size": {value}'))
    with pytest.raises(BadInput, match=message):
        load_draft(tmp_path / "draft")
