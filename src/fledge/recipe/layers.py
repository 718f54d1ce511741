"""Merges a recipe file and its overrides into one mapping, and reports every error in one line.

Every key is kept with the place where it was written: the file's first, then the overrides'. So
switching a kind can drop keys that only the old kind has, overrides may come in any order, and an
error can name the line or the override that caused it. Does not import torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fledge.core.errors import BadInput, nearest
from fledge.core.reading import read_bytes, shown
from fledge.core.settings import Tagged
from fledge.recipe.yaml_text import parse_yaml


@dataclass
class Layer:
    """Some of a recipe's values, by section, and where each of them was written."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[tuple[str, ...], str] = field(default_factory=dict)

    def place_of(self, path: tuple[str, ...], default: str) -> str:
        """Where a key was written, or else what it belongs to."""
        above = (path[:count] for count in range(len(path), 0, -1))
        return next((self.places[key] for key in above if key in self.places), default)


def read_layers(
    source: Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | Mapping[str, Any],
    *,
    recipe: Tagged,
) -> Layer:
    """The values of a recipe with those of the overrides, which are either strings
    (`section.key=value`) or sections with the keys to change."""
    written, changes = Layer(), Layer()
    if isinstance(source, Path):
        written = _read_file(source)
    elif source is not None:
        written = Layer(_sections(source))
    if isinstance(overrides, Mapping):
        for name, body in overrides.items():
            _add(changes, {name: body}, f"argument '{name}'", recipe)
    else:
        for text in overrides:
            _add(changes, *_override(text), recipe)
    values = merged(written.values, changes.values, recipe, switching=True)
    return Layer(values, written.places | changes.places)


def _read_file(path: Path) -> Layer:
    data, lines = parse_yaml(read_bytes(path, what="the recipe"), where=str(path))
    data = {} if data is None else data
    if not isinstance(data, dict):
        fix = "write 'section:' lines with 'key: value' below them"
        raise BadInput(f"a recipe is a mapping, not {shown(data)}", where=str(path), fix=fix)
    return Layer(_sections(data), {keys: f"{path}, line {line}" for keys, line in lines.items()})


def _sections(data: Mapping[Any, Any]) -> dict[str, Any]:
    """A recipe's sections. AutoModel's `recipe_args.cached_target_path` is a key of the target."""
    # `training:` with nothing below it is a section, too
    sections = {str(name): {} if body is None else body for name, body in data.items()}
    elsewhere, key = sections.get("recipe_args"), "cached_target_path"
    if isinstance(elsewhere, Mapping) and key in elsewhere:
        sections["target"] = {**sections.get("target", {}), key: elsewhere[key]}
        sections["recipe_args"] = {name: elsewhere[name] for name in elsewhere if name != key}
        if not sections["recipe_args"]:
            del sections["recipe_args"]
    return sections


def _add(changes: Layer, data: Mapping[str, Any], where: str, recipe: Tagged) -> None:
    sections = _sections(data)
    changes.values = merged(changes.values, sections, recipe)
    changes.places |= dict.fromkeys(_paths(sections), where)


