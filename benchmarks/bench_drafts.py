"""What several drafts from one pass cost, against each of them alone, in one run.

    python benchmarks/bench_drafts.py drafts.yaml [section.key=value ...] [--rounds 9]

Takes a recipe that names several drafts. In every round, on the same rows: the target alone, each
draft's whole step alone, and the step of all of them from one pass. Medians over the rounds; on a
CPU the process's own time, which neighbors do not lengthen, on a GPU the wall's. Nothing is saved.
Prints a Markdown table; the ratio is the shared step over the drafts' own steps plus one pass.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fledge.recipe.drafts import load_recipes
from fledge.train import together
from fledge.train.batches import StepBatch
from fledge.train.session import Session
from fledge.train.setup import set_up, set_up_together
from fledge.train.step import train_step


class _Silence:
    def note(self, text: str) -> None: ...
    def logged(self, values: dict[str, object]) -> None: ...
    def evaluated(self, values: dict[str, object]) -> None: ...


def seconds(work: Callable[[StepBatch], object], batch: StepBatch, device: torch.device) -> float:
    gpu = device.type == "cuda"
    clock = time.perf_counter if gpu else time.process_time
    if gpu:
        torch.cuda.synchronize(device)
    begin = clock()
    work(batch)
    if gpu:
        torch.cuda.synchronize(device)
    return clock() - begin


def measure(recipe: Path, overrides: list[str], rounds: int) -> dict[str, float]:
    """Median seconds by what was done: the target, each draft by name, all of them."""
    with tempfile.TemporaryDirectory() as place:
        recipes = load_recipes(recipe, [*overrides, f"run.output_dir={place}"])
        shared = set_up_together([*recipes.values()])
        sessions = [Session(one, _Silence()) for one in shared]
        asking, device = together.asking(sessions), shared[0].parts.device

        def ask(batch: StepBatch) -> None:
            for rows in batch.micro:
                if rows is not None:
                    asking.target.answer(rows)

        def all_of_them(batch: StepBatch) -> None:
            for session, heard in together.heard(asking, batch, sessions):
                with session.parts.turn():
                    train_step(session.parts, heard, lr=1e-4)

        works: dict[str, Callable[[StepBatch], object]] = {"the target": ask}
        for name, recipe_of_one in recipes.items():
            parts = set_up(recipe_of_one).parts
            works[name] = lambda batch, parts=parts: train_step(parts, batch, lr=1e-4)
        works["all, from one pass"] = all_of_them
        spent: dict[str, list[float]] = {name: [] for name in works}
        for index in range(rounds + 2):  # the first two are warm-up
            batch = shared[0].stream.batch(index % shared[0].stream.steps)
            for name, work in works.items():
                spent[name].append(seconds(work, batch, device))
        for session in sessions:
            session.close()
    return {name: statistics.median(times[2:]) for name, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    found = measure(options.recipe, options.overrides, options.rounds)
    target, (*alone, together_s) = found["the target"], list(found.values())[1:]
    own = sum(step - target for step in alone)
    print("| a step | seconds | without the target |\n|---|---|---|")
    for name, spent in found.items():
        rest = "" if name == "the target" else f"{spent - target:.3f}"
        print(f"| {name} | {spent:.3f} | {rest} |")
    print(
        f"\nown steps plus one pass: {own + target:.3f} s; ratio {together_s / (own + target):.3f}"
    )
    print(f"one after the other: {sum(alone):.3f} s; saved {1 - together_s / sum(alone):.0%}")


if __name__ == "__main__":
    main()
