"""Spoiled files and messages of every kind: the same in every run of the tests, and new ones until
the time is up in `make fuzz MINUTES=10`."""

import logging
import os
import random
import secrets
import time

import pytest

from fuzz import inputs, journals, runs, texts
from fuzz.survive import GROWTH, Case, peak_bytes, survives

pytestmark = pytest.mark.slow

KINDS = [
    kind
    for module in (inputs, journals, runs, texts)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Case) and kind.__module__ == module.__name__
]
MINUTES, SEED = os.environ.get("FUZZ_MINUTES"), os.environ.get("FUZZ_SEED")


def seeds(examples):
    if SEED is not None:
        yield int(SEED)
    elif MINUTES is None:
        yield from range(examples)
    else:
        end = time.monotonic() + 60 * float(MINUTES) / len(KINDS)
        while time.monotonic() < end:
            yield secrets.randbits(48)


@pytest.mark.timeout(0 if MINUTES else 300)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_spoiled_is_used_or_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "fledge-cache"))
    monkeypatch.setattr(logging.root.manager, "disable", logging.WARNING)
    case = kind(tmp_path / "fuzz")
    case.restore()
    case.read()  # the unchanged files are accepted
    outcomes, before = [], peak_bytes()
    for seed in seeds(case.examples):
        try:
            outcomes.append(survives(case, random.Random(seed)))
        except Exception as error:
            error.add_note(f"again: FUZZ_SEED={seed} pytest tests/fuzz -k {kind.__name__}")
            raise
    print(f"{kind.__name__}: {len(outcomes):,} examples, {outcomes.count('refused'):,} refused")
    assert "refused" in outcomes or SEED, "nothing was spoiled"
    assert peak_bytes() - before < GROWTH
