"""Kinds of targets: the built-in ones, and one that is registered from outside."""

import subprocess
import sys
from typing import Literal

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.recipe.schema import load_recipe
from fledge.target.base import Eagle3TargetBackend
from fledge.target.hf.kind import HfTarget
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.kinds import (
    TARGET_KINDS,
    TargetKind,
    TargetSection,
    engine_section,
    kind_of,
    model_name,
    target_sections,
)
from fledge.training.drafts import make_target
from fledge.training.planning.prediction import predict
from fledge.training.setup import set_up

CPU = torch.device("cpu")


class ToyTarget(TargetSection):
    """A Hugging Face model behind a third-party class."""

    backend: Literal["toy"] = "toy"
    """Registered by a test."""

    gain: float = 1.0
    """Its states are multiplied by this."""


class Toy(Eagle3TargetBackend):
    def __init__(self, inner: HFEagle3TargetModel, gain: float) -> None:
        super().__init__("hidden")
        self.inner, self.gain, self.aux_layer_ids = inner, gain, inner.aux_layer_ids

    def answer(self, rows):
        batch = self.inner.answer(rows)
        batch.aux_hidden_states.mul_(self.gain)
        return batch

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def info(self):
        return self.inner.info()


class ToyKind(TargetKind[ToyTarget]):
    name = "toy"
    section = ToyTarget

    def open(self, section, *, device, aux_layers):
        inner = HFEagle3TargetModel.from_pretrained(
            section.model,
            aux_layer_ids=section.aux_layer_ids,
            dtype=torch.float32,
            device=device,
            num_aux_layers=aux_layers,
        )
        return Toy(inner, section.gain)


@pytest.fixture
def toy(recipe, tmp_path):
    """Make recipes of the new kind: a built-in one with its backend switched."""
    TARGET_KINDS.add("toy", ToyKind())

    def make(*overrides, run="toy"):
        written = recipe(run=run).write_resolved(tmp_path / "written")
        return load_recipe(written, ["target.backend=toy", *overrides])

    yield make
    if "toy" in TARGET_KINDS:
        TARGET_KINDS.remove("toy")


def test_an_external_kind_is_read_opened_and_planned(toy, tiny_target):
    recipe = toy("target.gain=2")
    assert recipe.target == ToyTarget(model=str(tiny_target), aux_layer_ids=(0, 1, 2), gain=2.0)
    assert model_name(recipe.target) == str(tiny_target)
    rows = TokenBatch(*(torch.arange(1, 9)[None] for _ in range(3)))
    with make_target(recipe, CPU) as scaled, make_target(toy(), CPU) as plain:
        expected = 2 * plain.answer(rows).aux_hidden_states
        assert torch.equal(scaled.answer(rows).aux_hidden_states, expected)
    training = set_up(recipe)
    assert predict(training).target_bytes == sum(
        weight.nbytes for weight in training.parts.target.info().module.parameters()
    )


def test_a_removed_kind_is_unknown(toy):
    section = toy().target
    TARGET_KINDS.remove("toy")
    with pytest.raises(BadInput, match=r"unknown target\.backend 'toy'"):
        kind_of(section)
    with pytest.raises(BadInput, match=r"target\.backend"):
        load_recipe(None, ["target.backend=toy"])


def test_sections_do_not_import_torch():
    code = (
        "import sys, fledge.recipe.schema; from fledge.target.kinds import target_sections; "
        "assert list(target_sections()) == ['hf', 'remote', 'cache', 'sglang', 'vllm', 'ray']; "
        "assert not {'torch', 'transformers', 'vllm', 'sglang'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_kinds_and_sections_agree_on_their_names():
    for name, section in target_sections().items():
        assert TARGET_KINDS[name].name == name
        assert section.model_fields["backend"].default == name


def test_only_kinds_that_load_weights_are_engines():
    section = engine_section("hf", model="m", dtype="bf16", compile=False, engine_args={"a": 1})
    assert section == HfTarget(model="m", dtype="bfloat16", compile=False)
    assert engine_section("vllm", model="m", engine_args={"a": 1}).engine_args == {"a": 1}
    with pytest.raises(BadInput, match=r"no engine 'cache'"):
        engine_section("cache", model="m")
    with pytest.raises(BadInput, match=r"--dtype: .* got 'int3'"):
        engine_section("hf", model="m", dtype="int3")
