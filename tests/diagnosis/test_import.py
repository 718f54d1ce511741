"""Our draft -> any layout or export -> healthy, and imported bit for bit; and refused imports."""

import json
import os
import shutil

import pytest
import torch
from block_drafts import LAYOUTS as BLOCK_LAYOUTS
from block_drafts import write_block_as
from safetensors.torch import load_file, save_file
from test_diagnose_faults import assert_same_files, broken_copy, no_decoding, put
from typer.testing import CliRunner

from export.drafts import files_of, make_eagle1
from export.export_cases import VLLM_ONLY, rewrite
from export.export_cases import make_draft as make_exported
from export.layouts import EAGLE1_LAYOUTS, LAYOUTS, write_as
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.formats.checks.base import Subject, TargetFiles
from fledge.formats.diagnose import diagnose
from fledge.formats.export import export_draft
from fledge.formats.foreign import read_files
from fledge.formats.import_draft import check_network, import_draft
from fledge.formats.reread import differing_flags
from fledge.formats.self_check import CheckOptions
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.registry import load_draft
from fledge.models.weight_files import read_target_tables

KINDS = ("eagle3", "eagle31", "peagle")
FOREIGN = [(kind, layout) for kind in KINDS for layout in (*LAYOUTS, "fledge")]
FOREIGN += [("eagle1", layout) for layout in EAGLE1_LAYOUTS]
FOREIGN += [(kind, layout) for kind in BLOCK_LAYOUTS for layout in BLOCK_LAYOUTS[kind]]
ENGINES = ("vllm", "sglang", "speculators")
EXPORTED = [(kind, engine) for kind in (*KINDS, *BLOCK_LAYOUTS) for engine in ENGINES]
EXPORTED += [(kind, engine) for kind in ("eagle1", "eagle2") for engine in ENGINES[:2]]
EXPORTED.remove(("peagle", "sglang"))


@pytest.mark.parametrize(("kind", "layout"), FOREIGN)
def test_every_layout_is_healthy_and_imports_bit_for_bit(place, made, tmp_path, kind, layout):
    foreign, target = made(kind), place / "target"
    if layout != "fledge":
        written = (tmp_path / "foreign", target)
        if kind in BLOCK_LAYOUTS:
            foreign = write_block_as(layout, foreign, written[0])
        else:
            foreign = write_as(layout, foreign, *written)
    diagnosis = diagnose(foreign, str(target), answering=no_decoding)
    assert diagnosis.healthy, diagnosis.findings
    assert diagnosis.layout == layout
    import_draft(foreign, tmp_path / "ours", target=str(target))
    assert_same_files(tmp_path / "ours", made(kind))


@pytest.mark.parametrize(("kind", "engine"), EXPORTED)
def test_every_export_is_healthy_and_imports_bit_for_bit(place, made, tmp_path, kind, engine):
    target, own = str(place / "target"), made("eagle1" if kind == "eagle2" else kind)
    if kind == "eagle2":
        own = broken_copy(own, tmp_path / "own", put(eagle_version=2))
    options = {"without_target": True}
    if engine == "sglang":  # it has to be shown that the embeddings are the target's
        options = {"check": CheckOptions(("mixed",), limit=1, max_new_tokens=8)}
    exported = export_draft(own, tmp_path / "out", engine=engine, target=target, **options)
    diagnosis = diagnose(
        exported, target, engine=engine.replace("speculators", "vllm"), answering=no_decoding
    )
    assert diagnosis.healthy, diagnosis.findings
    import_draft(exported, tmp_path / "ours", target=target)
    assert_same_files(tmp_path / "ours", own)


@pytest.mark.parametrize("kind", [*KINDS, "eagle1", "dflash", "dspark"])
def test_a_healthy_draft_passes(made, look, kind):
    diagnosis = look(made(kind))
    assert diagnosis.healthy, diagnosis.findings
    assert diagnosis.layout == "fledge"
    assert not diagnosis.skipped
    assert diagnosis.repaired is None
    assert diagnosis.score.first > 0.3


