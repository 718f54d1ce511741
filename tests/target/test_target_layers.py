"""Which aux layers a draft reads, and that they are validated before any hook is registered."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from torch import nn

from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.layers import (
    default_aux_layer_ids,
    describe_final_norm,
    find_layers,
    target_depth,
    validate_aux_layer_ids,
)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6])
def test_shallow_targets_have_no_default_ids(depth: int) -> None:
    with pytest.raises(ValueError, match="too shallow"):
        default_aux_layer_ids(depth)


@given(st.lists(st.integers(-3, 12), max_size=5), st.integers(1, 10))
def test_validation_accepts_exactly_three_distinct_ids_in_range(ids: list[int], depth: int) -> None:
    good = len(ids) == len(set(ids)) == 3 and all(0 <= i < depth for i in ids)
    if good:
        assert validate_aux_layer_ids(ids, depth) == ids
    else:
        with pytest.raises(ValueError, match="aux_layer_ids"):
            validate_aux_layer_ids(ids, depth)


@pytest.mark.parametrize(
    ("depth", "count", "ids"),
    [
        *((7, 3, [1, 2, 3]), (16, 3, [1, 7, 12]), (30, 3, [1, 14, 26]), (32, 3, [1, 15, 28])),
        *((32, 1, [32]), (32, 2, [1, 29])),
        (36, 5, [1, 9, 17, 25, 33]),
        (9, 5, [1, 2, 4, 5, 6]),
    ],
)
def test_default_layers_are_spread_over_the_depth(depth: int, count: int, ids: list[int]) -> None:
    assert default_aux_layer_ids(depth, count) == ids
    assert validate_aux_layer_ids(ids, depth, count) == validate_aux_layer_ids(ids, depth, None)
    with pytest.raises(ValueError, match=r"too shallow .* distinct aux_layer_ids"):
        default_aux_layer_ids(4, count + 1)
    with pytest.raises(ValueError, match="exactly seven distinct layers"):
        validate_aux_layer_ids(ids, depth, 7)
    with pytest.raises(ValueError, match="distinct layers"):
        validate_aux_layer_ids([1, 1], depth, None)


@pytest.mark.parametrize(
    "ids", [(5, 0, 2), range(3), np.array([5, 0, 2]), torch.tensor([5, 0, 2]), iter([5, 0, 2])]
)
def test_ids_of_any_integer_type_become_ints(ids: Any) -> None:
    expected = [0, 1, 2] if isinstance(ids, range) else [5, 0, 2]
    validated = validate_aux_layer_ids(ids, 8)
    assert validated == expected
    assert {type(i) for i in validated} == {int}


@pytest.mark.parametrize(
    "ids",
    [
        *([1, 2], [1, 2, 3, 4], [1, 1, 2], [0, 1, 8], [-1, 1, 2], [1.0, 2, 3]),
        *([True, 2, 3], [np.True_, 2, 3], ["1", "2", "3"], "123", [None, 1, 2], 5),
    ],
)
def test_bad_ids_are_refused_before_any_hook(ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a hook was registered")

    monkeypatch.setattr(nn.Module, "register_forward_hook", refuse)
    with pytest.raises(ValueError, match="aux_layer_ids"):
        HFEagle3TargetModel(tiny_model("llama"), ids)


def test_shallow_models_take_explicit_ids() -> None:
    model = tiny_model("llama")
    model.model.layers = model.model.layers[:4]
    model.config.num_hidden_layers = 4
    with pytest.raises(ValueError, match="too shallow"):
        HFEagle3TargetModel(model)
    target = HFEagle3TargetModel(model, [3, 0, 1], supervision="hidden")
    assert target.aux_layer_ids == [3, 0, 1]
    assert target.info().depth == 4


def test_depth_comes_from_the_text_config() -> None:
    nested = SimpleNamespace(num_hidden_layers=2, text_config=SimpleNamespace(num_hidden_layers=16))
    assert target_depth(nested) == 16
    assert target_depth(SimpleNamespace(num_hidden_layers=16)) == 16
    unrelated = SimpleNamespace(num_hidden_layers=16, text_config=SimpleNamespace(prompt="caption"))
    assert target_depth(unrelated) == 16  # a text_config without layers is not the model's
    assert target_depth(None, [nn.Identity()] * 9) == 9
    assert target_depth(tiny_model("gpt2").config) == 8
    with pytest.raises(ValueError, match="num_hidden_layers"):
        target_depth(SimpleNamespace(num_hidden_layers=0))


def test_missing_layers_and_wrong_keys_are_explained() -> None:
    with pytest.raises(ValueError, match=r"no decoder layers in Linear.*transformer\.h"):
        find_layers(nn.Linear(2, 2))
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": nn.Identity(), "5": nn.Identity()})
    with pytest.raises(ValueError, match="keyed"):
        find_layers(model)


@pytest.mark.parametrize(
    ("name", "path", "kind"),
    [
        ("llama", "model.norm", "LlamaRMSNorm"),
        ("gpt2", "transformer.ln_f", "LayerNorm"),
        ("gemma3-conditional", "model.language_model.norm", "Gemma3RMSNorm"),
    ],
)
def test_the_final_norm_is_described(name: str, path: str, kind: str) -> None:
    model = tiny_model(name)
    norm = describe_final_norm(model)
    assert norm is not None
    assert (norm.path, norm.kind) == (path, kind)
    assert norm.eps is not None
    assert torch.equal(norm.weight_D, model.get_submodule(path).weight)
