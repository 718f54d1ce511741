"""The P-EAGLE objective against a textbook version, and every equality that it promises."""

import pytest
import torch

from fledge import (
    Eagle3TrainerModule,
    PEagleTrainerModule,
)
from fledge.rollout.slots import RowMasks
from objective.cases import LOSSES, SEED, assert_matches_textbook, assert_same, backward, run
from objective.cases import peagle as make_module
from objective.naive_eagle3 import (
    V,
    make_documents,
    make_draft,
    make_head,
    packed_batch,
    padded_batch,
    vocabulary,
)
from objective.naive_peagle import MASK_ID, make_parallel_draft, naive_peagle, sampled_depths

DEPTHS = 4
LENGTHS = [9, 1, 6, 13, 2, 21]


VARIANTS = {
    "one layer": {"layers": 1},
    "two layers": {"layers": 2},
    "four layers": {"layers": 4},
    "fc_norm": {"layers": 2, "fc_norm": True},
    "q/k norms": {"layers": 2, "qk_norm": True},
    "biases": {"layers": 2, "attention_bias": True, "mlp_bias": True},
    "norm_output": {"layers": 2, "norm_output": True},
    "partial rotary": {"partial_rotary_factor": 0.5},
    "no GQA": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
}


TEXTBOOK = {
    **{name: {"changes": changes} for name, changes in VARIANTS.items()},
    **LOSSES,
    **{f"{name}, balanced": {**LOSSES[name], "balance_depths": True} for name in ("kl", "lambda")},
}


@pytest.mark.parametrize("name", TEXTBOOK)
def test_module_matches_the_textbook(name):
    """Every parameter has a gradient, mask_hidden and those of all layers included."""
    module, documents = make_module(**TEXTBOOK[name]), make_documents(LENGTHS)
    result, (ids, mask) = run(module, padded_batch(documents)), vocabulary()
    deepest = sampled_depths(documents, num_depths=DEPTHS, ratio=0.7, ratio_min=0.2, seed=SEED)
    naive = naive_peagle(
        module.draft_model, documents, deepest, head=make_head(), ids=ids, mask=mask,
        num_depths=DEPTHS, loss=module.loss, balance="balance_depths" in TEXTBOOK[name],
    )  # fmt: skip
    assert_matches_textbook(module, result, naive)
    assert min(naive.charged) > 0
    assert result[0].valid_tokens.item() == sum(naive.charged)


@pytest.mark.parametrize("partitions", [2, 4, 7, 1000])
@pytest.mark.parametrize("layers", [1, 3])
def test_partitioned_equals_flat(layers, partitions):
    draft = make_parallel_draft(layers=layers)
    documents = make_documents(LENGTHS)
    for batch in (padded_batch(documents), packed_batch([documents[:4], documents[4:]], 32)):
        flat = run(make_module(draft), batch)
        module = make_module(draft, sequence_partitions=partitions)
        assert_same(flat, run(module, batch))
        segments = len(module.prepare_inputs(**batch, seed=SEED).plan.segments)
        assert segments == min(partitions, segments) > 1


# --- against EAGLE-3 ---------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
def test_one_depth_equals_one_step_of_eagle3(layers):
    """With a full vocabulary, both charge the same elements, so all numbers agree."""
    draft = make_parallel_draft(layers=layers, draft_vocab_size=V)
    full = {
        "selected_token_ids": torch.arange(V),
        "selected_token_mask": torch.ones(V, dtype=torch.bool),
        "target_head": make_head(),
    }
    batch = packed_batch([make_documents(LENGTHS)], 60)
    parallel = PEagleTrainerModule(draft, num_depths=1, mask_token_id=MASK_ID, **full)
    peagle_result = run(parallel, batch)
    eagle3 = Eagle3TrainerModule(draft, ttt_steps=1, loss="kl", **full)
    eagle3.zero_grad()
    eagle3_out = eagle3(**batch)
    eagle3_out.loss.backward()
    grads = {n: p.grad for n, p in draft.named_parameters() if n != "mask_hidden"}
    assert (peagle_result[1].pop("mask_hidden") == 0).all()
    assert_same(peagle_result, (eagle3_out, grads), tolerance=1e-12)


# --- sampling ----------------------------------------------------------------------------------


def test_the_seed_decides_what_is_sampled():
    module = make_module()
    batch = padded_batch(make_documents([40, 30]))
    assert_same(run(module, batch, seed=1), run(module, batch, seed=1), tolerance=0)
    assert run(module, batch, seed=1)[0].loss != run(module, batch, seed=2)[0].loss
    assert run(module, batch, seed=-1)[0].loss == run(module, batch, seed=2**64 - 1)[0].loss
    planned = module.plan(RowMasks(batch["loss_mask"], batch["attention_mask"]), seed=2)
    ready = module.prepare_inputs(**batch, plan=planned)
    assert_same(run(module, batch, seed=2), backward(module, module.score(ready)))


# --- the rest ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"depths": 0}, "num_depths"),
        ({"depths": 2.0}, "num_depths"),
        ({"mask_token_id": V}, "mask_token_id"),
        ({"mask_token_id": 3}, "mask_token_id"),  # the draft was built with another id
        ({"down_sample_ratio": 1.5}, "down_sample_ratio"),
        ({"down_sample_ratio_min": -1}, "down_sample_ratio_min"),
        ({"sequence_partitions": 0}, "sequence_partitions"),
        ({"lk_loss_type": "beta"}, "lk_loss_type"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"draft": make_draft()}, "parallel_drafting"),
    ],
)
def test_errors_name_the_bad_option(options, field):
    with pytest.raises(ValueError, match=field):
        make_module(**options)


def test_the_mask_token_is_kept_in_the_config():
    draft = make_draft(parallel_drafting=True)
    with pytest.raises(ValueError, match="mask_token_id"):
        make_module(draft, mask_token_id=None)
    make_module(draft)
    assert draft.config.mask_token_id == MASK_ID
    make_module(draft, mask_token_id=None)
