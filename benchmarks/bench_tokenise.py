"""How long tokenization takes, and how long the second start takes.

    python benchmarks/bench_tokenise.py chats.jsonl

Each start is a new process, as for a user; the cache is empty at first. The table goes to
benchmarks/results/tokenise.md with --write.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "tokenise.md"


def start(data: str, cache: str) -> tuple[float, dict]:
    from fledge.models.resolve import local_model

    model = str(local_model("smollm2-135m"))  # not timed: fetched once per machine
    command = [sys.executable, "-m", "fledge.cli.main", "data", "prepare", data]
    command += ["--model", model, "--json"]
    begin = time.perf_counter()
    environment = {**os.environ, "FLEDGE_CACHE": cache}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return time.perf_counter() - begin, json.loads(process.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        first, facts = start(args.data, cache)
        second, _ = start(args.data, cache)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    tokens = facts["tokens"]
    text = f"""# Tokenising

`python benchmarks/bench_tokenise.py {args.data} --write`, commit {commit.stdout.strip()},
{os.cpu_count()} cores, Python {platform.python_version()}, whole processes, empty cache at first.

| rows | tokens | first start | tokens/s | second start |
|--:|--:|--:|--:|--:|
| {facts["rows"]:,} | {tokens:,} | {first:.1f} s | {tokens / first:,.0f} | {second:.2f} s |
"""
    print(text)
    if args.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
