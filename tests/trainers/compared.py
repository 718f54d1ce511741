"""Compares a step of another trainer with ours: loss, counts, and the gradient of every parameter.

Other trainers compute the target's distribution in fp32, so in float64 they agree with us to about
1e-7. A rule that differs (a mask, a shift, a norm) changes losses by more than 1e-3.
"""

import torch

from objective.naive_peagle import sampled_depths


def gradients(model, *, prefix=""):
    """The gradients of a model's trained parameters, by name without `prefix`."""
    return {
        name.removeprefix(prefix): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same_step(theirs, ours, *, tolerance=2e-6):
    """Compare (loss, gradients) of two steps. Every parameter of ours has a gradient of theirs."""
    (their_loss, their_gradients), (our_loss, our_gradients) = theirs, ours
    torch.testing.assert_close(our_loss, their_loss, rtol=tolerance, atol=0, check_dtype=False)
    assert our_gradients.keys() == their_gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in their_gradients.values())
    assert largest > 0
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(
            gradient, their_gradients[name], rtol=0, atol=tolerance * largest, check_dtype=False,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


def dense_attention(q, k, v, *, block_mask, scale=None, **_):
    """Flex attention written out, with the same mask: on a CPU flex attention has no backward."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    queries, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    zero = torch.zeros((), dtype=torch.long)
    visible = block_mask.mask_mod(zero, zero, queries, keys)
    scores = (q @ k.transpose(2, 3)) * (scale or q.shape[3] ** -0.5)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)  # rows of padding see none
    return scores.softmax(-1) @ v


def sampled_elements(documents, *, width, depths, seed):
    """P-EAGLE's (anchors, depths) for every document, in the order of other trainers: depth by
    depth, with depth 0 at every slot of a row, padding included."""
    options = {"num_depths": depths, "ratio": 0.7, "ratio_min": 0.2}
    for deepest in sampled_depths(documents, seed=seed, **options):
        pairs = [(anchor, 0) for anchor in range(width)]
        for depth in range(1, depths):
            pairs += [(anchor, depth) for anchor, last in enumerate(deepest) if last >= depth]
        yield tuple(torch.tensor(pairs, dtype=torch.long).view(-1, 2).T)
