"""The contract every target backend is held to. A new backend joins by adding a `Case`.

Each check takes a `Case` and asserts one promise of `Eagle3TargetBackend` / `Eagle3TargetBatch`;
the reference is a short, independent computation with transformers' own `output_hidden_states`.
`test_target_contract.py` runs every check over every case.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from fledge.core.batch import Eagle3TargetBatch, Supervision
from fledge.core.head import target_distribution
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend

AUX_LAYER_IDS = [1, 3, 4]  # the default of 8 layers


@dataclass(frozen=True)
class Case:
    """One backend in one encoding. `model` is the target as a transformers model, the reference."""

    name: str
    model: Any
    make: Callable[[Supervision], Eagle3TargetBackend]
    supervision: Supervision
    rtol: float = 0.0  # 0: padded rows must equal transformers bit for bit
    atol: float = 0.0

    def backend(self) -> Eagle3TargetBackend:
        """A fresh backend; with `probs`, its draft vocabulary is every third token."""
        backend = self.make(self.supervision)
        backend.set_vocab_mapping(*draft_vocabulary(self.model))
        return backend


def ask(backend: Eagle3TargetBackend, *tensors: Any) -> Eagle3TargetBatch:
    return backend.answer(TokenBatch(*tensors))


CHECKS: list[Callable[[Case], None]] = []


def check(function: Callable[[Case], None]) -> Callable[[Case], None]:
    CHECKS.append(function)
    return function


def draft_vocabulary(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    size = len(model.get_input_embeddings().weight)
    ids = torch.arange(0, size, 3)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[ids] = True
    return ids, mask


def padded_rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three right-padded rows of 11, 7 and 2 tokens; answers begin at the third token."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 90, (3, 11), generator=generator)
    attention_mask = (torch.arange(11) < torch.tensor([[11], [7], [2]])).long()
    loss_mask = attention_mask * (torch.arange(11) >= 2)
    loss_mask[0, 5] = 0
    return input_ids * attention_mask, attention_mask, loss_mask


def packed_rows(
    documents: list[list[list[int]]], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of documents as the six tensors of a `TokenBatch`; everything is supervised."""
    rows, most_documents = len(documents), max(len(row) for row in documents)
    ids, mask, positions, remaining = (torch.zeros((rows, width), dtype=torch.long) for _ in "1234")
    seq_lens = torch.zeros((rows, most_documents), dtype=torch.long)
    for r, row in enumerate(documents):
        begin = 0
        for d, tokens in enumerate(row):
            end = begin + len(tokens)
            ids[r, begin:end] = torch.tensor(tokens)
            mask[r, begin:end] = 1
            positions[r, begin:end] = torch.arange(len(tokens))
            remaining[r, begin:end] = torch.arange(len(tokens)).flip(0)
            seq_lens[r, d] = len(tokens)
            begin = end
        seq_lens[r, len(row) - 1] += width - begin  # trailing padding belongs to the last document
        positions[r, begin:] = torch.arange(width - begin) + len(row[-1])
    return ids, mask, mask.clone(), positions, seq_lens, remaining


def some_documents(seed: int = 0) -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [[3, 2, 6], [12], [5, 1, 4]]
    return [[torch.randint(3, 90, (n,), generator=generator).tolist() for n in r] for r in lengths]


def each_document(
    documents: list[list[list[int]]],
) -> Iterator[tuple[torch.Tensor, tuple[int, slice]]]:
    """Each document as a row of its own, and its place in the packed rows."""
    for row, row_documents in enumerate(documents):
        begin = 0
        for tokens in row_documents:
            yield torch.tensor([tokens]), (row, slice(begin, begin + len(tokens)))
            begin += len(tokens)


def answer(batch: Eagle3TargetBatch) -> torch.Tensor:
    """The batch's supervision, in whichever encoding, at its supervised slots."""
    supervision = batch.logits if batch.logits is not None else batch.last_hidden_states
    if supervision is None:
        supervision = batch.target_probs
    assert supervision is not None
    return supervision[batch.loss_mask.bool()]


@torch.no_grad()
def reference(case: Case, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    return case.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        output_hidden_states=True,
        use_cache=False,
    )


def assert_same(
    actual: Eagle3TargetBatch, expected: Eagle3TargetBatch, slots: Any = ..., **tolerance: float
) -> None:
    """The same tensors, bit for bit or up to a tolerance; of floats only those at `slots`."""
    tensors, expected_tensors = dict(actual.tensors()), dict(expected.tensors())
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        floats = tensor.is_floating_point()
        pair = (t[slots] if floats else t for t in (tensor, expected_tensors[name]))
        bounds = {"rtol": 0.0, "atol": 0.0} | (tolerance if floats else {})
        torch.testing.assert_close(*pair, **bounds, msg=partial("{}: {}".format, name))


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[:, 1:], torch.zeros_like(tensor[:, :1])], dim=1)


