"""What an export starts from: a draft's files, and all that its run knows about them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.draft.base import DraftModel
from fledge.draft.files import check_tensors, read_draft
from fledge.export.layout import PlainDraft, TargetFacts, in_layer_order
from fledge.methods.registry import method_of
from fledge.models.embedded import MODELS as EMBEDDED
from fledge.models.resolve import load_config, local_model
from fledge.recipe.schema import Recipe
from fledge.target.kinds import model_name
from fledge.target.layers import target_depth
from fledge.train.runs import (
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
    config: Any
    tensors: dict[str, Tensor]
    run: Path | None
    recipe: Recipe | None
    state: dict[str, Any] | None  # what training wrote beside the checkpoint

    @property
    def estimate(self) -> float | None:
        """Held-out acceptance length as training measured it at this very step, if it did."""
        last = (self.state or {}).get("last", {})
        return last.get("tau") if last.get("step") == self.step else None

    @property
    def step(self) -> int | None:
        return None if self.state is None else int(self.state["step"])

    @property
    def target_name(self) -> str:
        return "" if self.recipe is None else model_name(self.recipe.target)

    @property
    def num_draft_tokens(self) -> int:
        """As many as it was trained for."""
        return trained_tokens(self.directory, self.config)

    def draft(self, target: TargetFacts) -> PlainDraft:
        """Checked, its aux layers known and ascending."""
        if getattr(self.config, "aux_layer_ids", None) is None:
            ids = list((self.recipe and self.recipe.target.aux_layer_ids) or ())
            if not ids and target.layers is not None:
                count = self.config.num_aux_hidden_states
                ids = method_of(self.config).default_layers(target.layers, count)
            if not ids:
                raise BadInput(
                    "which layers of the target it listens to is not known",
                    where=str(self.directory),
                    fix="give --target MODEL if they are the default ones",
                )
            self.config.aux_layer_ids = ids
        return in_layer_order(self.config, self.tensors)

    def model(self) -> DraftModel:
        """The checkpoint as it is, nothing put in order."""
        draft_type = method_of(self.config).draft_type()
        return draft_type.from_tensors(self.config, self.tensors, where=self.directory)


def read_source(path: Path) -> DraftSource:
    directory = draft_directory(path)
    config, tensors = read_draft(directory)
    with torch.device("meta"):
        want = method_of(config).draft_type()(config).state_dict()
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
    """What the target's configuration says; its weights stay where they are."""
    config = load_config(name, trust_remote_code=trust_remote_code)
    return TargetFacts(
        public,
        public.partition("@")[0],
        dtype_for_engines(config.dtype),
        list(config.architectures or []),
        target_depth(config),
    )


def named_target(public: str) -> TargetFacts:
    """Under its public name, and as engines take it: they want a revision as a flag."""
    return TargetFacts(public, public.partition("@")[0])


def name_for_engines(name: str) -> str:
    """What an engine on this machine is given: a hub id as it stands, whatever else as its
    directory."""
    is_here = name in EMBEDDED or Path(name).expanduser().exists()
    return str(local_model(name, weights=False).absolute()) if is_here else name.partition("@")[0]


def dtype_for_engines(dtype: torch.dtype | str | None) -> str:
    """A dtype as engines spell it; "": one that they take from the files alone."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _SERVED_DTYPES else ""


def default_out(source: Path, engine: str) -> Path:
    """Where an export goes unless told: into the run, or beside a draft that belongs to none."""
    draft = draft_directory(source)
    run = run_directory(draft)
    return draft.with_name(f"{draft.name}-{engine}") if run is None else run / "exports" / engine
