"""`fledge recipe` as users see it."""

import json
from pathlib import Path

import pytest

from fledge.methods.losses.registry import LOSSES
from fledge.recipe.schema import load_recipe

ROOT = Path(__file__).parents[2]


def test_show_prints_a_recipe_that_reads_back_equal(fledge, tmp_path):
    file = str(ROOT / "recipes/smollm2_cpu.yaml")
    code, out, _ = fledge("recipe", "show", file, "training.lr=3e-4")
    assert code == 0
    (tmp_path / "r.yaml").write_text(out)
    assert load_recipe(tmp_path / "r.yaml") == load_recipe(file, ["training.lr=3e-4"])


def test_show_as_json(fledge):
    code, out, _ = fledge("recipe", "show", "--json", "target.backend=remote")
    assert code == 0
    assert json.loads(out) == load_recipe(None, ["target.backend=remote"]).model_dump(mode="json")


def test_typos_are_one_line_and_exit_code_2(fledge):
    code, out, err = fledge("recipe", "show", "trainig.lr=1")
    assert (code, out) == (2, "")
    assert err == (
        "fledge: override 'trainig.lr=1': unknown section 'trainig'; did you mean 'training'?\n"
    )


def test_the_schema_is_json_and_has_every_section(fledge):
    code, out, _ = fledge("recipe", "schema")
    schema = json.loads(out)
    assert code == 0
    assert set(schema["properties"]) == set(load_recipe(None).model_dump())
    assert schema["additionalProperties"] is False
    kinds = schema["properties"]["target"]["discriminator"]["mapping"]
    assert set(kinds) == {"hf", "remote", "cache", "sglang", "vllm", "ray"}
    assert all(ref.removeprefix("#/$defs/") in schema["$defs"] for ref in kinds.values())
    names, losses = schema["$defs"]["Eagle3Section"]["properties"]["loss"]["anyOf"]
    assert names["enum"] == list(LOSSES)
    assert losses["discriminator"]["mapping"]["lk_lambda"] == "#/$defs/LkLambda"
    assert set(schema["$defs"]["LkLambda"]["properties"]) == {"kind", "scale", "decay"}


def test_check_prints_one_line_per_file_and_stops_at_the_first_bad_one(fledge, tmp_path):
    good = [str(path) for path in sorted(ROOT.glob("recipes/*.yaml"))]
    code, out, _ = fledge("recipe", "check", *good)
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == [f"ok  {path}" for path in good]
    bad = tmp_path / "bad.yaml"
    bad.write_text("training:\n  lrr: 1\n")
    code, out, err = fledge("recipe", "check", good[0], str(bad), good[1])
    assert code == 2
    assert len(out.splitlines()) == 1
    assert "bad.yaml, line 2: unknown key 'training.lrr'; did you mean 'lr'?" in err


def test_every_shipped_recipe_is_listed_and_copied_unchanged(fledge, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {path.stem: path for path in ROOT.glob("src/fledge/recipes/*.yaml")}
    _, out, _ = fledge("recipe", "list", "--json")
    listed = json.loads(out)
    assert [entry["name"] for entry in listed] == sorted(files)
    assert len({entry["title"] for entry in listed}) == len(files)
    _, out, _ = fledge("recipe", "list")
    assert all(name in out for name in files)
    for name, path in files.items():
        assert fledge("recipe", "copy", name)[0] == 0
        assert (tmp_path / f"{name}.yaml").read_bytes() == path.read_bytes()
        assert load_recipe(name) == load_recipe(path)
    code, _, err = fledge("recipe", "copy", name)
    assert (code, err.count("\n")) == (2, 1)
    fledge("recipe", "copy", name, "--out", "mine.yaml")
    assert (tmp_path / "mine.yaml").read_bytes() == files[name].read_bytes()


def test_a_file_shadows_a_shipped_recipe_but_a_directory_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = load_recipe("smollm2_cpu")
    (tmp_path / "smollm2_cpu").mkdir()
    assert load_recipe("smollm2_cpu") == shipped
    (tmp_path / "smollm2_gpu").write_text("training: {lr: 0.5}")
    assert load_recipe("smollm2_gpu").training.lr == 0.5


@pytest.mark.parametrize(
    ("named", "advice"),
    [
        ("smollm_cpu", "did you mean 'smollm2_cpu'?"),
        ("recipes/smollm2_cpu.yaml", "did you mean 'smollm2_cpu'?"),
    ],
)
def test_a_missing_recipe_is_refused_with_advice(fledge, tmp_path, monkeypatch, named, advice):
    monkeypatch.chdir(tmp_path)
    code, out, err = fledge("train", named)
    assert (code, out) == (2, "")
    assert err == f"fledge: {named}: no such recipe; {advice}\n"
