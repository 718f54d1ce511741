"""A served target that overflows: a one-line error reply, no NaN on the wire, no retry."""

import json
import urllib.error
import urllib.request

import pytest
import torch
from servers import running

from fledge.core.rows import TokenBatch
from fledge.target.finite_check import NotFinite
from fledge.target.remote.client import RemoteEagle3TargetModel
from fledge.target.remote.protocol import Question
from target.tiny_models import tiny_model


def overflowing(dtype=torch.float32):
    """A model whose layer 3 overflows float32, or only float16 (numbers near 1e6)."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(1e30 if dtype == torch.float32 else 1e3)
        model.model.layers[3].mlp.down_proj.weight.mul_(1e30 if dtype == torch.float32 else 1e3)
    return model


def rows():
    ids = torch.arange(3, 13).view(2, 5)
    return TokenBatch(ids, torch.ones_like(ids), torch.ones_like(ids))


def vocabulary(target):
    mask = torch.zeros(97, dtype=torch.bool)
    mask[:9] = True
    target.set_vocab_mapping(torch.arange(9), mask)


@pytest.mark.parametrize("supervision", ["hidden", "probs", "topk"])
def test_an_overflow_is_reported_at_once_in_one_line(supervision):
    with (
        running(model=overflowing()) as server,
        RemoteEagle3TargetModel(server.url, supervision=supervision, top_k=3) as target,
    ):
        vocabulary(target)
        with pytest.raises(NotFinite, match="not finite in layer 3, row 0, token 0") as caught:
            target.answer(rows())
        assert str(caught.value).startswith(server.url)
        question = Question("a" * 16, rows()).to_message().to_bytes()
        request = urllib.request.Request(f"{server.url}/v1/generate", question)
        with pytest.raises(urllib.error.HTTPError) as reply:
            urllib.request.urlopen(request)
        assert reply.value.code == 500
        assert "not finite in layer 3" in json.loads(reply.value.read())["error"]


def test_a_wire_dtype_that_is_too_narrow_is_reported():
    with running(model=overflowing(torch.float16)) as server:
        with RemoteEagle3TargetModel(server.url) as target:
            wide = target.answer(rows())
            assert wide.aux_hidden_states.isfinite().all()
            assert wide.aux_hidden_states.max() > 65504
        with (
            RemoteEagle3TargetModel(server.url, dtype="float16") as target,
            pytest.raises(NotFinite, match="float16 overflows"),
        ):
            target.answer(rows())


def test_a_head_that_overflows_while_computing_probabilities_is_reported():
    model = tiny_model("llama")
    model.lm_head.weight.data.mul_(1e38)
    with (
        running(model=model) as server,
        RemoteEagle3TargetModel(server.url, supervision="probs") as target,
    ):
        vocabulary(target)
        with pytest.raises(NotFinite, match="not finite in probabilities, row 0, token 1"):
            target.answer(rows())


def test_questions_merged_with_an_overflowing_one_are_answered():
    """A question merged with a broken one is retried alone and gets its answer."""

    class NaNForToken90:
        def __init__(self, inner):
            self.__dict__.update(inner.__dict__)
            self.inner, self.supervision = inner, inner.supervision

        def answer(self, batch):
            answered = self.inner.answer(batch)
            answered.aux_hidden_states[batch.input_ids[:, 0] == 90] = float("nan")
            return answered

        def __getattr__(self, name):
            return getattr(self.inner, name)

    from fledge.target.hf.model import HFEagle3TargetModel

    backend = NaNForToken90(HFEagle3TargetModel(tiny_model("llama"), supervision="hidden"))
    bad = rows()
    bad.input_ids[1, 0] = 90
    with (
        running(backend=backend) as server,
        RemoteEagle3TargetModel(server.url, merge=True, prefetch=4) as target,
    ):
        futures = [target.answer_async(bad if i == 1 else rows()) for i in range(4)]
        for i, future in enumerate(futures):
            if i == 1:
                with pytest.raises(NotFinite, match="not finite in layer 1, row 1, token 0"):
                    future.result(30)
            else:
                assert future.result(30).aux_hidden_states.isfinite().all()
