"""Cached passes compute the same as one uncached pass over the whole text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from decode.tiny_decode import AUX, NumberedTarget, make_draft, round_state
from fledge.decode.accept import Chooser
from fledge.decode.strategy import DraftShape, TreeShape
from fledge.decode.tree import Tree, tree_layout
from fledge.methods.eagle3.decoding import Chain
from fledge.rollout.plan import plan_rollout
from fledge.rollout.slots import RowMasks
from fledge.target.hf.model import HFEagle3TargetModel

EXACT = {"rtol": 1e-9, "atol": 1e-10}


def whole_pass(model, ids):
    """Logits and aux states of one text, uncached."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0], torch.cat([out.hidden_states[i + 1][0] for i in AUX[:2]], -1)


def windowed_target(window=4):
    torch.manual_seed(2)
    config = MistralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=window,
    )  # fmt: skip
    return MistralForCausalLM(config).double().eval()


@pytest.mark.parametrize("kind", ["full", "window"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_target_cache_drops_exactly_the_rejected_tokens(target, kind, data):
    model = target if kind == "full" else windowed_target()
    tokens = st.lists(st.integers(0, 39), min_size=1, max_size=9)
    rows = data.draw(st.lists(tokens, min_size=1, max_size=4))
    cached = NumberedTarget(model, AUX[:2])
    with torch.no_grad():
        answer = cached.begin(rows)
        for index, row in enumerate(rows):
            logits, aux = whole_pass(model, row)
            torch.testing.assert_close(answer.logits_BNV[index, 0], logits[-1], **EXACT)
            torch.testing.assert_close(answer.aux_BND[index, : len(row)], aux, **EXACT)
        for _ in range(3):
            count = data.draw(st.integers(1, 4))
            new = [data.draw(st.lists(st.integers(0, 39), min_size=count, max_size=count))
                   for _ in rows]  # fmt: skip
            answer = cached.step(torch.tensor(new))
            for index, row in enumerate(rows):
                logits, aux = whole_pass(model, row + new[index])
                torch.testing.assert_close(answer.logits_BNV[index], logits[len(row) :], **EXACT)
                torch.testing.assert_close(answer.aux_BND[index], aux[len(row) :], **EXACT)
            alive = sorted(data.draw(st.sets(st.sampled_from(range(len(rows))), min_size=1)))
            accepted = [data.draw(st.integers(0, count)) for _ in alive]
            cached.keep(alive, [list(range(n)) for n in accepted])
            rows = [rows[i] + new[i][:n] for i, n in zip(alive, accepted, strict=True)]
            assert cached.lengths == [len(row) for row in rows]


@pytest.mark.parametrize(
    "kept",
    [
        {0: [0, 1, 3], 2: [0, 5]},  # root, nodes 0, 2 of the first row; root, node 4 of the last
        {0: [0, 1, 3], 1: [0, 1, 2], 2: [0, 1, 3]},  # every row, the same number of tokens each
        {0: [0, 1, 2, 4], 1: [0], 2: [0, 5]},
    ],
)
def test_a_tree_is_verified_path_by_path_and_one_path_is_kept(target, kept):
    rows = [[5, 6, 7], [9], [1, 2]]
    # 0 -> 1 -> 3, 0 -> 2, and 4 from the root
    parents = [[-1, 0, 0, 1, -1]] * 3
    nodes = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25], [31, 32, 33, 34, 35]]
    roots = [4, 8, 3]
    paths = {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 1, 3], 4: [4]}
    cached = NumberedTarget(target, AUX[:2])
    with torch.no_grad():
        cached.begin(rows)
        layout = tree_layout(torch.tensor(parents), 3)
        token = torch.tensor(
            [[root, *row_nodes] for root, row_nodes in zip(roots, nodes, strict=True)]
        )
        answer = cached.step(token, layout)
        for index, row in enumerate(rows):
            for node, path in paths.items():
                text = [*row, roots[index], *(nodes[index][i] for i in path)]
                logits, aux = whole_pass(target, text)
                torch.testing.assert_close(answer.logits_BNV[index, node + 1], logits[-1], **EXACT)
                torch.testing.assert_close(answer.aux_BND[index, node + 1], aux[-1], **EXACT)
        cached.keep(list(kept), list(kept.values()))
        after = cached.step(torch.tensor([[20], [19], [18]][: len(kept)]))
        for place, (index, places) in enumerate(kept.items()):
            text = [*rows[index], *(int(token[index, i]) for i in places), 20 - place]
            logits, _ = whole_pass(target, text)
            torch.testing.assert_close(after.logits_BNV[place, 0], logits[-1], **EXACT)


