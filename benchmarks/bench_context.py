"""Memory of a training step on ranks that share their rows, counted on the CPU.

One row of one document, whose last 60 % are supervised (like an answer after its prompt), on 1, 2,
4 and 8 ranks over gloo. `kept` is what autograd holds after the forward pass, without weights;
`answer` is a rank's part of the target's answer; `shared keys` are the depth-0 keys and values of
all slots, the only part that does not shrink. `attention` is the number of (query, key) pairs that
a rank's queries see. Figures are those of the largest and the smallest rank.

    python benchmarks/bench_context.py [--tokens 8192] [--ranks 1,2,4,8]
"""

import argparse
import os
import socket
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from transformers import LlamaConfig

from fledge import Eagle3TrainerModule, LlamaEagle3DraftModel, PEagleTrainerModule
from fledge.core.distributed import join_world, leave_world
from fledge.core.head import TargetHead
from fledge.rollout.context import ContextRanks
from live_bytes import watch_saved

V, W, D = 4000, 2000, 256
SHAPE = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 3 * D, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "draft_vocab_size": W, "target_hidden_size": D,
}  # fmt: skip


def make_module(kind: str, tokens: int, context: ContextRanks | None) -> Any:
    torch.manual_seed(0)
    layers = {"eagle3": 1, "peagle": 4}[kind]
    parallel = {"parallel_drafting": True, "mask_token_id": V - 1} if kind == "peagle" else {}
    config = LlamaConfig(
        **SHAPE, num_hidden_layers=layers, max_position_embeddings=tokens, **parallel
    )
    options = {
        "selected_token_ids": torch.arange(W),
        "selected_token_mask": torch.arange(V) < W,
        "target_head": TargetHead(torch.randn(V, D)),
        "context": context,
    }
    draft = LlamaEagle3DraftModel(config)
    draft.freeze_embeddings()
    if kind == "eagle3":
        return Eagle3TrainerModule(draft, ttt_steps=7, **options)
    return PEagleTrainerModule(draft, num_depths=8, **options)


def make_batch(tokens: int) -> dict[str, torch.Tensor]:
    loss_mask = (torch.arange(tokens) >= 0.4 * tokens).long()[None]
    return {
        "input_ids": torch.randint(0, V, (1, tokens)),
        "attention_mask": torch.ones(1, tokens, dtype=torch.long),
        "loss_mask": loss_mask,
        "aux_hidden_states": torch.randn(1, tokens, 3 * D),
        "target_last_hidden_states": torch.randn(1, tokens, D),
    }


def measure(kind: str, tokens: int, size: int) -> dict[str, float]:
    """Run a step on this rank and measure what it kept."""
    world = join_world(torch.device("cpu"), context=size)
    module = make_module(kind, tokens, ContextRanks.of(world))
    ready = module.prepare_inputs(**make_batch(tokens), seed=0)
    normalizer = world.sum_(ready.charged_K.clone())
    weights = [*module.parameters(), *module.buffers(), ready.aux_OD, ready.supervision.hidden_SD]
    with watch_saved(weights) as saved:
        out = module.score(ready, normalizer)
    kept = saved.total_bytes
    out.loss.backward()
    world.sum_gradients([p for p in module.draft_model.parameters() if p.requires_grad])
    config, plan = module.draft_model.config, ready.plan
    keys = 2 * len(plan.slot_T) * config.num_key_value_heads * config.head_dim * 4
    pairs = sum(int((rows.slot_N - rows.first_N + 1).sum()) for rows in plan.depths)
    loss = world.sum_(out.loss.detach().clone())
    leave_world(world)
    return {
        "kept": kept,
        "answer": ready.aux_OD.nbytes + ready.supervision.hidden_SD.nbytes,
        "shared keys": keys * config.num_hidden_layers,
        "attention": pairs,
        "loss": float(loss),
    }


def _on_rank(rank: int, size: int, port: int, kind: str, tokens: int, results: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    results.put(measure(kind, tokens, size))


def on_ranks(size: int, kind: str, tokens: int) -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    arguments = [(rank, size, port, kind, tokens, results) for rank in range(size)]
    processes = [context.Process(target=_on_rank, args=args) for args in arguments]
    for process in processes:
        process.start()
    figures = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", default="1,2,4,8")
    args = parser.parse_args()
    print("| | ranks | kept MiB | against one | answer MiB | shared keys MiB | attention, share |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for kind in ("eagle3", "peagle"):
        single: dict[str, float] = {}
        for size in map(int, args.ranks.split(",")):
            figures = on_ranks(size, kind, args.tokens)
            most, least = (
                {name: pick(rank[name] for rank in figures) for name in figures[0]}
                for pick in (max, min)
            )
            single = single or most
            assert abs(most["loss"] - single["loss"]) < 1e-5, "ranks must not change the loss"

            def mib(name: str, low: dict[str, float] = least, high: dict[str, float] = most) -> str:
                sizes = {f"{side[name] / 2**20:.1f}" for side in (low, high)}
                return " to ".join(sorted(sizes, key=float))

            shares = sorted({f"{s['attention'] / single['attention']:.3f}" for s in (least, most)})
            print(
                f"| {kind} | {size} | {mib('kept')} | {most['kept'] / single['kept']:.3f} "
                f"| {mib('answer')} | {mib('shared keys')} | {' to '.join(shares)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
