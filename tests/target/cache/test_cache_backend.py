"""The cache as a target: it passes the backend contract and answers like the live target."""

from functools import cache

import numpy as np
import pytest
import torch

from fledge.core.errors import BadInput
from fledge.target.cache.backend import CachedEagle3TargetModel, CachedRows, CacheStore
from fledge.target.hf.model import HFEagle3TargetModel
from target.cache.caches import break_row, every_third, token_row, write_cache
from target.contract import (
    AUX_LAYER_IDS,
    CHECKS,
    Case,
    assert_same,
    draft_vocabulary,
    packed_rows,
    padded_rows,
    some_documents,
)
from target.tiny_models import tiny_model


@cache
def model():
    return tiny_model("llama")


def contract_rows():
    """Every document that the contract's checks ask about."""
    documents = [tokens for row in some_documents() for tokens in row]
    changed = [(token + 5) % 90 for token in some_documents()[0][1]]
    rows = [token_row(tokens, place=f"document {i}") for i, tokens in enumerate(documents)]
    rows.append(token_row(changed, place="changed"))
    for seed in (0, 1):
        for ids, mask, loss in zip(*padded_rows(seed), strict=True):
            n = int(mask.sum())
            rows.append(token_row(ids[:n], loss[:n], place=f"padded {seed}"))
    return rows


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("caches")
    with HFEagle3TargetModel(model(), supervision="hidden") as target:
        for encoding, top_k in (("hidden", None), ("probs", None), ("topk", 33)):
            write_cache(root / encoding, target, contract_rows(), encoding, top_k=top_k)
        write_cache(root / "hidden-fp8", target, contract_rows(), "hidden-fp8")
    return root


# topk keeps the whole draft vocabulary of 33 here: nothing is lost, so it must pass as well
SERVED = [
    ("hidden", "hidden"), ("hidden", "probs"), ("hidden", "logits"), ("probs", "probs"),
    ("topk", "probs"),
]  # fmt: skip


@pytest.mark.parametrize(("encoding", "supervision"), SERVED)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check, encoding, supervision, directory):
    def make(wanted):
        return CachedEagle3TargetModel(directory / encoding, supervision=wanted)

    check(Case("cache", model(), make, supervision, rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("encoding", ["hidden", "probs", "topk"])
def test_packed_answers_match_the_live_target(directory, encoding):
    live = HFEagle3TargetModel(model(), supervision="probs" if encoding[0] != "h" else "hidden")
    cached = CachedEagle3TargetModel(directory / encoding)
    for target in (live, cached):
        target.set_vocab_mapping(*draft_vocabulary(model()))
    rows = packed_rows(some_documents(), 14)
    actual, expected = cached.generate_batch(*rows), live.generate_batch(*rows)
    inside = rows[5] > 0  # the last slot of a document looks past its end and is never charged
    for name, tensor in expected.tensors():
        actual_tensor = dict(actual.tensors())[name]
        assert actual_tensor.dtype == tensor.dtype, name
        per_slot = name in ("target_probs", "position_mask", "last_hidden_states")
        kept = inside if per_slot else rows[1].bool()
        if name == "seq_lens":
            assert torch.equal(actual_tensor, tensor)
        else:
            torch.testing.assert_close(actual_tensor[kept], tensor[kept], rtol=2e-4, atol=5e-5)


def test_a_row_written_alone_is_bitwise_the_live_answer(tmp_path):
    live = HFEagle3TargetModel(model(), supervision="hidden")
    rows = contract_rows()
    write_cache(tmp_path / "c", live, rows, "hidden", batch_size=1)
    cached = CachedEagle3TargetModel(tmp_path / "c")
    for row in rows:
        ids = torch.from_numpy(row.input_ids.astype(np.int64))[None]
        packed = packed_rows([[ids[0].tolist()]], ids.shape[1])
        assert_same(cached.generate_batch(*packed), live.generate_batch(*packed))


def test_fp8_states_are_close_and_in_the_dtype_of_the_target(directory):
    exact = CachedEagle3TargetModel(directory / "hidden")
    small = CachedEagle3TargetModel(directory / "hidden-fp8")
    rows = packed_rows(some_documents(), 14)
    fp8_batch, exact_batch = small.generate_batch(*rows), exact.generate_batch(*rows)
    for name in ("aux_hidden_states", "last_hidden_states"):
        a, b = getattr(fp8_batch, name), getattr(exact_batch, name)
        assert a.dtype == b.dtype == torch.float32
        error = (a - b).norm() / b.norm()
        assert 0.001 < error < 0.04, name


def test_tokens_that_a_batch_does_not_supervise_are_not_charged(directory):
    """A cache of probabilities is asked about fewer supervised tokens than it holds."""
    ids, mask, loss = padded_rows()
    target = CachedEagle3TargetModel(directory / "probs")
    target.set_vocab_mapping(*draft_vocabulary(model()))
    whole = target.generate_batch(ids, mask, loss)
    charged = whole.position_mask[..., 0].nonzero()[0]
    fewer = loss.clone()
    fewer[charged[0], charged[1] + 1] = 0
    batch = target.generate_batch(ids, mask, fewer)
    assert int(whole.position_mask.sum()) - int(batch.position_mask.sum()) == 1
    assert not batch.position_mask[charged[0], charged[1]]
    more = loss.clone()
    more[0, 5] = 1
    with pytest.raises(ValueError, match=r"loss_mask supervises tokens of row .*padded 0"):
        target.generate_batch(ids, mask, more)
    CachedEagle3TargetModel(directory / "hidden").generate_batch(ids, mask, more)


def test_a_cache_of_probabilities_serves_only_its_own_vocabulary(directory):
    with pytest.raises(BadInput, match="a cache of probs holds no hidden"):
        CachedEagle3TargetModel(directory / "probs", supervision="hidden")
    target = CachedEagle3TargetModel(directory / "probs")
    ids = torch.arange(0, 97, 2)
    with pytest.raises(BadInput, match="another draft vocabulary"):
        target.set_vocab_mapping(ids, torch.isin(torch.arange(97), ids))
    assert target.vocabulary.digest() == every_third(97).digest()


def test_rows_of_equal_tokens_are_distinguished_by_their_loss_mask(tmp_path):
    live = HFEagle3TargetModel(model(), supervision="hidden")
    ids = list(range(5, 13))
    rows = [token_row(ids, [0, 0, 0, 0, 0, 0, 1, 1]), token_row(ids, [0, 0, 1, 1, 1, 1, 0, 0])]
    write_cache(tmp_path / "c", live, rows, "probs")
    target = CachedEagle3TargetModel(tmp_path / "c")
    target.set_vocab_mapping(*draft_vocabulary(model()))
    for row in rows:
        tokens = torch.tensor([ids])
        loss = torch.from_numpy(row.loss_mask.astype(np.int64))[None]
        batch = target.generate_batch(tokens, torch.ones_like(tokens), loss)
        sums = batch.target_probs[batch.loss_mask.bool()].sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.fixture
def damaged(tmp_path):
    live = HFEagle3TargetModel(model(), supervision="hidden")
    rows = [token_row(range(3 + i, 9 + i), place=f"chats.jsonl:{i + 1}") for i in range(6)]
    write_cache(tmp_path / "c", live, rows, "hidden")
    break_row(tmp_path / "c", 4)
    return tmp_path / "c", rows


def batch_of(target, row):
    ids = torch.from_numpy(row.input_ids.astype(np.int64))[None]
    return target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))


