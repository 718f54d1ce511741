"""`fledge bench train`: its figures, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from fledge.bench.cost import step_flops
from fledge.bench.train_step import (
    CASES,
    HEAD,
    Case,
    build_batches,
    build_parts,
    compare,
    markdown_line,
    measure_step,
    meta_step,
    random_rows,
    table_row,
)
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.data.pack import Piece, collate
from fledge.methods.registry import METHODS
from fledge.training.batches import StepBatch
from fledge.training.step import train_step

SMALL = ["bench", "train", "--shape", "tiny", "--seq", "48", "--steps", "1", "--warmup", "1"]
SMALL += ["--device", "cpu"]


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark"])
def test_a_step_is_measured(kind):
    figures = json.loads(CliRunner().invoke(app, [*SMALL, "--kind", kind, "--json"]).stdout)
    assert figures["tokens"] == 48
    assert figures["tokens_per_s"] == pytest.approx(48e3 / figures["step_ms"], rel=0.05)
    assert figures["slowest_step_ms"] >= figures["step_ms"]
    assert set(figures["phases_ms"]) == {"target", "supervision", "forward", "backward", "update"}
    assert sum(figures["phases_ms"].values()) <= figures["step_ms"]


def test_later_epochs_do_not_ask_the_target():
    case = Case(shape="tiny", seq=96, batch=2, documents=24, kept=True)
    asked = []

    def look(parts, batch):
        inner = parts.target.inner
        inner.answer = lambda rows: asked.append(rows)
        train_step(parts, batch, lr=1e-4)

    figures = measure_step(case, torch.device("cpu"), steps=1, warmup=1, look=look)
    assert not asked
    live = measure_step(Case(shape="tiny", seq=96, batch=2, documents=24), torch.device("cpu"),
                        steps=1, warmup=1)  # fmt: skip
    assert figures.flops < live.flops


@pytest.mark.parametrize("kind", METHODS)
def test_counted_flops_are_those_torch_counts(kind):
    """But for attention: torch's path counts masked scores, and scores that are computed again."""
    case = Case(shape="tiny", kind=kind, seq=128, batch=2, layers=2)
    parts = build_parts(case, torch.device("cpu"))
    [batch] = build_batches(case, 1)
    train_step(parts, batch, lr=1e-4)  # the first one also tries out where the target can stop
    with FlopCounterMode(display=False) as counter:
        train_step(parts, batch, lr=1e-4)
    by_kind = counter.get_flop_counts()["Global"]
    products = sum(by_kind.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    counted = step_flops(parts, batch, meta_step(case, parts))
    assert products < counted < 1.2 * counter.get_total_flops()


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark"])
def test_padding_is_not_counted_as_work(kind):
    """Neither that of packs, nor that of plans whose sizes are rounded up for recorded steps."""
    case = Case(shape="tiny", kind=kind, seq=160, documents=40)
    parts = build_parts(case, torch.device("cpu"))
    rows = random_rows(case, 3, 40)
    packs = [tuple(Piece(row, 0, len(rows[row].input_ids)) for row in range(3))]
    needed = sum(map(len, packs[0]))

    def flops(width):
        batch = StepBatch(0, 0, (collate(rows, packs, width, pad_id=0),))
        return step_flops(parts, batch, meta_step(case, parts))

    exact = flops(needed)
    assert flops(needed + 37) == exact > 0
    parts.objective.quantum = 64
    assert flops(needed) == exact


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--shape", "8bb", "8b"),
        ("--kind", "eagle-3", "eagle3"),
        ("--device", "gpu9", "cuda"),
    ],
)
def test_unknown_names_are_refused(option, value, word):
    error = CliRunner().invoke(app, [*SMALL, option, value]).exception
    assert isinstance(error, BadInput)
    assert word in str(error)


def test_the_comparison_has_a_line_for_every_case():
    """The GPU cases, each made as small as possible."""
    small = {
        name: replace(case, shape="tiny", seq=64, batch=1, documents=16 if case.documents else 0,
                      fp8=False)
        for name, case in CASES.items()
    }  # fmt: skip
    figures_by_case = dict(compare(torch.device("cpu"), small, steps=1, warmup=1))
    assert list(figures_by_case) == list(CASES)
    columns = HEAD[0].count("|")
    for name, figures in figures_by_case.items():
        line = markdown_line(table_row(name, figures))
        assert line.startswith(f"| {name} | ")
        assert line.count("|") == columns
    page = (Path(__file__).parents[2] / "docs/performance.md").read_text()
    assert HEAD[0] in page


def test_the_comparison_needs_a_gpu():
    error = CliRunner().invoke(app, ["bench", "train", "--compare", "--device", "cpu"]).exception
    assert isinstance(error, BadInput)
    assert "--shape 135m" in str(error)
