"""What is special about exports of DFlash and DSpark; what all exports share: test_export_files."""

import json
import shutil

import pytest
import torch

from export.block_cases import make_block
from export.export_cases import CHECK, config_of, rewrite, tensors_of
from fledge import BadInput, export_draft
from fledge.formats.engines import serve_command
from fledge.formats.export import read_export_record
from fledge.formats.reread import TargetSide, reread


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
