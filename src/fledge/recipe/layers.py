"""Merges a recipe file and its overrides into one mapping, and reports every error in one line.

Every value is kept with the place where it was written: the file's first, then the overrides'.
So switching a kind can drop keys that only the old kind has, overrides may come in any order, and
an error can name the line or the override that caused it. Does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fledge.core.errors import BadInput, nearest
from fledge.core.reading import read_bytes, shown
from fledge.core.settings import Tagged
from fledge.recipe.yaml_text import parse_yaml


@dataclass(frozen=True)
class Setting:
    """One value and where it was written."""

    value: Any
    where: str


class Part(dict[str, Any]):
    """Some keys of a mapping: written over another one, they leave its other keys as they are. The
    values of a section are settings, or parts again where it holds another section."""


def read_layers(
    source: Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | Mapping[str, Any],
    *,
    recipe: Tagged,
) -> Part:
    """The settings of a recipe with those of the overrides, which are either strings
    (`section.key=value`) or sections with the keys to change."""
    written, changes = Part(), Part()
    if isinstance(source, Path):
        written = _read_file(source, recipe)
    elif source is not None:
        written = _sections(source, lambda *_: "recipe", recipe)
    if isinstance(overrides, Mapping):
        changes = _sections(overrides, lambda *keys: f"argument '{keys[0]}'", recipe)
    else:
        for text in overrides:
            changes = joined(changes, _override(text, recipe))
    kept: Part = joined(_kept(written, changes, recipe), changes)
    return kept


def _read_file(path: Path, recipe: Tagged) -> Part:
    data, lines = parse_yaml(read_bytes(path, what="the recipe"), where=str(path))
    data = {} if data is None else data
    if not isinstance(data, dict):
        fix = "write 'section:' lines with 'key: value' below them"
        raise BadInput(f"a recipe is a mapping, not {shown(data)}", where=str(path), fix=fix)

    def place(*keys: str) -> str:
        return f"{path}, line {lines[keys]}" if keys in lines else str(path)

    return _sections(data, place, recipe)


def _sections(data: Mapping[Any, Any], place: Callable[..., str], recipe: Tagged) -> Part:
    """The settings of a mapping; `place` says where a section, or one of its keys, was written."""
    sections = Part()
    for name, body in data.items():
        keys = {} if body is None else body  # `training:` and nothing below it
        for section, inner in _by_section(str(name), keys).items():
            tree = _settings(inner, partial(place, str(name)), recipe.inner(section))
            sections = joined(sections, Part({section: tree}))
    return sections


def _by_section(section: str, body: Any) -> dict[str, Any]:
    """What a section holds, by where it belongs: AutoModel's `recipe_args.cached_target_path` is
    a key of the target."""
    key = "cached_target_path"
    if section != "recipe_args" or not isinstance(body, Mapping) or key not in body:
        return {section: body}
    rest = {name: value for name, value in body.items() if name != key}
    return {"target": {key: body[key]}} | ({section: rest} if rest else {})


def _settings(value: Any, place: Callable[..., str], shape: Tagged | None) -> Any:
    """A value with its place; a section becomes a part, whose values have places of their own."""
    value = value if shape is None else shape.spread(value)
    if shape is None or not isinstance(value, Mapping):
        return Setting(value, place())
    return Part(
        (str(key), _settings(inner, partial(place, str(key)), shape.inner(str(key))))
        for key, inner in value.items()
    )


def _override(text: str, recipe: Tagged) -> Part:
    """The settings of an override `section.key=value`."""
    where = f"override '{text}'" if len(text) <= 200 else f"override '{text[:100]}...'"
    name, equals, raw = text.partition("=")
    names = [part.strip() for part in name.split(".")]
    if not equals or not all(names):
        fix = "write section.key=value, for example training.lr=1e-4"
        raise BadInput("not an override", where=where, fix=fix)
    value = reduce(lambda inner, key: Part({key: inner}), reversed(names), _parsed(raw, where))
    return _sections(value, lambda *_: where, recipe)


def _parsed(raw: str, where: str) -> Any:
    if not raw.strip():
        raise BadInput("the value is missing", where=where, fix="write null for none")
    try:
        return parse_yaml(raw, where=where)[0]
    except BadInput as error:
        fix = "put the value in double quotes inside single ones: 'section.key=\"value\"'"
        raise BadInput(error.what, where=where, fix=fix) from error


def joined(old: Any, new: Any) -> Any:
    """`new` written over `old`."""
    if isinstance(old, Setting) and isinstance(new, Setting):
        return Setting(joined(old.value, new.value), new.where)
    if isinstance(new, Part) and isinstance(old, dict):
        return type(old)(old | {key: joined(old.get(key), value) for key, value in new.items()})
    return new


def _kept(old: Part, new: Part, shape: Tagged) -> Part:
    """The settings without those that only the old kind has, where `new` selects another kind."""
    before = shape.kind_of(plain(old))
    after = shape.kind_of(plain(new), before)
    gone: set[str] = set()
    if before != after and before in shape.kinds() and after in shape.kinds():
        gone = shape.fields(before).keys() - shape.fields(after).keys() | {shape.tag}
    kept = Part()
    for key, value in old.items():
        inner, change = shape.inner(key, before), new.get(key)
        if inner is not None and isinstance(value, Part) and isinstance(change, Part):
            value = _kept(value, change, inner)
        if key not in gone:
            kept[key] = value
    return kept


def plain(value: Any) -> Any:
    """The values of settings, ready for validation."""
    if isinstance(value, Setting):
        return plain(value.value)
    return {key: plain(inner) for key, inner in value.items()} if isinstance(value, dict) else value


_MESSAGES = {"missing": "a value is required", "model_type": "must be a mapping"}


def one_line(error: ValidationError, *, settings: Part, where: str, recipe: Tagged) -> BadInput:
    """The first error of pydantic (an unknown name before any other), with its place, the value,
    and how many more there are."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    place = first["loc"]
    setting: Any = settings
    for key in map(str, place):
        setting = setting.get(key) if isinstance(setting, Part) else setting
    where = setting.where if isinstance(setting, Setting) else where
    name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    if first["type"] == "extra_forbidden":
        what, fix = _unknown([str(key) for key in place], plain(settings), recipe)
        return BadInput(what, where=where, fix=fix)
    message = first["msg"].removeprefix("Value error, ")
    message = _MESSAGES.get(first["type"], f"{message[0].lower()}{message[1:]}")
    if first["type"] != "missing" and not isinstance(first["input"], dict | BaseModel):
        message += f", got {shown(first['input'])}"
    more = error.error_count() - 1
    what = f"{name}: {message}" if name else message
    return BadInput(what + (f" (and {more} more)" if more else ""), where=where)


