"""DSpark exports in vLLM's own classes: its loader takes our files, shares the target's embedding
and head, and computes our logits, Markov biases, confidences and tokens. Its runner wants a GPU
(tests/engines/vllm/dspark_model.py says what stands for it here). Controls must not pass."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.block_case import DSPARK, SLOTS, BlockCase
from engines.vllm.dspark_model import draft_block, loaded_dspark
from fledge.export.commands import serve_command
from fledge.export.export import read_export_record

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("norms_by_layer")]


class Case(BlockCase):
    def theirs(self, export: Path, place: Path) -> dict[str, Tensor]:
        """From what the serve command names."""
        command = serve_command(read_export_record(export), str(export), target=str(self.target))
        said = None
        if "--speculative-config" in command:
            said = json.loads(command[command.index("--speculative-config") + 1])
            assert said["num_speculative_tokens"] == SLOTS
        with loaded_dspark(Path(command[2]), said, place) as model:
            assert type(model).__name__ == "Qwen3DSparkForCausalLM"
            assert model.config.sample_from_anchor is True
            return draft_block(model, self.aux_TD, self.text[-1], SLOTS)


@pytest.fixture(scope="module")
def case(tmp_path_factory: Any, engines: Any) -> Case:
    engines.close()
    return Case(tmp_path_factory.mktemp("dspark"), **DSPARK)


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_vllm_computes_our_blocks(engine: str, case: Case, tmp_path: Path) -> None:
    ours = case.ours()
    theirs = case.theirs(case.export(engine), tmp_path / "init")
    assert torch.equal(ours["tokens"], theirs["tokens"])
    for name in ("logits", "biases", "confidence"):
        torch.testing.assert_close(theirs[name], ours[name], rtol=0, atol=1e-4)
    assert ours["logits"].std() > 0.5
    assert ours["biases"].std() > 0.05


def _swap(one: str, other: str) -> Callable[[dict[str, Tensor]], None]:
    def change(held: dict[str, Tensor]) -> None:
        held[one], held[other] = held[other], held[one]

    return change


CONTROLS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "Markov factors": _swap("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
    "norms of keys": _swap("layers.0.self_attn.k_norm.weight", "layers.1.self_attn.k_norm.weight"),
    "norm of features": lambda held: held["hidden_norm.weight"].fill_(1.0),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_wrong_tensor_is_noticed(control: str, case: Case, tmp_path: Path) -> None:
    broken = shutil.copytree(case.export("vllm"), tmp_path / "broken")
    held = load_file(broken / "model.safetensors")
    CONTROLS[control](held)
    save_file(held, broken / "model.safetensors", {"format": "pt"})
    theirs, ours = case.theirs(broken, tmp_path / "init"), case.ours()
    far = [(theirs[name] - ours[name]).abs().max() for name in ("logits", "biases", "confidence")]
    assert max(far) > 0.05