def test_a_sliding_window_counts_text_positions_not_tree_nodes():
    """0 and 1 from the root, 1 -> 2 -> 3: node 1 comes right after the root in the text, though it
    is stored after node 0."""
    model, row, nodes = windowed_target(2), [5, 6, 7], [11, 12, 13, 14]
    cached = NumberedTarget(model, AUX[:2])
    with torch.no_grad():
        cached.begin([row])
        layout = tree_layout(torch.tensor([[-1, -1, 1, 2]]), 3)
        token = torch.tensor([[4, *nodes]])
        answer = cached.step(token, layout)
        logits, aux = whole_pass(model, [*row, 4, 12, 13, 14])
    torch.testing.assert_close(answer.logits_BNV[0, -1], logits[-1], **EXACT)
    torch.testing.assert_close(answer.aux_BND[0, -1], aux[-1], **EXACT)


@pytest.mark.parametrize("options", [{}, {"layers": 3}, {"norm_output": True, "fc_norm": True}])
def test_the_cached_draft_matches_the_training_rollout(target, options):
    draft = make_draft(target, **options)
    ids = torch.randint(0, 40, (1, 9))
    ones = torch.ones_like(ids)
    batch = HFEagle3TargetModel(target, AUX).generate_batch(ids, ones, ones)
    plan = plan_rollout(RowMasks(ones, ones), num_depths=3)
    with torch.no_grad():
        by_depth = draft.unroll(batch.aux_hidden_states[0], batch.input_ids[0], plan)
        drafter = Chain(draft, DraftShape())
        drafter.clear(1)
        begin = 0
        for anchor in (2, 3, 5):  # after two, one and two more verified slots
            new = slice(begin, anchor + 1)
            verified = round_state(
                drafter, batch.aux_hidden_states[:, new], batch.input_ids[:, new], [begin],
                [anchor + 1 - begin], ahead=2,
            )  # fmt: skip
            state = drafter.extend(verified)
            for depth in range(3):
                if depth:
                    token = batch.input_ids[:, anchor + depth, None]
                    index = torch.tensor([[anchor + depth]])
                    state = drafter.run(state[:, None], token, index, used=anchor + depth + 1)[:, 0]
                row = plan.depths[depth].slot_N.tolist().index(anchor)
                expected = by_depth[depth][row] @ draft.lm_head.weight.t()
                torch.testing.assert_close(drafter.logits(state)[0], expected, **EXACT)
            begin = anchor + 1


@pytest.mark.parametrize("nodes", [52, 15])
def test_tree_nodes_carry_the_probability_of_their_path(target, nodes):
    """A node's children are those of a chain forced along its path, and the best nodes are kept.

    52 is the number of all scored nodes: 4, and 16 at each of three more depths.
    """
    draft = make_draft(target, width=20, layers=2)
    with torch.no_grad():
        draft.lm_head.weight.mul_(0.1)  # flat probabilities: deep nodes of many parents compete
    shape = TreeShape(depth=4, width=4, nodes=nodes)
    aux, ids = torch.randn(2, 5, 48).double(), torch.randint(0, 40, (2, 5))
    with torch.no_grad():
        strategy = Tree(draft, DraftShape(tree=shape))
        strategy.clear(2)
        state = round_state(strategy, aux, ids, [0, 0], [5, 3], ahead=shape.behind(20))
        tree = strategy.propose(state, Chooser())
        for row, count in enumerate([5, 3]):
            scores = score_paths(draft, aux[row, :count], ids[row, :count], shape)
            paths = []
            for token, parent in zip(tree.token_BN[row], tree.parent_BN[row], strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
            best = sorted(scores, key=lambda path: -scores[path])[: shape.nodes]
            assert sorted(paths) == sorted(best)


def forced_next_tokens(draft, aux, ids, path, width):
    """The likeliest tokens after a forced path, with their log-probabilities."""
    drafter = Chain(draft, DraftShape())
    drafter.clear(1)
    verified = round_state(drafter, aux[None], ids[None], [0], [len(ids)], ahead=len(path))
    state = drafter.extend(verified)
    for depth, token_id in enumerate(path, start=1):
        index = torch.tensor([[len(ids) - 1 + depth]])
        token = torch.tensor([[token_id]])
        state = drafter.run(state[:, None], token, index, used=len(ids) + depth)[:, 0]
    logp, picked = drafter.logits(state)[0].log_softmax(-1).topk(width)
    return dict(zip(draft.selected_token_ids[picked].tolist(), logp.tolist(), strict=True))


def score_paths(draft, aux, ids, shape):
    """The scores of all paths that the beam search considers, from forced chains."""
    scores, frontier = {}, {(): 0.0}
    for _ in range(shape.depth):
        children = {
            (*path, token): score + logp
            for path, score in frontier.items()
            for token, logp in forced_next_tokens(draft, aux, ids, path, shape.width).items()
        }
        scores |= children
        best = sorted(children, key=lambda path: -children[path])[: shape.width]
        frontier = {path: children[path] for path in best}
    return scores
