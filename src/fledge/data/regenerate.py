"""Replace the answers of a data set by the target's own.

A draft learns to predict what the target would generate: answers by another author teach the wrong
distribution. This module is the job (rows in, rows out, nothing lost or repeated), which any number
of processes share: each answers the shards that it has claimed (`regenerate_share`), and a process
that finds all of them done merges the answers (`regenerate_files`). An `Answerer` generates them: a
server (`regenerate_http`) or a model in this process (`decode.regenerate`).
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fledge.core.errors import BadInput
from fledge.core.files import check_place
from fledge.data.regenerate_files import JobFiles, Summary
from fledge.data.regenerate_share import Share, Watch
from fledge.data.regenerate_task import Answerer, EndedTask, Sampling, Task
from fledge.data.rows import Shards
from fledge.data.sources import fingerprint

__all__ = ["Answerer", "EndedTask", "Sampling", "Summary", "Task", "check_out", "regenerate"]

_FORMAT = 1
_SHARD_ROWS = 64  # rounded up to a multiple of the rows that are answered together


def regenerate(
    sources: list[str],
    out: Path,
    answerer: Answerer,
    sampling: Sampling,
    *,
    limit: int | None = None,
    exclude_truncated: bool = False,
    patience: int = 64,
    watch: Watch = lambda done, so_far: None,
    say: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Answer every row of `sources` once, resuming where earlier processes stopped, alongside any
    number of other processes.

    Rows that failed before are retried. A failed row does not end the job, but `patience`
    consecutive failures do if the server does not answer at all.
    """
    check_out(out, sources)
    data = {"sources": sources, "fingerprint": fingerprint(sources), "limit": limit}
    settings = {"format": _FORMAT, "data": data, "target": answerer.identity()}
    settings["sampling"] = asdict(sampling)
    job = JobFiles(out, settings, exclude_truncated=exclude_truncated)
    job.check()
    size = -(-_SHARD_ROWS // answerer.together) * answerer.together
    shards = Shards(sources, size=size, limit=limit)
    with job.shared() as claims:
        with job.alone(claims):
            if (earlier := job.finished(shards.rows)) is not None:
                return earlier
            job.begin()
        share = Share(
            job, shards, answerer, keep_reasoning=sampling.keep_reasoning, patience=patience,
            watch=watch,
        )  # fmt: skip
        try:
            share.work(claims, say)
        finally:
            share.journal.close()
        with job.alone(claims):
            job.finish(share.journal, share.summary)
    return share.summary


def check_out(out: Path, sources: list[str]) -> None:
    """Refuse an output path that cannot work, before a target is loaded."""
    check_place(out, read=sources)
    if not out.name.endswith(".jsonl"):
        raise BadInput(f"'{out.name}' is not a .jsonl file", where="--out")
