"""From a target's GGUF file to drafts that speed it up: answers, two drafts, lengths, speed-ups.

    python benchmarks/second_target.py --target qwen2.5-coder-0.5b-instruct-q4_k_m.gguf \
        --chats smollm2_chat.jsonl \
        --prompts eval_mt_bench.jsonl eval_gsm8k.jsonl eval_alpaca.jsonl --out second_target \
        --regenerate-s 420 --train-s 150

The target answers the first turns of the chats, code and mathematics first, for --regenerate-s
seconds; every fifth MBPP question is held out. Each recipe trains on the answers for --train-s
seconds (as in `race.py`). The drafts are replayed over the prompts and over the held-out questions,
and decoded live in batches, compared to plain decoding in the same batches.

Every stage writes a file to --out and is skipped if that file exists, so the command can be
repeated; use --stages if one call is not long enough for all of them. result.md has the results.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import race
from fledge.core.files import atomic_file, write_json, write_text
from fledge.core.machine import find_device
from fledge.data.dialogue import Sampling
from fledge.data.regenerate import regenerate
from fledge.data.template import ChatTemplate
from fledge.decode.regenerate import LocalModel
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.measure.answers import encode_prompt, read_prompts
from fledge.target.hf.loading import load_hf_model
from fledge.training.runs import (
    draft_directory,
    load_draft_beside,
    load_target,
    trained_tokens,
    with_layers_of,
)

STAGES = ("prompts", "regenerate", "train", "replay", "live")
HELD_OUT = ("mbpp", 5)  # (kind of chat, n): every n-th one is not trained on
FIRST = ("codealpaca", "gpteacher_codegen", "mbpp", "gsm8k_train", "math_train")
CHUNK_BATCHES = 4  # batches in a chunk, whose questions are sorted by length together


def once(path: Path, make: Callable[[], Any]) -> Any:
    """The result of a stage, made now or in an earlier call."""
    if not path.is_file():
        write_json(path, make())
        print(f"{path.name}: {path.read_text()[:400]}", flush=True)
    return json.loads(path.read_text())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with atomic_file(path) as handle:
        handle.writelines(json.dumps(row).encode() + b"\n" for row in rows)


# --- prompts ------------------------------------------------------------------------------------


def prompts(args: argparse.Namespace) -> dict[str, Any]:
    """Write the first turn of every chat: the questions to answer, in order, and those held out."""
    with args.chats.open() as handle:
        chats = [json.loads(line) for line in handle]
    questions = [
        {"id": chat["id"], "messages": list(itertools.takewhile(_is_question, chat["messages"]))}
        for chat in chats
    ]
    kind, every = HELD_OUT
    held_out = [row for row in questions if _kind(row) == kind][::every]
    held_out_ids = {row["id"] for row in held_out}
    remaining = [row for row in questions if row["id"] not in held_out_ids]
    random.Random(0).shuffle(remaining)  # so that any prefix is a fair sample
    remaining.sort(key=lambda row: _kind(row) not in FIRST)
    write_rows(args.out / "questions.jsonl", remaining[: args.rows or None])
    write_rows(args.out / "eval_code.jsonl", [{**row, "category": "coding"} for row in held_out])
    return {"questions": len(remaining[: args.rows or None]), "held_out": len(held_out)}


def _is_question(message: dict[str, Any]) -> bool:
    return message["role"] != "assistant"


def _kind(row: dict[str, Any]) -> str:
    return str(row["id"]).partition("/")[0]


# --- regenerate ---------------------------------------------------------------------------------


def answers(args: argparse.Namespace) -> dict[str, Any]:
    """Answer chunk by chunk until the questions or the seconds run out, then join all answers."""
    with (args.out / "questions.jsonl").open() as handle:
        lines = list(handle)
    size = CHUNK_BATCHES * args.batch
    begin, longest, tokens, seconds, answer_files = time.monotonic(), 0.0, 0, 0.0, []
    sampling = Sampling(max_new_tokens=args.max_new_tokens)
    loaded = load_hf_model(args.target, dtype=args.dtype, device=args.device)
    answerer = LocalModel(loaded, args.target, sampling, args.batch)
    for first in range(0, len(lines), size):
        chunk_begin = time.monotonic()
        if answer_files and chunk_begin - begin + longest > args.regenerate_s:
            break
        asked, answered = (args.out / "answers" / f"{x}-{first:06}.jsonl" for x in ("q", "a"))
        write_text(asked, "".join(lines[first : first + size]))
        summary = regenerate([str(asked)], answered, answerer, sampling)
        answer_files.append(answered)
        tokens, seconds = tokens + summary.tokens_now, seconds + summary.seconds_now
        longest = max(longest, time.monotonic() - chunk_begin)
        speed = tokens / seconds if seconds else 0.0
        print(f"{first + size:,} rows asked, {speed:,.0f} tokens/s", flush=True)
    with atomic_file(args.out / "answers.jsonl") as handle:
        handle.writelines(answered.read_bytes() for answered in answer_files)
    rows = [json.loads(line) for answered in answer_files for line in answered.open()]
    return {
        "rows": len(rows), "of": len(lines), "tokens": sum(row["tokens"] for row in rows),
        "cut": sum(row["finish"] == "length" for row in rows),
        "seconds_of_this_call": seconds, "tokens_per_s": tokens / seconds if seconds else None,
        "batch": args.batch, "max_new_tokens": args.max_new_tokens, "dtype": args.dtype,
    }  # fmt: skip


# --- train and replay ---------------------------------------------------------------------------


def trained(recipe: str, args: argparse.Namespace) -> dict[str, Any]:
    words = [f"target.model={args.target}", f"target.dtype={args.dtype}", *args.set]
    options = argparse.Namespace(
        data=args.out / "answers.jsonl", set=words, seeds=1, seconds=args.train_s, probe=args.probe
    )
    return race.race(recipe, args.out / "runs", options)


def run_of(recipe: str, args: argparse.Namespace) -> Path:
    """The directory in which `race` puts the run of its first seed."""
    return Path(args.out, "runs", f"{Path(recipe).stem}-0")


def sets(args: argparse.Namespace) -> list[str]:
    return [*map(str, args.prompts), str(args.out / "eval_code.jsonl")]


def replayed(args: argparse.Namespace) -> dict[str, Any]:
    """Replay all drafts on all sets, with a few answers decoded live to verify it."""
    words = ["eval", *(str(run_of(recipe, args)) for recipe in args.recipes)]
    words += ["--target", args.target, "--live", "4", "--limit", str(args.limit)]
    words += ["--max-new-tokens", str(args.eval_tokens), "--batch", "64"]
    return race.fledge(*words, *(word for path in sets(args) for word in ("--prompts", path)))


# --- live ---------------------------------------------------------------------------------------


def live(recipe: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """batch -> set of prompts -> speed-up over plain decoding in the same batches."""
    path = draft_directory(run_of(recipe, args))
    results: dict[str, Any] = {}
    with _pair(path, dtype, args) as (plain, drafted, encoded, stops):
        for batch in args.batches:
            results[str(batch)] = {
                name: _timed(plain, drafted, asked, batch, stops) for name, asked in encoded.items()
            }
    return results


@contextmanager
def _pair(path: Path, dtype: str, args: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Yields (plain decoder, decoder with the draft, prompts by set, stop conditions)."""
    with load_target(path, args.target, dtype=dtype, device=args.device) as target:
        view = with_layers_of(target, path)
        model, tokenizer = view.model, view.tokenizer
        template = ChatTemplate.of(tokenizer)
        drafted = SpeculativeDecoder(
            model, load_draft_beside(view, path), aux_layer_ids=view.aux_layer_ids,
            num_draft_tokens=args.draft_tokens or trained_tokens(path),
        )  # fmt: skip
        encoded = {
            Path(source).stem.removeprefix("eval_"): [
                encode_prompt(list(prompt.messages), template, tokenizer)
                for prompt in read_prompts([source], limit=args.live_prompts)
            ]
            for source in sets(args)
        }
        stops = Stops(args.eval_tokens, eos_token_ids(model, tokenizer))
        yield SpeculativeDecoder(model), drafted, encoded, stops


