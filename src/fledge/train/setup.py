"""From a recipe to everything a run works with: data, target, vocabulary, draft, objective.

The data is prepared before any process group exists: ranks that wait for one another must not sit
in a collective while one of them tokenizes for an hour.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fledge.core.distributed import World, join_world, pick_device
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.core.text import counted
from fledge.data.pack import collate, pack_rows
from fledge.data.prepare import Progress, prepare_rows
from fledge.data.rows import Rows, RowView, split_rows
from fledge.data.store import TokenRows
from fledge.data.tokenise import TokeniseOptions
from fledge.data.vocab import DraftVocabulary
from fledge.draft.base import DraftModel
from fledge.measure.packed import Ints
from fledge.methods.base import TrainerInputs
from fledge.models.resolve import tokenizer_directory
from fledge.objective.base import Objective
from fledge.recipe.schema import Recipe
from fledge.recipe.sections import Data
from fledge.rollout.context import ContextRanks
from fledge.target.base import Eagle3TargetBackend
from fledge.target.kinds import (
    kind_of,
    model_name,
    target_tokenizer,
)
from fledge.train.average import Average
from fledge.train.batches import PackStream
from fledge.train.checkpoint import newest_step, restore_rng, rng_tensors
from fledge.train.clock import Clock
from fledge.train.drafts import make_draft
from fledge.train.optimizer import StepGuard, learning_rate, make_optimizers
from fledge.train.recorded import RecordedSteps, recorded_steps
from fledge.train.runs import as_begun, keeps_its_rows, rows_begun_with
from fledge.train.sharding import shard_draft
from fledge.train.step import Models, Parts
from fledge.train.targets import heard_by, open_target
from fledge.train.vocabulary import VOCABULARY_NAME, vocabulary_of_run

FEW_ROWS = 32  # fewer are trained on, with a warning


@dataclass
class OpenRun:
    """A run with its rows and models: enough to evaluate its draft."""

    recipe: Recipe
    directory: Path
    parts: Models
    train: RowView
    held_out: list[TokenBatch]
    pad_id: int
    draft: DraftModel
    vocabulary: DraftVocabulary
    fingerprints: dict[str, str]  # of what must not change between a run and its resumption
    warnings: list[str]  # what is allowed, and hardly meant
    data_s: float  # spent on preparing the data

    @property
    def vocabulary_path(self) -> Path:
        """Written when a run begins: without it, there is none."""
        return self.directory / VOCABULARY_NAME


@dataclass
class Training(OpenRun):
    """A run, ready to go."""

    parts: Parts
    stream: PackStream
    held_out_picks: dict[int, Ints] = field(default_factory=dict)  # see `evaluate`
    # told what is going on (training, evaluating, saving), at which step, and how far inside it
    watch: Callable[[str, int, str], None] = lambda what, step, far: None

    def lr(self, step: int, *, schedule_from: int = 0) -> float:
        """The learning rate of a step; the schedule runs from the step at which the run was begun,
        or lengthened, to its end."""
        training, total = self.recipe.training, self.stream.steps - schedule_from
        warmup = training.warmup_steps
        return learning_rate(
            step - schedule_from,
            total,
            peak=training.lr,
            warmup=math.ceil(training.warmup_share * total) if warmup is None else warmup,
            schedule=training.schedule,
            final_share=training.final_lr_share,
            decay_share=training.decay_share,
        )


def prepare_data(
    recipe: Recipe, on_progress: Callable[[Progress], None] = lambda _: None
) -> tuple[RowView, RowView, str]:
    """(training rows, held-out rows, fingerprint), tokenised at most once."""
    data = recipe.data
    if not data.train:
        raise BadInput("no training data", where="data.train", fix="data.train=chats.jsonl")
    rows = tokenised(data.train, recipe, on_progress)
    train, held_out = split_training(rows, recipe)
    fingerprint = rows.fingerprint
    if data.valid:
        valid = tokenised(data.valid, recipe, on_progress)
        held_out, _ = split_rows(valid, 0)
        fingerprint += f"+{valid.fingerprint}"
    return _not_empty(train), held_out, fingerprint


def split_training(rows: Rows, recipe: Recipe) -> tuple[RowView, RowView]:
    """(training rows, held-out rows) of the recipe's `data.train`."""
    data, begun = recipe.data, keeps_its_rows(recipe)
    held_out = 0 if data.valid else data.valid_rows
    return split_rows(rows, held_out, drop_truncated=data.drop_truncated, begun=begun)


