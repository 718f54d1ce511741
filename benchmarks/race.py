"""Compares methods trained on the same data for the same GPU seconds, with several seeds each.

    python benchmarks/race.py smollm2_gpu smollm2_peagle_gpu smollm2_dflash_gpu smollm2_dspark_gpu \
        --data smollm2_chat.jsonl --prompts eval_mt_bench.jsonl eval_gsm8k.jsonl eval_alpaca.jsonl \
        --out benchmarks/results/data/smollm2_race.json --seconds 150 --seeds 3

The seeds of one recipe train side by side, so that every method shares the GPU in the same way. A
short run measures how many steps fit; each seed then trains that many, with the whole schedule, and
the time it took is printed. All drafts are replayed over the target's own answers (`fledge eval`);
those of the first seed are also decoded live, alone on the machine.

Finished results are in --out, and the same command continues with the missing ones if the runs
still exist: set RACE_RUNS to keep them in a directory of your choice.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.core.files import write_json
from fledge.core.reading import read_json

FLEDGE = [sys.executable, "-m", "fledge"]
QUIET = ("evaluation.every_steps=1000000", "checkpoint.every_steps=1000000")
PROBE = 400  # default steps of the run that measures the speed


def fledge(*words: str) -> dict[str, Any]:
    done = subprocess.run([*FLEDGE, *words, "--json"], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: live decoding disagreed, as the figures show
        sys.exit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def train(recipe: str, runs: list[Path], words: list[str]) -> None:
    """Train all seeds at the same time, one process each."""
    commands = [
        [*FLEDGE, "train", recipe, f"run.output_dir={run}", f"training.seed={seed}", *words]
        for seed, run in enumerate(runs)
    ]
    logs = [run.with_suffix(".log").open("w") for run in runs]
    processes = [
        subprocess.Popen(command, stdout=log, stderr=log)
        for command, log in zip(commands, logs, strict=True)
    ]
    codes = [process.wait() for process in processes]
    for run, code, log in zip(runs, codes, logs, strict=True):
        log.close()
        if code:
            sys.exit(
                f"{run.name} ended with {code}:\n{run.with_suffix('.log').read_text()[-2000:]}"
            )


def steps(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "seconds" in line]


def rate(runs: list[Path], probe: int) -> float:
    """Mean steps per second of a seed beside the others, over the second half of a short run, when
    compilation is over."""
    rates = []
    for run in runs:
        first, *_, last = (line for line in steps(run) if line["step"] >= probe / 2)
        rates.append((last["step"] - first["step"]) / (last["seconds"] - first["seconds"]))
    return statistics.mean(rates)


def race(recipe: str, place: Path, args: argparse.Namespace) -> dict[str, Any]:
    every = max(1, args.probe // 20)
    data = [f"data.train={args.data}", f"tracking.every_steps={every}", *args.set]
    name = Path(recipe).stem  # the recipe may be a file
    probes = [place / f"{name}-probe{seed}" for seed in range(args.seeds)]
    train(recipe, probes, [*data, *QUIET, f"training.steps={args.probe}", "data.valid_rows=8"])
    count = max(1, int(rate(probes, args.probe) * args.seconds))
    runs = [place / f"{name}-{seed}" for seed in range(args.seeds)]
    begin = time.perf_counter()
    train(recipe, runs, [*data, *QUIET, f"training.steps={count}"])
    trained = [steps(run) for run in runs]
    return {
        "runs": [str(run) for run in runs],
        "steps": count,
        "training_s": [lines[-1]["seconds"] for lines in trained],
        "with_start_s": time.perf_counter() - begin,
        "tokens_per_s": [
            statistics.median(line["tokens_per_s"] for line in lines) for lines in trained
        ],
    }


def judge(entrant: dict[str, Any], args: argparse.Namespace) -> None:
    """Measure the acceptance lengths of all seeds, by prompt set."""
    seeds = [draft["by_set"] for draft in evaluated(entrant["runs"], args, live=0)]
    entrant["length"] = {
        set_name(path): [seed[Path(path).stem]["acceptance_length"] for seed in seeds]
        for path in args.prompts
    }


def decode(entrant: dict[str, Any], args: argparse.Namespace) -> None:
    """Decode live with the first seed's draft, alone on the machine."""
    [draft] = evaluated(entrant["runs"][:1], args, live=args.live)
    entrant["live"] = {"proof": draft["live"], "speed": draft["speed"]}


def evaluated(drafts: list[str], args: argparse.Namespace, *, live: int) -> list[dict[str, Any]]:
    words = ["eval", *drafts, "--live", str(live), "--limit", str(args.limit), "--batch", "64"]
    words += ["--max-new-tokens", str(args.max_new_tokens)]
    sets = (word for path in args.prompts for word in ("--prompts", path))
    drafts_json: list[dict[str, Any]] = fledge(*words, *sets)["drafts"]
    return drafts_json


def set_name(path: str) -> str:
    return Path(path).stem.removeprefix("eval_")


def show(entrants: dict[str, Any], sets: list[str]) -> None:
    print("| recipe | steps | seconds | tok/s | " + " | ".join(sets) + " | live speed-up |")
    print("|---|" + "--:|" * (len(sets) + 4))
    for recipe, entrant in entrants.items():
        cells = [
            f"{statistics.mean(entrant['length'][name]):.3f} "
            f"({min(entrant['length'][name]):.3f} to {max(entrant['length'][name]):.3f})"
            for name in sets
        ]
        seconds = statistics.mean(entrant["training_s"])
        tokens = statistics.mean(entrant["tokens_per_s"])
        gain = entrant["live"]["speed"]["measured_speedup_live_sample"]
        print(
            f"| {recipe} | {entrant['steps']:,} | {seconds:.0f} | {tokens:,.0f} | "
            + " | ".join(cells)
            + f" | {gain:.2f} |"
        )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0, help="prompts of each set; 0: all")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of their answers")
    parser.add_argument("--live", type=int, default=12, help="answers decoded live")
    parser.add_argument("--probe", type=int, default=PROBE, help="steps of a first, short run")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of every recipe")
    args = parser.parse_args(words)
    place = Path(os.environ.get("RACE_RUNS") or tempfile.mkdtemp(prefix="race-"))
    try:
        finished = read_json(args.out) if args.out.exists() else {}
    except BadInput as error:
        parser.error(str(error))
    entrants = {recipe: finished.get(recipe, {}) for recipe in args.recipes}
    for recipe, entrant in entrants.items():
        if "runs" not in entrant:
            entrant |= race(recipe, place, args)
            print(json.dumps({recipe: entrant}), flush=True)
            write_json(args.out, entrants)
    for stage, key in ((judge, "length"), (decode, "live")):
        for entrant in entrants.values():
            if key not in entrant:
                stage(entrant, args)
                write_json(args.out, entrants)
    show(entrants, [set_name(path) for path in args.prompts])


if __name__ == "__main__":
    main()
