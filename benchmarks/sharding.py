"""Memory of a target per rank: weights, loading and a forward pass, on 1, 2 and 4 ranks.

    python benchmarks/sharding.py

Writes benchmarks/results/sharding.md. Ranks are processes on this machine's CPU (gloo); bytes are
those of live tensors, counted at every operation (`live_bytes.py`), so the figures do not
depend on an allocator or a GPU. The model is a random Llama, large enough that its weights
dominate; shared rows (cp) are measured on a long row, so that its states dominate.
"""

import multiprocessing
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from fledge.core.rows import TokenBatch
from fledge.target.hf.loading import load_hf_model
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.hf.parallel import along, target_mesh
from fledge.target.weights import local_part
from live_bytes import LiveBytes

RESULTS = Path(__file__).parent / "results" / "sharding.md"
CPU = torch.device("cpu")
LAYOUTS = [{}, {"fsdp": 2}, {"fsdp": 4}, {"tp": 2}, {"tp": 4}, {"fsdp": 2, "tp": 2}]
SHARED = [{}, {"cp": 2}, {"cp": 4}]
SHORT, LONG = 64, 1024


def make_model(directory: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=LONG,
    )  # fmt: skip
    # stored in bfloat16 and run in float32, so that reading copies, and the copies are counted
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(directory)


def measure(directory: str, layout: dict[str, int], width: int) -> tuple[int, int, int, int]:
    """Bytes on this rank: weights held, the largest tensor while loading, the peak of loading, and
    the peak of a pass over one row of `width` tokens, including the weights it gathers."""
    mesh = target_mesh(CPU, **{"fsdp": 1, "cp": 1, "tp": 1, **layout})
    with LiveBytes() as loading:
        model = load_hf_model(directory, device=CPU, dtype=torch.float32, mesh=mesh).model
    weight_bytes = sum(local_part(parameter).nbytes for parameter in model.parameters())
    target = HFEagle3TargetModel(model, None, along(mesh, "cp"), supervision="hidden")
    ids = torch.arange(width)[None] % 4000
    rows = TokenBatch(ids, torch.ones_like(ids), torch.ones_like(ids))
    target.answer(rows)
    with LiveBytes() as running:
        target.answer(rows)
    return weight_bytes, loading.largest, loading.peak, running.peak


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = context.Queue()

    def rank_main(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = (
            "1"  # load in this thread, where operations are counted
        )
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        queue.put((rank, function(*args)))
        dist.destroy_process_group()

    ranks = [context.Process(target=rank_main, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    results = dict(queue.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
    return [results[rank] for rank in range(size)]


def table(directory: str, layouts: list[dict[str, int]], width: int) -> list[str]:
    lines = [
        "| layout | ranks | weights held MiB | largest tensor while loading MiB | "
        "peak while loading MiB | peak of a pass MiB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for layout in layouts:
        size = 1
        for ranks in layout.values():
            size *= ranks
        worst = [
            max(column) / 2**20
            for column in zip(*on_ranks(size, measure, directory, layout, width), strict=True)
        ]
        name = " x ".join(f"{kind} {ranks}" for kind, ranks in layout.items()) or "one process"
        figures = " | ".join(f"{value:.2f}" for value in worst)
        lines.append(f"| {name} | {size} | {figures} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory)
        weights = table(directory, LAYOUTS, SHORT)
        rows = table(directory, SHARED, LONG)
    RESULTS.write_text(
        "\n".join(
            [
                "# Memory of a target by rank",
                "",
                f"- torch {torch.__version__}, CPU, gloo; bytes of live tensors, float32",
                "- command: `python benchmarks/sharding.py`",
                f"- commit: {commit}; a random Llama of 8 layers, width 256, vocabulary 4,096",
                "",
                f"Weights, and a row of {SHORT} tokens; the rank that needs the most:",
                "",
                *weights,
                "",
                f"A row of {LONG:,} tokens shared by ranks (`cp`), which all hold the weights:",
                "",
                *rows,
                "",
                "While loading, files are mapped and each rank copies its part; the largest tensor",
                "is a shard. A pass of FSDP2 puts one layer together at a time. With `cp` every",
                "rank ends with the whole answer (three aux states and the last hidden state of",
                "every token), which does not shrink; what is computed on the way does.",
                "",
            ]
        )
    )


if __name__ == "__main__":
    main()
