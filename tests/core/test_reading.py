"""Reading metadata: valid input is accepted, everything else is refused in one line."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.core.errors import BadInput
from fledge.core.reading import (
    Choice,
    FileName,
    Flag,
    ListOf,
    MapOf,
    Maybe,
    Number,
    Row,
    Table,
    Text,
    Whole,
    json_lines,
    open_regular,
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
        ('{"a": 1, "b": {"a": 1, "a": 2}}', "the key 'a' is given twice"),
        ('{"a": [NaN]}', "nan is not a number"), ('{"a": -Infinity}', "-inf is not a number"),
        ('{"a": 1e999}', "inf is not a number"), ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_invalid_or_ambiguous_json_is_refused_in_one_line(text, told):
    with pytest.raises(BadInput) as caught:
        parse_json(text, where="some.json", what="the thing")
    line = str(caught.value)
    assert line.startswith("some.json: the thing")
    assert told in line
    assert len(line) < 300


KIND = Table(
    {
        "count": Whole(1, 9), "rate": Number(0, 1), "on": Flag(), "kind": Choice(("a", "b")),
        "note": Maybe(Text(5)), "ids": ListOf(Whole(), most=3), "pair": Row((Whole(), Text())),
        "files": MapOf(Whole(), keys=FileName()),
    },
    optional={"more": Table({"x": Flag()})},
)  # fmt: skip
GOOD = {
    "count": 3, "rate": 0.5, "on": True, "kind": "a", "note": None, "ids": [1, 2], "pair": [1, "x"],
    "files": {"model.safetensors": 7}, "unknown": "stays",
}  # fmt: skip


def test_unlisted_keys_are_accepted():
    assert KIND.fault(GOOD) is None
    assert KIND.fault({**GOOD, "more": {"x": False}}, "") is None


@pytest.mark.parametrize(
    ("change", "at"),
    [
        ({"count": 0}, "count"), ({"count": 10}, "count"), ({"count": True}, "count"),
        ({"count": 3.0}, "count"), ({"count": "3"}, "count"), ({"rate": -0.1}, "rate"),
        ({"rate": float("nan")}, "rate"), ({"rate": 10**400}, "rate"), ({"on": 1}, "on"),
        ({"kind": "c"}, "kind"), ({"kind": ["a"]}, "kind"), ({"note": "too long"}, "note"),
        ({"ids": [1, 2, 3, 4]}, "ids"), ({"ids": [1, -1]}, "ids[1]"), ({"pair": [1]}, "pair"),
        ({"pair": [1, 2]}, "pair[1]"), ({"files": {"../x": 1}}, "files: key"),
        ({"files": {"/dev/zero": 1}}, "files: key"), ({"files": {"..": 1}}, "files: key"),
        ({"files": {"a": "1"}}, "files.a"), ({"more": None}, "more"), ({"more": {}}, "more.x"),
    ],
)  # fmt: skip
def test_the_first_fault_is_reported_with_its_location(change, at):
    fault = KIND.fault({**GOOD, **change}, "")
    assert fault is not None
    assert fault.at == at


@pytest.mark.parametrize("name", list(KIND.fields))
def test_a_missing_field_is_reported_as_absent(name):
    fault = KIND.fault({key: value for key, value in GOOD.items() if key != name}, "")
    assert (fault.at, shown(fault.value)) == (name, "absent")


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # a plain open() would wait for a writer
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(BadInput, match=r"is a (pipe or a device|directory)"):
            read_bytes(tmp_path / path)
    with pytest.raises(BadInput, match="cannot be opened"):
        read_bytes(tmp_path / "missing")
    with pytest.raises(BadInput, match="cannot be opened"):
        read_bytes(tmp_path / "a\0b")


def test_a_read_error_names_the_file():
    with pytest.raises(BadInput, match=r"/proc/self/mem: the recipe cannot be read \(Input/output"):
        read_bytes(Path("/proc/self/mem"), what="the recipe")  # fails like a bad disk: address 0


def test_a_link_out_of_the_directory_is_refused(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret").write_text("{}")
    (inside / "own").write_text("{}")
    (inside / "out").symlink_to("../secret")
    (inside / "in").symlink_to("own")
    with pytest.raises(BadInput, match="leads out"):
        read_json(inside / "out", inside=inside)
    assert read_json(inside / "in", inside=inside) == {}
    assert read_json(inside / "out") == {}  # allowed without `inside`: hub snapshots are links
    (tmp_path / "elsewhere").symlink_to(inside)
    assert read_json(tmp_path / "elsewhere" / "own", inside=tmp_path / "elsewhere") == {}


def test_sizes_are_bounded(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"{}" + b" " * 100)
    assert read_json(path) == {}
    with pytest.raises(BadInput, match="more than 50 bytes"):
        read_json(path, max_bytes=50)
    path.write_bytes(b"{}\n" * 3)
    assert [offset for offset, _ in json_lines(path)] == [0, 3, 6]
    for bounds in ({"line_bytes": 2}, {"most_bytes": 8}):
        with pytest.raises(BadInput, match="in all"):
            list(json_lines(path, **bounds))
    with open_regular(path) as handle:
        assert handle.read(2) == b"{}"


@given(JSON)
def test_a_quoted_value_is_short(value):
    for nested in (value, [value] * 50, {"a": [value] * 50}):
        assert len(shown(nested)) <= 60
