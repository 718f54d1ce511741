"""Messages round-trip, and malformed ones are refused."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.target.remote.wire import Message, WireError, check_digest, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


@st.composite
def named_tensors(draw):
    count = draw(st.integers(0, 4))
    tensors = {}
    for index in range(count):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
        tensors[f"t{index}"] = torch.randint(0, 100, shape).to(dtype)
    return tensors


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@given(named_tensors(), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
@settings(max_examples=60, deadline=None)
def test_messages_round_trip(tensors, metadata):
    message = Message(tensors, metadata)
    data = bytearray(message.to_bytes())
    assert len(data) == message.nbytes
    check_digest(data)
    unpacked, unpacked_metadata = unpack(data)
    assert unpacked_metadata == metadata
    assert unpacked.keys() == tensors.keys()
    assert all(same(unpacked[name], tensors[name]) for name in tensors)
    # any safetensors reader can load it
    plain = safetensors.torch.load(bytes(data))
    assert all(same(plain[name], tensors[name]) for name in tensors)


def sample():
    return Message({"a": torch.arange(70.0), "b": torch.ones(3, dtype=torch.uint8)}, {"k": "v"})


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_every_flipped_bit_and_every_cut_is_detected(data):
    whole = bytearray(sample().to_bytes())
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        whole = whole[: data.draw(st.integers(16, len(whole) - 1))]
    with pytest.raises(WireError):
        check_digest(whole)


def test_large_tensors_are_sent_in_pieces_without_a_copy():
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    pieces = list(Message({"t": tensor}, {}).chunks())
    assert max(len(piece) for piece in pieces) == 1 << 20
    begin = tensor.data_ptr()
    addresses = [np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces[1:-1]]
    assert addresses == [begin + at for at in range(0, tensor.nbytes, 1 << 20)]


GOOD = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
DIGEST = {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}


def test_unpacked_tensors_are_views():
    data = bytearray(sample().to_bytes())
    tensors, _ = unpack(data)
    tensors["a"][0] = 42.0
    assert unpack(data)[0]["a"][0] == 42.0


@pytest.mark.parametrize(
    "header",
    [
        {"a": {**GOOD, "dtype": "PICKLE"}, "digest": DIGEST},
        {"a": {**GOOD, "shape": [9]}, "digest": {**DIGEST, "shape": [80]}},
        {"a": {**GOOD, "shape": "8"}, "digest": DIGEST},
        {"a": {**GOOD, "data_offsets": [-900]}, "digest": DIGEST},
        {"a": {**GOOD, "shape": [1 << 60, 1 << 60]}, "digest": DIGEST},
        {"a": [1, 2], "digest": DIGEST},
        # torch cannot make an empty tensor whose other sizes overflow
        {"a": {**GOOD, "shape": [0, 2**47, 2**47], "data_offsets": [0, 0]}, "digest": GOOD},
        {"a": GOOD},
        {"__metadata__": [], "a": GOOD, "digest": DIGEST},
        [GOOD],
        b"",
        b"null",
        b"[" * 5000,
        b"\xff\xfe",
        b'{"a": ' + b"9" * 5_000 + b"}",
    ],
)
def test_what_is_not_a_message_is_refused(header):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    text += b" " * (-len(text) % 8)
    with pytest.raises(WireError):
        unpack(bytearray(len(text).to_bytes(8, "little") + text + b"\0" * 16))
