"""Cross entropy with the text's own token."""

from dataclasses import dataclass

from fledge.objective.losses.hard import HardCrossEntropy


@dataclass(frozen=True)
class TextCrossEntropy(HardCrossEntropy):
    """Cross entropy with the token that follows in the text, for objectives that have the text. If
    the target wrote it, the token is a sample of its distribution. The "probabilities" are one-hot.
    """

    kind = "text"
