"""The clock: medians of rounds that were timed one by one, and no speed-up from a disturbed one."""

from types import SimpleNamespace

import pytest

from decode.tiny_decode import make_draft
from fledge.cli.console import err, out
from fledge.cli.eval import _remarks, _speeds
from fledge.decode.clock import RoundTime
from fledge.decode.speculative import Generation, SpeculativeDecoder, Timing
from fledge.measure.answers import AnsweredTurn
from fledge.measure.evaluation import DraftEvaluation, EvalOptions
from fledge.measure.speed import Speed, Stopwatch
from fledge.target.hf.model import HFEagle3TargetModel


def watch(*texts, hiccup=0.0):
    """(tokens, rounds, draft seconds, target seconds) of each text; the hiccup is in the first
    round of the first text."""
    found = Stopwatch()
    for number, (tokens, rounds, draft_s, target_s) in enumerate(texts):
        each = [RoundTime(draft_s, target_s) for _ in range(rounds)]
        if number == 0:
            each[0] = RoundTime(draft_s, target_s + hiccup)
        total = sum(one.seconds for one in each)
        found.add(Timing(rounds, total, each), Generation([0], [0] * (tokens + 1)))
    return found


PLAIN = [(10, 10, 0.0, 0.1), (20, 20, 0.0, 0.1), (10, 10, 0.0, 0.1)]
LIVE = [(12, 4, 0.05, 0.15), (24, 8, 0.05, 0.15), (12, 4, 0.05, 0.15)]


def test_arithmetic():
    speed = Speed.of(watch(*PLAIN), watch(*LIVE))
    assert speed.break_even == pytest.approx(2.0)
    assert speed.predicted(3.0) == pytest.approx(1.5)
    assert speed.measured == pytest.approx(1.5)
    found = speed.to_json(2.0)
    assert found["predicted_speedup"] == pytest.approx(1.0)
    assert (found["texts"], found["rounds"], found["plain_steps"]) == (3, 16, 40)
    assert found["plain_step_ms_quartiles"] == pytest.approx([100, 100])
    assert Speed.of(Stopwatch(), watch(*LIVE)) is None


@pytest.mark.parametrize("busy", ["plain", "live"])
def test_a_busy_moment_changes_nothing(busy):
    """A hundred times a step's time, once: means would say that the draft gains fivefold."""
    hiccups = {"plain": 0.0, "live": 0.0, busy: 10.0}
    speed = Speed.of(watch(*PLAIN, hiccup=hiccups["plain"]), watch(*LIVE, hiccup=hiccups["live"]))
    calm = Speed.of(watch(*PLAIN), watch(*LIVE))
    assert speed.break_even == pytest.approx(calm.break_even)
    assert speed.measured == pytest.approx(calm.measured)
    assert not speed.disturbed


def in_vain():
    """What a newcomer met: a draft of length 1.000, and a plain step that took five rounds."""
    slow = [(tokens, rounds, 0.0, 1.06) for tokens, rounds, _, _ in PLAIN]
    useless = [(tokens, rounds, 0.05, 0.15) for tokens, rounds, _, _ in PLAIN]
    return Speed.of(watch(*slow), watch(*useless))


def shown(monkeypatch, capsys, speed):
    class Report:
        name, every_slot, other_picks, live, replay_s = "mine", None, 0, None, None

        class acceptance:  # noqa: N801
            length = 1.0

        class misses:  # noqa: N801
            @staticmethod
            def to_json():
                return {"token_share": 0.0, "ended_round_share": 0.0}

    report = Report()
    report.speed = speed
    for terminal in (out, err):
        monkeypatch.setattr(terminal, "_width", 200)
    out.print(_speeds([report]))
    _remarks(report)
    return capsys.readouterr()


def test_a_disturbed_clock_says_no_speed_up(monkeypatch, capsys):
    speed = in_vain()
    assert speed.disturbed
    found = speed.to_json(1.0)
    assert found["disturbed"] is True
    assert {name: value for name, value in found.items() if "speedup" in name} == dict.fromkeys(
        ("predicted_speedup", "predicted_speedup_live_sample", "measured_speedup_live_sample",
         "measured_speedup_quartiles")
    )  # fmt: skip
    assert found["break_even_acceptance_length"] is None
    told = shown(monkeypatch, capsys, speed)
    assert "the clock was disturbed: measure again" in told.err
    assert "5.3" not in told.out
    assert "x" not in told.out.split("middle half")[0].split("(live)")[1]


def test_a_text_cannot_gain_more_than_its_rounds_have_tokens():
    """One text, and the busy moment in its plain steps: medians are calm, its seconds are not."""
    speed = Speed.of(watch((10, 10, 0.0, 0.1), hiccup=10.0), watch((12, 10, 0.0, 0.11)))
    assert speed.break_even > 1
    assert speed.disturbed


def test_texts_rounds_and_spread_are_said(monkeypatch, capsys):
    uneven = watch(*LIVE[:2], (12, 12, 0.05, 0.35))
    speed = Speed.of(watch(*PLAIN), uneven)
    assert speed.to_json(3.0)["round_ms_quartiles"] == pytest.approx([200, 400])
    told = shown(monkeypatch, capsys, Speed.of(watch(*PLAIN), watch(*LIVE)))
    assert "timed on 3 texts: 16 rounds and 40 plain steps" in told.out
    assert "1.50 to 1.50" in told.out
    assert "200.0 to 200.0" in told.out
    assert told.err == ""


def test_the_two_ways_take_turns_in_being_first(target, asked, monkeypatch):
    """In both orders, so that a machine that slows down slows down both."""
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
    options = EvalOptions(num_draft_tokens=2, live=4, max_new_tokens=6)
    report = DraftEvaluation(backend, turns, options).evaluate("x", make_draft(target))
    pairs = [order[i : i + 2] for i in range(2, len(order), 2)]  # the first two are not timed
    assert pairs == [["plain", "live"], ["live", "plain"]] * 2
    assert report.speed.texts == 4
    assert report.speed.live.rounds == len(report.speed.live.round_s) > 0
