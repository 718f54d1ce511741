"""Tree drafting: several continuations at once, the likeliest ones kept.

At each depth the `width` likeliest nodes are expanded by their `width` likeliest tokens; of all
nodes ever scored, the `nodes` with the highest probability (product along the path) are proposed.
A child never outscores its parent, and on equal scores the shallower node goes first, so what is
kept is a tree again.

Expanded nodes lie in the draft's cache behind the anchor, depth by depth, `width` to a depth:

    index   anchor | +1 .. +width (depth 1) | +width+1 .. (depth 2) | ...
    position       |  anchor + 1            |  anchor + 2           |

Each sees the slots up to the anchor, its ancestors and itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.decode.drafter import Drafter, TrueSlots
from fledge.decode.propose import Proposal


@dataclass(frozen=True)
class TreeShape:
    depth: int = 5
    width: int = 4
    nodes: int = 24

    def __post_init__(self) -> None:
        for name in ("depth", "width", "nodes"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} of a tree must be positive, got {getattr(self, name)}")

    def proposed(self, vocabulary: int) -> int:
        """How many nodes are proposed: `nodes`, or all that are ever scored."""
        width = min(self.width, vocabulary)
        return min(self.nodes, width + (self.depth - 1) * width**2)

    def behind(self, vocabulary: int) -> int:
        """How many entries expanded nodes take in the draft's cache, behind the anchor."""
        return (self.depth - 1) * min(self.width, vocabulary)


def propose_tree(drafter: Drafter, slots: TrueSlots, shape: TreeShape) -> Proposal:
    """The likeliest `nodes` continuations, parents before children."""
    carried_BE = drafter.extend(slots)
    width = min(shape.width, len(drafter.selected_W))
    batch = len(carried_BE)
    rows_B1 = torch.arange(batch, device=drafter.device)[:, None]
    token_BN, score_BN = _best_tokens(drafter, carried_BE[:, None], width)
    token_BN, score_BN = token_BN[:, 0], score_BN[:, 0]
    parent_BN = torch.full_like(token_BN, -1)
    own_F = torch.arange(width, device=drafter.device)
    frontier_BF = own_F.expand(batch, -1)
    state_BFE = carried_BE[:, None].expand(-1, width, -1)
    behind_A = torch.arange(shape.behind(width), device=drafter.device)
    ancestors_BFA = torch.zeros(
        (batch, width, len(behind_A)), dtype=torch.bool, device=drafter.device
    )
    for depth in range(1, shape.depth):
        itself_FA = behind_A == own_F[:, None] + (depth - 1) * width
        ancestors_BFA = ancestors_BFA | itself_FA  # each sees itself
        state_BFE = _expand(
            drafter, slots, state_BFE, token_BN[rows_B1, frontier_BF], ancestors_BFA, depth
        )
        child_BFF, logp_BFF = _best_tokens(drafter, state_BFE, width)
        score_BC = (score_BN[rows_B1, frontier_BF][..., None] + logp_BFF).flatten(1)
        first = token_BN.shape[1]
        token_BN = torch.cat([token_BN, child_BFF.flatten(1)], 1)
        score_BN = torch.cat([score_BN, score_BC], 1)
        owner_BC = frontier_BF.repeat_interleave(width, dim=1)
        parent_BN = torch.cat([parent_BN, owner_BC], 1)
        chosen_BF = score_BC.topk(width, dim=1).indices
        frontier_BF = first + chosen_BF
        state_BFE = state_BFE[rows_B1, chosen_BF // width]
        ancestors_BFA = ancestors_BFA[rows_B1, chosen_BF // width]
    return _prune(token_BN, score_BN, parent_BN, shape.nodes)


def _best_tokens(drafter: Drafter, state_BFE: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """[B, F, width] target ids and log-probabilities of each node's likeliest children."""
    logits = drafter.logits(state_BFE)
    wide = torch.promote_types(logits.dtype, torch.float32)
    logp, picked = torch.log_softmax(logits.to(wide), dim=-1).topk(width, dim=-1)
    return drafter.selected_W[picked], logp


def _expand(
    drafter: Drafter,
    slots: TrueSlots,
    state_BFE: Tensor,
    token_BF: Tensor,
    ancestors_BFA: Tensor,
    depth: int,
) -> Tensor:
    """Run the frontier at `depth`; its carried states."""
    width, space = ancestors_BFA.shape[1:]
    behind_B1 = slots.anchor_B[:, None] + 1
    place_BU = torch.arange(slots.used, device=drafter.device) - behind_B1  # 0: the first node
    node_BFU = place_BU.clamp(0, space - 1)[:, None].expand(-1, width, -1)
    seen_BFU = ancestors_BFA.gather(2, node_BFU) & (place_BU < space)[:, None]
    visible_BFU = (place_BU < 0)[:, None] | seen_BFU
    index_BF = behind_B1 + (depth - 1) * width + torch.arange(width, device=drafter.device)
    position_BF = (behind_B1 - 1 + depth).expand(-1, width)
    return drafter.run(
        state_BFE,
        token_BF,
        index_BF,
        used=slots.used,
        position_BQ=position_BF,
        visible_BQU=visible_BFU,
    )


def _prune(token_BN: Tensor, score_BN: Tensor, parent_BN: Tensor, nodes: int) -> Proposal:
    """The best nodes in their old order (parents first), parents renumbered."""
    order_BN = score_BN.sort(dim=1, descending=True, stable=True).indices
    kept_BM = order_BN[:, :nodes].sort(dim=1).values
    number = torch.arange(kept_BM.shape[1], device=kept_BM.device).expand_as(kept_BM)
    renumbered_BN = torch.full_like(parent_BN, -1).scatter(1, kept_BM, number)
    parent_BM = parent_BN.gather(1, kept_BM)
    number_BM = renumbered_BN.gather(1, parent_BM.clamp_min(0)).masked_fill(parent_BM < 0, -1)
    return Proposal(token_BN.gather(1, kept_BM), number_BM)


def tree_layout(parent_BN: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """For the target, which reads [last verified token, nodes]: depths and who sees whom.

    Depth [B, N + 1] counts from 0 at the verified token; visibility is [B, N + 1, N + 1].
    """
    batch, count = parent_BN.shape
    step_BN1 = torch.cat([parent_BN.new_zeros(batch, 1), parent_BN + 1], 1)  # the root stays put
    visible = torch.eye(count + 1, dtype=torch.bool, device=parent_BN.device).repeat(batch, 1, 1)
    depth = torch.zeros_like(step_BN1)
    at = torch.arange(count + 1, device=parent_BN.device).expand(batch, -1)
    for _ in range(max_depth):
        depth += at > 0
        at = step_BN1.gather(1, at)
        visible.scatter_(2, at[..., None], True)
    return depth, visible
