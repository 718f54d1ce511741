"""What a block step is said to compute and keep, against torch's own counts of it."""

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
def test_operations_are_those_that_torch_counts(kind):
    """Exactly. The reference sees every key, so that many pairs are counted on both sides."""
    module, ready, work = make_step(kind, attention="reference")
    found = work.counted(ready.plan)
    rows = found.blocks * work.config.block_size
    dense = replace(found, pairs=rows * (found.tokens + work.config.block_size))
    assert 0.3 * dense.pairs < found.pairs < dense.pairs
    with FlopCounterMode(display=False) as counter:
        module.score(ready).loss.backward()
    asked = 2 * D * work.target_logits(ready.plan)
    unknown = 2 * V * 12 * found.elements if kind == "dspark" else 0  # its counter misses `addmm_`
    assert counter.get_total_flops() + unknown == work.training(dense) + asked
    assert work.planned(ready.plan, 0.0) == work.training(found)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module._hidden(ready, None)
    forward = work.forward(dense)
    assert counter.get_total_flops() == forward["fc"] + forward["layers"]


def held_by_nodes(loss):
    """Bytes of what the MLPs keep themselves, not by torch's own means."""
    nodes, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [before for before, _ in node.next_functions]
    return sum(x.nbytes for node in nodes for x in getattr(node, "kept", None) or ())


@pytest.mark.parametrize("kind", MODULES)
def test_bytes_are_those_that_autograd_keeps(kind):
    module, ready, work = make_step(kind)
    batch = [ready.aux_OD, ready.input_ids, ready.supervision.hidden_SD]
    with watch_saved([*module.parameters(), work.draft.lm_head.weight, *batch]) as saved:
        loss = module.score(ready).loss
    predicted, found = work.kept(work.counted(ready.plan), width=4), held_by_nodes(loss)
    assert found > 0
    found += saved.total_bytes
    assert predicted == pytest.approx(found, rel=0.03)
    loss.backward()
    # what is predicted without a plan: as many anchors as a usual row has places for
    assert work.kept_bytes(T, 4) == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("kind", MODULES)
def test_the_loss_holds_what_a_chunk_is_said_to_hold(kind):
    """Here all elements are one chunk, and a chunk is nearly all that the loss holds."""
    module, ready, work = make_step(kind)
    with torch.no_grad():
        hidden = module._hidden(ready, None)
        task = module._head_task(ready)
        counts = module._coefficients(ready.charged_K, hidden.dtype)[ready.plan.head.depth_N]
        with LiveBytes() as live:
            module._score(ready, task, hidden, counts, None)
    lent = work.draft.lm_head.weight.nbytes + hidden.nbytes
    assert 0.6 < (live.peak - lent) / work.chunk_bytes(T, 4) < 1.2
