"""The models of a run: the draft that a recipe describes, new or a warm start, and its target."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fledge.core.errors import BadInput, in_words
from fledge.data.rows import RowView
from fledge.data.vocab import (
    DraftVocabulary,
    count_supervised,
    select_vocabulary,
    special_token_ids,
)
from fledge.methods.registry import load_draft, method_of
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.rotary import verify_rotary
from fledge.models.resolve import local_model
from fledge.recipe.schema import Recipe
from fledge.target.base import Eagle3TargetBackend, InputEmbedding, LayerView
from fledge.target.finite_check import bad_weights, is_finite
from fledge.target.kinds import TargetSection, kind_of, model_name, target_config
from fledge.target.layers import target_depth, validate_aux_layer_ids
from fledge.training.runs import FROM_TARGET, starting_draft

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def make_draft(
    recipe: Recipe,
    target: Eagle3TargetBackend,
    vocabulary: DraftVocabulary,
    tokenizer: Any,
    device: torch.device,
) -> DraftModel:
    """A new draft that fits the target, or the one that the recipe starts from; in float32."""
    section, info = recipe.draft, target.info()

    def new_config() -> Any:
        settings = recipe.method.draft_settings(
            recipe.objective, tokenizer=tokenizer, vocab_size=info.vocab_size
        )
        return config_of_draft(recipe, target_config(recipe.target), vocabulary.size, settings)

    start = starting_draft(recipe)
    if start is None:
        draft = recipe.method.draft_type()(new_config())
    else:
        draft = _warm_draft(recipe, target, start, new_config)
    ids, mask = torch.from_numpy(vocabulary.selected_token_ids), torch.from_numpy(vocabulary.t2d)
    draft.set_vocab_mapping(ids, mask)
    draft.borrow_from(target)
    if start is None:
        draft.copy_embeddings_from_target(target.get_input_embeddings())
        if section.head_from_target:
            draft.copy_head_from_target(InputEmbedding(info.head.weight_VD))
        if section.init_from == FROM_TARGET:
            recipe.method.start_from_target(draft, local_model(model_name(recipe.target)))
        if section.layers_from_target:
            if info.module is None:
                where = "draft.layers_from_target"
                what = "the target is not in this process, so its layers cannot be copied"
                raise BadInput(what, where=where, fix=f"{where}=false")
            draft.start_as_target(info.module)
    # The aux layers are part of the draft: it cannot use states of other layers.
    draft.config.aux_layer_ids = list(target.aux_layer_ids)
    if info.module is not None:  # a remote target's rotary cannot be checked
        verify_rotary(draft.config, info.module)
    for name, tensor in draft.state_dict().items():
        if not is_finite(tensor):
            owner = "it" if start else "the target, which the draft starts from,"
            raise bad_weights(name, owner=owner, where=section.init_from or "")
    if section.freeze_embeddings:
        draft.freeze_embeddings()
    if recipe.training.gradient_checkpointing:
        draft.gradient_checkpointing_enable()
    return draft.to(device)


def config_of_draft(
    recipe: Recipe,
    target_config: "PretrainedConfig",
    draft_vocab_size: int,
    settings: dict[str, Any],
) -> Any:
    """The draft config for any target of that config; `settings`: what the method adds."""
    section = recipe.draft
    return recipe.method.derive(
        target_config,
        draft_vocab_size=draft_vocab_size,
        num_hidden_layers=section.layers,
        intermediate_size=section.intermediate_size,
        **section.computation,
        **settings,
    )


def _warm_draft(
    recipe: Recipe, target: Eagle3TargetBackend, start: Path, new_config: Callable[[], Any]
) -> DraftModel:
    """The draft that `init_from` names. An EAGLE-3 draft grows into a P-EAGLE one if the recipe
    trains that."""
    draft, vocab_size = load_draft(start, dtype=torch.float32), target.info().vocab_size
    if draft.config.vocab_size != vocab_size:
        what = f"made for a vocabulary of {draft.config.vocab_size}, the target has {vocab_size}"
        raise BadInput(what, where=str(start))
    old = method_of(draft.config)
    grown = draft if old is recipe.method else recipe.method.grow(draft, new_config())
    if grown is None:
        fix = f"objective.kind={old.name} continues training it"
        raise BadInput(f"a draft of {old.title}", where=str(start), fix=fix)
    layers = getattr(draft.config, "aux_layer_ids", None)  # missing in drafts of other tools
    if layers is not None and list(layers) != list(target.aux_layer_ids):
        what = f"trained on the target's layers {list(layers)}, not {list(target.aux_layer_ids)}"
        fix = f"target.aux_layer_ids={','.join(map(str, layers))}"
        raise BadInput(what, where=str(start), fix=fix)
    return grown


# --- vocabulary ----------------------------------------------------------------------------------
# Chooses a draft's vocabulary: that of a warm start, else that of a cache unless the recipe sets
# another size, else the most frequent tokens of the rows.
#
# Training and precompute share this choice, so that a cache of probabilities is made for the
# vocabulary that training would choose.


VOCABULARY_NAME = "vocabulary.safetensors"


def choose_vocabulary(
    recipe: Recipe,
    rows: RowView,  # the training rows
    *,
    vocab_size: int,  # of the target
    special_ids: Iterable[int | None],
    fingerprint: str,  # of the rows
) -> DraftVocabulary:
    counts_V = count_supervised(rows.flat(), vocab_size)
    start = starting_draft(recipe)
    if start is None:
        size = recipe.draft.draft_vocab_size
        return select_vocabulary(counts_V, size, special_ids=special_ids, fingerprint=fingerprint)
    ids = load_draft(start).selected_token_ids
    if ids is None:
        raise BadInput("the draft has no vocabulary map", where=str(start))
    covered = float(counts_V[ids.numpy()].sum() / max(1, counts_V.sum()))
    return DraftVocabulary(ids.numpy(), vocab_size, covered, fingerprint)


def vocabulary_of_run(
    recipe: Recipe, target: Eagle3TargetBackend, train: RowView, tokenizer: Any, fingerprint: str
) -> DraftVocabulary:
    """The vocabulary of a run's draft: the saved one if the run exists, else that of `init_from`,
    else the cache's, else one chosen from the rows. A cache of probabilities dictates its own,
    which a warm start must match; one that a cache only suggests must have the recipe's size."""
    saved = Path(recipe.run.output_dir) / VOCABULARY_NAME
    dictated, suggested = target.info().vocabulary, target.info().suggested
    vocab_size, size = target.info().vocab_size, recipe.draft.draft_vocab_size
    wanted = vocab_size if size is None else min(size, vocab_size)
    warm = recipe.draft.init_from is not None  # brings its own map, whatever size the recipe sets
    if dictated is not None and dictated.size != wanted and recipe.says_vocab_size and not warm:
        what = f"made for a draft vocabulary of {dictated.size}, draft.draft_vocab_size says {size}"
        fix = f"draft.draft_vocab_size={dictated.size}, or a cache of hidden states"
        raise BadInput(what, where=f"target.backend={recipe.target.backend}", fix=fix)
    if saved.exists():  # a resumed run always keeps its map
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


