"""Predicted compute and memory of a step, for every method, against what torch counts."""

from dataclasses import replace
from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from fledge.bench.cost import LiveBytes, watch_saved
from fledge.core.head import TargetHead
from fledge.core.rows import TokenRow, shift_left
from fledge.data.pack import Piece, collate
from fledge.methods.base import TrainerInputs
from fledge.methods.peagle.draft import parallel_visible
from fledge.methods.registry import METHODS
from fledge.rollout.attention import prefix_visible

V, W, D = 321, 205, 64
MARKOV_RANK = 12
# (method, layers of the draft, options of its section)
CASES = [
    ("eagle3", 1, {}),
    ("eagle3", 2, {"ttt_steps": 4, "depth_keep": 0.3}),
    ("eagle3", 3, {"ttt_steps": 1}),
    ("eagle3", 1, {"depth_keep": 0.7, "feature_dropout": 0.2}),
    ("peagle", 1, {"down_sample_ratio": 0.7}),
    ("peagle", 3, {"num_depths": 5, "down_sample_ratio": 0.3}),
    ("peagle", 2, {"down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0, "num_depths": 3}),
    ("peagle", 2, {"max_anchors": 17}),
    ("eagle1", 1, {}),
    ("eagle2", 2, {"draft_tokens": 9}),
    ("dflash", 3, {"block_size": 8, "anchors": 700}),
    ("dflash", 1, {"block_size": 5, "anchors": 150, "loss": "kl", "causal": True}),
    ("dspark", 3, {"block_size": 5, "anchors": 700, "markov_rank": MARKOV_RANK}),
    ("dspark", 2, {"block_size": 3, "anchors": 900, "markov_rank": MARKOV_RANK}),
]
every_case = pytest.mark.parametrize(("kind", "layers", "options"), CASES)


def make_module(kind, layers, options, *, attention="fast", **further):
    torch.manual_seed(0)
    method = METHODS[kind]
    section = method.section.model_validate({"kind": kind, **options})
    own = {**method.draft_defaults, **method.fixed_draft}.get("draft_vocab_size", W) or V
    settings = {"num_aux_hidden_states": 3} | method.bench_draft_settings(V, section)
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
    module.attention = attention
    return module, method.work(draft, section)


def random_rows(seed, *, lengths=(157, 61, 9, 83), width=333):
    """A pack of documents with several answers each, and padding at its end."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        turns = np.repeat(rng.integers(0, 2, length), rng.integers(1, 40, length))[:length]
        documents.append(TokenRow(rng.integers(0, V, length), turns.astype(np.uint8), "", False))
    pack = tuple(Piece(row, 0, length) for row, length in enumerate(lengths))
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


def make_step(kind, layers, options, **further):
    module, work = make_module(kind, layers, options, **further)
    return module, prepared(module, random_rows(1)), work


@every_case
@pytest.mark.parametrize("seed", [0, 5])
def test_rows_are_laid_out_as_in_training(kind, layers, options, seed):
    module, work = make_module(kind, layers, options)
    rows = random_rows(seed, lengths=(31 + seed, 2, 107), width=151 + seed)
    plan = module.plan_rows(rows, seed)
    n = work.trained(rows, seed)
    assert n == work.counted(plan)
    assert n.elements == len(plan.head)
    if kind in ("eagle3", "eagle1", "eagle2", "peagle"):
        assert n.anchors + n.chain == sum(plan.counts)
        assert n.pairs == _visible_pairs(plan)
    else:
        blocks, causal = plan.blocks, module.draft_model.config.causal
        inside = sum(slot + 1 if causal else blocks.size for slot in range(blocks.size))
        contexts = (blocks.slot_N - blocks.first_N + 1).tolist()
        assert n.pairs == sum(blocks.size * context + inside for context in contexts) > 0
    module.draft_model.eval()
    evaluated = work.counted(module.plan_rows(rows, 0))
    forward = sum(work.forward(evaluated).values())
    assert work.evaluation(rows) >= 2 * forward  # a replay samples nothing


def _visible_pairs(plan):
    """Pairs of query and visible key in the last layer, from the definitions."""
    slots = len(plan.slot_T)
    if hasattr(plan, "segments"):
        [segment] = plan.segments
        return int(parallel_visible(segment.asking, segment.counts, slots).sum())
    return sum(
        int(prefix_visible(rows, slots).sum()) + depth * len(rows)
        for depth, rows in enumerate(plan.depths)
    )


def test_elements_are_those_of_the_rules():
    """Slot t has an element at depth k if token t + 1 + k is supervised and in its document."""
    rows = random_rows(2)
    loss = rows.loss_mask[0].numpy() * rows.attention_mask[0].numpy()
    document = np.repeat(np.arange(4), rows.seq_lens[0].numpy())
    size = len(loss)

    def elements(depth):
        slot = np.arange(size - 1 - depth)
        later = slot + 1 + depth
        return int((loss[later] * (document[slot] == document[later])).sum())

    _, work = make_module("eagle3", 1, {"ttt_steps": 6})
    assert work.trained(rows).elements == sum(elements(depth) for depth in range(6))
    _, work = make_module("eagle1", 1, {"draft_tokens": 6})
    assert work.trained(rows).elements == elements(0)


def test_sampling_is_counted_by_its_own_rule():
    """One long answer: COD keeps int((n - d) * share) elements at depth d, `depth_keep` a share
    keep^d of them."""
    n = 2000
    document = TokenRow(
        np.zeros(n + 7, np.int32), (np.arange(n + 7) >= 7).astype(np.uint8), "", False
    )
    rows = collate([document], [(Piece(0, 0, n + 7),)], n + 7, pad_id=0)
    ratio, depths = 0.6, 5
    _, work = make_module("peagle", 1, {"down_sample_ratio": ratio, "num_depths": depths})
    shares = [max(ratio**depth, 0.2) for depth in range(1, depths)]
    kept = [int((n - depth) * share) for depth, share in enumerate(shares, start=1)]
    assert work.trained(rows).elements == n + sum(kept)
    for keep in (0.3, 0.7, 1.0):
        _, work = make_module("eagle3", 1, {"depth_keep": keep, "ttt_steps": depths})
        expected = sum((n - depth) * keep**depth for depth in range(depths))
        assert work.trained(rows).elements == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("further", [{}, {"fc_norm": True, "attention_bias": True}])
@every_case
def test_predicted_operations_match_torchs_count(kind, layers, options, further):
    """Counts match exactly. The reference attends densely, so pairs are set to all pairs."""
    if further and kind not in ("eagle3", "peagle"):
        further = {"fc_bias": True} if kind in ("eagle1", "eagle2") else {}
    module, ready, work = make_step(kind, layers, options, attention="reference", **further)
    n = work.counted(ready.plan)
    dense = _dense(ready.plan, n, work.config)
    assert n.pairs < dense.pairs
    with FlopCounterMode(display=False) as counter:
        module.score(ready).loss.backward()
    own = work.config.draft_vocab_size
    target_flops = 2 * D * own * n.targets * module.reads_target
    # torch's counter misses `addmm_`
    uncounted = 2 * V * MARKOV_RANK * n.elements if kind == "dspark" else 0
    assert counter.get_total_flops() + uncounted == work.training(dense) + target_flops
    coverage = 2 * D * V * n.targets if own < V else 0  # found before, when the batch is prepared
    assert 2 * D * work.target_logits(n) == target_flops + coverage
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module._hidden(ready, None)
    forward = work.forward(dense)
    states = sum(forward[part] for part in forward if part not in ("head", "small heads"))
    assert counter.get_total_flops() == states


def _dense(plan, n, config):
    """The sizes with all pairs of query and key, as the reference computes them."""
    if hasattr(n, "blocks"):
        return replace(n, pairs=n.blocks * config.block_size * (n.tokens + config.block_size))
    if n.segments:
        every, chain, seen = 0, 0, 0
        for segment in plan.segments:
            seen = segment.end + sum(segment.counts)
            every, chain = every + len(segment.every) * seen, chain + len(segment.asking) * seen
        return replace(n, pairs=chain, lower_pairs=every)
    deeper = n.chain * n.slots
    return replace(n, pairs=n.anchors * n.slots + deeper, lower_pairs=n.slots**2 + deeper)


def test_partitions_cost_one_more_forward_of_the_layers_and_less_memory():
    case = ("peagle", 3, {"sequence_partitions": 4})
    module, ready, work = make_step(*case, attention="reference")
    n = work.counted(ready.plan)
    dense = _dense(ready.plan, n, work.config)
    with FlopCounterMode(display=False) as counter:
        module.score(ready).loss.backward()
    again, target_flops = work.forward(dense)["layers"], 2 * D * W * n.targets
    assert counter.get_total_flops() == work.training(dense) + again + target_flops
    peaks, predicted = [], []
    for partitions in (1, 4):
        module, ready, work = make_step("peagle", 3, {"sequence_partitions": partitions})
        n = work.counted(ready.plan)
        with LiveBytes() as live:
            module.score(ready).loss.backward()
        peaks.append(live.peak)
        predicted.append(work.kept(n, 4))
    # what the backward pass needs on top of what is kept gets smaller as well
    assert 0.6 < (predicted[0] - predicted[1]) / (peaks[0] - peaks[1]) < 1


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
def test_predicted_bytes_match_what_autograd_saves(kind, layers, options):
    module, ready, work = make_step(kind, layers, options)
    shared = [work.draft.lm_head.weight, work.draft.embed_tokens.weight]
    batch = [ready.aux_OD, ready.input_ids, ready.supervision.hidden_SD]
    with watch_saved([*module.parameters(), *shared, *batch]) as saved:
        loss = module.score(ready).loss
    measured = saved.total_bytes + kept_by_nodes(loss)
    assert work.kept(work.counted(ready.plan), 4) == pytest.approx(measured, rel=0.03)
    loss.backward()


@every_case
def test_predicted_chunk_bytes_match_the_peak_of_the_loss(kind, layers, options):
    """Here all elements form one chunk, which accounts for nearly all memory of the loss."""
    module, ready, work = make_step(kind, layers, options)
    with torch.no_grad():
        hidden = module._hidden(ready, None)
        task = module._head_task(ready)
        coefficients = module._coefficients(ready.charged_K, hidden.dtype)[ready.plan.head.depth_N]
        with LiveBytes() as live:
            module._score(ready, task, hidden, coefficients, Namespace(acceptance_L=None))
    inputs = work.draft.lm_head.weight.nbytes + hidden.nbytes
    chunk = work.chunk_bytes(work.counted(ready.plan), 4)
    assert 0.6 < (live.peak - inputs) / chunk < 1.2


@pytest.mark.parametrize(
    ("kind", "option", "values"),
    [
        ("peagle", "down_sample_ratio", (0.2, 0.3, 0.5, 0.7, 0.9, 1.0)),
        ("peagle", "num_depths", (1, 2, 5, 9)),
        ("peagle", "max_anchors", (3, 20, 50)),
        ("eagle3", "depth_keep", (0.1, 0.3, 0.6, 0.9, 1.0)),
        ("eagle3", "ttt_steps", (1, 2, 3, 7)),
        ("dflash", "anchors", (20, 100, 300, 700)),
        ("dspark", "block_size", (1, 3, 7)),
    ],
)
def test_more_elements_cost_more(kind, option, values):
    rows, costs = random_rows(4), []
    for value in values:
        _, work = make_module(kind, 2, {option: value})
        n = work.trained(rows)
        costs.append((n.elements, work.step(rows), work.kept(n, 4), work.chunk_bytes(n, 4)))
    for cost in zip(*costs, strict=True):
        assert list(cost) == sorted(set(cost))


def test_eagle1_drafts_further_only_in_evaluation():
    rows = random_rows(4)
    short, long = (make_module("eagle1", 2, {"draft_tokens": n})[1] for n in (2, 9))
    assert short.trained(rows) == long.trained(rows)
    assert short.step(rows) == long.step(rows)
    assert short.evaluation(rows) < long.evaluation(rows)
