"""The likeliest token of logits, and a placeholder where there is none.

The maximum of values that include a NaN is the NaN. If its position counted as a token, it would
agree with that of another model's NaN, and a broken pair would look like a perfect one.
"""

from torch import Tensor

NO_TOKEN = -2  # excluded from comparisons; -1 means that no model was asked (`measure.packed`)


def likeliest(logits: Tensor) -> Tensor:
    """The likeliest tokens [...] of logits [..., V]; NO_TOKEN where the maximum is not finite."""
    top, token = logits.max(dim=-1)
    return tokens_of(token, top)


def tokens_of(token: Tensor, top: Tensor) -> Tensor:
    """The picked tokens, but NO_TOKEN where `top`, their logit or score, is not finite."""
    return token.where(top.isfinite(), NO_TOKEN)
