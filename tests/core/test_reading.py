"""Reading metadata: valid input is accepted, everything else is refused in one line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.core import reading
from fledge.core.errors import BadInput
from fledge.core.reading import (
    Choice,
    Flag,
    ListOf,
    MapOf,
    Maybe,
    Number,
    Table,
    Text,
    Whole,
    parse_json,
    read_bytes,
    read_json,
    shown,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_any_json_object_is_read_back(value):
    assert parse_json(json.dumps(value), where="x") == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"), ("{", "not JSON"), (b"\xff\xfe\xff", "not JSON"), ("[1]", "an object"),
        ('{"a": ' * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused_in_one_line(text, told):
    with pytest.raises(BadInput) as caught:
        parse_json(text, where="some.json", what="the thing")
    line = str(caught.value)
    assert line.startswith("some.json: the thing")
    assert told in line
    assert len(line) < 300


KIND = Table(
    {
        "count": Whole(1, 9), "rate": Number(0, 1), "on": Flag(), "kind": Choice(("a", "b")),
        "note": Maybe(Text(5)), "ids": ListOf(Whole(), most=3), "files": MapOf(Whole()),
    },
    optional={"more": Table({"x": Flag()})},
)  # fmt: skip
GOOD = {
    "count": 3, "rate": 0.5, "on": True, "kind": "a", "note": None, "ids": [1, 2],
    "files": {"model.safetensors": 7}, "unknown": "stays",
}  # fmt: skip


def test_unlisted_keys_are_accepted():
    assert KIND.fault(GOOD) is None
    assert KIND.fault({**GOOD, "more": {"x": False}}) is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"count": 0}, "'count' is 0, expected a whole number from 1 to 9"),
        ({"count": 10}, "'count'"), ({"count": True}, "'count'"), ({"count": 3.0}, "'count'"),
        ({"count": "3"}, "'count'"), ({"rate": -0.1}, "'rate'"), ({"rate": float("nan")}, "'rate'"),
        ({"rate": 10**400}, "'rate'"), ({"on": 1}, "'on'"), ({"kind": "c"}, "'kind'"),
        ({"kind": ["a"]}, "'kind'"), ({"note": "too long"}, "'note'"),
        ({"ids": [1, 2, 3, 4]}, "'ids'"), ({"ids": [1, -1]}, "'ids[1]'"),
        ({"files": {"a": "1"}}, "'files.a'"), ({"more": None}, "'more'"),
        ({"more": {}}, "'more.x' is absent"),
    ],
)  # fmt: skip
def test_the_first_fault_is_reported_with_its_location(change, fault):
    assert KIND.fault({**GOOD, **change}).startswith(fault)


@pytest.mark.parametrize("name", list(KIND.fields))
def test_a_missing_field_is_reported_as_absent(name):
    assert KIND.fault({k: v for k, v in GOOD.items() if k != name}) == f"'{name}' is absent"


def test_files_that_cannot_be_read_are_named(tmp_path):
    for path in (tmp_path, tmp_path / "missing", tmp_path / "a\0b"):
        with pytest.raises(BadInput, match="cannot be opened"):
            read_bytes(path)
    with pytest.raises(BadInput, match=r"/proc/self/mem: the recipe cannot be read \(Input/output"):
        read_bytes(Path("/proc/self/mem"), what="the recipe")  # fails like a bad disk: address 0


def test_files_are_read_up_to_a_size(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"{}" + b" " * 100)
    assert read_json(path) == {}
    monkeypatch.setattr(reading, "MAX_BYTES", 50)
    with pytest.raises(BadInput, match="more than 50 bytes"):
        read_json(path)


@given(JSON)
def test_a_quoted_value_is_short(value):
    for nested in (value, [value] * 50, {"a": [value] * 50}):
        assert len(shown(nested)) <= 60
