"""Runs many short trainings from one capture of the target, to find the best settings.

    python benchmarks/tune.py benchmarks/variants/smollm2_eagle3.yaml --data smollm2_chat.jsonl \
        --prompts eval_gsm8k.jsonl eval_alpaca.jsonl --unseen eval_mt_bench.jsonl mixed \
        --tokens 8e6 --seeds 2 --workers 3 --minutes 9 --out build/tune.json

The target is run once over all rows; its states stay on its device (`--keep cpu`: in the host's
memory), and the workers, each its own process, train from them with the ordinary training step,
side by side: one sets up or is measured while another trains. Every draft sees the same number of
tokens and is measured by replay of rounds: on held-out rows, on prompts that the target answered
(once: its answers are kept), and on kinds of rows that no draft was trained on (`--leave-out`, by
the first part of a row's id). Finished runs are written to `--out` at once, and the same command
continues with the missing ones: after a kill, after `--minutes`, or with more seeds.

A file of variants:

    recipe: smollm2_gpu
    base: [training.lr=2e-3]               # for all variants
    variants:
      shipped: []                          # the first one is the baseline
      warm-up: training.warmup_steps=100   # one override, or a list
      wsd: [training.schedule=wsd, training.final_lr_share=0.05]
      dspark: {recipe: smollm2_dspark_gpu, set: training.lr=1e-3}   # on the same states
    parts: {steady: training.clip=0.5}     # only together with others
    together: [warm-up+wsd, wsd+steady]    # combined overrides, in this order; see also --also

With `--seconds`, runs have equal time instead of equal tokens: a short run of each variant measures
how many steps fit. Use it with `--workers 0`, so that nothing else uses the GPU. `--drafts` keeps
the trained drafts in a directory, for `fledge eval`.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fledge.core.errors import BadInput, first_line
from fledge.core.files import write_json
from fledge.core.machine import describe_machine
from fledge.recipe.schema import load_recipe
from tune_report import table
from tune_runs import Job, Judges, Limits, capture, results, set_name, without_kinds

# The target answers each row once, so neither keeping states nor compiling pays off.
QUIET = ("target.keep_states_gb=0", "target.compile=false", "run.output_dir=tuned/nothing")


# --- variants -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """Overrides of the common recipe, or of a recipe of its own."""

    overrides: tuple[str, ...]
    recipe: str | None = None

    @classmethod
    def read(cls, value: Any) -> "Variant":
        if isinstance(value, dict):
            if unknown := sorted({*value} - {"recipe", "set"}):
                raise BadInput(f"a variant has no '{unknown[0]}'", fix="it has recipe and set")
            return cls(_words(value.get("set")), value.get("recipe"))
        return cls(_words(value))


@dataclass(frozen=True)
class Variants:
    """A recipe and its variants by name."""

    recipe: str
    base: tuple[str, ...]
    known: dict[str, Variant]
    asked: tuple[str, ...]

    @classmethod
    def read(cls, path: Path, *, only: Sequence[str], also: Sequence[str]) -> "Variants":
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise BadInput(first_line(error), where=str(path)) from None
        if not isinstance(content, dict) or not isinstance(content.get("variants"), dict):
            raise BadInput("no variants in it", where=str(path), fix="see benchmarks/tune.py")
        known = {name: Variant.read(value) for name, value in content["variants"].items()}
        all_names = (*known, *_words(content.get("together")), *also)
        parts = content.get("parts") or {}
        known |= {name: Variant.read(value) for name, value in parts.items()}
        for name in (*all_names, *only):
            if missing := [part for part in name.split("+") if part not in known]:
                problem = f"no variant '{missing[0]}'"
                raise BadInput(problem, where=str(path), fix=f"those there are: {', '.join(known)}")
        return cls(content["recipe"], _words(content.get("base")), known, tuple(only) or all_names)

    def together(self, name: str) -> Variant:
        """The variant of this name; for a+b, the overrides of both in this order."""
        parts = [self.known[part] for part in name.split("+")]
        overrides = tuple(word for part in parts for word in part.overrides)
        return Variant(overrides, next((part.recipe for part in parts if part.recipe), self.recipe))

    def jobs(self, common: Sequence[str], *, tokens: float, seeds: int) -> list[Job]:
        """All variants with the first seed, then all with the next seed, and so on."""
        jobs = []
        for seed, name in itertools.product(range(seeds), self.asked):
            variant = self.together(name)
            source = variant.recipe or self.recipe
            words = [*self.base, *common, *variant.overrides, *QUIET]
            words += [f"training.seed={seed}", f"packing.seed={seed}"]
            recipe = load_recipe(source, words)
            step = recipe.training.micro_batch * recipe.training.accumulate * recipe.packing.tokens
            words += [f"training.steps={max(1, round(tokens / step))}"]
            jobs.append(Job(name, variant.overrides, seed, source, tuple(words)))
        return jobs


def _words(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


class Deadline:
    """Yields jobs as long as another one is likely to finish in time."""

    def __init__(self, jobs: Sequence[Job], end: float) -> None:
        self.jobs, self._end = jobs, end
        self.longest_s, self.left = 0.0, 0

    def __iter__(self) -> Iterator[Job]:
        for index, job in enumerate(self.jobs):
            if time.monotonic() + self.longest_s > self._end:
                self.left = len(self.jobs) - index
                return
            yield job


def held_before(path: Path, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs already in the file, which must have been started with the same setting."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    if content["setting"] != setting:
        changed = [key for key, value in setting.items() if content["setting"].get(key) != value]
        what = f"begun with other {', '.join(changed)}: lengths could not be compared"
        raise BadInput(what, where=str(path), fix="another --out")
    runs: list[dict[str, Any]] = content["runs"]
    return runs


def setting_of(args: argparse.Namespace, variants: Variants, judges: Judges) -> dict[str, Any]:
    """What all runs of a file must share for their lengths to be comparable."""
    return {
        "recipe": variants.recipe, "base": list(variants.base), "set": args.set,
        "tokens": args.tokens, "seconds": args.seconds,
        "data": [Path(file).name for file in args.data],
        "sets": [*args.leave_out, *map(set_name, judges.prompts)], "rows": judges.rows,
        "unseen": [*args.leave_out, *map(set_name, args.unseen)],
        "max_new_tokens": judges.max_new_tokens, "draft_tokens": judges.draft_tokens,
    }  # fmt: skip


def tune(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    variants = Variants.read(args.variants, only=args.only, also=args.also)
    files = without_kinds(args.data, args.leave_out, args.rows) if args.leave_out else {}
    data = files.pop("", ",".join(args.data))
    common = [f"data.train={data}", *args.set]
    jobs = variants.jobs(common, tokens=args.tokens, seeds=args.seeds)
    tokens = args.draft_tokens or jobs[0].recipe.objective.depths
    prompts = [*args.prompts, *args.unseen]
    judges = Judges(args.rows, files, prompts, args.max_new_tokens, tokens)
    setting = setting_of(args, variants, judges)
    runs = held_before(args.out, setting)
    finished = {run["id"] for run in runs}
    todo = Deadline([job for job in jobs if job.id not in finished], begin + 60 * args.minutes)
    if todo.jobs:
        limits = Limits(args.points, args.seconds, args.drafts)
        ground = capture(jobs, judges, limits, on_device=args.keep == "device")
        size = ground.states.aux_ND.nbytes + ground.states.hidden_ND.nbytes
        print(f"captured {size / 2**30:.1f} GiB in {time.monotonic() - begin:.0f} s", flush=True)
        for run in results(ground, todo, workers=args.workers):
            if "error" in run:
                print(run["error"], flush=True)
                continue
            todo.longest_s = max(todo.longest_s, run["wall_s"])
            runs.append(run)
            content = {"setting": setting, "machine": describe_machine(), "runs": runs}
            write_json(args.out, content)
            shown = ", ".join(f"{name} {length:.3f}" for name, length in run["lengths"].items())
            print(f"{time.monotonic() - begin:5.0f} s  {run['id']}: {shown}", flush=True)
    print(table(runs, setting["unseen"]))
    if todo.left:
        print(f"{todo.left} runs are left: the same command continues")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", type=Path, help="a file of variants")
    parser.add_argument("--data", nargs="+", required=True, help="chats, answered by the target")
    parser.add_argument("--prompts", nargs="*", default=[], help="files to be answered by it")
    parser.add_argument("--unseen", nargs="*", default=[], help="such of kinds not trained on")
    parser.add_argument("--leave-out", nargs="*", default=[], help="kinds of rows to judge on only")
    parser.add_argument("--out", type=Path, required=True, help="results, JSON")
    parser.add_argument("--tokens", type=float, default=8e6, help="of each run, padding included")
    parser.add_argument("--seconds", type=float, default=0, help="of each run, instead of tokens")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="variants by name, or a+b")
    parser.add_argument("--also", nargs="*", default=[], help="further ones: a+b")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of all of them")
    parser.add_argument("--workers", type=int, default=3, help="side by side; 0: in this process")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run that ends later")
    parser.add_argument(
        "--points",
        type=int,
        default=1,
        help="measurements in a run; several make a curve to forecast",
    )
    parser.add_argument("--drafts", type=Path, help="leave them there, each as NAME-SEED")
    parser.add_argument("--rows", type=int, default=256, help="rows of a set, at most")
    parser.add_argument("--draft-tokens", type=int, default=0, help="0: as the recipe is trained")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--keep", choices=("device", "cpu"), default="device", help="the states")
    try:
        tune(parser.parse_args(words))
    except BadInput as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
