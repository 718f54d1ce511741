"""Makes a changed target, as after quantization or fine-tuning, for `fledge retarget`.

    python benchmarks/changed_target.py smollm2-135m --bits 4 --group 32 --out targets/int4
    python benchmarks/changed_target.py smollm2-135m --bits 4 --rotate --out targets/rotated-int4
    python benchmarks/changed_target.py smollm2-135m --noise 0.1 --out targets/noise

--bits rounds every matrix of the decoder layers to that many bits, symmetric, with one scale per
--group inputs of a row, as plain weight quantization does. --rotate first turns the hidden states
into another orthogonal basis, as quantizers do that spread outliers over all channels (QuaRot,
SpinQuant): norms are folded into the matrices behind them, and the model computes the same
function. --noise adds Gaussian noise with that share of each matrix's standard deviation.
"""

import argparse
from pathlib import Path
from typing import Any

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
def rotate(model: Any, *, seed: int = 0) -> None:
    """Put the hidden states of a Llama-style model into a random orthogonal basis, in place.

    x Q stands where x stood: what writes to the residual stream is multiplied by Q, what reads from
    it by Q as well. RMSNorm commutes with a rotation once its weight is one.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    size = decoder.embed_tokens.weight.shape[1]
    generator = torch.Generator().manual_seed(seed)
    square_DD = torch.randn(size, size, generator=generator, dtype=torch.float64)
    q_DD = torch.linalg.qr(square_DD).Q

    head.weight = nn.Parameter(head.weight.clone())  # no longer the embedding, where it was tied
    model.config.tie_word_embeddings = False
    readers = [([head], decoder.norm)]
    writers = []
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers.append(
            ([attention.q_proj, attention.k_proj, attention.v_proj], layer.input_layernorm)
        )
        readers.append(([mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm))
        writers += [attention.o_proj, mlp.down_proj]
    for linears, norm in readers:
        for linear in linears:
            folded_OD = linear.weight.double() * norm.weight.double()
            linear.weight.copy_(folded_OD @ q_DD)
        norm.weight.fill_(1.0)
    for linear in writers:
        linear.weight.copy_(q_DD.t() @ linear.weight.double())
    decoder.embed_tokens.weight.copy_(decoder.embed_tokens.weight.double() @ q_DD)


@torch.no_grad()
def change(
    model: Any, *, bits: int = 0, group: int = 32, noise: float = 0.0, seed: int = 0
) -> None:
    """Change the matrices of the decoder layers in place."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.get_decoder().layers.modules():
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
    parser.add_argument("--rotate", action="store_true")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = load_model(args.model)
    if args.rotate:
        rotate(model)
    change(model, bits=args.bits, group=args.group, noise=args.noise)
    model.save_pretrained(args.out)
    load_tokenizer(args.model).save_pretrained(args.out)


if __name__ == "__main__":
    main()
