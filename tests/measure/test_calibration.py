"""Temperatures undo a known distortion of the odds, and are fitted to what decoding accepts."""

import numpy as np
import pytest
import torch

from decode.tiny_decode import AUX, SPARK, STOPS, make_block, make_target, random_prompts
from fledge.core.errors import BadInput
from fledge.decode.speculative import SpeculativeDecoder
from fledge.measure.replay import Text
from fledge.methods.block.calibration import (
    Sureness,
    calibrate,
    calibration_error,
    chances,
    fit_temperatures,
    sureness,
)
from fledge.target.hf.model import HFEagle3TargetModel


def distorted_odds(temperatures, count=20000):
    """Calibrated odds, multiplied by a temperature for each depth; some texts end early."""
    rng = np.random.default_rng(0)
    calibrated = rng.normal(0.5, 1.5, (count, len(temperatures)))
    accepted_NK = rng.random(calibrated.shape) < 1 / (1 + np.exp(-calibrated))
    accepted = np.cumprod(accepted_NK, axis=1).sum(axis=1)
    odds = calibrated * temperatures
    odds[: count // 4, -1] = np.nan
    return Sureness(odds, accepted)


def test_known_temperatures_are_recovered():
    expected = np.array([0.5, 1.0, 3.0])
    distorted = distorted_odds(expected)
    fitted = fit_temperatures(distorted)
    assert fitted == pytest.approx(expected, rel=0.1)
    for depth in range(3):
        before = calibration_error(distorted, [1, 1, 1], depth)
        after = calibration_error(distorted, fitted, depth)
        assert after < 0.015
        if expected[depth] != 1:
            assert after < 0.5 * before
    product = 1 / (1 + np.exp(-distorted.odds_NK / fitted))
    np.testing.assert_allclose(chances(distorted, fitted), np.cumprod(product, axis=1))


def test_measured_acceptance_matches_live_decoding():
    target = make_target()
    draft = make_block(target, fit=10, **SPARK)
    draft.config.confidence_threshold = 0.9  # drops most tokens in decoding, none in calibration
    live = SpeculativeDecoder(target).generate([[5, 9, 1], [7, 2]], STOPS)
    texts = [Text(generation.prompt_ids, generation.token_ids) for generation in live]
    with HFEagle3TargetModel(target, AUX, supervision="hidden") as backend:
        measured = sureness(backend, draft, texts, depths=4)
    assert draft.config.confidence_threshold == 0.9
    draft.config.confidence_threshold = 0.0
    drafted = SpeculativeDecoder(target, draft).generate([t.prompt_ids for t in texts], STOPS)
    first = [generation.rounds[0].accepted for generation in drafted]
    slots = [t for text in texts for t in range(len(text) - 2) if t >= len(text.prompt_ids) - 1]
    assert len(measured.accepted_N) == len(slots)
    assert measured.odds_NK.shape == (len(slots), 4)
    assert not np.isnan(measured.odds_NK[:, 0]).any()
    assert np.isnan(measured.odds_NK[:, 3]).any()  # texts that end before this depth
    assert set(first) <= set(measured.accepted_N.tolist())


def test_temperatures_change_which_tokens_are_dropped():
    target = make_target()
    draft = make_block(target, fit=30, **SPARK)
    with torch.no_grad():  # the same high confidence everywhere
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.bias.fill_(1.0)

    def rounds(threshold, temperature):
        draft.config.confidence_threshold = threshold
        draft.config.confidence_temperatures = [temperature] * 4
        prompts = random_prompts(12)
        generations = SpeculativeDecoder(target, draft).generate(prompts, STOPS)
        return [[r.accepted for r in generation.rounds] for generation in generations]

    assert rounds(0.4, 1e-3) == rounds(0.0, 1.0)  # certain: nothing is dropped
    assert max(map(max, rounds(0.0, 1.0))) > 1
    assert max(map(max, rounds(0.4, 1e3))) == 1  # 0.5 each: the second token stands at 0.25


def test_a_draft_without_a_confidence_head_is_refused():
    target = make_target()
    with pytest.raises(BadInput, match="how sure it is"):
        sureness(HFEagle3TargetModel(target, AUX), make_block(target), [], depths=4)


def test_temperatures_are_judged_on_texts_they_were_not_fitted_to():
    """The stored temperatures are fitted on all texts; each half is judged with the temperatures
    fitted on the other half."""
    target = make_target()
    draft = make_block(target, fit=30, **SPARK)
    live = SpeculativeDecoder(target).generate(random_prompts(12), STOPS)
    texts = [Text(t.prompt_ids, t.token_ids) for t in live if len(t.token_ids) > 1]
    with HFEagle3TargetModel(target, AUX, supervision="hidden") as backend:
        calibration = calibrate(backend, draft, texts, depths=4, batch_tokens=64)
        parts = (texts[::2], texts[1::2], texts)
        even, odd, whole = (sureness(backend, draft, part, depths=4) for part in parts)
    assert calibration.temperatures == pytest.approx(fit_temperatures(whole), rel=1e-3)
    crossed = [even.at(fit_temperatures(odd)), odd.at(fit_temperatures(even))]
    for depth in range(4):
        expected = calibration_error(Sureness.joined(crossed), [], depth)
        assert calibration.error_after[depth] == pytest.approx(expected)
        uncalibrated = calibration_error(whole, [], depth)
        assert calibration.error_before[depth] == pytest.approx(uncalibrated)
