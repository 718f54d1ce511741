"""How much faster replay is than decoding live, on the same texts, device and run.

    python benchmarks/bench_replay.py DRAFT --target smollm2-135m --prompts mt_bench.jsonl \\
        [--limit 20] [--draft-tokens 7] [--batches 1,8] [--dtype float32] [--out replay.json]

The target answers the prompts once (kept in the cache). All answers are replayed, and every one is
decoded live, one at a time and eight at a time; the rounds are compared. Both sides are warm.
Prints a Markdown table; the ratio is seconds live over seconds replayed.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from fledge.cli.loading import target_options
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.measure.answers import AnsweredTurn, cached_answers, read_prompts
from fledge.measure.replay import Text, replay
from fledge.training.runs import draft_directory, load_draft_beside, load_target


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def decode_live(
    decoder: SpeculativeDecoder, turns: list[AnsweredTurn], stops: Stops, batch: int
) -> tuple[float, list[Generation]]:
    """Returns seconds and texts in the order of the turns; similar lengths are batched together."""
    order = sorted(range(len(turns)), key=lambda i: len(turns[i].prompt_ids))
    decoder.generate([turns[0].prompt_ids], Stops(8))
    begin, generations = clock(decoder.target.device), {}
    for start in range(0, len(order), batch):
        members = order[start : start + batch]
        texts = decoder.generate([turns[i].prompt_ids for i in members], stops)
        generations |= dict(zip(members, texts, strict=True))
        print(f"  live, batch {batch}: {len(generations)} of {len(turns)}", flush=True)
    return clock(decoder.target.device) - begin, [generations[i] for i in range(len(turns))]


def replay_all(
    target: Any, draft: Any, turns: list[AnsweredTurn], draft_tokens: int, batch_tokens: int
) -> tuple[float, float, Any]:
    """Returns (seconds the first time, seconds when warm, replays)."""
    texts = [Text(turn.prompt_ids, turn.answer_ids) for turn in turns]
    seconds = []
    for _ in range(2):
        begin = clock(target.model.device)
        replays = replay(
            target, draft, texts, num_draft_tokens=draft_tokens, batch_tokens=batch_tokens
        )
        seconds.append(clock(target.model.device) - begin)
    return seconds[0], seconds[1], replays


def same_rounds(turns: list[AnsweredTurn], live: list[Generation], replays: Any) -> tuple[int, int]:
    """Returns (equal rounds, all rounds) over the texts on which both ways agree."""
    pairs = [
        (generation.rounds, replayed.rounds)
        for generation, turn, replayed in zip(live, turns, replays, strict=True)
        if generation.token_ids == turn.answer_ids
    ]
    equal = sum(
        len(set(live_rounds) & set(replayed_rounds)) for live_rounds, replayed_rounds in pairs
    )
    return equal, sum(len(live_rounds) for live_rounds, _ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("draft", type=Path)
    parser.add_argument("--target", default="")
    parser.add_argument("--prompts", nargs="+", default=["mixed"])
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="")
    parser.add_argument("--device", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    path = draft_directory(options.draft)
    loading = target_options(path, "", options.dtype, options.device, trust_remote_code=False)
    target = load_target(path, options.target, **loading)
    draft = load_draft_beside(target, path)
    prompts = read_prompts(options.prompts, limit=options.limit)
    answers = cached_answers(target, prompts, max_new_tokens=options.max_new_tokens)
    turns = answers.turns
    tokens = sum(len(turn.answer_ids) for turn in turns)
    cold_s, warm_s, replays = replay_all(
        target, draft, turns, options.draft_tokens, options.batch_tokens
    )
    stops = Stops(options.max_new_tokens, eos_token_ids(target.model, target.tokenizer))
    decoder = SpeculativeDecoder(
        target.model, draft, aux_layer_ids=target.aux_layer_ids,
        num_draft_tokens=options.draft_tokens,
    )  # fmt: skip
    device = str(target.model.device)
    if target.model.device.type == "cuda":
        device = torch.cuda.get_device_name(target.model.device)
    result: dict[str, Any] = {
        "device": device, "dtype": str(target.info().dtype), "answers": len(turns),
        "tokens": tokens, "replay_first_s": cold_s, "replay_s": warm_s, "live": {},
    }  # fmt: skip
    rows = [
        f"\n{len(turns)} answers, {tokens:,} tokens, {device}, {result['dtype']}\n",
        "| | seconds | tokens/s | live / replay | rounds as replayed |",
        "|---|--:|--:|--:|--:|",
        f"| replay (first time {cold_s:.1f} s) | {warm_s:.2f} | {tokens / warm_s:,.0f} | | |",
    ]
    for batch in map(int, options.batches.split(",")):
        seconds, live = decode_live(decoder, turns, stops, batch)
        equal, total = same_rounds(turns, live, replays)
        rows.append(
            f"| live, batch {batch} | {seconds:.1f} | {tokens / seconds:,.0f} | "
            f"{seconds / warm_s:.0f} | {equal:,} of {total:,} |"
        )
        result["live"][batch] = {"seconds": seconds, "ratio": seconds / warm_s,
                                 "same_rounds": equal, "rounds": total}  # fmt: skip
    print("\n".join(rows))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