def known_data(recipe: Recipe, target: Eagle3TargetBackend) -> tuple[RowView, RowView, str]:
    """The same of a target that brings its rows."""
    known, data = target.known_rows(), recipe.data
    assert known is not None, f"{type(target).__name__} brings no rows"
    longest = int(known.rows.lengths.max())
    if longest > recipe.packing.tokens:
        what = f"packing.tokens ({recipe.packing.tokens}) is below the longest row of the "
        what += f"{recipe.target.backend} ({longest})"
        raise BadInput(what, where="packing.tokens", fix=f"packing.tokens={longest} or more")
    train, held_out = known.split(
        data.valid_rows, drop_truncated=data.drop_truncated, begun=keeps_its_rows(recipe)
    )
    return _not_empty(train), held_out, known.fingerprint


def _not_empty(train: RowView) -> RowView:
    if len(train) == 0:
        raise BadInput("no training row is left after the held-out ones", where="data.valid_rows")
    return train


def _few_rows(train: int, held_out: int) -> list[str]:
    if train >= FEW_ROWS:
        return []
    out = counted(held_out, "is held out", "are held out")
    held = f" ({out})" if held_out else ", none is held out"
    few = f"only {counted(train, 'row')} to train on{held}"
    return [f"{few}: too few for a draft to learn from; see data.train"]


def tokenise_options(data: Data) -> TokeniseOptions:
    supervised = data.last_turn_only, data.mask_reasoning
    return TokeniseOptions(data.max_length, data.overlong, *supervised, data.template_options)


def tokenised(
    names: tuple[str, ...], recipe: Recipe, on_progress: Callable[[Progress], None]
) -> TokenRows:
    """The rows of some sources under the recipe's options."""
    data, model = recipe.data, tokenizer_directory(model_name(recipe.target))
    return prepare_rows(
        list(names), model, tokenise_options(data), workers=data.workers,
        max_drop_share=data.max_drop_share, on_progress=on_progress,
        trust_remote_code=recipe.target.trust_remote_code, begun=rows_begun_with(recipe),
    )  # fmt: skip


def set_up(
    recipe: Recipe,
    on_progress: Callable[[Progress], None] = lambda _: None,
    *,
    watched: bool = False,
    target: Eagle3TargetBackend | None = None,
) -> Training:
    """Build a run. Nothing is written but caches. `watched`: see `join_world`. `target`: the
    recipe's, where it is open already and shows what the draft listens to."""
    return set_up_together([recipe], on_progress, watched=watched, target=target)[0]


def set_up_together(
    recipes: Sequence[Recipe],
    on_progress: Callable[[Progress], None] = lambda _: None,
    *,
    watched: bool = False,
    target: Eagle3TargetBackend | None = None,
) -> list[Training]:
    """Build the runs of several drafts that share target, data and packing (`recipe/drafts.py`).
    Close `together.target_of` them when they are done."""
    ground = _lay_ground(recipes, on_progress, watched=watched, target=target)
    with ExitStack() as undo:
        if target is None:
            undo.enter_context(ground.target)
        trainings: list[Training] = []
        for recipe in recipes:
            opened = _open(recipe, ground, alone=len(recipes) == 1)
            parts = _parts(opened.recipe, opened.parts)
            stream = trainings[0].stream if trainings else make_stream(opened, opened.recipe)
            trainings.append(Training(**{**vars(opened), "parts": parts, "stream": stream}))
            if len(recipes) > 1:
                parts.generators = rng_tensors()
        undo.pop_all()
    return trainings


def open_run(
    recipe: Recipe,
    on_progress: Callable[[Progress], None] = lambda _: None,
    *,
    watched: bool = False,
) -> OpenRun:
    """The rows and the models of a run; its target is let go of when something is missing."""
    ground = _lay_ground([recipe], on_progress, watched=watched)
    with ExitStack() as undo:
        undo.enter_context(ground.target)
        opened = _open(recipe, ground)
        undo.pop_all()
    return opened


@dataclass(frozen=True)
class _Ground:
    """What drafts of one recipe share."""

    device: torch.device
    world: World
    target: Eagle3TargetBackend  # shows all layers that any of them listens to
    train: RowView
    held_out: RowView
    fingerprint: str  # of the data
    tokenizer: Any
    data_s: float
    generators: dict[str, Tensor]  # as each draft finds them


def _lay_ground(
    recipes: Sequence[Recipe],
    on_progress: Callable[[Progress], None],
    *,
    watched: bool,
    target: Eagle3TargetBackend | None = None,
) -> _Ground:
    """Data first, then the other ranks, then the target, unless it is there already."""
    # where a run was killed, one draft may know already what rows it was begun with
    recipe = max(map(_settled, recipes), key=lambda one: newest_step(Path(one.run.output_dir)))
    device = pick_device(recipe.training.device)
    begin = time.perf_counter()
    data = None if kind_of(recipe.target).brings_rows else prepare_data(recipe, on_progress)
    data_s = time.perf_counter() - begin
    training = recipe.training
    cut = {"shard": training.shard, "context": training.context}
    world = join_world(device, **cut, watched=watched)
    torch.manual_seed(recipe.training.seed)
    with ExitStack() as undo:
        if target is None:
            target = undo.enter_context(open_target(recipes, device))
        target.askers = world.context
        train, held_out, fingerprint = data or known_data(recipe, target)
        tokenizer = target_tokenizer(recipe.target)
        generators = rng_tensors() if len(recipes) > 1 else {}
        undo.pop_all()
    found = (train, held_out, fingerprint, tokenizer)
    return _Ground(device, world, target, *found, data_s, generators)


