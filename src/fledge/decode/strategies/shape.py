"""How much a round drafts."""

from dataclasses import dataclass

from fledge.core.errors import BadInput


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
        """The number of nodes proposed: `nodes`, or all scored nodes if there are fewer."""
        width = min(self.width, vocabulary)
        return min(self.nodes, width + (self.depth - 1) * width**2)

    def behind(self, vocabulary: int) -> int:
        """The number of entries that expanded nodes take in the draft's cache, after the anchor."""
        return (self.depth - 1) * min(self.width, vocabulary)


@dataclass(frozen=True)
class DraftShape:
    """What a user requests; each strategy uses its part of it."""

    num_draft_tokens: int = 7  # without a tree
    tree: TreeShape = TreeShape()

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be positive, got {self.num_draft_tokens}")
