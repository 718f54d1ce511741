"""Targets that several ranks hold together keep the contract, and are the model of one process."""

from typing import Any, get_args

import pytest
import torch
from contract import CHECKS, Case
from ranks import run_ranks
from tiny_models import tiny_model

from fledge.core.batch import Supervision
from fledge.core.distributed import join_world
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.hf.sharded import target_mesh
from fledge.target.weights import weights_fingerprint

pytestmark = pytest.mark.ranks

ARCHITECTURES = ("llama", "qwen3-moe", "gemma3-text")
# the whole vocabulary and all heads can be cut in four
EVEN = {"vocab_size": 96, "num_key_value_heads": 4}
CPU = torch.device("cpu")


def _hold_to_contract(architecture: str, directory: str, layout: dict[str, int]) -> None:
    join_world(CPU)
    reference = tiny_model(architecture, **EVEN)
    mesh = target_mesh(CPU, **{"fsdp": 1, "cp": 1, "tp": 1, **layout})
    loaded = HFEagle3TargetModel.from_pretrained(directory, supervision="logits", mesh=mesh)
    model, cp_mesh = loaded.model, loaded.cp_mesh

    def make(supervision: Supervision) -> HFEagle3TargetModel:
        return HFEagle3TargetModel(model, cp_mesh=cp_mesh, supervision=supervision)

    for supervision in get_args(Supervision):
        case = Case(architecture, reference, make, supervision, rtol=1e-5, atol=2e-5)
        for check in CHECKS:
            check(case)
    assert make("hidden").info().weights_fingerprint == weights_fingerprint(reference)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("models")
    for architecture in ARCHITECTURES:
        tiny_model(architecture, **EVEN).save_pretrained(directory / architecture)
    return directory


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "layout",
    [{"fsdp": 2}, {"tp": 2}, {"tp": 4}, {"fsdp": 2, "tp": 2}],
    ids=lambda layout: "x".join(f"{name}{size}" for name, size in layout.items()),
)
def test_contract(saved: Any, architecture: str, layout: dict[str, int]) -> None:
    ranks = 1
    for size in layout.values():
        ranks *= size
    run_ranks(ranks, _hold_to_contract, architecture, str(saved / architecture), layout)
