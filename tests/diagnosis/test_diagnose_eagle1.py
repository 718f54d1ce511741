"""EAGLE-1 drafts: healthy ones pass in every layout, broken ones are named, and mended exactly."""

import re

import pytest
import torch
from test_diagnose_faults import (
    Fault,
    assert_same_files,
    broken_copy,
    drop,
    errors_and_warnings,
    fill,
    mixed_dtypes,
    no_decoding,
    other_target,
    put,
    random_table,
    rope_dropped,
    with_nan,
)

from export.drafts import make_eagle1
from export.layouts import EAGLE1_LAYOUTS, write_as
from fledge.core.errors import BadInput
from fledge.diagnosis.checks.probe import swapped_halves
from fledge.diagnosis.diagnose import diagnose, write_repaired
from fledge.export.export import export_draft

# --- healthy -------------------------------------------------------------------------------------


def test_a_healthy_draft_of_ours_passes(eagle1, look):
    found = look(eagle1)
    assert found.healthy, found.findings
    assert found.layout == "fledge"
    assert not found.skipped
    assert found.score.first > 0.3


@pytest.mark.parametrize("layout", EAGLE1_LAYOUTS)
def test_a_healthy_draft_of_others_decodes_as_ours(place, eagle1, tmp_path, look, layout):
    found = look(write_as(layout, eagle1, tmp_path / "draft", place / "target"))
    assert found.healthy, found.findings
    assert found.layout == layout
    assert not found.skipped
    assert found.score.acceptance == look(eagle1).score.acceptance


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_export_is_healthy_for_its_engine(place, eagle1, tmp_path, engine):
    """And for the other it is not, which is said, and mended to the bit."""
    outs, target = {}, str(place / "target")
    for name in ("vllm", "sglang"):
        outs[name] = tmp_path / name
        export_draft(eagle1, outs[name], engine=name, target=target, without_target=True)
    found = diagnose(outs[engine], target, engine=engine, answering=no_decoding)
    assert found.healthy, found.findings
    [other] = {*outs} - {engine}
    found = diagnose(outs[other], target, engine=engine, answering=no_decoding)
    assert errors_and_warnings(found) == {"architecture": "error", "fc-bias": "error"}
    repaired = write_repaired(found, tmp_path / "repaired")
    assert_same_files(repaired, outs[engine])


@pytest.mark.parametrize(
    ("layout", "engine", "faults"),
    [
        ("eagle", "vllm", set()),
        ("eagle", "sglang", {"architecture", "fc-bias"}),
        ("eagle1-wrapped", "vllm", set()),
        ("eagle1-wrapped", "sglang", {"serving", "fc-bias"}),
    ],
)
def test_an_engine_makes_errors_of_its_limits(place, eagle1, tmp_path, layout, engine, faults):
    foreign = write_as(layout, eagle1, tmp_path / "foreign", place / "target")
    found = diagnose(foreign, str(place / "target"), engine=engine, answering=no_decoding)
    assert set(errors_and_warnings(found)) == faults


def test_two_layers_and_a_bias_are_healthy(place, tmp_path):
    draft = make_eagle1(place / "target", fit=0, layers=2, bias=True)
    draft.save_pretrained(tmp_path / "draft")

    def spread(config, tensors):  # no longer what an initializer leaves
        torch.manual_seed(2)
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and name.startswith(("fc", "layers")):
                tensors[name] = tensor + torch.randn(len(tensor), 1) @ torch.randn(
                    1, tensor.shape[1]
                )

    healthy = broken_copy(tmp_path / "draft", tmp_path / "healthy", spread)
    found = diagnose(healthy, str(place / "target"), answering=no_decoding)
    assert found.healthy, found.findings
    found = diagnose(healthy, str(place / "target"), engine="vllm", answering=no_decoding)
    assert "vLLM does not serve fc bias" in [one.evidence for one in found.of("error")]


# --- broken --------------------------------------------------------------------------------------


def called_eagle3(config, tensors):
    config["architectures"] = ["LlamaForCausalLMEagle3"]


def with_norm(config, tensors):
    tensors["norm.weight"] = torch.rand(32)


def with_first_norm(config, tensors):
    tensors["layers.0.input_layernorm.weight"] = torch.rand(32)


def with_maps(config, tensors):
    full = config["vocab_size"]
    tensors["d2t"] = torch.zeros(full, dtype=torch.int64)
    tensors["t2d"] = torch.ones(full, dtype=torch.bool)


def fused_queries(config, tensors):
    """One tensor of an EAGLE-3 draft among the others."""
    name = "layers.0.self_attn.q_proj.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name]], dim=1)


def three_states(config, tensors):
    tensors["fc.weight"] = torch.cat([tensors["fc.weight"], tensors["fc.weight"][:, :32]], dim=1)


