"""What drafts are worth in llama.cpp on this CPU: plain against drafted, in turns.

    make bench-llamacpp ARGS="smollm2-135m-eagle3 runs/dflash --prompts eval_mt_bench.jsonl"

For each type of the target's numbers (the draft's are the same) and each number of drafted tokens,
the same prompts are answered greedily by the server without a draft and with it, one after the
other, in several turns. Printed are tokens per round, what a round costs in plain tokens, and the
speed-up: medians over the turns, with the smallest and the largest. Run it alone: the server's
threads spin.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fledge.cli.llamacpp import ENGINE, pair_of
from fledge.data.template import ChatTemplate
from fledge.decode.llamacpp import Answer, LlamaServer
from fledge.formats.export import export_draft
from fledge.measure.answers import encode_prompt, read_prompts
from fledge.models.resolve import load_tokenizer
from gguf_target import target_gguf

DTYPES: dict[str, dict[str, Any]] = {
    "f16": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16},
    "q8_0": {"quantise": "q8_0"},
}


@dataclass(frozen=True)
class Row:
    draft: str
    dtype: str
    drafted: int  # tokens a round
    plain_tokens_per_s: float
    tokens_per_s: float
    length: float
    round_cost: float  # in plain tokens
    speedup: float
    least: float
    most: float
    same_texts: int
    texts: int


def ask(server: LlamaServer, prompts: list[list[int]], tokens: int) -> list[Answer]:
    return [server.complete(ids, tokens) for ids in prompts]


def speed(answers: list[Answer]) -> float:
    return sum(a.tokens - 1 for a in answers) / sum(a.seconds for a in answers)


def measured(
    name: str, dtype: str, servers: tuple[LlamaServer, LlamaServer], k: int,
    prompts: list[list[int]], tokens: int, turns: int,
) -> Row:  # fmt: skip
    plain_server, server = servers
    ask(plain_server, prompts[:1], 8)
    ask(server, prompts[:1], 8)
    plain, drafted = [], []
    for _ in range(turns):
        plain.append(ask(plain_server, prompts, tokens))
        drafted.append(ask(server, prompts, tokens))
    gains = [speed(b) / speed(a) for a, b in zip(plain, drafted, strict=True)]
    made = sum(a.tokens - 1 for a in drafted[0])
    length = made / sum(a.rounds for a in drafted[0])
    gain = statistics.median(gains)
    same = sum(a.token_ids == b.token_ids for a, b in zip(plain[0], drafted[0], strict=True))
    return Row(
        name, dtype, k,
        statistics.median(map(speed, plain)), statistics.median(map(speed, drafted)),
        length, length / gain, gain, min(gains), max(gains), same, len(prompts),
    )  # fmt: skip


def rows(args: argparse.Namespace, scratch: Path) -> Iterator[Row]:
    tokenizer = load_tokenizer(args.target)
    template = ChatTemplate.of(tokenizer)
    chosen = [p for path in args.prompts for p in read_prompts([str(path)], limit=args.limit)]
    prompts = [encode_prompt(list(prompt.messages), template, tokenizer) for prompt in chosen]
    for dtype in args.dtypes:
        target = target_gguf(args.target, scratch / f"target-{dtype}.gguf", dtype)
        with LlamaServer.start(target, threads=args.threads) as plain:
            for draft in args.drafts:
                place = export_draft(
                    draft, scratch / f"{Path(draft).name}-{dtype}", engine=ENGINE,
                    target=args.target, without_target=True, **DTYPES[dtype],
                )  # fmt: skip
                pair = pair_of(place, place, args.target, 0)
                trained = json.loads((place / "fledge_export.json").read_text())
                for k in args.tokens:
                    if k > trained["num_draft_tokens"]:
                        continue
                    with LlamaServer.start(
                        target, pair.draft, spec_type=pair.spec_type, draft_tokens=k,
                        threads=args.threads,
                    ) as server:  # fmt: skip
                        yield measured(
                            Path(draft).name, dtype, (plain, server), k, prompts,
                            args.max_new_tokens, args.turns,
                        )  # fmt: skip


def line(row: Row) -> str:
    cells = [row.draft, row.dtype, str(row.drafted), f"{row.plain_tokens_per_s:.0f}"]
    cells += [f"{row.tokens_per_s:.0f}", f"{row.length:.2f}", f"{row.round_cost:.2f}"]
    cells += [f"**{row.speedup:.2f}** ({row.least:.2f} to {row.most:.2f})"]
    return f"| {' | '.join([*cells, f'{row.same_texts} of {row.texts}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("drafts", nargs="+", help="runs, drafts, or the name of a shipped one")
    add("--target", default="smollm2-135m")
    add("--prompts", nargs="+", default=["mixed"])
    add("--limit", type=int, default=2, help="prompts of each set")
    add("--max-new-tokens", type=int, default=96)
    add("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    add("--tokens", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7], help="drafted a round")
    add("--turns", type=int, default=3)
    add("--threads", type=int, default=0, help="0: one per core")
    add("--out", type=Path, help="keep the figures as JSON")
    args = parser.parse_args()
    columns = ("draft", "numbers", "drafted", "plain tokens/s", "tokens/s", "length")
    print(f"| {' | '.join([*columns, 'a round costs', 'speed-up', 'texts equal'])} |")
    print("|---|---|" + "--:|" * 7)
    found: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="bench-") as scratch:
        for row in rows(args, Path(scratch)):
            print(line(row), flush=True)
            found.append(asdict(row))
            if args.out is not None:
                args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
