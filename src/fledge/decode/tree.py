"""Tree drafting: several continuations at once, the likeliest ones kept.

At each depth the `width` likeliest nodes are expanded by their `width` likeliest tokens; of all
nodes ever scored, the `nodes` with the highest probability (product along the path) are proposed. A
child never outscores its parent, and ties go to the shallower node: what is kept is a tree again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.core.head import NO_TOKEN
from fledge.decode.accept import Chooser, Proposal
from fledge.decode.drafter import UnrolledStrategy
from fledge.decode.recorded import Passes
from fledge.decode.strategy import RoundState, Slots
from fledge.decode.target import CachedTarget, Layout, take


class Tree(UnrolledStrategy):
    """Expanded nodes lie in the draft's cache after the anchor, depth by depth, `width` per depth:

        index   anchor | +1 .. +width (depth 1) | +width+1 .. (depth 2) | ...
        position       |  anchor + 1            |  anchor + 2           |

    Each attends to the slots up to the anchor, its ancestors and itself.
    """

    drafted = "tree"

    @property
    def count(self) -> int:
        return self.shape.tree.proposed(len(self.selected_W))

    @property
    def depth(self) -> int:
        return self.shape.tree.depth

    @property
    def label(self) -> str:
        return f"a tree of {self.shape.tree.nodes} nodes, {self.depth} deep"

    @property
    def slots(self) -> int:
        return max(self.depth + 1, self.shape.tree.behind(len(self.selected_W)))

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        """The likeliest `nodes` continuations, parents before children."""
        shape = self.shape.tree
        carried_BE = self.extend(state)
        width = min(shape.width, len(self.selected_W))
        batch = len(carried_BE)
        rows_B1 = torch.arange(batch, device=self.device)[:, None]
        token_BN, score_BN = self._best_tokens(carried_BE[:, None], width)
        token_BN, score_BN = token_BN[:, 0], score_BN[:, 0]
        parent_BN = torch.full_like(token_BN, -1)
        number_F = torch.arange(width, device=self.device)
        frontier_BF = number_F.expand(batch, -1)
        state_BFE = carried_BE[:, None].expand(-1, width, -1)
        entry_U = torch.arange(shape.behind(width), device=self.device)
        ancestors_BFU = torch.zeros(
            (batch, width, len(entry_U)), dtype=torch.bool, device=self.device
        )
        for depth in range(1, shape.depth):
            itself_FU = entry_U == number_F[:, None] + (depth - 1) * width
            ancestors_BFU = ancestors_BFU | itself_FU  # each attends to itself
            token_BF = token_BN[rows_B1, frontier_BF]
            state_BFE = self._expand(state, state_BFE, token_BF, ancestors_BFU, depth)
            child_BFF, logp_BFF = self._best_tokens(state_BFE, width)
            score_BM = (score_BN[rows_B1, frontier_BF][..., None] + logp_BFF).flatten(1)
            first = token_BN.shape[1]
            token_BN = torch.cat([token_BN, child_BFF.flatten(1)], 1)
            score_BN = torch.cat([score_BN, score_BM], 1)
            parent_BN = torch.cat([parent_BN, frontier_BF.repeat_interleave(width, dim=1)], 1)
            chosen_BF = score_BM.topk(width, dim=1).indices
            frontier_BF = first + chosen_BF
            state_BFE = state_BFE[rows_B1, chosen_BF // width]
            ancestors_BFU = ancestors_BFU[rows_B1, chosen_BF // width]
        return prune(token_BN, score_BN, parent_BN, shape.nodes)

    def _best_tokens(self, state_BFE: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """[B, F, width] target ids and log-probabilities of each node's likeliest children."""
        logits = self.logits(state_BFE)
        wide = torch.promote_types(logits.dtype, torch.float32)
        logp, picked = torch.log_softmax(logits.to(wide), dim=-1).topk(width, dim=-1)
        return self.selected_W[picked], logp

    def _expand(
        self,
        state: RoundState,
        state_BFE: Tensor,
        token_BF: Tensor,
        ancestors_BFU: Tensor,
        depth: int,
    ) -> Tensor:
        """Run the frontier at `depth`, and return its carried states."""
        width, space = ancestors_BFU.shape[1:]
        first_B1 = state.anchor_B[:, None] + 1
        place_BU = torch.arange(state.used, device=self.device) - first_B1  # 0: the first node
        node_BFU = place_BU.clamp(0, space - 1)[:, None].expand(-1, width, -1)
        seen_BFU = ancestors_BFU.gather(2, node_BFU) & (place_BU < space)[:, None]
        index_BF = first_B1 + (depth - 1) * width + torch.arange(width, device=self.device)
        return self.run(
            state_BFE, token_BF, index_BF, used=state.used,
            position_BQ=(first_B1 - 1 + depth).expand(-1, width),
            visible_BQU=(place_BU < 0)[:, None] | seen_BFU,
        )  # fmt: skip

    def layout(self, parent_BN: Tensor | None) -> Layout:
        assert parent_BN is not None
        return tree_layout(parent_BN, self.depth)

    def settle(
        self,
        target: CachedTarget,
        table_BX: Tensor,
        aux_BND: Tensor,
        places: Sequence[Sequence[int]],
    ) -> Tensor:
        return settle_path(self.passes, target, table_BX, aux_BND, places)


