"""`fledge recipe`: what users see."""

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
    said = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, said.out, said.err


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


def test_the_schema_is_json_and_knows_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = fledge(capsys, "recipe", "schema")
    schema = json.loads(out)
    assert code == 0
    assert set(schema["properties"]) == set(load_recipe(None).model_dump())
    assert schema["additionalProperties"] is False
    kinds = schema["properties"]["target"]["discriminator"]["mapping"]
    assert set(kinds) == {"hf", "remote", "cache", "sglang", "vllm"}
    assert all(ref.removeprefix("#/$defs/") in schema["$defs"] for ref in kinds.values())
    names, losses = schema["$defs"]["Eagle3Section"]["properties"]["loss"]["anyOf"]
    assert names["enum"] == ["ce", "kl", "hard", "lk_alpha", "lk_lambda"]
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
