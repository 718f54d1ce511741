"""The co-located target and its batch, used as their specification describes.

Each test quotes the sentence of the specification that it checks.
"""

import dataclasses
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fledge import (
    BadInput,
    Eagle3TargetBackend,
    Eagle3TargetBatch,
    Eagle3TrainerModule,
    HFEagle3TargetModel,
    LlamaEagle3DraftModel,
    PEagleTrainerModule,
)
from fledge import target as target_module
from fledge.methods.shared.config import derive_draft_config
from fledge.target.hf.model import _shift_left_with_zero
from target.contract import packed_rows, padded_rows, some_documents
from target.tiny_models import tiny_model

FIELDS = [
    "aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "logits", "target_probs",
    "position_mask", "position_ids", "seq_lens", "doc_remaining",
]  # fmt: skip


def test_the_batch_has_the_documented_fields_first_and_in_order():
    fields = dataclasses.fields(Eagle3TargetBatch)
    assert [field.name for field in fields][: len(FIELDS)] == FIELDS
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    assert required == FIELDS[:4]
    assert all(field.default is None for field in fields[4:])


def batch_fields(**supervision):
    tokens = dict.fromkeys(("input_ids", "attention_mask", "loss_mask"), torch.ones(1, 4).long())
    return {"aux_hidden_states": torch.zeros(1, 4, 6), **tokens, **supervision}


LOGITS, PROBS = (
    {"logits": torch.zeros(1, 4, 9)},
    {
        "target_probs": torch.zeros(1, 4, 5),
        "position_mask": torch.ones(1, 4, 1),
    },
)


def test_exactly_one_supervision_encoding():
    """ "Carries exactly one supervision encoding (validated in __post_init__)" """
    assert set(Eagle3TargetBatch(**batch_fields(**LOGITS)).to_trainer_inputs()) == {
        "aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "target_logits",
    }  # fmt: skip
    inputs = Eagle3TargetBatch(**batch_fields(**PROBS)).to_trainer_inputs()
    assert {"target_probs", "position_mask"} < set(inputs)
    assert all(isinstance(tensor, torch.Tensor) for tensor in inputs.values())
    positional = Eagle3TargetBatch(*batch_fields().values(), LOGITS["logits"])
    assert positional.logits is LOGITS["logits"]
    for wrong in ({}, LOGITS | PROBS, {"target_probs": PROBS["target_probs"]}):
        with pytest.raises(ValueError, match=r"encoding|belong together"):
            Eagle3TargetBatch(**batch_fields(**wrong))


def trainer_of(kind, model, *, vocabulary=None):
    torch.manual_seed(0)
    size = model.config.vocab_size
    config = derive_draft_config(
        model.config, parallel_drafting=kind is PEagleTrainerModule, mask_token_id=0,
        draft_vocab_size=len(vocabulary) if vocabulary is not None else None,
    )  # fmt: skip
    ids = torch.arange(size) if vocabulary is None else vocabulary
    member = torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
    depth = {"num_depths": 3} if kind is PEagleTrainerModule else {"ttt_steps": 3}
    options = {"selected_token_ids": ids, "selected_token_mask": member, **depth}
    return kind(LlamaEagle3DraftModel(config).eval(), **options)


@pytest.mark.parametrize("kind", [Eagle3TrainerModule, PEagleTrainerModule])
def test_the_trainer_accepts_either_encoding(kind):
    """ "both consumed directly by Eagle3TrainerModule.forward" """
    model, ids = tiny_model("llama"), torch.arange(0, 90, 2)
    logits = HFEagle3TargetModel(model)
    probs = HFEagle3TargetModel(model, supervision="probs")
    probs.set_vocab_mapping(ids)
    trainer = trainer_of(kind, model, vocabulary=ids)
    losses = [
        trainer(**target.generate_batch(*padded_rows()).to_trainer_inputs()).loss
        for target in (logits, probs)
    ]
    assert losses[0] > 0
    assert torch.equal(*losses)


