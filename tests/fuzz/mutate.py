"""Mutate valid documents at random places into what a hostile or broken writer might produce.

Everything is drawn from a `random.Random`, so that its seed gives the same again.
"""

import copy
import json
import math
import struct

from fledge.recipe.yaml_text import parse_yaml

DEEP = 3000
HOSTILE = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, -(2**31), 2**63 - 1, 2**63,
    2**64, -(2**63), 10**9, 10**12, 10**30, 10**400, 0.0, -0.0, 0.5, 1e-308, 1e308, -1e308,
    math.nan, math.inf, -math.inf, "", " ", "0", "1e9", "nan", "true", "x", "x" * 70_000, "\x00",
    "\x1b[2J\x1b]0;owned\x07", "line\nline", "\ud800", "../../x", "/etc/passwd", "/dev/zero",
    "C:\\x", ".", "..", "%s%n", "{{7*7}}", [], {}, [None], [[]], [0] * 3000, {"": ""}, {"a": {}},
    [{"role": "user"}], "__class__", "<script>",
)  # fmt: skip
NUMBERS = (
    0, 1, 2, 3, 7, 8, 127, 128, 255, 2**15, 2**16, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**40, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8,
)  # fmt: skip


def nested(depth, kind=list):
    value = 0
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def places(value, limit=4000):
    """(container, key) of every value inside a document, outer levels first."""
    spots, level = [], [value]
    while level and len(spots) < limit:
        inner = []
        for item in level:
            keys = list(item) if isinstance(item, dict) else range(len(item))
            spots += [(item, key) for key in keys]
            inner += [item[key] for key in keys if isinstance(item[key], dict | list)]
        level = inner
    return spots


def mutated(document, rng, changes=3):
    """A copy with a few values replaced, removed, duplicated, renamed or moved."""
    box = [copy.deepcopy(document)]
    for _ in range(rng.randint(1, changes)):
        spots = places(box)
        if not spots:
            break
        holder, key = rng.choice(spots)
        _change(holder, key, spots, rng)
    return box[0] if box else None


def _change(holder, key, spots, rng):
    how = rng.randrange(8)
    if how <= 2:
        holder[key] = copy.deepcopy(rng.choice(HOSTILE))
    elif how == 3:
        del holder[key]
    elif how == 4:  # a value from elsewhere: a valid type in the wrong place
        other, name = rng.choice(spots)
        if name in other if isinstance(other, dict) else name < len(other):
            holder[key] = copy.deepcopy(other[name])
    elif how == 5:
        if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        else:
            holder[str(rng.choice(HOSTILE))[:300]] = holder.pop(key)
    elif how == 6:
        holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
    elif isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = rng.choice((-1, 2, 10, 1000)) * holder[key] + rng.choice((-1, 0, 1))
    else:
        holder[key] = nested(rng.choice((40, 100, 150)), rng.choice((list, dict)))


def json_bytes(document, rng):
    """A mutated document as bytes; sometimes not quite valid JSON."""
    text = json.dumps(mutated(document, rng), ensure_ascii=rng.random() < 0.9)
    data = text.encode(errors="surrogatepass")
    trick = rng.randrange(24)
    if trick == 0:
        return data[: rng.randint(0, len(data))]
    if trick == 1:
        return data.replace(b'": ', b'": ' + b"[" * DEEP, 1)
    if trick == 2 and data.startswith(b"{") and len(data) > 2:  # every key twice
        return data[:-1] + b", " + data[1:]
    if trick == 3:
        return mutated_bytes(data, rng)
    if trick == 4:
        return b"\xef\xbb\xbf" + data
    if trick == 5:
        return b"[" * DEEP + b"]" * DEEP
    if trick == 6:
        return text.encode("utf-16", errors="surrogatepass")
    return data


def mutated_bytes(data, rng, near=None):
    """Flip, cut, duplicate or overwrite bytes with hostile numbers, within the first `near`."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        reach = min(len(data), near or len(data))
        if not reach:
            break
        at, how = rng.randrange(reach), rng.randrange(7)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at] = rng.randrange(256)
        elif how == 2:
            width, kind = rng.choice(((8, "<Q"), (4, "<I")))
            number = rng.choice(NUMBERS) & (2 ** (8 * width) - 1)
            data[at : at + width] = struct.pack(kind, number)
        elif how == 3:
            del data[at:]
        elif how == 4:
            end = min(len(data), at + rng.randint(1, 64))
            data[at:at] = data[at:end]
        elif how == 5:
            del data[at : at + rng.randint(1, 64)]
        else:
            other = rng.randrange(len(data))
            data[at : at + 16] = data[other : other + 16]
    return bytes(data)


def mutated_header(data, rng):
    """A safetensors file with a mutated JSON header, whose length is updated."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        return mutated_bytes(data, rng, near=8 + length)
    header = json_bytes(json.loads(data[8 : 8 + length]), rng)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def mutated_json(data, rng):
    return json_bytes(json.loads(data), rng)


def mutated_json_lines(data, rng):
    lines = [json.loads(line) for line in data.splitlines()]
    spoilt = [json_bytes(rng.choice(lines), rng).replace(b"\n", b" ") for _ in lines]
    return b"\n".join(spoilt) + b"\n"


def mutated_tensors(data, rng):
    """A safetensors file with a mutated header, or with mutated bytes anywhere."""
    return (mutated_header if rng.random() < 0.7 else mutated_bytes)(data, rng)


def mutated_yaml(data, rng):
    """A mutated document as YAML, which is a superset of JSON."""
    return json_bytes(parse_yaml(data, where="recipe")[0], rng)
