"""Drafts that come with fledge: known by name to every verb, and small because they share."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file

from command_lines import ROOT
from fledge.core.errors import BadInput
from fledge.models import shipped
from fledge.models.weight_files import read_target_tables
from fledge.recipe.schema import load_recipe
from fledge.training.runs import (
    draft_directory,
    known_layers,
    load_draft_beside,
    load_target,
    trained_prompts,
    trained_tokens,
)


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """`tools/ship_draft.py`, which ships into a folder of the test."""
    spec = importlib.util.spec_from_file_location("ship_draft", ROOT / "tools/ship_draft.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "HOME", tmp_path / "shipped")
    monkeypatch.setattr(tool, "portable", lambda values: values)  # the tiny target is a path
    monkeypatch.setattr(shipped, "HOME", tmp_path / "shipped")
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    return tool.ship


def test_a_shipped_draft_is_the_draft_without_what_its_target_has(ship, trained, tiny_target):
    place = ship(trained, "tiny-eagle3", None, [])
    packed, whole = (
        load_file(place / "model.safetensors"),
        load_file(trained / "best/model.safetensors"),
    )
    assert set(whole) - set(packed) == {"embed_tokens.weight"}
    directory = draft_directory(shipped.Path("tiny-eagle3"))
    assert directory == draft_directory(shipped.Path("tiny-eagle3"))  # completed once
    found = load_file(directory / "model.safetensors")
    assert torch.equal(
        found.pop("embed_tokens.weight"), read_target_tables(tiny_target).embedding_VD
    )
    for name, tensor in found.items():
        expected = whole[name]
        expected = expected.bfloat16().float() if expected.is_floating_point() else expected
        assert torch.equal(tensor, expected), name
    assert trained_tokens(directory) == trained_tokens(trained)
    assert (trained_prompts(directory) == trained_prompts(trained)).all()
    with load_target(directory) as target:  # the target and its layers are known too
        assert tuple(target.aux_layer_ids) == tuple(known_layers(trained / "best"))
        assert load_draft_beside(target, directory).spec.draft_vocab_size > 0


def test_verbs_take_its_name(ship, trained, tiny_target, fledge, tmp_path, monkeypatch):
    ship(trained, "tiny-eagle3", None, [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", (tmp_path / "asked").open("w+"))
    short = ("--limit", "2", "--max-new-tokens", "8", "--json")
    measured = json.loads(fledge("eval", "tiny-eagle3", "--live", "1", *short).out)
    assert [draft["draft"] for draft in measured["drafts"]] == ["tiny-eagle3"]
    assert fledge("chat", tiny_target, "--draft", "tiny-eagle3").code == 0
    again = fledge("chat", tiny_target, "--draft", "tiny-eagle3", "--target", tiny_target)
    assert (again.code, again.err) == (
        2, "fledge: --target: is given twice; leave it out with --draft\n",
    )  # fmt: skip
    assert "tiny-eagle3" in fledge("diagnose", "tiny-eagle3", "--static").out
    assert fledge("export", "tiny-eagle3", "--engine", "vllm", "--without-target").code == 0
    assert (tmp_path / "tiny-eagle3-vllm/config.json").is_file()


def test_an_unknown_name_is_answered_with_those_that_exist(ship, trained):
    ship(trained, "tiny-eagle3", None, [])
    with pytest.raises(BadInput, match=r"nowhere: neither .*; fledge brings tiny-eagle3"):
        draft_directory(shipped.Path("nowhere"))


def test_what_fledge_brings_is_small_and_names_no_path():
    for name in shipped.shipped_drafts():
        files = list((shipped.HOME / name).iterdir())
        assert sum(file.stat().st_size for file in files) <= 20e6
        assert {"README.md", "config.json", "recipe.yaml"} <= {file.name for file in files}
        for file in files:
            if file.suffix != ".safetensors":
                assert "/root" not in file.read_text()
        assert load_recipe(shipped.HOME / name / "recipe.yaml").target.model == "smollm2-135m"
