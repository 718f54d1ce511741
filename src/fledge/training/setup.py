"""Builds everything a run needs from its recipe: data, target, vocabulary, draft, objective.

The data is prepared before any process group exists: the other ranks must not block in a collective
while one of them tokenizes for an hour.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.core.distributed import World, join_world, pick_device
from fledge.core.errors import BadInput
from fledge.core.machine import multiplies_bfloat16
from fledge.core.progress import Progress, Watch, unwatched
from fledge.core.rows import TokenBatch
from fledge.core.terminal import counted
from fledge.data.pack import collate, pack_rows
from fledge.data.prepare import prepare_rows
from fledge.data.rows import Rows, RowView, split_rows
from fledge.data.store import TokenRows
from fledge.data.tokenise import TokeniseOptions
from fledge.data.vocab import DraftVocabulary
from fledge.measure.replay import Ints
from fledge.methods.base import TrainerInputs
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.objective import Objective
from fledge.models.resolve import local_model
from fledge.recipe.schema import Recipe
from fledge.recipe.sections import Data
from fledge.rollout.context import ContextRanks
from fledge.target.base import Eagle3TargetBackend
from fledge.target.kinds import (
    kind_of,
    model_name,
    target_tokenizer,
)
from fledge.training.batches import PackStream
from fledge.training.drafts import (
    VOCABULARY_NAME,
    make_draft,
    open_target,
    vocabulary_of_run,
    with_own_layers,
)
from fledge.training.optimizer import StepGuard, learning_rate, make_optimizers
from fledge.training.recorded_steps import recorded_steps
from fledge.training.sharding import shard_draft
from fledge.training.step import Clock, Models, Parts


@dataclass
class Training:
    """A run that is ready to be trained."""

    recipe: Recipe
    directory: Path
    parts: Parts
    stream: PackStream
    rows: RowView  # the stream's rows, but reading them does not ask for answers in advance
    held_out: list[TokenBatch]
    draft: DraftModel
    vocabulary: DraftVocabulary
    fingerprints: dict[str, str]  # of what must not change when a run is resumed
    warnings: list[str]  # about what is allowed, but probably not intended
    held_out_picks: dict[int, Ints] = field(default_factory=dict)  # see `evaluate`
    watch: Watch = unwatched  # training and saving count steps, evaluating counts packs

    @property
    def vocabulary_path(self) -> Path:
        """Written when a run starts, so it exists if and only if the run has started."""
        return self.directory / VOCABULARY_NAME

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        training, total = self.recipe.training, self.stream.steps
        warmup = training.warmup_steps
        return learning_rate(
            step,
            total,
            peak=training.lr,
            warmup=math.ceil(training.warmup_share * total) if warmup is None else warmup,
            schedule=training.schedule,
            final_share=training.final_lr_share,
            decay_share=training.decay_share,
        )


def prepare_data(recipe: Recipe, progress: Progress = unwatched) -> tuple[RowView, RowView, str]:
    """(training rows, held-out rows, fingerprint); tokenized rows are cached on disk."""
    rows = tokenised(recipe.data.train, recipe, progress)
    train, held_out = split_training(rows, recipe)
    fingerprint = rows.fingerprint
    if recipe.data.valid:
        valid = tokenised(recipe.data.valid, recipe, progress)
        held_out, _ = split_rows(valid, 0)
        fingerprint += f"+{valid.fingerprint}"
    return _not_empty(train), held_out, fingerprint


def split_training(rows: Rows, recipe: Recipe) -> tuple[RowView, RowView]:
    """(training rows, held-out rows) of the recipe's `data.train`."""
    data = recipe.data
    held_out = 0 if data.valid else data.valid_rows
    return split_rows(rows, held_out, drop_truncated=data.drop_truncated)


def known_data(recipe: Recipe, target: Eagle3TargetBackend) -> tuple[RowView, RowView, str]:
    """Like `prepare_data`, for a target that brings its own rows."""
    known_rows, data = target.known_rows(), recipe.data
    assert known_rows is not None, f"{type(target).__name__} brings no rows"
    longest = int(known_rows.rows.lengths.max())
    if longest > recipe.packing.tokens:
        what = f"packing.tokens ({recipe.packing.tokens}) is below the longest row of the "
        what += f"{recipe.target.backend} ({longest})"
        raise BadInput(what, where="packing.tokens", fix=f"packing.tokens={longest} or more")
    train, held_out = known_rows.split(data.valid_rows, drop_truncated=data.drop_truncated)
    return _not_empty(train), held_out, known_rows.fingerprint


def _not_empty(train: RowView) -> RowView:
    if len(train) == 0:
        raise BadInput("no training row is left after the held-out ones", where="data.valid_rows")
    return train


def _overlap(train: RowView, held_out: RowView) -> list[str]:
    """A warning about held-out rows that are also trained on."""
    both, total = int(np.isin(held_out.digests(), train.digests()).sum()), len(held_out)
    if not both:
        return []
    what = f"{counted(both, 'held-out row')} of {total:,} ({both / total:.1%}) also among the "
    return [f"{what}training rows: held-out acceptance is not that on new text"]


def tokenise_options(data: Data) -> TokeniseOptions:
    supervised = data.last_turn_only, data.mask_reasoning
    return TokeniseOptions(data.max_length, data.overlong, *supervised, data.template_options)


