"""EAGLE-1: our draft -> any layout -> import gives our draft, bit for bit, with equal scores."""

import json

import pytest
import torch
from test_diagnose_faults import assert_same_files, broken_copy, put
from typer.testing import CliRunner

from export.drafts import files_of, make_eagle1
from export.layouts import EAGLE1_LAYOUTS, write_as
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.diagnosis.import_draft import import_draft
from fledge.export.export import export_draft
from fledge.methods.registry import load_draft
from fledge.models.weight_files import read_target_tables


@pytest.mark.parametrize("layout", EAGLE1_LAYOUTS)
def test_every_layout_imports_bit_for_bit(place, eagle1, tmp_path, layout):
    foreign = write_as(layout, eagle1, tmp_path / "foreign", place / "target")
    import_draft(foreign, tmp_path / "ours", target=str(place / "target"))
    assert_same_files(tmp_path / "ours", eagle1)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("engine", ["vllm", "sglang", None])
def test_exports_import_bit_for_bit(place, eagle1, tmp_path, engine, version):
    target = str(place / "target")
    exported = broken_copy(eagle1, tmp_path / "own", put(eagle_version=version))
    if engine is not None:
        exported = tmp_path / "exported"
        options = {"target": target, "without_target": True}
        export_draft(tmp_path / "own", exported, engine=engine, **options)
    import_draft(exported, tmp_path / "ours", target=target)
    assert_same_files(tmp_path / "ours", tmp_path / "own")


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


def test_an_imported_draft_scores_like_the_original(place, eagle1, tmp_path, answering):
    foreign = write_as("eagle", eagle1, tmp_path / "foreign", place / "target")
    ours = import_draft(foreign, tmp_path / "ours", target=str(place / "target"))
    scores = [
        answering(None).score(load_draft(path), load_draft(path).config.aux_layer_ids)
        for path in (ours, eagle1)
    ]
    assert scores[0].acceptance == scores[1].acceptance
    assert scores[0].first > 0.3


def test_the_command(place, eagle1, tmp_path):
    foreign = write_as("eagle", eagle1, tmp_path / "foreign", place / "target")
    arguments = ["import", str(foreign), "--target", str(place / "target"), "--out"]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "one"), "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert (printed["layout"], printed["eagle_version"], printed["fc_bias"]) == ("eagle", 1, False)
    assert printed["aux_layer_ids"] == [8]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "two")])
    assert "EAGLE-1 from SafeAILab EAGLE" in result.stdout
    assert "last hidden state" in result.stdout
