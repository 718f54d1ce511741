"""Target batches: exactly one encoding, errors that name the field, conversions."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fledge
from fledge.core.head import TargetHead

ROWS, WIDTH, HIDDEN, VOCABULARY = 2, 5, 4, 11
PACKING = {
    "position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]),
    "seq_lens": torch.tensor([[3, 2], [5, 0]]),
    "doc_remaining": torch.tensor([[2, 1, 0, 1, 0], [4, 3, 2, 1, 0]]),
}


def parts(**changes: Any) -> dict[str, Any]:
    """Arguments of a valid batch in hidden encoding, with `changes` applied."""
    generator = torch.Generator().manual_seed(0)
    valid: dict[str, Any] = {
        "aux_hidden_states": torch.randn(ROWS, WIDTH, 3 * HIDDEN, generator=generator),
        "input_ids": torch.arange(ROWS * WIDTH).view(ROWS, WIDTH),
        "attention_mask": torch.ones(ROWS, WIDTH, dtype=torch.long),
        "loss_mask": torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 0, 0]]),
        "last_hidden_states": torch.randn(ROWS, WIDTH, HIDDEN, generator=generator),
    }
    return valid | changes


def probs_parts(**changes: Any) -> dict[str, Any]:
    probs = {
        "last_hidden_states": None,
        "target_probs": torch.rand(ROWS, WIDTH, 6),
        "position_mask": torch.ones(ROWS, WIDTH, 1, dtype=torch.bool),
    }
    return parts(**probs | changes)


def batch(**changes: Any) -> fledge.Eagle3TargetBatch:
    return fledge.Eagle3TargetBatch(**parts(**changes))


def head(seed: int = 0) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    return TargetHead(
        torch.randn(VOCABULARY, HIDDEN, generator=generator),
        torch.randn(VOCABULARY, generator=generator),
        softcap=2.0,
    )


def vocabulary(ids: tuple[int, ...] = (0, 2, 3, 7)) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[list(ids)] = True
    return torch.tensor(ids), mask


LOGITS = torch.zeros(ROWS, WIDTH, VOCABULARY)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (parts(last_hidden_states=None), "exactly one supervision encoding.*none"),
        (parts(logits=LOGITS), "logits and last_hidden_states"),
        (probs_parts(logits=LOGITS), "logits and target_probs"),
        (probs_parts(position_mask=None), "position_mask"),
        (parts(position_mask=torch.ones(ROWS, WIDTH, 1)), "position_mask"),
        (probs_parts(position_mask=torch.ones(ROWS, WIDTH)), "position_mask"),
        (parts(aux_hidden_states=torch.zeros(ROWS, WIDTH)), "aux_hidden_states"),
        (parts(aux_hidden_states=torch.zeros(ROWS, WIDTH, 9)), "aux_hidden_states"),
        (parts(aux_hidden_states=torch.zeros(ROWS, WIDTH, 12).long()), "aux_hidden_states"),
        (parts(input_ids=torch.zeros(ROWS, WIDTH)), "input_ids"),
        (parts(loss_mask=None), "loss_mask must be a tensor"),
        (parts(aux_hidden_states=None), "aux_hidden_states must be a tensor"),
        (parts(last_hidden_states=torch.zeros(1, WIDTH, HIDDEN)), "last_hidden_states"),
        (parts(last_hidden_states=None, logits=LOGITS[0]), "logits"),
        (parts(last_hidden_states=None, logits=LOGITS.long()), "logits"),
        (probs_parts(target_probs=torch.zeros(ROWS, 1, 6)), "target_probs"),
        (parts(**PACKING | {"position_ids": None}), "position_ids missing"),
        (parts(**PACKING | {"seq_lens": torch.tensor([[3, 1], [5, 0]])}), "seq_lens.*row 0"),
    ],
)
def test_errors_name_the_invalid_field(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fledge.Eagle3TargetBatch(**arguments)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_masks_may_have_any_dtype(dtype: torch.dtype) -> None:
    made = batch(loss_mask=parts()["loss_mask"].to(dtype))
    assert made.with_probs(head(), *vocabulary()).loss_mask.dtype == dtype


def test_to_keeps_probabilities_in_float32() -> None:
    made = batch(**PACKING)
    half = made.to(dtype=torch.bfloat16)
    assert half.aux_hidden_states.dtype == half.last_hidden_states.dtype == torch.bfloat16
    assert half.input_ids.dtype == torch.long
    probs = fledge.Eagle3TargetBatch(**probs_parts()).to("cpu", torch.bfloat16)
    assert probs.target_probs.dtype == torch.float32
    assert made.to("meta").loss_mask.device.type == "meta"
    assert made.nbytes == sum(t.numel() * t.element_size() for _, t in made.tensors())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU driver")
def test_pin_memory() -> None:
    assert all(tensor.is_pinned() for _, tensor in batch(**PACKING).pin_memory().tensors())


@settings(deadline=None, max_examples=25)
@given(
    chunk=st.integers(1, 12),
    ids=st.sets(st.integers(0, VOCABULARY - 1), min_size=1).map(lambda s: tuple(sorted(s))),
    mask=st.lists(st.booleans(), min_size=ROWS * WIDTH, max_size=ROWS * WIDTH),
)
def test_probs_equal_softmax_over_the_selection(
    chunk: int, ids: tuple[int, ...], mask: list[bool]
) -> None:
    made = batch(loss_mask=torch.tensor(mask).view(ROWS, WIDTH), **PACKING)
    selected, member = vocabulary(ids)
    probs = made.with_probs(head(), selected, member, chunk_rows=chunk)
    h = head()
    logits = h.softcap * torch.tanh(
        (made.last_hidden_states @ h.weight_VD.T + h.bias_V) / h.softcap
    )
    supervised = made.loss_mask
    expected = logits[..., selected].softmax(-1) * supervised[..., None]
    torch.testing.assert_close(probs.target_probs, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(probs.position_mask[..., 0], member[logits.argmax(-1)] & supervised)
    assert probs.supervision == "probs"
    assert probs.last_hidden_states is None
    assert probs.seq_lens is made.seq_lens


@pytest.mark.parametrize("chunk", [1, 3, 1024])
def test_logits_from_hidden_have_a_zero_tail(chunk: int) -> None:
    made = batch()
    logits = made.with_logits(head(), chunk_rows=chunk).logits
    expected = head().logits(made.last_hidden_states.flatten(0, 1)).view(ROWS, WIDTH, -1)
    torch.testing.assert_close(logits[:, :-1], expected[:, :-1])
    assert not logits[:, -1].any()


def test_impossible_conversions_are_refused_with_a_reason() -> None:
    probs = batch().with_probs(head(), *vocabulary())
    with pytest.raises(ValueError, match="does not go back"):
        probs.with_logits(head())
    with pytest.raises(ValueError, match="already"):
        probs.with_probs(head(), *vocabulary())
    with pytest.raises(ValueError, match="head"):
        batch().with_probs(None, *vocabulary())
    logits = batch().with_logits(head())
    assert logits.with_logits(head()) is logits


def test_with_probs_never_builds_a_full_vocabulary_tensor() -> None:
    """The largest intermediate tensor is one chunk of logits, not [tokens, V]."""
    rows, vocabulary_size, chunk = 64, 5000, 8
    made = fledge.Eagle3TargetBatch(
        aux_hidden_states=torch.zeros(1, rows, 12),
        input_ids=torch.zeros(1, rows, dtype=torch.long),
        attention_mask=torch.ones(1, rows),
        loss_mask=torch.ones(1, rows),
        last_hidden_states=torch.randn(1, rows, HIDDEN),
    )
    wide = TargetHead(torch.randn(vocabulary_size, HIDDEN))
    member = torch.zeros(vocabulary_size, dtype=torch.bool)
    member[:10] = True
    with LargestTensor() as largest:
        made.with_probs(wide, torch.arange(10), member, chunk_rows=chunk)
    assert largest.elements == chunk * vocabulary_size


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // 4)
        return result
