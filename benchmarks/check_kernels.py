"""Checks the GPU kernels against the torch path in one training step: loss and every gradient.

    python benchmarks/check_kernels.py [--seconds 120]

Errors are ||got - want|| / ||want|| over each parameter's gradient, where `want` is the torch path
in float64. bfloat16 kernels may be at most twice as far from it as the torch path in bfloat16.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import LlamaConfig

from fledge.core.head import TargetHead
from fledge.kernels import gate as triton_gate
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.eagle3.objective import Eagle3TrainerModule
from fledge.methods.peagle.objective import PEagleTrainerModule


@dataclass(frozen=True)
class Case:
    kind: str = "eagle3"
    heads: tuple[int, int, int] = (9, 3, 64)  # query heads, key heads, head size
    vocab: int = 1000
    draft_vocab: int = 500
    loss: str = "ce"
    supervised: float = 0.6

    def __str__(self) -> str:
        heads, groups, size = self.heads
        return (
            f"{self.kind:6} {heads}/{groups} of {size:<3} vocabulary {self.draft_vocab:>7,} of "
            f"{self.vocab:>7,} {self.loss:6} {self.supervised:3.0%}"
        )


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOY = [Case("eagle3"), Case("peagle")]


def cases() -> Iterator[Case]:
    """The methods in turns, so that a run cut short has seen both."""
    both = ("eagle3", "peagle")
    for heads in ((9, 3, 64), (4, 1, 128), (2, 2, 96), (2, 1, 256)):
        yield from (Case(kind, heads) for kind in both)
    for loss in ("kl", "hard", "alpha", "lambda"):
        yield from (Case(kind, loss=loss) for kind in both)
    for vocab, draft_vocab in ((512, 512), (32_003, 32_001), (262_144, 262_144)):
        yield from (Case(kind, vocab=vocab, draft_vocab=draft_vocab) for kind in both)
    yield from (Case(kind, vocab=262_144, draft_vocab=32_000, supervised=1.0) for kind in both)
    yield from (Case(kind, supervised=0.0) for kind in both)


def batch(case: Case, width: int, hidden: int) -> dict[str, torch.Tensor]:
    """Two packed rows of documents of odd lengths; masks on the host, the rest on the GPU."""
    torch.manual_seed(0)
    lens = [[37, 250, 101, width - 388], [width - 9, 5, 4, 0]]
    position, remaining = [], []
    for row in lens:
        position.append([p for n in row for p in range(n)])
        remaining.append([n - 1 - p for n in row for p in range(n)])
    gpu = {
        "aux_hidden_states": torch.randn(2, width, 3 * hidden),
        "input_ids": torch.randint(0, case.vocab, (2, width)),
        "target_last_hidden_states": torch.randn(2, width, hidden),
    }
    host = {
        "attention_mask": torch.ones(2, width, dtype=torch.long),
        "loss_mask": (torch.rand(2, width) < case.supervised).long(),
        "position_ids": torch.tensor(position),
        "seq_lens": torch.tensor(lens),
        "doc_remaining": torch.tensor(remaining),
    }
    return {name: tensor.to(DEVICE) for name, tensor in gpu.items()} | host


def gradients(case: Case, dtype: torch.dtype, kernels: bool) -> dict[str, torch.Tensor]:
    os.environ["FLEDGE_TRITON"] = "1" if kernels else "0"
    triton_gate._missing.cache_clear()
    torch.manual_seed(1)
    hidden, parallel = 576, case.kind == "peagle"
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=320, num_hidden_layers=2, vocab_size=case.vocab,
        num_attention_heads=case.heads[0], num_key_value_heads=case.heads[1],
        head_dim=case.heads[2], draft_vocab_size=case.draft_vocab, parallel_drafting=parallel,
        mask_token_id=7,
    )  # fmt: skip
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    draft = LlamaEagle3DraftModel(config).to(wide)
    draft.to(DEVICE)
    ids = torch.arange(case.draft_vocab) * (case.vocab // case.draft_vocab)
    mask = torch.zeros(case.vocab, dtype=torch.bool)
    mask[ids] = True
    head = TargetHead(torch.randn(case.vocab, hidden).to(DEVICE, wide) * 0.1)
    shared = {"selected_token_ids": ids, "selected_token_mask": mask, "target_head": head}
    lk = {"lk_loss_type": case.loss} if case.loss in ("alpha", "lambda") else {"loss": case.loss}
    shared |= {"compute_dtype": dtype, **lk}
    if parallel:
        module = PEagleTrainerModule(draft, num_depths=6, **shared)
    else:
        module = Eagle3TrainerModule(draft, ttt_steps=6, **shared)
    inputs = batch(case, 700, hidden)
    for name in ("aux_hidden_states", "target_last_hidden_states"):
        inputs[name] = inputs[name].to(wide)
    output = module(**inputs, seed=3)
    output.loss.backward()
    grads = {n: p.grad.double() for n, p in draft.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach().double(), **grads}


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error and its parameter; a gradient of zero must be exactly zero."""
    assert got.keys() == want.keys()
    errors = {n: float((got[n] - want[n]).norm() / want[n].norm().clamp_min(1e-30)) for n in want}
    name = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    return errors[name], name


def own_error(case: Case, want: dict[str, torch.Tensor]) -> float:
    """Error of the torch path in float32, which is large where rounding flips min(p, q)."""
    return worst(gradients(case, torch.float32, kernels=False), want)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1e9, help="no case is begun after them")
    parser.add_argument("--toy", action="store_true", help="one case on the CPU, without kernels")
    args = parser.parse_args()
    bad, begin = 0, time.monotonic()
    for case in TOY if args.toy else cases():
        if time.monotonic() - begin > args.seconds:
            break
        want = gradients(case, torch.float64, kernels=False)
        fp32, name32 = worst(gradients(case, torch.float32, kernels=True), want)
        plain, _ = worst(gradients(case, torch.bfloat16, kernels=False), want)
        fast, name16 = worst(gradients(case, torch.bfloat16, kernels=True), want)
        ok = fast <= 2 * plain and (fp32 <= 3e-5 or fp32 <= 2 * own_error(case, want))
        bad += not ok
        print(
            f"{case}  fp32 {fp32:.1e} ({name32})  bf16 kernels {fast:.1e} ({name16}) "
            f"torch {plain:.1e}  {'ok' if ok else 'WRONG'}",
            flush=True,
        )
    raise SystemExit(bad)


if __name__ == "__main__":
    main()
