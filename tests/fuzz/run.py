"""`make fuzz MINUTES=10`: every kind in turn, with new seeds, until the time is up.

    python tests/fuzz/run.py --minutes 10 [--only Manifest,Config] [--seed 123]

Prints a summary per kind and exits with code 1 when an example did not survive; its seed is
printed, and `--only KIND --seed SEED --minutes 0` runs it again.
"""

import argparse
import importlib
import logging
import os
import random
import secrets
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.survive import GROWTH, peak_bytes, survives

KINDS = (
    "caches",
    "drafts",
    "checkpoints",
    "recipes",
    "messages",
    "rows",
    "gguf",
    "reports",
    "journals",
)
TURN_S = 5.0  # for a kind before the next one's turn


@dataclass
class Count:
    examples: int = 0
    refused: int = 0
    failed: int = 0
    slowest_s: float = 0.0
    grown: int = 0  # bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (progress of thousands of conversions)
    modules = [importlib.import_module(f"fuzz.test_fuzz_{kind}") for kind in KINDS]
    cases = {case.__name__: case for module in modules for case in module.CASES}
    wanted = [name for name in cases if not arguments.only or name in arguments.only.split(",")]
    with tempfile.TemporaryDirectory() as root:
        os.environ["FLEDGE_CACHE"] = str(Path(root) / "fledge-cache")
        counts = _fuzz({name: cases[name] for name in wanted}, Path(root), arguments)
    _print(counts)
    return 1 if any(count.failed for count in counts.values()) else 0


def _fuzz(case_types, root, arguments):
    counts = {name: Count() for name in case_types}
    cases = {name: make(root / name) for name, make in case_types.items()}
    for case in cases.values():  # one-time imports and loads do not count as growth
        case.restore()
        case.read()
    end = time.monotonic() + 60 * arguments.minutes
    while True:
        for name, case in cases.items():
            turn = min(end, time.monotonic() + TURN_S)
            while True:
                seed = secrets.randbits(48) if arguments.seed is None else arguments.seed
                _try_example(name, case, seed, counts[name])
                if time.monotonic() >= turn:
                    break
        if time.monotonic() >= end:
            return counts


def _try_example(name, case, seed, count):
    before = peak_bytes()
    count.examples += 1
    try:
        outcome, seconds = survives(case, random.Random(seed))
    except Exception:  # noqa: BLE001  (any error is counted and printed)
        count.failed += 1
        print(f"--- {name} did not survive seed {seed}", flush=True)
        traceback.print_exc(file=sys.stdout)
        return
    count.refused += outcome == "refused"
    count.slowest_s = max(count.slowest_s, seconds)
    count.grown += peak_bytes() - before


def _print(counts):
    print(
        f"{'kind':16}{'examples':>10}{'refused':>10}{'taken':>8}{'failed':>8}{'slowest':>10}{'grew':>9}"
    )
    for name, count in counts.items():
        taken = count.examples - count.refused - count.failed
        print(
            f"{name:16}{count.examples:10,}{count.refused:10,}{taken:8,}{count.failed:8,}"
            f"{count.slowest_s:8.2f} s{count.grown >> 20:6} MB"
        )
    grown = sum(count.grown for count in counts.values())
    examples = sum(count.examples for count in counts.values())
    print(f"{examples:,} examples, memory grew by {grown >> 20} MB")
    assert grown < GROWTH, "too much memory"


if __name__ == "__main__":
    sys.exit(main())
