"""The source of an export: a draft's files, and what its run recorded about them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from fledge.core.errors import BadInput
from fledge.formats.codec import PlainDraft, TargetFacts, in_layer_order
from fledge.methods.registry import method_of
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.files import check_tensors, read_draft
from fledge.models.embedded import MODELS as EMBEDDED
from fledge.models.resolve import is_hub_id, load_config, local_model
from fledge.models.shipped import shipped_drafts
from fledge.recipe.schema import Recipe
from fledge.target.kinds import model_name
from fledge.target.layers import target_depth
from fledge.training.runs import (
    checkpoint_state,
    draft_directory,
    recipe_of,
    run_directory,
    trained_tokens,
)

_SERVED_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class DraftSource:
    directory: Path
    config: PretrainedConfig
    tensors: dict[str, Tensor]
    run: Path | None
    recipe: Recipe | None
    state: dict[str, Any] | None  # what training saved with the checkpoint

    @property
    def estimate(self) -> float | None:
        """Held-out acceptance length that training measured at this step; None if it did not."""
        return self._last("acceptance_length")

    @property
    def every_slot_estimate(self) -> float | None:
        """The same with every slot as a start: what the loss is trained for."""
        return self._last("tau")

    def _last(self, figure: str) -> float | None:
        last = (self.state or {}).get("last", {})
        return last.get(figure) if last.get("step") == self.step else None

    @property
    def step(self) -> int | None:
        return None if self.state is None else int(self.state["step"])

    @property
    def target_name(self) -> str:
        return "" if self.recipe is None else model_name(self.recipe.target)

    @property
    def num_draft_tokens(self) -> int:
        """The number of tokens it was trained to draft."""
        return trained_tokens(self.directory, self.config)

    def draft(self, target: TargetFacts) -> PlainDraft:
        """The draft with its aux layers determined and in ascending order."""
        if vars(self.config).get("aux_layer_ids") is None:
            ids = list((self.recipe and self.recipe.target.aux_layer_ids) or ())
            if not ids and target.layers is not None:
                count = self.config.num_aux_hidden_states
                ids = method_of(self.config).default_layers(target.layers, count)
            if not ids:
                raise BadInput(
                    "which layers of the target it reads is not known",
                    where=str(self.directory),
                    fix="give --target MODEL if they are the default ones",
                )
            self.config.aux_layer_ids = ids
        return in_layer_order(self.config, self.tensors)

    def model(self) -> DraftModel:
        """The checkpoint as it is, with its aux layers in their original order."""
        draft_type = method_of(self.config).draft_type()
        return draft_type.from_tensors(self.config, self.tensors, where=self.directory)


def read_source(path: Path) -> DraftSource:
    directory = draft_directory(path)
    config, tensors = read_draft(directory)
    want = method_of(config).draft_type().expected(config, where=directory)
    check_tensors(directory, want=want, have=tensors)
    if config.norm_before_residual:
        raise BadInput(
            "it was imported with norm_before_residual, which our exports do not carry",
            where=str(directory),
            fix="serve the files that it was imported from",
        )
    if "d2t" in tensors and not bool(tensors["t2d"].any()):
        raise BadInput("the draft has no vocabulary mapping (t2d is empty)", where=str(directory))
    run, recipe = run_directory(directory), recipe_of(directory)
    return DraftSource(directory, config, tensors, run, recipe, checkpoint_state(directory))


def facts_of_target(name: str, public: str, *, trust_remote_code: bool = False) -> TargetFacts:
    """The facts in the target's config; its weights are not read."""
    config = load_config(name, trust_remote_code=trust_remote_code)
    return TargetFacts(
        public,
        public.partition("@")[0],
        dtype_for_engines(config.dtype),
        list(config.architectures or []),
        target_depth(config),
    )


def name_for_engines(name: str) -> str:
    """The target as an engine on this machine is given it: a local model by its directory, a hub id
    without its revision."""
    is_local = name in EMBEDDED or Path(name).expanduser().exists()
    return str(local_model(name, weights=False).absolute()) if is_local else name.partition("@")[0]


def dtype_for_engines(dtype: torch.dtype | str | None) -> str:
    """A dtype as engines spell it; "" if they have to take it from the files."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _SERVED_DTYPES else ""


def default_out(source: Path, engine: str) -> Path:
    """The default directory of an export: inside the run, or next to a draft without a run; of a
    draft that comes with fledge, here."""
    draft = draft_directory(source)
    if str(source) in shipped_drafts():
        return Path(f"{source}-{engine}")
    run = run_directory(draft)
    return draft.with_name(f"{draft.name}-{engine}") if run is None else run / "exports" / engine


def target_here(export: Path, record: Mapping[str, Any]) -> str:
    """What to give an engine as the target: its hub id, or the place that the run of the export
    names; "" if unknown."""
    public = str(record["target"]["served_as"])
    if is_hub_id(public) or Path(public).is_absolute():
        return public
    recipe = recipe_of(export)
    return "" if recipe is None else name_for_engines(model_name(recipe.target))
