"""Tokenize once: data + tokenizer + template + options -> token rows, cached by fingerprint.

If interrupted, run it again: finished parts are kept. Damaged parts are rebuilt.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import current_process, get_context, parent_process
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fledge.core.errors import BadInput
from fledge.core.files import cache_dir, write_json
from fledge.core.progress import Progress, unwatched
from fledge.data import sources
from fledge.data.drops import DropReport
from fledge.data.store import TokenRows, read_record, write_part
from fledge.data.tokenise import Encoder, TokeniseOptions, tokenise_part
from fledge.data.tokenizer import TokenizerFacts
from fledge.data.tokenizer import tokenizer_files_fingerprint as tokenizer_files_fingerprint

_WAIT_S = 1.0  # report that another process holds the lock after waiting this long
ROWS_FORMAT = 1  # raise when the meaning of the files changes


def prepare_rows(
    data: list[str],
    model_dir: Path,
    options: TokeniseOptions | None = None,
    *,
    workers: int | None = None,
    max_drop_share: float = 0.05,
    cache: Path | None = None,
    rows_per_part: int = sources.ROWS_PER_PART,
    on_progress: Progress = unwatched,
    trust_remote_code: bool = False,
) -> TokenRows:
    """Token rows of `data` under the model's tokenizer and template, tokenized at most once: one of
    several processes does it while the others wait."""
    _refuse_unguarded_script()
    options = options or TokeniseOptions()
    fields = {
        "format": ROWS_FORMAT,
        "data": sources.fingerprint(data),
        "tokenizer": tokenizer_files_fingerprint(model_dir),
        "options": options.fingerprint(),
        "rows_per_part": rows_per_part,
        "most_parts": sources.MOST_PARTS,
    }
    key = hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()
    directory = (cache or cache_dir()) / "rows" / key[:24]

    def load() -> TokenizerFacts:
        return TokenizerFacts.load(model_dir, trust_remote_code=trust_remote_code)

    parts = sources.make_parts(data, rows_per_part)
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / ".lock", on_progress):
        records = _fill(directory, parts, load, options, workers, on_progress)
        drops = DropReport.merged(record["drops"] for record in records)
        totals = {name: sum(r[name] for r in records) for name in ("rows", "tokens", "supervised")}
        manifest = {**fields, "parts": len(parts), **totals, "drops": drops.to_json()}
        write_json(directory / "manifest.json", manifest)
    rows = TokenRows(directory, len(parts), drops, key)
    rows.drops.check(max_drop_share)
    rows.check_mask()
    return rows


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Lock against other ranks, or another run of the same recipe: they wait, then read."""
    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=_WAIT_S)
    except Timeout:
        progress("waiting for another process, which prepares this data")
        held = lock.acquire()
    with held:
        yield


def _refuse_unguarded_script() -> None:
    """Refuse a script without a main guard when a worker process imports it: otherwise the worker
    would wait forever for the lock that its parent holds."""
    if getattr(current_process(), "_inheriting", False):  # a spawned process imports its script
        raise BadInput(
            "worker processes import the script that starts them, and it prepares data again",
            where=sys.argv[0],
            fix="put its calls under: if __name__ == '__main__':",
        )


def _fill(
    directory: Path,
    parts: list[sources.Part],
    load: Callable[[], TokenizerFacts],
    options: TokeniseOptions,
    workers: int | None,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Create the parts that are missing or damaged; return the records of all parts."""
    records = {i: r for i in range(len(parts)) if (r := read_record(directory, i)) is not None}
    begin, missing = time.perf_counter(), [i for i in range(len(parts)) if i not in records]
    tokens = sum(record["tokens"] for record in records.values())

    def report() -> None:
        rate = tokens / max(1e-9, time.perf_counter() - begin)
        made = len(records) + len(missing) > len(parts)
        note = f"{tokens:,} tokens, {rate:,.0f}/s" if made else ""
        progress("preparing data", len(records), len(parts), "parts", note)

    report()
    todo = [(index, parts[index]) for index in missing]
    for index in _run(todo, directory, load, options, workers or os.cpu_count() or 1):
        record = read_record(directory, index)
        if record is None:
            raise BadInput(
                "a part vanished while it was made", where=str(directory), fix="run again"
            )
        records[index] = record
        tokens += record["tokens"]
        report()
    return [records[index] for index in range(len(parts))]


def _make(directory: Path, encoder: Encoder, index: int, part: sources.Part) -> int:
    write_part(directory, index, tokenise_part(part, encoder))
    return index


def _run(
    todo: list[tuple[int, sources.Part]],
    directory: Path,
    load: Callable[[], TokenizerFacts],
    options: TokeniseOptions,
    workers: int,
) -> Iterator[int]:
    """Tokenize parts, here or in processes; yield the index of each once it is written."""
    if not todo:
        return
    encoder = Encoder(facts := load(), options)  # its errors would be lost in a worker
    if (workers := min(workers, len(todo))) == 1:
        yield from (_make(directory, encoder, index, part) for index, part in todo)
        return
    spawn = get_context("spawn")  # fork does not mix with the threads of `tokenizers`
    # In a file: a worker that dies while much is written to its pipe would block this process.
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asdict(facts), file)
        file.flush()
        shared = directory, file.name, options
        pool = ProcessPoolExecutor(workers, spawn, initializer=_start_worker, initargs=shared)
        try:
            futures = [pool.submit(_work, index, part) for index, part in todo]
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise BadInput(
                "a process that tokenized has ended (killed? out of memory?)",
                where=str(directory),
                fix="the finished parts stay: run it again, with fewer workers perhaps",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Path, Encoder] | None = None  # set once per worker process


def _start_worker(directory: Path, facts: str, options: TokeniseOptions) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = TokenizerFacts(**json.loads(Path(facts).read_text()))
    _worker = directory, Encoder(tokenizer, options)


def _end_with_parent() -> None:
    """Exit when the parent is killed: its workers would wait for work forever. Parts are written
    atomically, so this is safe at any moment."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(index: int, part: sources.Part) -> int:
    assert _worker is not None
    return _make(*_worker, index, part)
