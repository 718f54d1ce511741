"""Exports of every kind for every engine: what is in the files, and what the self-check catches."""

import dataclasses
import json
import shutil

import pytest
import torch
from transformers import LlamaConfig

from export.block_cases import KINDS as BLOCKS
from export.block_cases import make_block
from export.export_cases import (
    AUX,
    CHECK,
    INNER,
    REFUSED,
    SERVED,
    config_of,
    make_draft,
    rewrite,
    tensors_of,
)
from fledge import export_draft
from fledge.core.errors import BadInput
from fledge.formats.codec import in_layer_order, set_path
from fledge.formats.engines import serve_command
from fledge.formats.export import read_export_record
from fledge.formats.reread import TargetSide, differing_flags, differing_tensors, reread
from fledge.formats.self_check import check_files
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.registry import METHODS, load_draft


@pytest.fixture(scope="module")
def side(tiny_target):
    from fledge.models.resolve import load_model

    embeddings = load_model(str(tiny_target)).get_input_embeddings().weight.detach()
    return TargetSide(4, embeddings)


@pytest.mark.parametrize("case", SERVED, ids="-".join)
def test_files_match_the_draft(exports, drafts, side, case):
    kind, engine = case
    draft, served = load_draft(drafts[kind]), reread(exports[case], engine, side)
    own = draft.state_dict()
    rows_of_the_head = {"lm_head.weight"} if kind in BLOCKS and "small" in kind else set()
    assert served.tensors.keys() == own.keys() | rows_of_the_head
    for name, tensor in own.items():
        assert torch.equal(tensor, served.tensors[name]), name
    assert served.unread == []
    assert differing_flags(draft.config, served.config) == []
    assert served.config.aux_layer_ids == draft.config.aux_layer_ids
    record = read_export_record(exports[case])
    check = record["self_check"]
    assert check["tensors"] == len(served.tensors)
    assert check["decoded"]["same_as_checkpoint"]
    assert check["decoded"]["prompts"] == 2
    assert check["decoded"]["acceptance_length"] >= 1.0
    assert record["embeddings"] == "the target's"
    assert record["num_draft_tokens"] == (5 if "dspark" in kind or kind not in BLOCKS else 4)


@pytest.mark.parametrize("case", REFUSED, ids="-".join)
def test_what_an_engine_would_misread_is_refused(drafts, tiny_target, tmp_path, case):
    kind, engine = case
    with pytest.raises(BadInput, match=REFUSED[case]):
        export_draft(drafts[kind], tmp_path / "no", engine=engine, target=str(tiny_target))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "kind", ["peagle", "dflash", "dflash, causal", "dflash, sliding", "dspark"]
)
def test_an_export_for_vllm_loads_as_the_original_draft(exports, drafts, kind):
    original, exported = load_draft(drafts[kind]), load_draft(exports[kind, "vllm"])
    assert exported.config.aux_layer_ids == original.config.aux_layer_ids
    assert differing_tensors(original.state_dict(), exported.state_dict()) == []
    assert differing_flags(original.config, exported.config) == []


@pytest.fixture(scope="module")
def deep_target(tmp_path_factory):
    """A config with eight layers, whose default aux layers are 1, 3, 4. No weights are needed."""
    path = tmp_path_factory.mktemp("deep")
    config = LlamaConfig(vocab_size=400, hidden_size=32, num_hidden_layers=8)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    return path