FAULTS = {
    "fc missing": Fault("missing", drop("fc.weight")),
    "v_proj missing": Fault("missing", drop("layers.0.self_attn.v_proj.weight")),
    "post norm missing": Fault("missing", drop("layers.0.post_attention_layernorm.weight")),
    "called EAGLE-3": Fault("algorithm", called_eagle3, repaired=True),
    "another architecture": Fault(
        "architecture", put(architectures=["Qwen3ForCausalLM"]), repaired=True
    ),
    "another model type": Fault("architecture", put(model_type="qwen3"), repaired=True),
    "a norm of the output": Fault("unexpected", with_norm),
    "a norm before layer 0": Fault("unexpected", with_first_norm),
    "vocabulary maps": Fault("unexpected", with_maps),
    "a smaller head": Fault("vocab-size", fill("lm_head.weight", lambda w: w[:99].clone())),
    "a smaller vocabulary": Fault("draft-vocab-size", put(draft_vocab_size=99), repaired=True),
    "fc over three states": Fault("shape", three_states),
    "fc transposed": Fault("shape", fill("fc.weight", lambda w: w.t().contiguous())),
    "fused queries": Fault("shape", fused_queries),
    "bias lost": Fault("fc-bias", put(fc_bias=True)),
    "heads of another model": Fault("hidden-size", put(num_key_value_heads=4), repaired=True),
    "layers copied from the target": Fault(
        "num-hidden-layers", put(num_hidden_layers=8), repaired=True
    ),
    "aux layers of EAGLE-3": Fault("aux-layers", put(aux_layer_ids=[1, 3, 4])),
    "state of an inner layer": Fault("aux-layers", put(aux_layer_ids=[7])),
    "rope scaling dropped": Fault("rope", rope_dropped, repaired=True),
    "rope base at odds": Fault("rope-conflict", put(rope_theta=10000.0), repaired=True),
    "embeddings random": Fault("embeddings", random_table("embed_tokens.weight"), repaired=True),
    "layer random": Fault(
        "random-weights", random_table("layers.0.mlp.up_proj.weight"), severity="warning"
    ),
    "fc random": Fault("random-weights", random_table("fc.weight"), severity="warning"),
    "NaN": Fault("not-finite", with_nan),
    "zeros": Fault("constant", fill("layers.0.self_attn.o_proj.weight", torch.zeros_like)),
    "dtypes mixed": Fault("dtype", mixed_dtypes, severity="warning"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_repaired(place, eagle1, tmp_path, name):
    fault, target = FAULTS[name], str(place / "target")
    broken = broken_copy(eagle1, tmp_path / "broken", fault.break_)
    found = diagnose(broken, target, answering=no_decoding)
    assert errors_and_warnings(found) == {fault.check: fault.severity}
    [said] = [one for one in found.findings if one.check == fault.check and one.severity != "note"]
    assert said.evidence
    assert said.fix
    assert bool(said.repair) == fault.repaired
    if not fault.repaired:
        with pytest.raises(BadInput, match="certainty"):
            write_repaired(found, tmp_path / "repaired")
        return
    assert_same_files(write_repaired(found, tmp_path / "repaired"), eagle1)


def test_an_eagle3_draft_that_is_called_eagle1(place, tmp_path):
    def break_(config, tensors):
        config.update(architectures=["LlamaForCausalLMEagle"], eagle_version=1)

    broken = broken_copy(place / "eagle3", tmp_path / "broken", break_)
    found = diagnose(broken, str(place / "target"), answering=no_decoding)
    assert errors_and_warnings(found) == {"algorithm": "error"}
    assert_same_files(write_repaired(found, tmp_path / "repaired"), place / "eagle3")


def test_another_target(place, eagle1, tmp_path):
    wider = other_target(place, tmp_path / "wider", hidden_size=64, head_dim=16)
    found = diagnose(eagle1, str(wider), static=True)
    assert errors_and_warnings(found)["hidden-size"] == "error"
    assert "32 wide, the target 64" in found.of("error")[0].evidence
    larger = other_target(place, tmp_path / "larger", vocab_size=300)
    found = diagnose(eagle1, str(larger), static=True)
    assert errors_and_warnings(found)["vocab-size"] == "error"


# --- what only decoding shows --------------------------------------------------------------------


def test_halves_of_fc_in_the_other_order(eagle1, tmp_path, look):
    broken = broken_copy(eagle1, tmp_path / "broken", fill("fc.weight", swapped_halves))
    found = look(broken)
    assert errors_and_warnings(found) == {"fc-swapped": "error"}
    assert "[state; embedding]" in found.of("error")[0].evidence
    assert found.score.first < 0.5 * found.repaired_score.first
    assert_same_files(write_repaired(found, tmp_path / "repaired"), eagle1)


@pytest.mark.parametrize("states", ["read", "all"])
def test_trained_on_states_before_the_norm(place, tmp_path, look, states):
    """Which it reads, or reads and foretells: then only the target's norm makes sense of them."""
    make_eagle1(place / "target", states=states).save_pretrained(tmp_path / "draft")
    found = look(tmp_path / "draft")
    assert errors_and_warnings(found) == {"capture-measured": "error"}
    [better] = re.findall(r"with the one before it: ([\d.]+)%", found.of("error")[0].evidence)
    assert float(better) > 60
    assert found.repaired is None


def test_other_rotary_settings_are_measured(place, eagle1, tmp_path, look):
    foreign = write_as("eagle1-vllm", eagle1, tmp_path / "foreign", place / "target")
    found = look(broken_copy(foreign, tmp_path / "broken", rope_dropped))
    assert errors_and_warnings(found) == {"rope": "warning", "rope-measured": "error"}
    assert_same_files(write_repaired(found, tmp_path / "repaired"), foreign)


def test_noise_for_weights_accepts_nothing(eagle1, tmp_path, look):
    torch.manual_seed(5)

    def noise(config, tensors):
        for name in ("fc.weight", "layers.0.mlp.down_proj.weight"):
            tensors[name] = torch.randn_like(tensors[name]) * 3

    found = look(broken_copy(eagle1, tmp_path / "draft", noise))
    assert errors_and_warnings(found) == {"acceptance": "error"}