def settle_path(
    passes: Passes,
    target: CachedTarget,
    table_BX: Tensor,
    aux_BND: Tensor,
    places: Sequence[Sequence[int]],
) -> Tensor:
    """`Strategy.settle` of trees: move the nodes of the accepted path, which are scattered,
    together."""
    aux_BQD = take(aux_BND, Slots.of(table_BX).place_BQ)  # copied before a pass overwrites it
    if passes.fixed or any(row != [*range(len(row))] for row in places):
        passes(settle, {"table_BX": table_BX}, rehearse=_stay_in_place, target=target)
    return aux_BQD


def settle(table_BX: Tensor, *, target: CachedTarget) -> None:
    """Move the accepted paths together in the target's cache; a pass that may be recorded."""
    slots = Slots.of(table_BX)
    target.settle(slots.length_B - slots.count_B, slots.place_BQ)


def _stay_in_place(table_BX: Tensor) -> dict[str, Tensor]:
    """Inputs for the rehearsal that move nothing: moving a path twice would misplace it."""
    table_BX = table_BX.clone()
    place_BQ = Slots.of(table_BX).place_BQ
    place_BQ.copy_(torch.arange(place_BQ.shape[1], device=table_BX.device))
    return {"table_BX": table_BX}


def prune(token_BN: Tensor, score_BN: Tensor, parent_BN: Tensor, nodes: int) -> Proposal:
    """The best nodes in their old order (parents first), parents renumbered."""
    order_BN = score_BN.sort(dim=1, descending=True, stable=True).indices
    kept_BM = order_BN[:, :nodes].sort(dim=1).values
    number = torch.arange(kept_BM.shape[1], device=kept_BM.device).expand_as(kept_BM)
    renumbered_BN = torch.full_like(parent_BN, -1).scatter(1, kept_BM, number)
    parent_BM = parent_BN.gather(1, kept_BM)
    number_BM = renumbered_BN.gather(1, parent_BM.clamp_min(0)).masked_fill(parent_BM < 0, -1)
    # a log-probability may be minus infinity; NaN comes from numbers that are not finite
    token_BM = token_BN.masked_fill(score_BN.isnan(), NO_TOKEN).gather(1, kept_BM)
    return Proposal(token_BM, number_BM)


def tree_layout(parent_BN: Tensor, max_depth: int) -> Layout:
    """The layout of [last verified token, nodes], as read by the target: depths and visibility.

    Depth [B, N + 1] counts from 0 at the verified token; visibility is [B, N + 1, N + 1].
    """
    batch, count = parent_BN.shape
    # the parent of each token; the root's is the root itself
    parent_BN1 = torch.cat([parent_BN.new_zeros(batch, 1), parent_BN + 1], 1)
    visible = torch.eye(count + 1, dtype=torch.bool, device=parent_BN.device).repeat(batch, 1, 1)
    depth = torch.zeros_like(parent_BN1)
    ancestor = torch.arange(count + 1, device=parent_BN.device).expand(batch, -1)
    for _ in range(max_depth):
        depth += ancestor > 0
        ancestor = parent_BN1.gather(1, ancestor)
        visible.scatter_(2, ancestor[..., None], True)
    return Layout(depth, visible)
