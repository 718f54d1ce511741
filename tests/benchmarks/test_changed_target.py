"""Changed targets: what the script does to them, and how much a refit recovers."""

import shutil

import pytest
import torch
from transformers import LlamaForCausalLM

from changed_target import change, rotate, rounded
from fledge.methods.registry import load_draft
from fledge.training.fit import fit
from fledge.training.retarget import retarget
from fledge.training.setup import set_up
from train import tiny
from train.tiny import Notes, make_chats


def test_a_rotated_model_computes_the_same_in_another_basis(tiny_target):
    original, rotated = (LlamaForCausalLM.from_pretrained(tiny_target).double() for _ in range(2))
    with torch.no_grad():  # norm weights other than 1
        for model in (original, rotated):
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.copy_(torch.linspace(0.5, 2.0, len(weight)))
    rotate(rotated)
    ids = torch.arange(40)[None]
    for position, (a, b) in enumerate(zip(*states(ids, original, rotated), strict=True)):
        torch.testing.assert_close(a.norm(dim=-1), b.norm(dim=-1), msg=f"layer {position}")
        assert (a - b).norm() > a.norm()
    # norms compute in float32
    torch.testing.assert_close(original(ids).logits, rotated(ids).logits, rtol=1e-4, atol=1e-4)


def states(ids, *models):
    """The residual stream before every layer; the last state is normalized and left out."""
    return [model(ids, output_hidden_states=True).hidden_states[:-1] for model in models]


def test_rounding_errors_are_at_most_half_a_step():
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    for bits in (3, 4, 8):
        rounded_weight = rounded(weight, bits=bits, group=16)
        step = weight.reshape(6, 4, 16).abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        error = (rounded_weight - weight).reshape(6, 4, 16).abs()
        assert (error <= step * 0.5001).all()
        assert error.max() > 0.4 * step.min()


@pytest.fixture(scope="module")
def place(tiny_target, tmp_path_factory):
    """A draft, and its target rotated into another basis: unrounded and rounded."""
    root = tmp_path_factory.mktemp("rotated")
    chats = make_chats(root / "chats.jsonl", 80)
    for name, bits in (("turned", 0), ("turned-int8", 8)):
        model = LlamaForCausalLM.from_pretrained(tiny_target)
        rotate(model)
        change(model, bits=bits, group=16)
        shutil.copytree(tiny_target, root / name)
        model.save_pretrained(root / name)
    fit(set_up(tiny.recipe_for(tiny_target, chats, root / "run", "training.epochs=9")), Notes())
    return root


@pytest.mark.parametrize("target", ["turned", "turned-int8"])
def test_a_refit_recovers_what_a_change_of_basis_cost(place, tmp_path, target):
    """All of it if nothing else changed. The draft keeps its embedding: the new one is rotated."""
    result = retarget(
        place / "run", str(place / target), [str(place / "chats.jsonl")], out=tmp_path / "out",
        device="cpu",
    )  # fmt: skip
    assert result.taken == ()
    before, after = load_draft(place / "run" / "best"), load_draft(tmp_path / "out")
    assert torch.equal(before.embed_tokens.weight, after.embed_tokens.weight)
    lost = result.old_length - result.length_before
    assert lost > 0.05
    if target == "turned":
        assert result.error < 1e-3 * result.error_before
        assert result.length == pytest.approx(result.old_length)
    assert result.length - result.length_before > 0.9 * lost
