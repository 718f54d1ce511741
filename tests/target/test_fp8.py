"""The fp8 target: its arithmetic matches its definition and is close to full precision."""

import copy
from functools import partial

import pytest
import torch
from contract import packed_rows, some_documents
from tiny_models import tiny_model
from torch import nn

from fledge.target.hf.loading import Fp8Linear, convert_linears, rounded
from fledge.target.hf.model import HFEagle3TargetModel


def test_rounding_is_within_float8_precision():
    torch.manual_seed(0)
    x_ND = torch.randn(50, 64) * torch.logspace(-6, 6, 50)[:, None]
    x8_ND, scale_N1 = rounded(x_ND)
    back_ND = x8_ND.float() * scale_N1
    largest_N1 = x_ND.abs().amax(-1, keepdim=True)
    # 3 mantissa bits; subnormal numbers have steps of 2^-9 / 448 of the largest
    assert ((back_ND - x_ND).abs() <= x_ND.abs() * 2**-4 + largest_N1 * 2**-10 / 448).all()
    assert x8_ND.float().abs().amax() == 448
    assert rounded(torch.zeros(2, 16))[0].float().abs().sum() == 0


def product_of_rounded(weight, x):
    (x8, x_scale), (w8, w_scale) = rounded(x.flatten(0, -2)), rounded(weight)
    out = (x8.double() * x_scale) @ (w8.double() * w_scale).t()
    return out.float().view(*x.shape[:-1], -1)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_in_fp8_is_the_product_of_the_rounded_numbers(bias):
    torch.manual_seed(1)
    linear, x = nn.Linear(48, 32, bias=bias), torch.randn(3, 5, 48)
    got = Fp8Linear(linear)(x)
    want = product_of_rounded(linear.weight.detach(), x) + (linear.bias if bias else 0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    error = (got - linear(x)).norm() / linear(x).norm()
    assert 1e-3 < error < 0.05


def test_only_the_decoder_layers_change():
    model = tiny_model("llama")
    head, embedding = model.lm_head.weight.clone(), model.model.embed_tokens.weight.clone()
    reference = copy.deepcopy(model)
    for layer in reference.model.layers:
        for linear in (m for m in layer.modules() if isinstance(m, nn.Linear)):
            linear.forward = partial(product_of_rounded, linear.weight)
    batch = packed_rows(some_documents(), 14)
    expected = HFEagle3TargetModel(reference, supervision="hidden").generate_batch(*batch)
    plain_fingerprint = HFEagle3TargetModel(model, supervision="hidden").info().weights_fingerprint
    count = convert_linears(model)
    assert count == 7 * len(model.model.layers)
    assert torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    target = HFEagle3TargetModel(model, supervision="hidden")
    batch_fp8 = target.generate_batch(*batch)
    for name in ("aux_hidden_states", "last_hidden_states"):
        got, want = getattr(batch_fp8, name), getattr(expected, name)
        assert (got - want).norm() < 1e-3 * want.norm()
    assert "float8_e4m3fn" in target.info().weight_dtypes
    assert target.info().weights_fingerprint != plain_fingerprint


def test_fp8_can_be_requested_as_a_dtype(tiny_target):
    target = HFEagle3TargetModel.from_pretrained(
        tiny_target, aux_layer_ids=[0, 1, 2], dtype="fp8", device="cpu"
    )
    assert target.info().dtype == torch.bfloat16
    assert "float8_e4m3fn" in target.info().weight_dtypes
