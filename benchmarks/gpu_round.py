"""Everything that waits for a GPU, in the order of its value, for half an hour on a borrowed one.

    python benchmarks/gpu_round.py --plan         # the calls, what each takes along, and times
    python benchmarks/gpu_round.py --pack .carry  # here: what each call takes along, in folders
    python benchmarks/gpu_round.py --call tests   # on the machine with the GPU; results: $OUT
    python benchmarks/gpu_tables.py               # here: README and docs, from the results

The borrowed machine has torch and transformers, reaches no network, and takes little data in one
call; so the calls bring packages and models in pieces, which stay in --state. A call writes one
file, CALL.json, after each of its steps: a step that fails or outlasts its limit leaves the others'
results, and the same call again does only what is missing. --toy runs the same steps in the same
way on a CPU, with toy shapes.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
MIB = 2**20
PIECE = 48 * MIB  # of a model; with the sources it stays below the 64 MiB of a call
LENT_S = 28 * 60  # of half an hour, with a margin
LOADS = ROOT / ".carry"  # a folder for each call
START_S = 45  # until a machine answers
TRANSFER_S = 8  # of a full load
METHODS = ("gpu", "dspark_gpu", "dflash_gpu", "peagle_gpu")
RACE_STEPS = {"gpu": 3521, "dspark_gpu": 3221, "dflash_gpu": 4311, "peagle_gpu": 3566}
SETS = ("eval_mt_bench.jsonl", "eval_gsm8k.jsonl", "eval_alpaca.jsonl")
MODELS = {"smollm2-135m": 2, "qwen2.5-coder-0.5b": 10}  # pieces


@dataclass(frozen=True)
class Place:
    """Where a call works. `python` has the packages that a call has brought."""

    state: Path
    out: Path
    toy: bool
    target: str = ""  # instead of the recipes' own, for a toy

    def data(self, name: str) -> str:
        return str(self.state / "data" / name)

    @property
    def prompts(self) -> list[str]:
        return [word for name in SETS for word in ("--prompts", self.data(name))]

    def environment(self) -> dict[str, str]:
        paths = [str(self.state / "site"), str(ROOT / "src"), str(HERE)]
        paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        cache = os.environ.get("FLEDGE_CACHE") or str(self.state / "cache")
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FLEDGE_CACHE": cache}

    def run(self, *words: str, limit_s: float, fine: tuple[int, ...] = (0,)) -> str:
        """What a Python program prints; StepFailed with its last lines if it fails."""
        try:
            done = subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=self.environment(), text=True,
                capture_output=True, timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"")[-2000:].decode(errors="replace")
            raise StepFailed(f"no end after {limit_s:.0f} s: {said}") from None
        if done.returncode not in fine:
            raise StepFailed(
                f"exit code {done.returncode}: {done.stdout[-2500:]}{done.stderr[-2500:]}"
            )
        return done.stdout

    def fledge(self, *words: str, limit_s: float) -> Any:
        """Exit code 1: live decoding disagreed with replay, as the figures say."""
        said = self.run("-m", "fledge", *words, "--json", limit_s=limit_s, fine=(0, 1))
        return json.loads(said)


class StepFailed(Exception):  # noqa: N818  (an answer about a step)
    pass


# --- the steps ------------------------------------------------------------------------------------


def gpu_tests(place: Place, limit_s: float) -> dict[str, Any]:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    if not place.toy:
        words += ["-n0"] if _has_xdist() else []
    files = (ROOT / "tests").rglob("test_*.py")  # others want packages that are not there
    words += [str(file) for file in sorted(files) if "pytest.mark.gpu" in file.read_text()]
    words += ["--collect-only"] if place.toy else []
    lines = place.run(*words, limit_s=limit_s, fine=(0, 1)).splitlines()
    return {"summary": lines[-1], "failed": [x for x in lines if x.startswith(("FAILED", "ERROR"))]}


def _has_xdist() -> bool:
    from importlib.util import find_spec

    return find_spec("xdist") is not None


def kernel_errors(place: Place, limit_s: float) -> dict[str, Any]:
    words = [str(HERE / "check_kernels.py"), "--seconds", f"{limit_s - 25:.0f}"]
    lines = place.run(*words, *(["--toy"] if place.toy else []), limit_s=limit_s, fine=(0, 1))
    cases = [line for line in lines.splitlines() if " fp32 " in line]
    return {"cases": cases, "wrong": [line for line in cases if line.endswith("WRONG")]}


def step_table(place: Place, limit_s: float) -> dict[str, Any]:
    words = [str(HERE / "step_table.py"), "--steps", "5", "--json"]
    rows = place.run(*words, *(["--toy"] if place.toy else []), limit_s=limit_s)
    return {"rows": json.loads(rows)}


def race(place: Place, limit_s: float) -> dict[str, Any]:
    """All methods side by side for the steps that 150 seconds of such a race have: one seed."""
    begin = time.monotonic()
    _share_gpu()
    runs = {f"smollm2_{method}": place.state / "runs" / method for method in METHODS}
    trained = {}
    processes = {}
    for method, (recipe, run) in zip(METHODS, runs.items(), strict=True):
        steps = 3 if place.toy else RACE_STEPS[method]
        words = [recipe, f"run.output_dir={run}", f"training.steps={steps}", *_quiet(place)]
        run.mkdir(parents=True, exist_ok=True)
        log = (run.parent / f"{method}.log").open("w")
        processes[recipe] = subprocess.Popen(
            [sys.executable, "-m", "fledge", "train", *words], cwd=ROOT, env=place.environment(),
            stdout=log, stderr=log,
        )  # fmt: skip
    for recipe, process in processes.items():
        if process.wait(timeout=limit_s):
            log_file = runs[recipe].parent / f"{runs[recipe].name}.log"
            trained[recipe] = {"error": log_file.read_text()[-1500:]}
            continue
        lines = [json.loads(x) for x in (runs[recipe] / "metrics.jsonl").open()]
        last = [line for line in lines if "seconds" in line][-1]
        trained[recipe] = {"steps": last["step"], "seconds": last["seconds"]}
    sound = [str(runs[recipe]) for recipe, figures in trained.items() if "error" not in figures]
    if not sound:
        raise StepFailed(json.dumps(trained))
    live = "2" if place.toy else "18"
    words = ["eval", *sound, *place.prompts, *_answers(place), "--live", live]
    judged = place.fledge(*words, limit_s=limit_s - (time.monotonic() - begin))
    for recipe, draft in zip(
        (name for name in trained if "error" not in trained[name]), judged["drafts"], strict=True
    ):
        lengths = {name: of["acceptance_length"] for name, of in draft["by_set"].items()}
        trained[recipe] |= {"length": lengths, "live": draft["live"], "speed": draft["speed"]}
    return {"recipes": trained, "runs": sound}


def batch_16(place: Place, limit_s: float) -> dict[str, Any]:
    runs = [str(place.state / "runs" / method) for method in METHODS]
    words = ["bench", "decode", *runs, "--prompts", place.data(SETS[0]), "--limit", "16"]
    words += ["--batch", "1", "--batch", "16", "--max-new-tokens", "12" if place.toy else "128"]
    return {"rows": place.fledge(*words, limit_s=limit_s)}


def against_peer(place: Place, limit_s: float) -> dict[str, Any]:
    out = place.state / "equal_seconds.json"
    recipes = ["smollm2_gpu", str(HERE / "recipes" / "smollm2_automodel.yaml")]
    words = [str(HERE / "race.py"), *recipes, "--data", place.data("smollm2_chat.jsonl")]
    words += ["--prompts", *(place.data(name) for name in SETS), "--out", str(out)]
    words += ["--seconds", "0.5" if place.toy else "60", "--probe", "20" if place.toy else "160"]
    words += ["--seeds", "1", "--live", "2" if place.toy else "12", "--max-new-tokens"]
    words += ["12" if place.toy else "160", "--limit", "2" if place.toy else "0"]
    place.run(*words, "--set", *_toy_recipe(place), limit_s=limit_s)
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def second_target(place: Place, limit_s: float) -> dict[str, Any]:
    target = place.target if place.toy else "qwen2.5-coder-0.5b"
    out = place.state / "second"
    words = [str(HERE / "second_target.py"), "--target", target, "--out", str(out)]
    words += ["--chats", place.data("smollm2_chat.jsonl"), "--recipes"]
    words += ["smollm2_gpu"] if place.toy else ["qwen25_coder_gpu"]
    words += ["--prompts", *(place.data(name) for name in SETS)]
    if place.toy:
        words += ["--rows", "12", "--batch", "4", "--max-new-tokens", "8", "--train-s", "0.5"]
        words += ["--probe", "20", "--eval-tokens", "8", "--limit", "2", "--live-prompts", "2"]
        words += ["--set", *_toy_recipe(place)]
    else:
        words += ["--regenerate-s", "90", "--train-s", "50", "--probe", "120", "--limit", "24"]
        words += ["--eval-tokens", "160", "--live-prompts", "8", "--live-dtypes", "bfloat16"]
    place.run(*words, limit_s=limit_s)
    figures: dict[str, Any] = json.loads((out / "result.json").read_text())
    return figures


def _share_gpu() -> None:
    """Let processes compute at the same time, where the driver can."""
    if daemon := shutil.which("nvidia-cuda-mps-control"):
        subprocess.run([daemon, "-d"], check=False, capture_output=True)


def _quiet(place: Place) -> list[str]:
    words = [f"data.train={place.data('smollm2_chat.jsonl')}", "evaluation.every_steps=1000000"]
    return [*words, "checkpoint.every_steps=1000000", *_toy_recipe(place)]


def _toy_recipe(place: Place) -> list[str]:
    if not place.toy:
        return []
    words = [f"target.model={place.target}", "target.dtype=float32", "training.device=cpu"]
    words += ["data.valid_rows=4", "data.workers=1", "packing.tokens=96", "data.max_length=96"]
    return [*words, "training.warmup_steps=1"]


def _answers(place: Place) -> list[str]:
    words = ["--max-new-tokens", "12" if place.toy else "160", "--batch", "64"]
    return [*words, "--limit", "2" if place.toy else "0"]


# --- the calls ------------------------------------------------------------------------------------

Work = Callable[[Place, float], dict[str, Any]]


@dataclass(frozen=True)
class Step:
    name: str
    work: Work
    seconds: int  # it is expected to take
    limit_s: int


@dataclass(frozen=True)
class Call:
    name: str
    load: tuple[str, ...]  # packages, data, or MODEL.PIECE
    steps: tuple[Step, ...] = ()
    unpack_s: int = 0  # with the last piece, a model is converted

    @property
    def seconds(self) -> int:
        return sum(step.seconds for step in self.steps) + TRANSFER_S + self.unpack_s


def _qwen(*pieces: int) -> tuple[str, ...]:
    return tuple(f"qwen2.5-coder-0.5b.{piece}" for piece in pieces)


CALLS = (
    Call("tests", ("packages", "data"), (Step("gpu_tests", gpu_tests, 155, 300),
                                         Step("kernel_errors", kernel_errors, 100, 125))),
    Call("steps", ("smollm2-135m.0",), (Step("step_table", step_table, 140, 500),)),
    Call("load", ("smollm2-135m.1",), unpack_s=35),
    Call("race", _qwen(0), (Step("race", race, 360, 400), Step("batch_16", batch_16, 110, 140))),
    Call("peer", _qwen(1), (Step("against_peer", against_peer, 220, 480),)),
    *(Call(f"load{piece}", _qwen(piece)) for piece in range(2, 9)),
    Call("second", _qwen(9), (Step("second_target", second_target, 250, 500),)),
)  # fmt: skip


def plan() -> Iterator[str]:
    total = START_S
    yield f"{'call':8} {'takes along':32} {'steps':28} {'s':>5} {'in all':>7}"
    for call in CALLS:
        total += call.seconds
        steps = ", ".join(step.name for step in call.steps)
        yield f"{call.name:8} {', '.join(call.load):32} {steps:28} {call.seconds:5} {total:7}"
    yield f"{total / 60:.1f} minutes of {LENT_S / 60:.0f}, with {START_S} s for the machine's start"
    yield "one call: python benchmarks/gpu_round.py --call NAME --commit COMMIT; carry .carry/NAME"


def call(name: str, place: Place, commit: str) -> bool:
    """Take in what came along, then do the steps that have no result yet; False if one failed."""
    chosen = next(call for call in CALLS if call.name == name)
    place.state.mkdir(parents=True, exist_ok=True)
    unpack(LOADS / name, place)
    file = place.state / f"{name}.json"
    results = json.loads(file.read_text()) if file.exists() else _about(commit)
    done = results["steps"]
    for step in chosen.steps:
        if "error" not in done.get(step.name, {"error": ""}):
            continue
        begin = time.monotonic()
        try:
            done[step.name] = step.work(place, step.limit_s)
        except (StepFailed, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            done[step.name] = {"error": f"{type(error).__name__}: {error}"}
        done[step.name]["seconds_taken"] = round(time.monotonic() - begin, 1)
        file.write_text(json.dumps(results, indent=1) + "\n")
        place.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place.out)
        print(json.dumps({step.name: done[step.name]})[:3000], flush=True)
    return not any("error" in figures for figures in done.values())


def _about(commit: str) -> dict[str, Any]:
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "commit": commit, "date": datetime.date.today().isoformat(), "device": device,
        "torch": torch.__version__, "transformers": transformers.__version__, "steps": {},
    }  # fmt: skip


# --- what the calls bring -------------------------------------------------------------------------


def unpack(load: Path, place: Place) -> None:
    """Archives are unpacked, pieces are kept until the last one of a model is there."""
    for file in sorted(load.iterdir()) if load.is_dir() else ():
        if file.name.endswith(".tar.xz"):
            with tarfile.open(file) as archive:
                archive.extractall(place.state, filter="data")
        elif file.name.rpartition(".")[0] in MODELS:
            pieces = place.state / "pieces"
            pieces.mkdir(exist_ok=True)
            shutil.copy(file, pieces)
    for model, count in MODELS.items():
        parts = [place.state / "pieces" / f"{model}.{piece}" for piece in range(count)]
        if all(part.exists() for part in parts):
            whole = place.state / f"{model}.gguf"
            with whole.open("wb") as joined:
                for part in parts:
                    joined.write(part.read_bytes())
            place.run("-c", CONVERT, model, str(whole), limit_s=200)
            for path in (*parts, whole):
                path.unlink()


CONVERT = """
import sys
from pathlib import Path
from fledge.models import gguf
from fledge.models.embedded import MODELS
from fledge.models.stored import stored
name, file = sys.argv[1], Path(sys.argv[2])
model = MODELS[name]
make = lambda directory: gguf.convert(file, directory, dtype=model.dtype)
stored(model.directory.name, make, source=name)
"""


def pack(out: Path, chats: Path) -> None:
    """A folder for each call. Runs where a package index can be reached."""
    scratch = out / "scratch"
    makers = {"packages": pack_packages, "data": lambda folder, _: pack_data(folder, chats)}
    for chosen in CALLS:
        folder = out / chosen.name
        folder.mkdir(parents=True, exist_ok=True)
        for load in chosen.load:
            if load in makers:
                makers[load](folder, scratch)
            else:
                pack_piece(folder, scratch, *load.rsplit(".", 1))
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{chosen.name}: {size / MIB:.1f} MiB", flush=True)
    shutil.rmtree(scratch, ignore_errors=True)


WANTED = (  # beyond what the borrowed machine has
    *("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typer", "click"),
    *("annotated-doc", "shellingham", "rich", "markdown-it-py", "mdurl", "Pygments", "gguf"),
    *("xxhash", "pyarrow", "datasets", "dill", "multiprocess", "PyYAML", "pytest", "iniconfig"),
    *("pluggy", "pytest-timeout", "accelerate", "fsspec"),
)
ARROW = ("lib", "_compute", "_csv", "_json", "_fs")  # pyarrow's modules that we import


def pack_packages(folder: Path, scratch: Path) -> None:
    pins = dict(
        line.strip().split("==") for line in (ROOT / "constraints.txt").open() if "==" in line
    )
    platforms = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch)]
    command += ["--python-version", "3.12", "--only-binary=:all:", "--platform"]
    command += " --platform ".join([*platforms, "manylinux_2_12_x86_64"]).split()
    subprocess.run([*command, *(f"{name}=={pins[name]}" for name in WANTED)], check=True)
    site = scratch / "site"
    for wheel in scratch.glob("*.whl"):
        shutil.unpack_archive(wheel, site, "zip")
    _slim(site / "pyarrow")
    with tarfile.open(folder / "packages.tar.xz", "w:xz", preset=3) as archive:
        archive.add(site, "site")


def _slim(arrow: Path) -> None:
    """Without tests, headers, and libraries that no module of ours needs."""
    for part in ("tests", "include", "src"):
        shutil.rmtree(arrow / part, ignore_errors=True)
    libraries = {path.name: path for path in arrow.glob("*.so*")}
    needed, waiting = set(), [n for n in libraries if n.split(".")[0] in ARROW]
    while waiting:
        if (name := waiting.pop()) in libraries and name not in needed:
            needed.add(name)
            said = subprocess.run(
                ["readelf", "-d", libraries[name]], capture_output=True, text=True, check=True
            )
            waiting += [x.split("[")[1][:-1] for x in said.stdout.splitlines() if "NEEDED" in x]
    for name, path in libraries.items():
        if name not in needed:
            path.unlink()


def pack_data(folder: Path, chats: Path) -> None:
    with tarfile.open(folder / "data.tar.xz", "w:xz", preset=3) as archive:
        for name in ("smollm2_chat.jsonl", *SETS):
            archive.add(chats / name, f"data/{name}")


def pack_piece(folder: Path, scratch: Path, model: str, piece: str) -> None:
    from fledge.models import embedded

    whole = scratch / f"{model}.gguf"
    if not whole.exists():
        scratch.mkdir(parents=True, exist_ok=True)
        known = embedded.MODELS[model]
        embedded._joined(model, known, embedded._download(model, known, scratch), scratch)
    size = -(-whole.stat().st_size // MODELS[model])
    assert size <= PIECE, f"{model} wants more pieces"
    with whole.open("rb") as file:
        file.seek(int(piece) * size)
        (folder / f"{model}.{piece}").write_bytes(file.read(size))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    todo = parser.add_mutually_exclusive_group(required=True)
    todo.add_argument("--plan", action="store_true")
    todo.add_argument("--pack", type=Path, metavar="DIR")
    todo.add_argument("--call", choices=[call.name for call in CALLS])
    parser.add_argument("--chats", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--commit", default="unknown", help="of the sources, for the results")
    parser.add_argument("--state", type=Path, default=Path.home() / "fledge_round")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu_round")))
    parser.add_argument("--toy", metavar="MODEL", help="toy shapes, this target, on any machine")
    args = parser.parse_args(words)
    if args.plan:
        print("\n".join(plan()))
    elif args.pack:
        pack(args.pack, args.chats)
    else:
        place = Place(args.state, args.out, bool(args.toy), args.toy or "")
        return 0 if call(args.call, place, args.commit) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
