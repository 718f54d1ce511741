"""The remote backend equals the local one: the contract, bit-for-bit answers, and what is sent."""

import json

import pytest
import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.head import TargetHead
from fledge.core.rows import TokenBatch
from fledge.target.finite_check import NotFinite
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.remote.client import RemoteEagle3TargetModel
from fledge.target.remote.protocol import Question, WireShape, encode_answer
from target.contract import (
    CHECKS,
    Case,
    assert_same,
    draft_vocabulary,
    packed_rows,
    padded_rows,
    some_documents,
)
from target.remote.servers import call, question, running, tiny
from target.tiny_models import overflowing


def remote(server, supervision="hidden", **options):
    options = {"timeout_s": 30.0, "wait_s": 5.0, **options}
    target = RemoteEagle3TargetModel(server.url, supervision=supervision, **options)
    target.set_vocab_mapping(*draft_vocabulary(tiny()))
    return target


def local(supervision="hidden"):
    target = HFEagle3TargetModel(tiny(), supervision=supervision)
    target.set_vocab_mapping(*draft_vocabulary(tiny()))
    return target


ROWS = {"padded": padded_rows(), "packed": packed_rows(some_documents(), 14)}


@pytest.mark.parametrize("supervision", ["hidden", "probs", "logits"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(server, check, supervision):
    def make(wanted):
        options = {"timeout_s": 30.0, "wait_s": 5.0}
        return RemoteEagle3TargetModel(server.url, supervision=wanted, **options)

    rounding = 1e-5 if supervision == "logits" else 0.0  # its head multiplies other rows
    check(Case("remote", tiny(), make, supervision, rtol=rounding, atol=rounding))


@pytest.mark.parametrize("supervision", ["hidden", "probs"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
def test_remote_equals_local_bit_for_bit(server, rows, supervision):
    with remote(server, supervision) as target:
        assert_same(target.generate_batch(*rows), local(supervision).generate_batch(*rows))


def test_topk_keeps_the_largest(server):
    with remote(server, "topk", top_k=5) as target:
        batch = target.generate_batch(*ROWS["packed"])
    whole = local("probs").generate_batch(*ROWS["packed"])
    top, ids = whole.target_probs.topk(5, dim=-1)
    kept = torch.zeros_like(whole.target_probs).scatter_(-1, ids, top)
    kept = kept / kept.sum(-1, keepdim=True).clamp_min(1e-30)
    torch.testing.assert_close(batch.target_probs, kept, rtol=1e-6, atol=1e-7)
    assert torch.equal(batch.position_mask, whole.position_mask)


def test_half_precision_on_the_wire_rounds_the_states(server):
    with remote(server, dtype="bfloat16") as target:
        batch = target.generate_batch(*ROWS["packed"])
    expected = local().generate_batch(*ROWS["packed"])
    assert torch.equal(batch.aux_hidden_states, expected.aux_hidden_states.bfloat16())
    assert torch.equal(batch.last_hidden_states, expected.last_hidden_states.bfloat16())


def test_message_size_stays_within_the_announced_bound():
    """hidden, bfloat16, 8B shape: at most 34 kB per token, and the client's bound is tight."""
    hidden, tokens = 4096, 64
    ids = torch.ones(1, tokens, dtype=torch.long)
    rows = TokenBatch(ids, ids, ids)
    batch = Eagle3TargetBatch(
        aux_hidden_states=torch.zeros(1, tokens, 3 * hidden, dtype=torch.bfloat16),
        last_hidden_states=torch.zeros(1, tokens, hidden, dtype=torch.bfloat16),
        input_ids=ids, attention_mask=ids, loss_mask=ids,
    )  # fmt: skip
    question = Question("0" * 32, rows)
    message = encode_answer(batch, question, TargetHead(torch.zeros(2, hidden)))
    assert 4 * 2 * hidden * tokens < message.nbytes <= 34_000 * tokens
    bound = WireShape("hidden", torch.bfloat16, hidden, 3).answer_bytes(tokens, tokens)
    assert message.nbytes <= bound <= message.nbytes + 4096


# --- a target that overflows: one line, no NaN on the wire, no retry -----------------------------


@pytest.mark.parametrize("supervision", ["hidden", "probs", "topk"])
def test_an_overflow_is_reported_at_once_in_one_line(supervision):
    with (
        running(model=overflowing()) as server,
        remote(server, supervision, top_k=3) as target,
    ):
        with pytest.raises(NotFinite, match="not finite in layer 3, row 0, token 0") as caught:
            target.generate_batch(*padded_rows())
        assert str(caught.value).startswith(server.url)
        status, _, data = call(server, "/v1/generate", question())
        assert status == 500
        assert "not finite in layer 3" in json.loads(data)["error"]


def test_a_wire_dtype_that_is_too_narrow_is_reported():
    with running(model=overflowing(1e3)) as server:
        with remote(server) as target:
            wide = target.generate_batch(*padded_rows())
            assert wide.aux_hidden_states.isfinite().all()
            assert wide.aux_hidden_states.max() > 65504
        with (
            remote(server, dtype="float16") as target,
            pytest.raises(NotFinite, match="float16 overflows"),
        ):
            target.generate_batch(*padded_rows())
