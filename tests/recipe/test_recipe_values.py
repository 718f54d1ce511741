"""What a recipe means: defaults, number formats, overrides, kinds."""

import subprocess
import sys
from pathlib import Path

import pytest

from fledge.core.errors import BadInput
from fledge.methods.losses.base import Loss
from fledge.methods.losses.cross_entropy import CrossEntropy
from fledge.methods.losses.hard import HardCrossEntropy
from fledge.methods.losses.kl import KLDivergence
from fledge.methods.losses.lk_alpha import LkAlpha
from fledge.methods.losses.lk_lambda import LkLambda
from fledge.recipe.schema import Recipe, load_recipe, recipe_shapes, split_arguments

ROOT = Path(__file__).parents[2]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_states_its_requirements(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.data.train
    assert recipe.run.output_dir == f"runs/{path.stem}"
    for word in ("# hardware ", "# time ", "# disk ", "# acceptance "):
        assert word in path.read_text()


def test_one_and_eight_gpus_take_equal_optimizer_steps() -> None:
    for model in ("llama31_8b", "qwen3_8b", "qwen3_8b_dflash", "qwen3_8b_dspark"):
        one, eight = (load_recipe(ROOT / f"recipes/{model}_{gpus}gpu.yaml") for gpus in (1, 8))
        assert one.training.accumulate == 8 * eight.training.accumulate
        assert {line.split(":")[0] for line in one.differences(eight)} == {
            "training.accumulate",
            "run.output_dir",
        }


@pytest.mark.parametrize(
    ("key", "texts", "value"),
    [
        ("training.lr", ["1e-4", "'1e-4'", "0.0001", "1.0e-4", "1E-4"], 1e-4),
        ("packing.tokens", ["16384", "16_384", "'16384'", "16384.0", "1.6384e4"], 16384),
    ],
)
def test_numbers_are_read_in_every_spelling(
    tmp_path: Path, key: str, texts: list[str], value: float
) -> None:
    section, name = key.split(".")
    for text in texts:
        for recipe in (
            load_recipe(written(tmp_path, f"{section}: {{{name}: {text}}}")),
            load_recipe(None, [f"{key}={text}"]),
        ):
            number = getattr(getattr(recipe, section), name)
            assert (number, type(number)) == (value, type(value))


@pytest.mark.parametrize("value", ["true", "1.5", "1e-4", "many", "[1]", "null", "-1", "0", ".inf"])
def test_invalid_counts_are_refused(value: str) -> None:
    with pytest.raises(BadInput, match=r"training\.epochs"):
        load_recipe(None, [f"training.epochs={value}"])


def test_overrides_take_lists_nulls_nested_values_and_the_last_one_wins(tmp_path: Path) -> None:
    recipe = load_recipe(
        written(tmp_path, "data: {template_options: {a: 1, enable_thinking: true}}"),
        [
            "data.train=[a.jsonl, 'org/b:train[:1000]']",
            "data.valid=c.jsonl",
            "training={clip: null, betas: [0.9, 0.98]}",
            "data.template_options.enable_thinking=false",
            "data.template_options.deep.er=1",
            "training.lr=1",
            "training.lr=2",
            "target.dtype=bf16",
            "run.output_dir=/a/b",
        ],
    )
    assert recipe.data.train == ("a.jsonl", "org/b:train[:1000]")
    assert recipe.data.valid == ("c.jsonl",)
    assert recipe.training.clip is None
    assert recipe.training.betas == (0.9, 0.98)
    assert recipe.training.lr == 2.0
    options = {"a": 1, "enable_thinking": False, "deep": {"er": 1}}
    assert recipe.data.template_options == options
    assert recipe.target.dtype == "bfloat16"  # type: ignore[union-attr]
    assert recipe.run_name == "b"
    assert load_recipe(None, ["run.name=c"]).run_name == "c"
    assert load_recipe(written(tmp_path, recipe.to_yaml())) == recipe


def test_a_recipe_is_frozen_and_names_what_differs(tmp_path: Path) -> None:
    base, changed = load_recipe(None), load_recipe(None, ["training.lr=1", "run.name=x"])
    for text in ("", "training:\n  # nothing\n", "target: {backend: hf}"):
        assert load_recipe(written(tmp_path, text)) == base
    assert base.differences(base) == []
    assert base.differences(changed) == ["training.lr: 0.0001 -> 1.0", "run.name: None -> 'x'"]
    with pytest.raises(ValueError, match="frozen"):
        base.training.lr = 1.0  # type: ignore[misc]


LAMBDA = "objective: {loss: {kind: lk_lambda, scale: 0.5, decay: 2}}"


@pytest.mark.parametrize(
    ("text", "overrides", "loss"),
    [
        ("", [], CrossEntropy()),
        ("", ["objective.kind=peagle"], KLDivergence()),
        ("", ["objective.loss=kl"], KLDivergence()),
        ("", ["objective.loss={kind: hard}"], HardCrossEntropy()),
        ("objective: {loss: lk_alpha}", [], LkAlpha()),
        ("objective: {loss: lk_lambda}", [], LkLambda()),
        (LAMBDA, [], LkLambda(scale=0.5, decay=2)),
        (LAMBDA, ["objective.kind=peagle"], LkLambda(scale=0.5, decay=2)),
        (LAMBDA, ["objective.loss.scale=0.1"], LkLambda(scale=0.1, decay=2)),
        (LAMBDA, ["objective.loss=lk_lambda"], LkLambda(scale=0.5, decay=2)),
        (LAMBDA, ["objective.loss=kl"], KLDivergence()),
        (LAMBDA, ["objective.loss.kind=kl"], KLDivergence()),
        (
            "objective: {loss: kl}",
            ["objective.loss={kind: lk_lambda, scale: 0}"],
            LkLambda(scale=0),
        ),
        ("", ["objective.loss.scale=0.5", "objective.loss=lk_lambda"], LkLambda(scale=0.5)),
        ("", ["objective.loss=lk_lambda", "objective.loss.scale=0.5"], LkLambda(scale=0.5)),
    ],
)
def test_a_loss_is_a_name_or_a_mapping(
    tmp_path: Path, text: str, overrides: list[str], loss: Loss
) -> None:
    recipe = load_recipe(written(tmp_path, text), overrides)
    assert recipe.objective.options()["loss"] == loss
    assert load_recipe(written(tmp_path, recipe.to_yaml())) == recipe


ONLY_HF = "target: {backend: hf, model: org/name, device: cpu, aux_layer_ids: [2, 1, 0]}"


@pytest.mark.parametrize("backwards", [False, True])
def test_switching_the_backend_drops_only_keys_the_new_one_lacks(
    tmp_path: Path, backwards: bool
) -> None:
    overrides = ["target.backend=remote", "target.urls=[http://a, http://b]", "target.prefetch=4"]
    path = written(tmp_path, ONLY_HF)
    assert load_recipe(path, ["target.backend=hf"]) == load_recipe(path)  # nothing to drop
    recipe = load_recipe(path, overrides[:: -1 if backwards else 1])
    target = recipe.target
    assert target.backend == "remote"
    assert target.urls == ("http://a", "http://b")
    assert (target.prefetch, target.model, target.aux_layer_ids) == (4, "org/name", (2, 1, 0))


def test_switching_works_for_every_pair_of_kinds(tmp_path: Path) -> None:
    extra = {"cache": ["target.cached_target_path=/c"]}
    for old in ("hf", "remote", "cache", "sglang", "vllm", "ray"):
        base = load_recipe(None, [f"target.backend={old}", *extra.get(old, [])])
        path = written(tmp_path, base.to_yaml())  # with every field of the old kind
        for new in ("hf", "remote", "cache", "sglang", "vllm", "ray"):
            model = [] if base.target.model else ["target.model=m"]
            switched = load_recipe(path, [f"target.backend={new}", *extra.get(new, []), *model])
            assert switched.target.backend == new
    for old in ("eagle3", "peagle"):
        path = written(tmp_path, load_recipe(None, [f"objective.kind={old}"]).to_yaml())
        for new in ("eagle3", "peagle"):
            assert load_recipe(path, [f"objective.kind={new}"]).objective.kind == new


def test_the_path_of_a_cache_selects_the_cache_backend(tmp_path: Path) -> None:
    in_file = load_recipe(written(tmp_path, "target: {cached_target_path: /c}"))
    assert (in_file.target.backend, in_file.target.cached_target_path) == ("cache", "/c")
    switched = load_recipe(written(tmp_path, ONLY_HF), ["target.cached_target_path=/c"])
    assert switched == load_recipe(
        written(tmp_path, ONLY_HF), ["target.backend=cache", "target.cached_target_path=/c"]
    )
    back = load_recipe(written(tmp_path, switched.to_yaml()), ["target.backend=hf"])
    assert (back.target.backend, back.target.model) == ("hf", "org/name")


@pytest.mark.parametrize(
    ("backend", "overrides"),
    [
        ("cache", ["target.backend=hf", "target.cached_target_path=/c"]),
        ("cache", ["target.backend=hf", "target.cached_target_path=null"]),
        ("remote", ["target.urls=[http://a]"]),  # only a required key selects a backend
    ],
)
def test_a_key_of_another_backend_is_refused(backend: str, overrides: list[str]) -> None:
    with pytest.raises(BadInput, match=rf"belongs to target\.backend={backend}, but .* is hf"):
        load_recipe(None, overrides)


def test_switching_does_not_hide_unknown_keys(tmp_path: Path) -> None:
    path = written(tmp_path, "target: {devise: cpu}")
    with pytest.raises(BadInput, match=r"line 1: unknown key 'target\.devise'"):
        load_recipe(path, ["target.backend=remote"])


def test_parallel_drafts_are_deeper_by_default() -> None:
    assert load_recipe(None).draft.layers == 1
    assert load_recipe(None).draft.freeze_embeddings
    parallel = load_recipe(None, ["objective.kind=peagle"])
    assert parallel.draft.layers == 4
    assert not parallel.draft.freeze_embeddings
    assert load_recipe(None, ["objective.kind=peagle", "draft.layers=2"]).draft.layers == 2


def test_the_resolved_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes/qwen3_8b_8gpu.yaml", ["objective.kind=peagle"])
    path = recipe.write_resolved(tmp_path / "run")
    assert path == tmp_path / "run" / "recipe.yaml"
    assert load_recipe(path) == recipe


def test_arguments_are_split_into_file_and_overrides() -> None:
    assert split_arguments(["a.yaml", "b.c=d"]) == (Path("a.yaml"), ["b.c=d"])
    assert split_arguments([]) == (None, [])
    with pytest.raises(BadInput, match="one recipe at a time"):
        split_arguments(["a.yaml", "b.yaml"])


def test_every_field_is_described() -> None:
    for section, field in Recipe.model_fields.items():
        assert field.description, section
    for section, shape in recipe_shapes().items():
        for kind, model in shape.kinds().items():
            assert model.__doc__
            for key, field in model.model_fields.items():
                assert field.description, f"{section}.{key} ({kind})"


def test_the_reference_page_matches_the_schema() -> None:
    tool = ROOT / "tools" / "recipe_reference.py"
    printed = subprocess.run([sys.executable, tool], capture_output=True, text=True, check=True)
    hint = f"put what {tool} prints below `## Every field` of docs/recipes.md"
    assert printed.stdout in (ROOT / "docs/recipes.md").read_text(), hint
