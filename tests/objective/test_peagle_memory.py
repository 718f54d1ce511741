"""What a P-EAGLE step keeps in memory: nothing quadratic, and with segments, one at a time."""

import pytest
import torch
from test_step_memory import LargestShapes
from transformers import LlamaConfig

from fledge import LlamaEagle3DraftModel, PEagleTrainerModule
from fledge.objective import supervision
from fledge.target.head import TargetHead

T, V, W, D, MLP, DEPTHS = 1100, 500, 300, 8, 56, 4
CHUNK = 40


def make_step(**options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=MLP, num_hidden_layers=3,
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
        "input_ids": torch.randint(0, V, (1, T)),
        "attention_mask": torch.ones(1, T, dtype=torch.long),
        "loss_mask": torch.ones(1, T, dtype=torch.long),
        "aux_hidden_states": torch.randn(1, T, 3 * D),
        "target_last_hidden_states": torch.randn(1, T, D),
    }
    return module, batch


@pytest.mark.parametrize("partitions", [1, 4])
def test_nothing_quadratic_and_nothing_as_wide_as_a_vocabulary(monkeypatch, partitions):
    monkeypatch.setattr(supervision, "CHUNK_SCORES", CHUNK * V)
    module, batch = make_step(sequence_partitions=partitions)
    with LargestShapes() as watch:
        module(**batch, seed=0).loss.backward()
    long = [s for s in watch.shapes if max(s, default=0) >= T // 2]
    assert not [s for s in long if sum(n >= T // 2 for n in s) >= 2]
    assert not [s for s in long if {V, W} & set(s)]
    assert {(CHUNK, V), (CHUNK, W)} <= watch.shapes  # the watch does see chunks


def test_a_segment_at_a_time_in_forward_and_backward():
    """MLP-wide tensors, the bulk of a step, have a quarter of the rows; recomputed, not saved."""
    rows, saved = {}, {}
    for partitions in (1, 4):
        module, batch = make_step(sequence_partitions=partitions)
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tensor.nbytes)
            return tensor

        with LargestShapes() as watch:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = module(**batch, seed=0).loss
            loss.backward()
        rows[partitions] = max(s[0] for s in watch.shapes if len(s) == 2 and s[1] == MLP)
        saved[partitions] = sum(kept)
    elements = sum(module.prepare(**batch, seed=0).plan.counts)
    assert rows[1] == elements
    assert rows[4] <= elements / 4 + DEPTHS
    assert saved[4] < 0.25 * saved[1]
