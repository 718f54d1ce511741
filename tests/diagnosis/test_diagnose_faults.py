"""Deliberately broken drafts: each fault is named by its check and by no other error, and a certain
repair restores the healthy files exactly."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from export.drafts import AUX, WIDTH, files_of, make_eagle1, make_tokenizer
from fledge.core.errors import BadInput
from fledge.formats.diagnose import diagnose, write_repaired
from fledge.formats.export import export_draft


def no_decoding(facts):
    raise BadInput("not asked to decode here")


@dataclass(frozen=True)
class Fault:
    check: str
    break_: object  # (config, tensors) -> None
    kind: str = "eagle3"
    repaired: bool = False
    severity: str = "error"


def _offsets(ids):
    return ids - torch.arange(len(ids))


def _ids(tensors):
    return tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def drop(*names):
    return lambda config, tensors: [tensors.pop(name) for name in names]


def put(**values):
    return lambda config, tensors: config.update(values)


def having(name, tensor):
    return lambda config, tensors: tensors.update({name: tensor})


def fill(name, value):
    return lambda config, tensors: tensors.update({name: value(tensors[name])})


def recomputed_map(config, tensors):
    """A different, self-consistent vocabulary: what a warm start on new data leaves behind."""
    full = len(tensors["t2d"])
    ids = torch.arange(full - WIDTH, full)
    mask = torch.zeros(full, dtype=torch.bool)
    mask[ids] = True
    tensors.update(d2t=_offsets(ids), t2d=mask)


def random_table(name, std=0.02):
    def break_(config, tensors):
        torch.manual_seed(3)
        tensors[name] = torch.randn_like(tensors[name]) * std

    return break_


def rotated(config, tensors):
    torch.manual_seed(3)
    size = tensors["embed_tokens.weight"].shape[1]
    rotation, _ = torch.linalg.qr(torch.randn(size, size))
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] @ rotation


def other_order(config, tensors):
    """The same draft with its aux states in another order."""
    order = [2, 0, 1]
    config["aux_layer_ids"] = [AUX[i] for i in order]
    chunks = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([chunks[i] for i in order], dim=1)
    norms = [tensors[f"fc_norm.{i}.weight"] for i in order]
    tensors.update({f"fc_norm.{i}.weight": norm for i, norm in enumerate(norms)})


def rope_dropped(config, tensors):
    theta = config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    del config["rope_scaling"]


def prefixed(config, tensors):
    renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


def with_nan(config, tensors):
    tensors["fc.weight"] = tensors["fc.weight"].clone()
    tensors["fc.weight"][3, 5] = float("nan")


def biased(config, tensors):
    config["attention_bias"] = True
    tensors["layers.0.self_attn.q_proj.bias"] = torch.randn(32)


def eagle_one(config, tensors):
    size = len(tensors["norm.weight"])
    torch.manual_seed(3)
    tensors["fc.weight"] = torch.randn(size, 2 * size)
    del tensors["layers.0.hidden_norm.weight"], tensors["layers.0.input_layernorm.weight"]
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"layers.0.self_attn.{name}.weight"
        tensors[key] = tensors[key][:, :size].contiguous()


# --- faults --------------------------------------------------------------------------------------


FAULTS = {
    "fc missing": Fault("network", drop("fc.weight")),
    "o_proj missing": Fault("network", drop("layers.0.self_attn.o_proj.weight")),
    "head missing": Fault("network", drop("lm_head.weight")),
    "map missing": Fault("d2t", drop("d2t"), repaired=True),
    "both maps missing": Fault("d2t", drop("d2t", "t2d")),
    "map absolute": Fault("d2t", lambda c, t: t.update(d2t=_ids(t)), repaired=True),
    "map repeats": Fault("d2t", lambda c, t: t.update(d2t=t["d2t"].roll(1) - 1)),
    "map recomputed": Fault("head", recomputed_map),
    "embeddings random": Fault("embeddings", random_table("embed_tokens.weight"), repaired=True),
    "P-EAGLE embeddings random": Fault(
        "embeddings", random_table("embed_tokens.weight"), kind="peagle"
    ),
    "embeddings rotated": Fault("embeddings", rotated),
    "embeddings of another tokenizer": Fault(
        "embeddings", fill("embed_tokens.weight", lambda e: e.roll(7, 0))
    ),
    "head random": Fault("head", random_table("lm_head.weight")),
    "aux layers unsorted": Fault("aux-layers", other_order, kind="eagle31", repaired=True),
    "aux layers out of range": Fault("aux-layers", put(aux_layer_ids=[1, 3, 8])),
    "aux layers twice the same": Fault("aux-layers", put(aux_layer_ids=[1, 3, 3])),
    "fc_norm flag dropped": Fault(
        "flags", lambda c, t: c.update(fc_norm=False), kind="eagle31", repaired=True
    ),
    "fc_norm weights dropped": Fault("flags", put(fc_norm=True)),
    "embeddings tied": Fault("flags", put(tie_word_embeddings=True), repaired=True),
    "layers copied from the target": Fault("sizes", put(num_hidden_layers=8), repaired=True),
    "vocab_size is the draft's": Fault("sizes", put(vocab_size=WIDTH), repaired=True),
    "draft_vocab_size is the target's": Fault(
        "sizes", lambda c, t: c.update(draft_vocab_size=c["vocab_size"]), repaired=True
    ),
    "target_hidden_size doubled": Fault("sizes", put(target_hidden_size=64), repaired=True),
    "rope scaling dropped": Fault("rope", rope_dropped, repaired=True),
    "positions clamped": Fault(
        "max-position", put(max_position_embeddings=64), repaired=True, severity="warning"
    ),
    "another architecture": Fault(
        "architecture", put(architectures=["Qwen3ForCausalLM"]), repaired=True
    ),
    "another model type": Fault("architecture", put(model_type="qwen3"), repaired=True),
    "EAGLE-1": Fault("architecture", eagle_one),
    "called EAGLE-1": Fault(
        "architecture", put(architectures=["LlamaForCausalLMEagle"], eagle_version=1)
    ),
    "no draft at all": Fault(
        "architecture", lambda c, t: [t.clear(), t.update(weight=torch.ones(2))]
    ),
    "model. prefix": Fault("names", prefixed, repaired=True),
    "embeddings cut": Fault("network", fill("embed_tokens.weight", lambda e: e[:-9].clone())),
    "heads of another model": Fault("network", put(num_key_value_heads=4)),
    "NaN": Fault("network", with_nan),
    "8-bit integers": Fault("network", fill("fc.weight", lambda w: w.to(torch.int8))),
    "one bias of four": Fault("network", biased),
    "a scale": Fault("network", having("layers.0.mlp.up_proj.scale", torch.ones(1))),
    "placeholder missing": Fault("network", drop("mask_hidden"), kind="peagle"),
    "mask token missing": Fault("mask-token", put(mask_token_id=None), kind="peagle"),
    "mask token outside": Fault("mask-token", put(mask_token_id=5000), kind="peagle"),
    "mask token is a letter": Fault(
        "mask-token", put(mask_token_id=80), kind="peagle", severity="warning"
    ),
}


_SHARED = (
    "fc missing", "another architecture", "another model type", "heads of another model",
    "layers copied from the target", "rope scaling dropped", "embeddings random", "NaN",
)  # fmt: skip
_EAGLE1_FAULTS = {
    "called EAGLE-3": Fault("architecture", put(architectures=["LlamaForCausalLMEagle3"])),
    "a norm of the output": Fault("network", having("norm.weight", torch.rand(32))),
    "a smaller head": Fault("network", fill("lm_head.weight", lambda w: w[:99].clone())),
    "a smaller vocabulary": Fault("sizes", put(draft_vocab_size=99), repaired=True),
    **{name: FAULTS[name] for name in _SHARED},
}
FAULTS |= {
    f"EAGLE-1: {name}": replace(fault, kind="eagle1") for name, fault in _EAGLE1_FAULTS.items()
}


def broken_copy(source: Path, out: Path, break_) -> Path:
    config, tensors = files_of(source)
    break_(config, tensors)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / "model.safetensors")
    return out


def assert_same_files(one: Path, other: Path) -> None:
    (config, tensors), (expected_config, healthy) = files_of(one), files_of(other)
    assert config == expected_config
    assert tensors.keys() == healthy.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == healthy[name].dtype, name
        assert torch.equal(tensor, healthy[name]), name


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_repaired(place, eagle1, tmp_path, name):
    fault, target = FAULTS[name], str(place / "target")
    broken = broken_copy(place / fault.kind, tmp_path / "broken", fault.break_)
    diagnosis = diagnose(broken, target, answering=no_decoding)
    named = [f for f in diagnosis.findings if f.check == fault.check and f.severity != "note"]
    assert [finding.severity for finding in named] == [fault.severity]
    wrong = {error.check for error in diagnosis.of("error")} - {fault.check}
    assert not wrong, diagnosis.findings
    assert any(f.evidence and f.fix for f in named)
    assert bool(named[0].repair) == fault.repaired
    if not fault.repaired:
        with pytest.raises(BadInput, match="certainty"):
            write_repaired(diagnosis, tmp_path / "repaired")
        assert not (tmp_path / "repaired").exists()
        return
    repaired = write_repaired(diagnosis, tmp_path / "repaired")
    assert_same_files(repaired, place / fault.kind)
    assert diagnose(repaired, target, answering=no_decoding).healthy


# --- faults outside the draft's own tensors ------------------------------------------------------


def other_target(place, out: Path, *, tokenizer=None, **changed) -> Path:
    """A copy of the target's config and tokenizer with changes, without weights."""
    shutil.copytree(place / "target", out, ignore=shutil.ignore_patterns("*.safetensors"))
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    return out


