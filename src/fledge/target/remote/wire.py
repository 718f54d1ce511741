"""Tensors on the wire: one safetensors file whose last tensor is the digest of all before it.

Any safetensors reader can load a message; nothing in it can be executed. The sender reads the
tensors in place and hashes each piece just before sending it; the receiver hashes each piece as it
arrives. So neither side holds a second copy, and the check costs almost nothing (XXH3, tens of
GB/s). Truncation and corruption are detected; forgery is not the concern here, but that of TLS and
the token.

    8 bytes   length of the header, little endian
    header    JSON: name -> dtype, shape, offsets; `__metadata__`: strings. Padded with spaces
    data      tensors end to end, widest numbers first, so that each is aligned to its own width
    8 bytes   the tensor `digest`: XXH3-64 of everything above, little endian
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from fledge.target.cache.format import SAFETENSORS, safetensors_header

DIGEST = "digest"
DIGEST_BYTES = 8
CHUNK_BYTES = 1 << 20  # hashed and passed to the socket at once: fits an L2 cache
_MAX_HEADER_BYTES = 1 << 20
_DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}

Buffer = bytearray | memoryview  # writable memory that tensors may keep as their storage


class WireError(ValueError):
    """The bytes are not a complete, valid message."""


class Message:
    """Tensors and strings, ready to be sent without copying the tensors' memory."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        assert DIGEST not in tensors, f"{DIGEST} is the message's own tensor"
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
        flat = (tensor.detach().cpu().contiguous().flatten() for _, tensor in ordered)
        self._parts = [values.view(torch.uint8).numpy().data for values in flat]
        shapes = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in ordered]
        shapes.append((DIGEST, torch.uint8, [DIGEST_BYTES]))
        self._header = safetensors_header(shapes, dict(metadata))
        self.nbytes = len(self._header) + sum(map(len, self._parts)) + DIGEST_BYTES

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in order, in pieces of at most `CHUNK_BYTES`; the digest is the last one."""
        digest = xxhash.xxh3_64()
        for part in (memoryview(self._header), *self._parts):
            for begin in range(0, len(part), CHUNK_BYTES):
                piece = part[begin : begin + CHUNK_BYTES]
                digest.update(piece)
                yield piece
        yield memoryview(digest.digest()[::-1])

    def to_bytes(self) -> bytes:
        """The whole message as one copy, for small messages."""
        return b"".join(self.chunks())


class DigestCheck:
    """Computes the digest of a message of known length as it arrives."""

    def __init__(self, nbytes: int) -> None:
        self._left, self._digest = nbytes - DIGEST_BYTES, xxhash.xxh3_64()

    def update(self, piece: memoryview) -> None:
        covered = piece[: max(0, self._left)]
        self._digest.update(covered)
        self._left -= len(covered)

    def finish(self, message: Buffer) -> None:
        """Compare with the digest at the end of the message; raises if they differ."""
        if self._left or bytes(message[-DIGEST_BYTES:]) != self._digest.digest()[::-1]:
            raise WireError("the digest does not fit: bytes were lost or changed on the way")


def check_digest(message: Buffer) -> None:
    check = DigestCheck(len(message))
    check.update(memoryview(message))
    check.finish(message)


def unpack(message: Buffer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (views of `message`, which they keep alive) and strings of a message. Its bytes
    are not trusted. The digest is not compared here: see `DigestCheck`."""
    begin, header = _read_header(message)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WireError("__metadata__ must map names to strings")
    tensors, at = {}, 0
    for name, entry in header.items():
        dtype, shape, end = _read_entry(name, entry, at)
        if begin + end > len(message):
            raise WireError(f"{name} ends after the message does")
        count = math.prod(shape)
        if count == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
        else:
            flat = torch.frombuffer(message, dtype=dtype, count=count, offset=begin + at)
            tensors[name] = flat.view(shape)
        at = end
    if begin + at != len(message):
        raise WireError(f"{len(message) - begin - at} bytes follow the last tensor")
    if tensors.pop(DIGEST, None) is None:
        raise WireError(f"the {DIGEST} is missing")
    return tensors, metadata


def _read_header(message: Buffer) -> tuple[int, dict[str, Any]]:
    if len(message) < 8 + DIGEST_BYTES:
        raise WireError(f"{len(message)} bytes are not a message")
    length = int.from_bytes(message[:8], "little")
    if length > min(_MAX_HEADER_BYTES, len(message) - 8) or length % 8:
        raise WireError(f"a header of {length} bytes does not fit")
    try:
        header = json.loads(bytes(message[8 : 8 + length]))
    except (ValueError, RecursionError):
        raise WireError("the header is not JSON") from None
    if not isinstance(header, dict):
        raise WireError("the header is not a mapping")
    return 8 + length, header


def _read_entry(name: str, entry: Any, at: int) -> tuple[torch.dtype, list[int], int]:
    """(dtype, shape, end) of a tensor that must begin at byte `at` of the data."""
    try:
        dtype, shape, (first, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        valid = all(type(n) is int and 0 <= n < 2**48 for n in (*shape, first, end))
    except (KeyError, TypeError, ValueError):
        raise WireError(f"the header's entry {name!r} cannot be read") from None
    if (
        not valid
        or len(shape) > 8
        or first != at
        or end - first != math.prod(shape) * dtype.itemsize
    ):
        raise WireError(f"{name} does not lie where its shape {shape} says")
    if math.prod(n for n in shape if n) >= 2**48:  # too large even for an empty tensor
        raise WireError(f"{name} has sizes {shape}")
    if first % dtype.itemsize:
        raise WireError(f"{name} is not aligned")
    return dtype, shape, end
