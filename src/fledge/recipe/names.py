"""Errors about unknown sections and keys, with what was probably meant. Does not import torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fledge.core.errors import BadInput, nearest

if TYPE_CHECKING:
    from fledge.recipe.layers import Shape


# --- aliases -------------------------------------------------------------------------------------
# Other trainers' names for the keys of a recipe: such a name is refused with a pointer to ours.
#
# Names from transformers' Trainer, SpecForge, speculators, AutoModel and vLLM. They are not
# accepted as keys: there is one way to write each setting. A name with two meanings here lists
# both, likelier first. The only exception is the place of an offline cache, which AutoModel's
# instructions for making one tell the user to set.


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

ALIASES: dict[str, list[str]] = {}
for _place, _names in _NAMES_ELSEWHERE.items():
    for _name in _names.split():
        ALIASES.setdefault(_name, []).append(_place)


def ours(name: str) -> list[str]:
    """The keys (`section.key`) that another trainer calls `name`, likelier ones first."""
    return ALIASES.get(name.lower().replace("-", "_").lstrip("_"), [])


def our_section(section: str, key: str) -> str:
    """The section of a key, which may be written in the one that AutoModel has for it."""
    return "target" if (section, key) == ("recipe_args", "cached_target_path") else section


# --- unknown --------------------------------------------------------------------------------------


def unknown_section(
    name: str, where: str, shapes: Mapping[str, "Shape"], inside: Iterable[str] = ()
) -> BadInput:
    """The error about an unknown section. Its fix names the place of a key with that name, else the
    nearest section, else the place of a key inside it."""
    places = _places_of(name, shapes)
    fix = _did_you_mean(places) if places else nearest(name, list(shapes))
    if not fix.startswith("did you mean"):
        inner_places = [place for key in inside for place in _places_of(key, shapes)]
        fix = _did_you_mean(inner_places[:1]) if inner_places else fix
    return BadInput(f"unknown section '{name}'", where=where, fix=fix)


def unknown_key(
    section: str, key: str, where: str, *, shapes: Mapping[str, "Shape"], kind: str
) -> BadInput:
    shape = shapes[section]
    owners = [name for name in shape.kinds if key in shape.fields(name)]
    fields = shape.fields(kind)
    places = _places_of(key, shapes)
    # a match in the section itself, with its current kind, is preferred
    in_section = [place for place in places if place.removeprefix(f"{section}.") in fields]
    fix = _did_you_mean(in_section or places) if places else nearest(key, list(fields))
    if owners:
        tag = f"{section}.{shape.tag}"
        fix = f"it belongs to {tag}={owners[0]}, but {tag} is {kind}"
    return BadInput(f"unknown key '{section}.{key}'", where=where, fix=fix)


def _places_of(key: str, shapes: Mapping[str, "Shape"]) -> list[str]:
    """`section.key` of a section that has such a key, or of the keys that others call so."""
    matches = [f"{section}.{key}" for section in shapes if key in shapes[section].all_keys()]
    return matches[:1] or [place for place in ours(key) if place.partition(".")[0] in shapes]


def _did_you_mean(places: Sequence[str]) -> str:
    return "did you mean '" + "' or '".join(places) + "'?"