@dataclass
class Spent:
    """The cost of one way of decoding, batch by batch."""

    tokens: list[int] = field(default_factory=list)  # without the first one, from the prefill
    seconds: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)  # of the target; a batch counts once

    def add(self, way: SpeculativeDecoder, made: list[Generation]) -> None:
        self.tokens.append(sum(len(text.token_ids) - 1 for text in made))
        self.seconds.append(way.timing.decode_s)
        self.passes.append(way.timing.rounds)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def tokens_per_pass(self) -> float:
        return sum(self.tokens) / sum(self.passes)


def gained(plain: Spent, drafted: Spent) -> dict[str, Any]:
    """The speed-up, unless the clock was disturbed: a round contains a pass of the target, so that
    the speed-up cannot exceed the ratio of the passes."""
    most = drafted.tokens_per_pass / plain.tokens_per_pass
    speedup = drafted.tokens_per_s / plain.tokens_per_s
    ways = (drafted.tokens, drafted.seconds, plain.tokens, plain.seconds)
    speedups = [(d / ds) / (p / ps) for d, ds, p, ps in zip(*ways, strict=True) if d and p]
    disturbed = speedup > most
    return {
        "plain_tokens_per_s": plain.tokens_per_s, "tokens_per_s": drafted.tokens_per_s,
        "most_possible": most, "disturbed": disturbed,
        "speedup": None if disturbed else speedup,
        "median_speedup": None if disturbed else median(speedups),
    }  # fmt: skip


