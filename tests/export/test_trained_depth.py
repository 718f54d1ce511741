"""A draft's files keep the depth it was trained at, without its run."""

import pytest
import torch

from export.export_cases import KINDS, config_of, make_draft, rewrite
from fledge import Eagle3TrainerModule, LlamaEagle3DraftModel, PEagleTrainerModule, export_draft
from fledge.core.errors import BadInput
from fledge.formats.export import read_export_record
from fledge.formats.import_draft import import_draft
from fledge.formats.self_check import CheckOptions

TRAINED = {
    "eagle3": {"ttt_steps": 4},
    "peagle": {"num_depths": 6, "down_sample_ratio": 0.6, "down_sample_ratio_min": 0.1},
}
SERVED = [("eagle3", "vllm"), ("eagle3", "sglang"), ("eagle3", "speculators"), ("peagle", "vllm"),
          ("peagle", "speculators")]  # fmt: skip


def train(kind, directory):
    """Pass a draft through its objective, which records the depth, and write it without a run."""
    draft = LlamaEagle3DraftModel.from_pretrained(directory)
    ids = draft.selected_token_ids
    vocabulary = {"selected_token_ids": ids, "selected_token_mask": draft.t2d}
    module = {"eagle3": Eagle3TrainerModule, "peagle": PEagleTrainerModule}[kind]
    module(draft, **vocabulary, **TRAINED[kind])
    draft.save_pretrained(directory)
    return directory


@pytest.fixture
def draft(kind, tiny_target, tmp_path):
    return train(kind, make_draft(tmp_path / "draft", tiny_target, **KINDS[kind]))


def trained_depth(directory):
    values = config_of(directory)
    return {
        name: values[name] for trained in TRAINED.values() for name in trained if name in values
    }


@pytest.mark.parametrize(("kind", "engine"), SERVED)
def test_the_depth_survives_export_and_import(draft, kind, engine, tiny_target, tmp_path):
    depth = next(iter(TRAINED[kind].values()))
    assert trained_depth(draft) == TRAINED[kind]
    assert trained_depth(train(kind, draft)) == TRAINED[kind]
    options = {"engine": engine, "target": str(tiny_target), "without_target": engine != "sglang"}
    options["check"] = CheckOptions(limit=1, max_new_tokens=4)
    exported = export_draft(draft, tmp_path / "exported", **options)
    assert read_export_record(exported)["num_draft_tokens"] == depth
    assert trained_depth(exported) == TRAINED[kind]
    imported = import_draft(exported, tmp_path / "imported", target=str(tiny_target))
    assert trained_depth(imported) == TRAINED[kind]
    again = export_draft(imported, tmp_path / "again", **options)
    assert read_export_record(again)["num_draft_tokens"] == depth
    fewer = export_draft(draft, tmp_path / "fewer", num_draft_tokens=2, **options)
    assert read_export_record(fewer)["num_draft_tokens"] == 2
    assert trained_depth(fewer) == TRAINED[kind]  # the trained depth does not change


@pytest.mark.parametrize("kind", TRAINED)
def test_the_depth_is_read_from_speculators_own_keys(draft, kind, tiny_target, tmp_path):
    """Files of other trainers do not have our keys."""
    depth_key, depth = next(iter(TRAINED[kind].items()))
    options = {"target": str(tiny_target), "without_target": True}
    exported = export_draft(draft, tmp_path / "exported", engine="speculators", **options)
    rewrite(exported, config=lambda values: [values.pop(name) for name in TRAINED[kind]])
    imported = import_draft(exported, tmp_path / "imported", target=str(tiny_target))
    assert trained_depth(imported) == {depth_key: depth}


@pytest.mark.parametrize("bad", [0, -1, 2.5, "three", True])
def test_an_invalid_depth_is_refused(bad, tiny_target, tmp_path):
    draft = make_draft(tmp_path / "draft", tiny_target)
    rewrite(draft, config=lambda values: values.update(ttt_steps=bad))
    with pytest.raises(BadInput, match="ttt_steps: must be a positive int"):
        export_draft(draft, tmp_path / "out", engine="vllm", target=str(tiny_target))
    with pytest.raises(BadInput, match="expected a whole number from 1"):
        import_draft(draft, tmp_path / "ours", target=str(tiny_target))


def test_training_on_at_another_depth_updates_it(tiny_target, tmp_path):
    directory = train("eagle3", make_draft(tmp_path / "draft", tiny_target))
    draft = LlamaEagle3DraftModel.from_pretrained(directory)
    vocabulary = {"selected_token_ids": draft.selected_token_ids, "selected_token_mask": draft.t2d}
    Eagle3TrainerModule(draft, ttt_steps=9, **vocabulary)
    draft.save_pretrained(directory)
    assert trained_depth(directory) == {"ttt_steps": 9}
    assert torch.equal(
        draft.lm_head.weight, LlamaEagle3DraftModel.from_pretrained(directory).lm_head.weight
    )