# --- unknown names --------------------------------------------------------------------------------

# Other trainers' names for the keys of a recipe (transformers, SpecForge, speculators, AutoModel,
# vLLM). They are refused with a pointer to ours: there is one way to write each setting. The only
# exception is the path of an offline cache, which AutoModel's instructions tell the user to set.
_NAMES_ELSEWHERE = {
    "training.steps": "max_steps total_steps num_training_steps num_steps",
    "training.epochs": "num_epochs num_train_epochs max_epochs n_epochs",
    "training.lr": "learning_rate max_lr peak_lr",
    "training.micro_batch": (
        "batch_size per_device_train_batch_size train_batch_size micro_batch_size local_batch_size"
    ),
    "training.accumulate": (
        "gradient_accumulation_steps accumulation_steps grad_accum draft_accumulation_steps"
    ),
    "training.clip": "max_grad_norm grad_clip gradient_clip_val clip_grad_norm",
    "training.warmup_share": "warmup_ratio",
    "training.warmup_steps": "num_warmup_steps",
    "training.schedule": "lr_scheduler_type lr_scheduler lr_decay_style",
    "training.weight_decay": "wd",
    "training.betas": "adam_beta1 adam_beta2 adam_betas",
    "training.eps": "adam_epsilon adam_eps",
    "training.seed": "random_seed data_seed",
    "training.compute_dtype": "bf16 fp16 mixed_precision precision",
    "data.max_length": (
        "max_seq_len max_seq_length seq_length seq_len model_max_length cutoff_len total_seq_len"
    ),
    "data.train": "train_data_path train_path train_file data_path dataset",
    "data.valid": "eval_data_path validation_file eval_dataset val_data_path",
    "data.last_turn_only": "train_only_last_turn",
    "data.workers": "num_workers dataloader_num_workers build_dataset_num_proc",
    "packing.tokens": "packed_sequence_size pack_size",
    "target.model": "target_model_path target_model model_name_or_path verifier",
    "target.aux_layer_ids": "target_layer_ids aux_hidden_state_layer_ids layer_ids",
    "target.tp_size": "tensor_parallel_size",
    "target.memory_fraction": "gpu_memory_utilization mem_fraction_static",
    "draft.init_from": "draft_model_path draft_model ckpt_dir pretrained_draft",
    "draft.layers": "num_hidden_layers draft_num_hidden_layers num_layers",
    "draft.freeze_embeddings": "freeze_embedding freeze_embed",
    "objective.ttt_steps": (
        "ttt_length num_steps num_speculative_tokens num_spec_tokens num_draft_tokens "
        "speculative_num_steps"
    ),
    "objective.num_depths": "ttt_length num_speculative_tokens num_draft_tokens parallel_depth",
    "objective.step_decay": "ttt_step_loss_decay loss_decay",
    "objective.kind": "method algorithm speculative_algorithm speculator_type",
    "objective.loss": "loss_type loss_fn loss_function",
    "checkpoint.every_steps": "save_steps save_interval ckpt_every_steps",
    "checkpoint.keep": "save_total_limit max_checkpoints",
    "checkpoint.resume": "resume_from_checkpoint restore_from",
    "evaluation.every_steps": "eval_steps eval_interval val_every_steps",
    "tracking.trackers": "report_to logger",
    "tracking.every_steps": "logging_steps log_interval log_freq",
    "tracking.project": "wandb_project project_name",
    "run.name": "run_name wandb_name experiment_name",
    "run.output_dir": "output_path save_path checkpoint_dir out out_dir",
}

