"""Timing: medians over individually timed rounds, and no speed-up from a disturbed measurement."""

from types import SimpleNamespace

import pytest

from decode.tiny_decode import make_draft
from fledge.cli.console import err, out
from fledge.cli.eval import _remarks, _speeds
from fledge.decode.recorded import RoundTime, Timing
from fledge.decode.speculative import SpeculativeDecoder
from fledge.measure.answers import AnsweredTurn
from fledge.measure.evaluation import DraftEvaluation, EvalOptions
from fledge.measure.speed import Speed, TimedText
from fledge.target.hf.model import HFEagle3TargetModel


def timed(*texts, hiccup=0.0):
    """Texts of (tokens, rounds, draft seconds, target seconds); `hiccup` seconds are added to the
    first round of the first text."""
    timings = [[RoundTime(draft_s, target_s)] * n for _, n, draft_s, target_s in texts]
    timings[0][0] = RoundTime(texts[0][2], texts[0][3] + hiccup)
    return [
        TimedText(tokens, Timing(each, sum(time.seconds for time in each)))
        for (tokens, *_), each in zip(texts, timings, strict=True)
    ]


PLAIN = [(10, 10, 0.0, 0.1), (20, 20, 0.0, 0.1), (10, 10, 0.0, 0.1)]
LIVE = [(12, 4, 0.05, 0.15), (24, 8, 0.05, 0.15), (12, 4, 0.05, 0.15)]


def test_arithmetic():
    speed = Speed(timed(*PLAIN), timed(*LIVE))
    assert speed.break_even == pytest.approx(2.0)
    assert speed.measured == pytest.approx(1.5)
    values = speed.to_json(2.0)
    assert values["predicted_speedup"] == pytest.approx(1.0)
    assert (values["texts"], values["rounds"], values["plain_steps"]) == (3, 16, 40)
    assert values["plain_step_ms_quartiles"] == pytest.approx([100, 100])


@pytest.mark.parametrize("busy", ["plain", "live"])
def test_a_single_hiccup_changes_nothing(busy):
    """One step takes a hundred times as long: by means, the draft would gain fivefold."""
    hiccups = {"plain": 0.0, "live": 0.0, busy: 10.0}
    speed = Speed(timed(*PLAIN, hiccup=hiccups["plain"]), timed(*LIVE, hiccup=hiccups["live"]))
    calm = Speed(timed(*PLAIN), timed(*LIVE))
    assert speed.break_even == pytest.approx(calm.break_even)
    assert speed.measured == pytest.approx(calm.measured)
    assert not speed.disturbed


def disturbed_speed():
    """As a user once saw: acceptance length 1.000, and plain steps as slow as five rounds."""
    slow = [(tokens, rounds, 0.0, 1.06) for tokens, rounds, _, _ in PLAIN]
    useless = [(tokens, rounds, 0.05, 0.15) for tokens, rounds, _, _ in PLAIN]
    return Speed(timed(*slow), timed(*useless))


def print_speed(monkeypatch, capsys, speed):
    missed = {"token_share": 0.0, "ended_round_share": 0.0}
    report = SimpleNamespace(
        name="mine", every_slot=None, other_picks=0, live=None, replay_s=None, speed=speed,
        acceptance=SimpleNamespace(length=1.0), failures=SimpleNamespace(misses=lambda: missed),
    )  # fmt: skip
    for terminal in (out, err):
        monkeypatch.setattr(terminal, "_width", 200)
    out.print(_speeds([report]))
    _remarks(report)
    return capsys.readouterr()


def test_a_disturbed_measurement_reports_no_speed_up(monkeypatch, capsys):
    speed = disturbed_speed()
    assert speed.disturbed
    values = speed.to_json(1.0)
    assert values["disturbed"] is True
    assert {name: value for name, value in values.items() if "speedup" in name} == dict.fromkeys(
        ("predicted_speedup", "predicted_speedup_live_sample", "measured_speedup_live_sample",
         "measured_speedup_quartiles")
    )  # fmt: skip
    assert values["break_even_acceptance_length"] is None
    printed = print_speed(monkeypatch, capsys, speed)
    assert "the clock was disturbed: measure again" in printed.err
    assert "5.3" not in printed.out
    assert "x" not in printed.out.split("middle half")[0].split("(live)")[1]


def test_a_speed_up_beyond_the_tokens_per_round_is_a_disturbance():
    """One text with a slow moment in its plain steps: it shows in the total, not in medians."""
    speed = Speed(timed((10, 10, 0.0, 0.1), hiccup=10.0), timed((12, 10, 0.0, 0.11)))
    assert speed.break_even > 1
    assert speed.disturbed


def test_texts_rounds_and_spread_are_printed(monkeypatch, capsys):
    uneven = timed(*LIVE[:2], (12, 12, 0.05, 0.35))
    speed = Speed(timed(*PLAIN), uneven)
    assert speed.to_json(3.0)["round_ms_quartiles"] == pytest.approx([200, 400])
    printed = print_speed(monkeypatch, capsys, Speed(timed(*PLAIN), timed(*LIVE)))
    assert "timed on 3 texts: 16 rounds and 40 plain steps" in printed.out
    assert "1.50 to 1.50" in printed.out
    assert "200.0 to 200.0" in printed.out
    assert printed.err == ""


def test_plain_and_speculative_decoding_alternate_in_going_first(target, asked, monkeypatch):
    """The order alternates, so that a machine that slows down affects both alike."""
    order, real = [], SpeculativeDecoder.generate

    def generate(self, *given, **more):
        order.append("plain" if self.strategy is None else "live")
        return real(self, *given, **more)

    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
    tokenizer = SimpleNamespace(
        eos_token_id=None, get_vocab=dict, special_tokens_map={}, chat_template=None, is_fast=False,
        all_special_ids=[], decode=lambda ids, **_: " ".join(map(str, ids)),
    )  # fmt: skip
    backend = HFEagle3TargetModel(target, [0, 1, 2], supervision="hidden", tokenizer=tokenizer)
    turns = [
        AnsweredTurn(str(i), "", "", 0, list(prompt), [1, 2, 3], "length")
        for i, prompt in enumerate(asked[:4])
    ]
    options = EvalOptions(live=4, max_new_tokens=6)
    report = DraftEvaluation(backend, make_draft(target), turns, options, 2).evaluate("x")
    pairs = [order[i : i + 2] for i in range(2, len(order), 2)]  # the first two are not timed
    assert pairs == [["plain", "live"], ["live", "plain"]] * 2
    assert len(report.speed.live) == len(report.speed.plain) == 4
