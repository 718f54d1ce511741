"""Project rules that a reviewer would otherwise have to enforce."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "fledge"

# Subpackages in the order in which data flows: each imports only itself and earlier ones. The
# folder of one method may import all of them, and nobody imports it but through the registry.
FOLDERS = [
    *("core", "models", "data", "kernels", "rollout", "target", "methods", "recipe", "decode"),
    *("measure", "training", "formats", "bench", "report", "cli"),
]
METHODS = {p.name for p in (SRC / "methods").iterdir() if p.is_dir()} - {"shared", "losses"}
METHODS -= {"__pycache__"}
# may import every folder
COMMANDS = {"__init__.py", "__main__.py", "api.py", "precompute_eagle3.py", "draft_llama.py"}
COMMANDS |= {"peagle_draft.py", "target_runner.py", "sglang_runner.py"}
ENGINES = {
    "vllm",
    "sglang",
    "ray",
    "xllamacpp",
    "fastapi",
    "uvicorn",
    "wandb",
    "tensorboard",
    "mlflow",
}


def imports(path: Path) -> set[str]:
    """Everything a file imports, at any level; in `methods`, only at the top of a file, because its
    functions tie the folders together."""
    names = set()
    tree = ast.parse(path.read_text())
    top = "methods" in path.relative_to(SRC).parts
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def method_folder(parts: tuple[str, ...]) -> str:
    """The method whose folder a path or a module lies in, or nothing."""
    return parts[1] if len(parts) > 2 and parts[0] == "methods" and parts[1] in METHODS else ""


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_folders_import_only_earlier_folders(path):
    place = path.relative_to(SRC)
    folder = place.parts[0]
    if method_folder(place.parts):
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("fledge.")}
    if folder in FOLDERS and str(place) not in COMMANDS:
        later = set(FOLDERS[FOLDERS.index(folder) + 1 :])
        assert not used & later, f"{folder} must not know about {used & later}"
    else:
        assert str(place) in COMMANDS or folder == "demo", f"no folder for {place}"


# Files that import the folder of a method beside the registry, and why.
NAMING = {
    "cli/eval.py": "block: calibration of DSpark's confidence",
    "measure/evaluation.py": "block: calibration of DSpark's confidence",
    "cli/stitch.py": "mtp: the heads that models ship in their own files",
    "draft_llama.py": "names that other programs use",
    "methods/eagle1/method.py": "chains and trees of EAGLE-3",
    "methods/mtp/draft.py": "a copy of the target's last layers, as for EAGLE-3",
    "methods/mtp/method.py": "a rollout and its strategies are EAGLE-3's",
    "methods/mtp/section.py": "a rollout and its strategies are EAGLE-3's",
    "methods/peagle/decoding.py": "P-EAGLE's draft is EAGLE-3's",
    "methods/peagle/draft.py": "P-EAGLE's draft is EAGLE-3's",
    "methods/peagle/method.py": "P-EAGLE's draft is EAGLE-3's",
    "methods/peagle/objective.py": "P-EAGLE's draft is EAGLE-3's",
    "methods/registry.py": "the type of the token heads of blocks",
}


def test_only_the_listed_files_import_a_method():
    naming = set()
    for path in SRC.rglob("*.py"):
        own = method_folder(path.relative_to(SRC).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            parts = (module or "").split(".")
            if (
                parts[:2] == ["fledge", "methods"]
                and len(parts) > 2
                and parts[2] in METHODS - {own}
            ):
                naming.add(str(path.relative_to(SRC)))
    assert naming == set(NAMING)


def test_only_the_target_room_branches_on_the_kind_of_target():
    branching = re.compile(r"isinstance\([^)]*(Target|Cached|Remote|Hf|Sglang|Vllm)|\.backend ==")
    outside = [p for p in SRC.rglob("*.py") if p.relative_to(SRC).parts[0] != "target"]
    assert not [p for p in outside if branching.search(p.read_text())]


def test_training_steps_and_decoding_do_not_import_pydantic():
    """Machines that only train may lack the packages that recipes and data need."""
    loaded = loaded_after("import fledge.bench.train_step, fledge.decode.speculative")
    assert not loaded & {"pydantic", "datasets", "gguf", "pyarrow"}


def test_measuring_a_step_does_not_import_pydantic():
    """For every method: machines for comparisons may lack the packages that recipes need."""
    script = """
import sys
for name in ("pydantic", "datasets", "gguf"):
    sys.modules[name] = None
import torch
from fledge.bench.train_step import Case, measure_step
from fledge.methods.registry import METHODS
for kind in METHODS:
    case = Case(shape="tiny", kind=kind, seq=64)
    figures = measure_step(case, torch.device("cpu"), steps=1, warmup=1)
    assert figures.tokens == 64
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_gpu_tests_are_collected_without_pydantic():
    """Machines with a GPU may lack the packages that recipes need."""
    tests = [
        str(p) for p in ROOT.glob("tests/**/test_*.py") if re.search(r"mark\.gpu", p.read_text())
    ]
    script = f"""
import sys
for name in ("pydantic", "datasets", "gguf"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["-q", "-n0", "--collect-only", "-m", "gpu", *{tests}]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def written_to_the_terminal(path: Path) -> set[str]:
    """The calls by which a file writes to the terminal without `core.terminal`."""
    calls = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            direct = name in {"print", "Console", "rich.print", "rich.console.Console"}
            echo = name.rpartition(".")[2] in {"echo", "secho"}
            if direct or echo or re.fullmatch(r"sys\.(stdout|stderr)\.write(lines)?", name):
                calls.add(name)
    return calls


def test_all_output_goes_through_the_escaping_terminal():
    """So every verb, present or future, escapes control characters in untrusted text."""
    allowed = {"core/terminal.py", "cli/console.py"}
    others = [p for p in SRC.rglob("*.py") if str(p.relative_to(SRC)) not in allowed]
    assert {str(p.relative_to(SRC)): w for p in others if (w := written_to_the_terminal(p))} == {}


def test_no_module_has_a_meaningless_name():
    assert not [p for p in SRC.rglob("*.py") if p.stem in {"utils", "common", "helpers", "misc"}]


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in result.stdout.split()}


def test_import_fledge_is_light():
    loaded = loaded_after("import fledge")
    assert not loaded & {"torch", "transformers", "pydantic", *ENGINES}


def test_python_m_fledge_runs_the_command():
    command = [sys.executable, "-m", "fledge", "recipe", "check", "/nowhere.yaml"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("fledge: ")
    assert "/nowhere.yaml" in line


@pytest.mark.parametrize("verb", ["--help", "data prepare --help", "recipe show"])
def test_help_and_recipes_import_no_torch(verb):
    code = "from fledge.cli.main import run\ntry:\n    run({!r})\nexcept SystemExit: pass"
    loaded = loaded_after(code.format(verb.split()))
    assert not loaded & {"torch", "transformers", "datasets", "gguf", *ENGINES}


def test_readme_commands_exist():
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda path: path.name)
def test_benchmarks_import_names_that_exist(path):
    """Most of them run on machines that CI does not have."""
    nodes = ast.walk(ast.parse(path.read_text()))
    for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
        if node.module is None or not node.module.startswith("fledge"):
            continue
        module = importlib.import_module(node.module)
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")
