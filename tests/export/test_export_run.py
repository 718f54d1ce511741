"""From a trained run to an export: the estimate of training is measured again on the files."""

import json
import os
import shutil
import signal

import pytest
import torch
from typer.testing import CliRunner

from export.export_cases import KINDS, config_of, make_draft, rewrite
from fledge import Eagle3TrainerModule, LlamaEagle3DraftModel, PEagleTrainerModule, export_draft
from fledge.cli.main import app
from fledge.cli.main import run as main
from fledge.core.errors import BadInput
from fledge.decode.accept import Round
from fledge.decode.speculative import Generation
from fledge.formats import export as export_module
from fledge.formats.export import read_export_record
from fledge.formats.import_draft import import_draft
from fledge.formats.self_check import CheckOptions, Decoded, check_gain, check_rounds
from fledge.measure.figures import Sample
from fledge.recipe.schema import load_recipe
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.tiny import Notes, make_chats, recipe_for

# The chats were not written by the target, so acceptance on its own answers has no bound here.
CHECK = CheckOptions(limit=3, max_new_tokens=12, shortfall=1.0)


@pytest.fixture(scope="module")
def place(tiny_target, tmp_path_factory):
    """A directory with a run on the tiny target and its training chats."""
    root = tmp_path_factory.mktemp("export_run")
    chats = make_chats(root / "chats.jsonl")
    recipe = recipe_for(tiny_target, chats, root / "run", "training.epochs=1")
    fit(set_up(recipe), Notes())
    return root


