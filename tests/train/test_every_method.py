"""What holds for a run of every method: it learns and resumes bit for bit, however its steps are
cut into micro-batches and whether its target answers or a cache does."""

import pytest
import torch
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.recipe.schema import load_recipe
from fledge.training.checkpoint import newest_checkpoint
from train.test_fit import LAMBDA, PEAGLE, assert_resumes_bitwise, differing, final_weights, train
from train.tiny import BLOCKS

EAGLE1 = ("objective.kind=eagle1", "training.steps=8")
MTP = ("objective.kind=mtp", "training.steps=6")
DPACE = ("objective.weights=dpace", "training.lr=1e-3", "training.steps=4")


@pytest.mark.parametrize(
    ("options", "depths"),
    [
        pytest.param((*PEAGLE, "training.epochs=4"), 4, id="peagle"),
        pytest.param((*EAGLE1, "training.steps=60"), 5, marks=pytest.mark.slow, id="eagle1"),
        *(pytest.param(options, 4, id=kind) for kind, options in BLOCKS.items()),
        pytest.param(MTP, 3, id="mtp"),
    ],
)
def test_learns_and_resumes_bitwise(recipe, monkeypatch, tmp_path, options, depths):
    """P-EAGLE and block drafts sample: a resumed run must draw the same samples."""
    notes = assert_resumes_bitwise(recipe, monkeypatch, tmp_path, *options, after=3)
    assert notes.lines[-1]["loss"] < notes.lines[0]["loss"]
    assert len(notes.evaluations[-1]["evaluation"]["joint"]) == depths


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="eagle3"),
        pytest.param(PEAGLE, id="peagle"),
        pytest.param(LAMBDA, id="lambda"),
        pytest.param(EAGLE1, marks=pytest.mark.slow, id="eagle1"),
        pytest.param((*BLOCKS["dflash"], *DPACE), id="dpace"),
    ],
)
def test_micro_batches_do_not_change_the_run(recipe, tmp_path, options):
    """Noise and blocks depend on the document, not on the batch; mean acceptance and D-PACE's
    weights on the whole step."""
    train(recipe(*options, "training.micro_batch=4", run="wide"))
    cut = ("training.micro_batch=1", "training.accumulate=4")
    train(recipe(*options, *cut, run="narrow"))
    wide, narrow = (
        newest_checkpoint(tmp_path / run)[0].draft_tensors() for run in ("wide", "narrow")
    )
    for name, tensor in wide.items():
        torch.testing.assert_close(narrow[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(EAGLE1, marks=pytest.mark.slow, id="eagle1"),
        pytest.param(MTP, id="mtp"),
        *(
            pytest.param((*options, "training.steps=3"), id=kind)
            for kind, options in BLOCKS.items()
        ),
    ],
)
def test_a_cache_trains_the_same_weights(recipe, tmp_path, options):
    # the target sees each conversation alone, as it does in precompute
    alone = ("packing.padded=true", "training.micro_batch=1", "training.accumulate=2")
    live, written = recipe(*options, *alone, run="live"), tmp_path / "recipe.yaml"
    written.write_text(live.to_yaml())
    words = ["precompute", written, "--output-dir", tmp_path / "cache", "--batch-size", "1"]
    assert CliRunner().invoke(app, [*map(str, words)]).exit_code == 0
    train(live)
    cached = ["target.backend=cache", f"target.cached_target_path={tmp_path / 'cache'}"]
    train(load_recipe(written, [*cached, f"run.output_dir={tmp_path / 'cached'}"]))
    assert differing(final_weights(tmp_path / "live"), final_weights(tmp_path / "cached")) == []


FROM_TARGET = ("draft.layers_from_target=true", "layers_from_target: must be false")


@pytest.mark.parametrize(
    ("kind", "override", "complaint"),
    [
        ("dflash", "objective.weights=dpace", "needs the loss text"),
        ("dflash", "objective.block_size=1", "greater than or equal to 2"),
        ("dflash", "target.aux_layer_ids=1,2", "must be five distinct layers"),
        ("dflash", "draft.qk_norm=false", "must be true for DFlash"),
        ("dflash", "training.context=2", "must be 1: DFlash needs each row on one rank"),
        (
            "eagle1",
            "draft.draft_vocab_size=128",
            "draft_vocab_size: must be null for EAGLE-1",
        ),
        ("eagle1", "draft.fc_norm=true", "draft.fc_norm: must be false for EAGLE-1"),
        ("eagle1", "target.aux_layer_ids=0,1", "target.aux_layer_ids: must be one layer"),
        ("mtp", "draft.layers=2", "draft.layers: must be 1 for MTP"),
        *((kind, *FROM_TARGET) for kind in ("eagle1", "dflash", "dspark")),
    ],
)
def test_settings_that_a_method_cannot_have_are_refused(kind, override, complaint):
    loss = ["objective.loss=kl"] if kind == "dflash" else []
    with pytest.raises(BadInput, match=complaint):
        load_recipe(None, [f"objective.kind={kind}", *loss, override])
