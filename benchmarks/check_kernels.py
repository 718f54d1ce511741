"""The GPU kernels against the torch path, in one whole training step: loss and every gradient.

    python benchmarks/check_kernels.py

Errors are ||got - want|| / ||want|| over each parameter's gradient, the torch path in float64 being
the truth. bfloat16 kernels may be at most twice as far from it as the torch path in bfloat16.
"""

import os
from collections.abc import Iterator

import torch
from transformers import LlamaConfig

from fledge import triton_gate
from fledge.draft.model import LlamaEagle3DraftModel
from fledge.objective.eagle3 import Eagle3TrainerModule
from fledge.objective.peagle import PEagleTrainerModule
from fledge.target.head import TargetHead


def batch(width: int, hidden: int, vocab: int) -> dict[str, torch.Tensor]:
    """Two packed rows of odd documents; masks on the host, the rest on the GPU."""
    torch.manual_seed(0)
    lens = [[37, 250, 101, width - 388], [width - 9, 5, 4, 0]]
    position, remaining = [], []
    for row in lens:
        position.append([p for n in row for p in range(n)])
        remaining.append([n - 1 - p for n in row for p in range(n)])
    gpu = {
        "aux_hidden_states": torch.randn(2, width, 3 * hidden),
        "input_ids": torch.randint(0, vocab, (2, width)),
        "target_last_hidden_states": torch.randn(2, width, hidden),
    }
    host = {
        "attention_mask": torch.ones(2, width, dtype=torch.long),
        "loss_mask": (torch.rand(2, width) < 0.6).long(),
        "position_ids": torch.tensor(position),
        "seq_lens": torch.tensor(lens),
        "doc_remaining": torch.tensor(remaining),
    }
    return {name: tensor.cuda() for name, tensor in gpu.items()} | host


def gradients(
    kind: str, heads: tuple[int, int, int], dtype: torch.dtype, kernels: bool
) -> dict[str, torch.Tensor]:
    os.environ["FLEDGE_TRITON"] = "1" if kernels else "0"
    triton_gate._missing.cache_clear()
    torch.manual_seed(1)
    hidden, vocab, draft_vocab = 576, 1000, 500
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=320, num_hidden_layers=2, vocab_size=vocab,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=heads[2],
        draft_vocab_size=draft_vocab, parallel_drafting=kind == "peagle", mask_token_id=7,
    )  # fmt: skip
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    draft = LlamaEagle3DraftModel(config).to(wide)
    draft.cuda()
    ids = torch.arange(draft_vocab) * 2
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    head = TargetHead(torch.randn(vocab, hidden).cuda().to(wide) * 0.1)
    shared = {"selected_token_ids": ids, "selected_token_mask": mask, "target_head": head}
    shared["compute_dtype"] = dtype
    if kind == "peagle":
        module = PEagleTrainerModule(draft, num_depths=6, **shared)
    else:
        module = Eagle3TrainerModule(draft, ttt_steps=6, **shared)
    inputs = batch(700, hidden, vocab)
    for name in ("aux_hidden_states", "target_last_hidden_states"):
        inputs[name] = inputs[name].to(wide)
    output = module(**inputs, seed=3)
    output.loss.backward()
    found = {n: p.grad.double() for n, p in draft.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach().double(), **found}


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert got.keys() == want.keys()
    errors = {n: float((got[n] - want[n]).norm() / want[n].norm()) for n in want}
    name = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    return errors[name], name


def rows() -> Iterator[tuple[str, tuple[int, int, int]]]:
    for kind in ("eagle3", "peagle"):
        for heads in ((9, 3, 64), (4, 1, 128), (2, 2, 96)):
            yield kind, heads


def main() -> None:
    bad = 0
    for kind, heads in rows():
        want = gradients(kind, heads, torch.float64, kernels=False)
        fp32, name32 = worst(gradients(kind, heads, torch.float32, kernels=True), want)
        plain, _ = worst(gradients(kind, heads, torch.bfloat16, kernels=False), want)
        fast, name16 = worst(gradients(kind, heads, torch.bfloat16, kernels=True), want)
        ok = fp32 < 3e-5 and fast < 2 * plain
        bad += not ok
        print(
            f"{kind:7} heads {heads!s:13} fp32 {fp32:.1e} ({name32})  bf16 kernels {fast:.1e} "
            f"({name16}) torch {plain:.1e}  {'ok' if ok else 'WRONG'}",
            flush=True,
        )
    raise SystemExit(bad)


if __name__ == "__main__":
    main()
