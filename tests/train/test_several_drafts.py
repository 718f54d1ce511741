"""Several drafts trained from one pass of the target: each is bit for bit what it is when trained
alone, and the target is asked once."""

import json
import multiprocessing
import os
import signal
import statistics
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.recipe.schema import load_recipe, load_recipes
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training import fit as fit_module
from fledge.training import saving
from fledge.training.checkpoint import newest_step
from fledge.training.continuation import check_existing
from fledge.training.fit import fit, fit_together, target_of
from fledge.training.session import Session
from fledge.training.setup import set_up, set_up_together
from fledge.training.step import train_step
from ranks import run_ranks
from train.test_fit import comparable, stop_after
from train.tiny import Notes

SHARED = """
target: {{model: {target}, aux_layer_ids: [0, 1, 2], dtype: float32}}
data: {{train: {chats}, valid_rows: 8, max_length: 64, workers: 1}}
packing: {{tokens: 96}}
draft: {{draft_vocab_size: 128}}
objective: {{ttt_steps: 3}}
training: {{lr: 3e-3, steps: 5, accumulate: 2, device: cpu}}
checkpoint: {{every_steps: 2}}
evaluation: {{every_steps: 3}}
tracking: {{every_steps: 2}}
run: {{output_dir: {run}}}
drafts:
"""
# A different method, a different size and vocabulary, one that reads other layers, reordered, and
# one that reads the last hidden state.
DRAFTS = {
    "chain": "{}",
    "parallel": "{objective: {kind: peagle, num_depths: 4}, draft: {layers: 2}}",
    "small": "{draft: {intermediate_size: 48, draft_vocab_size: 64}, training: {lr: 1e-3}}",
    "block": "{objective: {kind: dflash, block_size: 4, listened_layers: 2}, draft: {layers: 2}, "
    "target: {aux_layer_ids: [3, 0]}}",
    "last": "{objective: {kind: eagle1}, draft: {draft_vocab_size: null}, "
    "target: {aux_layer_ids: null}}",
}


@pytest.fixture(scope="module")
def written(tiny_target, tiny_chats, tmp_path_factory):
    """Writes a recipe file that names the given drafts."""

    def write(run, names=tuple(DRAFTS), **entries):
        text = SHARED.format(target=tiny_target, chats=tiny_chats, run=run)
        for name in names:
            text += f"  {name}: {entries.get(name, DRAFTS.get(name))}\n"
        file = tmp_path_factory.mktemp("recipe") / "drafts.yaml"
        file.write_text(text)
        return file

    return write


@pytest.fixture(scope="module")
def drafts(written):
    """Loads the recipes of the given drafts, by name."""

    def make(run, names=tuple(DRAFTS), overrides=(), **entries):
        return load_recipes(written(run, names, **entries), overrides)

    return make


@pytest.fixture(scope="module")
def alone(drafts, tmp_path_factory):
    """The directory of runs in which every draft was trained by itself."""
    run = tmp_path_factory.mktemp("alone")
    for recipe in drafts(run).values():
        fit(set_up(recipe), Notes())
    return run


def train(recipes):
    trainings = set_up_together([*recipes.values()])
    with target_of(trainings):
        return fit_together(trainings, [Notes() for _ in trainings])


def content(directory):
    """Everything that a run leaves behind, without clock times and its own path."""
    contents = {}
    for path in sorted(Path(directory).rglob("*")):
        name = str(path.relative_to(directory))
        if path.suffix == ".safetensors":
            contents |= {f"{name}/{key}": t.numpy().tobytes() for key, t in load_file(path).items()}
        elif path.name == "state.json":
            state = json.loads(path.read_text())
            contents[name] = {k: v for k, v in state.items() if k not in ("seconds", "checksums")}
        elif path.name == "metrics.jsonl":
            contents[name] = comparable(directory)
        elif path.is_file():
            contents[name] = path.read_text().replace(str(directory), "RUN")
    return contents | {"best": os.readlink(Path(directory) / "best")}


def assert_as_alone(run, alone, names=tuple(DRAFTS)):
    for name in names:
        actual, expected = content(run / name), content(alone / name)
        assert actual.keys() == expected.keys()
        assert [key for key in actual if actual[key] != expected[key]] == []


def test_drafts_from_one_pass_match_those_trained_alone(drafts, alone, tmp_path, monkeypatch):
    questions, real = [], HFEagle3TargetModel.answer
    monkeypatch.setattr(
        HFEagle3TargetModel,
        "answer",
        lambda self, rows: (questions.append(rows), real(self, rows))[1],
    )
    trainings = set_up_together([*drafts(tmp_path).values()])
    notes = [Notes() for _ in trainings]
    assert target_of(trainings).aux_layer_ids == [0, 1, 2, 3, 4]  # of 4 layers
    assert all(outcome.finished for outcome in fit_together(trainings, notes))
    steps, packs = trainings[0].stream.steps, len(trainings[0].held_out)
    evaluations = len(notes[0].evaluations)
    assert (steps, evaluations) == (5, 3)
    assert packs > 1
    assert len(questions) == 2 * steps + evaluations * packs  # independent of the number of drafts
    assert all(0 < line["target_share"] < 1 for note in notes for line in note.lines)
    assert_as_alone(tmp_path, alone)