ALIASES: dict[str, list[str]] = {}  # with two meanings here: both, the likelier one first
for _place, _names in _NAMES_ELSEWHERE.items():
    for _name in _names.split():
        ALIASES.setdefault(_name, []).append(_place)


def _unknown(path: Sequence[str], values: Mapping[str, Any], recipe: Tagged) -> tuple[str, str]:
    """What to say about a section or a key that does not exist, and what was probably meant."""
    *above, key = path
    places = _places_of(key, recipe)
    if not above:
        fix = _did_you_mean(places) if places else nearest(key, list(recipe.fields("")))
        body = values[key] if isinstance(values[key], Mapping) else {}
        inside = [place for name in body for place in _places_of(str(name), recipe)]
        if inside and not fix.startswith("did you mean"):
            fix = _did_you_mean(inside[:1])
        return f"unknown section '{key}'", fix
    shape, kind = recipe, ""
    for name in above:
        inner, values = shape.inner(name, kind), values.get(name, {})
        assert inner is not None
        shape, kind = inner, inner.kind_of(values)
    section, fields = ".".join(above), shape.fields(kind)
    if owners := [name for name in shape.kinds() if key in shape.fields(name)]:
        tag = f"{section}.{shape.tag}"
        fix = f"it belongs to {tag}={owners[0]}, but {tag} is {kind}"
    else:  # a match in the section itself, with its current kind, is preferred
        in_section = [place for place in places if place.removeprefix(f"{section}.") in fields]
        fix = _did_you_mean(in_section or places) if places else nearest(key, list(fields))
    return f"unknown key '{section}.{key}'", fix


def _places_of(key: str, recipe: Tagged) -> list[str]:
    """`section.key` of a section that has such a key, or of the keys that others call so."""
    for section in recipe.fields(""):
        if (shape := recipe.inner(section)) is not None and key in shape.all_keys():
            return [f"{section}.{key}"]
    return ALIASES.get(key.lower().replace("-", "_").lstrip("_"), [])


def _did_you_mean(places: Sequence[str]) -> str:
    return "did you mean '" + "' or '".join(places) + "'?"
