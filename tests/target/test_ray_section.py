"""`target.backend=ray` in a recipe, on machines with and without Ray."""

import sys
from pathlib import Path

import pytest
import torch

from fledge.core.errors import BadInput, MissingPackage
from fledge.recipe.schema import load_recipe
from fledge.target.hf.kind import HfTarget
from fledge.target.kinds import engine_section, kind_of
from fledge.target.vllm.kind import VllmTarget

RAY = ("target.backend=ray", "target.model=org/name")


def test_a_worker_is_a_complete_target_of_another_kind() -> None:
    """Fields that all kinds share keep their place, so that switching the backend is enough."""
    plain = ("target.model=org/name", "target.dtype=bf16", "target.aux_layer_ids=3,1,2")
    local = load_recipe(None, list(plain)).target
    on_ray = load_recipe(None, [*plain, "target.backend=ray"]).target
    assert on_ray.inner() == local
    assert isinstance(local, HfTarget)
    worker = ["target.worker={backend: vllm, tp_size: 2, engine_args: {enforce_eager: true}}"]
    engine = load_recipe(None, [*RAY, *worker]).target.inner()
    fields = {"model": "org/name", "tp_size": 2, "engine_args": {"enforce_eager": True}}
    assert engine == VllmTarget(**fields)


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        ("{backend: remote}", "one of hf, sglang, vllm is wanted"),
        ("{tp_sise: 2}", "target.worker"),
        ("{backend: vllm, tp_sise: 2}", "did you mean 'tp_size'"),
        ("{backend: vllm, tp_size: 0}", "greater than 0"),
        ("{model: other}", "beside worker"),
        ("{parallel: {tp: 2}}", "one process"),
    ],
)
def test_an_invalid_worker_is_a_one_line_error(worker: str, told: str) -> None:
    with pytest.raises(BadInput, match=r"target\.worker") as refused:
        load_recipe(None, [*RAY, f"target.worker={worker}"])
    assert told in str(refused.value)


def test_a_resolved_recipe_can_be_read_again(tmp_path: Path) -> None:
    recipe = load_recipe(None, [*RAY, "target.worker={backend: sglang, tp_size: 4}"])
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe
    once = kind_of(recipe.target).asked_once(load_recipe(None, list(RAY)).target)
    assert once.inner() == kind_of(HfTarget()).asked_once(HfTarget(model="org/name"))


def test_ray_is_not_an_engine() -> None:
    with pytest.raises(BadInput, match="no engine 'ray'"):
        engine_section("ray", model="m")


def test_without_ray_the_error_shows_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    section = load_recipe(None, list(RAY)).target
    with pytest.raises(MissingPackage, match=r"ray is not installed; .*install .*\[cluster\]"):
        kind_of(section).open(section, device=torch.device("cpu"), aux_layers=3)
