"""The likeliest token of logits, and what stands for it where there is none.

The largest of numbers that hold a NaN is the NaN: taken as a token, it would agree with the NaN of
another model, and a broken pair would pass for a perfect one.
"""

from torch import Tensor

NO_TOKEN = -2  # whoever compares two picks leaves it out; -1: nobody was asked (`measure.packed`)


def likeliest(logits: Tensor) -> Tensor:
    """[...] of [..., V]: the likeliest tokens; NO_TOKEN where the largest is not finite."""
    top, token = logits.max(dim=-1)
    return tokens_of(token, top)


def tokens_of(token: Tensor, top: Tensor) -> Tensor:
    """Picked tokens, but NO_TOKEN where `top`, the number they were picked for, is not finite."""
    return token.where(top.isfinite(), NO_TOKEN)
