"""Passes as a GPU replays them: fixed widths, inputs copied in, results in shared memory."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from decode.pretend import PretendPasses
from decode.tiny_decode import AUX, STOPS, make_draft, plain_greedy, random_prompts
from fledge.decode import recorded, speculative
from fledge.decode.clock import RoundClock
from fledge.decode.recorded import Passes
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops
from fledge.decode.strategies.shape import TreeShape
from fledge.decode.target import CachedTarget

pytestmark = pytest.mark.slow

TREE = TreeShape(depth=4, width=3, nodes=9)
LONG = Stops(30, frozenset({3}))
METHODS = [("trained", "chain"), ("deep", "chain"), ("deep", "tree"), ("parallel", "parallel")]


@pytest.fixture
def narrow(monkeypatch):
    """Recorded passes without a GPU; caches that are soon too narrow."""
    monkeypatch.setattr(speculative, "Passes", PretendPasses)
    monkeypatch.setattr(recorded, "_NARROWEST", 8)


def decoder(target, draft=None, **options):
    given = {"aux_layer_ids": AUX, "num_draft_tokens": 4, "tree": TREE, **options}
    made = SpeculativeDecoder(target, draft, **given)
    made.passes.caches = lambda: addresses(made)
    return made


def addresses(decoder):
    held = [x for layer in decoder.target._cache.layers for x in (layer.keys, layer.values)]
    if decoder.strategy is not None:
        held.append(decoder.strategy.drafter._cache)
    return [None if x is None else x.data_ptr() for x in held]


def said(generations):
    return [(one.token_ids, one.finish, one.rounds) for one in generations]


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(("kind", "method"), [(None, None), *METHODS])
def test_recorded_rounds_are_the_rounds(narrow, target, drafts, asked, kind, method, batch):
    draft = drafts.get(kind)
    ours = decoder(target, draft, method=method)
    plainly = decoder(target, draft, method=method, record=False)
    for begin in range(0, 14, batch):
        prompts = asked[begin : begin + batch]
        assert said(ours.generate(prompts, LONG)) == said(plainly.generate(prompts, LONG))
    names = {name for name, _ in ours.passes.learned}
    assert names == {"verify"} | ({"propose"} if kind else set()) | (
        {"settle"} if method == "tree" else set()
    )
    widths = [used for name, used in ours.passes.learned if name == "verify"]
    assert len({*widths}) > 1  # the caches grew in the middle of a text
    assert plainly.passes.learned == []


@pytest.mark.parametrize(("kind", "method"), [(None, None), *METHODS[1:]])
def test_the_second_text_finds_everything_recorded(narrow, target, drafts, asked, kind, method):
    ours = decoder(target, drafts.get(kind), method=method)
    prompts = sorted(asked[:6], key=len)
    first = said(ours.generate(prompts, STOPS))
    learned = len(ours.passes.learned)
    again = said(ours.generate(prompts, STOPS))
    assert again == first
    # graphs of memory that was too narrow are gone, those since it last moved are still there
    assert len(ours.passes.learned) <= learned + 6
    third = len(ours.passes.learned)
    assert said(ours.generate(prompts, STOPS)) == first
    assert len(ours.passes.learned) == third
    assert ours.timing.recording_s == 0.0
    assert ours.timing.rounds > 0


def test_rows_that_have_ended_run_along_until_they_are_half(narrow, target, drafts, asked):
    ours = decoder(target, drafts["trained"])
    sizes = []
    select, advance = ours.target.select, ours._advance
    ours.target.select = lambda rows: (sizes.append((here[-1], len(rows))), select(rows))
    here = []  # rows before they advance
    ours._advance = lambda rows, *more: (here.append(len(rows)), advance(rows, *more))[1]
    limits = Stops(40, frozenset(range(3, 12)))  # rows end here and there
    found = ours.generate(asked[:16], limits)
    want = [plain_greedy(target, prompt, limits) for prompt in asked[:16]]
    assert [(one.token_ids, one.finish) for one in found] == want
    assert sizes
    assert all(2 * after <= before for before, after in sizes)


def test_another_batch_ends_in_sizes_that_are_recorded(narrow, target, drafts, asked):
    """However its rows end: with sizes of their own every batch would record for itself."""
    limits = Stops(40, frozenset(range(3, 12)))
    ours = decoder(target, drafts["trained"])
    sizes = []
    advance = ours._advance
    ours._advance = lambda rows, *more: (sizes.append(len(rows)), advance(rows, *more))[1]
    alone = decoder(target, drafts["trained"], record=False)
    for seed in range(4):
        prompts = random_prompts(16, seed=seed, longest=12)
        assert said(ours.generate(prompts, limits)) == said(alone.generate(prompts, limits))
    assert {*sizes} == {16, 8, 4, 2, 1}


def test_sampling_is_not_recorded(narrow, target, drafts, asked):
    ours = decoder(target, drafts["trained"])
    drawn = ours.generate(asked[:4], STOPS, temperature=1.0, seed=5)
    assert ours.passes.learned == []
    ours.generate(asked[:4], STOPS)
    assert ours.passes.learned
    plainly = decoder(target, drafts["trained"], record=False)
    assert said(plainly.generate(asked[:4], STOPS, temperature=1.0, seed=5)) == said(drawn)
    assert said(ours.generate(asked[:4], STOPS, temperature=1.0, seed=5)) == said(drawn)


def test_windows_and_mixed_layers_at_fixed_widths(narrow):
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().double()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.mul_(6)
    draft, prompts, stops = make_draft(model, fit=40), random_prompts(5, seed=3), Stops(16)
    want = [plain_greedy(model, prompt, stops) for prompt in prompts]
    for method in ("chain", "tree"):
        found = decoder(model, draft, method=method).generate(prompts, stops)
        assert [(one.token_ids, one.finish) for one in found] == want


def test_what_cannot_be_recorded_runs_step_by_step(
    narrow, target, drafts, asked, answers, monkeypatch, caplog
):
    monkeypatch.setattr(PretendPasses, "broken", True)
    ours = decoder(target, drafts["trained"])
    with caplog.at_level(logging.WARNING):
        for own in (slice(0, 1), slice(1, 7)):
            found = ours.generate(asked[own], STOPS)
            assert [(one.token_ids, one.finish) for one in found] == answers[own]
    [line] = caplog.messages
    assert line.endswith("(operation not permitted when stream is capturing)")
    assert len(ours.passes.learned) == 1
    for prompt, (tokens, _) in zip(asked[:8], answers, strict=False):
        [one] = decoder(target, drafts["trained"]).generate([prompt], STOPS)
        assert one.token_ids == tokens


def test_a_text_that_broke_the_target_leaves_nothing_to_the_next(narrow, target, drafts, asked):
    """A NaN in the cache would come through every mask."""
    ours = decoder(target, drafts["trained"])
    want = said(ours.generate(asked[:3], STOPS))
    for layer in ours.target._cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    ours.strategy.drafter._cache.fill_(float("nan"))
    assert said(ours.generate(asked[:3], STOPS)) == want


@pytest.mark.parametrize(("kind", "method"), METHODS)
def test_a_pass_recorded_at_any_time_has_done_no_harm(narrow, target, drafts, asked, kind, method):
    """Recording runs a pass twice beforehand: the target's cache holds what it should hold."""
    slim = TreeShape(depth=4, width=2, nodes=8)  # accepted nodes stand close by
    ours = decoder(target, drafts[kind], method=method, tree=slim)
    seen = 0

    def look(rows):
        nonlocal seen
        ours.passes.drop_recordings()
        [row] = rows
        if row.finish is None:
            seen += row.rounds[-1].accepted > 2
            text = [*row.prompt_ids, *row.token_ids][:-1]
            alone = CachedTarget(target, None)
            alone.begin([text])
            for layer, want in zip(ours.target._cache.layers, alone._cache.layers, strict=True):
                torch.testing.assert_close(layer.keys[:1, :, : len(text)], want.keys)
                torch.testing.assert_close(layer.values[:1, :, : len(text)], want.values)

    for prompt in asked[:6]:
        ours.generate([prompt], STOPS, on_round=look)
    assert seen > 2


