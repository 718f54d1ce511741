"""Tokenizing once: sources, drops, interrupts, damage."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from data.chats import numbered, write_jsonl
from fledge.core.errors import BadInput
from fledge.data import prepare as prepare_module
from fledge.data import sources, store
from fledge.data.prepare import prepare_rows
from fledge.data.store import TokenRows, part_path
from fledge.data.tokenise import TokeniseOptions


def answers(rows, tokenizer):
    texts = [tokenizer.decode(row.input_ids[row.loss_mask.astype(bool)]) for row in rows]
    return [text.removesuffix("!<|im_end|>") for text in texts]


@pytest.fixture
def prepare(smollm2, tmp_path):
    def run(data, options=None, **more):
        paths = [str(path) for path in (data if isinstance(data, list) else [data])]
        more = {"workers": 1, "cache": tmp_path / "cache", **more}
        return prepare_rows(paths, smollm2, options, **more)

    return run


def test_data_set_ids_with_slices(tmp_path):
    """The real datasets library on a local data set, with an id and a slice."""
    pq.write_table(
        pa.Table.from_pylist([numbered(i) for i in range(9)]), tmp_path / "train.parquet"
    )
    source = sources.Source("dataset", str(tmp_path), "rows", "train[2:5]")
    rows = sources.Part(source, 1, 3).rows()
    assert [row["messages"][1]["content"] for _, row in rows] == ["3!", "4!"]
    for name, split in (("org/name:train[:1000]", "train[:1000]"), ("org/name", "")):
        [source] = sources.expand([name])
        assert (source.kind, source.path, source.split) == ("dataset", "org/name", split)
    with pytest.raises(BadInput, match="cannot load the data set"):
        sources.make_parts(["no/such-data-set"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no such file"),
        ("odd.txt", "x", "unknown kind of file"),
        ("broken.json", "[{", "not valid JSON"),
        ("text.json", '"x"', "not a list of rows"),
        ("broken.parquet", "PAR", "not a parquet file"),
        ("empty.jsonl", "", "no usable row"),
    ],
)
def test_bad_sources_are_one_line(prepare, tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadInput, match=message) as caught:
        prepare(path)
    assert "\n" not in str(caught.value)


def test_a_second_call_reads_the_cache(prepare, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [numbered(i) for i in range(5)])
    progress = []
    first = prepare(path)
    again = prepare(path, on_progress=lambda *report: progress.append(report))
    assert progress == [("preparing data", 1, 1, "parts", "")]
    assert again.fingerprint == first.fingerprint
    # Anything that affects the rows gives a different cache, and so does the division into parts.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "MOST_PARTS", 3)
        assert prepare(path).directory != first.directory
    assert prepare(path, TokeniseOptions(last_turn_only=True)).directory != first.directory
    write_jsonl(path, [numbered(i) for i in range(6)])
    assert prepare(path).directory != first.directory


def test_waiting_for_another_process_is_reported(prepare, tmp_path, monkeypatch):
    """Ranks of one run: one tokenizes, the others report that they wait, and then read."""
    monkeypatch.setattr(prepare_module, "_WAIT_S", 0.05)
    path = write_jsonl(tmp_path / "a.jsonl", [numbered(i) for i in range(5)])
    [lock] = [
        place.parent / ".lock" for place in prepare(path).directory.parent.glob("*/manifest.json")
    ]
    waiting, holder = [], FileLock(lock)
    holder.acquire()

    def progress(what, *_):
        waiting.append(what.startswith("waiting for another process"))
        if waiting[-1]:
            holder.release()

    assert len(prepare(path, on_progress=progress)) == 5
    assert waiting[0]
    assert not any(waiting[1:])


def test_the_number_of_workers_does_not_change_the_rows(prepare, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [numbered(i) for i in range(10)])
    one_worker = prepare(path, cache=tmp_path / "one", rows_per_part=3)
    two_workers = prepare(path, cache=tmp_path / "two", workers=2, rows_per_part=3)
    names = sorted(p.name for p in one_worker.directory.glob("part-*"))
    assert len(names) == 8
    for name in names:
        assert (one_worker.directory / name).read_bytes() == (
            two_workers.directory / name
        ).read_bytes()


@pytest.mark.slow
def test_a_damaged_cache_is_rebuilt(prepare, smollm2_tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [numbered(i) for i in range(8)])
    rows = prepare(path, rows_per_part=3)
    whole = {p.name: p.read_bytes() for p in rows.directory.glob("part-*")}
    del rows

    def damage(kind, victim):
        if kind == "flip":
            data = bytearray(victim.read_bytes())
            data[len(data) // 2] ^= 1
            victim.write_bytes(data)
        elif kind == "cut":
            victim.write_bytes(victim.read_bytes()[:-7])
        elif kind == "empty":
            victim.write_bytes(b"")
        else:
            victim.unlink()

    directory = next((tmp_path / "cache" / "rows").iterdir())
    for kind in ("flip", "cut", "empty", "gone"):
        for name in ("part-00001.arrow", "part-00002.json"):
            damage(kind, directory / name)
            rows = prepare(path, rows_per_part=3)
            assert answers(rows, smollm2_tokenizer) == [str(i) for i in range(8)]
            assert {p.name: p.read_bytes() for p in directory.glob("part-*")} == whole


def test_an_interrupted_call_is_continued_by_the_next(prepare, smollm2, tmp_path):
    """Ctrl-C in a real process halfway through; its finished parts are kept."""
    path = write_jsonl(tmp_path / "a.jsonl", [numbered(i) for i in range(40)])
    script = (
        "import sys; from pathlib import Path\n"
        "from fledge.data import prepare\n"
        "def show(what, done, *_):\n"
        "    if done == 5: print('five', flush=True); import time; time.sleep(60)\n"
        "prepare.prepare_rows([sys.argv[1]], Path(sys.argv[2]), workers=1, rows_per_part=2,\n"
        "                     cache=Path(sys.argv[3]), on_progress=show)\n"
    )
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", script, str(path), str(smollm2), str(cache)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's `&` ignores it
    )  # fmt: skip
    assert process.stdout.readline() == b"five\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) != 0
    directory = next((cache / "rows").iterdir())
    assert not (directory / "manifest.json").exists()
    assert len(list(directory.glob("part-*.json"))) == 5
    progress = []
    rows = prepare(path, on_progress=lambda *report: progress.append(report), rows_per_part=2)
    assert progress[0][1] == 5
    assert len(rows) == 40
    assert not list(directory.glob(".*tmp"))


@pytest.mark.slow
def test_workers_exit_when_their_parent_is_killed(prepare, smollm2, tmp_path):
    """They share its stdout: end of file means that all of them have exited."""
    path = write_jsonl(tmp_path / "a.jsonl", [numbered(i) for i in range(40)])
    script = (
        "import sys; from pathlib import Path\n"
        "from fledge.data import prepare\n"
        "def show(what, done, *_):\n"
        "    if done == 1: print('one', flush=True); sys.stdin.read()\n"
        "if __name__ == '__main__':\n"
        "    prepare.prepare_rows([sys.argv[1]], Path(sys.argv[2]), workers=2, rows_per_part=2,\n"
        "                         cache=Path(sys.argv[3]), on_progress=show)\n"
    )
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, tmp_path / "script.py", path, smollm2, tmp_path / "cache"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"one\n"
        process.kill()
        assert process.communicate(timeout=60) == (b"", None)
    assert len(prepare(path, rows_per_part=2)) == 40


def test_a_script_without_a_main_guard_gets_an_explanation(smollm2, tmp_path):
    """Its workers would run it again and wait for the lock that their parent holds."""
    path = write_jsonl(tmp_path / "a.jsonl", [numbered(i) for i in range(4)])
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from pathlib import Path\n"
        "from fledge.data.prepare import prepare_rows\n"
        "prepare_rows([sys.argv[1]], Path(sys.argv[2]), workers=2, rows_per_part=2,\n"
        "             cache=Path(sys.argv[3]))\n"
    )
    command = [sys.executable, script, path, smollm2, tmp_path / "cache"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{script}: worker processes import the script that starts them" in done.stderr
    assert "a process that tokenized has ended" in done.stderr.splitlines()[-1]


def test_a_missing_part_is_named(prepare, tmp_path):
    rows = prepare(write_jsonl(tmp_path / "a.jsonl", [numbered(1)]))
    part_path(rows.directory, 0).unlink()
    with pytest.raises(BadInput, match=r"part-00000\.arrow: cannot be read"):
        TokenRows(rows.directory, 1, rows.drops, rows.fingerprint)


def test_a_full_loss_mask_is_refused(smollm2, tmp_path):
    """A template that renders only the assistant: every token would be supervised."""
    model = tmp_path / "model"
    shutil.copytree(smollm2, model, ignore=shutil.ignore_patterns("*.safetensors"))
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}{% endif %}"
    )
    (model / "chat_template.jinja").write_text(template + "{% endfor %}")
    path = write_jsonl(tmp_path / "a.jsonl", [numbered(1)])
    with pytest.raises(BadInput, match="the loss mask is full"):
        prepare_rows([str(path)], model, workers=1, cache=tmp_path / "cache")


def worked_seconds():
    """CPU time of this process and of the children it has waited for."""
    return sum(os.times()[:4])


@pytest.mark.slow
def test_real_chats(smollm2, shared_data, tmp_path):
    """The reference chats: less than 1 % padding after packing, truncated answers recognized."""
    from fledge.data.pack import pack_rows

    start = worked_seconds()
    chats = [str(shared_data / "smollm2_chat.jsonl")]
    rows = prepare_rows(chats, smollm2, cache=tmp_path, workers=2)
    assert worked_seconds() - start < 120  # a minute on two cores
    assert len(rows) == 19_847
    assert rows.drops.counts == {}
    assert pack_rows(rows.lengths, 4096).padding_share < 0.01
    raw = [json.loads(line) for line in Path(chats[0]).read_bytes().splitlines()]
    assert rows.truncated == sum(row["finish"] == "length" for row in raw)
    # The file has the number of tokens the model generated, end token included. In a few rows,
    # re-encoding the text gives other tokens than the model generated.
    expected = [row["tokens"] for row in raw]
    supervised = [int(row.loss_mask.sum()) for row in rows]
    different = sum(abs(a - b) > 1 for a, b in zip(expected, supervised, strict=True))
    assert different / len(raw) < 0.02
    start = time.perf_counter()
    prepare_rows(chats, smollm2, cache=tmp_path)
    assert time.perf_counter() - start < 2


def test_few_parts_are_mapped_at_a_time(prepare, tmp_path, monkeypatch):
    """Pages of mapped files count as memory, so only a few parts are mapped at once."""
    path = write_jsonl(tmp_path / "a.jsonl", [numbered(i) for i in range(20)])
    made = prepare(path, rows_per_part=1)
    monkeypatch.setattr(store, "_MAPPED", 3)
    del made
    gc.collect()  # unmaps its parts
    rows = prepare(path, rows_per_part=1)
    expected = [(row.place, row.input_ids.tolist()) for row in rows]
    assert [place for place, _ in expected] == [f"{path}:{i + 1}" for i in range(20)]
    for i in (19, 0, 7, 19, 3, 12):
        assert (rows[i].place, rows[i].input_ids.tolist()) == expected[i]
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert sum(name.startswith(str(rows.directory)) for name in mapped) == 3
