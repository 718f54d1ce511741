"""The cost of several drafts from one pass of the target, compared to each of them alone.

    python benchmarks/bench_drafts.py drafts.yaml [section.key=value ...] [--rounds 9]

Takes a recipe that names several drafts. Every round measures, on the same rows: the target alone,
each draft's whole step alone, and the step of all of them from one pass. Prints medians over the
rounds: on a CPU of process time, which other processes do not lengthen, on a GPU of wall time.
Nothing is saved. The ratio is the shared step over the drafts' own steps plus one pass.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fledge.recipe.schema import load_recipes
from fledge.training.batches import StepBatch
from fledge.training.fit import asking_parts, shares
from fledge.training.session import Session
from fledge.training.setup import set_up, set_up_together
from fledge.training.step import train_step


class _SilentObserver:
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
    """Median seconds of the target, of each draft by name, and of all drafts together."""
    with tempfile.TemporaryDirectory() as place:
        recipes = load_recipes(recipe, [*overrides, f"run.output_dir={place}"])
        shared = set_up_together([*recipes.values()])
        sessions = [Session(training, _SilentObserver()) for training in shared]
        asking, device = asking_parts(sessions), shared[0].parts.device

        def ask(batch: StepBatch) -> None:
            for rows in batch.micro:
                if rows is not None:
                    asking.target.answer(rows)

        def train_all(batch: StepBatch) -> None:
            for session, draft_batch in shares(asking, batch, sessions):
                with session.parts.own_draws():
                    train_step(session.parts, draft_batch, lr=1e-4)

        works: dict[str, Callable[[StepBatch], object]] = {"the target": ask}
        for name, draft_recipe in recipes.items():
            parts = set_up(draft_recipe).parts
            works[name] = lambda batch, parts=parts: train_step(parts, batch, lr=1e-4)
        works["all, from one pass"] = train_all
        times_by_name: dict[str, list[float]] = {name: [] for name in works}
        for index in range(rounds + 2):  # the first two are warm-up
            batch = shared[0].stream.batch(index % shared[0].stream.steps)
            for name, work in works.items():
                times_by_name[name].append(seconds(work, batch, device))
        for session in sessions:
            session.close()
    return {name: statistics.median(times[2:]) for name, times in times_by_name.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    medians = measure(options.recipe, options.overrides, options.rounds)
    target_s, (*alone, together_s) = medians["the target"], list(medians.values())[1:]
    steps_s = sum(step - target_s for step in alone)
    print("| a step | seconds | without the target |\n|---|---|---|")
    for name, step_s in medians.items():
        without_target = "" if name == "the target" else f"{step_s - target_s:.3f}"
        print(f"| {name} | {step_s:.3f} | {without_target} |")
    print(
        f"\nown steps plus one pass: {steps_s + target_s:.3f} s; "
        f"ratio {together_s / (steps_s + target_s):.3f}"
    )
    print(f"one after the other: {sum(alone):.3f} s; saved {1 - together_s / sum(alone):.0%}")


if __name__ == "__main__":
    main()
