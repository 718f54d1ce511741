"""NaN or infinity anywhere in an answer is detected and reported with its layer and row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.core.batch import SUPERVISIONS, Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.data.pack import Piece, collate
from fledge.target.base import Eagle3TargetBackend, InputEmbedding
from fledge.target.finite_check import (
    NotFinite,
    bad_weight,
    checked_answer,
    finite_rows,
    inspect,
    place_of,
    refusal,
)
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.runner import RunnerEagle3TargetModel
from target.cache.caches import token_row
from target.hf_runner import HFTargetRunner
from target.tiny_models import overflowing, tiny_model

LAYERS = [7, 2, 5]  # not sorted
NAMES = {"hidden": "last hidden state", "logits": "logits", "probs": "probabilities"}
FIELDS = {"hidden": "last_hidden_states", "logits": "logits", "probs": "target_probs"}
BAD = [float("nan"), float("inf"), float("-inf")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def padded(lengths, width):
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return TokenBatch(mask, mask, mask, places=tuple((f"chats:{i}",) for i in range(len(lengths))))


def answer(rows, supervision, dtype, *, width=6):
    """A batch of large, finite numbers; padding holds NaN and infinity."""
    generator = torch.Generator().manual_seed(0)
    shape, top = rows.shape, torch.finfo(dtype).max
    aux = (torch.rand((*shape, 3 * width), generator=generator) * 2 - 1).to(dtype) * top
    states = (torch.rand((*shape, width), generator=generator)).to(dtype) * top
    real = rows.attention_mask.bool()
    aux[~real] = float("nan")
    states[:, 1:][~real[:, 1:]] = float("inf")  # of token t, before the shift
    if supervision == "logits":
        states[..., 1] = float("-inf")  # a masked token
    fields = {FIELDS[supervision]: states}
    if supervision == "probs":
        fields["position_mask"] = torch.ones((*shape, 1), dtype=torch.bool)
    return Eagle3TargetBatch.about(rows, aux_hidden_states=aux, **fields)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_one_bad_number_is_reported_with_its_layer_and_row(data):
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    rows = padded(lengths, 7)
    supervision = data.draw(st.sampled_from(SUPERVISIONS))
    batch = answer(rows, supervision, data.draw(st.sampled_from(DTYPES)))
    assert inspect(batch, 3).fault(LAYERS) is None
    row = data.draw(st.integers(0, len(lengths) - 1))
    token = data.draw(st.integers(0, lengths[row] - 1))
    layer = data.draw(st.integers(0, 3 if token else 2))  # supervision begins with token 1
    at, value = data.draw(st.integers(0, 5)), data.draw(st.sampled_from(BAD))
    if layer < 3:
        batch.aux_hidden_states[row, token, 6 * layer + at] = value
        expected = f"layer {LAYERS[layer]}"
    else:
        value = BAD[0] if supervision == "logits" and value < 0 else value
        getattr(batch, FIELDS[supervision])[row, token - 1, at] = value
        expected = NAMES[supervision]
    verdict = inspect(batch, 3)
    assert bool(verdict.broken)
    fault = verdict.fault(LAYERS)
    assert (fault.layer, fault.row, fault.token) == (expected, row, token)
    line = str(refusal(fault, dtype=verdict.dtype, place=place_of(rows, fault)))
    assert f"not finite in {expected}, row {row} (chats:{row}), token {token}" in line
    assert "\n" not in line


def test_the_lowest_layer_of_the_first_row_is_reported():
    batch = answer(padded([4, 4], 4), "hidden", torch.float32)
    batch.aux_hidden_states[1] = float("nan")
    batch.last_hidden_states[0, 2] = float("nan")
    batch.aux_hidden_states[0, 3, :12] = float("nan")  # layers 7 and 2
    fault = inspect(batch, 3).fault(LAYERS)
    assert (fault.layer, fault.row, fault.token) == ("layer 2", 0, 3)


def test_the_document_within_a_pack_is_reported():
    rows = [token_row([1] * 3, place="a:1"), token_row([1] * 2, place="b:2")]
    pack = collate(rows, [(Piece(0, 3), Piece(1, 2))], 8, pad_id=0)
    for token, place in ((0, "a:1"), (2, "a:1"), (3, "b:2"), (4, "b:2")):
        batch = answer(pack, "hidden", torch.float32)
        batch.aux_hidden_states[0, token, 0] = float("nan")
        assert place_of(pack, inspect(batch, 3).fault(LAYERS)) == place
    batch = answer(pack, "hidden", torch.float32)
    batch.last_hidden_states[0, 2] = float("nan")  # the last slot of a document looks past its end
    assert inspect(batch, 3).fault(LAYERS) is None
    batch.last_hidden_states[0, 3] = float("nan")
    assert inspect(batch, 3).fault(LAYERS).token == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_count_as_finite(dtype):
    """Although their sum overflows."""
    values = torch.full((2, 999), torch.finfo(dtype).max, dtype=dtype)
    values[1] *= -1
    assert finite_rows(values).all()


class ThirdPartyBackend(Eagle3TargetBackend):
    """A third-party backend with the minimum: `generate_batch` with logits, and embeddings."""

    def __init__(self, value):
        super().__init__("logits")
        self.aux_layer_ids, self.value = LAYERS, value

    def generate_batch(self, *tensors):
        batch = answer(TokenBatch(*tensors), "logits", torch.float32)
        batch.aux_hidden_states[1, 2, 8] = self.value
        return batch

    def get_input_embeddings(self):
        return InputEmbedding(torch.zeros(4, 4))


def test_third_party_backends_are_checked_too():
    rows = padded([3, 4], 4)
    assert checked_answer(ThirdPartyBackend(1.0), rows).logits is not None
    with pytest.raises(NotFinite, match=r"not finite in layer 2, row 1 \(chats:1\), token 2"):
        checked_answer(ThirdPartyBackend(float("nan")), rows)


def by_runner(model, **options):
    return RunnerEagle3TargetModel(HFTargetRunner(model), **options)


@pytest.mark.parametrize("supervision", SUPERVISIONS)
@pytest.mark.parametrize("make", [HFEagle3TargetModel, by_runner])
def test_an_overflow_in_a_local_target_is_reported(make, supervision):
    rows = TokenBatch(*(torch.ones((2, 5), dtype=torch.long) for _ in range(3)))
    mask = torch.zeros(97, dtype=torch.bool)
    mask[:9] = True
    for scale, finite in ((1.0, True), (1e30, False)):
        target = make(overflowing(scale), supervision=supervision)  # its head is finite
        target.set_vocab_mapping(torch.arange(9), mask)
        if finite:
            checked_answer(target, rows)
            continue
        with pytest.raises(NotFinite, match=r"not finite in layer 3, row 0, token 0: its numbers"):
            checked_answer(target, rows)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.5.mlp.up_proj.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_reported_by_name(name, value):
    model = tiny_model("llama")
    assert bad_weight(model) is None
    model.get_parameter(name).data[2, 3] = value
    assert bad_weight(model) == name
    with pytest.raises(BadInput, match=f"hold NaN or infinity: tensor {name}"):
        HFEagle3TargetModel(model, supervision="hidden")


def test_a_head_that_overflows_on_its_probe_is_still_a_matrix_product():
    model = tiny_model("llama")
    model.lm_head.weight.data.mul_(1e38)
    assert model.lm_head.weight.isfinite().all()
    assert HFEagle3TargetModel(model, supervision="hidden").info().head.scale == 1.0