def test_a_pass_first_seen_at_the_end_of_its_width_serves_shorter_texts(
    narrow, target, drafts, asked, answers
):
    for prompt, (tokens, _) in zip(asked[:12], answers, strict=False):
        ours = decoder(target, drafts["trained"])
        ours.generate([[*range(11)]], Stops(2))  # a round of 11 + 1 + 4: up to 16
        [one] = ours.generate([prompt], STOPS)
        assert one.token_ids == tokens


def test_only_so_many_passes_are_kept(monkeypatch):
    monkeypatch.setattr(recorded, "_MOST_GRAPHS", 2)
    passes = PretendPasses(torch.device("cpu"))
    passes.begin(greedy=True)
    for size in (1, 2, 1, 3, 1, 2):
        got = passes(times, {"x": torch.arange(size)}, factor=2)
        assert got.tolist() == [2 * i for i in range(size)]
    assert len(passes.learned) == 4  # when 3 comes, 2 has gone unused for longest; and comes again
    assert len(passes._graphs) == 2


def times(x, *, factor):
    return x * factor


def negative(x, *, factor):
    return -x * factor


def test_a_recording_is_of_its_function_and_all_of_its_constants():
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


def test_recording_is_in_nobodys_time(monkeypatch):
    now = iter([0.0, 1.0, 5.0, 5.0, 6.0, 8.0])  # two rounds: begin, drafted, end
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = RoundClock(torch.device("cpu"))
    for recording_s in (0.0, 0.5, 3.5, 3.5, 3.5, 4.0):
        clock.mark(recording_s)
    assert clock.read() == ([(0.5, 1.0), (1.0, 1.5)], 4.0)
