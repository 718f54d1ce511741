"""Several drafts from one pass: each equals itself trained alone, and the target is asked once."""

import pytest

from fledge.train.fit import fit, fit_together
from fledge.train.setup import set_up, set_up_together
from fledge.train.together import target_of
from train.test_fit import comparable, differing, final_weights
from train.tiny import Notes

EAGLE3 = ("objective.ttt_steps=3",)
PEAGLE = ("objective.kind=peagle", "objective.num_depths=4", "draft.layers=2", "training.lr=1e-3")
SMALL = ("objective.ttt_steps=3", "draft.intermediate_size=48", "draft.draft_vocab_size=64")
DFLASH = (
    "objective.kind=dflash", "objective.block_size=4", "target.aux_layer_ids=3,0",
    "objective.listened_layers=2", "draft.layers=2", "draft.draft_vocab_size=null",
)  # fmt: skip


@pytest.mark.parametrize(
    "other", [PEAGLE, SMALL, DFLASH], ids=["eagle3+peagle", "two-sizes", "eagle3+dflash"]
)
def test_two_drafts_from_one_pass_are_the_two_trained_alone(recipe, tmp_path, other):
    kinds = {"one": EAGLE3, "other": other}
    for name, kind in kinds.items():
        fit(set_up(recipe(*kind, run=f"alone/{name}")), Notes())
    both = set_up_together([recipe(*kind, run=f"both/{name}") for name, kind in kinds.items()])
    with target_of(both):
        assert all(outcome.finished for outcome in fit_together(both, [Notes(), Notes()]))
    for name in kinds:
        alone, together = tmp_path / "alone" / name, tmp_path / "both" / name
        assert differing(final_weights(alone), final_weights(together)) == []
        assert comparable(alone) == comparable(together)
