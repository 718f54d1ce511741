"""DFlash and DSpark exports in every layout: read back by a reader that shares no table with the
writer, used for decoding, and refused where an engine would misread them."""

import json
import shutil

import pytest
import torch

from export.block_cases import KINDS, make_block
from export.export_cases import config_of, rewrite, tensors_of
from fledge import BadInput, export_draft
from fledge.formats.engines import serve_command
from fledge.formats.export import read_export_record
from fledge.formats.reread import TargetSide, differing_flags, differing_tensors, reread
from fledge.formats.self_check import CheckOptions
from fledge.methods.block.draft import BlockDraftModel

CHECK = CheckOptions(limit=2, max_new_tokens=12)
REFUSED = {
    ("dflash, small vocabulary", "sglang"): "reduced head",
    ("dspark, small vocabulary", "sglang"): "reduced head",
    ("dflash, causal", "speculators"): "causal blocks",
    ("dflash, sliding", "speculators"): "sliding layers",
}
CASES = [(k, e) for k in KINDS for e in ("vllm", "sglang", "speculators") if (k, e) not in REFUSED]


@pytest.fixture(scope="module")
def made(tiny_target, tmp_path_factory):
    """kind, engine -> (our draft's directory, its export)."""
    root = tmp_path_factory.mktemp("blocks")
    exports = {}
    for kind, engine in CASES:
        draft_dir = root / kind
        if not draft_dir.exists():
            make_block(draft_dir, **KINDS[kind])
        out = root / f"{kind}-{engine}"
        options = {"engine": engine, "target": str(tiny_target), "check": CHECK}
        exports[kind, engine] = draft_dir, export_draft(draft_dir, out, **options)
    return exports


@pytest.mark.parametrize(("kind", "engine"), CASES)
def test_the_files_match_the_draft_and_decode_like_it(made, kind, engine):
    draft_dir, out = made[kind, engine]
    record = read_export_record(out)
    check = record["self_check"]
    assert check["decoded"]["same_as_checkpoint"] is True
    assert record["embeddings"] == "the target's"
    assert record["num_draft_tokens"] == (5 if "dspark" in kind else 4)
    tensors = tensors_of(out)
    extra = {"lm_head.weight"} if "small" in kind else set()
    assert tensors.keys() == tensors_of(draft_dir).keys() | extra
    assert check["tensors"] == len(tensors)
    assert not any(name.startswith("embed_tokens") for name in tensors)


