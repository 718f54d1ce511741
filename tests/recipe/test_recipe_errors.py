"""Every error in a recipe is one line: the location, the key, the fix."""

from pathlib import Path

import pytest

from fledge.core.errors import BadInput
from fledge.recipe.layers import ALIASES
from fledge.recipe.schema import load_recipe, recipe_shapes


def refusal(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        load_recipe(path, overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainig.lr=1", "unknown section 'trainig'; did you mean 'training'?"),
        ("training.lrr=1", "unknown key 'training.lrr'; did you mean 'lr'?"),
        ("lr=1", "did you mean 'training.lr'?"),
        ("training.ttt_steps=3", "did you mean 'objective.ttt_steps'?"),
        ("target.backend=remot", "unknown backend 'remot'; did you mean 'remote'?"),
        (
            "objective.kind=eagle9",
            "unknown kind 'eagle9'; did you mean 'eagle1'?",
        ),
        ("objective.kind=EAGLE-3", "did you mean 'eagle3'?"),
        ("objective.kind=P-EAGLE", "did you mean 'peagle'?"),
        ("learning_rate=1e-4", "unknown section 'learning_rate'; did you mean 'training.lr'?"),
        ("training.batch_size=8", "did you mean 'training.micro_batch'?"),
        ("training.gradient-accumulation-steps=4", "did you mean 'training.accumulate'?"),
        ("training.ttt_length=7", "did you mean 'objective.ttt_steps'?"),
        ("num_steps=7", "did you mean 'training.steps'?"),
        ("output_dir=o", "did you mean 'run.output_dir'?"),
        ("target.urls=http://a", "belongs to target.backend=remote, but target.backend is hf"),
        (
            "objective.num_depths=3",
            "belongs to objective.kind=peagle, but objective.kind is eagle3",
        ),
        ("target.backend=[hf]", "unknown backend"),
        ("training.lr.x=1", "training.lr: input should be a valid number"),
        ("training.lrr.x=1", "unknown key 'training.lrr'; did you mean 'lr'?"),
        ("training=3", "training: must be a mapping, got 3"),
        ("training.lr=", "the value is missing; write null"),
        ("training.lr=[1", "YAML: "),
        ("training.lr={a: 1, a: 2}", "key 'a' is given twice"),
        ("training", "not an override; write section.key=value"),
        ("training.=1", "not an override"),
        ("training.lr=-1", "training.lr: input should be greater than 0, got -1"),
        ("training.lr=true", "must be a number"),
        ("training.lr=.nan", "finite"),
        ("training.betas=[0.9, 1]", "training.betas[1]"),
        ("training.betas=[0.9]", "training.betas[1]: a value is required"),
        ("tracking.trackers=mlflow", "tracking.trackers[0]"),
        ("target.aux_layer_ids=[1, 1, 2]", "three distinct layers"),
        ("target.device=gpu", "target.device"),
        ("data.train=['']", "data.train[0]"),
        ("objective.ttt_steps=0", "objective.ttt_steps: input should be greater than 0"),
        ("objective.ttt_steps=1.5", "objective.ttt_steps"),
        ("objective.step_decay=1.1", "less than or equal to 1, got 1.1"),
        ("draft.draft_vocab_size=0", "draft.draft_vocab_size"),
        ("objective.loss=kll", "objective.loss.kind: unknown kind 'kll'; did you mean 'kl'?"),
        ("objective.loss=3", "objective.loss: must be a name or a mapping, got 3"),
        ("objective.loss=null", "objective.loss: must be a name or a mapping, got None"),
        ("objective.loss.scale=0.5", "it belongs to objective.loss.kind=lk_lambda, but"),
        ("objective.loss={kind: lk_lambda, scale: 2}", "objective.loss.scale: input should be"),
        (
            "objective.loss={kind: lk_lambda, skale: 2}",
            "unknown key 'objective.loss.skale'; did you mean 'scale'?",
        ),
        ("target.parallel.fsdb=2", "unknown key 'target.parallel.fsdb'; did you mean 'fsdp'?"),
    ],
)
def test_errors_name_the_override_and_the_fix(override: str, says: str) -> None:
    line = refusal(override)
    assert line.startswith(f"override '{override}'")
    assert says in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainig:\n  lr: 1", "line 1: unknown section 'trainig'; did you mean 'training'?"),
        ("run:\n  name: x\ntraining:\n  lrr: 1", "line 4: unknown key 'training.lrr'"),
        ("training:\n  lr: -1", "line 2: training.lr: input should be greater than 0, got -1"),
        ("target:\n  backend: hff", "line 2: target.backend: unknown backend 'hff'"),
        ("training: 3", "line 1: training: must be a mapping, got 3"),
        ("- a", "a recipe is a mapping, not ['a']"),
        ("training: {lr: 1", "line 1, column 17: YAML: expected"),
        ("a: b: c", "line 1, column 5: YAML: mapping values are not allowed"),
        ("training:\n  lr: 1\n  lr: 2", "line 3, column 3: YAML: key 'lr' is given twice"),
        ("training: {}\ntraining: {}", "line 2, column 1: YAML: key 'training' is given twice"),
        ("training: !!python/object:os.system {}", "could not determine a constructor"),
        ("training: !!python/object/apply:os.abort []", "constructor"),
        ("training: {epochs: 1e300}", "training.epochs"),
        ("1: {a: 2}", "unknown section '1'"),
        ("? [a]\n: b", "unhashable key"),
        ("a: 1\n---\nb: 2", "but found another document"),
        (
            "recipe_args:\n  cached_target_path: /data/cache\n  learning_rate: 1",
            "line 1: unknown section 'recipe_args'",
        ),
        ("target: {backend: cache}", "target.cached_target_path: a value is required"),
        ("data: {max_length: 9000}", "packing.tokens (8192) is below data.max_length (9000)"),
        ("objective: {kind: peagle, down_sample_ratio: 0.1}", "objective: down_sample_ratio_min"),
        (
            "objective:\n  loss:\n    kind: lk_lambda\n    scale: 2",
            "line 4: objective.loss.scale: input should be less than or equal to 1, got 2",
        ),
    ],
    ids=lambda text: text[:40],
)
def test_errors_name_the_file_and_the_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    line = refusal(path=path)
    assert line.startswith(str(path))
    assert says in line
    assert len(line) < 400 + len(str(path))


def test_binary_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"training:\n  lr: \xff\xfe")
    assert "YAML" in refusal(path=path)
    assert "no such recipe" in refusal(path=tmp_path / "missing.yaml")
    assert "directory" in refusal(path=tmp_path)


def test_several_overrides_are_read_together() -> None:
    """Further errors are counted."""
    assert refusal("training.lr=-1", "training.epochs=0", "run.name=[]").endswith("(and 2 more)")


def test_aliases_from_other_trainers_point_to_existing_keys_and_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "moving.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    listed = {
        (name.strip("| `"), row[1].strip("| `")) for row in rows for name in row[0].split(",")
    }
    for name, place in ALIASES.items():
        section, key = place.split(".")
        keys = recipe_shapes()[section].all_keys()
        assert key in keys, place
        assert name not in keys, f"{name} is a key of ours"
        assert (name, place) in listed


def test_long_values_are_truncated() -> None:
    line = refusal("training.lr=" + "x" * 1000)
    assert len(line) < 1400  # it quotes the override once
    assert len(line.split("got ")[1]) <= 60
