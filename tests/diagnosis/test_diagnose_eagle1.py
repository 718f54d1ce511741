"""EAGLE-1 drafts: healthy ones pass in every layout, faults are named and repaired exactly."""

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


def test_a_healthy_draft_passes(eagle1, look):
    diagnosis = look(eagle1)
    assert diagnosis.healthy, diagnosis.findings
    assert diagnosis.layout == "fledge"
    assert not diagnosis.skipped
    assert diagnosis.score.first > 0.3


@pytest.mark.parametrize("layout", EAGLE1_LAYOUTS)
def test_a_healthy_foreign_draft_decodes_like_ours(place, eagle1, tmp_path, look, layout):
    diagnosis = look(write_as(layout, eagle1, tmp_path / "draft", place / "target"))
    assert diagnosis.healthy, diagnosis.findings
    assert diagnosis.layout == layout
    assert not diagnosis.skipped
    assert diagnosis.score.acceptance == look(eagle1).score.acceptance


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_export_is_healthy_for_its_engine(place, eagle1, tmp_path, engine):
    """For the other engine it has faults, which are named and repaired bit for bit."""
    outs, target = {}, str(place / "target")
    for name in ("vllm", "sglang"):
        outs[name] = tmp_path / name
        export_draft(eagle1, outs[name], engine=name, target=target, without_target=True)
    diagnosis = diagnose(outs[engine], target, engine=engine, answering=no_decoding)
    assert diagnosis.healthy, diagnosis.findings
    [other] = {*outs} - {engine}
    diagnosis = diagnose(outs[other], target, engine=engine, answering=no_decoding)
    assert errors_and_warnings(diagnosis) == {"architecture": "error", "fc-bias": "error"}
    repaired = write_repaired(diagnosis, tmp_path / "repaired")
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
def test_an_engines_limits_become_errors(place, eagle1, tmp_path, layout, engine, faults):
    foreign = write_as(layout, eagle1, tmp_path / "foreign", place / "target")
    diagnosis = diagnose(foreign, str(place / "target"), engine=engine, answering=no_decoding)
    assert set(errors_and_warnings(diagnosis)) == faults


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
    """Give one tensor the shape it has in an EAGLE-3 draft."""
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
    diagnosis = diagnose(broken, target, answering=no_decoding)
    assert errors_and_warnings(diagnosis) == {fault.check: fault.severity}
    [finding] = [f for f in diagnosis.findings if f.check == fault.check and f.severity != "note"]
    assert finding.evidence
    assert finding.fix
    assert bool(finding.repair) == fault.repaired
    if not fault.repaired:
        with pytest.raises(BadInput, match="certainty"):
            write_repaired(diagnosis, tmp_path / "repaired")
        return
    assert_same_files(write_repaired(diagnosis, tmp_path / "repaired"), eagle1)


def test_an_eagle3_draft_declared_as_eagle1(place, tmp_path):
    def break_(config, tensors):
        config.update(architectures=["LlamaForCausalLMEagle"], eagle_version=1)

    broken = broken_copy(place / "eagle3", tmp_path / "broken", break_)
    diagnosis = diagnose(broken, str(place / "target"), answering=no_decoding)
    assert errors_and_warnings(diagnosis) == {"algorithm": "error"}
    assert_same_files(write_repaired(diagnosis, tmp_path / "repaired"), place / "eagle3")


def test_a_different_target_is_named(place, eagle1, tmp_path):
    wider = other_target(place, tmp_path / "wider", hidden_size=64, head_dim=16)
    diagnosis = diagnose(eagle1, str(wider), static=True)
    assert errors_and_warnings(diagnosis)["hidden-size"] == "error"
    assert "32 wide, the target 64" in diagnosis.of("error")[0].evidence
    larger = other_target(place, tmp_path / "larger", vocab_size=300)
    diagnosis = diagnose(eagle1, str(larger), static=True)
    assert errors_and_warnings(diagnosis)["vocab-size"] == "error"


# --- what only decoding shows --------------------------------------------------------------------


def test_swapped_halves_of_fc_are_repaired(eagle1, tmp_path, look):
    broken = broken_copy(eagle1, tmp_path / "broken", fill("fc.weight", swapped_halves))
    diagnosis = look(broken)
    assert errors_and_warnings(diagnosis) == {"fc-swapped": "error"}
    assert "[state; embedding]" in diagnosis.of("error")[0].evidence
    assert diagnosis.score.first < 0.5 * diagnosis.repaired_score.first
    assert_same_files(write_repaired(diagnosis, tmp_path / "repaired"), eagle1)


@pytest.mark.parametrize("states", ["read", "all"])
def test_trained_on_states_before_the_norm(place, tmp_path, look, states):
    """The draft reads such states, or reads and predicts them: then the target's norm is needed to
    interpret its output."""
    make_eagle1(place / "target", states=states).save_pretrained(tmp_path / "draft")
    diagnosis = look(tmp_path / "draft")
    assert errors_and_warnings(diagnosis) == {"capture-measured": "error"}
    [better] = re.findall(r"with the one before it: ([\d.]+)%", diagnosis.of("error")[0].evidence)
    assert float(better) > 60
    assert diagnosis.repaired is None


def test_dropped_rotary_scaling_is_measured(place, eagle1, tmp_path, look):
    foreign = write_as("eagle1-vllm", eagle1, tmp_path / "foreign", place / "target")
    diagnosis = look(broken_copy(foreign, tmp_path / "broken", rope_dropped))
    assert errors_and_warnings(diagnosis) == {"rope": "warning", "rope-measured": "error"}
    assert_same_files(write_repaired(diagnosis, tmp_path / "repaired"), foreign)


def test_random_weights_accept_nothing(eagle1, tmp_path, look):
    torch.manual_seed(5)

    def noise(config, tensors):
        for name in ("fc.weight", "layers.0.mlp.down_proj.weight"):
            tensors[name] = torch.randn_like(tensors[name]) * 3

    diagnosis = look(broken_copy(eagle1, tmp_path / "draft", noise))
    assert errors_and_warnings(diagnosis) == {"acceptance": "error"}