def _settled(recipe: Recipe) -> Recipe:
    return as_begun(recipe).settled()


def _open(recipe: Recipe, ground: _Ground, *, alone: bool = True) -> OpenRun:
    """The models of one draft, and the rows as it takes them."""
    recipe, device, world = _settled(recipe), ground.device, ground.world
    if not alone:
        restore_rng(ground.generators)
    target = heard_by(recipe, ground.target, alone=alone)
    train, held_out = ground.train, ground.held_out
    vocabulary = vocabulary_of_run(recipe, target, train, ground.tokenizer, ground.fingerprint)
    target.set_vocab_mapping(
        torch.from_numpy(vocabulary.selected_token_ids), torch.from_numpy(vocabulary.t2d)
    )
    few = _few_rows(len(train), len(held_out))
    train, held_out = target.read_ahead(train), target.read_ahead(held_out)
    draft = make_draft(recipe, target, vocabulary, ground.tokenizer, device)
    world.copy_from_main(draft)
    objective = make_objective(recipe, draft, vocabulary, target, device, world)
    pad_id = ground.tokenizer.pad_token_id or 0
    return OpenRun(
        recipe=recipe,
        directory=Path(recipe.run.output_dir),
        parts=Models(target, objective, device, world),
        train=train,
        held_out=held_out_batches(held_out, recipe, pad_id),
        warnings=few,
        data_s=ground.data_s,
        pad_id=pad_id,
        draft=draft,
        vocabulary=vocabulary,
        fingerprints={
            "data": ground.fingerprint,
            "target": target.info().weights_fingerprint,
            "vocabulary": vocabulary.digest(),
        },
    )


def _recorded(
    recipe: Recipe, models: Models, parameters: Sequence[nn.Parameter]
) -> RecordedSteps | None:
    """Where a step is one micro-batch on one GPU, and nothing else is wanted."""
    training = recipe.training
    if not training.record_steps or training.accumulate > 1 or models.world.size > 1:
        return None
    tokens = training.micro_batch * recipe.packing.tokens
    return recorded_steps(models.objective, parameters, tokens=tokens)


def _parts(recipe: Recipe, models: Models) -> Parts:
    training, draft = recipe.training, models.objective.draft_model
    if models.world.shard > 1:
        shard_draft(draft, models.world, compute_dtype=models.objective.compute_dtype)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    return Parts(
        **vars(models),
        parameters=parameters,
        optimizers=make_optimizers(draft, training),
        guard=StepGuard(training.spike_factor, models.device),
        clip=training.clip,
        clock=Clock(models.device),
        seed=training.seed,
        average=None if training.ema is None else Average(parameters, training.ema),
        recorded=_recorded(recipe, models, parameters),
    )


def make_stream(opened: OpenRun, recipe: Recipe) -> PackStream:
    """The rows of a run in the order in which a recipe takes them."""
    packing, training = recipe.packing, recipe.training
    return PackStream(
        opened.train,
        tokens=packing.tokens,
        pad_id=opened.pad_id,
        seed=packing.seed,
        padded=packing.padded,
        micro_batch=training.micro_batch,
        accumulate=training.accumulate,
        epochs=training.epochs,
        steps=training.steps,
        world=opened.parts.world,
    )


def held_out_batches(rows: RowView, recipe: Recipe, pad_id: int) -> list[TokenBatch]:
    """The packs on which a recipe's drafts are measured."""
    count = min(len(rows), recipe.evaluation.rows)
    packing = pack_rows(rows.lengths[:count], recipe.packing.tokens)
    return [collate(rows, [pack], recipe.packing.tokens, pad_id) for pack in packing.packs]


def make_objective(
    recipe: Recipe,
    draft: DraftModel,
    vocabulary: DraftVocabulary,
    target: Eagle3TargetBackend,
    device: torch.device,
    world: World,
) -> Objective[Any]:
    wanted = recipe.training.compute_dtype
    bfloat16 = wanted == "bfloat16" or (wanted == "auto" and device.type == "cuda")
    given = TrainerInputs(
        selected_token_ids=torch.from_numpy(vocabulary.selected_token_ids),
        selected_token_mask=torch.from_numpy(vocabulary.t2d),
        target_head=target.info().head.to(device),
        compute_dtype=torch.bfloat16 if bfloat16 else None,
        context=ContextRanks.of(world),
    )
    return recipe.method.objective(draft, given, **recipe.objective.options())