def test_default_layers_are_omitted_from_plain_files(deep_target, tmp_path):
    draft = make_draft(tmp_path / "draft", aux_layer_ids=[1, 3, 4])
    for engine in ("vllm", "speculators"):
        exported = export_draft(
            draft, tmp_path / engine, engine=engine, target=str(deep_target), without_target=True
        )
        ids = config_of(exported).get("eagle_aux_hidden_state_layer_ids")
        assert ids == (None if engine == "vllm" else [2, 4, 5])
        record = read_export_record(exported)
        assert record["aux_layer_ids"] == [1, 3, 4]
        assert record["self_check"]["decoded"] is None
        assert "without the target" in record["self_check"]["notes"][0]
    unknown = export_draft(draft, tmp_path / "unknown", engine="vllm", without_target=True)
    assert config_of(unknown)["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # depth unknown


def test_speculators_config(exports, tiny_target):
    values = config_of(exports["peagle", "speculators"])
    assert "model_type" not in values
    assert values["speculators_model_type"] == values["speculators_config"]["algorithm"] == "peagle"
    assert values["mask_token_id"] == 0
    assert values["speculators_config"]["proposal_methods"] == [
        {
            "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
    ]  # fmt: skip
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": tiny_target.name, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    assert values["norm_before_residual"] is False  # eagle3's default is true
    assert config_of(exports["eagle3", "speculators"])["norm_before_residual"] is False
    assert values["transformer_layer_config"]["num_hidden_layers"] == 2
    assert values["transformer_layer_config"]["vocab_size"] == 400


ROPES = [
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
def test_rotary_scaling_is_written_in_both_spellings(tmp_path, tiny_target, engine, rope):
    draft = make_draft(tmp_path / "draft", tiny_target, rope_parameters=rope)
    exported = export_draft(
        draft, tmp_path / "out", engine=engine, target=str(tiny_target), check=CHECK
    )
    values = config_of(exported)
    values = values.get("transformer_layer_config", values)
    assert values["rope_parameters"].items() >= rope.items()
    assert values["rope_scaling"] == values["rope_parameters"]
    assert values["rope_theta"] == rope["rope_theta"]
    if rope["rope_type"] == "yarn":  # transformers has a default; engines need it written out
        assert values["rope_scaling"]["original_max_position_embeddings"] == 512


def test_unsorted_aux_layers_are_sorted(tmp_path, tiny_target):
    draft = make_draft(
        tmp_path / "draft", tiny_target, aux_layer_ids=[2, 0, 1], fc_norm=True,
        parallel_drafting=True, mask_token_id=0,
    )  # fmt: skip
    before = LlamaEagle3DraftModel.from_pretrained(draft).double()
    sorted_draft = in_layer_order(before.config, before.state_dict())
    assert sorted_draft.aux_layer_ids == INNER
    after = LlamaEagle3DraftModel(sorted_draft.config).double()
    after.load_state_dict(sorted_draft.tensors)
    aux = torch.randn(5, 3, 32, dtype=torch.float64)  # by layer
    torch.testing.assert_close(
        before.project_hidden_states(aux[:, [2, 0, 1]].flatten(1)),
        after.project_hidden_states(aux.flatten(1)),
    )
    torch.testing.assert_close(before.masked_projected_hidden(), after.masked_projected_hidden())
    exported = export_draft(
        draft, tmp_path / "out", engine="vllm", target=str(tiny_target), check=CHECK
    )
    assert config_of(exported)["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
def test_exporting_in_a_different_dtype(tmp_path, drafts, tiny_target, engine):
    exported = export_draft(
        drafts["eagle3"], tmp_path / "out", engine=engine, target=str(tiny_target),
        dtype=torch.bfloat16, check=CHECK,
    )  # fmt: skip
    state = tensors_of(exported)
    assert state["fc.weight"].dtype == torch.bfloat16
    assert (state["d2t"].dtype, state["t2d"].dtype) == (torch.int64, torch.bool)
    assert config_of(exported)["torch_dtype"] == "bfloat16"
    assert config_of(exported).get("transformer_layer_config", {}).get("torch_dtype") in (
        None,
        "bfloat16",
    )
    assert read_export_record(exported)["self_check"]["decoded"]["same_as_checkpoint"]


def test_a_draft_without_layer_ids(deep_target, tmp_path):
    """Older and foreign drafts: the default layers of the given target are used."""
    draft = make_draft(tmp_path / "draft")
    rewrite(draft, config=lambda values: values.pop("aux_layer_ids"))
    common = {"engine": "vllm", "without_target": True}
    with pytest.raises(BadInput, match=r"which layers.*--target"):
        export_draft(draft, tmp_path / "out", **common)
    exported = export_draft(draft, tmp_path / "out", target=str(deep_target), **common)
    assert read_export_record(exported)["aux_layer_ids"] == [1, 3, 4]
    assert config_of(exported)["aux_layer_ids"] == [1, 3, 4]


# --- embeddings ---------------------------------------------------------------------------------


def test_trained_embeddings(tmp_path, tiny_target):
    draft = make_draft(tmp_path / "draft")  # its embeddings are its own
    common = {"target": str(tiny_target), "check": CHECK}
    vllm = export_draft(draft, tmp_path / "vllm", engine="vllm", **common)
    assert read_export_record(vllm)["embeddings"] == "trained"
    with pytest.raises(BadInput, match="trained embeddings"):
        export_draft(draft, tmp_path / "sglang", engine="sglang", **common)
    with pytest.raises(BadInput, match="trained embeddings"):  # unknown without the target
        export_draft(draft, tmp_path / "sglang", engine="sglang", without_target=True)
    assert not (tmp_path / "sglang").exists()


# --- refusals -----------------------------------------------------------------------------------


REFUSALS = [
    ("several layers", "eagle3.1", {"engine": "sglang", "engine_version": "0.5.9"}),
    ("did you mean 'vllm'", "eagle3", {"engine": "vlm"}),
    ("which target.*--without-target", "eagle3", {"engine": "vllm", "target": None}),
    ("the format names it", "eagle3",
     {"engine": "speculators", "target": None, "without_target": True}),
    ("no such model", "eagle3", {"engine": "vllm", "target": "nowhere"}),
    ("oldest", "eagle3", {"engine": "sglang", "engine_version": "0.4.0"}),
    ("blocks", "dflash", {"engine": "sglang", "engine_version": "0.5.9"}),
    ("blocks are of 4 drafted tokens", "dflash", {"engine": "vllm", "num_draft_tokens": 3}),
    ("rows of the target's head", "dflash, small vocabulary",
     {"engine": "vllm", "without_target": True}),
    # this target has no weights to load
    ("serves P-EAGLE", "peagle", {"engine": "sglang", "target": "deep"}),
]  # fmt: skip


@pytest.mark.parametrize(("match", "kind", "options"), REFUSALS)
def test_refusals_leave_no_files(tmp_path, drafts, tiny_target, deep_target, match, kind, options):
    options = {"target": str(tiny_target), **options}
    if options["target"] == "deep":
        options["target"] = str(deep_target)
    with pytest.raises(BadInput, match=match):
        export_draft(drafts[kind], tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_that_contradicts_its_config_or_target_is_refused(tmp_path, tiny_target):
    def attempt(draft, match, **options):
        with pytest.raises(BadInput, match=match):
            export_draft(draft, tmp_path / "out", engine="vllm", **options)
        assert not (tmp_path / "out").exists()

    for number, (broken, match) in enumerate((
        ({"config": put("intermediate_size", 49)}, r"gate_proj.weight \(48, 32\) not \(49, 32\)"),
        ({"tensors": lambda state: state.update(bias=torch.zeros(1))}, "unknown: bias"),
        ({"tensors": drop("norm.weight")}, r"missing: norm\.weight"),
    )):  # fmt: skip
        draft = make_draft(tmp_path / f"draft{number}")
        rewrite(draft, **broken)
        attempt(draft, match, without_target=True)
    narrow = make_draft(tmp_path / "narrow", hidden_size=16, target_hidden_size=16)
    attempt(narrow, "target_hidden_size is 16", target=str(tiny_target))


def test_sglang_cannot_capture_the_last_layer(tmp_path, tiny_target):
    draft = make_draft(tmp_path / "draft", tiny_target, aux_layer_ids=AUX)
    with pytest.raises(BadInput, match="last layer"):
        export_draft(draft, tmp_path / "out", engine="sglang", target=str(tiny_target))
    exported = export_draft(
        draft, tmp_path / "out", engine="vllm", target=str(tiny_target), check=CHECK
    )
    assert config_of(exported)["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]


def test_a_directory_that_is_not_an_export_is_not_replaced(tmp_path, drafts, tiny_target):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("four years")
    common = {"engine": "vllm", "target": str(tiny_target), "without_target": True}
    with pytest.raises(BadInput, match="not an export"):
        export_draft(drafts["eagle3"], out, **common)
    assert (out / "thesis.txt").read_text() == "four years"
    (out / "thesis.txt").unlink()
    export_draft(drafts["eagle3"], out, **common)
    with pytest.raises(BadInput, match="an export is here already; give --overwrite"):
        export_draft(drafts["peagle"], out, **common)
    assert read_export_record(out)["kind"] == "EAGLE-3"
    export_draft(drafts["peagle"], out, overwrite=True, **common)
    assert read_export_record(out)["kind"] == "P-EAGLE"


# --- what the self-check catches ----------------------------------------------------------------


def drop(name):
    return lambda state: state.pop(name)


def nudge(name):
    return lambda state: state[name].flatten()[0].add_(1)


def put(path, value):
    return lambda values: set_path(values, path, value)


def absolute(state):
    state["d2t"] = state["d2t"] + torch.arange(len(state["d2t"]))


def sglang_names(state):
    for name in [name for name in state if name.startswith("midlayer.")]:
        state[name.replace("midlayer.", "layers.0.")] = state.pop(name)


IDS = "eagle_aux_hidden_state_layer_ids"
BROKEN = [
    ("eagle3", "vllm", "tensors", drop("fc.weight"), "fc.weight: missing"),
    ("eagle3", "vllm", "tensors", drop("layers.0.self_attn.o_proj.weight"), "o_proj.weight: mis"),
    ("eagle3", "vllm", "tensors", drop("d2t"), "d2t: missing"),
    ("eagle3", "vllm", "tensors", nudge("norm.weight"), "norm.weight: other values"),
    ("eagle3", "vllm", "tensors", absolute, "d2t: other values"),
    ("eagle3", "sglang", "tensors", absolute, "d2t: other values"),
    ("eagle3", "sglang", "tensors", sglang_names, "layers.0.*the engine skips it"),
    ("eagle3", "vllm", "config", put(IDS, [0, 1, 2]), "aux_layer_ids"),
    ("eagle3", "vllm", "config", lambda values: values.pop(IDS), "aux_layer_ids"),
    ("eagle3", "sglang", "config", put("eagle_config", {IDS: [1, 2, 3]}), "aux_layer_ids"),
    ("eagle3", "sglang", "config", put("eagle_config", {}), "aux_layer_ids"),
    ("eagle3", "vllm", "config", put("num_hidden_layers", 4), "num_hidden_layers: 1 -> 4"),
    ("eagle3", "vllm", "config", put("norm_before_residual", True), "norm_before_residual"),
    ("eagle3", "sglang", "config", put("norm_before_residual", True), "norm_before_residual"),
    ("eagle3", "speculators", "config", lambda v: v.pop("norm_before_residual"), "norm_before"),
    ("eagle3", "speculators", "config", put("model_type", "llama"), "model_type"),
    ("eagle3.1", "vllm", "config", put("fc_norm", False), "fc_norm: True -> False"),
    ("eagle3.1", "sglang", "config", lambda values: values.pop("norm_output"), "norm_output"),
    ("eagle3.1", "sglang", "tensors", drop("layers.1.hidden_norm.weight"), "input_layernorm"),
    ("peagle", "vllm", "config", put("mask_token_id", 1), "mask_token_id: 0 -> 1"),
    ("peagle", "vllm", "tensors", drop("mask_hidden"), "mask_hidden: missing"),
    ("eagle3", "vllm", "config", put("rope_parameters", {"rope_theta": 5e5}), "rotary positions"),
    ("eagle3", "vllm", "config", put("vocab_size", 90), "vocab_size: 400 -> 90"),
    ("eagle3", "vllm", "config", put("rms_norm_eps", 1e-5), "rms_norm_eps"),
    ("eagle3", "vllm", "config", put("architectures", ["LlamaForCausalLM"]), "architectures"),
]  # fmt: skip


BROKEN += [
    (kind, engine, "config", put(path, value), "")  # which key it is need not be named
    for kind, engine, path, value in (
        ("dflash", "vllm", "dflash_config.target_layer_ids", [1, 3]),
        ("dflash", "vllm", "dflash_config.mask_token_id", 4),
        ("dflash", "vllm", "block_size", 6),
        ("dflash", "vllm", "is_causal", True),
        ("dflash", "vllm", "is_neox_style", False),
        ("dflash", "vllm", "num_target_layers", 5),
        ("dflash", "vllm", IDS, [0, 2]),
        ("dflash", "sglang", "layer_types", ["sliding_attention"] * 2),
        ("dflash", "sglang", "rope_parameters.rope_theta", 1e4),
        ("dflash, causal", "sglang", "is_causal", False),
        ("dflash, sliding", "vllm", "use_sliding_window", False),
        ("dflash, sliding", "vllm", "sliding_window", 7),
        ("dflash", "speculators", "aux_hidden_state_layer_ids", [0, 2]),
        ("dflash", "speculators", "sliding_window_non_causal", False),
        ("dspark", "vllm", "sample_from_anchor", False),
        ("dspark", "vllm", "enable_confidence_head", False),
        ("dspark", "vllm", "confidence_head_with_markov", False),
        ("dspark", "vllm", "markov_head_type", "gated"),
        ("dspark", "speculators", "sample_from_anchor", False),
    )
]


@pytest.mark.parametrize(
    ("kind", "engine", "what", "change", "named"),
    BROKEN,
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_broken_file_is_named(exports, drafts, side, tmp_path, kind, engine, what, change, named):
    broken = tmp_path / "export"
    shutil.copytree(exports[kind, engine], broken)
    model = load_draft(drafts[kind])
    draft = in_layer_order(model.config, model.state_dict())
    check_files(broken, engine, draft, side)
    rewrite(broken, **{what: change})
    with pytest.raises(BadInput, match=named or "self-check"):
        check_files(broken, engine, draft, side)


def test_missing_embeddings_are_detected_without_the_target(exports, drafts, tmp_path):
    broken = shutil.copytree(exports["eagle3", "vllm"], tmp_path / "broken")
    rewrite(broken, tensors=drop("embed_tokens.weight"))
    model = LlamaEagle3DraftModel.from_pretrained(drafts["eagle3"])
    draft = in_layer_order(model.config, model.state_dict())
    with pytest.raises(BadInput, match=r"embed_tokens\.weight: missing"):
        check_files(broken, "vllm", draft, TargetSide(4))
    check_files(exports["eagle3", "sglang"], "sglang", draft, TargetSide(4))


def test_a_faulty_writer_exports_nothing(tmp_path, drafts, tiny_target, monkeypatch):
    """The reader does not share the writer's codec, so an error in that is caught."""
    formats = METHODS["eagle3"].formats
    wrong = dataclasses.replace(formats["sglang"], aux_id_offset=1)
    monkeypatch.setitem(formats._entries, "sglang", wrong)
    with pytest.raises(BadInput, match="aux_layer_ids"):
        export_draft(drafts["eagle3"], tmp_path / "out", engine="sglang", target=str(tiny_target))
    assert list(tmp_path.iterdir()) == []


def test_a_target_given_by_hub_id_needs_no_local_files(tmp_path, drafts):
    exported = export_draft(
        drafts["eagle3"], tmp_path / "out", engine="speculators", target="org/model@main",
        without_target=True,
    )  # fmt: skip
    verifier = config_of(exported)["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/model", "architectures": []}
    card = (exported / "README.md").read_text()
    assert "base_model: org/model\n" in card
    assert "vllm serve out" in card
    assert read_export_record(exported)["target"]["name"] == "org/model@main"


# --- blocks --------------------------------------------------------------------------------------


def test_a_full_vocabulary_needs_no_head_of_the_target(tiny_target, tmp_path):
    options = {"engine": "vllm", "target": str(tiny_target), "without_target": True}
    export_draft(make_block(tmp_path / "full"), tmp_path / "out", **options)


def test_unsorted_layers_are_sorted(tiny_target, tmp_path):
    """Engines pass features in ascending order of layers, so fc's columns are reordered."""
    draft_dir = make_block(tmp_path / "ours", aux_layer_ids=[2, 0])
    out = export_draft(
        draft_dir, tmp_path / "out", engine="vllm", target=str(tiny_target), check=CHECK
    )
    assert config_of(out)["dflash_config"]["target_layer_ids"] == [0, 2]
    before, after = tensors_of(draft_dir)["fc.weight"], tensors_of(out)["fc.weight"]
    assert torch.equal(after, torch.cat([before[:, 32:], before[:, :32]], dim=1))


def test_sglang_skips_unknown_tensors(exports, tmp_path):
    out = exports["dflash", "sglang"]
    assert reread(out, "sglang", TargetSide(4)).unread == []
    broken = shutil.copytree(out, tmp_path / "broken")
    rewrite(
        broken, tensors=lambda tensors: tensors.update(d2t=torch.zeros(400), other=torch.zeros(1))
    )
    assert sorted(reread(broken, "sglang", TargetSide(4)).unread) == ["d2t", "other"]


def test_serve_commands(exports):
    def command(kind, engine):
        record = read_export_record(exports[kind, engine])
        return serve_command(record, "DIR", target="path/to/T")

    for kind, k in (("dflash", 4), ("dspark", 5)):
        vllm = command(kind, "vllm")
        speculative_config = json.loads(vllm[vllm.index("--speculative-config") + 1])
        assert speculative_config == {"method": kind, "model": "DIR", "num_speculative_tokens": k}
        sglang = command(kind, "sglang")
        at = sglang.index("--speculative-algorithm")
        assert sglang[at + 1] == kind.upper()
        assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == str(k + 1)
        assert "--speculative-num-steps" not in sglang
        assert "--speculative-eagle-topk" not in sglang
