"""Cross entropy with the text's own token."""

from dataclasses import dataclass

from fledge.objective.losses.hard import HardCrossEntropy


@dataclass(frozen=True)
class TextCrossEntropy(HardCrossEntropy):
    """Cross entropy with the token that stands in the text, for objectives that know it: where the
    target wrote the text, a sample of its distribution. Its "probabilities" are one at that token.
    """

    kind = "text"
