"""One training step on the CPU, two versions of fledge alternating: seconds, loss and gradients.

    git worktree add ../before COMMIT
    python benchmarks/compare_cpu.py ../before/src src [--kind eagle3 peagle] [--steps 9]

Each version runs in its own process, which waits while the other one steps. Both build the
same draft of SmolLM2's shape and the same packed batch from the same seed. Prints the ratio of the
median times (below 1: the second is faster), the losses, and the largest relative difference of a
gradient.
"""

import argparse
import os
import pickle
import statistics
import subprocess
import sys
import time
from typing import Any


def build(kind: str) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import LlamaConfig

    from fledge import (  # public names, which both versions have
        Eagle3TrainerModule,
        LlamaEagle3DraftModel,
        PEagleTrainerModule,
        TargetHead,
    )

    torch.manual_seed(0)
    parallel, hidden, vocab, width = kind == "peagle", 576, 8192, 1024
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=1536, num_hidden_layers=2 if parallel else 1,
        vocab_size=vocab, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        draft_vocab_size=vocab // 2, parallel_drafting=parallel, mask_token_id=7,
    )  # fmt: skip
    draft = LlamaEagle3DraftModel(config)
    ids = torch.arange(vocab // 2) * 2
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    head = TargetHead(0.1 * torch.randn(vocab, hidden))
    shared: dict[str, Any] = {
        "selected_token_ids": ids, "selected_token_mask": mask, "target_head": head,
    }  # fmt: skip
    module: Any = (
        PEagleTrainerModule(draft, num_depths=8, **shared)
        if parallel
        else Eagle3TrainerModule(draft, ttt_steps=7, **shared)
    )
    lens = [300, 41, 500, width - 841]
    position = torch.cat([torch.arange(n) for n in lens])[None]
    remaining = torch.cat([torch.arange(n).flip(0) for n in lens])[None]
    return module, {
        "aux_hidden_states": torch.randn(1, width, 3 * hidden),
        "input_ids": torch.randint(0, vocab, (1, width)),
        "target_last_hidden_states": torch.randn(1, width, hidden),
        "attention_mask": torch.ones(1, width, dtype=torch.long),
        "loss_mask": (torch.rand(1, width) < 0.6).long(),
        "position_ids": position,
        "seq_lens": torch.tensor([lens]),
        "doc_remaining": remaining,
        "seed": 3,
    }


def child(kind: str) -> None:
    """Take one step per input line and write its seconds; on `result`, loss and gradients."""
    module, inputs = build(kind)
    out = sys.stdout.buffer
    for line in sys.stdin:
        module.zero_grad()
        begin = time.perf_counter()
        loss = module(**inputs).loss
        loss.backward()
        seconds = time.perf_counter() - begin
        answer: Any = seconds
        if line.strip() == "result":
            grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            answer = (float(loss.detach()), grads)
        pickle.dump(answer, out)
        out.flush()


class Version:
    """One version of fledge, in its own process."""

    def __init__(self, source: str, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", kind], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source},
        )  # fmt: skip

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def close(self) -> None:
        self._process.communicate()


def compare(before: str, after: str, kind: str, steps: int) -> None:
    versions = [Version(before, kind), Version(after, kind)]
    seconds: list[list[float]] = [[], []]
    for turn in range(steps + 2):
        for index in (0, 1) if turn % 2 else (1, 0):  # neither always goes first
            seconds[index].append(versions[index].ask("step"))
    (loss, grads), (new_loss, new_grads) = (version.ask("result") for version in versions)
    for version in versions:
        version.close()
    old, new = (statistics.median(times[2:]) for times in seconds)
    assert grads.keys() == new_grads.keys()
    worst = max(float((new_grads[n] - grads[n]).norm() / grads[n].norm()) for n in grads)
    print(f"{kind}: {old * 1e3:.0f} ms before, {new * 1e3:.0f} ms after, ratio {new / old:.3f}; "
          f"loss {loss:.7f}, {new_loss:.7f}; gradients differ by {worst:.1e}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", help="src directory")
    parser.add_argument("after", nargs="?", help="src directory")
    parser.add_argument("--kind", nargs="+", default=["eagle3", "peagle"])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    for kind in args.kind:
        compare(args.before, args.after, kind, args.steps)


if __name__ == "__main__":
    main()
