"""Shards: laid out as predicted, readable by safetensors, and every changed byte is detected."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fledge.core.errors import BadInput
from fledge.target.cache import format as cache_codec
from fledge.target.cache.format import (
    ENCODINGS,
    CacheShape,
    decode_states,
    from_fp8,
    keep_top,
    row_key,
    to_fp8,
)
from fledge.target.cache.shard import Shard, is_whole_shard, layout_of, open_shard
from target.cache.caches import token_row

D, W, K = 6, 10, 3


def shape_for(encoding, dtype=torch.float32):
    width = W if encoding in ("probs", "topk") else 0
    return CacheShape(encoding, dtype, D, 3, width, K if encoding == "topk" else 0)


def random_rows(rng, lengths):
    rows = []
    for i, n in enumerate(lengths):
        ids, mask = rng.integers(0, 1000, n), rng.integers(0, 2, n)
        rows.append(token_row(ids, mask, f"file.jsonl:{i} ü"))
    return rows


def random_payload(shape, row, seed):
    """Random bytes, except that ids must be valid: a shard checks nothing else."""
    generator = torch.Generator().manual_seed(seed)
    tokens, slots = len(row.input_ids), len(shape.slots(row.loss_mask))
    counted = [(f, tokens) for f in shape.token_fields()]
    counted += [(f, slots) for f in shape.slot_fields()]
    payload = {
        field.name: torch.randint(0, 120, (n, field.row_bytes), generator=generator)
        .to(torch.uint8)
        .view(field.dtype)
        for field, n in counted
    }
    if (ids := payload.get("topk_ids")) is not None:
        ids.remainder_(shape.draft_vocab_size)
    return payload


def write(path, shape, rows, order=None):
    payloads = [random_payload(shape, row, seed) for seed, row in enumerate(rows)]
    layout = layout_of(shape, rows)
    with open_shard(path, layout, rows) as shard:
        for i in order if order is not None else range(len(rows)):
            shard.put(i, payloads[i])
    return layout, payloads


def same_bits(a, b):
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(ENCODINGS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.randoms(use_true_random=False),
)
def test_a_shard_is_a_safetensors_file_and_reads_back_row_by_row(
    tmp_path_factory, encoding, dtype, lengths, random
):
    path = tmp_path_factory.mktemp("shard") / "shard-00000.safetensors"
    shape = shape_for(encoding, dtype)
    rows = random_rows(np.random.default_rng(len(lengths)), lengths)
    order = list(range(len(rows)))
    random.shuffle(order)
    layout, payloads = write(path, shape, rows, order)
    assert path.stat().st_size == layout.n_bytes  # predicted before a byte was written
    assert is_whole_shard(path, layout)
    tensors = load_file(path)
    for name in payloads[0]:
        whole = torch.cat([p[name].view(torch.uint8) for p in payloads])
        assert same_bits(tensors[name], whole), name
    shard = Shard(path, shape)
    assert shard.places == [row.place for row in rows]
    for i, row in enumerate(rows):
        ids, mask = shard.tokens(i)
        assert np.array_equal(ids, row.input_ids)
        assert np.array_equal(mask, row.loss_mask)
        assert shard.keys[i].tobytes() == row_key(row.input_ids)
        assert shard.is_whole(i)
        for name, tensor in payloads[i].items():
            assert shard.payload(name, i).tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_the_worked_example_of_the_module(tmp_path):
    row = token_row([10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 1, 1])
    assert shape_for("hidden").slots(row.loss_mask).tolist() == [0, 1, 2, 3, 4]
    for compact in (shape_for("probs"), shape_for("topk")):
        assert compact.slots(row.loss_mask).tolist() == [1, 2, 3, 4]
    # the first token is never asked for, supervised or not
    assert shape_for("probs").slots(np.array([1, 1], np.uint8)).tolist() == [0]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_changed_byte_of_a_row_is_detected(tmp_path, encoding):
    path = tmp_path / "shard-00000.safetensors"
    shape, rng = shape_for(encoding), np.random.default_rng(0)
    rows = random_rows(rng, [5, 3, 4])
    layout, _ = write(path, shape, rows)
    whole = bytearray(path.read_bytes())
    names = [*(f.name for f in shape.token_fields()), *(f.name for f in shape.slot_fields())]
    places = [(layout.span(name, 1), 1) for name in names]
    for name, width in (("input_ids", 4), ("loss_mask", 1)):
        begin = layout.extent[name][0]
        places.append(((begin + 5 * width, begin + 8 * width), 1))
    for (begin, end), row in places:
        for at in range(begin, end):
            broken = bytearray(whole)
            broken[at] ^= 1
            path.write_bytes(broken)
            shard = Shard(path, shape)
            assert [shard.is_whole(i) for i in range(3)] == [i != row for i in range(3)], at


def test_shards_are_also_written_where_space_cannot_be_reserved(tmp_path, monkeypatch):
    rows = random_rows(np.random.default_rng(0), [5, 3])
    write(tmp_path / "reserved", shape_for("hidden"), rows)
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    write(tmp_path / "plain", shape_for("hidden"), rows)
    assert len((tmp_path / "plain").read_bytes()) == len((tmp_path / "reserved").read_bytes())
    shard = Shard(tmp_path / "plain", shape_for("hidden"))
    assert shard.is_whole(0)
    assert shard.is_whole(1)


def test_damage_to_the_header_or_size_is_refused(tmp_path):
    path = tmp_path / "shard-00000.safetensors"
    shape = shape_for("hidden")
    layout, _ = write(path, shape, random_rows(np.random.default_rng(0), [5, 3]))
    whole = path.read_bytes()
    header = bytearray(whole)
    header[30] ^= 1
    for broken in (whole[:-1], whole + b"\0", whole[:4], b"", bytes(header)):
        path.write_bytes(broken)
        assert not is_whole_shard(path, layout)
        with pytest.raises(BadInput, match="shard"):
            Shard(path, shape)
    path.write_bytes(whole)
    with pytest.raises(BadInput, match="shard"):
        Shard(path, shape_for("hidden", torch.bfloat16))


def test_an_unfinished_shard_never_appears(tmp_path):
    path = tmp_path / "shard-00000.safetensors"
    shape, rows = shape_for("hidden"), random_rows(np.random.default_rng(0), [5, 3])
    layout = layout_of(shape, rows)
    unfinished = pytest.raises(AssertionError, match="never written")
    with unfinished, open_shard(path, layout, rows) as shard:
        shard.put(0, random_payload(shape, rows[0], 0))
    with pytest.raises(ValueError, match="bytes"), open_shard(path, layout, rows) as shard:
        shard.put(0, random_payload(shape, rows[1], 0))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_stored_is_refused():
    with pytest.raises(BadInput, match="draft vocabulary"):
        CacheShape("probs", torch.float32, D, 3)
    with pytest.raises(BadInput, match="11 probabilities"):
        CacheShape("topk", torch.float32, D, 3, 10, 11)


@settings(max_examples=50, deadline=None)
@given(st.integers(-120, 120), st.integers(0, 10_000))
def test_fp8_keeps_four_bits_of_every_state_whatever_its_size(exponent, seed):
    torch.manual_seed(seed)
    states = torch.randn(7, 12) * 2.0**exponent
    states[:, 0] *= 50  # a massive channel
    states[3, 4:8] = 0  # a chunk of zeros
    coded, scale = to_fp8(states, 3)
    assert coded.dtype == torch.float8_e4m3fn
    assert scale.shape == (7, 3)
    back = from_fp8(coded, scale, torch.float32)
    chunk_max = states.view(7, 3, 4).abs().amax(-1, keepdim=True).expand(7, 3, 4).reshape(7, 12)
    # half a step: 2^-4 relative, and 2^-10 of 1/448 of the chunk's largest among subnormals
    bound = states.abs() * 2.0**-4 * 1.001 + chunk_max / 448 * 2.0**-10 * 1.001
    assert ((back - states).abs() <= bound + 1e-45).all()
    assert (back[3, 4:8] == 0).all()
    # scales belong to their own chunk: changing one leaves the others alone
    changed = states.clone()
    changed[:, 8:] *= 1000
    assert torch.equal(to_fp8(changed, 3)[1][:, :2], scale[:, :2])


def test_top_k_is_renormalized_and_decoded_in_place():
    torch.manual_seed(0)
    probs = torch.softmax(3 * torch.randn(5, W), -1)
    top, ids = keep_top(probs, K)
    torch.testing.assert_close(top.sum(-1), torch.ones(5))
    stored = {
        "aux_hidden_states": torch.zeros(5, 3 * D), "topk_probs": top,
        "topk_ids": ids.to(torch.int32), "position_mask": torch.ones(5, 1, dtype=torch.uint8),
    }  # fmt: skip
    back = decode_states(stored, shape_for("topk"), torch.float32)["target_probs"]
    kept = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, probs.topk(K).indices, True)
    expected = torch.where(kept, probs, 0)
    torch.testing.assert_close(back, expected / expected.sum(-1, keepdim=True))


@pytest.mark.parametrize("block", [1, 1000, 1 << 19])
def test_every_8_bit_number_is_decoded_as_torch_does(monkeypatch, block):
    """Number times scale in float32, rounded once, for the smallest and largest scales too."""
    monkeypatch.setattr(cache_codec, "_CPU_BLOCK", block)  # rows at once: 1, 3 of 130, all
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # its NaNs are never written
    states = codes.view(torch.float8_e4m3fn)[None].repeat(130, 1)
    scale = torch.logspace(-44, 36, 130 * 2, dtype=torch.float64).float().view(130, 2)
    scale[0, 0], scale[-1, -1] = 1e-45, torch.finfo(torch.float32).max / 448
    want = states.float().view(130, 2, -1) * scale[..., None]
    assert want.isfinite().all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = from_fp8(states, scale, dtype)
        assert torch.equal(got, want.flatten(1).to(dtype))
        assert torch.equal(got.signbit(), want.flatten(1).signbit())
