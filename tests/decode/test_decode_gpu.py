"""Decoding on a GPU: every method is lossless, recorded or not, and replay agrees."""

import copy
import warnings

import pytest
import torch

from decode.tiny_decode import AUX, STOPS
from fledge.decode import recorded
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops
from fledge.decode.strategy import TreeShape
from fledge.measure.replay import Text, replay
from fledge.target.hf.model import HFEagle3TargetModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("kind", "method"), [("trained", "chain"), ("deep", "tree"), ("parallel", "parallel")]
)
def test_a_gpu_gives_the_same_output_as_a_cpu(target, drafts, asked, answers, kind, method):
    model, draft = copy.deepcopy(target).cuda(), copy.deepcopy(drafts[kind]).cuda()
    decoder = SpeculativeDecoder(
        model, draft, aux_layer_ids=AUX, method=method, num_draft_tokens=4,
        tree=TreeShape(depth=4, width=3, nodes=9),
    )  # fmt: skip
    generations = decoder.generate(asked[:32], STOPS)
    assert [(text.token_ids, text.finish) for text in generations] == answers[:32]
    assert sum(time.draft_s for time in decoder.timing.each) > 0
    if method != "tree":
        backend = HFEagle3TargetModel(model, AUX, supervision="hidden")
        texts = [Text(text.prompt_ids, text.token_ids) for text in generations]
        replayed = replay(backend, draft, texts, num_draft_tokens=4, method=method)
        assert [text.rounds for text in replayed] == [text.rounds for text in generations]
    drawn = decoder.generate(asked[:8], STOPS, temperature=1.0, seed=3)
    again = decoder.generate(asked[:8], STOPS, temperature=1.0, seed=3)
    assert [text.token_ids for text in drawn] == [text.token_ids for text in again]


def on_gpu(target, draft, method, **options):
    """A decoder in fp32, as with a real target; near ties are rare in these sharp models."""
    model = copy.deepcopy(target).float().cuda()
    return SpeculativeDecoder(
        model, None if draft is None else copy.deepcopy(draft).float().cuda(),
        aux_layer_ids=AUX, method=method, num_draft_tokens=4,
        tree=TreeShape(depth=4, width=3, nodes=9), **options,
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("kind", "method"),
    [(None, None), ("trained", "chain"), ("deep", "tree"), ("parallel", "parallel")],
)
def test_recorded_rounds_match_unrecorded_rounds(
    target, drafts, asked, kind, method, batch, monkeypatch
):
    """Covers caches that grow in the middle of a text and rows that end at different times."""
    monkeypatch.setattr(recorded, "_NARROWEST", 16)
    draft, stops = drafts.get(kind), Stops(40, frozenset({3}))
    recording = on_gpu(target, draft, method)
    unrecorded = on_gpu(target, draft, method, record=False)
    for begin in range(0, 16, batch):
        prompts = asked[begin : begin + batch]
        generations, expected = (
            recording.generate(prompts, stops),
            unrecorded.generate(prompts, stops),
        )
        assert [(text.token_ids, text.finish) for text in generations] == [
            (text.token_ids, text.finish) for text in expected
        ]
        assert [text.rounds for text in generations] == [text.rounds for text in expected]
    assert recording.passes.fixed  # nothing fell back
    recording.generate(asked[:batch], stops)
    again = recording.generate(asked[:batch], stops)
    assert recording.passes.recording_s == 0.0
    assert recording.timing.rounds == max(len(text.rounds) for text in again) or kind is None
    target_s = sum(time.target_s for time in recording.timing.each)
    assert 0 < target_s <= recording.timing.decode_s


def test_a_round_synchronizes_once(target, drafts, asked):
    """With everything recorded, only reading a round's tokens synchronizes with the GPU."""
    recording = on_gpu(target, drafts["random"], "chain")
    counts = []
    for length in (60, 10, 60):  # the first text records
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                recording.generate(asked[:1], Stops(length))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        syncs = [warning for warning in caught if "synchronizing" in str(warning.message)]
        counts.append((len(syncs), recording.timing.rounds))
    (few, short), (many, long) = counts[1:]
    assert recording.passes.recording_s == 0.0
    assert long > short
    assert many - few == long - short


def test_a_pass_that_synchronizes_falls_back(target, drafts, asked, answers, caplog):
    recording = on_gpu(target, drafts["trained"], "chain")
    layer = recording.target.model.model.layers[1]
    handle = layer.register_forward_hook(lambda module, args, out: out * float(out.sum() > -1e30))
    generations = recording.generate(asked[:4], STOPS)
    handle.remove()
    assert [(text.token_ids, text.finish) for text in generations] == answers[:4]
    assert not recording.passes.fixed
    assert len([line for line in caplog.messages if "could not be recorded" in line]) == 1
    after = on_gpu(target, drafts["trained"], "chain")  # the GPU still records
    generations = after.generate(asked[:4], STOPS)
    assert [(text.token_ids, text.finish) for text in generations] == answers[:4]
    assert after.passes.fixed
