"""`target.backend=ray` in a recipe, on machines with and without Ray."""

import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.errors import BadInput, MissingPackage
from fledge.core.install import install_extra
from fledge.recipe.schema import load_recipe
from fledge.target.hf.kind import HfTarget
from fledge.target.kinds import engine_section, kind_of
from fledge.target.ray.spread import gpus_of
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


def refusal(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert isinstance(result.exception, BadInput), result.output
    return str(result.exception)


def test_commands_that_need_ray_report_that_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ray", "ray.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "chats.jsonl").write_text("{}\n")
    out = ("--out", tmp_path / "new.jsonl", "--ray")
    for arguments in (
        ("regenerate", tmp_path / "chats.jsonl", "--target", "smollm2-135m"),
        ("precompute", "smollm2_cpu", "target.model=org/name"),
    ):
        assert re.search(r"ray is not installed; .*\[cluster\]", refusal(*arguments, *out))
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


def test_only_a_target_that_a_worker_can_load_runs_on_ray(tmp_path: Path) -> None:
    arguments = ("precompute", "smollm2_cpu", "--out", tmp_path / "cache", "--ray")
    remote_error = refusal(*arguments, "target.backend=remote", "target.urls=http://h:1")
    assert "target.backend=remote does not run where it is asked" in remote_error
    assert "target.backend=ray does not" in refusal(*arguments, "target.backend=ray")
    assert "add --ray" in refusal(*arguments[:-1], "--workers", 2)
    assert gpus_of(VllmTarget(model="m", tp_size=4)) == 4
    assert gpus_of(HfTarget()) == 1


def test_the_doctor_shows_how_to_install_ray_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from fledge.cli import doctor

    monkeypatch.setattr(doctor, "installed_as", lambda package: None)
    parts = {part.name: part for part in doctor.optional_parts(doctor.Accelerator())}
    assert parts["clusters (Ray)"].install == install_extra("cluster")
    assert "[cluster]" in parts["clusters (Ray)"].install
