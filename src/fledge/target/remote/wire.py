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

import torch
import xxhash
from torch import Tensor

from fledge.core.errors import first_line
from fledge.target.cache.format import SAFETENSORS, safetensors_header

DIGEST = "digest"
DIGEST_BYTES = 8
CHUNK_BYTES = 1 << 20  # hashed and passed to the socket at once: fits an L2 cache
_DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}

# what reading a header or a tensor that is not one may raise
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError)

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


def check_digest(message: Buffer) -> None:
    """Compare the digest at the end of a message with its bytes; raises if they differ."""
    covered, digest = memoryview(message)[:-DIGEST_BYTES], bytes(message[-DIGEST_BYTES:])
    if xxhash.xxh3_64(covered).digest()[::-1] != digest:
        raise WireError("the digest does not fit: bytes were lost or changed on the way")


def unpack(message: Buffer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (views of `message`, which they keep alive) and strings of a message, whose
    digest the caller has compared."""
    try:
        begin = 8 + int.from_bytes(message[:8], "little")
        header = json.loads(bytes(message[8:begin]))
        strings = header.pop("__metadata__", {}).items()
        tensors = {name: _tensor(message, begin, **entry) for name, entry in header.items()}
        del tensors[DIGEST]
        return tensors, {name: str(text) for name, text in strings}
    except _MALFORMED as error:
        raise WireError(f"not a message ({first_line(error)})") from None


def _tensor(
    message: Buffer, begin: int, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    count, offset = math.prod(shape), begin + data_offsets[0]
    return torch.frombuffer(message, dtype=_DTYPES[dtype], count=count, offset=offset).view(shape)
