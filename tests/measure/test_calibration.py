"""Temperatures undo what was done to the odds, and come from what live decoding accepts."""

import numpy as np
import pytest
import torch

from decode.test_block_decode import SPARK, make_block
from decode.tiny_decode import AUX, STOPS, make_target, random_prompts
from fledge.core.errors import BadInput
from fledge.decode.speculative import SpeculativeDecoder
from fledge.measure.calibration import (
    Sureness,
    calibrate,
    calibration_error,
    chances,
    fit_temperatures,
    reliability,
    sureness,
)
from fledge.measure.packed import target_picks
from fledge.measure.replay import Text, as_pack, ask
from fledge.target.hf.model import HFEagle3TargetModel


def spoiled(temperatures, count=20000):
    """Honest odds, multiplied by a temperature for each depth; some texts end early."""
    rng = np.random.default_rng(0)
    honest = rng.normal(0.5, 1.5, (count, len(temperatures)))
    stands = rng.random(honest.shape) < 1 / (1 + np.exp(-honest))
    accepted = np.cumprod(stands, axis=1).sum(axis=1)
    odds = honest * temperatures
    odds[: count // 4, -1] = np.nan
    return Sureness(odds, accepted)


def test_temperatures_are_found_again():
    wanted = np.array([0.5, 1.0, 3.0])
    found = spoiled(wanted)
    fitted = fit_temperatures(found)
    assert fitted == pytest.approx(wanted, rel=0.1)
    for depth in range(3):
        before = calibration_error(reliability(found, [1, 1, 1], depth))
        after = reliability(found, fitted, depth)
        assert calibration_error(after) < 0.015
        assert sum(one.count for one in after) == (~np.isnan(found.odds_NK[:, depth])).sum()
        if wanted[depth] != 1:
            assert calibration_error(after) < 0.5 * before
    product = 1 / (1 + np.exp(-found.odds_NK / fitted))
    np.testing.assert_allclose(chances(found, fitted), np.cumprod(product, axis=1))


def test_what_stood_is_what_live_decoding_accepts():
    target = make_target()
    draft = make_block(target, fit=10, **SPARK)
    draft.config.confidence_threshold = 0.9  # leaves most out, but not here
    live = SpeculativeDecoder(target).generate([[5, 9, 1], [7, 2]], STOPS)
    texts = [Text(one.prompt_ids, one.token_ids) for one in live]
    tokens = as_pack(texts)
    with HFEagle3TargetModel(target, AUX, supervision="hidden") as backend:
        batch = ask(backend, tokens)
        picks = target_picks(batch, tokens, backend.info().head, draft.selected_token_ids)
    found = sureness(draft, [(batch, tokens, picks)], 4)
    assert draft.config.confidence_threshold == 0.9
    draft.config.confidence_threshold = 0.0
    drafted = SpeculativeDecoder(target, draft).generate([t.prompt_ids for t in texts], STOPS)
    first = [one.rounds[0].accepted for one in drafted]
    slots = [t for text in texts for t in range(len(text) - 2) if t >= len(text.prompt_ids) - 1]
    assert len(found.accepted_N) == len(slots)
    assert found.odds_NK.shape == (len(slots), 4)
    assert not np.isnan(found.odds_NK[:, 0]).any()
    assert np.isnan(found.odds_NK[:, 3]).any()  # texts that end before
    assert set(first) <= set(found.accepted_N.tolist())


def test_temperatures_change_what_is_left_out():
    target = make_target()
    draft = make_block(target, fit=30, **SPARK)
    with torch.no_grad():  # sure of everything, and alike
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.bias.fill_(1.0)

    def rounds(threshold, temperature):
        draft.config.confidence_threshold = threshold
        draft.config.confidence_temperatures = [temperature] * 4
        prompts = random_prompts(12)
        found = SpeculativeDecoder(target, draft).generate(prompts, STOPS)
        return [[r.accepted for r in one.rounds] for one in found]

    assert rounds(0.4, 1e-3) == rounds(0.0, 1.0)  # certain: nothing is left out
    assert max(map(max, rounds(0.0, 1.0))) > 1
    assert max(map(max, rounds(0.4, 1e3))) == 1  # a half each: the second is at a quarter


def test_a_draft_without_a_confidence_head_is_refused():
    with pytest.raises(BadInput, match="how sure it is"):
        sureness(make_block(make_target()), [], 4)


def test_temperatures_are_judged_by_texts_that_did_not_choose_them():
    """All texts choose what is kept; each half is judged under the other half's."""
    target = make_target()
    draft = make_block(target, fit=30, **SPARK)
    live = SpeculativeDecoder(target).generate(random_prompts(12), STOPS)
    texts = [Text(one.prompt_ids, one.token_ids) for one in live if len(one.token_ids) > 1]

    def sure(some):
        tokens = as_pack(some)
        batch = ask(backend, tokens)
        picks = target_picks(batch, tokens, backend.info().head, draft.selected_token_ids)
        return sureness(draft, [(batch, tokens, picks)], 4)

    with HFEagle3TargetModel(target, AUX, supervision="hidden") as backend:
        found = calibrate(backend, draft, texts, depths=4, batch_tokens=64)
        even, odd, whole = sure(texts[::2]), sure(texts[1::2]), sure(texts)
    assert found.temperatures == pytest.approx(fit_temperatures(whole), rel=1e-3)
    crossed = [even.at(fit_temperatures(odd)), odd.at(fit_temperatures(even))]
    for depth in range(4):
        expected = reliability(Sureness.joined(crossed), [], depth)
        assert [one.count for one in found.after[depth]] == [one.count for one in expected]
        assert calibration_error(found.after[depth]) == pytest.approx(calibration_error(expected))
        own = calibration_error(reliability(whole, [], depth))
        assert calibration_error(found.before[depth]) == pytest.approx(own)
    written = found.to_json()
    assert written["after"][0][0] == [*vars(found.after[0][0]).values()]