# --- targets --------------------------------------------------------------------------------------
# The target that a recipe names, with the aux layers that its draft uses.


def target_section(recipe: Recipe) -> TargetSection:
    """The recipe's target section with the aux layers of its draft, if the backend can provide any
    layer. A server or a cache provides fixed layers, known once it is opened."""
    section = recipe.target
    if not kind_of(section).shows_any_layers:
        return section
    return section.model_copy(update={"aux_layer_ids": tuple(_layers(recipe))})


def _layers(recipe: Recipe) -> list[int]:
    """The aux layers that a recipe names, or its method's defaults."""
    section, count = recipe.target, recipe.method.aux_layers(recipe.objective)
    depth = target_depth(target_config(section))
    if section.aux_layer_ids is None:
        return recipe.method.default_layers(depth, count)
    return validate_aux_layer_ids(section.aux_layer_ids, depth, count)


def make_target(recipe: Recipe, device: torch.device) -> Eagle3TargetBackend:
    """The frozen target that a recipe names, with the aux layers of its draft."""
    target = open_target(recipe, device)
    try:
        return with_own_layers(recipe, target)
    except BadInput:
        target.close()
        raise


def open_target(recipe: Recipe, device: torch.device) -> Eagle3TargetBackend:
    """The same target with the aux layers of its draft, or more."""
    section, layers = target_section(recipe), recipe.method.aux_layers(recipe.objective)
    return kind_of(section).open(section, device=device, aux_layers=layers)


def with_own_layers(recipe: Recipe, target: Eagle3TargetBackend) -> Eagle3TargetBackend:
    """The target restricted to the aux layers of a recipe's draft; closing it closes the target."""
    available, count = list(target.aux_layer_ids), recipe.method.aux_layers(recipe.objective)
    made_for_it = recipe.target.aux_layer_ids is None and len(available) == count
    ids = available if made_for_it else _layers(recipe)
    if ids == available:
        return target
    if not set(ids) <= set(available):
        what = f"the target provides layers {available}, a draft of {recipe.method.title} "
        what += f"uses {in_words(count)}: {ids}"
        raise BadInput(what, where="target.aux_layer_ids")
    return LayerView(target, ids)
