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


def test_a_worker_is_a_whole_target_of_another_kind() -> None:
    """What all kinds share stays where it was, so that switching the backend is enough."""
    plain = ("target.model=org/name", "target.dtype=bf16", "target.aux_layer_ids=3,1,2")
    here = load_recipe(None, list(plain)).target
    there = load_recipe(None, [*plain, "target.backend=ray"]).target
    assert there.inner() == here
    assert isinstance(here, HfTarget)
    own = ["target.worker={backend: vllm, tp_size: 2, engine_args: {enforce_eager: true}}"]
    engine = load_recipe(None, [*RAY, *own]).target.inner()
    wanted = {"model": "org/name", "tp_size": 2, "engine_args": {"enforce_eager": True}}
    assert engine == VllmTarget(**wanted)


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
def test_a_worker_that_cannot_be_is_one_line(worker: str, told: str) -> None:
    with pytest.raises(BadInput, match=r"target\.worker") as refused:
        load_recipe(None, [*RAY, f"target.worker={worker}"])
    assert told in str(refused.value)


def test_a_resolved_recipe_is_read_again(tmp_path: Path) -> None:
    recipe = load_recipe(None, [*RAY, "target.worker={backend: sglang, tp_size: 4}"])
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe
    once = kind_of(recipe.target).asked_once(load_recipe(None, list(RAY)).target)
    assert once.inner() == kind_of(HfTarget()).asked_once(HfTarget(model="org/name"))


def test_a_cluster_is_no_engine() -> None:
    with pytest.raises(BadInput, match="no engine 'ray'"):
        engine_section("ray", model="m")


def test_without_ray_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    section = load_recipe(None, list(RAY)).target
    with pytest.raises(MissingPackage, match=r"ray is not installed; .*install .*\[cluster\]"):
        kind_of(section).open(section, device=torch.device("cpu"), aux_layers=3)


def refusal(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(result.exception, BadInput), result.output
    return str(result.exception)


def test_verbs_that_spread_need_ray_and_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ray", "ray.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "chats.jsonl").write_text("{}\n")
    out = ("--out", tmp_path / "new.jsonl", "--ray")
    for words in (
        ("regenerate", tmp_path / "chats.jsonl", "--target", "smollm2-135m"),
        ("precompute", "smollm2_cpu", "target.model=org/name"),
    ):
        assert re.search(r"ray is not installed; .*\[cluster\]", refusal(*words, *out))
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]


def test_only_a_target_that_a_worker_loads_is_spread(tmp_path: Path) -> None:
    words = ("precompute", "smollm2_cpu", "--out", tmp_path / "cache", "--ray")
    elsewhere = refusal(*words, "target.backend=remote", "target.urls=http://h:1")
    assert "target.backend=remote does not run where it is asked" in elsewhere
    assert "target.backend=ray does not" in refusal(*words, "target.backend=ray")
    assert "add --ray" in refusal(*words[:-1], "--workers", 2)
    assert gpus_of(VllmTarget(model="m", tp_size=4)) == 4
    assert gpus_of(HfTarget()) == 1


def test_the_doctor_knows_the_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from fledge.cli import doctor

    monkeypatch.setattr(doctor, "installed_as", lambda package: None)
    parts = {part.name: part for part in doctor._packages()}
    assert parts["clusters (Ray)"].install == install_extra("cluster")
    assert "[cluster]" in parts["clusters (Ray)"].install
