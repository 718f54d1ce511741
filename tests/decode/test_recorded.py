"""Passes as a GPU replays them: fixed widths, copied inputs, results in shared memory."""

import logging

import pytest
import torch

from decode.pretend import PretendPasses
from decode.test_speculative import decoder as plain_decoder
from decode.test_speculative import windowed_target
from decode.tiny_decode import STOPS, make_draft, plain_greedy, random_prompts
from fledge.decode import recorded, speculative
from fledge.decode.recorded import Passes, RoundClock, Timing
from fledge.decode.stops import Stops
from fledge.decode.strategy import TreeShape
from fledge.decode.target import CachedTarget
from fledge.methods.registry import METHODS

pytestmark = pytest.mark.slow

LONG = Stops(30, frozenset({3}))
BLOCKS = [("dflash trained", "block"), ("dflash causal", "block"), ("dspark", "markov")]
WAYS = [("trained", "chain"), ("parallel", "parallel")]
WAYS += [("deep", way) for way in METHODS["eagle3"].strategies]


@pytest.fixture
def narrow(monkeypatch):
    """Recorded passes without a GPU, and caches so narrow that they soon have to grow."""
    monkeypatch.setattr(speculative, "Passes", PretendPasses)
    monkeypatch.setattr(recorded, "_NARROWEST", 8)


def decoder(target, draft=None, **options):
    made = plain_decoder(target, draft, **options)
    made.passes.caches = lambda: addresses(made)
    return made


def addresses(decoder):
    caches = [x for layer in decoder.target._cache.layers for x in (layer.keys, layer.values)]
    if decoder.strategy is not None:
        caches.append(decoder.strategy.cache)
    return [None if x is None else x.data_ptr() for x in caches]


def outcomes(generations):
    return [(text.token_ids, text.finish, text.rounds) for text in generations]


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(("kind", "method"), [(None, None), *WAYS, *BLOCKS])
def test_recorded_rounds_match_unrecorded_rounds(
    narrow, target, draft_of, asked, kind, method, batch
):
    draft = kind and draft_of(kind)
    recording = decoder(target, draft, method=method)
    unrecorded = decoder(target, draft, method=method, record=False)
    for begin in range(0, 14, batch):
        prompts = asked[begin : begin + batch]
        assert outcomes(recording.generate(prompts, LONG)) == outcomes(
            unrecorded.generate(prompts, LONG)
        )
    names = {name for name, _ in recording.passes.learned}
    assert names == {"verify"} | ({"propose"} if kind else set()) | (
        {"settle"} if method == "tree" else set()
    )
    widths = [used for name, used in recording.passes.learned if name == "verify"]
    assert len({*widths}) > 1  # the caches grew in the middle of a text
    assert unrecorded.passes.learned == []


@pytest.mark.parametrize(("kind", "method"), [(None, None), *WAYS[1:]])
def test_a_repeated_batch_records_nothing_new(narrow, target, drafts, asked, kind, method):
    recording = decoder(target, drafts.get(kind), method=method)
    prompts = sorted(asked[:6], key=len)
    first = outcomes(recording.generate(prompts, STOPS))
    learned = len(recording.passes.learned)
    again = outcomes(recording.generate(prompts, STOPS))
    assert again == first
    # graphs recorded before the caches grew are gone, those recorded since are kept
    assert len(recording.passes.learned) <= learned + 6
    before_third = len(recording.passes.learned)
    assert outcomes(recording.generate(prompts, STOPS)) == first
    assert len(recording.passes.learned) == before_third
    assert recording.passes.recording_s == 0.0
    assert recording.timing.rounds > 0


def test_finished_rows_stay_in_the_batch_until_half_have_finished(narrow, target, drafts, asked):
    recording = decoder(target, drafts["trained"])
    shrinks = []
    select, advance = recording.target.select, recording._advance
    recording.target.select = lambda rows: (
        shrinks.append((sizes[-1], len(rows))),
        select(rows),
    )
    sizes = []  # batch sizes before each round
    recording._advance = lambda rows, *more: (sizes.append(len(rows)), advance(rows, *more))[1]
    limits = Stops(40, frozenset(range(3, 12)))  # rows end at different times
    generations = recording.generate(asked[:16], limits)
    expected = [plain_greedy(target, prompt, limits) for prompt in asked[:16]]
    assert [(text.token_ids, text.finish) for text in generations] == expected
    assert shrinks
    assert all(2 * after <= before for before, after in shrinks)


def test_sampling_is_not_recorded(narrow, target, drafts, asked):
    recording = decoder(target, drafts["trained"])
    drawn = recording.generate(asked[:4], STOPS, temperature=1.0, seed=5)
    assert recording.passes.learned == []
    recording.generate(asked[:4], STOPS)
    assert recording.passes.learned
    unrecorded = decoder(target, drafts["trained"], record=False)
    assert outcomes(unrecorded.generate(asked[:4], STOPS, temperature=1.0, seed=5)) == outcomes(
        drawn
    )
    assert outcomes(recording.generate(asked[:4], STOPS, temperature=1.0, seed=5)) == outcomes(
        drawn
    )


