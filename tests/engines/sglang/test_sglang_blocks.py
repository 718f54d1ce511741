"""DFlash and DSpark exports in SGLang's own classes: they read our layers, load our files and
compute our logits, Markov biases, confidences and tokens. Its worker needs a GPU;
tests/engines/sglang/sglang_block.py describes what replaces it. Negative controls must fail."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_block import SGLangBlock
from sglang_draft import open_engine
from torch import Tensor
from torch.nn import functional as F

from engines.block_case import DSPARK, LAYERS, SLOTS, BlockCase, spoiled
from fledge.target.hf.model import HFEagle3TargetModel

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": SLOTS + 1, "mask_token_id": 2, "num_hidden_layers": 2},
    "dspark": DSPARK,
}
KINDS["dflash, causal"] = KINDS["dflash"] | {"causal": True}


def _has_blocks() -> bool:
    sglang = importlib.util.find_spec("sglang")
    assert sglang is None or sglang.origin is not None
    return (
        sglang is not None and (Path(sglang.origin or "").parent / "srt/models/dspark.py").exists()
    )


pytestmark = pytest.mark.skipif(not _has_blocks(), reason="this SGLang has no block drafters")


@pytest.fixture(scope="module", params=KINDS)
def case(request: Any, tmp_path_factory: Any) -> BlockCase:
    return BlockCase(tmp_path_factory.mktemp("blocks"), **KINDS[request.param])


@pytest.fixture(scope="module")
def engine(case: BlockCase) -> Iterator[Any]:
    engine = open_engine(case.target)
    yield engine
    engine.close()


def sglang_results(case: BlockCase, export: Path, engine: Any) -> dict[str, Tensor]:
    """Call the model as the worker does: DFlash drafts after the newest token, DSpark at it too."""
    sglang = SGLangBlock(export, engine.model)
    assert sglang.listened(8) == LAYERS
    model, newest = sglang.model, torch.tensor(case.text[-1:])
    if not hasattr(model, "markov_head"):
        states_JE = sglang.states(case.aux_TD, case.text[-1], SLOTS + 1)[1:]
        logits_JV = F.linear(states_JE, engine.model.lm_head.weight[:97])
        return {"logits": logits_JV, "tokens": logits_JV.argmax(-1)}
    assert model.sample_from_anchor
    states_JE = sglang.states(case.aux_TD, case.text[-1], SLOTS)
    with torch.inference_mode():
        logits_JV, features_JE = model.compute_base_logits(states_JE)
        biases, tokens = [], [newest]
        for logits_V in logits_JV:
            bias_1V, _ = model.markov_head.step_bias(tokens[-1], hidden_states=None, state=None)
            biases.append(bias_1V[0])
            tokens.append((logits_V + bias_1V).argmax(-1))
        tokens_J = torch.cat(tokens[1:])
        confidence_1J, _ = model.compute_confidence(
            anchor_tokens=newest, draft_tokens=tokens_J[None], confidence_features=features_JE
        )
    return {
        "logits": logits_JV, "biases": torch.stack(biases), "confidence": confidence_1J[0],
        "tokens": tokens_J,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def confidences_read(monkeypatch: Any) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")  # the other mode ignores them


def test_sglang_computes_our_blocks(case: BlockCase, engine: Any) -> None:
    expected, results = case.ours(), sglang_results(case, case.export("sglang"), engine)
    assert expected.keys() == results.keys()
    assert torch.equal(expected.pop("tokens"), results["tokens"])
    for name, tensor in expected.items():
        torch.testing.assert_close(results[name], tensor, rtol=0, atol=1e-4)
    assert expected["logits"].std() > 0.5


def test_sglang_reads_our_layers(case: BlockCase, engine: Any) -> None:
    """The layer ids in our files, as SGLang reads them, select the states of our own target."""
    row = [*case.text]
    engine.model.set_dflash_layers_to_capture(
        SGLangBlock(case.export("sglang"), engine.model).listened(8)
    )
    aux_TD = torch.cat(engine.extend([row], True).aux_KND, dim=-1)
    with HFEagle3TargetModel(case.model, LAYERS) as target:
        ids = torch.tensor([row])
        batch = target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))
    torch.testing.assert_close(aux_TD, batch.aux_hidden_states[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("control", ["norms of keys", "norm of features"])
def test_a_wrong_tensor_is_noticed(
    control: str, case: BlockCase, engine: Any, tmp_path: Path
) -> None:
    broken = spoiled(case.export("sglang"), control, tmp_path / "broken")
    difference = sglang_results(case, broken, engine)["logits"] - case.ours()["logits"]
    assert difference.abs().max() > 0.05
