"""From a recipe to everything a run works with: data, target, vocabulary, draft, objective.

The data is prepared before any process group exists: ranks that wait for one another must not sit
in a collective while one of them tokenizes for an hour.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fledge.core.distributed import World, join_world, pick_device
from fledge.core.errors import BadInput, in_words
from fledge.core.rows import TokenBatch
from fledge.data.pack import collate, pack_rows
from fledge.data.prepare import Progress, prepare_rows
from fledge.data.rows import RowView, split_rows
from fledge.data.store import TokenRows
from fledge.data.tokenise import TokeniseOptions
from fledge.data.vocab import DraftVocabulary, special_token_ids
from fledge.draft.base import DraftModel
from fledge.measure.packed import Ints
from fledge.methods.base import TrainerInputs
from fledge.models.resolve import load_tokenizer, local_model
from fledge.objective.base import Objective
from fledge.recipe.schema import Recipe
from fledge.recipe.sections import Data
from fledge.target.base import Eagle3TargetBackend
from fledge.target.kinds import kind_of, model_name
from fledge.train.batches import PackStream
from fledge.train.clock import Clock
from fledge.train.drafts import make_draft
from fledge.train.optimizer import StepGuard, make_optimizer
from fledge.train.step import Parts
from fledge.train.vocabulary import choose_vocabulary

VOCABULARY_NAME = "vocabulary.safetensors"


@dataclass
class Training:
    """A run, ready to go."""

    recipe: Recipe
    directory: Path
    parts: Parts
    stream: PackStream
    held_out: list[TokenBatch]
    draft: DraftModel
    vocabulary: DraftVocabulary
    fingerprints: dict[str, str]  # of what must not change between a run and its resumption
    held_out_picks: dict[int, Ints] = field(default_factory=dict)  # see `evaluate`

    @property
    def warmup(self) -> int:
        training = self.recipe.training
        if training.warmup_steps is not None:
            return training.warmup_steps
        return math.ceil(training.warmup_share * self.stream.steps)


def prepare_data(
    recipe: Recipe, on_progress: Callable[[Progress], None] = lambda _: None
) -> tuple[RowView, RowView, str]:
    """(training rows, held-out rows, fingerprint), tokenised at most once."""
    data = recipe.data
    if not data.train:
        raise BadInput("no training data", where="data.train", fix="data.train=chats.jsonl")
    model = local_model(model_name(recipe.target), weights=False)
    rows = tokenised(data.train, model, data, on_progress)
    if not data.valid:
        train, held_out = split_rows(rows, data.valid_rows, drop_truncated=data.drop_truncated)
        fingerprint = rows.fingerprint
    else:
        train, _ = split_rows(rows, 0, drop_truncated=data.drop_truncated)
        valid = tokenised(data.valid, model, data, on_progress)
        held_out, _ = split_rows(valid, 0)
        fingerprint = f"{rows.fingerprint}+{valid.fingerprint}"
    return _not_empty(train), held_out, fingerprint


def known_data(recipe: Recipe, target: Eagle3TargetBackend) -> tuple[RowView, RowView, str]:
    """The same of a target that brings its rows."""
    known, data = target.known_rows(), recipe.data
    assert known is not None, f"{type(target).__name__} brings no rows"
    longest = int(known.rows.lengths.max())
    if longest > recipe.packing.tokens:
        raise BadInput(
            f"packing.tokens ({recipe.packing.tokens}) is below the longest row of the "
            f"{recipe.target.backend} ({longest})",
            where="packing.tokens",
            fix=f"packing.tokens={longest} or more",
        )
    train, held_out = known.split(data.valid_rows, drop_truncated=data.drop_truncated)
    return _not_empty(train), held_out, known.fingerprint


def _not_empty(train: RowView) -> RowView:
    if len(train) == 0:
        raise BadInput("no training row is left after the held-out ones", where="data.valid_rows")
    return train


def tokenise_options(data: Data) -> TokeniseOptions:
    return TokeniseOptions(
        max_length=data.max_length,
        overlong=data.overlong,
        last_turn_only=data.last_turn_only,
        mask_reasoning=data.mask_reasoning,
        template_options=data.template_options,
    )


def tokenised(
    names: tuple[str, ...], model: Path, data: Data, on_progress: Callable[[Progress], None]
) -> TokenRows:
    """The rows of some sources under the recipe's options."""
    return prepare_rows(
        list(names),
        model,
        tokenise_options(data),
        workers=data.workers,
        max_drop_share=data.max_drop_share,
        on_progress=on_progress,
    )


def set_up(recipe: Recipe, on_progress: Callable[[Progress], None] = lambda _: None) -> Training:
    """Build a run. Nothing is written but caches."""
    device = pick_device(recipe.training.device)
    brings_rows = kind_of(recipe.target).brings_rows
    data = None if brings_rows else prepare_data(recipe, on_progress)
    world = join_world(device)
    torch.manual_seed(recipe.training.seed)
    target = make_target(recipe, device)
    try:
        rows = known_data(recipe, target) if data is None else data
        return _assemble(recipe, target, *rows, device=device, world=world)
    except BaseException:
        target.close()
        raise


