"""`fledge recipe` as users see it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fledge.cli.main import run
from fledge.recipe.schema import load_recipe

ROOT = Path(__file__).parents[2]


def fledge(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        run(list(arguments))
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


def test_show_prints_a_recipe_that_reads_back_equal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(ROOT / "recipes/smollm2_cpu.yaml")
    code, out, _ = fledge(capsys, "recipe", "show", file, "training.lr=3e-4")
    assert code == 0
    (tmp_path / "r.yaml").write_text(out)
    assert load_recipe(tmp_path / "r.yaml") == load_recipe(file, ["training.lr=3e-4"])


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = fledge(capsys, "recipe", "show", "--json", "target.backend=remote")
    assert code == 0
    assert json.loads(out) == load_recipe(None, ["target.backend=remote"]).model_dump(mode="json")


def test_typos_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = fledge(capsys, "recipe", "show", "trainig.lr=1")
    assert (code, out) == (2, "")
    assert err == (
        "fledge: override 'trainig.lr=1': unknown section 'trainig'; did you mean 'training'?\n"
    )


def test_the_schema_is_json_and_has_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = fledge(capsys, "recipe", "schema")
    schema = json.loads(out)
    assert code == 0
    assert set(schema["properties"]) == {*load_recipe(None).model_dump(), "drafts"}
    assert schema["additionalProperties"] is False
    kinds = schema["properties"]["target"]["discriminator"]["mapping"]
    assert set(kinds) == {"hf", "remote", "cache", "sglang", "vllm", "ray"}
    assert all(ref.removeprefix("#/$defs/") in schema["$defs"] for ref in kinds.values())
    names, losses = schema["$defs"]["Eagle3Section"]["properties"]["loss"]["anyOf"]
    assert names["enum"] == ["ce", "kl", "reverse_kl", "js", "hard", "lk_alpha", "lk_lambda", "tv"]
    assert losses["discriminator"]["mapping"]["lk_lambda"] == "#/$defs/LkLambda"
    assert set(schema["$defs"]["LkLambda"]["properties"]) == {"kind", "scale", "decay"}


def test_check_prints_one_line_per_file_and_stops_at_the_first_bad_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = [str(path) for path in sorted(ROOT.glob("recipes/*.yaml"))]
    code, out, _ = fledge(capsys, "recipe", "check", *good)
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == [f"ok  {path}" for path in good]
    bad = tmp_path / "bad.yaml"
    bad.write_text("training:\n  lrr: 1\n")
    code, out, err = fledge(capsys, "recipe", "check", good[0], str(bad), good[1])
    assert code == 2
    assert len(out.splitlines()) == 1
    assert "bad.yaml, line 2: unknown key 'training.lrr'; did you mean 'lr'?" in err
    code, out, _ = fledge(capsys, "recipe", "check", "--json", str(bad))
    assert code == 2
    assert json.loads(out)["ok"] is False


def test_every_shipped_recipe_is_listed_and_copied_unchanged(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {path.stem: path for path in ROOT.glob("src/fledge/recipes/*.yaml")}
    _, out, _ = fledge(capsys, "recipe", "list", "--json")
    listed = json.loads(out)
    assert [entry["name"] for entry in listed] == sorted(files)
    assert len({entry["title"] for entry in listed}) == len(files)
    _, out, _ = fledge(capsys, "recipe", "list")
    assert all(name in out for name in files)
    for name, path in files.items():
        assert fledge(capsys, "recipe", "copy", name)[0] == 0
        assert (tmp_path / f"{name}.yaml").read_bytes() == path.read_bytes()
        assert load_recipe(name) == load_recipe(path)
    code, _, err = fledge(capsys, "recipe", "copy", name)
    assert (code, err.count("\n")) == (2, 1)
    assert "--overwrite" in err
    (tmp_path / "mine.yaml").write_text("mine")
    fledge(capsys, "recipe", "copy", name, "--out", "mine.yaml", "--overwrite")
    assert (tmp_path / "mine.yaml").read_bytes() == files[name].read_bytes()


def test_a_file_shadows_a_shipped_recipe_but_a_directory_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        ("recipes/smollm2_cpu.yaml", "by name, shipped recipes need no file: smollm2_cpu"),
    ],
)
def test_a_missing_recipe_is_refused_with_advice(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    advice: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = fledge(capsys, "train", named)
    assert (code, out) == (2, "")
    assert err == f"fledge: {named}: no such recipe; {advice}\n"


@pytest.mark.parametrize(
    "verb", [["recipe"], ["recipe", "show"], ["recipe", "schema"], ["recipe", "check"], ["doctor"]]
)
def test_every_help_has_an_example(capsys: pytest.CaptureFixture[str], verb: list[str]) -> None:
    code, out, _ = fledge(capsys, *verb, "--help")
    assert code == 0
    assert f"fledge {verb[0]}" in out.partition("Example:")[2]


def test_recipes_and_help_import_no_torch() -> None:
    program = (
        "import sys, fledge.cli.main\n"
        "from fledge.recipe.schema import load_recipe\n"
        "load_recipe(None)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
