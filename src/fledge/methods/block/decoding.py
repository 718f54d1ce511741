"""The strategies of DFlash and DSpark: a block of slots after the verified text, in one pass.

The cache holds keys and values of the context by position, computed from the target's features. A
block's own keys follow them, at the positions of its slots, and are overwritten by the true ones in
the next round: the cached context never contains a block's keys. A block is always as long as it
was in training; to propose fewer tokens, fewer of its slots are read.

Shapes: J slots of a block, N proposed tokens, U places of the cache.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.rows import TokenBatch
from fledge.decode.accept import Chooser, Proposal
from fledge.decode.drafter import CachedStrategy, attend
from fledge.decode.strategy import Rollouts, RoundState, drafting_slots
from fledge.methods.block.attention import Sight
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.block.plan import BlockPlan, lay_out_blocks, supervised_blocks
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
        rows, device = plan.blocks, self.draft.device
        most = _SLOTS_AT_ONCE.get(device.type, _SLOTS_AT_ONCE["cpu"])
        step = max(1, most // rows.size)
        newest_N = ids_T.index_select(0, rows.slot_N)
        parts = [
            self.draft(
                aux_TD,
                newest_N[begin : begin + step],
                plan.position_T,
                rows.part(begin, begin + step),
                compute_dtype=self.dtype,
            )
            for begin in range(0, max(1, len(rows)), step)
        ]
        return torch.cat(parts).flatten(0, 1).index_select(0, plan.element_P)


class MarkovRollouts(BlockRollouts):
    """The same left to right: up to its first miss, a live block has read the text's own tokens.

    Head inputs hold the state, the features of the previous token, and whether a token is proposed.
    """

    cuts = True  # where the draft is not confident enough

    def unroll(self, aux_TD: Tensor, ids_T: Tensor, plan: RolloutPlan) -> Sequence[Tensor]:
        assert isinstance(plan, BlockPlan)
        draft, head = self.draft, self.draft.token_head
        assert head is not None
        inputs: list[Tensor] = []
        chance = None
        states = plan.by_depth(self._states(aux_TD, ids_T, plan))
        for depth, (rows, state_NE) in enumerate(zip(plan.depths, states, strict=True)):
            before_N = ids_T.index_select(0, rows.slot_N + depth)
            features_NR = head.features(before_N, state_NE.dtype)
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
    rollouts = BlockRollouts
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
            q, keys, values = block.block_heads(layer, state, turn)
            stored = self.store(number, index_BJ, keys, values)
            out = attend(q.view(batch, size, *q.shape[1:]), *stored, masks[sight])
            state = layer.finish(state, out.flatten(0, 1))
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


class MarkovBlock(Block):
    """Left to right through the Markov head; the states still come from one pass."""

    drafted = "block, left to right"
    rollouts = MarkovRollouts

    @classmethod
    def fits(cls, draft: DraftModel) -> bool:
        if not isinstance(draft, BlockDraftModel) or draft.token_head is None:
            return False
        return super().fits(draft)

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        draft, head = self.draft, self.draft.token_head
        assert head is not None
        out_WR = head.out_WR.to(self.dtype)
        before_B, chance = newest(state), None
        steps: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for depth, state_BE in enumerate(self.states(state).unbind(1)):
            features_BR = head.features(before_B, state_BE.dtype)
            logits_BW = F.linear(state_BE, self.head_WE) + F.linear(features_BR, out_WR)
            picked_B, top_B, probs_BW = chooser.pick(logits_BW)
            chance = running_chance(draft, state_BE, features_BR, depth, chance)
            if chance is not None:  # after the first token left out, nothing is proposed
                kept_B = chance >= draft.config.confidence_threshold
                top_B = top_B.masked_fill(~kept_B, float("-inf"))
                probs_BW = None if probs_BW is None else probs_BW * kept_B[:, None]
            before_B = self.selected_W[picked_B]
            steps.append((before_B, top_B, probs_BW))
        return Proposal.stacked(steps)