def tokenised(names: tuple[str, ...], recipe: Recipe, progress: Progress) -> TokenRows:
    """The rows of the named sources, tokenized with the recipe's options."""
    if not names:
        raise BadInput("no training data", where="data.train", fix="data.train=chats.jsonl")
    data, model = recipe.data, local_model(model_name(recipe.target), weights=False)
    rows = prepare_rows(
        list(names), model, tokenise_options(data), workers=data.workers,
        max_drop_share=data.max_drop_share, on_progress=progress,
        trust_remote_code=recipe.target.trust_remote_code,
    )  # fmt: skip
    if line := rows.drops.line():
        progress.say(line)
    return rows


def set_up(
    recipe: Recipe,
    progress: Progress = unwatched,
    *,
    target: Eagle3TargetBackend | None = None,
) -> Training:
    """Build a run; writes nothing but caches. Prepares the data, then joins the other ranks, then
    opens the target, which is closed again if anything fails. `target`: the recipe's target if it
    is already open; it must provide the aux layers that the draft uses."""
    recipe = recipe.settled()
    training, device = recipe.training, pick_device(recipe.training.device)
    data = None if kind_of(recipe.target).brings_rows else prepare_data(recipe, progress)
    progress("loading the target")
    world = join_world(device, shard=training.shard, context=training.context)
    torch.manual_seed(training.seed)
    with ExitStack() as undo:
        if target is None:
            target = undo.enter_context(open_target(recipe, device))
        target.askers = world.context
        rows, held_out, fingerprint = data or known_data(recipe, target)
        warnings = _overlap(rows, held_out)
        tokenizer = target_tokenizer(recipe.target)
        target = with_own_layers(recipe, target)
        vocabulary = vocabulary_of_run(recipe, target, rows, tokenizer, fingerprint)
        target.set_vocab_mapping(
            torch.from_numpy(vocabulary.selected_token_ids), torch.from_numpy(vocabulary.t2d)
        )
        train, held_out = target.read_ahead(rows), target.read_ahead(held_out)
        draft = make_draft(recipe, target, vocabulary, tokenizer, device)
        world.copy_from_main(draft)
        objective = make_objective(recipe, draft, vocabulary, target, device, world)
        if objective.reads_target:
            target.keep_coverage(torch.from_numpy(vocabulary.t2d))
        pad_id = tokenizer.pad_token_id or 0
        batches = held_out_batches(held_out, recipe, pad_id)
        run = Training(
            recipe=recipe,
            directory=Path(recipe.run.output_dir),
            parts=_parts(recipe, Models(target, objective, device, world, Clock(device))),
            stream=PackStream(
                train,
                tokens=recipe.packing.tokens,
                pad_id=pad_id,
                seed=recipe.packing.seed,
                padded=recipe.packing.padded,
                micro_batch=training.micro_batch,
                accumulate=training.accumulate,
                epochs=training.epochs,
                steps=training.steps,
                world=world,
            ),
            rows=rows,
            held_out=batches,
            draft=draft,
            vocabulary=vocabulary,
            fingerprints={
                "data": fingerprint,
                "target": target.info().weights_fingerprint,
                "vocabulary": vocabulary.digest(),
            },
            warnings=warnings,
        )
        undo.pop_all()
    return run


def _parts(recipe: Recipe, models: Models) -> Parts:
    training, draft = recipe.training, models.objective.draft_model
    if models.world.shard > 1:
        shard_draft(draft, models.world, compute_dtype=models.objective.compute_dtype)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    recorded = None
    if training.record_steps and training.accumulate == models.world.size == 1:
        tokens = training.micro_batch * recipe.packing.tokens
        recorded = recorded_steps(models.objective, parameters, tokens=tokens)
    return Parts(
        **vars(models),
        parameters=parameters,
        optimizers=make_optimizers(
            draft,
            optimizer=training.optimizer,
            lr=training.lr,
            betas=training.betas,
            eps=training.eps,
            weight_decay=training.weight_decay,
        ),
        guard=StepGuard(training.spike_factor, models.device),
        clip=training.clip,
        seed=training.seed,
        recorded=recorded,
    )


def held_out_batches(rows: RowView, recipe: Recipe, pad_id: int) -> list[TokenBatch]:
    """The packs on which a recipe's drafts are evaluated."""
    count = min(len(rows), recipe.evaluation.rows)
    packing = pack_rows(rows.lengths[:count], recipe.packing.tokens)
    return [collate(rows, [pack], recipe.packing.tokens, pad_id) for pack in packing.packs]


def compute_dtype(
    recipe: Recipe, device: torch.device, target_dtype: torch.dtype
) -> torch.dtype | None:
    """The precision in which a recipe's draft computes; None: that of its weights. On a CPU, `auto`
    does not compute in less than the target does."""
    dtype = recipe.training.compute_dtype
    fits = device.type == "cuda" or target_dtype == torch.bfloat16
    bfloat16 = dtype == "bfloat16" or (dtype == "auto" and fits and multiplies_bfloat16(device))
    return torch.bfloat16 if bfloat16 else None


def make_objective(
    recipe: Recipe,
    draft: DraftModel,
    vocabulary: DraftVocabulary,
    target: Eagle3TargetBackend,
    device: torch.device,
    world: World,
) -> Objective[Any]:
    info = target.info()
    inputs = TrainerInputs(
        selected_token_ids=torch.from_numpy(vocabulary.selected_token_ids),
        selected_token_mask=torch.from_numpy(vocabulary.t2d),
        target_head=info.head.to(device),
        compute_dtype=compute_dtype(recipe, device, info.dtype),
        context=ContextRanks.of(world),
    )
    return recipe.method.objective(draft, inputs, **recipe.objective.options())
