"""The refit on a real model: SmolLM2 rounded to four bits, and with noise in its weights."""

import importlib.util
from pathlib import Path

import pytest
import torch

from fledge.data.pack import collate, pack_rows
from fledge.demo import CHATS, RECIPE
from fledge.methods.registry import load_draft
from fledge.recipe.schema import load_recipe
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.train.fit import fit
from fledge.train.refit import Targets, measure, refit
from fledge.train.setup import prepare_data, set_up
from train.tiny import Notes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHANGED = Path(__file__).parents[2] / "benchmarks" / "changed_target.py"
PARTS = {"learnt": slice(0, 8), "fitted": slice(8, 28), "judged": slice(28, 34)}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    root = tmp_path_factory.mktemp("retarget")
    lines = CHATS.read_text().splitlines(keepends=True)
    for name, part in PARTS.items():
        (root / f"{name}.jsonl").write_text("".join(lines[part]))
    return root


def recipe_of(chats, name, *overrides):
    own = [f"data.train={chats / name}.jsonl", "data.valid_rows=0", "data.workers=1"]
    return load_recipe(RECIPE, [*own, f"run.output_dir={chats / 'run'}", *overrides])


def packs(chats, name):
    rows, _, _ = prepare_data(recipe_of(chats, name))
    return [collate(rows, [pack], 512, 0) for pack in pack_rows(rows.lengths, 512).packs]


@pytest.fixture(scope="module")
def draft(chats):
    """A draft that knows a few chats by heart: what it loses on them, it loses to other states."""
    options = ["training.epochs=10", "draft.draft_vocab_size=2048", "training.device=cpu"]
    fit(set_up(recipe_of(chats, "learnt", *options)), Notes())
    return max((chats / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("how", [{"bits": 4}, {"noise": 0.1}], ids=["int4", "noise"])
def test_half_of_what_the_states_cost_is_back(chats, draft, how):
    spec = importlib.util.spec_from_file_location("changed_target", CHANGED)
    changing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changing)
    old, new = (
        HFEagle3TargetModel.from_pretrained("smollm2-135m", dtype=torch.float32, device="cpu")
        for _ in range(2)
    )
    changing.change(new.model, **how)
    targets, before, after = Targets(old, new), load_draft(draft), load_draft(draft)
    found = refit(after, targets, fitted=packs(chats, "fitted"), judged=packs(chats, "judged"))
    assert found.error < 0.8 * found.error_before
    drafts = (before, before, after)
    lengths = measure(targets, drafts, packs(chats, "learnt"), num_draft_tokens=3)
    print(how, [round(one.length, 4) for one in vars(lengths).values()], found)
    lost = lengths.with_old_states.length - lengths.before.length
    assert lost > 0.05
    assert lengths.refitted.length - lengths.before.length > 0.5 * lost
