"""What a rank holds of a draft with `training.shard`: bytes of weights, gradients and moments.

    python benchmarks/bench_sharding.py [--hidden 1024] [--ranks 1 2 4]

Ranks are processes on this CPU (gloo); every tensor is counted, nothing is estimated. "in a step"
is the size of the trained weights during a step: the gathered ones plus this rank's shard.
"""

import argparse
import multiprocessing
import os
import socket
import time
from typing import Any

import torch
from transformers import LlamaConfig

from fledge.core.distributed import World, join_world, leave_world
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.training.optimizer import make_optimizers
from fledge.training.sharding import backward, shard_draft, whole

MIB = 2**20
DRAFT = {"vocab_size": 32000, "draft_vocab_size": 16000}


def make_draft(hidden: int) -> LlamaEagle3DraftModel:
    config = LlamaConfig(
        vocab_size=DRAFT["vocab_size"], hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=4,
    )  # fmt: skip
    for name, value in {
        "draft_vocab_size": DRAFT["draft_vocab_size"], "target_hidden_size": hidden,
        "num_aux_hidden_states": 3,
    }.items():  # fmt: skip
        setattr(config, name, value)
    torch.manual_seed(0)
    draft = LlamaEagle3DraftModel(config)
    draft.freeze_embeddings()
    return draft


def held(tensors: Any) -> int:
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


def measure(hidden: int, ranks: int) -> dict[str, float]:
    """Run one step with a gradient for every weight; bytes held after it, and weights during it."""
    world = join_world(torch.device("cpu"), shard=ranks) if ranks > 1 else World()
    draft = make_draft(hidden)
    trained = [name for name, p in draft.named_parameters() if p.requires_grad]
    if ranks > 1:
        shard_draft(draft, world, compute_dtype=None)
    weights = dict(draft.named_parameters())
    parameters = [weights[name] for name in trained]
    [optimizer] = make_optimizers(draft, lr=1e-3)
    begin = time.perf_counter()
    with whole(draft):
        gathered = [p for p in draft.parameters() if p.requires_grad]
        step = held(gathered) + (held(parameters) if ranks > 1 else 0)
        loss = sum((p.float() ** 2).sum() for p in gathered)
        backward(draft, loss)
    seconds = time.perf_counter() - begin
    gradients = held(p.grad for p in parameters if p.grad is not None)
    optimizer.step()
    moments = held(
        tensor for state in optimizer.state.values() for k, tensor in state.items() if k != "step"
    )
    frozen = held(p for name, p in weights.items() if name not in trained)
    result = {
        "frozen": frozen, "weights": held(parameters), "gradients": gradients, "moments": moments,
        "step": step, "seconds": seconds,
    }  # fmt: skip
    if ranks > 1:
        leave_world(world)
    return result


def _rank(rank: int, ranks: int, port: int, hidden: int, results: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    results.put((rank, measure(hidden, ranks)))


def over_ranks(ranks: int, hidden: int) -> list[dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, hidden, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    figures = dict(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    return [figures[rank] for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    names = ("frozen", "weights", "gradients", "moments")
    print("| ranks | frozen | weights | gradients | moments | a rank holds | share | in a step |")
    print("|---|---|---|---|---|---|---|---|")
    single = 0.0
    for ranks in args.ranks:
        most = max(over_ranks(ranks, args.hidden), key=lambda rank: sum(rank[n] for n in names))
        total = sum(most[name] for name in names)
        trained = total - most["frozen"]
        single = single or trained
        cells = [f"{most[name] / MIB:.1f}" for name in names]
        print(
            f"| {ranks} | {' | '.join(cells)} | {total / MIB:.1f} | {trained / single:.3f} | "
            f"{most['step'] / MIB:.1f} |"
        )


if __name__ == "__main__":
    main()
