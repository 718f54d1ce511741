"""EAGLE-1 and EAGLE-2 from a recipe to files: the same loop, caches and resumption as EAGLE-3."""

import json

import pytest

from fledge.core.errors import BadInput
from fledge.formats.engines import serve_command
from fledge.formats.export import export_draft, read_export_record
from fledge.formats.self_check import CheckOptions
from fledge.methods.registry import load_draft, method_of
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.test_block_run import run
from train.test_fit import differing
from train.tiny import Notes

pytestmark = pytest.mark.slow


@pytest.fixture
def eagle1(recipe):
    def make(*overrides, run="run", kind="eagle1"):
        return recipe(f"objective.kind={kind}", "training.steps=8", *overrides, run=run)

    return make


@pytest.mark.parametrize("kind", ["eagle1", "eagle2"])
def test_evaluated_and_exported(eagle1, tmp_path, tiny_target, kind):
    fit(set_up(eagle1(kind=kind)), Notes())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {n}"}) + "\n" for n in range(4)))
    for method in ("chain", "tree"):
        [draft] = run(
            "eval", tmp_path / "run", "--prompts", prompts, "--live", "3", "--method", method,
            "--max-new-tokens", "16", "--dtype", "float32", "--device", "cpu",
        )["drafts"]  # fmt: skip
        assert draft["live"]["same_texts"] == draft["live"]["texts"]
        if method == "chain":
            assert draft["live"]["same_rounds"] == draft["live"]["compared_rounds"] > 0
    for engine in ("vllm", "sglang"):
        out = tmp_path / engine
        check = CheckOptions(limit=2, shortfall=1.0)  # the chats are not the target's answers
        export_draft(tmp_path / "run", out, engine=engine, check=check)
        record = read_export_record(out)
        assert record["self_check"]["same_rows"] == record["self_check"]["estimate"]
        assert record["objective"] == kind
        assert record["self_check"]["decoded"]["same_as_checkpoint"]
        command = serve_command(record, str(out), target="T")
        if engine == "vllm":
            config_json = command[command.index("--speculative-config") + 1]
            assert json.loads(config_json)["method"] == "eagle"
        else:
            assert command[command.index("--speculative-algorithm") + 1] == "EAGLE"
            topk = command[command.index("--speculative-eagle-topk") + 1]
            assert topk == ("1" if kind == "eagle1" else "4")
    with pytest.raises(BadInput, match="does not read EAGLE"):
        export_draft(tmp_path / "run", tmp_path / "no", engine="speculators")


def test_eagle2_can_start_from_an_eagle1_draft(eagle1, recipe, tmp_path):
    fit(set_up(eagle1(run="one")), Notes())
    start = f"draft.init_from={tmp_path / 'one'}"
    training = set_up(eagle1(start, kind="eagle2", run="two"))
    assert method_of(training.draft.config).name == "eagle2"
    before = load_draft(tmp_path / "one" / "best").state_dict()
    assert differing(before, training.draft.state_dict()) == []
    with pytest.raises(BadInput, match="EAGLE-1"):
        set_up(recipe(start, run="three"))
