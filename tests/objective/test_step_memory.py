"""Memory of a step: no tensor in it is [T, T], [tokens, V] or [tokens, W], and P-EAGLE's segments
are held one at a time."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from fledge import Eagle3TrainerModule, LlamaEagle3DraftModel, PEagleTrainerModule
from fledge.core import head
from fledge.core.head import TargetHead

T, V, W, D, DEPTHS = 1100, 500, 300, 8, 4
CHUNK = 40


class LargestShapes(TorchDispatchMode):
    """Records the shape of every tensor that an operation returns, and the peak of live bytes."""

    def __init__(self):
        super().__init__()
        self.shapes, self.live, self.peak = set(), {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.shapes.add(tuple(x.shape))
                storage = x.untyped_storage()
                self.live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {at: entry for at, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def record_step(kind=PEagleTrainerModule, *, width=T, hidden=16, mlp=56, **options):
    """What a step computes, and the number of its elements."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2 * T,
        draft_vocab_size=W, target_hidden_size=D, mask_token_id=V - 1,
        parallel_drafting=kind is PEagleTrainerModule,
    )  # fmt: skip
    depths = {"num_depths": DEPTHS} if kind is PEagleTrainerModule else {"ttt_steps": DEPTHS}
    module = kind(
        LlamaEagle3DraftModel(config),
        selected_token_ids=torch.arange(W),
        selected_token_mask=torch.arange(V) < W,
        target_head=TargetHead(torch.randn(V, D)),
        chunk_rows=CHUNK,
        **depths,
        **options,
    )
    ones = torch.ones(1, width, dtype=torch.long)
    batch = {
        "input_ids": torch.randint(0, V, (1, width)),
        "attention_mask": ones,
        "loss_mask": ones,
        "aux_hidden_states": torch.randn(1, width, 3 * D),
        "target_last_hidden_states": torch.randn(1, width, D),
    }
    with LargestShapes() as recorder:
        module(**batch, seed=0).loss.backward()
    return recorder, sum(module.prepare_inputs(**batch, seed=0).plan.counts)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Eagle3TrainerModule, {}),
        (PEagleTrainerModule, {}),
        (PEagleTrainerModule, {"sequence_partitions": 4}),
    ],
)
def test_no_tensor_is_quadratic_or_vocabulary_wide(monkeypatch, kind, options):
    monkeypatch.setattr(head, "_CACHED_SCORES", CHUNK * V)
    monkeypatch.setattr(head, "_ROWS", {})
    shapes = record_step(kind, **options)[0].shapes
    long = [s for s in shapes if max(s, default=0) >= T // 2]
    assert not [s for s in long if sum(n >= T // 2 for n in s) >= 2]
    assert not [s for s in long if {V, W} & set(s)]
    assert {(CHUNK, V), (CHUNK, W)} <= shapes  # chunks are recorded


def test_dense_attention_would_be_noticed():
    shapes = record_step(Eagle3TrainerModule, attention="reference")[0].shapes
    assert any(sum(n == T for n in s) >= 2 for s in shapes)


def test_forward_and_backward_hold_one_segment_at_a_time():
    """MLP-wide tensors, the bulk of a step, exist only for the rows of one segment at a time."""
    rows, peaks = {}, {}
    for partitions in (1, 4):
        step, elements = record_step(width=300, hidden=48, mlp=160, sequence_partitions=partitions)
        rows[partitions] = max(s[0] for s in step.shapes if len(s) == 2 and s[1] == 160)
        peaks[partitions] = step.peak
    assert rows[1] == elements
    assert rows[4] <= elements / 4 + DEPTHS
    assert peaks[4] < 0.6 * peaks[1]
