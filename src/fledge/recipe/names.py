"""Errors about unknown sections and keys, with what was probably meant. Does not import torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from fledge.core.errors import nearest
from fledge.core.settings import Tagged

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


def ours(name: str) -> list[str]:
    """The keys (`section.key`) that another trainer calls `name`, likelier ones first."""
    return ALIASES.get(name.lower().replace("-", "_").lstrip("_"), [])


def by_section(section: str, body: Any) -> dict[str, Any]:
    """What a section holds, by where it belongs: AutoModel's `recipe_args.cached_target_path` is
    a key of the target."""
    if section != "recipe_args" or not isinstance(body, Mapping):
        return {section: body}
    moved = {key: value for key, value in body.items() if key == "cached_target_path"}
    rest = {key: value for key, value in body.items() if key not in moved}
    return {"target": moved} | ({section: rest} if rest else {}) if moved else {section: body}


# --- unknown --------------------------------------------------------------------------------------


def unknown(path: Sequence[str], values: Mapping[str, Any], recipe: Tagged) -> tuple[str, str]:
    """What to say about a section or a key that does not exist, and what was probably meant."""
    *above, key = path
    sections = recipe.fields("")
    places = _places_of(key, recipe)
    if not above:
        fix = _did_you_mean(places) if places else nearest(key, list(sections))
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
    # a match in the section itself, with its current kind, is preferred
    in_section = [place for place in places if place.removeprefix(f"{section}.") in fields]
    fix = _did_you_mean(in_section or places) if places else nearest(key, list(fields))
    if owners := [name for name in shape.kinds() if key in shape.fields(name)]:
        tag = f"{section}.{shape.tag}"
        fix = f"it belongs to {tag}={owners[0]}, but {tag} is {kind}"
    return f"unknown key '{section}.{key}'", fix


def _places_of(key: str, recipe: Tagged) -> list[str]:
    """`section.key` of a section that has such a key, or of the keys that others call so."""
    for section in recipe.fields(""):
        if (shape := recipe.inner(section)) is not None and key in shape.all_keys():
            return [f"{section}.{key}"]
    return ours(key)


def _did_you_mean(places: Sequence[str]) -> str:
    return "did you mean '" + "' or '".join(places) + "'?"
