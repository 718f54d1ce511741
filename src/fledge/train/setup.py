"""From a recipe to everything a run works with: data, target, vocabulary, draft, objective.

The data is prepared before any process group exists: ranks that wait for one another must not sit
in a collective while one of them tokenizes for an hour.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fledge.core.distributed import World, join_world, pick_device
from fledge.core.errors import BadInput, in_words
from fledge.core.rows import TokenBatch
from fledge.core.text import counted
from fledge.data.pack import collate, pack_rows
from fledge.data.prepare import Progress, prepare_rows
from fledge.data.rows import Rows, RowView, split_rows
from fledge.data.store import TokenRows
from fledge.data.tokenise import TokeniseOptions
from fledge.data.vocab import DraftVocabulary, special_token_ids
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
    TargetSection,
    kind_of,
    model_name,
    target_config,
    target_tokenizer,
)
from fledge.target.layers import target_depth
from fledge.train.batches import PackStream
from fledge.train.clock import Clock
from fledge.train.drafts import make_draft
from fledge.train.optimizer import StepGuard, learning_rate, make_optimizer
from fledge.train.runs import as_begun, keeps_its_rows, rows_begun_with
from fledge.train.sharding import shard_draft
from fledge.train.step import Models, Parts
from fledge.train.vocabulary import choose_vocabulary

FEW_ROWS = 32  # fewer are trained on, with a warning
VOCABULARY_NAME = "vocabulary.safetensors"


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
) -> Training:
    """Build a run. Nothing is written but caches. `watched`: see `join_world`."""
    opened = open_run(recipe, on_progress, watched=watched)
    recipe = opened.recipe
    with ExitStack() as undo:
        undo.enter_context(opened.parts.target)
        parts, stream = _parts(recipe, opened.parts), make_stream(opened, recipe)
        undo.pop_all()
    return Training(**{**vars(opened), "parts": parts, "stream": stream})


def open_run(
    recipe: Recipe,
    on_progress: Callable[[Progress], None] = lambda _: None,
    *,
    watched: bool = False,
) -> OpenRun:
    """The rows and the models of a run; its target is let go of when something is missing."""
    recipe = as_begun(recipe).settled()
    device = pick_device(recipe.training.device)
    begin = time.perf_counter()
    data = None if kind_of(recipe.target).brings_rows else prepare_data(recipe, on_progress)
    data_s = time.perf_counter() - begin
    training = recipe.training
    cut = {"shard": training.shard, "context": training.context}
    world = join_world(device, **cut, watched=watched)
    torch.manual_seed(recipe.training.seed)
    with ExitStack() as undo:
        target = undo.enter_context(make_target(recipe, device))
        target.askers = world.context
        train, held_out, fingerprint = data or known_data(recipe, target)
        tokenizer = target_tokenizer(recipe.target)
        vocabulary = _vocabulary(recipe, target, train, tokenizer, fingerprint)
        target.set_vocab_mapping(
            torch.from_numpy(vocabulary.selected_token_ids), torch.from_numpy(vocabulary.t2d)
        )
        train, held_out = target.read_ahead(train), target.read_ahead(held_out)
        draft = make_draft(recipe, target, vocabulary, tokenizer, device)
        world.copy_from_main(draft)
        objective = make_objective(recipe, draft, vocabulary, target, device, world)
        pad_id = tokenizer.pad_token_id or 0
        opened = OpenRun(
            recipe=recipe,
            directory=Path(recipe.run.output_dir),
            parts=Models(target, objective, device, world),
            train=train,
            held_out=_held_out_batches(held_out, recipe, pad_id),
            warnings=_few_rows(len(train), len(held_out)),
            data_s=data_s,
            pad_id=pad_id,
            draft=draft,
            vocabulary=vocabulary,
            fingerprints={
                "data": fingerprint,
                "target": target.info().weights_fingerprint,
                "vocabulary": vocabulary.digest(),
            },
        )
        undo.pop_all()
    return opened


def _parts(recipe: Recipe, models: Models) -> Parts:
    training, draft = recipe.training, models.objective.draft_model
    if models.world.shard > 1:
        shard_draft(draft, models.world, compute_dtype=models.objective.compute_dtype)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    return Parts(
        **vars(models),
        parameters=parameters,
        optimizer=make_optimizer(
            parameters,
            lr=training.lr,
            betas=training.betas,
            eps=training.eps,
            weight_decay=training.weight_decay,
        ),
        guard=StepGuard(training.spike_factor, models.device),
        clip=training.clip,
        clock=Clock(models.device),
        seed=training.seed,
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


def _held_out_batches(rows: RowView, recipe: Recipe, pad_id: int) -> list[TokenBatch]:
    count = min(len(rows), recipe.evaluation.rows)
    packing = pack_rows(rows.lengths[:count], recipe.packing.tokens)
    return [collate(rows, [pack], recipe.packing.tokens, pad_id) for pack in packing.packs]


def listening(recipe: Recipe) -> TargetSection:
    """The recipe's target with the layers that its method listens to where the recipe names none
    and it can show any."""
    section = recipe.target
    if section.aux_layer_ids is not None or not kind_of(section).shows_any_layers:
        return section
    count = recipe.method.aux_layers(recipe.objective)
    ids = recipe.method.default_layers(target_depth(target_config(section)), count)
    return section.model_copy(update={"aux_layer_ids": tuple(ids)})


def make_target(recipe: Recipe, device: torch.device) -> Eagle3TargetBackend:
    """The frozen target that a recipe names."""
    layers, section = recipe.method.aux_layers(recipe.objective), listening(recipe)
    target = kind_of(section).open(section, device=device, aux_layers=layers)
    if len(target.aux_layer_ids) != layers:
        target.close()
        what = f"the target shows layers {target.aux_layer_ids}, a draft of {recipe.method.title} "
        what += f"listens to {in_words(layers)}"
        raise BadInput(what, where="target.aux_layer_ids")
    return target


def _vocabulary(
    recipe: Recipe, target: Eagle3TargetBackend, train: RowView, tokenizer: Any, fingerprint: str
) -> DraftVocabulary:
    """The draft's vocabulary: the run's own, else the cache's (probabilities are over one only; a
    suggested one must have the recipe's size), else chosen; `init_from` goes before the cache's,
    which then has to fit."""
    saved = Path(recipe.run.output_dir) / VOCABULARY_NAME
    dictated, suggested = target.info().vocabulary, target.info().suggested
    vocab_size, size = target.info().vocab_size, recipe.draft.draft_vocab_size
    wanted = vocab_size if size is None else min(size, vocab_size)
    warm = recipe.draft.init_from is not None  # brings a map of its own, whatever size is said
    if dictated is not None and dictated.size != wanted and recipe.says_vocab_size and not warm:
        what = f"made for a draft vocabulary of {dictated.size}, draft.draft_vocab_size says {size}"
        fix = f"draft.draft_vocab_size={dictated.size}, or a cache of hidden states"
        raise BadInput(what, where=f"target.backend={recipe.target.backend}", fix=fix)
    if saved.exists():  # a resumed run keeps its map, always
        kept = DraftVocabulary.load(saved)
        if kept.vocab_size != vocab_size:
            what = f"made for a target of {kept.vocab_size} tokens, this one has {vocab_size}"
            fix = "name the target that the run was started with"
            raise BadInput(what, where=str(saved), fix=fix)
        return kept
    if not warm:
        if dictated is not None:
            return dictated
        if suggested is not None and suggested.size == wanted:
            return suggested
    special_ids = special_token_ids(tokenizer)
    return choose_vocabulary(
        recipe, train, vocab_size=vocab_size, special_ids=special_ids, fingerprint=fingerprint
    )


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