def test_a_damaged_row_is_reported_by_name(damaged):
    directory, rows = damaged
    target = CachedEagle3TargetModel(directory)
    batch_of(target, rows[3])
    for _ in range(2):
        with pytest.raises(
            BadInput, match=r"row 4 \(chats.jsonl:5; shard-00001.safetensors, row 0"
        ):
            batch_of(target, rows[4])
    target.known_rows().rows[4]  # its tokens are fine
    ahead = CachedEagle3TargetModel(directory)
    CachedRows(ahead.store, reading=True)[4]  # read in the background; reported when needed
    with pytest.raises(BadInput, match=r"chats.jsonl:5"):
        batch_of(ahead, rows[4])


@pytest.mark.parametrize(
    "victim", ["target.safetensors", "manifest.json", "shard-00001.safetensors"]
)
def test_a_cache_with_a_broken_or_missing_file_is_not_opened(damaged, victim):
    directory, _ = damaged
    path = directory / victim
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(BadInput):
        CachedEagle3TargetModel(directory)
    path.unlink()
    with pytest.raises(BadInput, match=r"manifest|embedding|unfinished: 1 of 2 shards"):
        CachedEagle3TargetModel(directory)


def test_rows_of_a_cache_are_the_rows_it_was_made_from(directory):
    rows = CachedRows(CacheStore(directory / "hidden"))
    assert len(rows) == len(contract_rows())
    for actual, expected in zip(rows, contract_rows(), strict=True):
        assert np.array_equal(actual.input_ids, expected.input_ids)
        assert np.array_equal(actual.loss_mask, expected.loss_mask)
        assert (actual.place, actual.truncated) == (expected.place, expected.truncated)
    assert [r.place for r in rows[1:3]] == [r.place for r in contract_rows()[1:3]]
    assert np.array_equal(rows[-1].input_ids, contract_rows()[-1].input_ids)
    with pytest.raises(IndexError):
        rows[len(rows)]
    assert CachedEagle3TargetModel(directory / "hidden").aux_layer_ids == AUX_LAYER_IDS
