"""DSpark exports in vLLM's own classes: its loader takes our files, shares the target's embedding
and head, and computes our logits, Markov biases, confidences and tokens. Its runner needs a GPU;
tests/engines/vllm/dspark_model.py describes what replaces it. Negative controls must fail."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.block_case import CONTROLS, DSPARK, SLOTS, BlockCase, spoiled
from engines.vllm.dspark_model import draft_block, loaded_block
from fledge.formats.engines import serve_command
from fledge.formats.export import read_export_record

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("norms_by_layer")]


class Case(BlockCase):
    def theirs(self, export: Path, place: Path) -> dict[str, Tensor]:
        """What vLLM computes with the models and options of the serve command."""
        command = serve_command(read_export_record(export), str(export), target=str(self.target))
        speculative = None
        if "--speculative-config" in command:
            speculative = json.loads(command[command.index("--speculative-config") + 1])
            assert speculative["num_speculative_tokens"] == SLOTS
        with loaded_block(Path(command[2]), speculative, place) as model:
            assert type(model).__name__ == "Qwen3DSparkForCausalLM"
            assert model.config.sample_from_anchor is True
            return draft_block(model, self.aux_TD, self.text[-1], SLOTS)


@pytest.fixture(scope="module")
def case(tmp_path_factory: Any, engines: Any) -> Case:
    engines.close()
    return Case(tmp_path_factory.mktemp("dspark"), **DSPARK)


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_vllm_computes_our_blocks(engine: str, case: Case, tmp_path: Path) -> None:
    expected = case.ours()
    results = case.theirs(case.export(engine), tmp_path / "init")
    assert torch.equal(expected["tokens"], results["tokens"])
    for name in ("logits", "biases", "confidence"):
        torch.testing.assert_close(results[name], expected[name], rtol=0, atol=1e-4)
    assert expected["logits"].std() > 0.5
    assert expected["biases"].std() > 0.05


@pytest.mark.parametrize("control", CONTROLS)
def test_a_wrong_tensor_is_noticed(control: str, case: Case, tmp_path: Path) -> None:
    broken = spoiled(case.export("vllm"), control, tmp_path / "broken")
    results, expected = case.theirs(broken, tmp_path / "init"), case.ours()
    errors = [
        (results[name] - expected[name]).abs().max() for name in ("logits", "biases", "confidence")
    ]
    assert max(errors) > 0.05
