"""Predicted compute and memory of a block step against what torch counts."""

from dataclasses import replace
from types import SimpleNamespace as Namespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from fledge.bench.live_bytes import LiveBytes
from fledge.bench.saved import watch_saved
from fledge.core.head import TargetHead
from fledge.draft.block import BlockDraftModel
from fledge.methods.registry import METHODS
from fledge.objective.dflash import DFlashTrainerModule
from fledge.objective.dspark import DSparkTrainerModule

V, D, T = 320, 64, 400
MODULES = {"dflash": DFlashTrainerModule, "dspark": DSparkTrainerModule}
SETTINGS = {
    "dflash": {"block_size": 8},
    "dspark": {
        "block_size": 5, "sample_from_anchor": True, "markov_rank": 12, "confidence_head": True,
    },
}  # fmt: skip


def make_step(kind, *, attention="fast"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, draft_vocab_size=V, hidden_size=D, target_hidden_size=D, head_dim=16,
        intermediate_size=96, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
        num_aux_hidden_states=5, max_position_embeddings=512, mask_token_id=V - 1,
        **SETTINGS[kind],
    )  # fmt: skip
    draft = BlockDraftModel(config)
    head = Namespace(weight=torch.randn(V, D))
    draft.copy_embeddings_from_target(head)
    ids, mask = torch.arange(V), torch.ones(V, dtype=torch.bool)
    draft.set_vocab_mapping(ids, mask)
    draft.copy_head_from_target(head)
    module = MODULES[kind](
        draft, selected_token_ids=ids, selected_token_mask=mask, anchors=700, attention=attention,
        target_head=TargetHead(head.weight),
    )  # fmt: skip
    batch = {
        "input_ids": torch.randint(0, V, (1, T)),
        "attention_mask": torch.ones(1, T, dtype=torch.long),
        "loss_mask": torch.ones(1, T, dtype=torch.long),
        "aux_hidden_states": torch.randn(1, T, 5 * D),
        "target_last_hidden_states": torch.randn(1, T, D),
    }
    work = METHODS[kind].work(draft, METHODS[kind].section.model_validate({"anchors": 700}))
    return module, module.prepare_inputs(**batch, seed=3), work


@pytest.mark.parametrize("kind", MODULES)
def test_predicted_operations_match_torchs_count(kind):
    """Counts match exactly. The reference attends densely, so `pairs` is set to all pairs."""
    module, ready, work = make_step(kind, attention="reference")
    counts = work.counted(ready.plan)
    rows = counts.blocks * work.config.block_size
    dense = replace(counts, pairs=rows * (counts.tokens + work.config.block_size))
    assert 0.3 * dense.pairs < counts.pairs < dense.pairs
    with FlopCounterMode(display=False) as counter:
        module.score(ready).loss.backward()
    target_flops = 2 * D * work.target_logits(ready.plan)
    # torch's counter misses `addmm_`
    uncounted = 2 * V * 12 * counts.elements if kind == "dspark" else 0
    assert counter.get_total_flops() + uncounted == work.training(dense) + target_flops
    assert work.planned(ready.plan, 0.0) == work.training(counts)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module._hidden(ready, None)
    forward = work.forward(dense)
    assert counter.get_total_flops() == forward["fc"] + forward["layers"]


def kept_by_nodes(loss):
    """Bytes that the MLPs keep on their graph nodes, outside torch's saved tensors."""
    nodes, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return sum(x.nbytes for node in nodes for x in getattr(node, "kept", None) or ())


@pytest.mark.parametrize("kind", MODULES)
def test_predicted_bytes_match_what_autograd_saves(kind):
    module, ready, work = make_step(kind)
    batch = [ready.aux_OD, ready.input_ids, ready.supervision.hidden_SD]
    with watch_saved([*module.parameters(), work.draft.lm_head.weight, *batch]) as saved:
        loss = module.score(ready).loss
    predicted, measured = work.kept(work.counted(ready.plan), width=4), kept_by_nodes(loss)
    assert measured > 0
    measured += saved.total_bytes
    assert predicted == pytest.approx(measured, rel=0.03)
    loss.backward()
    # predicted without a plan, assuming as many anchors as a typical row has room for
    assert work.kept_bytes(T, 4) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("kind", MODULES)
def test_predicted_chunk_bytes_match_the_peak_of_the_loss(kind):
    """Here all elements form one chunk, which accounts for nearly all memory of the loss."""
    module, ready, work = make_step(kind)
    with torch.no_grad():
        hidden = module._hidden(ready, None)
        task = module._head_task(ready)
        coefficients = module._coefficients(ready.charged_K, hidden.dtype)[ready.plan.head.depth_N]
        with LiveBytes() as live:
            module._score(ready, task, hidden, coefficients, None)
    inputs = work.draft.lm_head.weight.nbytes + hidden.nbytes
    assert 0.6 < (live.peak - inputs) / work.chunk_bytes(T, 4) < 1.2
