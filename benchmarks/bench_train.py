"""Speed and memory of one training step on random weights and random tokens.

    python benchmarks/bench_train.py --shape 8b --seq 2048 --batch 4
    python benchmarks/bench_train.py --shape 135m --pack 16384 --documents 250 --profile

A step is what `fledge train` does: target forward, rollout, backward, clip, AdamW with float32
masters. `--documents N` packs documents of about N tokens; without it every row is one document of
`--seq` tokens. 60 % of the tokens are supervised, as in the peers' figures.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fledge.data.pack import collate, one_per_row, pack_rows
from fledge.data.tokenise import TokenRow
from fledge.draft.derive import derive_draft_config
from fledge.draft.model import LlamaEagle3DraftModel
from fledge.objective.eagle3 import Eagle3TrainerModule
from fledge.objective.peagle import PEagleTrainerModule
from fledge.target.hf import HFEagle3TargetModel
from fledge.train.batches import StepBatch
from fledge.train.clock import Clock
from fledge.train.distributed import World
from fledge.train.optimizer import StepGuard, make_optimizer
from fledge.train.step import Parts, train_step

SHAPES = {  # hidden, layers, query heads, key heads, head dim, MLP, vocabulary, draft vocabulary
    "tiny": (64, 8, 4, 2, 16, 128, 512, 256),
    "135m": (576, 30, 9, 3, 64, 1536, 49_152, 16_384),
    "1b": (2048, 16, 32, 8, 64, 8192, 128_256, 32_000),
    "8b": (4096, 32, 32, 8, 128, 14_336, 128_256, 32_000),
}


def target_of(shape: str, device: torch.device, dtype: torch.dtype) -> HFEagle3TargetModel:
    hidden, layers, heads, kv, dim, mlp, vocab, _ = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=dim,
        intermediate_size=mlp,
        vocab_size=vocab,
        max_position_embeddings=65_536,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return HFEagle3TargetModel(model, supervision="hidden")


def random_rows(count: int, mean: int, limit: int, vocab: int, share: float) -> list[TokenRow]:
    """Documents that begin with a prompt and end with the supervised answer."""
    rng = np.random.default_rng(0)
    spread = rng.lognormal(0.0, 0.5, count) / np.exp(0.125)
    lengths = np.clip(mean * spread, 8, limit).astype(int) if mean < limit else [limit] * count
    rows = []
    for i, n in enumerate(lengths):
        mask = (np.arange(n) >= round(n * (1 - share))).astype(np.uint8)
        ids = rng.integers(0, vocab, n, dtype=np.int32)
        rows.append(TokenRow(ids, mask, f"row{i}", False))
    return rows


def batches_of(args: argparse.Namespace, vocab: int, count: int) -> list[StepBatch]:
    if args.documents:
        rows = random_rows(
            count * args.batch * args.pack * 2 // args.documents + 8,
            args.documents, args.pack, vocab, args.supervised,
        )  # fmt: skip
        packs = pack_rows([len(r.input_ids) for r in rows], args.pack).packs
        width = args.pack
    else:
        rows = random_rows(count * args.batch, args.seq, args.seq, vocab, args.supervised)
        packs, width = one_per_row([args.seq] * len(rows), args.seq), args.seq
    return [
        StepBatch(
            i, 0, (collate(rows, packs[i * args.batch : (i + 1) * args.batch], width, pad_id=0),)
        )
        for i in range(count)
    ]


def build(args: argparse.Namespace, device: torch.device) -> Parts:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = target_of(args.shape, device, dtype)
    vocab, draft_vocab = SHAPES[args.shape][-2:]
    parallel = args.kind == "peagle"
    config = derive_draft_config(
        target.model.config,
        architecture="LlamaForCausalLM",
        draft_vocab_size=draft_vocab,
        num_hidden_layers=args.layers or (4 if parallel else 1),
        parallel_drafting=parallel,
        mask_token_id=vocab - 1 if parallel else None,
    )
    ids = torch.arange(draft_vocab) * (vocab // draft_vocab)
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    with torch.device(device):
        draft = LlamaEagle3DraftModel(config)
    draft.embed_tokens.weight.requires_grad_(parallel)  # P-EAGLE trains its embeddings
    shared = {
        "selected_token_ids": ids,
        "selected_token_mask": mask,
        "target_head": target.info().head,
        "compute_dtype": dtype,
    }
    if parallel:
        draft.gradient_checkpointing = args.checkpointing
        objective = PEagleTrainerModule(
            draft, num_depths=args.depths or 8, sequence_partitions=args.partitions, **shared
        )
    else:
        objective = Eagle3TrainerModule(draft, ttt_steps=args.depths or 7, **shared)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    return Parts(
        target, objective, parameters, optimizer, StepGuard(None, device), device, World(), 1.0,
        Clock(device),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--pack", type=int, default=16384)
    parser.add_argument("--documents", type=int, default=0, help="mean length; packs them")
    parser.add_argument("--kind", choices=["eagle3", "peagle"], default="eagle3")
    parser.add_argument("--depths", type=int, default=0, help="0: 7 for eagle3, 8 for peagle")
    parser.add_argument("--layers", type=int, default=0, help="0: 1 for eagle3, 4 for peagle")
    parser.add_argument("--partitions", type=int, default=1, help="peagle: sequence partitions")
    parser.add_argument("--checkpointing", action="store_true", help="peagle: recompute layers")
    parser.add_argument("--supervised", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    parts = build(args, device)
    built = torch.cuda.memory_allocated() if gpu else 0
    batches = batches_of(args, SHAPES[args.shape][-2], args.warmup + args.steps)
    tokens = batches[0].micro[0].input_ids.numel()
    times, first = [], 0.0
    for index, batch in enumerate(batches):
        if gpu and index == args.warmup:
            torch.cuda.reset_peak_memory_stats()
        parts.clock.read()
        start = time.perf_counter()
        train_step(parts, batch, lr=1e-4)
        _, phases = parts.clock.read()
        seconds = time.perf_counter() - start
        first = first or seconds
        if index >= args.warmup:
            times.append((seconds, phases["target"]))
    step, target = (statistics.median(column) for column in zip(*times, strict=True))
    moments = sum(p.numel() for p in parts.parameters) * 8
    resident = built + moments  # weights of both models, and what AdamW keeps
    print(
        json.dumps(
            {
                "kind": args.kind, "shape": args.shape,
                "tokens": tokens, "tokens_per_s": round(tokens / step),
                "step_ms": round(step * 1e3, 1), "target_ms": round(target * 1e3, 1),
                "first_step_s": round(first, 1),
                "resident_gib": round(resident / 2**30, 2),
                "peak_above_gib": round((torch.cuda.max_memory_allocated() - resident) / 2**30, 2)
                if gpu else None,
            }
        ),
        flush=True,
    )  # fmt: skip
    if args.profile:
        profile(parts, batches[-1])


def profile(parts: Parts, batch: StepBatch) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if parts.device.type == "cuda" else []
    with record(activities=kinds) as found:
        train_step(parts, batch, lr=1e-4)
        parts.clock.read()
    for key in ("cuda_time_total", "self_cpu_time_total")[parts.device.type == "cpu" :]:
        print(found.key_averages().table(sort_by=key, row_limit=22, max_name_column_width=48))


if __name__ == "__main__":
    main()
