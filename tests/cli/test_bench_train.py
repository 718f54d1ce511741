"""`fledge bench train`: its figures, and what it refuses."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fledge.bench.train_step import Case, measure_step
from fledge.cli.main import app
from fledge.core.errors import BadInput
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

    measure_step(case, torch.device("cpu"), steps=1, warmup=1, look=look)
    assert not asked


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
