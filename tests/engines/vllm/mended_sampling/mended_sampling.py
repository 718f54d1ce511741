"""A vLLM plugin (`vllm.general_plugins`) for servers that tests start on a CPU.

vLLM 0.32 without Triton loses the temperature of requests with drafts: its CPU kernel writes the
value of each drafted token into a copy (`_expand_kernel_impl` converts a float tensor to integers
and fills the result), so the sampler divides by memory that was never written. Texts are drawn from
distributions other than the target's, NaN included. The GPU kernel is right. With this replacement
the CPU results are right too, and the tests examine vLLM's actual sampling.
"""

import torch
from torch import Tensor


def expanded(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """[a, b] and counts up to [2, 5] -> [a, a, b, b, b]."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values: Tensor = x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts)
    assert len(values) == num_tokens
    return values


def mend() -> None:
    """Install the replacement; vLLM calls this in each of its processes."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expanded
