"""Packed linear layers compute what the usual ones do; passes over few tokens round alike."""

import platform

import pytest
import torch
from torch import nn

from decode.tiny_decode import make_target
from fledge.core.machine import multiplies_bfloat16
from fledge.decode import packed
from fledge.decode.packed import PackedLinears
from fledge.decode.target import CachedTarget

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available(),
    reason="weights are packed by oneDNN, on x86",
)
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(not multiplies_bfloat16(), reason="no bfloat16 products here"),
    ),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 17, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_packed_products_are_the_usual_ones(dtype, rows, bias):
    model = nn.Sequential(nn.Linear(96, 200, bias=bias), nn.SiLU(), nn.Linear(200, 72, bias=bias))
    model.to(dtype)
    x = torch.randn(1, rows, 96).to(dtype)
    usual = model(x)
    with PackedLinears(model).in_use():
        assert "forward" in vars(model[0])
        found = model(x)
    assert "forward" not in vars(model[0])
    torch.testing.assert_close(found, usual, rtol=0, atol=2e-6 if dtype == torch.float32 else 0)


@torch.no_grad()
def test_weights_that_change_are_packed_again():
    layer = nn.Linear(64, 64, bias=False)
    model, x = nn.Sequential(layer), torch.randn(2, 64)
    for _ in range(2):
        with PackedLinears(model).in_use():
            torch.testing.assert_close(model(x), x @ layer.weight.T)
        layer.weight.mul_(2)  # as an optimizer does
    layer.weight = nn.Parameter(torch.eye(64))
    with PackedLinears(model).in_use():
        torch.testing.assert_close(model(x), x)


def test_other_layers_and_large_models_stay_as_they_are(monkeypatch):
    class Other(nn.Linear):
        pass

    assert not PackedLinears(nn.Sequential(Other(64, 64), nn.Linear(64, 64).double())).any
    assert PackedLinears(model := nn.Sequential(nn.Linear(64, 64))).any
    monkeypatch.setattr(packed, "_MOST_BYTES", 64 * 64 * 4 - 1)
    assert not PackedLinears(model).any


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_a_token_has_the_same_output_in_passes_of_any_few_tokens(dtype):
    """Bit for bit: then drafted text is plain text, near ties included."""
    model, prompt, drafted = make_target().to(dtype), list(range(3, 20)), [5, 9, 2, 7]
    target = CachedTarget(model, [0, 1])
    first = len(prompt)

    def read(place, tokens):
        used = target.room(place + len(tokens))
        return target.read(torch.tensor([tokens]), torch.tensor([place]), used=used, level=True)

    target.begin([prompt], ahead=4)
    together = read(first, drafted)
    for chunks in ([1, 1, 1, 1], [2, 2], [3, 1], [1, 3]):
        target.begin([prompt], ahead=4)
        place, outputs = first, []
        for count in chunks:
            outputs.append(read(place, drafted[place - first :][:count]))
            place += count
        for name in ("logits_BNV", "aux_BND"):
            apart = torch.cat([getattr(output, name) for output in outputs], 1)
            assert torch.equal(apart, getattr(together, name)), (chunks, name)