def test_the_constructor_follows_the_specification():
    """`HFEagle3TargetModel(model, aux_layer_ids=None, cp_mesh=None)`; `model = model.eval()`;
    `_cp_size = cp_mesh.size() if cp_mesh is not None else 1`."""
    names = list(inspect.signature(HFEagle3TargetModel).parameters)
    assert names[:3] == ["model", "aux_layer_ids", "cp_mesh"]
    model = tiny_model("llama").train()
    target = HFEagle3TargetModel(model)
    assert isinstance(target, Eagle3TargetBackend)
    assert target.model is model
    assert not model.training
    assert (target.cp_mesh, target._cp_size) == (None, 1)
    mesh = SimpleNamespace(size=lambda: 1)
    alone = HFEagle3TargetModel(model, None, mesh)
    assert alone.cp_mesh is mesh
    assert alone._cp_size == 1
    with pytest.raises(BadInput, match="cp_mesh of size 2"):
        HFEagle3TargetModel(model, cp_mesh=SimpleNamespace(size=lambda: 2))


def test_layers_are_validated_before_any_hook_is_registered():
    """ "Validate aux-layer selection before any forward hooks are registered." """
    model = tiny_model("llama")
    target = HFEagle3TargetModel(model)
    assert target.aux_layer_ids == target._default_aux_layer_ids() == [1, 3, 4]
    assert target._validate_aux_layer_ids((6, 0, 2)) == [6, 0, 2]
    for wrong in ([1, 2], [1, 1, 2], [1, 2, 8], [-1, 0, 1], [0.5, 1, 2]):
        with pytest.raises(ValueError, match="layer"):
            target._validate_aux_layer_ids(wrong)
        with pytest.raises(ValueError, match="layer"):
            HFEagle3TargetModel(model, aux_layer_ids=wrong)
    assert not any(module._forward_hooks for module in model.modules())
    target.generate_batch(*padded_rows())
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match=r"\[3\]"):
        target._check_captured(dict.fromkeys([1, 4], torch.zeros(1)))


class KeyedLayers(nn.Module):
    """One of "AutoModel's custom-impl layouts (where layers is a ModuleDict keyed by str(i))"."""

    def __init__(self, model):
        super().__init__()
        self.embedding, self.rotary = model.model.embed_tokens, model.model.rotary_emb
        self.lm_head, self.norm, self.config = model.lm_head, model.model.norm, model.config
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(model.model.layers)})

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask):
        width = input_ids.shape[1]
        positions = torch.arange(width)[None]
        causal = torch.ones(width, width).tril().bool() & attention_mask[:, None, None].bool()
        mask = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
        hidden = self.embedding(input_ids)
        turn = self.rotary(hidden, positions)
        for key in self.layers:
            out = self.layers[key](
                hidden, attention_mask=mask, position_ids=positions, position_embeddings=turn
            )
            hidden = out[0] if isinstance(out, tuple) else out
        return self.lm_head(self.norm(hidden))


def test_layers_may_be_in_a_module_list_or_a_module_dict():
    """ "Return decoder layers as an ordered list indexable by integer." """
    model = tiny_model("llama")
    listed = HFEagle3TargetModel(model)
    expected = listed.generate_batch(*padded_rows())
    assert listed._get_transformer_layers() == list(model.model.layers)
    keyed = HFEagle3TargetModel(KeyedLayers(model))
    assert keyed._get_transformer_layers() == list(model.model.layers)
    actual = keyed.generate_batch(*padded_rows())
    real = expected.attention_mask.bool()
    torch.testing.assert_close(
        actual.aux_hidden_states[real], expected.aux_hidden_states[real], rtol=1e-4, atol=1e-5
    )
    assert keyed.get_input_embeddings() is model.get_input_embeddings()
    assert isinstance(listed.get_input_embeddings(), nn.Embedding)


def test_sequence_aligned_tensors_shift_left_with_a_zero_tail():
    """ "Shift a batched sequence tensor left and zero-fill the tail." """
    ids, mask, loss = padded_rows()
    batch = HFEagle3TargetModel(tiny_model("llama")).generate_batch(ids, mask, loss)
    for given, shifted in ((ids, batch.input_ids), (loss, batch.loss_mask)):
        assert torch.equal(shifted[:, :-1], given[:, 1:])
        assert not shifted[:, -1].any()
    assert not batch.logits[:, -1].any()
    assert torch.equal(batch.attention_mask, mask)
    assert (batch.position_ids, batch.seq_lens, batch.doc_remaining) == (None, None, None)