def _paths(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield (*above, str(key))
        yield from _paths(inner, (*above, str(key)))


def _override(text: str) -> tuple[dict[str, Any], str]:
    """The value of an override `section.key=value`, and how errors refer to it."""
    where = f"override '{text}'" if len(text) <= 200 else f"override '{text[:100]}...'"
    name, equals, raw = text.partition("=")
    names = [part.strip() for part in name.split(".")]
    if not equals or not all(names):
        fix = "write section.key=value, for example training.lr=1e-4"
        raise BadInput("not an override", where=where, fix=fix)
    if not raw.strip():
        raise BadInput("the value is missing", where=where, fix="write null for none")
    value, _ = parse_yaml(raw, where=where)
    return reduce(lambda inner, key: {key: inner}, reversed(names), value), where


def merged(old: Any, new: Any, shape: Tagged | None, *, switching: bool = False) -> Any:
    """`new` written over `old`; mappings keep each other's keys. With `switching`, a section loses
    the keys that only its old kind has where `new` selects another kind."""
    if shape is not None:
        old, new = shape.spread(old), shape.spread(new)
    if not isinstance(new, Mapping):
        return new
    kept = dict(old) if isinstance(old, Mapping) else {}
    kind = ""
    if shape is not None:
        before = shape.kind_of(kept)
        kind = shape.kind_of(new, before)
        if switching and before != kind and {before, kind} <= shape.kinds().keys():
            gone = shape.fields(before).keys() - shape.fields(kind).keys() | {shape.tag}
            kept = {key: value for key, value in kept.items() if key not in gone}
    inner = {key: None if shape is None else shape.inner(str(key), kind) for key in new}
    return kept | {
        key: merged(kept.get(key), value, inner[key], switching=switching)
        for key, value in new.items()
    }


_MESSAGES = {"missing": "a value is required", "model_type": "must be a mapping"}


def one_line(error: ValidationError, *, layer: Layer, where: str, recipe: Tagged) -> BadInput:
    """The first error of pydantic (an unknown name before any other), with its place, the value,
    and how many more there are."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    place = first["loc"]
    where = layer.place_of(tuple(map(str, place)), where)
    if first["type"] == "extra_forbidden":
        what, fix = _unknown([str(key) for key in place], layer.values, recipe)
        return BadInput(what, where=where, fix=fix)
    name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    message = _MESSAGES.get(first["type"], f"{message[0].lower()}{message[1:]}")
    if first["type"] != "missing" and not isinstance(first["input"], dict | BaseModel):
        message += f", got {shown(first['input'])}"
    more = error.error_count() - 1
    what = f"{name}: {message}" if name else message
    return BadInput(what + (f" (and {more} more)" if more else ""), where=where)


# --- unknown names --------------------------------------------------------------------------------

# Other trainers' names for keys of a recipe (transformers, SpecForge, speculators, AutoModel,
# vLLM). They are refused with a pointer to ours: there is one way to write each setting. The only
# exception is the path of an offline cache, which AutoModel's instructions tell the user to set.
_NAMES_ELSEWHERE = {
    "training.steps": "max_steps total_steps num_training_steps num_steps",
    "training.epochs": "num_epochs num_train_epochs max_epochs",
    "training.lr": "learning_rate max_lr peak_lr",
    "training.micro_batch": "batch_size per_device_train_batch_size micro_batch_size",
    "training.accumulate": "gradient_accumulation_steps accumulation_steps grad_accum",
    "training.clip": "max_grad_norm grad_clip",
    "training.warmup_share": "warmup_ratio",
    "training.warmup_steps": "num_warmup_steps",
    "training.schedule": "lr_scheduler_type lr_scheduler",
    "training.compute_dtype": "bf16 fp16 mixed_precision precision",
    "data.max_length": "max_seq_len max_seq_length seq_length model_max_length",
    "data.train": "train_data_path train_path train_file data_path dataset",
    "data.valid": "eval_data_path validation_file eval_dataset",
    "target.model": "target_model_path target_model model_name_or_path verifier",
    "target.aux_layer_ids": "target_layer_ids aux_hidden_state_layer_ids layer_ids",
    "target.tp_size": "tensor_parallel_size",
    "draft.init_from": "draft_model_path draft_model ckpt_dir",
    "draft.layers": "num_hidden_layers draft_num_hidden_layers num_layers",
    "objective.ttt_steps": "ttt_length num_speculative_tokens num_spec_tokens num_draft_tokens",
    "objective.kind": "method algorithm speculative_algorithm",
    "objective.loss": "loss_type loss_fn",
    "checkpoint.every_steps": "save_steps save_interval",
    "evaluation.every_steps": "eval_steps eval_interval",
    "tracking.trackers": "report_to logger",
    "run.output_dir": "output_path save_path checkpoint_dir out_dir",
}
ALIASES = {name: place for place, names in _NAMES_ELSEWHERE.items() for name in names.split()}


def _unknown(path: Sequence[str], values: Mapping[str, Any], recipe: Tagged) -> tuple[str, str]:
    """What to say about a section or a key that does not exist, and what was probably meant."""
    *above, key = path
    place = _place_of(key, recipe)
    if not above:
        return f"unknown section '{key}'", place or nearest(key, list(recipe.fields("")))
    shape, kind = recipe, ""
    for name in above:
        inner, values = shape.inner(name, kind), values.get(name, {})
        assert inner is not None
        shape, kind = inner, inner.kind_of(values)
    section = ".".join(above)
    if owners := [name for name in shape.kinds() if key in shape.fields(name)]:
        tag = f"{section}.{shape.tag}"
        fix = f"it belongs to {tag}={owners[0]}, but {tag} is {kind}"
    else:
        fix = place or nearest(key, list(shape.fields(kind)))
    return f"unknown key '{section}.{key}'", fix


def _place_of(key: str, recipe: Tagged) -> str:
    """Where a recipe has such a key, or one that others call so, as a suggestion; '' if nowhere."""
    shapes = {section: recipe.inner(section) for section in recipe.fields("")}
    owners = (
        f"{name}.{key}" for name, shape in shapes.items() if shape and key in shape.all_keys()
    )
    place = next(owners, None) or ALIASES.get(key.lower().replace("-", "_"))
    return f"did you mean '{place}'?" if place else ""