@pytest.fixture
def run(place, tmp_path):
    """A copy of the run that a test may break."""
    shutil.copytree(place / "run", tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def state_of(run):
    return json.loads((run / "best" / "state.json").read_text())


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_the_device_of_training_may_be_another(run, tmp_path, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("the machine has what the run was trained on")
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("device: cpu", f"device: {device}"))
    exported = export_draft(run, tmp_path / "out", engine="vllm", check=CHECK)
    assert read_export_record(exported)["self_check"]["decoded"]["same_as_checkpoint"]


def test_the_estimate_is_measured_again_on_the_files(run, tmp_path):
    exported = export_draft(run, tmp_path / "out", engine="vllm", check=CHECK)
    record = read_export_record(exported)
    check = record["self_check"]
    assert check["estimate"] == state_of(run)["last"]["acceptance_length"]
    assert check["same_rows"] == check["estimate"]  # fp32, one machine: bit for bit
    assert check["decoded"]["same_as_checkpoint"]
    assert check["decoded"]["prompts"] == 3
    assert check["decoded"]["checkpoint_acceptance_length"] >= 1.0
    assert record["num_draft_tokens"] == 3  # ttt_steps
    assert record["step"] == state_of(run)["step"]
    assert record["embeddings"] == "the target's"
    card = (exported / "README.md").read_text()
    assert f"{check['estimate']:.3f}" in card
    assert "ttt_steps: 3" in card
    assert "chats.jsonl. Checkpoint at step" in card
    assert "--speculative-config" in card
    assert record["target"]["tokenizer_fingerprint"] in card


def test_an_export_contains_no_local_paths(run, tiny_target, tmp_path, monkeypatch):
    recipe = (run / "recipe.yaml").read_text()
    assert str(tiny_target) in recipe
    options = {"engine": "speculators", "without_target": True}
    exported = export_draft(run, run / "exports" / "out", **options)
    texts = [path.read_text() for path in exported.glob("*") if path.suffix in {".md", ".json"}]
    assert len(texts) == 3
    assert not [text for text in texts if "/tmp" in text or str(tmp_path.parent) in text]
    config = json.loads((exported / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == tiny_target.name
    [_, note] = read_export_record(exported)["self_check"]["notes"]
    assert f"it will look for '{tiny_target.name}' in its working directory" in note
    card = (exported / "README.md").read_text()
    assert f"vllm serve path/to/{tiny_target.name} --speculative-config" in card
    assert f"model: {tiny_target.name}" in card
    assert "Data: chats.jsonl." in card
    # `fledge serve` on this machine still finds the target
    monkeypatch.chdir(tmp_path)
    inside = ["serve", "run/exports/out", "--json"]
    command = json.loads(CliRunner().invoke(app, inside).stdout)
    assert command[2] == str(tiny_target)
    assert json.loads(command[4])["model"] == str(exported)
    moved = exported.rename(tmp_path / "elsewhere")
    error = CliRunner().invoke(app, ["serve", str(moved)]).exception
    assert f"where its target {tiny_target.name} is stored is unknown" in str(error)
    # and the user may give a better name
    named = export_draft(run, tmp_path / "named", target_name="org/model", **options)
    config = json.loads((named / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    assert "base_model: org/model\n" in (named / "README.md").read_text()


def test_a_run_of_another_method(tiny_target, place, tmp_path):
    """Of P-EAGLE; tests/train/test_block_run.py exports block drafts."""
    recipe = recipe_for(
        tiny_target, place / "chats.jsonl", tmp_path / "run", "objective.kind=peagle",
        "objective.num_depths=3", "draft.layers=2", "training.steps=2", "evaluation.every_steps=2",
    )  # fmt: skip
    fit(set_up(recipe), Notes())
    exported = export_draft(tmp_path / "run", tmp_path / "out", engine="speculators", check=CHECK)
    record = read_export_record(exported)
    assert record["kind"] == "P-EAGLE"
    assert record["self_check"]["same_rows"] == record["self_check"]["estimate"]
    assert record["mask_token_id"] is not None


def test_unsorted_layers_and_a_remote_backend(tiny_target, place, tmp_path):
    recipe = recipe_for(
        tiny_target, place / "chats.jsonl", tmp_path / "run", "target.aux_layer_ids=2,0,1",
        "training.steps=4", "evaluation.every_steps=4",
    )  # fmt: skip
    fit(set_up(recipe), Notes())
    resolved = tmp_path / "run" / "recipe.yaml"
    remote = ["target.backend=remote", "target.urls=http://127.0.0.1:9"]
    load_recipe(resolved, remote).write_resolved(tmp_path / "run")  # as if trained remotely
    exported = export_draft(
        tmp_path / "run", tmp_path / "out", engine="vllm", target=str(tiny_target), check=CHECK
    )
    check = read_export_record(exported)["self_check"]
    assert read_export_record(exported)["aux_layer_ids"] == [0, 1, 2]
    assert check["same_rows"] == pytest.approx(check["estimate"], rel=1e-6)
    assert check["decoded"]["same_as_checkpoint"]


def test_the_check_uses_the_trained_depth_whatever_is_served(run, tmp_path):
    exported = export_draft(run, tmp_path / "out", engine="vllm", num_draft_tokens=1, check=CHECK)
    record = read_export_record(exported)
    assert record["num_draft_tokens"] == 1
    assert len(record["self_check"]["decoded"]["joint"]) == 3


def test_answers_that_do_not_fit_the_targets_context(run, tmp_path):
    check = CheckOptions(limit=3, max_new_tokens=510)  # it has 512 positions
    with pytest.raises(BadInput, match="leaves room"):
        export_draft(run, tmp_path / "out", engine="vllm", check=check)


def test_an_estimate_that_the_files_do_not_reach_is_refused(run, tmp_path):
    state = state_of(run)
    state["last"]["acceptance_length"] *= 1.05
    (run / "best" / "state.json").write_text(json.dumps(state))
    with pytest.raises(BadInput, match=r"held-out rows, the exported files reach.*allowed: 2%"):
        export_draft(run, tmp_path / "out", engine="vllm", check=CHECK)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_changed_data_is_detected_and_not_compared(run, tmp_path):
    make_chats(tmp_path / "other.jsonl", count=50)
    for name, note in {"other.jsonl": "data has changed", "gone.jsonl": "gone.jsonl"}.items():
        recipe = load_recipe(run / "recipe.yaml", [f"data.train={tmp_path / name}"])
        recipe.write_resolved(run)
        out = export_draft(run, tmp_path / f"{name}-out", engine="vllm", check=CHECK)
        check = read_export_record(out)["self_check"]
        assert check["same_rows"] is None
        assert note in check["notes"][0]
    assert check["decoded"]["prompts"] == 3  # from the set that ships with fledge
    assert "not compared with its estimate" in check["notes"][1]


@pytest.mark.parametrize(("reached", "fine"), [(1.29, False), (1.31, True), (2.0, True)])
def test_decoding_that_falls_short_of_the_estimate(reached, fine):
    decoded = Decoded("", 1, 1, 1.0, reached, [], 1.0, True)
    if fine:  # half of 0.8, less a tenth: 1.3
        check_gain(1.8, decoded, CheckOptions())
    else:
        with pytest.raises(BadInput, match="--shortfall"):
            check_gain(1.8, decoded, CheckOptions())


def test_replay_that_does_not_match_live_rounds():
    rounds = [Round(4 + i, 0, 1) for i in range(20)]
    text = Generation([0] * 3, [1] * 21, rounds=rounds)
    check_rounds([Sample([0] * 3, [1] * 21, rounds)], [text])
    wrong = [*rounds[:-2], Round(22, 1, 2)]
    with pytest.raises(BadInput, match="of 20 rounds decoded live only 18"):
        check_rounds([Sample([0] * 3, [1] * 21, wrong)], [text])


# --- the command --------------------------------------------------------------------------------


def command(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


FEW = ["--limit", "2", "--max-new-tokens", "8", "--shortfall", "1"]


def test_the_command_prints_figures_and_how_to_serve(run):
    result = command(run, "--engine", "sglang", "--engine-version", "0.5.9", *FEW)
    assert result.exit_code == 0, result.output
    assert (run / "exports" / "sglang" / "config.json").is_file()
    assert "estimated in training" in result.output
    assert "the same rows, from these files" in result.output
    assert "--speculative-algorithm EAGLE3" in result.output


def test_bad_input_is_a_one_line_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["export", "nowhere", "--engine", "vllm"])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "neither a draft nor a run" in line


def test_an_unsupported_dtype_is_refused(tmp_path, tiny_target):
    draft = make_draft(tmp_path / "draft", tiny_target)
    result = command(draft, "--engine", "vllm", "--without-target", "--dtype", "int8")
    assert isinstance(result.exception, BadInput)
    done = command(draft, "--engine", "vllm", "--without-target", "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "draft-vllm" / "config.json").is_file()
    assert "nothing was decoded" in done.output


# --- killed -------------------------------------------------------------------------------------


def killed_after(name, draft, out, target):
    """Export in a child that kills itself once `name` has done its work."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        real = getattr(export_module, name)

        def last(*args, **kwargs):
            real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(export_module, name, last)
        export_draft(draft, out, engine="vllm", target=str(target), without_target=True)
    finally:
        os._exit(1)  # not reached if the child was killed


@pytest.mark.parametrize("after", ["save_tensors", "write_json", "check_files", "write_text"])
def test_a_killed_export_leaves_nothing_that_looks_finished(tmp_path, tiny_target, after):
    draft = make_draft(tmp_path / "draft", tiny_target)
    out = tmp_path / "served" / "out"
    assert killed_after(after, draft, out, tiny_target) == -signal.SIGKILL
    assert not out.exists()
    [left] = out.parent.iterdir()  # the unfinished export, under a hidden name
    assert left.name.startswith(".out.")
    assert left.name.endswith(".tmp")
    assert not (left / "fledge_export.json").exists()  # it is written last
    export_draft(draft, out, engine="vllm", target=str(tiny_target), without_target=True)
    assert read_export_record(out)["format"] == "plain-vllm"


# --- the trained depth, which the files keep without the run -------------------------------------


TRAINED = {
    "eagle3": {"ttt_steps": 4},
    "peagle": {"num_depths": 6, "down_sample_ratio": 0.6, "down_sample_ratio_min": 0.1},
}
TRAINED_SERVED = [("eagle3", engine) for engine in ("vllm", "sglang", "speculators")]
TRAINED_SERVED += [("peagle", engine) for engine in ("vllm", "speculators")]


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


@pytest.mark.parametrize(("kind", "engine"), TRAINED_SERVED)
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
