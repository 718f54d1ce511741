"""The strategies of block drafts: a block of slots after the verified text, in one pass.

The cache holds keys and values of the context by position, computed from the target's features. A
block's own keys follow them, at the positions of its slots, and are overwritten by the true ones in
the next round: the cached context never contains a block's keys. A block is always as long as it
was in training; to propose fewer tokens, fewer of its slots are read.

Shapes: J slots of a block, N proposed tokens, U places of the cache.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.rows import TokenBatch
from fledge.decode.accept import Chooser, Proposal
from fledge.decode.drafter import CachedStrategy, attend
from fledge.decode.strategy import Rollouts, RoundState, drafting_slots
from fledge.decode.target import CachedTarget, Layout
from fledge.decode.tree import prune, settle_path, tree_layout
from fledge.methods.block.attention import Sight
from fledge.methods.block.draft import BlockDraftModel, step_head
from fledge.methods.block.heads.base import StepHead
from fledge.methods.block.plan import BlockPlan, BlockRows, lay_out_blocks, supervised_blocks
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.layer import LayerWeights
from fledge.methods.shared.norms import rms_norm
from fledge.rollout.plan import RolloutPlan
from fledge.rollout.slots import RowMasks, flatten_slots

_SLOTS_AT_ONCE = {"cpu": 2**14, "cuda": 2**16}  # in the blocks that are replayed together


class BlockRollouts(Rollouts):
    """The block from every slot. It does not depend on the text after its first token, so it is
    what live decoding would draft there."""

    draft: BlockDraftModel

    def plan(self, tokens: TokenBatch) -> BlockPlan:
        slots = flatten_slots(RowMasks.of(tokens, drafting_slots(tokens)))
        supervised_SK = supervised_blocks(
            slots, slots.target, slots.target, self.depths, contiguous=True
        )
        place, device = self.draft.spec.place, self.draft.device
        return lay_out_blocks(slots, supervised_SK, place, device=device)

    def unroll(self, aux_TD: Tensor, ids_T: Tensor, plan: RolloutPlan) -> Sequence[Tensor]:
        assert isinstance(plan, BlockPlan)
        return plan.by_depth(self._states(aux_TD, ids_T, plan))

    def _states(self, aux_TD: Tensor, ids_T: Tensor, plan: BlockPlan) -> Tensor:
        """[P, E]: the states of all depths' rows end to end."""
        newest_N = ids_T.index_select(0, plan.blocks.slot_N)
        parts = [state_NJE for state_NJE, _, _ in self._blocks(aux_TD, newest_N, plan)]
        return torch.cat(parts).flatten(0, 1).index_select(0, plan.element_P)

    def _blocks(
        self, aux_TD: Tensor, newest_N: Tensor, plan: BlockPlan
    ) -> Iterator[tuple[Tensor, Tensor, BlockRows]]:
        """Yield the states [N, J, E] of some blocks at a time, their first tokens and places."""
        rows, device = plan.blocks, self.draft.device
        most = _SLOTS_AT_ONCE.get(device.type, _SLOTS_AT_ONCE["cpu"])
        step = max(1, most // rows.size)
        for begin in range(0, max(1, len(rows)), step):
            part, token_N = rows.part(begin, begin + step), newest_N[begin : begin + step]
            yield (
                self.draft(aux_TD, token_N, plan.position_T, part, compute_dtype=self.dtype),
                token_N,
                part,
            )


def places(plan: BlockPlan, draft: BlockDraftModel) -> tuple[Tensor, Tensor]:
    """[P] the block and the depth of every element."""
    size, first = draft.spec.place
    return plan.element_P // size, plan.element_P % size - first


class StepRollouts(BlockRollouts):
    """The same left to right: up to its first miss, a live block has read the text's own tokens.

    Head inputs hold the state, the features of the previous token, and whether a token is proposed.
    """

    cuts = True  # where the draft is not confident enough

    def unroll(self, aux_TD: Tensor, ids_T: Tensor, plan: RolloutPlan) -> Sequence[Tensor]:
        assert isinstance(plan, BlockPlan)
        draft, head = self.draft, step_head(self.draft)
        inputs: list[Tensor] = []
        memory = chance = None
        states = plan.by_depth(self._states(aux_TD, ids_T, plan))
        for depth, (rows, state_NE) in enumerate(zip(plan.depths, states, strict=True)):
            before_N = ids_T.index_select(0, rows.slot_N + depth)
            memory = remember(draft, memory, before_N, state_NE.dtype)
            features_NR = head.features(before_N, state_NE, memory)
            if depth < head.first_depth:
                features_NR = torch.zeros_like(features_NR)
            if self.cuts:
                chance = running_chance(draft, state_NE, features_NR, depth, chance)
            proposed_N = torch.ones_like(state_NE[:, 0])
            if chance is not None:
                proposed_N = (chance >= draft.config.confidence_threshold).to(state_NE.dtype)
            inputs.append(torch.cat([state_NE, features_NR, proposed_N[:, None]], dim=1))
        return inputs

    def confidence(self, head_input_NE: Tensor) -> Tensor:
        """[N] log-odds, before any temperature, that a drafted token is accepted."""
        assert self.draft.confidence_head is not None
        state_NE, features_NR, _ = self._parts(head_input_NE)
        odds_N: Tensor = self.draft.confidence_head(state_NE, features_NR)
        return odds_N

    def _parts(self, head_input_NE: Tensor) -> tuple[Tensor, ...]:
        sizes = [self.draft.spec.hidden_size, self.draft.spec.markov_rank, 1]
        return torch.split(head_input_NE, sizes, dim=1)

    def logits(self, head_input_NE: Tensor) -> Tensor:
        head = self.draft.token_head
        assert head is not None
        state_NE, features_NR, proposed_N1 = self._parts(head_input_NE)
        logits_NW = super().logits(state_NE) + F.linear(features_NR, head.out_WR.to(state_NE.dtype))
        return logits_NW.masked_fill(proposed_N1 == 0, float("-inf"))  # -> NO_TOKEN


def remember(
    draft: BlockDraftModel, memory: Tensor | None, token_N: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """The token head's memory after one more token of each block, whose memories come first."""
    head = step_head(draft)
    if not head.has_memory:
        return None
    before_NM = None if memory is None else memory[: len(token_N)]
    return head.remember(before_NM, head.inputs(draft.embed(token_N, dtype)))


def running_chance(
    draft: BlockDraftModel,
    state_NE: Tensor,
    features_NR: Tensor,
    depth: int,
    before_N: Tensor | None,
) -> Tensor | None:
    """[N] the draft's probability that all tokens up to this one are accepted, given that of the
    tokens before; None if every token is proposed, whatever the confidence."""
    if draft.confidence_head is None or not draft.config.confidence_threshold:
        return None
    temperatures = draft.config.confidence_temperatures
    temperature = temperatures[depth] if depth < len(temperatures) else 1.0
    chance_N: Tensor = (draft.confidence_head(state_NE, features_NR) / temperature).sigmoid()
    return chance_N if before_N is None else before_N[: len(chance_N)] * chance_N


def _visible(sight: Sight, index_BJ: Tensor, used: int) -> Tensor:
    """[B, J, U]: whether a slot sees a place: the text before the block, and the block's slots."""
    place_U = torch.arange(used, device=index_BJ.device)
    last_BJ = index_BJ if sight.causal else index_BJ[:, -1:].expand_as(index_BJ)
    visible_BJU = place_U <= last_BJ[..., None]
    if sight.window is not None:
        visible_BJU = visible_BJU & (index_BJ[..., None] - place_U < sight.window)
    return visible_BJU


class Block(CachedStrategy):
    drafted = "block"
    rollouts: ClassVar[type[Rollouts] | None] = BlockRollouts
    draft: BlockDraftModel

    @classmethod
    def fits(cls, draft: DraftModel) -> bool:
        return isinstance(draft, BlockDraftModel) and draft.spec.has_mask

    @property
    def count(self) -> int:
        return min(self.shape.num_draft_tokens, self.draft.spec.drafts)

    @property
    def label(self) -> str:
        return f"a block of k = {self.count} drafted tokens"

    @property
    def slots(self) -> int:
        return self.draft.spec.size + self.count + 1

    @cached_property
    def layers(self) -> Sequence[LayerWeights]:
        self.draft.check_whole()
        return self.draft.layer_weights(self.dtype)

    def read_prompts(self, prompts: Sequence[Sequence[int]], aux_BTD: Tensor) -> None:
        width = max(len(prompt) for prompt in prompts) - 1
        if width > 0:
            self.room(width)
            start_B = torch.zeros(len(prompts), dtype=torch.int64, device=self.device)
            self.take_in(aux_BTD[:, :width], start_B)

    def take_in(self, aux_BQD: Tensor, start_B: Tensor) -> None:
        """Cache keys and values of verified tokens, from `start_B` on. Entries after a row's last
        real one are overwritten before they are read."""
        count = aux_BQD.shape[1]
        context = self.draft.project_hidden_states(aux_BQD, self.dtype).flatten(0, 1)
        index_BQ = start_B[:, None] + torch.arange(count, device=self.device)
        turn = self.draft.rotary(index_BQ.flatten(), self.dtype)
        for number, layer in enumerate(self.layers):
            self.store(number, index_BQ, *self.draft.context_keys(layer, context, turn))

    def run_block(self, newest_B: Tensor, length_B: Tensor, *, used: int) -> Tensor:
        """[B, J, E] head inputs of a block after `length_B` verified tokens of each row."""
        block, batch = self.draft, len(newest_B)
        size, sights = block.spec.size, block.sights()
        index_BJ = length_B[:, None] + torch.arange(size, device=self.device)
        turn = block.rotary(index_BJ.flatten(), self.dtype)
        masks = {sight: _visible(sight, index_BJ, used) for sight in {*sights}}
        state = block.embed(block.block_tokens(newest_B), self.dtype).flatten(0, 1)
        for number, (layer, sight) in enumerate(zip(self.layers, sights, strict=True)):
            projected, gates = block.enter_layer(number, layer, state)
            q, keys, values = block.split(layer, projected, turn)
            stored = self.store(number, index_BJ, keys, values)
            out = attend(q.view(batch, size, *q.shape[1:]), *stored, masks[sight])
            state = block.leave_layer(number, layer, state, out.flatten(0, 1), gates)
        state = rms_norm(state, block.norm_weight(self.dtype), block.spec.rms_norm_eps)
        return state.view(batch, size, -1)

    def states(self, state: RoundState) -> Tensor:
        """Cache the verified tokens and run a block; returns [B, N, E] of the proposing slots."""
        first = self.draft.spec.first_place
        self.take_in(state.aux_BQD, state.start_B)
        states_BJE = self.run_block(newest(state), state.length_B, used=state.used)
        return states_BJE[:, first : first + self.count]

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        logits_BNW = F.linear(self.states(state), self.head_WE)
        picked_BN, top_BN, probs_BNW = chooser.pick(logits_BNW)
        return Proposal.picked(self.selected_W[picked_BN], top_BN, probs_BNW)


def newest(state: RoundState) -> Tensor:
    """[B] each row's newest token."""
    return state.token_BQ.gather(1, state.count_B[:, None] - 1)[:, 0]


class StepBlock(Block):
    """Left to right through a token head; the states still come from one pass."""

    drafted = "block, left to right"
    rollouts = StepRollouts

    @classmethod
    def fits(cls, draft: DraftModel) -> bool:
        return super().fits(draft) and isinstance(draft.token_head, StepHead)

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        draft, head = self.draft, step_head(self.draft)
        out_WR = head.out_WR.to(self.dtype)
        before_B, memory, chance = newest(state), None, None
        steps: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for depth, state_BE in enumerate(self.states(state).unbind(1)):
            memory = remember(draft, memory, before_B, self.dtype)
            features_BR = head.features(before_B, state_BE, memory)
            logits_BW = F.linear(state_BE, self.head_WE)
            if depth >= head.first_depth:
                logits_BW = logits_BW + F.linear(features_BR, out_WR)
            picked_B, top_B, probs_BW = chooser.pick(logits_BW)
            chance = running_chance(draft, state_BE, features_BR, depth, chance)
            if chance is not None:  # after the first token left out, nothing is proposed
                kept_B = chance >= draft.config.confidence_threshold
                top_B = top_B.masked_fill(~kept_B, float("-inf"))
                probs_BW = None if probs_BW is None else probs_BW * kept_B[:, None]
            before_B = self.selected_W[picked_B]
            steps.append((before_B, top_B, probs_BW))
        return Proposal.stacked(steps)


# --- trees ---------------------------------------------------------------------------------------


class BlockTree(Block):
    """JetSpec's trees (arXiv 2606.18394): the likeliest `nodes` continuations, from the `width`
    likeliest tokens of every slot.

    All nodes of a depth share their children, because the slots' distributions do not depend on
    which tokens were drafted before. A child is never likelier than its parent, so the best nodes
    are a tree, and each of them is among the best of its depth.
    """

    drafted = "tree of a block"
    rollouts = None

    @property
    def reach(self) -> int:
        """How deep the tree may be."""
        return min(self.shape.tree.depth, self.draft.spec.drafts)

    @property
    def width(self) -> int:
        return min(self.shape.tree.width, len(self.selected_W))

    @property
    def count(self) -> int:
        nodes, level = 0, 1
        for _ in range(self.reach):
            level = min(self.shape.tree.nodes, level * self.width)
            nodes += level
        return min(self.shape.tree.nodes, nodes)

    @property
    def depth(self) -> int:
        return self.reach

    @property
    def label(self) -> str:
        return f"a tree of {self.shape.tree.nodes} nodes, {self.reach} deep, from a block"

    @property
    def slots(self) -> int:
        return self.draft.spec.size + self.reach + 1

    def block_logits(self, state: RoundState) -> Tensor:
        """[B, K, W] of the slots that draft."""
        first = self.draft.spec.first_place
        self.take_in(state.aux_BQD, state.start_B)
        states_BJE = self.run_block(newest(state), state.length_B, used=state.used)
        return F.linear(states_BJE[:, first : first + self.reach], self.head_WE)

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        logits_BKW = self.block_logits(state)
        wide = torch.promote_types(logits_BKW.dtype, torch.float32)
        logp_BKC, picked_BKC = logits_BKW.to(wide).log_softmax(-1).topk(self.width, dim=-1)
        token_BKC, batch = self.selected_W[picked_BKC], len(picked_BKC)
        score_BL = logp_BKC.new_zeros(batch, 1)  # of the frontier, at first the verified text
        parent_BL = torch.full_like(score_BL, -1, dtype=torch.long)
        tokens, scores, parents, first = [], [], [], 0
        for depth in range(self.reach):
            score_BM = (score_BL[..., None] + logp_BKC[:, depth, None]).flatten(1)
            score_BL, best_BL = score_BM.topk(min(self.shape.tree.nodes, score_BM.shape[1]), dim=1)
            tokens.append(token_BKC[:, depth].gather(1, best_BL % self.width))
            parents.append(parent_BL.gather(1, best_BL // self.width))
            scores.append(score_BL)
            number_L = torch.arange(best_BL.shape[1], device=self.device) + first
            parent_BL, first = number_L.expand_as(best_BL), first + best_BL.shape[1]
        whole = [torch.cat(parts, 1) for parts in (tokens, scores, parents)]
        return prune(whole[0], whole[1], whole[2], self.shape.tree.nodes)

    def layout(self, parent_BN: Tensor | None) -> Layout:
        assert parent_BN is not None
        return tree_layout(parent_BN, self.reach)

    def settle(
        self,
        target: CachedTarget,
        table_BX: Tensor,
        aux_BND: Tensor,
        places: Sequence[Sequence[int]],
    ) -> Tensor:
        return settle_path(self.passes, target, table_BX, aux_BND, places)