def _timed(
    plain: SpeculativeDecoder,
    drafted: SpeculativeDecoder,
    prompts: list[list[int]],
    batch: int,
    stops: Stops,
) -> dict[str, Any]:
    """Decode the same batches both ways, alternating which way goes first."""
    costs = {plain: Spent(), drafted: Spent()}
    same, rounds = 0, []
    for number, begin in enumerate(range(0, len(prompts), batch)):
        members = prompts[begin : begin + batch]
        generations: dict[SpeculativeDecoder, list[Generation]] = {}
        for way in [plain, drafted] if number % 2 else [drafted, plain]:
            if number == 0:  # warm-up: the first passes of a shape are slow
                way.generate(members, Stops(min(8, stops.max_new_tokens)))
            generations[way] = way.generate(members, stops)
            costs[way].add(way, generations[way])
        pairs = zip(generations[plain], generations[drafted], strict=True)
        same += sum(a.token_ids == b.token_ids for a, b in pairs)
        rounds += [r.emitted for text in generations[drafted] for r in text.rounds]
    return {
        "texts": len(prompts), "same_texts": same,
        "acceptance_length": sum(rounds) / max(1, len(rounds)),
        **gained(costs[plain], costs[drafted]),
    }  # fmt: skip


# --- results ------------------------------------------------------------------------------------


def collected(args: argparse.Namespace) -> dict[str, Any]:
    """The results of all stages that have run."""
    result: dict[str, Any] = {"target": Path(args.target).name}
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    for path in sorted(args.out.glob("stage-*.json")):
        result[path.stem.removeprefix("stage-")] = json.loads(path.read_text())
    return result


