"""What `fledge plan` counts of a step without memory, for every method, against real steps."""

from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from fledge.core import products as own_products
from fledge.core.head import TargetHead
from fledge.core.rows import TokenRow, shift_left
from fledge.data.pack import Piece, collate
from fledge.methods.base import TrainerInputs
from fledge.methods.registry import METHODS
from fledge.rollout import attention
from fledge.rollout.attention import prefix_visible
from fledge.training.planning.step_cost import MetaStep, _counter, without_memory
from live_bytes import watch_saved

V, W, D = 321, 205, 64
MARKOV_RANK = 12
# (method, layers of the draft, options of its section)
CASES = [
    ("eagle3", 1, {}),
    ("eagle3", 2, {"ttt_steps": 4, "depth_keep": 0.3}),
    ("eagle3", 3, {"ttt_steps": 1}),
    ("eagle3", 1, {"depth_keep": 0.7}),
    ("peagle", 1, {"down_sample_ratio": 0.7}),
    ("peagle", 3, {"num_depths": 5, "down_sample_ratio": 0.3}),
    ("peagle", 2, {"down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0, "num_depths": 3}),
    ("eagle1", 1, {}),
    ("eagle2", 2, {"draft_tokens": 9}),
    ("mtp", 1, {"ttt_steps": 3, "depth_keep": 0.6}),
    ("dflash", 3, {"block_size": 8, "anchors": 700}),
    ("dflash", 1, {"block_size": 5, "anchors": 150, "loss": "kl", "causal": True}),
    ("dspark", 3, {"block_size": 5, "anchors": 700, "markov_rank": MARKOV_RANK}),
    ("dspark", 2, {"block_size": 3, "anchors": 900, "markov_rank": MARKOV_RANK}),
]
every_case = pytest.mark.parametrize(("kind", "layers", "options"), CASES)


def make_module(kind, layers, options, **further):
    torch.manual_seed(0)
    method = METHODS[kind]
    section = method.section.model_validate({"kind": kind, **options})
    own = {**method.draft_defaults, **method.fixed_draft}.get("draft_vocab_size", W) or V
    settings = {"num_aux_hidden_states": 3} | method.draft_settings(
        section, tokenizer=None, vocab_size=V
    )
    config = LlamaConfig(
        vocab_size=V, draft_vocab_size=own, hidden_size=D, target_hidden_size=D, head_dim=16,
        intermediate_size=96, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=512, **settings, **further,
    )  # fmt: skip
    draft = method.draft_type()(config)
    if method.draft_defaults.get("freeze_embeddings", True):
        draft.freeze_embeddings()
    ids, mask = torch.arange(own), torch.arange(V) < own
    draft.set_vocab_mapping(ids, mask)
    head = TargetHead(torch.randn(V, D))
    if method.fixed_draft.get("head_from_target"):
        table = Namespace(weight=head.weight_VD)
        draft.copy_embeddings_from_target(table)
        draft.copy_head_from_target(table)
    module = method.objective(draft, TrainerInputs(ids, mask, head, None), **section.options())
    paper = without_memory(method, config, draft)
    return module, MetaStep(method, paper, section.options(), torch.float32)


def random_rows(seed, *, lengths=(157, 61, 9, 83), width=333):
    """A pack of documents with several answers each, and padding at its end."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        turns = np.repeat(rng.integers(0, 2, length), rng.integers(1, 40, length))[:length]
        documents.append(TokenRow(rng.integers(0, V, length), turns.astype(np.uint8), "", False))
    pack = tuple(Piece(row, length) for row, length in enumerate(lengths))
    return collate(documents, [pack], width, pad_id=0)


def prepared(module, rows, *, seed=3):
    """A batch whose target's answer is random."""
    shape, aux = rows.input_ids.shape, module.draft_model.config.num_aux_hidden_states
    return module.prepare_inputs(
        input_ids=shift_left(rows.input_ids),
        attention_mask=rows.attention_mask,
        loss_mask=shift_left(rows.loss_mask),
        aux_hidden_states=torch.randn(*shape, aux * D),
        target_last_hidden_states=torch.randn(*shape, D),
        plan=module.plan_rows(rows, seed),
    )


def kept_by_nodes(loss):
    """Bytes that the MLPs keep on their graph nodes, outside torch's saved tensors."""
    nodes, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return sum(x.nbytes for node in nodes for x in getattr(node, "kept", None) or ())


@every_case
@pytest.mark.parametrize("further", [{}, {"fc_norm": True, "attention_bias": True}])
def test_a_step_without_memory_costs_what_a_real_one_does(
    kind, layers, options, further, monkeypatch
):
    """All products but those of attention, of which torch's path computes masked pairs as well."""
    if further and kind not in ("eagle3", "peagle"):
        further = {"fc_bias": True} if kind in ("eagle1", "eagle2") else {}
    module, step = make_module(kind, layers, options, **further)
    rows = random_rows(1)
    monkeypatch.setattr(own_products, "_FEWEST", 2**62)  # oneDNN's are not counted
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
    with _counter() as counter:
        ready = prepared(module, rows)
        shared = [module.draft_model.lm_head.weight, module.draft_model.embed_tokens.weight]
        batch = [ready.aux_OD, ready.input_ids, ready.supervision.hidden_SD]
        with watch_saved([*module.parameters(), *shared, *batch]) as saved:
            loss = module.score(ready).loss
        measured = saved.total_bytes + kept_by_nodes(loss)
        loss.backward()
    counts = counter.get_flop_counts()["Global"]
    real = sum(counts.get(op, 0) for op in products)
    cost = step.training(rows, seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_count_products", lambda *_: None)
        without_attention = step.training(rows, seed=3).operations
    inside_blocks = hasattr(ready.plan, "blocks")  # products of these remain
    assert real <= without_attention <= real * (1.1 if inside_blocks else 1)
    if kind in ("eagle3", "eagle1", "eagle2"):
        plan, last = ready.plan, layers - 1
        slots, lower = len(plan.slot_T), [plan.every, *plan.depths[1:]]
        pairs = [sum(int(prefix_visible(rows, slots).sum()) for rows in depths)
                 for depths in [lower] * last + [plan.depths]]  # fmt: skip
        width = module.draft_model.config.num_attention_heads * 16
        assert cost.operations - without_attention == 2 * 6 * width * sum(pairs)
    # here torch keeps copies at norms, where a GPU keeps their input; all elements are one chunk
    logits = 4 * module.draft_model.config.draft_vocab_size * len(ready.plan.head)
    assert 0.6 * measured < cost.bytes < 1.05 * measured + 8 * logits


@pytest.mark.parametrize(
    ("kind", "option", "values"),
    [
        ("peagle", "down_sample_ratio", (0.2, 0.3, 0.5, 0.7, 0.9, 1.0)),
        ("peagle", "num_depths", (1, 2, 5, 9)),
        ("eagle3", "depth_keep", (0.1, 0.3, 0.6, 0.9, 1.0)),
        ("eagle3", "ttt_steps", (1, 2, 3, 7)),
        ("dflash", "anchors", (20, 100, 300, 700)),
        ("dspark", "block_size", (1, 3, 7)),
    ],
)
def test_more_elements_cost_more(kind, option, values):
    rows, costs = random_rows(4), []
    for value in values:
        _, step = make_module(kind, 2, {option: value})
        cost = step.training(rows)
        costs.append((cost.operations, cost.bytes))
    for cost in zip(*costs, strict=True):
        assert list(cost) == sorted(set(cost))
