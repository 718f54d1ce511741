"""No tensor in an EAGLE-3 step is [T, T], [tokens, V] or [tokens, W]; every one is checked."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from fledge import Eagle3TrainerModule, LlamaEagle3DraftModel
from fledge.core.head import TargetHead
from fledge.methods.shared import supervision

T, V, W, D, STEPS = 1100, 500, 300, 8, 3
CHUNK = 40


class LargestShapes(TorchDispatchMode):
    """Records the shape of every tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


def recorded_shapes(monkeypatch, **options):
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
    with LargestShapes() as recorder:
        module(**batch).loss.backward()
    return recorder.shapes


def test_no_tensor_is_quadratic_or_vocabulary_wide(monkeypatch):
    shapes = recorded_shapes(monkeypatch)
    long = [s for s in shapes if max(s, default=0) >= T // 2]
    assert not [s for s in long if sum(n >= T // 2 for n in s) >= 2]
    assert not [s for s in long if {V, W} & set(s)]
    assert {(CHUNK, V), (CHUNK, W), (T, 3 * D)} <= shapes  # chunks and tokens are recorded


def test_dense_attention_would_be_noticed(monkeypatch):
    shapes = recorded_shapes(monkeypatch, attention="reference")
    assert any(sum(n == T for n in s) >= 2 for s in shapes)
