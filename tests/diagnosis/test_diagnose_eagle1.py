"""EAGLE-1 drafts: what is special about their faults, and about engines that read them."""

import pytest
import torch
from test_diagnose_faults import (
    broken_copy,
    errors_and_warnings,
    no_decoding,
    other_target,
)

from export.drafts import make_eagle1
from fledge.formats.diagnose import diagnose
from fledge.formats.export import export_draft

# --- healthy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_export_for_the_other_engine_is_named(place, eagle1, tmp_path, engine):
    [other], target = {"vllm", "sglang"} - {engine}, str(place / "target")
    export_draft(eagle1, tmp_path / "out", engine=other, target=target, without_target=True)
    diagnosis = diagnose(tmp_path / "out", target, engine=engine, answering=no_decoding)
    assert errors_and_warnings(diagnosis) == {"serving": "error"}
    named = " ".join(error.evidence for error in diagnosis.of("error"))
    assert "architectures is" in named
    assert "fc.bias" in named


def test_two_layers_and_a_bias_are_healthy(place, tmp_path):
    draft = make_eagle1(place / "target", fit=0, layers=2, bias=True)
    draft.save_pretrained(tmp_path / "draft")

    def spread(config, tensors):  # so that weights no longer look freshly initialized
        torch.manual_seed(2)
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and name.startswith(("fc", "layers")):
                tensors[name] = tensor + torch.randn(len(tensor), 1) @ torch.randn(
                    1, tensor.shape[1]
                )

    healthy = broken_copy(tmp_path / "draft", tmp_path / "healthy", spread)
    diagnosis = diagnose(healthy, str(place / "target"), answering=no_decoding)
    assert diagnosis.healthy, diagnosis.findings
    diagnosis = diagnose(healthy, str(place / "target"), engine="vllm", answering=no_decoding)
    assert "vLLM does not serve fc bias" in [error.evidence for error in diagnosis.of("error")]


# --- broken (more in `test_diagnose_faults`) -----------------------------------------------------


def test_a_different_target_is_named(place, eagle1, tmp_path):
    wider = other_target(place, tmp_path / "wider", hidden_size=64, head_dim=16)
    diagnosis = diagnose(eagle1, str(wider), static=True)
    assert errors_and_warnings(diagnosis)["sizes"] == "error"
    assert "32 wide, the target 64" in diagnosis.of("error")[0].evidence
    larger = other_target(place, tmp_path / "larger", vocab_size=300)
    diagnosis = diagnose(eagle1, str(larger), static=True)
    assert errors_and_warnings(diagnosis)["vocab-size"] == "error"