def test_windows_and_mixed_layers_at_fixed_widths(narrow):
    model = windowed_target("gemma3")
    draft, prompts, stops = make_draft(model, fit=40), random_prompts(5, seed=3), Stops(16)
    expected = [plain_greedy(model, prompt, stops) for prompt in prompts]
    for method in ("chain", "tree"):
        generations = decoder(model, draft, method=method).generate(prompts, stops)
        assert [(text.token_ids, text.finish) for text in generations] == expected


def test_a_pass_that_cannot_be_recorded_runs_step_by_step(
    narrow, target, drafts, asked, answers, monkeypatch, caplog
):
    monkeypatch.setattr(PretendPasses, "broken", True)
    recording = decoder(target, drafts["trained"])
    with caplog.at_level(logging.WARNING):
        for batch in (slice(0, 1), slice(1, 7)):
            generations = recording.generate(asked[batch], STOPS)
            assert [(text.token_ids, text.finish) for text in generations] == answers[batch]
    [line] = caplog.messages
    assert line.endswith("(operation not permitted when stream is capturing)")
    assert len(recording.passes.learned) == 1
    for prompt, (tokens, _) in zip(asked[:8], answers, strict=False):
        [text] = decoder(target, drafts["trained"]).generate([prompt], STOPS)
        assert text.token_ids == tokens


def test_nan_left_in_the_caches_does_not_reach_the_next_text(narrow, target, drafts, asked):
    """A NaN in the cache would get past any mask."""
    recording = decoder(target, drafts["trained"])
    expected = outcomes(recording.generate(asked[:3], STOPS))
    for layer in recording.target._cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    recording.strategy.cache.fill_(float("nan"))
    assert outcomes(recording.generate(asked[:3], STOPS)) == expected


@pytest.mark.parametrize(("kind", "method"), WAYS)
def test_recording_in_the_middle_of_a_text_leaves_the_cache_intact(
    narrow, target, drafts, asked, kind, method
):
    """Recording first runs a pass twice; the target's cache must be correct nevertheless."""
    slim = TreeShape(depth=4, width=2, nodes=8)  # accepted nodes are close together
    recording = decoder(target, drafts[kind], method=method, tree=slim)
    seen = 0

    def look(rows):
        nonlocal seen
        recording.passes.drop_recordings()
        [row] = rows
        if row.finish is None:
            seen += row.rounds[-1].accepted > 2
            text = [*row.prompt_ids, *row.token_ids][:-1]
            fresh = CachedTarget(target, None)
            fresh.begin([text])
            for layer, expected in zip(
                recording.target._cache.layers, fresh._cache.layers, strict=True
            ):
                torch.testing.assert_close(layer.keys[:1, :, : len(text)], expected.keys)
                torch.testing.assert_close(layer.values[:1, :, : len(text)], expected.values)

    for prompt in asked[:6]:
        recording.generate([prompt], STOPS, on_round=look)
    assert seen > 2


def test_a_pass_recorded_at_the_end_of_its_width_serves_shorter_texts(
    narrow, target, drafts, asked, answers
):
    for prompt, (tokens, _) in zip(asked[:12], answers, strict=False):
        recording = decoder(target, drafts["trained"])
        recording.generate([[*range(11)]], Stops(2))  # a round of 11 + 1 + 4 = 16 slots
        [text] = recording.generate([prompt], STOPS)
        assert text.token_ids == tokens


def test_the_number_of_kept_passes_is_limited(monkeypatch):
    monkeypatch.setattr(recorded, "_MOST_GRAPHS", 2)
    passes = PretendPasses(torch.device("cpu"))
    passes.begin(greedy=True)
    for size in (1, 2, 1, 3, 1, 2):
        result = passes(times, {"x": torch.arange(size)}, factor=2)
        assert result.tolist() == [2 * i for i in range(size)]
    assert len(passes.learned) == 4  # 3 evicts 2, the least recently used; 2 is recorded again
    assert len(passes._graphs) == 2


def times(x, *, factor):
    return x * factor


def negative(x, *, factor):
    return -x * factor


def test_recordings_are_keyed_by_function_and_constants():
    passes = PretendPasses(torch.device("cpu"))
    passes.begin(greedy=True)
    x = {"x": torch.arange(3)}
    for _ in range(2):
        assert passes(times, x, factor=2).tolist() == [0, 2, 4]
        assert passes(times, x, factor=3).tolist() == [0, 3, 6]
        assert passes(negative, x, factor=3).tolist() == [0, -3, -6]
    assert [name for name, _ in passes.learned] == ["times", "times", "negative"]


def test_a_cpu_records_nothing():
    passes = Passes(torch.device("cpu"))
    passes.begin(greedy=True)
    assert not passes.fixed
    assert [passes.room(n) for n in (1, 255, 300)] == [1, 255, 300]
    pretend = PretendPasses(torch.device("cpu"))
    pretend.begin(greedy=True)
    assert [pretend.room(n) for n in (1, 256, 257, 512, 513)] == [256, 256, 512, 512, 1024]


def test_recording_time_is_not_charged_to_any_round(monkeypatch):
    now = iter([0.0, 1.0, 5.0, 5.0, 6.0, 8.0])  # two rounds: begin, drafted, end
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    passes = Passes(torch.device("cpu"))
    clock = RoundClock(passes)
    for passes.recording_s in (0.0, 0.5, 3.5, 3.5, 3.5, 4.0):
        clock.mark()
    assert clock.read() == Timing([(0.5, 1.0), (1.0, 1.5)], 4.0)