@check
def aux_states_are_the_outputs_of_three_layers(case: Case) -> None:
    ids, mask, loss = padded_rows()
    with case.backend() as backend:
        batch = ask(backend, ids, mask, loss)
    states = reference(case, ids, mask).hidden_states
    expected = torch.cat([states[i + 1] for i in AUX_LAYER_IDS], dim=-1)
    assert backend.aux_layer_ids == AUX_LAYER_IDS
    real = mask.bool()
    torch.testing.assert_close(
        batch.aux_hidden_states[real], expected[real], rtol=case.rtol, atol=case.atol
    )


@check
def supervision_is_the_target_shifted_by_one(case: Case) -> None:
    ids, mask, loss = padded_rows()
    with case.backend() as backend:
        batch = ask(backend, ids, mask, loss)
    supervised = batch.loss_mask.bool()
    logits = shifted(reference(case, ids, mask).logits)[supervised]
    if batch.supervision == "logits":
        assert batch.logits is not None
        torch.testing.assert_close(answer(batch), logits, rtol=case.rtol, atol=case.atol)
        return
    # probs and hidden multiply a different set of rows by the head: equal up to rounding
    probs, covered = target_distribution(logits, *draft_vocabulary(case.model))
    if batch.supervision == "hidden":
        with case.backend() as backend:
            batch = batch.with_probs(backend.info().head, *draft_vocabulary(case.model))
    assert batch.position_mask is not None
    torch.testing.assert_close(answer(batch), probs, rtol=1e-5 + case.rtol, atol=1e-6 + case.atol)
    torch.testing.assert_close(batch.position_mask[supervised][:, 0], covered)
    assert not batch.position_mask[~supervised].any()


@check
def tokens_and_loss_mask_shift_and_the_rest_does_not(case: Case) -> None:
    ids, mask, loss = padded_rows()
    originals = ids.clone(), mask.clone(), loss.clone()
    with case.backend() as backend:
        batch = ask(backend, ids, mask, loss)
    assert torch.equal(batch.input_ids, shifted(ids))
    assert torch.equal(batch.loss_mask, shifted(loss))
    assert torch.equal(batch.attention_mask, mask)
    assert all(map(torch.equal, (ids, mask, loss), originals)), "the caller's tensors were changed"
    assert batch.seq_lens is None
    packed = packed_rows(some_documents(), 14)
    with case.backend() as backend:
        batch = ask(backend, *packed)
    assert batch.position_ids is not None
    assert batch.seq_lens is not None
    assert batch.doc_remaining is not None
    assert torch.equal(batch.position_ids, packed[3])
    assert torch.equal(batch.seq_lens, packed[4])
    assert torch.equal(batch.doc_remaining, packed[5])


@check
def same_tokens_give_the_same_batch(case: Case) -> None:
    with case.backend() as backend:
        first = ask(backend, *padded_rows())
        ask(backend, *padded_rows(seed=1))
        again = ask(backend, *padded_rows())
        future = backend.answer_async(TokenBatch(*padded_rows())).result(timeout=60)
    assert_same(again, first)
    assert_same(future, first)
    assert not any(tensor.requires_grad for _, tensor in first.tensors())


@check
def lengths_and_positions_are_enough(case: Case) -> None:
    """`doc_remaining` is derived from them; padded rows may be passed with their positions."""
    rows, packed = padded_rows(), packed_rows(some_documents(), 14)
    positions = torch.arange(rows[0].shape[1]).expand_as(rows[0])
    with case.backend() as backend:
        assert_same(backend.generate_batch(*packed[:5]), ask(backend, *packed))
        padded = ask(backend, *rows)
        positioned = backend.generate_batch(*rows, position_ids=positions)
    assert positioned.position_ids is not None
    assert torch.equal(positioned.position_ids, positions)
    assert_same(replace(positioned, position_ids=None), padded)


@check
def six_arguments_are_the_same_question(case: Case) -> None:
    """`generate_batch`, older than `answer`, is still public and returns the same batch."""
    for tensors in (padded_rows(), packed_rows(some_documents(), 14)):
        with case.backend() as backend:
            expected = ask(backend, *tensors)
            assert_same(backend.generate_batch(*tensors), expected)
            assert_same(backend.generate_batch_async(*tensors).result(timeout=60), expected)


@check
def masks_may_have_any_dtype(case: Case) -> None:
    packed = packed_rows(some_documents(), 14)
    with case.backend() as backend:
        for ids, mask, loss, *packing in (padded_rows(), packed):
            expected = ask(backend, ids, mask, loss, *packing)
            real = mask.bool()
            for dtype in (torch.bool, torch.int32, torch.float32):
                batch = ask(backend, ids, mask.to(dtype), loss.to(dtype), *packing)
                assert batch.loss_mask.dtype == dtype
                assert torch.equal(batch.loss_mask.long(), expected.loss_mask)
                _close(batch.aux_hidden_states[real], expected.aux_hidden_states[real])
                _close(answer(batch).float(), answer(expected).float())