def test_rows_that_are_nearly_equal_in_the_target_may_be_confused(place, tmp_path):
    """Tokens that a target never saw have nearly equal rows: training decides which is nearest."""
    target, draft = (shutil.copytree(place / n, tmp_path / n) for n in ("target", "eagle3"))
    table, head = load_file(target / "model.safetensors"), load_file(draft / "model.safetensors")
    name = next(name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in table)
    noise = torch.Generator().manual_seed(0)
    unseen = table[name][:1].expand_as(table[name])
    table[name] = unseen + 0.01 * torch.randn(unseen.shape, generator=noise).to(unseen)
    ids = torch.arange(len(head["d2t"])) + head["d2t"]
    trained = 0.02 * torch.randn(head["lm_head.weight"].shape, generator=noise)
    head["lm_head.weight"] = (table[name][ids] + trained).to(head["lm_head.weight"])
    save_file(table, target / "model.safetensors", {"format": "pt"})
    save_file(head, draft / "model.safetensors", {"format": "pt"})
    diagnosis = diagnose(draft, str(target), answering=no_decoding)
    assert "head-map" not in {finding.check for finding in diagnosis.findings}


def test_non_default_layers_are_imported(place, tmp_path):
    """Layers that are not the default, in layouts that can express them."""
    source = broken_copy(place / "eagle3", tmp_path / "source", put(aux_layer_ids=[0, 2, 5]))
    for layout in ("speculators", "modelopt"):
        foreign = write_as(layout, source, tmp_path / layout, place / "target")
        import_draft(foreign, tmp_path / f"{layout}_ours", target=str(place / "target"))
        assert_same_files(tmp_path / f"{layout}_ours", source)


def test_a_full_vocabulary_needs_no_maps_and_no_head(place, tmp_path):
    """A missing head is the target's, as engines share it; identity maps are dropped."""
    config, tensors = files_of(place / "eagle3")
    full, head = config["vocab_size"], read_target_tables(place / "target").head_VD
    kept = {k: v for k, v in tensors.items() if k not in ("lm_head.weight", "d2t", "t2d")}
    config["draft_vocab_size"] = full
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    save_file(kept, tmp_path / "bare" / "model.safetensors")
    shutil.copytree(tmp_path / "bare", tmp_path / "full")
    identity = {
        "lm_head.weight": head,
        "d2t": torch.zeros(full, dtype=torch.int64),
        "t2d": torch.ones(full, dtype=torch.bool),
    }
    save_file({**kept, **identity}, tmp_path / "full" / "model.safetensors")
    for name in ("bare", "full"):
        import_draft(tmp_path / name, tmp_path / f"{name}_ours", target=str(place / "target"))
    assert_same_files(tmp_path / "bare_ours", tmp_path / "full_ours")
    draft = LlamaEagle3DraftModel.from_pretrained(tmp_path / "bare_ours")
    assert torch.equal(draft.lm_head.weight, head)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
          "rope_theta": 1e4, "rope_scaling": None}, "rope"),
    ],
)  # fmt: skip
def test_unsupported_drafts_are_refused(place, tmp_path, change, says):
    foreign = write_as("specforge", place / "eagle3", tmp_path / "foreign", place / "target")
    rewrite(foreign, config=lambda values: values.update(change))
    with pytest.raises(BadInput, match=says):
        import_draft(foreign, tmp_path / "ours", target=str(place / "target"))
    assert not (tmp_path / "ours").exists()


def test_certain_repairs_are_made_and_named(place, tmp_path):
    """The target's number of layers and kind of model, as AutoModel writes them."""
    copied = {"num_hidden_layers": 8, "model_type": "qwen3"}
    foreign = write_as("automodel", place / "eagle3", tmp_path / "foreign", place / "target")
    rewrite(foreign, config=lambda values: values.update(copied))
    arguments = ["import", str(foreign), "--target", str(place / "target"), "--out"]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "one"), "--json"])
    repairs = json.loads(result.stdout)["repairs"]
    assert [repair["check"] for repair in repairs] == ["architecture", "sizes"]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "two")])
    assert "repaired: num_hidden_layers is 8" in result.stdout
    for name in ("one", "two"):
        assert_same_files(tmp_path / name, place / "eagle3")


def test_a_normed_residual_is_imported_but_not_exported(place, tmp_path):
    from export.drafts import make_draft

    draft = make_draft(place / "target", fit=0, norm_before_residual=True)
    draft.config.ttt_steps = 3  # as the speculators file will have it
    draft.save_pretrained(tmp_path / "own")
    assert files_of(tmp_path / "own")[0]["norm_before_residual"]
    foreign = tmp_path / "foreign"
    write_as("speculators", tmp_path / "own", foreign, place / "target")
    path = foreign / "config.json"
    values = json.loads(path.read_text())
    del values["norm_before_residual"]  # speculators' default for EAGLE-3 is true
    del values["transformer_layer_config"]["norm_before_residual"]
    path.write_text(json.dumps(values))
    import_draft(foreign, tmp_path / "ours", target=str(place / "target"))
    assert_same_files(tmp_path / "ours", tmp_path / "own")
    with pytest.raises(BadInput, match="norm_before_residual"):
        export_draft(tmp_path / "ours", tmp_path / "out", engine="vllm", without_target=True)