def test_config_keys_of_each_layout(made):
    flat = config_of(made["dflash", "vllm"][1])
    assert flat["architectures"] == ["DFlashDraftModel"]
    assert flat["model_type"] == "qwen3"
    assert flat["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    assert flat["layer_types"] == ["full_attention"] * 2
    assert (flat["block_size"], flat["num_target_layers"]) == (5, 4)
    assert flat == config_of(made["dflash", "sglang"][1])
    sliding = config_of(made["dflash, sliding", "vllm"][1])
    assert sliding["layer_types"] == ["sliding_attention"] * 2
    assert (sliding["use_sliding_window"], sliding["sliding_window"]) == (True, 6)
    assert config_of(made["dflash, causal", "vllm"][1])["is_causal"] is True
    spark = config_of(made["dspark", "vllm"][1])
    assert spark["architectures"] == ["Qwen3DSparkModel"]
    assert (spark["mask_token_id"], spark["target_layer_ids"]) == (3, [0, 2])
    assert (spark["markov_rank"], spark["markov_head_type"]) == (8, "vanilla")
    assert spark["enable_confidence_head"] is spark["confidence_head_with_markov"] is True
    assert (
        config_of(made["dspark without confidence", "vllm"][1])["enable_confidence_head"] is False
    )
    for kind, drafted in (("dflash", 4), ("dspark", 5)):
        nested = config_of(made[kind, "speculators"][1])
        assert nested["aux_hidden_state_layer_ids"] == [1, 3]  # ids + 1
        assert nested["transformer_layer_config"]["model_type"] == "qwen3"
        assert nested["speculators_config"]["algorithm"] == kind
        [proposal] = nested["speculators_config"]["proposal_methods"]
        assert proposal["speculative_tokens"] == drafted
        assert nested["sample_from_anchor"] is (kind == "dspark")
        assert "sliding_window_non_causal" not in nested  # vLLM reads false as causal blocks


@pytest.mark.parametrize("kind", ["dflash", "dflash, causal", "dflash, sliding", "dspark"])
def test_a_flat_export_loads_as_the_original_draft(made, kind):
    draft_dir, out = made[kind, "vllm"]
    original, reloaded = (BlockDraftModel.from_pretrained(path) for path in (draft_dir, out))
    assert differing_tensors(original.state_dict(), reloaded.state_dict()) == []
    assert differing_flags(original.config, reloaded.config) == []
    assert list(reloaded.config.aux_layer_ids) == [0, 2]


@pytest.mark.parametrize(("kind", "engine"), sorted(REFUSED))
def test_drafts_that_an_engine_would_misread_are_refused(tiny_target, tmp_path, kind, engine):
    draft_dir = make_block(tmp_path / "ours", **KINDS[kind])
    with pytest.raises(BadInput, match=REFUSED[kind, engine]):
        export_draft(draft_dir, tmp_path / "out", engine=engine, target=str(tiny_target))


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.31.0"), ("sglang", "0.5.9")])
def test_older_engines_cannot_serve_blocks(tiny_target, tmp_path, engine, version):
    draft_dir = make_block(tmp_path / "ours")
    options = {"engine": engine, "engine_version": version, "target": str(tiny_target)}
    with pytest.raises(BadInput, match="blocks"):
        export_draft(draft_dir, tmp_path / "out", **options)


def test_a_block_cannot_be_served_in_part(tiny_target, tmp_path):
    draft_dir = make_block(tmp_path / "ours")
    options = {"engine": "vllm", "target": str(tiny_target), "num_draft_tokens": 3}
    with pytest.raises(BadInput, match="blocks are of 4 drafted tokens"):
        export_draft(draft_dir, tmp_path / "out", **options)


def test_a_reduced_vocabulary_needs_the_targets_head(tiny_target, tmp_path):
    draft_dir = make_block(tmp_path / "ours", draft_vocab_size=90)
    options = {"engine": "vllm", "target": str(tiny_target), "without_target": True}
    with pytest.raises(BadInput, match="rows of the target's head"):
        export_draft(draft_dir, tmp_path / "out", **options)
    draft_dir = make_block(tmp_path / "full")
    export_draft(draft_dir, tmp_path / "out", **options)


def test_unsorted_layers_are_sorted(tiny_target, tmp_path):
    """Engines pass features in ascending order of layers, so fc's columns are reordered."""
    draft_dir = make_block(tmp_path / "ours", aux_layer_ids=[2, 0])
    out = export_draft(
        draft_dir, tmp_path / "out", engine="vllm", target=str(tiny_target), check=CHECK
    )
    assert config_of(out)["dflash_config"]["target_layer_ids"] == [0, 2]
    before, after = tensors_of(draft_dir)["fc.weight"], tensors_of(out)["fc.weight"]
    assert torch.equal(after, torch.cat([before[:, 32:], before[:, :32]], dim=1))


def _nested(path, value):
    def change(values):
        *outer, last = path.split(".")
        for name in outer:
            values = values[name]
        values[last] = value

    return change


# kind, engine, fault: every fault must be detected by the reader or the comparison
BREAKS = [
    ("dflash", "vllm", _nested("dflash_config.target_layer_ids", [1, 3])),
    ("dflash", "vllm", _nested("dflash_config.mask_token_id", 4)),
    ("dflash", "vllm", _nested("block_size", 6)),
    ("dflash", "vllm", _nested("is_causal", True)),
    ("dflash", "vllm", _nested("is_neox_style", False)),
    ("dflash", "vllm", _nested("num_target_layers", 5)),
    ("dflash", "vllm", _nested("eagle_aux_hidden_state_layer_ids", [0, 2])),
    ("dflash", "sglang", _nested("layer_types", ["sliding_attention"] * 2)),
    ("dflash", "sglang", _nested("rope_parameters.rope_theta", 1e4)),
    ("dflash, causal", "sglang", _nested("is_causal", False)),
    ("dflash, sliding", "vllm", _nested("use_sliding_window", False)),
    ("dflash, sliding", "vllm", _nested("sliding_window", 7)),
    ("dflash", "speculators", _nested("aux_hidden_state_layer_ids", [0, 2])),
    ("dflash", "speculators", _nested("sliding_window_non_causal", False)),
    ("dspark", "vllm", _nested("sample_from_anchor", False)),
    ("dspark", "vllm", _nested("enable_confidence_head", False)),
    ("dspark", "vllm", _nested("confidence_head_with_markov", False)),
    ("dspark", "vllm", _nested("markov_head_type", "gated")),
    ("dspark", "speculators", _nested("sample_from_anchor", False)),
]


@pytest.mark.parametrize(("kind", "engine", "change"), BREAKS)
def test_the_reader_detects_a_changed_key(made, tmp_path, kind, engine, change):
    draft_dir, out = made[kind, engine]
    broken = shutil.copytree(out, tmp_path / "broken")
    draft = BlockDraftModel.from_pretrained(draft_dir)
    assert _faults(broken, engine, draft) == []
    rewrite(broken, config=change)
    assert _faults(broken, engine, draft)


def _faults(directory, engine, draft):
    try:
        served = reread(directory, engine, TargetSide(4))
    except BadInput as error:
        return [str(error)]
    return differing_flags(draft.config, served.config)


def test_sglang_skips_unknown_tensors(made, tmp_path):
    _, out = made["dflash", "sglang"]
    assert reread(out, "sglang", TargetSide(4)).unread == []
    broken = shutil.copytree(out, tmp_path / "broken")
    rewrite(
        broken, tensors=lambda tensors: tensors.update(d2t=torch.zeros(400), other=torch.zeros(1))
    )
    assert sorted(reread(broken, "sglang", TargetSide(4)).unread) == ["d2t", "other"]


def test_serve_commands(made):
    def command(kind, engine):
        record = read_export_record(made[kind, engine][1])
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