def killed_at(recipes, place, count):
    """Train until the `count`-th call, then kill this process with SIGKILL."""
    module, name = {"save": (saving, "save"), "step": (fit_module, "train_step")}[place]
    real, calls = getattr(module, name), []

    def dying(*args, **options):
        calls.append(args)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(module, name, dying)
    torch.set_num_threads(1)
    train(recipes)


@pytest.mark.parametrize(
    ("place", "count", "stand"),
    [
        pytest.param("save", 2, [2, 0], id="first-save"),
        pytest.param("step", 8, [3, 3], id="between-two-drafts"),
        pytest.param("save", 6, [4, 3], id="later-save", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_moment_changes_nothing(drafts, alone, tmp_path, place, count, stand):
    """Also when one draft is saved and the other is not yet: the first one waits."""
    names = ("chain", "block")
    recipes = drafts(tmp_path, names)
    process = multiprocessing.get_context("fork").Process(
        target=killed_at, args=(recipes, place, count)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [newest_step(tmp_path / name) for name in names] == stand
    assert all(outcome.finished for outcome in train(recipes))
    assert_as_alone(tmp_path, alone, names)


def test_a_signal_stops_all_drafts_after_the_step(drafts, alone, tmp_path, monkeypatch):
    names = ("chain", "small")
    recipes = drafts(tmp_path, names)
    with monkeypatch.context() as patch:
        stop_after(patch, 4)  # the second draft's second step
        outcomes = train(recipes)
    assert [(run.finished, run.signal) for run in outcomes] == [(False, signal.SIGTERM)] * 2
    assert len({run.state.step for run in outcomes}) == 1
    assert all(outcome.finished for outcome in train(recipes))
    assert_as_alone(tmp_path, alone, names)


def test_one_of_several_drafts_can_continue_alone(drafts, alone, tmp_path):
    """A draft's directory is an ordinary run, and is accepted wherever a run is."""
    recipes = drafts(tmp_path, ("chain", "small"), ["training.steps=3"])
    train(recipes)
    longer = drafts(tmp_path, ("chain", "small"), ["training.extend=true"])
    for recipe in longer.values():
        check_existing(recipe, one_of_several=True)
    assert fit(set_up(longer["chain"]), Notes()).state.step == 5
    assert [outcome.already for outcome in train(longer)] == [True, False]


def run_command(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_drafts_train_from_a_cache_made_for_all_of_them(written, tmp_path):
    """It holds the layers of all drafts; together and alone, each draft reads its own."""
    names = ("chain", "block", "last")
    run_command("precompute", written(tmp_path, names), "--out", tmp_path / "cache")
    cached = ["target.backend=cache", f"target.cached_target_path={tmp_path / 'cache'}"]
    train(load_recipes(written(tmp_path / "both", names), cached))
    for recipe in load_recipes(written(tmp_path / "alone", names), cached).values():
        fit(set_up(recipe), Notes())
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    assert manifest["aux_layer_ids"] == [0, 1, 2, 3, 4]
    assert_as_alone(tmp_path / "both", tmp_path / "alone", names)


def test_commands_accept_a_recipe_of_several_drafts(written, tmp_path):
    file, few = written(tmp_path, ("chain", "small")), ("training.steps=2",)
    planned = json.loads(run_command("plan", file, *few, "--json"))
    alone = json.loads(run_command("plan", file, *few, "--json", "--ranks", 2))
    assert 0 < alone["draft_bytes"] <= planned["draft_bytes"]
    trained = json.loads(run_command("train", file, *few, "--json"))
    assert {name: draft["step"] for name, draft in trained["drafts"].items()} == {
        "chain": 2, "small": 2,
    }  # fmt: skip
    assert trained["measured"]["seconds"] > 0
    again = run_command("train", file, *few)
    assert again.count("already finished at step 2") == 2
    assert f"small: best checkpoint (a loadable draft): {tmp_path / 'small'}" in again
    shown = json.loads(run_command("recipe", "show", file, "--json"))
    assert shown["small"]["draft"]["intermediate_size"] == 48
    assert "eagle3 and eagle3" in run_command("recipe", "check", file)
    with pytest.raises(BadInput, match=r"a recipe of several drafts \(chain, small\)"):
        load_recipe(file)


def test_a_second_draft_costs_only_its_own_step(drafts, tmp_path):
    """At most 1.15 times the sum of the drafts' own steps and one pass of the target, in this
    process's CPU time: other load on the machine does not count."""
    names, length = ("chain", "parallel"), ["training.steps=24", "training.accumulate=1"]
    recipes = drafts(tmp_path, names, length)
    pairs = set_up_together([*recipes.values()])
    single = [set_up(recipe) for recipe in recipes.values()]
    sessions = [Session(training, Notes()) for training in pairs]
    asking = fit_module.asking_parts(sessions)
    batches = [pairs[0].stream.batch(step) for step in range(24)]

    def one_pass(batch):
        asking.target.answer(batch.micro[0])

    def both_steps(batch):
        for session, answered in fit_module.shares(asking, batch, sessions):
            with session.parts.own_draws():
                train_step(session.parts, answered, lr=1e-3)

    works = [one_pass, both_steps]
    works += [lambda batch, run=run: train_step(run.parts, batch, lr=1e-3) for run in single]
    spent = [[] for _ in works]
    for batch in batches:  # interleaved, so that all see the same machine load
        for work, seconds in zip(works, spent, strict=True):
            begin = time.process_time()
            work(batch)
            seconds.append(time.process_time() - begin)
    target, shared, *alone = (statistics.median(seconds[4:]) for seconds in spent)
    steps = sum(step - target for step in alone)
    assert shared <= 1.15 * (steps + target)


@pytest.mark.ranks
def test_two_ranks_train_several_drafts(drafts, tmp_path):
    """Only one of the ranks has rows in the last batch of the epoch."""
    names, length = ("chain", "block"), ["training.steps=null", "training.accumulate=3"]
    run_ranks(2, train, drafts(tmp_path / "both", names, length))
    for name in names:
        recipe = drafts(tmp_path / "alone", names, length)[name]
        run_ranks(2, lambda recipe=recipe: fit(set_up(recipe), Notes()) and None)
    assert_as_alone(tmp_path / "both", tmp_path / "alone", names)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("{data: {max_length: 32}}", r"line 14: 'data.max_length' is one for all drafts"),
        ("{packing: {seed: 1}}", "'packing.seed' is one for all"),
        ("{training: {seed: 1}}", "'training.seed' is one for all"),
        ("{training: {steps: 9}}", "'training.steps' is one for all"),
        ("{target: {dtype: float16}}", "'target.dtype' is one for all"),
        ("{run: {output_dir: here}}", "'run.output_dir' is one for all"),
        ("{evaluation: {rows: 2}}", "'evaluation.rows' is one for all"),
        ("{training: {learning_rate: 1}}", "did you mean 'training.lr'"),
        ("{objective: {kind: peagle, ttt_steps: 2}}", "it belongs to objective.kind=eagle3"),
        ("3", "draft 'other' holds 3"),
    ],
)
def test_shared_settings_cannot_be_set_per_draft(drafts, tmp_path, entry, complaint):
    with pytest.raises(BadInput, match=complaint):
        drafts(tmp_path, ("chain", "other"), other=entry)


def test_overrides_apply_to_all_drafts_or_to_one(drafts, tmp_path):
    overrides = ["training.lr=1e-2", "drafts.small.training.lr=2e-2", "run.name=pair"]
    recipes = drafts(tmp_path, ("chain", "small", "parallel"), overrides)
    assert [recipe.training.lr for recipe in recipes.values()] == [1e-2, 2e-2, 1e-2]
    assert [recipe.run_name for recipe in recipes.values()] == [
        "pair-chain", "pair-small", "pair-parallel",
    ]  # fmt: skip
    assert recipes["parallel"].draft.freeze_embeddings is False  # its method's default
    for override, complaint in {
        "drafts.smal.training.lr=1": "the drafts of this recipe: chain, small",
        "drafts.small.training.seed=1": "'training.seed' is one for all",
        "drafts=small": "write drafts.name.section.key=value",
        "tracking.trackers=wandb": "wandb follows one run, these are 2",
    }.items():
        with pytest.raises(BadInput, match=complaint):
            drafts(tmp_path, ("chain", "small"), [override])
    for name in ("../chain", "-", "a b"):
        with pytest.raises(BadInput, match="is not a valid name for a draft"):
            drafts(tmp_path, (f"'{name}'",), **{f"'{name}'": "{}"})


def test_incompatible_drafts_are_refused(drafts, tmp_path):
    recipes = drafts(tmp_path, ("chain", "last"), chain="{target: {aux_layer_ids: [0, 1, 4]}}")
    with pytest.raises(BadInput, match=r"aux_layer_ids \[4\] out of range"):
        set_up_together([*recipes.values()])
    several = drafts(tmp_path, ("chain", "small"), ["target.supervision=probs"])
    with pytest.raises(BadInput, match="probabilities are over one draft vocabulary"):
        set_up_together([*several.values()])
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(BadInput, match="holds the run of one draft"):
        check_existing(several["chain"], one_of_several=True)
