"""Makes a changed target, as after quantization or fine-tuning, for `fledge retarget`.

    python benchmarks/changed_target.py smollm2-135m --bits 4 --group 32 --out targets/int4
    python benchmarks/changed_target.py smollm2-135m --noise 0.1 --out targets/noise

--bits rounds every matrix of the decoder layers to that many bits, symmetric, with one scale per
--group inputs of a row, as plain weight quantization does. --noise adds Gaussian noise with that
share of each matrix's standard deviation. Embedding, head and norms are not changed.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from fledge.models.resolve import load_model, load_tokenizer


def rounded(weight_OI: Tensor, *, bits: int, group: int) -> Tensor:
    """Round to the nearest of 2 ** bits - 1 levels between plus and minus the group's largest."""
    groups = weight_OI.reshape(len(weight_OI), -1, group)
    largest_level = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest_level
    return ((groups / scale).round() * scale).reshape(weight_OI.shape)


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--bits", type=int, default=0)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = load_model(args.model)
    change(model, bits=args.bits, group=args.group, noise=args.noise)
    model.save_pretrained(args.out)
    load_tokenizer(args.model).save_pretrained(args.out)


if __name__ == "__main__":
    main()
