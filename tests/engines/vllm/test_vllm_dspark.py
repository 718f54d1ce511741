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
from torch.nn import functional as F

from engines.cases import VOCABULARY, engine_target, make_draft, saved
from engines.vllm.dspark_model import draft_block, loaded_dspark
from fledge.decode.proposal import Chooser
from fledge.decode.state import RoundState, columns, send_rows
from fledge.decode.strategies.registry import choose
from fledge.decode.strategies.shape import DraftShape
from fledge.draft.block import BlockDraftModel
from fledge.export.commands import serve_command
from fledge.export.export import export_draft, read_export_record

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("norms_by_layer")]
LAYERS, SLOTS, KNOWN = [1, 3, 5], 4, 9
_SPARK = {
    "block_size": SLOTS, "mask_token_id": 2, "num_hidden_layers": 2, "markov_rank": 8,
    "confidence_head": True, "sample_from_anchor": True,
}  # fmt: skip


class Case:
    """A random draft with opinions, and a text to draft behind."""

    def __init__(self, root: Path) -> None:
        self.root = root
        model = engine_target("llama")
        self.target = saved(model, root / "target")
        draft = make_draft(model, LAYERS, **_SPARK)
        assert isinstance(draft, BlockDraftModel)
        self.draft = draft.eval()
        with torch.no_grad():
            for weight in draft.parameters():
                if weight.ndim == 2:
                    weight.normal_(std=0.2)
        draft.save_pretrained(root / "draft")
        generator = torch.Generator().manual_seed(5)
        self.aux_TD = torch.randn(KNOWN, len(LAYERS) * 64, generator=generator)
        self.text = torch.randint(3, VOCABULARY, (KNOWN + 1,), generator=generator).tolist()

    def export(self, engine: str) -> Path:
        out = self.root / engine
        if not out.exists():
            options = {"engine": engine, "target": str(self.target), "without_target": True}
            export_draft(self.root / "draft", out, **options)
        return out

    @torch.inference_mode()
    def ours(self) -> dict[str, Tensor]:
        draft, head = self.draft, self.draft.markov_head
        assert head is not None
        assert draft.confidence_head is not None
        strategy: Any = choose(draft)(draft, DraftShape(SLOTS))
        aux_1TD = self.aux_TD[None]
        strategy.start([self.text[:1]], aux_1TD)
        table = send_rows([(KNOWN, self.text[1:], range(KNOWN))], torch.device("cpu"), width=KNOWN)
        state = RoundState(*columns(table), aux_1TD, strategy.reserve(KNOWN))
        states_JE = strategy.states(state)[0]
        tokens_J = strategy.propose(state, Chooser()).token_BN[0]
        before_J = torch.cat([torch.tensor(self.text[-1:]), tokens_J[:-1]])
        features_JR = head.features(before_J, torch.float32)
        return {
            "logits": F.linear(states_JE, draft.lm_head.weight),
            "biases": F.linear(features_JR, head.out_WR),
            "confidence": draft.confidence_head(states_JE, features_JR).sigmoid(),
            "tokens": tokens_J,
        }

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
    return Case(tmp_path_factory.mktemp("dspark"))


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
