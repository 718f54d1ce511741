"""Random recipes: valid ones round-trip, mistyped ones are refused in one line."""

import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from fledge.core.errors import BadInput
from fledge.core.settings import Section
from fledge.methods.losses.registry import LOSSES
from fledge.methods.registry import METHODS
from fledge.recipe.schema import Recipe, load_recipe, recipe_shapes

SHAPES = recipe_shapes()
WORDS = st.one_of(
    # without control characters and rare line breaks, some of which PyYAML folds away
    st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), min_size=1, max_size=12),
    st.sampled_from(
        ["no", "null", "1e-4", "~", "1_0", "true", "0x1F", "1:30", "=", "- a", "#", "'"]
    ),
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
SPECIAL = {  # fields with constraints beyond their type
    "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:1"]),
    "urls": st.lists(WORDS.map(lambda word: f"http://{word}"), min_size=1, max_size=3),
    "trackers": st.lists(st.sampled_from(["wandb", "tensorboard"]), unique=True),
    "max_length": st.integers(1, 4096),
    "tokens": st.integers(4096, 10**6),
    "down_sample_ratio": st.floats(0.5, 1),
    "down_sample_ratio_min": st.floats(0, 0.5),
    "loss": st.sampled_from(sorted(LOSSES))
    | st.fixed_dictionaries({"kind": st.just("lk_lambda")}, optional={"decay": st.floats(0, 9)}),
    "worker": st.fixed_dictionaries({}, optional={"backend": st.just("hf")})  # of Ray: a target
    | st.fixed_dictionaries({"backend": st.just("vllm"), "tp_size": st.integers(1, 8)}),
    "sliding_layers": st.lists(st.integers(0, 9), max_size=3, unique=True),
    "token_head": st.just("markov"),
}


