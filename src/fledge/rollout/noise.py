"""Noise on features that does not depend on how a batch is cut: EAGLE-1 trains with it, EAGLE-3
can (feature dropout).

A slot's noise is a function of the step's seed, of its document's loss mask, of its place in the
document and of the channel, and of nothing else: padding, packing, micro-batches, ranks and devices
do not change it. The slot's part is a word from the host (`cod.slot_words`); the channels are mixed
in on the device in integer arithmetic, which wraps identically everywhere.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fledge.core.transfer import send
from fledge.rollout.cod import slot_words
from fledge.rollout.plan import RolloutPlan
from fledge.rollout.slots import RowMasks, flatten_slots

_CHUNK = 2**23  # numbers at a time: a few arrays of 64 MB
_BITS = 24  # a float32 represents all integers of this many bits
# splitmix64's constants as signed integers, for torch's int64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


@dataclass(frozen=True, kw_only=True)
class NoisyPlan(RolloutPlan):
    word_O: Tensor | None = None  # the seed of each slot's noise; None: no noise


def noisy(plan: RolloutPlan, masks: RowMasks, seed: int) -> NoisyPlan:
    """The same plan with the noise of `seed`."""
    words = slot_words(flatten_slots(masks).documents, seed).view(np.int64)
    word_BT = send(torch.from_numpy(words), plan.slot_T.device).view(masks.loss_mask.shape)
    share = plan.share
    word_O = plan.on_key_axis(word_BT) if share is None else share.states(word_BT)
    return NoisyPlan(**vars(plan), word_O=word_O)


def dropped(values_TD: Tensor, word_T: Tensor, share: float) -> Tensor:
    """The values with `share` of them set to zero and the others scaled up (dropout)."""
    kept_TD = uniform_noise(word_T, values_TD.shape[1], 0.5) >= share - 0.5
    return torch.where(kept_TD, values_TD / (1 - share), 0.0)


def uniform_noise(word_T: Tensor, width: int, bound: float) -> Tensor:
    """[T, width] fp32, uniform in [-bound, bound), from a word (int64) for each slot."""
    channel_D = torch.arange(1, width + 1, device=word_T.device) * _GOLDEN
    noise_TD = torch.empty((len(word_T), width), device=word_T.device)
    step = max(1, _CHUNK // width)
    for begin in range(0, len(word_T), step):
        rows = slice(begin, begin + step)
        bits_TD = _mix(word_T[rows, None] + channel_D)
        share_TD = _shifted(bits_TD, 64 - _BITS).float() * 2.0**-_BITS  # [0, 1)
        noise_TD[rows] = (2 * share_TD - 1) * bound
    return noise_TD


def _mix(word: Tensor) -> Tensor:
    """splitmix64's finalizer, as in `cod`."""
    word = (word ^ _shifted(word, 30)) * _FIRST
    word = (word ^ _shifted(word, 27)) * _SECOND
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shift is arithmetic."""
    shifted: Tensor = (word >> bits) & (2 ** (64 - bits) - 1)
    return shifted
