"""The wheel as an index would serve it: built, installed on its own, and used.

The environment is new. It borrows the heavy dependencies of the environment that runs the tests,
through a path that Python searches last. The checkout is not on that path (.pth files are not
processed there), so `fledge` can only be the wheel's.
"""

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from fledge.recipe.schema import shipped_recipes
from train.tiny import make_chats, make_target

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1200)]


class Installed:
    """The command of a new environment, run outside of any checkout."""

    def __init__(self, programs: Path, home: Path) -> None:
        self.programs, self.home = programs, home
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._environment = {**kept, "PYTHONSAFEPATH": "1"}

    def python(self, *args: str) -> str:
        return self._run(self.programs / "python", *args)

    def __call__(self, *args: str | Path) -> str:
        return self._run(self.programs / "fledge", *map(str, args))

    def _run(self, program: Path, *args: str) -> str:
        done = subprocess.run(
            [program, *args], cwd=self.home, env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{program.name} {' '.join(args)}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", place, ROOT]
    subprocess.run(build, check=True)
    [built] = place.glob("fledge-*.whl")
    return built


@pytest.fixture(scope="module")
def fledge(wheel, tmp_path_factory) -> Installed:
    place = tmp_path_factory.mktemp("fresh")
    venv.create(place / "env", with_pip=True)
    installed = Installed(place / "env" / "bin", tmp_path_factory.mktemp("home"))
    installed.python("-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    packages = Path(installed.python("-c", "import site; print(site.getsitepackages()[0])").strip())
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return installed


def test_the_wheel_is_what_runs(fledge):
    package = Path(fledge.python("-c", "import fledge; print(fledge.__file__)").strip())
    assert package.is_relative_to(fledge.programs.parent)
    search_path = fledge.python("-c", "import fledge, torch, sys; print(*sys.path, sep='\\n')")
    assert str(ROOT / "src") not in search_path.splitlines()


def test_install_lines_name_this_environment(fledge, wheel):
    facts = json.loads(fledge("doctor", "--json"))
    assert facts["command"] == f"{fledge.programs}/fledge"
    lines = [part["install"] for part in facts["parts"] if "[" in part["install"]]
    assert lines  # vLLM and SGLang have environments of their own
    for line in lines:
        assert line.startswith(f"{fledge.programs}/python -m pip install 'fledge[")


def test_the_wheel_contains_the_recipes(fledge):
    listed = [entry["name"] for entry in json.loads(fledge("recipe", "list", "--json"))]
    assert listed == list(shipped_recipes())
    for name in listed:
        fledge("recipe", "copy", name)
        assert (fledge.home / f"{name}.yaml").read_bytes() == shipped_recipes()[name].read_bytes()


def test_it_trains_evaluates_and_exports_with_a_shipped_recipe(fledge):
    target, chats = make_target(fledge.home / "target"), make_chats(fledge.home / "chats.jsonl")
    output = fledge(
        "train", "smollm2_cpu", f"target.model={target}", "target.aux_layer_ids=0,1,2",
        f"data.train={chats}", "data.valid_rows=8", "data.workers=1", "packing.tokens=96",
        "data.max_length=64", "draft.draft_vocab_size=128", "run.output_dir=run", "--json",
    )  # fmt: skip
    assert json.loads(output)["finished"]
    measured = json.loads(
        fledge("eval", "run", "--limit", "2", "--max-new-tokens", "16", "--live", "2", "--json")
    )
    [draft] = measured["drafts"]
    assert draft["live"]["agrees"]
    assert draft["live"]["same_texts"] == 2
    fledge("export", "run", "--engine", "vllm", "--max-new-tokens", "16")
    assert (fledge.home / "run/exports/vllm/model.safetensors").is_file()
    fledge("report", "run")
    assert (fledge.home / "run/report.html").is_file()


def test_the_demo_runs_to_its_end(fledge):
    """On the real model, with as few chats as it can train and evaluate on."""
    output = fledge("demo", "--rows", "32")
    for phrase in ("held-out acceptance", "lossless:", "without the draft", "target passes"):
        assert phrase in output
    for verb in ("chat", "report", "export"):
        assert f"  {fledge.programs}/fledge {verb} demo_out/run" in output