def test_mixed_dtypes_lose_nothing_and_nothing_is_overwritten(place, tmp_path):
    def break_(config, tensors):
        tensors["norm.weight"] = tensors["norm.weight"].bfloat16()
        tensors["fc.weight"] = tensors["fc.weight"].half()

    mixed = broken_copy(place / "eagle3", tmp_path / "mixed", break_)
    import_draft(mixed, tmp_path / "ours", target=str(place / "target"))
    _, tensors = files_of(tmp_path / "ours")
    for name, tensor in files_of(mixed)[1].items():
        assert torch.equal(tensors[name], tensor.to(tensors[name].dtype)), name
        assert tensors[name].dtype in (torch.float32, torch.int64, torch.bool)
    with pytest.raises(BadInput, match="exists already"):
        import_draft(place / "eagle3", tmp_path / "ours", target=str(place / "target"))


@pytest.mark.parametrize(
    ("kind", "facts", "shown"),
    [
        ("eagle3", {"aux_layer_ids": [1, 3, 4], "parallel_drafting": False}, "EAGLE-3 from"),
        ("eagle1", {"aux_layer_ids": [8], "eagle_version": 1, "fc_bias": False}, "last hidden"),
    ],
)
def test_the_command(place, made, tmp_path, kind, facts, shown):
    foreign = write_as("eagle", made(kind), tmp_path / "foreign", place / "target")
    arguments = ["import", str(foreign), "--target", str(place / "target"), "--out"]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "one"), "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["layout"] == "eagle"
    assert printed.items() >= facts.items()
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "two")])
    assert "SafeAILab EAGLE" in result.stdout
    assert shown in result.stdout
    assert_same_files(tmp_path / "two", made(kind))


def test_an_executable_weights_file_is_not_run(place, tmp_path):
    """torch's own format may contain code; it is read as data or not at all."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    foreign = write_as("eagle", place / "eagle3", tmp_path / "foreign", place / "target")
    torch.save({"fc.weight": Evil()}, foreign / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"pytorch_model\.bin: cannot be read"):
        import_draft(foreign, tmp_path / "ours", target=str(place / "target"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", VLLM_ONLY)
def test_norms_and_biases_survive_export_and_import(kind, tiny_target, tmp_path):
    """A draft that only vLLM serves survives an export and import unchanged."""
    draft = make_exported(tmp_path / "draft", tiny_target, **VLLM_ONLY[kind])
    options = {"engine": "vllm", "target": str(tiny_target), "without_target": True}
    exported = export_draft(draft, tmp_path / "exported", **options)
    back = import_draft(exported, tmp_path / "back", target=str(tiny_target))
    before, after = (load_draft(directory) for directory in (draft, back))
    assert not differing_flags(before.config, after.config)
    assert before.state_dict().keys() == after.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name
    files = read_files(exported)
    files.tensors.pop("layers.1.self_attn.q_norm.weight", None)
    files.tensors.pop("layers.1.self_attn.q_proj.bias", None)
    with pytest.raises(BadInput, match="missing"):
        check_network(Subject(files, TargetFiles(str(tiny_target))))


# --- EAGLE-1 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["eagle", "eagle1-sglang"])
def test_a_bias_is_kept_and_the_tables_come_from_the_target(place, tmp_path, layout):
    make_eagle1(place / "target", fit=0, bias=True).save_pretrained(tmp_path / "own")
    foreign = write_as(layout, tmp_path / "own", tmp_path / "foreign", place / "target")
    ours = import_draft(foreign, tmp_path / "ours", target=str(place / "target"))
    assert_same_files(ours, tmp_path / "own")
    config, tensors = files_of(ours)
    tables = read_target_tables(place / "target")
    assert config["fc_bias"] is True
    assert torch.equal(tensors["embed_tokens.weight"], tables.embedding_VD)
    assert torch.equal(tensors["lm_head.weight"], tables.head_VD)
    with pytest.raises(BadInput, match="fc bias"):
        export_draft(ours, tmp_path / "no", engine="vllm", without_target=True)
    target = str(place / "target")
    out = export_draft(ours, tmp_path / "out", engine="sglang", target=target, without_target=True)
    import_draft(out, tmp_path / "again", target=target)
    assert_same_files(tmp_path / "again", ours)
