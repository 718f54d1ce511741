"""The objectives of all methods under the same few names, for tests of what they share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fledge import Eagle3TrainerModule, PEagleTrainerModule
from fledge.core.head import TargetHead
from fledge.methods.block.heads.domino import DominoTrainerModule
from fledge.methods.block.heads.lilicorr import LiliCorrTrainerModule
from fledge.methods.block.heads.selector import DFlash2TrainerModule
from fledge.methods.block.heads.xpress import XPressTrainerModule
from fledge.methods.block.objective import DFlashTrainerModule, DSparkTrainerModule
from fledge.methods.block.plan import ANCHOR_TOKENS
from fledge.methods.losses.lk_lambda import LkLambda
from objective import naive_eagle1, naive_mtp
from objective.naive_block import (
    Table,
    make_block_documents,
    make_block_draft,
    make_head_draft,
    make_spark_draft,
)
from objective.naive_eagle3 import V, make_documents, make_draft, make_head, vocabulary
from objective.naive_peagle import MASK_ID, make_parallel_draft

SEED = 11
LENGTHS = [9, 1, 2, 6, 3, 13, 21]
HALF = ANCHOR_TOKENS // 2  # blocks start at about half of all tokens
COUNTS = ("step_prefix_hits", "step_valid", "step_reached", "charged", "correct")


def eagle3(draft=None, *, dtype=torch.float64, changes=None, steps=4, **options):
    ids, mask = vocabulary()
    return Eagle3TrainerModule(
        make_draft(dtype=dtype, **(changes or {})) if draft is None else draft,
        selected_token_ids=ids, selected_token_mask=mask, ttt_steps=steps,
        **({"target_head": make_head(dtype)} | options),
    )  # fmt: skip


def peagle(draft=None, *, dtype=torch.float64, changes=None, depths=4, **options):
    ids, mask = vocabulary()
    return PEagleTrainerModule(
        make_parallel_draft(dtype=dtype, **(changes or {})) if draft is None else draft,
        selected_token_ids=ids, selected_token_mask=mask, num_depths=depths,
        **({"mask_token_id": MASK_ID, "target_head": make_head(dtype)} | options),
    )  # fmt: skip


def eagle1(draft=None, *, dtype=torch.float64, changes=None, **options):
    draft = naive_eagle1.make_draft(**(changes or {})).to(dtype) if draft is None else draft
    return naive_eagle1.make_module(draft, **options)


def block_head(dtype=torch.float64):
    return TargetHead(Table(V, dtype).weight)


def _block(trainer, make, draft=None, *, dtype=torch.float64, changes=None, **options):
    draft = make(dtype=dtype, **(changes or {})) if draft is None else draft
    ids = draft.selected_token_ids
    return trainer(
        draft,
        selected_token_ids=ids,
        selected_token_mask=torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True),
        **({"anchors": HALF, "gamma": 3.0, "target_head": block_head(dtype)} | options),
    )


dflash = partial(_block, DFlashTrainerModule, make_block_draft)
dspark = partial(_block, DSparkTrainerModule, make_spark_draft)


def _with_head(trainer, **head):
    return partial(_block, trainer, partial(make_head_draft, **head))


domino = _with_head(
    DominoTrainerModule, sample_from_anchor=True, token_head="domino", markov_rank=5,
    gru_hidden_dim=6,
)  # fmt: skip
xpress = _with_head(XPressTrainerModule, token_head="xpress", markov_rank=5)
dflash2 = _with_head(
    DFlash2TrainerModule, candidate_head="selector", candidates=4, selector_rank=5,
    conv_kernel_size=2, conv_group_size=4,
)  # fmt: skip
lilicorr = _with_head(
    LiliCorrTrainerModule, candidate_head="lilicorr", candidates=12, lilicorr_num_heads=2,
    lilicorr_factor_dim=6, conv_group_size=4,
)  # fmt: skip


def reduced_block_draft():
    """A draft with every other token of the target."""
    ids = torch.arange(0, V, 2)
    draft = make_block_draft(draft_vocab_size=len(ids))
    draft.set_vocab_mapping(ids)
    draft.copy_head_from_target(Table(V, torch.float64))
    return draft


@dataclass(frozen=True)
class Kind:
    make: Callable[..., Any]  # (draft=None, *, dtype, changes of the draft's config, **options)
    documents: Callable[..., Any] = make_documents
    tolerance: float = 1e-11


LOSSES = {
    "ce": {"loss": "ce"},
    "kl": {"loss": "kl"},
    "hard": {"loss": "hard"},
    "alpha": {"lk_loss_type": "alpha"},
    "lambda": {"lk_loss_type": "lambda", "lk_kl_scale": 0.7, "lk_kl_decay": 2.0},
    "tv": {"loss": "tv"},
}
_TEXT_ALONE = {"distance_weight": 0.0, "confidence_weight": 0.0}
_BLOCKS = {
    "dflash": dflash,
    "dflash kl": partial(dflash, loss="kl"),
    "dflash lambda": partial(dflash, loss=LkLambda(scale=0.9, decay=1.5)),
    "dflash dpace": partial(dflash, weights="dpace"),
    "dspark": dspark,
    "domino": partial(domino, plain_weight=0.3),
    "xpress": xpress,
    "dflash2": dflash2,
    "dflash2 skip": partial(dflash2, missing="skip", loss="kl"),
    "lilicorr": lilicorr,
}
KINDS = {
    **{f"eagle3 {name}": Kind(partial(eagle3, **loss)) for name, loss in LOSSES.items()},
    "eagle3, two layers": Kind(partial(eagle3, changes={"num_hidden_layers": 2})),
    **{f"peagle {name}": Kind(partial(peagle, **loss)) for name, loss in LOSSES.items()},
    "peagle, one layer": Kind(partial(peagle, changes={"layers": 1})),
    "peagle, balanced lambda": Kind(partial(peagle, loss="lk_lambda", balance_depths=True)),
    "peagle, three segments": Kind(partial(peagle, sequence_partitions=3)),
    # noise is drawn in fp32
    "eagle1": Kind(eagle1, naive_eagle1.documents_of, tolerance=1e-9),
    "mtp": Kind(naive_mtp.make_module, naive_mtp.documents_of),
    "mtp, hosted": Kind(
        partial(naive_mtp.make_module, changes=naive_mtp.HOSTED),
        naive_mtp.documents_of,
        tolerance=1e-6,  # transformers' norms compute in fp32
    ),
    "mtp lambda": Kind(partial(naive_mtp.make_module, loss="lk_lambda"), naive_mtp.documents_of),
    **{name: Kind(make, make_block_documents) for name, make in _BLOCKS.items()},
}
# Those whose sizes can be rounded up.
_EXACT = {"eagle1", "three"}
EVEN_KINDS = {
    **{name: kind for name, kind in KINDS.items() if not _EXACT & {*name.split()}},
    "dflash tv": Kind(partial(dflash, loss="tv"), make_block_documents),
    "dflash hard": Kind(partial(dflash, loss="hard"), make_block_documents),
    "dspark, text alone": Kind(partial(dspark, **_TEXT_ALONE), make_block_documents),
}


def run(module, batch, *, seed=SEED, **extra):
    """Returns (output, gradients of trained parameters by name)."""
    return backward(module, module(**batch, seed=seed, **extra))


def backward(module, out):
    module.zero_grad()
    out.loss.backward()
    trained = {n: p for n, p in module.draft_model.named_parameters() if p.requires_grad}
    zero = torch.zeros_like  # of parameters that the loss does not use
    return out, {n: zero(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}


def assert_matches_textbook(module, result, naive):
    """Loss, gradients of every parameter, and all counts."""
    out, grads = result
    module.zero_grad()
    naive.loss.backward()
    torch.testing.assert_close(out.loss, naive.loss, rtol=1e-10, atol=1e-10)
    for name, parameter in module.draft_model.named_parameters():
        named = partial("{}: {}".format, name)
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-11, msg=named)
        assert parameter.grad.abs().max() > 0, name
    assert out.charged.tolist() == naive.charged
    assert out.correct.tolist() == naive.correct
    assert out.step_prefix_hits.tolist() == naive.hits
    assert out.step_valid.tolist() == naive.valid


def assert_same(first, second, *, tolerance=1e-11):
    (out_a, grads_a), (out_b, grads_b) = first, second
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(out_a.loss, out_b.loss)
    assert grads_a.keys() == grads_b.keys()
    for name, grad in grads_a.items():
        close(grad, grads_b[name], msg=lambda m, n=name: n + m)
    for field in COUNTS:
        assert getattr(out_a, field).tolist() == getattr(out_b, field).tolist(), field
    close(out_a.loss_sums, out_b.loss_sums)
    assert out_a.valid_tokens == out_b.valid_tokens
    assert out_a.accuracy == out_b.accuracy
