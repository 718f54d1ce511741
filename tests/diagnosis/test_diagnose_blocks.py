"""DFlash and DSpark drafts: healthy in every layout, imported bit for bit, and every fault named by
its check; a certain repair restores the healthy draft."""

import json

import pytest
import torch
from block_drafts import (
    MODELOPT_NAMES,
    as_modelopt,
    write_block_as,
)
from safetensors.torch import save_file
from test_diagnose_faults import (
    assert_same_files,
    broken_copy,
    drop,
    errors_and_warnings,
    fill,
    no_decoding,
)

from export.drafts import files_of
from fledge.core.errors import BadInput
from fledge.formats.codec import set_path
from fledge.formats.diagnose import diagnose, write_repaired
from fledge.formats.import_draft import import_draft

W1, W2 = (f"markov_head.markov_w{i}.weight" for i in (1, 2))


def write_as_modelopt(ours, out):
    """ModelOpt's DSpark: its exporter leaves the heads beside the backbone."""
    out.mkdir()
    config, tensors = files_of(ours)
    (out / "config.json").write_text(json.dumps(as_modelopt(config)))
    for own, theirs in MODELOPT_NAMES.items():
        tensors = {name.replace(own, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors")
    return out


def test_modelopts_heads_are_found_under_their_names(place, blocks, tmp_path):
    foreign = write_as_modelopt(blocks["dspark"], tmp_path / "foreign")
    diagnosis = diagnose(foreign, str(place / "target"), answering=no_decoding)
    assert errors_and_warnings(diagnosis) == {"names": "error"}  # vLLM would not find them
    import_draft(foreign, tmp_path / "ours", target=str(place / "target"))
    assert_same_files(tmp_path / "ours", blocks["dspark"])


@pytest.mark.parametrize("inner", [{"use_swa": True}, {"causal": False}])
def test_sliding_layers_that_attend_both_ways_stay_so(place, blocks, tmp_path, inner):
    foreign = write_block_as("dflash", blocks["dflash"], tmp_path / "foreign")
    config = json.loads((foreign / "config.json").read_text())
    config |= {"layer_types": ["sliding_attention"] * config["num_hidden_layers"]}
    config |= {"sliding_window": 9, "use_sliding_window": True}
    target = str(place / "target")
    for name, changed in (("both_ways", inner), ("causal", {"causal": True})):
        values = config | {"dflash_config": config["dflash_config"] | changed}
        (foreign / "config.json").write_text(json.dumps(values))
        import_draft(foreign, tmp_path / name, target=target)
        ours, _ = files_of(tmp_path / name)
        assert ours["sliding_layers"] == list(range(config["num_hidden_layers"]))
        assert (ours["causal"], ours["sliding_window"]) == (name == "causal", 9)
        assert ours.get("sliding_both_ways", False) == (name == "both_ways")


def test_a_head_that_fledge_does_not_have_is_not_dropped(place, blocks, tmp_path):
    """Without it the draft is not the one that was trained."""
    foreign = write_block_as("specforge", blocks["dflash"], tmp_path / "foreign")
    tensors = files_of(foreign)[1] | {"prefix_lstm.weight_ih_l0": torch.randn(3, 3)}
    save_file(tensors, foreign / "model.safetensors")
    with pytest.raises(BadInput, match="unknown: prefix_lstm"):
        import_draft(foreign, tmp_path / "ours", target=str(place / "target"))


# --- faults visible in the files -----------------------------------------------------------------


def _set(path, value):
    return lambda config, tensors: set_path(config, path, value)


def _other_order(config, tensors):
    config["dflash_config"]["target_layer_ids"] = [5, 1, 3]
    low, middle, high = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([high, low, middle], dim=1)


def _foreign_tensor(config, tensors):
    tensors["mask_hidden"] = torch.rand(1, 1, 96)


STATIC = {
    "a lost norm": ("dflash", "dflash", "network", drop("hidden_norm.weight"), False),
    "a lost head": ("dspark", "dspark", "network", drop(W2), False),
    "another draft's tensor": ("dflash", "dflash", "network", _foreign_tensor, False),
    "a factor on its side": ("dspark", "dspark", "network", fill(W1, torch.t), False),
    "ids counted from 1": (
        "dflash", "dflash", "aux-layers", _set("dflash_config.target_layer_ids", [6, 7, 8]), False,
    ),
    "too few layers": (
        "dflash", "dflash", "aux-layers", _set("dflash_config.target_layer_ids", [1, 3]), False,
    ),
    "ids out of order": ("dflash", "dflash", "aux-layers", _other_order, True),
    "no block size": ("dspark", "speculators", "network", _set("block_size", None), False),
    "no placeholder": (
        "dflash", "dflash", "mask-token", _set("dflash_config.mask_token_id", None), False,
    ),
    "a placeholder beyond the vocabulary": (
        "dspark", "dspark", "mask-token", _set("mask_token_id", 90_000), False,
    ),
    "another target's depth": ("dflash", "dflash", "sizes", _set("num_target_layers", 9), True),
}  # fmt: skip


@pytest.mark.parametrize("fault", STATIC)
def test_a_fault_in_the_files_is_named(place, blocks, tmp_path, fault):
    """`repaired`: bit for bit."""
    kind, layout, check, break_, repaired = STATIC[fault]
    healthy = write_block_as(layout, blocks[kind], tmp_path / "healthy")
    broken = broken_copy(healthy, tmp_path / "broken", break_)
    diagnosis = diagnose(broken, str(place / "target"), answering=no_decoding)
    assert errors_and_warnings(diagnosis) == {check: "error"}
    if not repaired:
        assert diagnosis.repaired is None
        with pytest.raises(BadInput, match="fault"):
            import_draft(broken, tmp_path / "ours", target=str(place / "target"))
        return
    fixed = write_repaired(diagnosis, tmp_path / "mended")
    assert_same_files(fixed, healthy)


# --- faults that only decoding shows -------------------------------------------------------------


def _other_base(config, tensors):
    rope = {"rope_type": "default", "rope_theta": 7.0}
    config |= {"rope_parameters": rope, "rope_theta": 7.0}
    config.pop("rope_scaling", None)


DECODED = {
    "ids off by one": (
        "dflash",
        "aux-shifted",
        _set("dflash_config.target_layer_ids", [0, 2, 4]),
    ),
    "rotary base": ("dflash", "rope-measured", _other_base),
}  # fmt: skip


@pytest.mark.parametrize("fault", DECODED)
def test_a_fault_that_only_decoding_shows_is_named(blocks, look, tmp_path, fault):
    kind, check, break_ = DECODED[fault]
    healthy = write_block_as(kind, blocks[kind], tmp_path / "healthy")
    diagnosis = look(broken_copy(healthy, tmp_path / "broken", break_))
    errors = {finding.check for finding in diagnosis.of("error")}
    assert errors == {check}, diagnosis.findings
    assert diagnosis.repaired_score.first > diagnosis.score.first
    assert_same_files(write_repaired(diagnosis, tmp_path / "mended"), healthy)