def values_of(annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    """Valid values of a field, from its type and bounds."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return values_of(inner, [*metadata, *more])
    if get_origin(annotation) in (Union, types.UnionType):
        return st.one_of(*(values_of(part, metadata) for part in get_args(annotation)))
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is tuple:
        parts = [part for part in get_args(annotation) if part is not Ellipsis]
        if len(parts) < len(get_args(annotation)):
            return st.lists(values_of(parts[0], []), max_size=3)
        return st.tuples(*(values_of(part, []) for part in parts)).map(list)
    if get_origin(annotation) is dict:
        return st.dictionaries(WORDS, PLAIN, max_size=3)
    if annotation in (int, float):
        return numbers(annotation, metadata)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        inner = {key: fields(field, key) for key, field in annotation.model_fields.items()}
        return st.fixed_dictionaries({}, optional=inner)
    return {bool: st.booleans(), str: WORDS, types.NoneType: st.none()}[annotation]


def numbers(kind: type, metadata: list[Any]) -> st.SearchStrategy[Any]:
    rules = [rule for item in metadata for rule in getattr(item, "metadata", [item])]
    bounds = {type(rule): rule for rule in rules}
    low, above = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Gt)
    high, below = bounds.get(annotated_types.Le), bounds.get(annotated_types.Lt)
    start = low.ge if low else above.gt if above else 0
    stop = high.le if high else below.lt if below else 10**9
    if kind is int:
        return st.integers(start + bool(above), stop)
    numbers = st.floats(start, stop, exclude_min=bool(above), exclude_max=bool(below))
    return st.one_of(numbers, numbers.map(str))


def fields(field: FieldInfo, name: str) -> st.SearchStrategy[Any]:
    if name in SPECIAL:
        return SPECIAL[name]
    return values_of(field.annotation, list(field.metadata))


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """A sparse valid recipe as a mapping."""
    recipe: dict[str, dict[str, Any]] = {}
    kinds = {name: draw(st.sampled_from(sorted(shape.kinds()))) for name, shape in SHAPES.items()}
    method = METHODS[kinds["objective"]]
    count = method.aux_layers()
    layers = st.lists(st.integers(0, 99), min_size=count, max_size=count, unique=True)
    for section, shape in SHAPES.items():
        kind, body = kinds[section], {}
        for key, field in shape.fields(kind).items():
            if section == "draft" and key in method.fixed_draft:
                continue
            if field.is_required() or draw(st.booleans()):
                values = st.none() | layers if key == "aux_layer_ids" else fields(field, key)
                body[key] = draw(values)
        if shape.tag:
            body[shape.tag] = kind
        recipe[section] = body
    _fit_to_method(recipe)
    return recipe


def _fit_to_method(recipe: dict[str, dict[str, Any]]) -> None:
    """Remove what the method refuses, because sections are drawn independently."""
    method = METHODS[recipe["objective"]["kind"]]
    for key in method.fixed_draft:
        recipe["draft"].pop(key, None)
    if method.aux_layers() != 3:
        recipe["target"].pop("aux_layer_ids", None)
    if not method.splits_rows:
        recipe["training"].pop("context", None)
    if any(number > 1 for number in recipe["target"].get("parallel", {}).values()):
        recipe["target"].pop("keep_states_gb", None)
    if recipe["objective"].get("weights") == "dpace":
        recipe["objective"].pop("loss", None)
    if recipe["training"].get("optimizer") == "muon":
        recipe["training"].pop("shard", None)


def load_text(text: str, *overrides: str) -> Recipe:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "r.yaml"
        path.write_text(text)
        return load_recipe(path, overrides)


@settings(deadline=None, max_examples=150)
@given(recipes())
def test_valid_recipes_round_trip(data: dict[str, dict[str, Any]]) -> None:
    recipe = Recipe.model_validate(data)
    assert load_text(recipe.to_yaml()) == recipe


@settings(deadline=None, max_examples=100)
@given(recipes(), st.randoms(use_true_random=False))
def test_overrides_in_any_order_equal_the_file(
    data: dict[str, dict[str, Any]], random: Any
) -> None:
    from fledge.recipe.yaml_text import dump_yaml

    recipe = Recipe.model_validate(data)
    overrides = [
        f"{section}.{key}={dump_yaml(value).removesuffix('...' + chr(10))}"
        for section, body in recipe.model_dump().items()
        for key, value in body.items()
    ]
    random.shuffle(overrides)
    assert load_recipe(None, overrides) == recipe


@st.composite
def typos(draw: st.DrawFn) -> tuple[str, str]:
    """A key path with a letter added or removed, so that it does not exist; the correct word."""
    section = draw(st.sampled_from(sorted(SHAPES)))
    shape = SHAPES[section]
    key = draw(st.sampled_from(sorted(shape.fields(shape.default))))
    break_section = draw(st.booleans())
    word = section if break_section else key
    at = draw(st.integers(0, len(word) - 1))
    letter = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_"))
    edits = [word[:at] + letter + word[at:], word[:at] + word[at + 1 :]]
    broken = draw(st.sampled_from(edits))
    known = set(SHAPES) if break_section else shape.all_keys()
    if not broken or broken in known:
        broken += "xq"
    return (f"{broken}.{key}" if break_section else f"{section}.{broken}"), word


@settings(deadline=None, max_examples=150)
@given(typos())
def test_typos_are_refused_and_long_names_get_a_suggestion(typo: tuple[str, str]) -> None:
    path, meant = typo
    section, key = path.split(".")
    override, file = f"{path}=1", f"{section}:\n  {key}: 1"
    for attempt in (lambda: load_recipe(None, [override]), lambda: load_text(file)):
        with pytest.raises(BadInput) as caught:
            attempt()
        line = str(caught.value)
        assert "\n" not in line
        assert f"'{section}'" in line or f"'{path}'" in line
        if len(meant) > 4:
            assert "did you mean" in line


def is_loaded_or_refused_in_one_line(load: Callable[[], Recipe]) -> bool:
    try:
        load()
    except BadInput as error:
        return "\n" not in str(error)
    return True


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=40))
def test_no_file_gives_a_traceback(text: str) -> None:
    assert is_loaded_or_refused_in_one_line(lambda: load_text(text))


KEYS = [f"{section}.{key}" for section in SHAPES for key in SHAPES[section].all_keys()]


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(KEYS)), st.text(max_size=20) | PLAIN.map(str))
def test_no_override_gives_a_traceback(name: str, value: str) -> None:
    assert is_loaded_or_refused_in_one_line(lambda: load_recipe(None, [f"{name}={value}"]))