@check
def what_stands_in_the_padding_does_not_matter(case: Case) -> None:
    ids, mask, loss = padded_rows()
    with case.backend() as backend:
        batch = ask(backend, ids, mask, loss)
        other = ask(backend, torch.where(mask.bool(), ids, 7), mask, loss)
    real = mask.bool()
    assert torch.equal(batch.aux_hidden_states[real], other.aux_hidden_states[real])
    assert torch.equal(answer(batch), answer(other))


@check
def packed_documents_equal_documents_alone(case: Case) -> None:
    documents = some_documents()
    with case.backend() as backend:
        packed = ask(backend, *packed_rows(documents, 14))
        for ids, slots in each_document(documents):
            alone = ask(backend, ids, torch.ones_like(ids), torch.ones_like(ids))
            _close(packed.aux_hidden_states[slots], alone.aux_hidden_states[0])
            for name in ("logits", "last_hidden_states", "target_probs"):
                packed_states, alone_states = getattr(packed, name), getattr(alone, name)
                if alone_states is not None:  # the last slot of a document looks past its end
                    _close(packed_states[slots][:-1], alone_states[0, :-1])


@check
def documents_never_see_each_other(case: Case) -> None:
    documents = some_documents()
    changed = [[list(tokens) for tokens in row] for row in documents]
    changed[0][1] = [(token + 5) % 90 for token in changed[0][1]]
    with case.backend() as backend:
        batch = ask(backend, *packed_rows(documents, 14))
        other = ask(backend, *packed_rows(changed, 14))
    untouched = torch.ones(3, 14, dtype=torch.bool)
    untouched[0, 3:5] = False
    same = batch.aux_hidden_states == other.aux_hidden_states
    assert same[untouched].all()
    assert not same[0, 3:5].any(-1).all()


@check
def bad_input_is_refused_by_name(case: Case) -> None:
    ids, mask, loss = padded_rows()
    packed = packed_rows(some_documents(), 14)
    short = packed[4].clone()
    short[0, 0] -= 1
    hole = packed[1].clone()
    hole[0, 1] = 0
    with case.backend() as backend:
        for name, arguments in {
            "input_ids": (ids[0], mask, loss),
            "input_ids ": (ids.float(), mask, loss),
            "input_ids  ": (ids + 10_000, mask, loss),
            "attention_mask": (ids, mask[:, 1:], loss),
            "loss_mask": (ids, mask, loss[:2]),
            "seq_lens missing": (*packed[:4], None, packed[5]),
            "position_ids without seq_lens": packed[:4],
            "seq_lens": (*packed[:4], short, packed[5]),
            "position_ids": (*packed[:3], packed[3] + 1, *packed[4:]),
            "attention_mask ": (packed[0], hole, *packed[2:]),
        }.items():
            with pytest.raises(ValueError, match=name.strip()):
                ask(backend, *arguments)  # type: ignore[arg-type]
        ask(backend, ids, mask, loss)  # the backend still works after the refusals


@check
def probs_need_a_draft_vocabulary(case: Case) -> None:
    ids, mask = draft_vocabulary(case.model)
    with case.make(case.supervision) as backend:
        if case.supervision == "probs":
            with pytest.raises(ValueError, match="set_vocab_mapping"):
                ask(backend, *padded_rows())
        with pytest.raises(ValueError, match="selected_token_mask"):
            backend.set_vocab_mapping(ids[1:], mask)
        with pytest.raises(ValueError, match="selected_token_ids"):
            backend.set_vocab_mapping(ids[None], mask)
        with pytest.raises(ValueError, match="selected_token_ids hold"):
            backend.set_vocab_mapping(ids + case.model.config.vocab_size)
        backend.set_vocab_mapping(ids)  # the mask is derived from the ids
        batch = ask(backend, *padded_rows())
    with case.backend() as backend:
        assert torch.equal(answer(batch), answer(ask(backend, *padded_rows())))


@check
def closing_twice_is_fine_and_use_after_close_is_not(case: Case) -> None:
    backend = case.backend()
    ask(backend, *padded_rows())
    backend.close()
    backend.close()
    for use in (
        lambda: ask(backend, *padded_rows()),
        lambda: backend.generate_batch(*padded_rows()),
        lambda: backend.answer_async(TokenBatch(*padded_rows())).result(timeout=60),
        backend.get_input_embeddings,
        backend.info,
        backend.__enter__,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            use()


@check
def info_tells_what_a_trainer_needs(case: Case) -> None:
    with case.backend() as backend:
        info = backend.info()
        weight = backend.get_input_embeddings().weight
        again = backend.info()
    assert torch.equal(weight, case.model.get_input_embeddings().weight)
    assert (info.vocab_size, info.hidden_size) == info.head.weight_VD.shape
    assert info.depth == 8
    assert info.dtype == torch.float32
    assert info.weight_dtypes == "float32 100.0%"
    assert info.final_norm is not None
    assert info.final_norm.eps is not None
    assert info.final_norm.eps > 0
    assert again.weights_fingerprint == info.weights_fingerprint
    with case.backend() as fresh:
        assert fresh.info().weights_fingerprint == info.weights_fingerprint


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)