def _assemble(
    recipe: Recipe,
    target: Eagle3TargetBackend,
    train: RowView,
    held_out: RowView,
    data_fingerprint: str,
    *,
    device: torch.device,
    world: World,
) -> Training:
    """Everything that depends on both the rows and the target."""
    directory = Path(recipe.run.output_dir)
    tokenizer = load_tokenizer(model_name(recipe.target))
    vocabulary = _vocabulary(recipe, directory, target, train, tokenizer, data_fingerprint)
    target.set_vocab_mapping(
        torch.from_numpy(vocabulary.selected_token_ids), torch.from_numpy(vocabulary.t2d)
    )
    train, held_out = target.read_ahead(train), target.read_ahead(held_out)
    draft = make_draft(recipe, target, vocabulary, tokenizer, device)
    world.copy_from_main(draft)
    objective = make_objective(recipe, draft, vocabulary, target, device)
    pad_id = tokenizer.pad_token_id or 0
    fingerprints = {
        "data": data_fingerprint,
        "target": target.info().weights_fingerprint,
        "vocabulary": vocabulary.digest(),
    }
    return Training(
        recipe=recipe,
        directory=directory,
        parts=_parts(recipe, target, objective, device=device, world=world),
        stream=_stream(recipe, train, pad_id, world),
        held_out=_held_out_batches(held_out, recipe, pad_id),
        draft=draft,
        vocabulary=vocabulary,
        fingerprints=fingerprints,
    )


def _parts(
    recipe: Recipe,
    target: Eagle3TargetBackend,
    objective: Objective[Any],
    *,
    device: torch.device,
    world: World,
) -> Parts:
    training = recipe.training
    parameters = [p for p in objective.draft_model.parameters() if p.requires_grad]
    return Parts(
        target=target,
        objective=objective,
        parameters=parameters,
        optimizer=make_optimizer(
            parameters,
            lr=training.lr,
            betas=training.betas,
            eps=training.eps,
            weight_decay=training.weight_decay,
        ),
        guard=StepGuard(training.spike_factor, device),
        device=device,
        world=world,
        clip=training.clip,
        clock=Clock(device),
        seed=training.seed,
    )


def _stream(recipe: Recipe, train: RowView, pad_id: int, world: World) -> PackStream:
    training = recipe.training
    return PackStream(
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
    )


def _held_out_batches(rows: RowView, recipe: Recipe, pad_id: int) -> list[TokenBatch]:
    count = min(len(rows), recipe.evaluation.rows)
    packing = pack_rows(rows.lengths[:count], recipe.packing.tokens)
    return [collate(rows, [pack], recipe.packing.tokens, pad_id) for pack in packing.packs]


def make_target(recipe: Recipe, device: torch.device) -> Eagle3TargetBackend:
    """The frozen target that a recipe names."""
    layers = recipe.method.aux_layers(recipe.objective)
    target = kind_of(recipe.target).open(recipe.target, device=device, aux_layers=layers)
    if len(target.aux_layer_ids) != layers:
        target.close()
        raise BadInput(
            f"the target shows layers {target.aux_layer_ids}, a draft of {recipe.method.title} "
            f"listens to {in_words(layers)}",
            where="target.aux_layer_ids",
        )
    return target


def _vocabulary(
    recipe: Recipe,
    directory: Path,
    target: Eagle3TargetBackend,
    train: RowView,
    tokenizer: Any,
    fingerprint: str,
) -> DraftVocabulary:
    """The draft's vocabulary: the run's own, else the only one of a target that answers with
    probabilities from a cache, else chosen; `init_from` goes before it, which then has to fit."""
    saved, dictated = directory / VOCABULARY_NAME, target.info().vocabulary
    vocab_size, size = target.info().vocab_size, recipe.draft.draft_vocab_size
    if dictated is not None and dictated.size != (dictated.vocab_size if size is None else size):
        raise BadInput(
            f"made for a draft vocabulary of {dictated.size}, draft.draft_vocab_size says {size}",
            where=f"target.backend={recipe.target.backend}",
            fix=f"draft.draft_vocab_size={dictated.size}, or a cache of hidden states",
        )
    if saved.exists():  # a resumed run keeps its map, always
        kept = DraftVocabulary.load(saved)
        if kept.vocab_size != vocab_size:
            raise BadInput(
                f"made for a target of {kept.vocab_size} tokens, this one has {vocab_size}",
                where=str(saved),
                fix="name the target that the run was started with",
            )
        return kept
    if dictated is not None and recipe.draft.init_from is None:
        return dictated
    return choose_vocabulary(
        recipe,
        train,
        vocab_size=vocab_size,
        special_ids=special_token_ids(tokenizer),
        fingerprint=fingerprint,
    )


def make_objective(
    recipe: Recipe,
    draft: DraftModel,
    vocabulary: DraftVocabulary,
    target: Eagle3TargetBackend,
    device: torch.device,
) -> Objective[Any]:
    wanted = recipe.training.compute_dtype
    bfloat16 = wanted == "bfloat16" or (wanted == "auto" and device.type == "cuda")
    given = TrainerInputs(
        selected_token_ids=torch.from_numpy(vocabulary.selected_token_ids),
        selected_token_mask=torch.from_numpy(vocabulary.t2d),
        target_head=target.info().head.to(device),
        compute_dtype=torch.bfloat16 if bfloat16 else None,
    )
    return recipe.method.objective(draft, given, **recipe.objective.options())
