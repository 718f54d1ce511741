"""Data at a URL: the same rows, parts and fingerprints as on disk."""

import fsspec
import pytest

from data.test_sources import FILES, LINES, ROWS, read
from fledge.core.errors import BadInput, MissingPackage
from fledge.data import remote, sources
from fledge.data.prepare import prepare_rows


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """An object store in this process, and a cache of its own."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    system.pipe({f"/chats/{name}": content for name, content in FILES.items()})
    yield system
    system.rm("/chats", recursive=True)


@pytest.mark.parametrize("name", FILES)
def test_a_remote_file_equals_a_local_one(memory, tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    local, url = str(tmp_path / name), f"memory://chats/{name}"
    assert read(url) == (ROWS, None)
    assert sources.fingerprint([url]) == sources.fingerprint([local])
    cuts = [
        [(p.start, p.stop, p.first_line) for p in sources.make_parts([source], rows_per_part=7)]
        for source in (local, url)
    ]
    assert cuts[0] == cuts[1]
    places = [place for part in sources.make_parts([url], 7) for place, _ in part.rows()]
    assert places == [f"{url}:{i + 1}" for i in range(len(ROWS))]


def test_a_remote_directory_is_expanded_to_its_files(memory, tmp_path):
    local = tmp_path / "chats"
    local.mkdir()
    for name, content in FILES.items():
        (local / name).write_bytes(content)
    memory.pipe("/chats/notes.txt", b"no rows")
    expanded = sources.expand(["memory://chats"])
    assert [source.name for source in expanded] == [f"memory:///chats/{n}" for n in sorted(FILES)]
    assert sources.fingerprint(["memory://chats"]) == sources.fingerprint([str(local)])


def test_a_file_is_copied_once_for_each_version(memory, monkeypatch):
    opened, real = [], type(memory)._open

    def counted(self, path, mode="rb", **options):
        opened.extend([path] if mode == "rb" else [])
        return real(self, path, mode, **options)

    monkeypatch.setattr(type(memory), "_open", counted)
    urls = ["memory://chats/a.jsonl"]
    first = sources.fingerprint(urls), sources.make_parts(urls, 7)
    assert (sources.fingerprint(urls), sources.make_parts(urls, 7)) == first
    assert len(opened) == 1
    memory.pipe("/chats/a.jsonl", LINES[: len(LINES) // 2])  # a new version
    assert sources.fingerprint(urls) != first[0]
    assert len(sources.make_parts(urls, 7)) < len(first[1])
    assert len(opened) == 2


def test_rows_are_prepared_from_a_url(memory, tiny_target, tmp_path):
    url, local = "memory://chats/a.jsonl", tmp_path / "a.jsonl"
    local.write_bytes(LINES)
    remote_rows = prepare_rows([url], tiny_target, workers=1, cache=tmp_path / "far")
    local_rows = prepare_rows([str(local)], tiny_target, workers=1, cache=tmp_path / "near")
    assert (
        remote_rows.fingerprint == local_rows.fingerprint
    )  # a run may continue with data that was moved
    assert [row.input_ids.tolist() for row in remote_rows] == [
        row.input_ids.tolist() for row in local_rows
    ]
    assert [row.place for row in remote_rows] == [f"{url}:{i + 1}" for i in range(len(ROWS))]


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("memory://chats/none.jsonl", "memory://chats/none.jsonl: cannot be read"),
        ("memory://empty", r"memory://empty: no \.jsonl, .* file"),
        ("nope://a/b.jsonl", "nope://a/b.jsonl: cannot be read"),
        ("memory://chats/wrong.parquet", "not a parquet file, or a damaged one"),
        ("memory://chats/cut.jsonl.gz", "truncated or damaged"),
    ],
)
def test_unreadable_data_is_a_one_line_error(memory, address, line):
    memory.pipe("/chats/wrong.parquet", LINES)
    memory.pipe("/chats/cut.jsonl.gz", FILES["a.jsonl.gz"][:-20])
    with pytest.raises(BadInput, match=line) as caught:
        sources.make_parts([address])
    assert "\n" not in str(caught.value)


def test_a_failing_store_and_a_missing_package_are_named(memory, monkeypatch):
    import fsspec.core

    def failing(error):
        def fail(*args, **options):
            raise error

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.core, "url_to_fs", failing(ImportError("Install s3fs to access S3")))
        with pytest.raises(MissingPackage) as caught:
            sources.make_parts(["s3://bucket/a.jsonl"])
    expected = "s3://bucket/a.jsonl: such addresses need a package (Install s3fs to access S3)"
    assert str(caught.value).startswith(expected)
    refused = failing(PermissionError("Access Denied\nrequest 17"))
    monkeypatch.setattr(type(memory), "open", refused)
    with pytest.raises(BadInput, match=r"cannot be read \(PermissionError: Access Denied.*creden"):
        sources.make_parts(["memory://chats/a.jsonl"])


def test_public_names_contain_no_secrets():
    name = remote.public_name("https://me:secret@host:8/a/b.jsonl?signature=secret")
    assert name == "https://host:8/a/b.jsonl"
    assert remote.public_name("data/what?.jsonl") == "data/what?.jsonl"