def errors_and_warnings(diagnosis):
    return {
        finding.check: finding.severity
        for finding in diagnosis.findings
        if finding.severity != "note"
    }


def test_a_shallow_target_has_no_default_layers(place, tmp_path):
    target = other_target(place, tmp_path / "target", num_hidden_layers=4)
    broken = broken_copy(place / "eagle3", tmp_path / "draft", lambda c, t: c.pop("aux_layer_ids"))
    diagnosis = diagnose(broken, str(target), static=True)
    assert errors_and_warnings(diagnosis) == {"aux-layers": "error"}
    assert "too shallow" in diagnosis.of("error")[0].evidence


def test_a_draft_vocabulary_without_the_end_token(place, tmp_path):
    tokenizer = make_tokenizer()
    _, tensors = files_of(place / "eagle3")
    missing_id = int((~tensors["t2d"]).nonzero()[-1])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(missing_id)
    target = other_target(place, tmp_path / "target", tokenizer=tokenizer)
    diagnosis = diagnose(place / "eagle3", str(target), static=True)
    assert errors_and_warnings(diagnosis) == {"d2t": "warning"}
    assert f"({missing_id})" in diagnosis.of("warning")[0].evidence


def test_several_faults_at_once_are_all_repaired(place, tmp_path):
    def break_(config, tensors):
        tensors["d2t"] = _ids(tensors)
        config.update(num_hidden_layers=8, vocab_size=WIDTH)
        prefixed(config, tensors)

    broken = broken_copy(place / "eagle3", tmp_path / "draft", break_)
    diagnosis = diagnose(broken, str(place / "target"), answering=no_decoding)
    assert {error.check for error in diagnosis.of("error")} == {"names", "d2t", "sizes"}
    assert_same_files(write_repaired(diagnosis, tmp_path / "repaired"), place / "eagle3")


# --- EAGLE-1 drafts ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_export_for_the_other_engine_is_named(place, eagle1, tmp_path, engine):
    [other], target = {"vllm", "sglang"} - {engine}, str(place / "target")
    export_draft(eagle1, tmp_path / "out", engine=other, target=target, without_target=True)
    diagnosis = diagnose(tmp_path / "out", target, engine=engine, answering=no_decoding)
    assert errors_and_warnings(diagnosis) == {"serving": "error"}


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


def test_a_different_target_is_named(place, eagle1, tmp_path):
    wider = other_target(place, tmp_path / "wider", hidden_size=64, head_dim=16)
    diagnosis = diagnose(eagle1, str(wider), static=True)
    assert "must be 64" in diagnosis.of("error")[0].evidence
    larger = other_target(place, tmp_path / "larger", vocab_size=300)
    diagnosis = diagnose(eagle1, str(larger), static=True)
    assert errors_and_warnings(diagnosis)["network"] == "error"
