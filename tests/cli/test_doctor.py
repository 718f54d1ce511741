"""`fledge doctor` reports what is installed, and never fails over what is missing."""

import builtins
import importlib.util
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fledge.cli import doctor
from fledge.cli.main import run
from fledge.core.install import install_extra


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def examined(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as caught:
        run(["doctor", "--json"])
    assert caught.value.code == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def parts(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in facts["parts"]}


def test_json_has_versions_devices_disk_cache_and_parts(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    facts = examined(capsys)
    assert facts["versions"]["torch"] == metadata.version("torch")
    assert facts["devices"]["cpu_cores"] >= 1
    assert facts["devices"]["memory_bytes"] > 2**28
    assert len(facts["devices"]["gpus"]) == torch.cuda.device_count()
    assert facts["disk"]["cache"]["free_bytes"] > 0
    assert facts["cache"] == []
    assert parts(facts)["GPU training"]["works"] == torch.cuda.is_available()
    for part in facts["parts"]:
        assert part["note"], part  # works or not, there is always a note


def test_the_table_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    names = parts(examined(capsys))
    with pytest.raises(SystemExit):
        run(["doctor"])
    out = capsys.readouterr().out
    for name in names:
        assert name in out


def test_the_cache_is_listed_by_model_names(
    own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = own_cache / "models" / "gguf-v1-abc"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(bytes(1000))
    (model / "fledge_source.json").write_text('{"name": "smollm2-135m"}')
    (own_cache / "rows").mkdir()
    (own_cache / "rows" / "a").write_bytes(bytes(10))
    facts = examined(capsys)
    assert [(entry["name"], entry["bytes"]) for entry in facts["cache"]] == [
        ("smollm2-135m", 1024),
        ("rows", 10),
    ]


def test_missing_optional_packages_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    facts = examined(capsys)
    assert set(facts["versions"].values()) - {facts["versions"]["python"]} == {None}
    assert parts(facts)["vLLM targets"]["install"] == install_extra("vllm")
    assert "fastapi, uvicorn, httptools" in parts(facts)["serve-target"]["note"]
    assert not parts(facts)["GGUF targets"]["works"]
    assert "ensurepip" in parts(facts)["embedded smollm2-135m"]["install"]


def test_install_commands_are_printed_unbroken_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.out, "_width", 40)
    line = "/somewhere/far/away/from/here/.venv/bin/pip install -e '.[track]'"
    monkeypatch.setattr(doctor, "install_extra", lambda extra: line.replace("track", extra))
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    monkeypatch.setattr(doctor, "installed_as", lambda package: None)
    with pytest.raises(SystemExit):
        run(["doctor"])
    assert f"  {line}  # tensorboard, wandb, trackio\n" in capsys.readouterr().out


def test_a_torch_that_fails_to_import_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def broken(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.12: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", broken)
    facts = examined(capsys)
    assert "libcudart" in facts["devices"]["torch_build"]
    assert "libcudart" in parts(facts)["GPU training"]["note"]


def gpu(capability: str, count: int = 1) -> doctor.Accelerator:
    card = doctor.Gpu("Card", 80 * 2**30, capability)
    return doctor.Accelerator("", "CUDA 12.8", (card,) * count)


@pytest.mark.parametrize(
    ("capability", "bf16", "fp8"),
    [("7.5", False, False), ("8.0", True, False), ("8.9", True, True), ("10.0", True, True)],
)
def test_precisions_follow_the_capability(capability: str, bf16: bool, fp8: bool) -> None:
    works = {part.name: part.works for part in doctor.optional_parts(gpu(capability))}
    assert works["GPU training"]
    assert (works["bf16 compute"], works["fp8 targets"]) == (bf16, fp8)


def test_the_weakest_gpu_decides() -> None:
    mixed = doctor.Accelerator("", "CUDA 12.8", gpu("10.0").gpus + gpu("7.5").gpus)
    assert mixed.capability == (7, 5)


def test_hidden_or_broken_gpus_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = doctor.optional_parts(doctor.Accelerator("", "CUDA 12.8"))[0]
    assert "CUDA_VISIBLE_DEVICES=''" in hidden.note
    broken = doctor.optional_parts(doctor.Accelerator("the GPU does not answer", "CUDA 12.8"))[0]
    assert (broken.works, broken.note) == (False, "the GPU does not answer")


def test_offline_flags_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub = parts(examined(capsys))["models by hub id"]
    assert not hub["works"]
    assert "HF_HUB_OFFLINE" in hub["note"]
