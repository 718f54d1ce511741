"""`fledge doctor` reports what is installed, and never fails over what is missing."""

import builtins
import importlib.util
import json
from importlib import metadata

import pytest

from fledge.cli import doctor
from fledge.core.install import install_extra


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def examined(fledge):
    def call():
        ended = fledge("doctor", "--json")
        assert ended.code == 0
        return json.loads(ended.out)

    return call


def parts(facts):
    return {part["name"]: part for part in facts["parts"]}


def test_json_has_versions_devices_disks_and_parts(examined):
    import torch

    facts = examined()
    assert facts["versions"]["torch"] == metadata.version("torch")
    assert facts["devices"]["cpu_cores"] >= 1
    assert facts["devices"]["memory_bytes"] > 2**28
    assert len(facts["devices"]["gpus"]) == torch.cuda.device_count()
    assert facts["disk"]["cache"]["free_bytes"] > 0
    assert parts(facts)["GPU training"]["works"] == torch.cuda.is_available()
    for part in facts["parts"]:
        assert part["note"], part  # works or not, there is always a note


def test_the_table_names_every_part(fledge, examined):
    table = fledge("doctor").out
    for name in parts(examined()):
        assert name in table


def test_missing_optional_packages_are_reported(monkeypatch, examined):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    facts = examined()
    assert set(facts["versions"].values()) - {facts["versions"]["python"]} == {None}
    assert parts(facts)["vLLM targets"]["install"] == install_extra("vllm")
    assert "uvicorn, httptools" in parts(facts)["serve-target"]["note"]
    assert not parts(facts)["GGUF targets"]["works"]


def test_install_commands_are_printed_unbroken_below_the_table(monkeypatch, fledge):
    monkeypatch.setattr(doctor.out, "_width", 40)
    line = "/somewhere/far/away/from/here/.venv/bin/pip install -e '.[track]'"
    monkeypatch.setattr(doctor, "install_extra", lambda extra: line.replace("track", extra))
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    monkeypatch.setattr(doctor, "installed_as", lambda package: None)
    assert f"  {line}  # tensorboard, wandb\n" in fledge("doctor").out


def test_a_torch_that_fails_to_import_is_reported(monkeypatch, examined):
    real = builtins.__import__

    def broken(name, *rest):
        if name == "torch":
            raise OSError("libcudart.so.12: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", broken)
    facts = examined()
    assert "libcudart" in facts["devices"]["torch_build"]
    assert "libcudart" in parts(facts)["GPU training"]["note"]


def gpus(*capabilities):
    cards = [doctor.Gpu("Card", 80 * 2**30, capability) for capability in capabilities]
    return doctor.Accelerator("", "CUDA 12.8", tuple(cards))


@pytest.mark.parametrize(
    ("capability", "bf16", "fp8"),
    [((7, 5), False, False), ((8, 0), True, False), ((8, 9), True, True), ((10, 0), True, True)],
)
def test_precisions_follow_the_weakest_gpu(capability, bf16, fp8):
    parts = doctor.optional_parts(gpus((10, 0), capability))
    works = {part.name: part.works for part in parts}
    assert works["GPU training"]
    assert (works["bf16 compute"], works["fp8 targets"]) == (bf16, fp8)


def test_missing_or_broken_gpus_are_explained():
    missing = doctor.optional_parts(doctor.Accelerator("", "CUDA 12.8"))[0]
    assert "nvidia-smi" in missing.note
    broken = doctor.optional_parts(doctor.Accelerator("the GPU does not answer", "CUDA 12.8"))[0]
    assert (broken.works, broken.note) == (False, "the GPU does not answer")
