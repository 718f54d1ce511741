"""A served target that overflows: an error reply of one line, no bytes with NaN, no second try."""

import json
import urllib.error
import urllib.request

import pytest
import torch
from servers import running

from fledge.core.rows import TokenBatch
from fledge.target.finite import NotFinite
from fledge.target.remote.client import RemoteEagle3TargetModel
from fledge.target.remote.protocol import Question
from target.tiny_models import tiny_model


def overflowing(dtype=torch.float32):
    """Layer 3 makes numbers near 1e6, or beyond all measure."""
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
def test_one_line_at_once(supervision):
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


def test_a_precision_of_the_wire_that_is_too_narrow():
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


def test_a_head_that_overflows_where_probabilities_are_made():
    model = tiny_model("llama")
    model.lm_head.weight.data.mul_(1e38)
    with (
        running(model=model) as server,
        RemoteEagle3TargetModel(server.url, supervision="probs") as target,
    ):
        vocabulary(target)
        with pytest.raises(NotFinite, match="not finite in probabilities, row 0, token 1"):
            target.answer(rows())


def test_others_are_answered_beside_it():
    """A question merged with a broken one is asked again alone, and gets its answer."""

    class Sometimes:
        def __init__(self, inner):
            self.__dict__.update(inner.__dict__)
            self.inner, self.supervision = inner, inner.supervision

        def answer(self, batch):
            found = self.inner.answer(batch)
            found.aux_hidden_states[batch.input_ids[:, 0] == 90] = float("nan")
            return found

        def __getattr__(self, name):
            return getattr(self.inner, name)

    from fledge.target.hf.model import HFEagle3TargetModel

    backend = Sometimes(HFEagle3TargetModel(tiny_model("llama"), supervision="hidden"))
    bad = rows()
    bad.input_ids[1, 0] = 90
    with (
        running(backend=backend) as server,
        RemoteEagle3TargetModel(server.url, merge=True, prefetch=4) as target,
    ):
        asked = [target.answer_async(bad if i == 1 else rows()) for i in range(4)]
        for i, future in enumerate(asked):
            if i == 1:
                with pytest.raises(NotFinite, match="not finite in layer 1, row 1, token 0"):
                    future.result(30)
            else:
                assert future.result(30).aux_hidden_states.isfinite().all()
