"""Progress lines instead of a bar: neither too rare nor too frequent, with the time left."""

import io
import time

import pytest

from fledge.cli.console import progress_bar
from fledge.core import progress
from fledge.core.progress import PlainProgress, clock_time
from fledge.core.terminal import Terminal


@pytest.fixture
def terminal(monkeypatch):
    """Output that is not a terminal, with a line every 0.2 s."""
    terminal = Terminal(file=io.StringIO(), width=40)
    monkeypatch.setattr("fledge.cli.console.err", terminal)
    monkeypatch.setattr(progress, "EVERY_S", 0.2)
    return terminal


def lines(terminal):
    return terminal.file.getvalue().splitlines()


def test_lines_are_neither_too_rare_nor_too_frequent(terminal):
    with progress_bar() as watch:
        for done in range(1000):
            watch("the target answers", done, 1000)
            time.sleep(0.0005)
    shown = lines(terminal)
    assert all(line.startswith("the target answers ") and " left" in line for line in shown)
    assert 2 <= len(shown) <= 6  # about one second, at most five lines per second


def test_control_characters_and_markup_are_shown_literally(terminal):
    with progress_bar() as show:
        show("x\x1b[2J", 1, 2, "rows", "[red]y\x07", now=True)
    [line] = lines(terminal)  # one line, however narrow the output
    assert line.startswith("x\\x1b[2J 1/2 rows (50%), [red]y\\x07; 0:00 elapsed")


def test_only_rank_0_prints_progress(terminal, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with progress_bar() as show:
        show("x", 1, 2, now=True)
        show.say("x")
    assert lines(terminal) == []


def test_the_time_left_counts_from_the_start_of_the_phase(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    printed = []
    bar = PlainProgress(printed.append)
    bar("preparing", 5, 5, "parts")
    now[0] = 1000.0
    bar("training", 100, 400, "steps", now=True)  # a resumed run
    now[0] = 1005.0
    bar("training", 110, 400, "steps")
    now[0] = 1010.0
    bar("training", 110, 400, "steps", "loss 3")
    assert printed == [
        "training 100/400 steps (25%); 16:40 elapsed",
        "training 110/400 steps (28%), loss 3; 16:50 elapsed, about 4:50 left",
    ]
    assert [clock_time(s) for s in (7, 750, 10800)] == ["0:07", "12:30", "3:00:00"]
