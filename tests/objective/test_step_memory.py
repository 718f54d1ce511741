"""No [T, T], no [tokens, V], no [tokens, W] in an EAGLE-3 step: every tensor is watched."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from fledge import Eagle3TrainerModule, LlamaEagle3DraftModel
from fledge.core.head import TargetHead
from fledge.objective import supervision

T, V, W, D, STEPS = 1100, 500, 300, 8, 3
CHUNK = 40


class LargestShapes(TorchDispatchMode):
    """Remembers the shape of everything any operation returns."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


def watched_step(monkeypatch, **options):
    monkeypatch.setattr(supervision, "CHUNK_SCORES", CHUNK * V)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2 * T,
        draft_vocab_size=W, target_hidden_size=D,
    )  # fmt: skip
    module = Eagle3TrainerModule(
        LlamaEagle3DraftModel(config),
        selected_token_ids=torch.arange(W),
        selected_token_mask=torch.arange(V) < W,
        ttt_steps=STEPS,
        target_head=TargetHead(torch.randn(V, D)),
        chunk_rows=CHUNK,
        **options,
    )
    batch = {
        "input_ids": torch.randint(0, V, (1, T)),
        "attention_mask": torch.ones(1, T, dtype=torch.long),
        "loss_mask": torch.ones(1, T, dtype=torch.long),
        "aux_hidden_states": torch.randn(1, T, 3 * D),
        "target_last_hidden_states": torch.randn(1, T, D),
    }
    with LargestShapes() as watch:
        module(**batch).loss.backward()
    return watch.shapes


def test_nothing_quadratic_and_nothing_as_wide_as_a_vocabulary(monkeypatch):
    shapes = watched_step(monkeypatch)
    long = [s for s in shapes if max(s, default=0) >= T // 2]
    assert not [s for s in long if sum(n >= T // 2 for n in s) >= 2]
    assert not [s for s in long if {V, W} & set(s)]
    assert {(CHUNK, V), (CHUNK, W), (T, 3 * D)} <= shapes  # the watch does see chunks and tokens


def test_the_watch_sees_a_dense_attention(monkeypatch):
    shapes = watched_step(monkeypatch, attention="reference")
    assert any(sum(n == T for n in s) >= 2 for s in shapes)
