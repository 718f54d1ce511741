"""Memory of a P-EAGLE step: nothing quadratic, and with partitions, one segment at a time."""

import pytest
import torch
from test_step_memory import LargestShapes
from transformers import LlamaConfig

from fledge import LlamaEagle3DraftModel, PEagleTrainerModule
from fledge.core.head import TargetHead
from fledge.methods.shared import supervision
from live_bytes import LiveBytes

T, V, W, D, DEPTHS = 1100, 500, 300, 8, 4
CHUNK = 40


def make_step(*, width=T, hidden=16, mlp=56, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2 * T,
        draft_vocab_size=W, target_hidden_size=D, parallel_drafting=True, mask_token_id=V - 1,
    )  # fmt: skip
    module = PEagleTrainerModule(
        LlamaEagle3DraftModel(config),
        selected_token_ids=torch.arange(W),
        selected_token_mask=torch.arange(V) < W,
        num_depths=DEPTHS,
        target_head=TargetHead(torch.randn(V, D)),
        chunk_rows=CHUNK,
        **options,
    )
    batch = {
        "input_ids": torch.randint(0, V, (1, width)),
        "attention_mask": torch.ones(1, width, dtype=torch.long),
        "loss_mask": torch.ones(1, width, dtype=torch.long),
        "aux_hidden_states": torch.randn(1, width, 3 * D),
        "target_last_hidden_states": torch.randn(1, width, D),
    }
    return module, batch


@pytest.mark.parametrize("partitions", [1, 4])
def test_no_tensor_is_quadratic_or_vocabulary_wide(monkeypatch, partitions):
    monkeypatch.setattr(supervision, "CHUNK_SCORES", CHUNK * V)
    module, batch = make_step(sequence_partitions=partitions)
    with LargestShapes() as recorder:
        module(**batch, seed=0).loss.backward()
    long = [s for s in recorder.shapes if max(s, default=0) >= T // 2]
    assert not [s for s in long if sum(n >= T // 2 for n in s) >= 2]
    assert not [s for s in long if {V, W} & set(s)]
    assert {(CHUNK, V), (CHUNK, W)} <= recorder.shapes  # chunks are recorded


def test_forward_and_backward_hold_one_segment_at_a_time():
    """MLP-wide tensors, the bulk of a step, exist only for the rows of one segment at a time."""
    rows, peaks = {}, {}
    for partitions in (1, 4):
        module, batch = make_step(width=300, hidden=48, mlp=160, sequence_partitions=partitions)
        with LargestShapes() as recorder, LiveBytes() as live:
            module(**batch, seed=0).loss.backward()
        rows[partitions] = max(s[0] for s in recorder.shapes if len(s) == 2 and s[1] == 160)
        peaks[partitions] = live.peak
    elements = sum(module.prepare_inputs(**batch, seed=0).plan.counts)
    assert rows[1] == elements
    assert rows[4] <= elements / 4 + DEPTHS
    assert peaks[4] < 0.6 * peaks[1]
