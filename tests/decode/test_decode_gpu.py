"""The same on a GPU: every method says what the target says, recorded or not; replay agrees."""

import copy
import warnings

import pytest
import torch

from decode.tiny_decode import AUX, STOPS
from fledge.decode import recorded
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops
from fledge.decode.strategies.shape import TreeShape
from fledge.measure.replay import Text, replay
from fledge.target.hf.model import HFEagle3TargetModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("kind", "method"), [("trained", "chain"), ("deep", "tree"), ("parallel", "parallel")]
)
def test_a_gpu_says_what_the_cpu_says(target, drafts, asked, answers, kind, method):
    model, draft = copy.deepcopy(target).cuda(), copy.deepcopy(drafts[kind]).cuda()
    decoder = SpeculativeDecoder(
        model, draft, aux_layer_ids=AUX, method=method, num_draft_tokens=4,
        tree=TreeShape(depth=4, width=3, nodes=9),
    )  # fmt: skip
    found = decoder.generate(asked[:32], STOPS)
    assert [(one.token_ids, one.finish) for one in found] == answers[:32]
    assert decoder.timing.draft_s > 0
    if method != "tree":
        backend = HFEagle3TargetModel(model, AUX, supervision="hidden")
        texts = [Text(one.prompt_ids, one.token_ids) for one in found]
        replayed = replay(backend, draft, texts, num_draft_tokens=4, method=method)
        assert [one.rounds for one in replayed] == [one.rounds for one in found]
    drawn = decoder.generate(asked[:8], STOPS, temperature=1.0, seed=3)
    again = decoder.generate(asked[:8], STOPS, temperature=1.0, seed=3)
    assert [one.token_ids for one in drawn] == [one.token_ids for one in again]


def on_gpu(target, draft, method, **options):
    """fp32, as the kernels of a real target; near ties are rare in these sharp models."""
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
def test_recorded_rounds_are_the_rounds(target, drafts, asked, kind, method, batch, monkeypatch):
    """Caches that grow in the middle of a text, rows that end at different times."""
    monkeypatch.setattr(recorded, "_NARROWEST", 16)
    draft, stops = drafts.get(kind), Stops(40, frozenset({3}))
    ours = on_gpu(target, draft, method)
    plainly = on_gpu(target, draft, method, record=False)
    for begin in range(0, 16, batch):
        prompts = asked[begin : begin + batch]
        found, want = ours.generate(prompts, stops), plainly.generate(prompts, stops)
        assert [(one.token_ids, one.finish) for one in found] == [
            (one.token_ids, one.finish) for one in want
        ]
        assert [one.rounds for one in found] == [one.rounds for one in want]
    assert ours.passes.fixed  # nothing fell back
    ours.generate(asked[:batch], stops)
    again = ours.generate(asked[:batch], stops)
    assert ours.timing.recording_s == 0.0
    assert ours.timing.rounds == max(len(one.rounds) for one in again) or kind is None
    assert 0 < ours.timing.target_s <= ours.timing.decode_s


def test_a_round_waits_once(target, drafts, asked):
    """With everything recorded, only the tokens of a round make Python wait."""
    ours = on_gpu(target, drafts["random"], "chain")
    counts = []
    for length in (60, 10, 60):  # the first one records
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                ours.generate(asked[:1], Stops(length))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [one for one in heard if "synchronizing" in str(one.message)]
        counts.append((len(waits), ours.timing.rounds))
    (few, short), (many, long) = counts[1:]
    assert ours.timing.recording_s == 0.0
    assert long > short
    assert many - few == long - short


def test_a_pass_that_waits_falls_back(target, drafts, asked, answers, caplog):
    ours = on_gpu(target, drafts["trained"], "chain")
    layer = ours.target.model.model.layers[1]
    handle = layer.register_forward_hook(lambda module, args, out: out * float(out.sum() > -1e30))
    found = ours.generate(asked[:4], STOPS)
    handle.remove()
    assert [(one.token_ids, one.finish) for one in found] == answers[:4]
    assert not ours.passes.fixed
    assert len([line for line in caplog.messages if "could not be recorded" in line]) == 1
    after = on_gpu(target, drafts["trained"], "chain")  # the GPU is none the worse for it
    found = after.generate(asked[:4], STOPS)
    assert [(one.token_ids, one.finish) for one in found] == answers[:4]
    assert after.passes.fixed