def tables(result: dict[str, Any], args: argparse.Namespace) -> str:
    lines = [f"# {result['target']} on {result['device']}", ""]
    if info := result.get("regenerate"):
        speed = f"{info['tokens_per_s']:,.0f} tokens/s" if info["tokens_per_s"] else "earlier calls"
        lines += [
            f"{info['rows']:,} of {info['of']:,} questions answered, {info['tokens']:,} "
            f"tokens, {info['cut']:,} answers cut at {info['max_new_tokens']} ({speed},"
            f" {info['batch']} at a time).",
            "",
        ]
    names = [Path(source).stem.removeprefix("eval_") for source in sets(args)]
    if replay := result.get("replay"):
        lines += ["| recipe | steps | seconds | length | " + " | ".join(names) + " |"]
        lines += ["|---|" + "--:|" * (len(names) + 3)]
        recipes = (Path(recipe).stem for recipe in args.recipes)
        for recipe, draft in zip(recipes, replay["drafts"], strict=True):
            run, by_set = result.get(f"train-{recipe}", {}), draft["by_set"]
            lengths = (by_set[Path(source).stem]["acceptance_length"] for source in sets(args))
            cells = [f"{draft['acceptance_length']:.3f}", *(f"{length:.3f}" for length in lengths)]
            spent = f"{run['training_s'][0]:.0f}" if run else "?"
            lines += [f"| {recipe} | {run.get('steps', '?')} | {spent} | {' | '.join(cells)} |"]
        lines += [""]
    lines += ["| recipe | dtype | batch | set | speed-up | median | length | texts equal |"]
    lines += ["|---|---|--:|---|--:|--:|--:|--:|"]
    for path, dtype in itertools.product(args.recipes, args.live_dtypes):
        recipe = Path(path).stem
        for batch, by_set in result.get(f"live-{recipe}-{dtype}", {}).items():
            lines += [
                f"| {recipe} | {dtype} | {batch} | {name} | {_gain(figures['speedup'])}"
                f" | {_gain(figures['median_speedup'])} | {figures['acceptance_length']:.2f}"
                f" | {figures['same_texts']} of {figures['texts']} |"
                for name, figures in by_set.items()
            ]
    return "\n".join(lines) + "\n"


def _gain(speedup: float | None) -> str:
    return "clock disturbed" if speedup is None else f"{speedup:.2f}"


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", required=True, help="GGUF file, directory or name")
    add("--chats", type=Path, required=True, help="rows with an id KIND/NUMBER and messages")
    add("--prompts", type=Path, nargs="+", required=True, help="what drafts are judged on")
    add("--out", type=Path, required=True, help="a directory; what is there is not done again")
    add("--recipes", nargs="+", default=["qwen25_coder_gpu", "qwen25_coder_dspark_gpu"])
    add("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    add("--rows", type=int, default=0, help="questions to answer; 0: all")
    add("--batch", type=int, default=256, help="questions answered at a time")
    add("--max-new-tokens", type=int, default=320, help="of an answer to learn from")
    add("--regenerate-s", type=float, default=420, help="no chunk is begun that would end later")
    add("--train-s", type=float, default=150, help="of training, each recipe")
    add("--probe", type=int, default=race.PROBE, help="steps that say how many fit")
    add("--set", nargs="*", default=[], help="overrides of every recipe")
    add("--limit", type=int, default=0, help="prompts of each set, replayed; 0: all")
    add("--eval-tokens", type=int, default=256, help="of an answer that drafts are judged on")
    add("--batches", type=int, nargs="+", default=[1, 16], help="of live decoding")
    add("--live-prompts", type=int, default=16, help="of each set, decoded live")
    add("--live-dtypes", nargs="+", default=["bfloat16", "float32"] if cuda else ["float32"])
    add("--draft-tokens", type=int, default=0, help="in a live round; 0: as trained")
    add("--dtype", default="bfloat16" if cuda else "float32", help="of the target that is learnt")
    add("--device", default=None)
    args = parser.parse_args(words)
    args.device = str(find_device(args.device))
    return args


def main(words: list[str] | None = None) -> None:
    args = parsed(words)
    (args.out / "runs").mkdir(parents=True, exist_ok=True)
    work: dict[str, dict[str, Callable[[], Any]]] = {
        "prompts": {"prompts": lambda: prompts(args)},
        "regenerate": {"regenerate": lambda: answers(args)},
        "train": {
            f"train-{Path(name).stem}": lambda name=name: trained(name, args)
            for name in args.recipes
        },
        "replay": {"replay": lambda: replayed(args)},
        "live": {
            f"live-{Path(name).stem}-{dtype}": lambda name=name, dtype=dtype: live(
                name, dtype, args
            )
            for name, dtype in itertools.product(args.recipes, args.live_dtypes)
        },
    }
    for stage in STAGES:
        for name, make in work[stage].items() if stage in args.stages else ():
            once(args.out / f"stage-{name}.json", make)
    result = collected(args)
    write_json(args.out / "result.json", result)
    write_text(args.out / "result.md", tables(result, args))
    print(tables(result, args))


if __name__ == "__main__":
    main()
