"""The demo's last screen: one answer with and without the draft, figures and a verdict."""

import re

import pytest

from fledge.cli import demo as side_by_side
from fledge.decode.accept import Round
from fledge.decode.recorded import RoundTime, Timing
from fledge.decode.speculative import Generation
from fledge.measure.speed import Course, SideBySide, Speed, TimedText

PIECES = ["Once", " upon", " a", " time", " there", " was", " a", " fox", "."]


class Words:
    """A tokenizer that decodes token n as word n."""

    def decode(self, token_ids, **_):
        return "".join(PIECES[token] for token in token_ids)


def side_by_side_of(step_s: float, round_s: tuple[float, float]) -> SideBySide:
    """Nine tokens: eight steps of the target, or three rounds of three, three and two tokens."""
    plain = Generation([7, 7], list(range(9)))
    drafted = Generation([7, 7], list(range(9)), rounds=[Round(3, 2, 3), Round(6, 2, 3),
                                                         Round(9, 1, 2)])  # fmt: skip
    times = [RoundTime(0.0, step_s)] * 8, [RoundTime(*round_s)] * 3
    timed, courses = [], []
    for text, each in zip((plain, drafted), times, strict=True):
        timed.append([TimedText(8, Timing(each, sum(time.seconds for time in each)))])
        courses.append(Course.of(text, each, Words()))
    return SideBySide(*courses, Speed(*timed))


def test_a_course_has_the_tokens_of_every_moment():
    shown = side_by_side_of(0.1, (0.05, 0.15))
    assert [count for _, count in shown.plain.moments] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [count for _, count in shown.drafted.moments] == [1, 4, 7, 9]
    assert shown.drafted.depths == [0, 1, 2, 0, 1, 2, 0, 1, 0]
    assert [shown.drafted.known(s) for s in (0.0, 0.19, 0.21, 0.41, 9.0)] == [1, 1, 4, 7, 9]
    assert shown.plain.pieces == PIECES
    assert (shown.plain.passes, shown.drafted.passes) == (8, 3)
    assert shown.plain.tokens_per_s == pytest.approx(10)
    assert shown.speed.measured == pytest.approx(0.8 / 0.6)


def text_of(shown: SideBySide) -> str:
    return side_by_side.verdict(shown).plain


def test_a_gain_is_reported_without_further_explanation():
    text = text_of(side_by_side_of(0.1, (0.05, 0.15)))
    assert text.startswith("1.33 times as fast: the same text, token for token, 3 passes of the")
    assert "GPU" not in text


def test_no_gain_is_explained():
    text = text_of(side_by_side_of(0.1, (0.05, 0.25)))
    assert text.startswith("0.89 times as fast here: the same text")
    assert "takes 2.5 times as long" in text
    assert "drafting 50% of one" in text
    assert "Below 3.00 tokens a round nothing is gained; this answer had 2.67." in text
    assert "On a GPU it pays" in text


def test_a_disturbed_clock_reports_no_speedup():
    assert "the clock was disturbed" in text_of(side_by_side_of(0.1, (0.0, 0.05)))
    assert "times as fast" not in text_of(side_by_side_of(0.1, (0.0, 0.05)))


@pytest.mark.parametrize("width", [80, 120])
def test_on_a_terminal_both_columns_fill_in_real_time(width, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(side_by_side.out, "_force_terminal", True)
    monkeypatch.setattr(side_by_side.out, "is_interactive", True)
    monkeypatch.setattr(side_by_side.out, "_width", width)
    waited: list[float] = []
    side_by_side.show(side_by_side_of(0.1, (0.05, 0.15)), sleep=waited.append)
    assert sum(waited) == pytest.approx(0.8, abs=0.1)  # as long as the slower of the two took
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    counts = re.findall(r"without the draft (\d)/9 tokens\s+with the draft (\d)/9 tokens", shown)
    assert len(counts) > len(waited)
    assert counts[0] == ("1", "1")
    assert counts[-1] == ("9", "9")
    assert ("7", "9") in counts  # the drafted one is done first
    assert max(map(len, shown.replace("\r", "\n").splitlines())) <= width


@pytest.mark.parametrize("width", [60, 70, 80])
def test_bars_fit_a_narrow_terminal(width, capsys, monkeypatch):
    monkeypatch.setattr(side_by_side.out, "_width", width)
    side_by_side.show(side_by_side_of(0.1, (0.05, 0.15)), sleep=pytest.fail)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[1] for line in lines if "█" in line] == ["without", "with"]
    assert max(map(len, lines)) <= width


def test_without_a_terminal_two_bars_and_figures_are_printed(capsys):
    side_by_side.show(side_by_side_of(0.1, (0.05, 0.15)), sleep=pytest.fail)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("1.33 times as fast")
    plain, drafted = lines[1], lines[2]
    assert plain.count("█") == 24
    assert drafted.count("█") == 18
    assert plain.split()[-3:] == ["0.8", "10.0", "8"]
    assert drafted.split()[-3:] == ["0.6", "13.3", "3"]
