"""A target as it comes back from quantization or from tuning, for `fledge retarget`.

    python benchmarks/changed_target.py smollm2-135m --bits 4 --group 32 --out targets/int4
    python benchmarks/changed_target.py smollm2-135m --noise 0.1 --out targets/noise

--bits rounds every matrix of the decoder layers to so many bits, symmetric, with one scale for each
--group inputs of a row: what plain weight quantization does to the numbers. --noise adds normal
noise of that share of each matrix's own spread. Embedding, head and norms stay.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from fledge.models.resolve import load_model, load_tokenizer


def rounded(weight_OI: Tensor, *, bits: int, group: int) -> Tensor:
    """To the nearest of 2 ** bits - 1 steps between minus and plus the largest of each group."""
    parts = weight_OI.reshape(len(weight_OI), -1, group)
    most = 2 ** (bits - 1) - 1
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
    return ((parts / scale).round() * scale).reshape(weight_OI.shape)


@torch.no_grad()
def change(
    model: nn.Module, *, bits: int = 0, group: int = 32, noise: float = 0.0, seed: int = 0
) -> None:
    """Change the matrices of the decoder layers in place."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.get_decoder().layers.modules():  # type: ignore[operator]
        if isinstance(module, nn.Linear):
            weight = module.weight
            if bits:
                weight.copy_(rounded(weight, bits=bits, group=group))
            if noise:
                drawn = torch.randn(weight.shape, generator=generator)
                weight.add_(drawn.to(weight) * (noise * weight.std()))


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("model")
    words.add_argument("--bits", type=int, default=0)
    words.add_argument("--group", type=int, default=32)
    words.add_argument("--noise", type=float, default=0.0)
    words.add_argument("--out", type=Path, required=True)
    asked = words.parse_args()
    model = load_model(asked.model)
    change(model, bits=asked.bits, group=asked.group, noise=asked.noise)
    model.save_pretrained(asked.out)
    load_tokenizer(asked.model).save_pretrained(asked.out)


if __name__ == "__main__":
    main()
