"""Files cut short, damaged, mislabeled or endless: intact content is read exactly, anything else is
a one-line error that names the file."""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chats import numbered
from fledge.cli import main
from fledge.core.errors import BadInput
from fledge.data import sources
from fledge.data.drops import BadRow

ROWS = [numbered(i) for i in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def parquet(group, **options):
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), buffer, row_group_size=group, **options)
    return buffer.getvalue()


FILES = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES, mtime=0),
    "b.jsonl.gz": gzip.compress(LINES[:999], mtime=0) + gzip.compress(LINES[999:], mtime=0),
    "a.json": json.dumps(ROWS).encode(),
    "b.json": json.dumps({"data": ROWS}).encode(),
    "a.parquet": parquet(9),
    "b.parquet": parquet(1, compression="none", use_dictionary=False, write_page_checksum=True),
    "c.parquet": parquet(100),
}


def read(path):
    """(rows, None), or ([], the one-line error)."""
    try:
        parts = sources.make_parts([str(path)], rows_per_part=7)
        return [row for part in parts for _, row in part.rows()], None
    except BadInput as error:
        line = str(error)
    assert str(path) in line
    assert "\n" not in line
    return [], line


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("sources")


@pytest.mark.parametrize("name", FILES)
def test_intact_files_are_read_exactly(place, name):
    (place / name).write_bytes(FILES[name])
    assert read(place / name) == (ROWS, None)
    if name.endswith(".parquet"):  # whatever its row groups are
        parts = sources.make_parts([str(place / name)], rows_per_part=7)
        assert [len(list(part.rows())) for part in parts] == [7, 7, 7, 7, 7, 5]
    parts = sources.make_parts([str(place / name)], rows_per_part=1)
    # To read a part of a gzip file or a JSON array, everything before it must be read.
    few = name.endswith((".gz", ".json"))
    assert 1 < len(parts) <= (sources.MOST_PARTS if few else len(ROWS))
    placed_rows = [row for part in parts for row in part.rows()]
    assert placed_rows == [(f"{place / name}:{i + 1}", row) for i, row in enumerate(ROWS)]


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_loses_nothing_silently(place, name, share):
    content = FILES[name]
    (place / name).write_bytes(content[: int(share * len(content))])
    rows, refused = read(place / name)
    if name == "a.jsonl":  # lines before the cut are intact; the cut line is bad
        cut = content[: int(share * len(content))]
        assert refused is None
        assert rows[: cut.count(b"\n")] == ROWS[: cut.count(b"\n")]
        assert all(isinstance(row, BadRow) or row in ROWS for row in rows[cut.count(b"\n") :])
        assert len(rows) == cut.count(b"\n") + (not cut.endswith(b"\n") and cut != b"")
    elif name == "b.jsonl.gz" and rows:  # cut between its two members
        assert rows[:-1] == ROWS[: len(rows) - 1]
        assert isinstance(rows[-1], BadRow)
    else:
        assert rows in ([], ROWS)  # an empty file has no rows, and is refused later
        assert refused or share * len(content) < 1 or rows == ROWS


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=80, deadline=None)
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=3))
def test_flipped_bits_give_rows_or_a_one_line_error(place, name, flips):
    content = bytearray(FILES[name])
    for share, bit in flips:
        content[int(share * len(content))] ^= 1 << bit
    (place / name).write_bytes(content)
    rows, _ = read(place / name)
    if name.endswith(".gz"):  # its checksum covers all of the rows
        assert rows in ([], ROWS)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=10, deadline=None)
@given(content=st.binary(max_size=200))
def test_arbitrary_bytes_give_rows_or_a_one_line_error(place, name, content):
    for head in (b"", FILES[name][:40], FILES["a.jsonl.gz"][:10], b"PAR1"):
        (place / name).write_bytes(head + content)
        read(place / name)


VERBS = {
    "prepare": "data prepare {} --model smollm2-135m --json",
    "preview": "data preview {} --model smollm2-135m",
}
MISLABELLED = [
    ("a.jsonl.gz", "a.jsonl", "truncated or damaged"),
    ("a.parquet", "a.jsonl", "not a parquet file"),
    ("a.parquet", "a.jsonl.gz", "not a parquet file"),
    ("a.json", "a.jsonl.gz", "not valid JSON"),
]


def refused(command, capfd):
    with pytest.raises(SystemExit) as ended:
        main.run(command.split())
    out, err = capfd.readouterr()
    [line] = err.strip().splitlines()
    assert ended.value.code == 2, err
    assert out == ""
    return line


@pytest.mark.parametrize("verb", ["prepare", "preview"])
@pytest.mark.parametrize(("name", "content", "message"), MISLABELLED)
def test_a_file_with_the_wrong_extension_is_refused(
    tmp_path, monkeypatch, capfd, smollm2, verb, name, content, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(FILES[content])
    line = refused(VERBS[verb].format(name), capfd)
    assert f"{name}" in line
    assert message in line


def test_any_other_eof_error_is_bad_input_too(monkeypatch, capfd):
    def app(**_):
        from typer import Abort

        raise Abort from EOFError("Ran out of input")  # as typer does

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as ended:
        main.run(["eval"])
    assert ended.value.code == 2
    assert capfd.readouterr().err == "fledge: a file ended too early (Ran out of input)\n"