def test_the_module_of_the_target_has_the_documented_names():
    """`target.Eagle3TargetBatch`, `target.HFEagle3TargetModel`, `target._shift_left_with_zero`"""
    assert target_module.Eagle3TargetBatch is Eagle3TargetBatch
    assert target_module.HFEagle3TargetModel is HFEagle3TargetModel
    assert target_module._shift_left_with_zero is _shift_left_with_zero
    with pytest.raises(AttributeError, match="no attribute 'Eagle3TargetBach'"):
        _ = target_module.Eagle3TargetBach
    code = "import sys, fledge.target; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_shift_can_be_imported_beside_the_target():
    """`_shift_left_with_zero(tensor: torch.Tensor) -> torch.Tensor`"""
    assert _shift_left_with_zero(tensor=torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [
        [2, 3, 0],
        [5, 6, 0],
    ]
    states = torch.randn(2, 4, 3)
    shifted = _shift_left_with_zero(states)
    assert torch.equal(shifted[:, :-1], states[:, 1:])
    assert not shifted[:, -1].any()


@torch.no_grad()
def block_causal(model, ids, mask, position_ids, seq_lens):
    """As the specification states: a [B, 1, T, T] mask and per-document positions."""
    rows, width = ids.shape
    owner = torch.stack([torch.repeat_interleave(torch.arange(len(row)), row) for row in seq_lens])
    allowed = (owner[:, :, None] == owner[:, None]) & torch.ones(width, width).tril().bool()
    allowed = (allowed & mask[:, None].bool()) | torch.eye(width, dtype=torch.bool)
    bias = torch.zeros(rows, 1, width, width).masked_fill(~allowed[:, None], -1e30)
    return model(
        input_ids=ids, attention_mask=bias, position_ids=position_ids, output_hidden_states=True
    )


@pytest.mark.parametrize("given", [5, 6], ids=["without doc_remaining", "with doc_remaining"])
def test_packed_documents_never_see_each_other(given):
    """ "With seq_lens (packing), the target runs with a [B, 1, T, T] block-causal mask and
    per-document position_ids so its outputs respect document boundaries; the packing metadata is
    forwarded unshifted to the trainer." """
    packed = packed_rows(some_documents(), 14)
    model = tiny_model("llama")
    target = HFEagle3TargetModel(model)
    batch = target.generate_batch(*packed[:given])
    ids, mask, _, position_ids, seq_lens, doc_remaining = packed
    dense = block_causal(model, ids, mask, position_ids, seq_lens)
    aux = torch.cat([dense.hidden_states[i + 1] for i in target.aux_layer_ids], dim=-1)
    real = mask.bool()
    torch.testing.assert_close(batch.aux_hidden_states[real], aux[real], rtol=1e-4, atol=1e-5)
    followed = mask[:, 1:].bool()
    torch.testing.assert_close(
        batch.logits[:, :-1][followed], dense.logits[:, 1:][followed], rtol=1e-4, atol=1e-5
    )
    assert torch.equal(batch.position_ids, position_ids)
    assert torch.equal(batch.seq_lens, seq_lens)
    assert torch.equal(batch.doc_remaining, doc_remaining)
    assert {"position_ids", "seq_lens", "doc_remaining"} < set(batch.to_trainer_inputs())


@pytest.mark.parametrize("kind", [Eagle3TrainerModule, PEagleTrainerModule])
def test_packing_reaches_the_trainer_with_or_without_doc_remaining(kind):
    """N packed documents are charged like N rows, with either form of packing metadata."""
    documents, model = some_documents(), tiny_model("llama")
    target, trainer = HFEagle3TargetModel(model), trainer_of(kind, model)
    batch = target.generate_batch(*packed_rows(documents, 14))
    inputs = batch.to_trainer_inputs()
    one_per_row = [[tokens] for row in documents for tokens in row]
    rows = target.generate_batch(*packed_rows(one_per_row, 14)[:3]).to_trainer_inputs()
    expected = trainer(**rows)
    for omitted in ([], ["doc_remaining"]):
        actual = trainer(**{k: v for k, v in inputs.items() if k not in omitted})
        assert torch.equal(actual.charged, expected.charged)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-6)
    rebuilt = Eagle3TargetBatch(
        **{f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        | {"doc_remaining": None}
    )
    assert torch.equal(rebuilt.doc_remaining, batch.doc_remaining)
