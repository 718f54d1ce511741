"""Time and memory of preparing many rows, from an empty cache to the first pack of a run.

    python benchmarks/bench_rows.py chats.jsonl DIR --rows 400000
    python benchmarks/bench_rows.py chats.jsonl DIR --rows 4000000 --characters 100

The chats are repeated, each with a number in front, until there are `--rows` of them;
`--characters` truncates their messages where disk or time is short. DIR takes the file and the
cache, and both are removed. Every start is a new process that does what `fledge train` does before
its first step: tokenize, hold rows out, count the vocabulary, plan an epoch, lay out the first
pack. The second start finds the rows prepared. Peaks are of the resident memory of that process in
each phase (VmHWM in Linux, which includes pages of mapped files), and of its largest worker.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20


def write_chats(chats: Path, out: Path, rows: int, characters: int | None) -> None:
    originals = [json.loads(line) for line in chats.read_bytes().splitlines()]
    with out.open("w") as file:
        for number, row in enumerate(itertools.islice(itertools.cycle(originals), rows)):
            messages = [
                {**message, "content": message["content"][:characters]}
                for message in row["messages"]
            ]
            messages[0]["content"] = f"{number} {messages[0]['content']}"
            file.write(json.dumps({"messages": messages}) + "\n")


class Phases:
    """Seconds, and peak and final resident memory, of each phase."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        peak, anonymous = (int(status[key].split()[0]) << 10 for key in ("VmHWM", "RssAnon"))
        self.found[name] = {"s": seconds, "peak": peak, "own": anonymous}


def start(data: str, tokens: int) -> dict[str, object]:
    """Do what a run does before its first step, and measure its phases."""
    from fledge.core.progress import unwatched
    from fledge.data.vocab import special_token_ids
    from fledge.recipe.schema import load_recipe
    from fledge.target.kinds import target_tokenizer
    from fledge.training.batches import PackStream
    from fledge.training.drafts import choose_vocabulary
    from fledge.training.setup import split_training, tokenised

    words = [f"data.train={data}", f"packing.tokens={tokens}", "draft.draft_vocab_size=8192"]
    recipe = load_recipe("smollm2_cpu", words)
    tokenizer, phases = target_tokenizer(recipe.target), Phases()
    with phases.phase("imports"):
        import torch  # noqa: F401  (a run imports it; not part of the rows' memory)
    with phases.phase("tokenise"):
        rows = tokenised(recipe.data.train, recipe, unwatched)
    with phases.phase("hold out"):
        train, _ = split_training(rows, recipe)
    with phases.phase("vocabulary"):
        special = special_token_ids(tokenizer)
        choose_vocabulary(
            recipe, train, vocab_size=len(tokenizer), special_ids=special, fingerprint=""
        )
    with phases.phase("plan"):
        stream = PackStream(train, tokens=tokens, pad_id=0, seed=0, epochs=1)
    with phases.phase("first pack"):
        stream.batch(0)
    with phases.phase("100 more"):
        for step in range(1, min(101, stream.steps)):
            stream.batch(step)
    return {
        "rows": len(rows),
        "tokens": rows.tokens,
        "packs": stream.steps,
        "padding": stream.padding_share,
        "worker": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10,
        "phases": phases.found,
    }


def run_start(data: Path, cache: Path, tokens: int) -> dict:
    command = [sys.executable, __file__, str(data), str(cache), "--start", "--tokens", str(tokens)]
    environment = {**os.environ, "FLEDGE_CACHE": str(cache)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout)


def table(starts: list[dict]) -> str:
    names = list(starts[0]["phases"])
    lines = ["| | " + " | ".join(names) + " | all |", "|---" + "|--:" * (len(names) + 1) + "|"]
    for title, figures in zip(("first start", "second start"), starts, strict=True):
        phases = figures["phases"].values()
        seconds, peaks = [p["s"] for p in phases], [p["peak"] / MIB for p in phases]
        anonymous = [p["own"] / MIB for p in phases]
        rows = {"s": (seconds, sum(seconds)), "peak MiB": (peaks, max(peaks))}
        rows["own MiB after"] = (anonymous, max(anonymous))
        for label, (values, total) in rows.items():
            cells = " | ".join(f"{value:,.1f}" for value in [*values, total])
            lines.append(f"| {title}, {label} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chats", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--characters", type=int)
    parser.add_argument("--tokens", type=int, default=4096, help="of a pack")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(start(str(args.chats), args.tokens)))
        return
    import shutil

    from fledge.models.resolve import local_model

    model = local_model("smollm2-135m")  # not timed: fetched once per machine
    args.directory.mkdir(parents=True, exist_ok=True)
    data, cache = args.directory / "many.jsonl", args.directory / "cache"
    (cache / "models").mkdir(parents=True)
    (cache / "models" / model.name).symlink_to(model)
    try:
        write_chats(args.chats, data, args.rows, args.characters)
        starts = [run_start(data, cache, args.tokens) for _ in range(2)]
        size, rows_size = (
            data.stat().st_size,
            sum(p.stat().st_size for p in cache.rglob("part-*")),
        )
    finally:
        data.unlink(missing_ok=True)
        shutil.rmtree(cache)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    first = starts[0]
    print(f"## {first['rows']:,} rows, {first['tokens']:,} tokens\n")
    print(
        f"{size / 1e9:.2f} GB of JSON, {rows_size / 1e9:.2f} GB of rows; "
        f"{first['packs']:,} packs of"
    )
    print(f"{args.tokens}, {first['padding']:.3%} padding; the largest worker took")
    print(
        f"{first['worker'] / MIB:,.0f} MiB. Commit {commit.stdout.strip()}, {os.cpu_count()} cores,"
    )
    print(f"Python {platform.python_version()}.\n\n{table(starts)}")


if __name__ == "__main__":
    main()
