"""Recipes: everything that determines a run, typed, frozen and saved with the run.

A recipe is a sparse YAML file plus `section.key=value` overrides; everything else has a default.
Does not import torch: the command line reads recipes before anything heavy is needed.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from fledge.core.errors import BadInput, in_words, nearest
from fledge.core.files import write_text
from fledge.core.settings import Section, Tagged, refused
from fledge.methods.base import Method
from fledge.methods.registry import DEFAULT_METHOD, METHODS, objective_sections
from fledge.methods.section import ObjectiveSection
from fledge.recipe import sections
from fledge.recipe.layers import one_line, read_layers
from fledge.recipe.yaml_text import dump_yaml
from fledge.target.hf.kind import HfTarget
from fledge.target.kinds import TargetSection, kind_of, target_sections

RESOLVED_NAME = "recipe.yaml"  # the resolved recipe inside a run's directory


class Recipe(Section):
    """One training run."""

    target: Annotated[TargetSection, Tagged("backend", target_sections, default="hf")] = Field(
        default_factory=HfTarget
    )
    """Who answers: the frozen model that the draft will serve."""

    data: sections.Data = Field(default_factory=sections.Data)
    """Conversations, and what of them is supervised."""

    packing: sections.Packing = Field(default_factory=sections.Packing)
    """How rows share a token budget."""

    draft: sections.Draft = Field(default_factory=sections.Draft)
    """The model that is trained."""

    objective: Annotated[
        ObjectiveSection, Tagged("kind", objective_sections, default=DEFAULT_METHOD)
    ] = Field(default_factory=lambda: METHODS[DEFAULT_METHOD].section.model_validate({}))
    """What it is trained for."""

    training: sections.Training = Field(default_factory=sections.Training)
    """The optimizer and its schedule."""

    checkpoint: sections.Checkpoint = Field(default_factory=sections.Checkpoint)
    """What is saved, and whether a run continues."""

    evaluation: sections.Evaluation = Field(default_factory=sections.Evaluation)
    """Acceptance on held-out rows, replayed."""

    tracking: sections.Tracking = Field(default_factory=sections.Tracking)
    """Where metrics go."""

    run: sections.Run = Field(default_factory=sections.Run)
    """Where the run lives."""

    @model_validator(mode="before")
    @classmethod
    def _draft_follows_objective(cls, data: Any) -> Any:
        """Fill in the method's defaults for keys of the draft that the recipe leaves out."""
        objective = data.get("objective") if isinstance(data, dict) else None
        kind = objective.get("kind") if isinstance(objective, dict) else None
        draft = data.get("draft", {}) if isinstance(data, dict) else None
        if isinstance(kind, str) and kind in METHODS and isinstance(draft, dict):
            method = METHODS[kind]
            return {**data, "draft": {**method.draft_defaults, **method.fixed_draft, **draft}}
        return data

    @model_validator(mode="after")
    def _sections_fit(self) -> "Recipe":
        if self.packing.tokens < self.data.max_length:
            raise ValueError(
                f"packing.tokens ({self.packing.tokens}) is below data.max_length"
                f" ({self.data.max_length}); raise the one or lower the other"
            )
        layers, ids = self.method.aux_layers(self.objective), self.target.aux_layer_ids
        if ids is not None and not len(ids) == len(set(ids)) == layers:
            why = f"must be {'one layer' if layers == 1 else f'{in_words(layers)} distinct layers'}"
            raise refused("target", "aux_layer_ids", value=list(ids), why=why)
        if self.training.context > 1 and not self.method.splits_rows:
            why = f"must be 1: {self.method.title} needs each row on one rank"
            raise refused("training", "context", value=self.training.context, why=why)
        for key, value in self.method.fixed_draft.items():
            if (given := getattr(self.draft, key)) != value:
                wanted = "null" if value is None else str(value).lower()
                why = f"must be {wanted} for {self.method.title}"
                raise refused("draft", key, value=given, why=why)
        return self

    @property
    def method(self) -> Method:
        """The algorithm that `objective.kind` names."""
        return METHODS[self.objective.kind]

    @property
    def run_name(self) -> str:
        return self.run.name or Path(self.run.output_dir).name

    @property
    def says_vocab_size(self) -> bool:
        """Whether the recipe sets a draft vocabulary explicitly (null counts), not by default."""
        return "draft_vocab_size" in self.draft.model_fields_set

    def settled(self) -> "Recipe":
        """The recipe with the draft vocabulary size of its cache filled in, unless it sets one:
        what a run saves, and is later compared with, is then what it uses."""
        if self.says_vocab_size or self.draft.init_from is not None:
            return self
        size = kind_of(self.target).draft_vocab_size(self.target)
        if size is None:
            return self
        draft = self.draft.model_copy(update={"draft_vocab_size": size})
        return self.model_copy(update={"draft": draft})

    def to_yaml(self) -> str:
        """YAML with every field; `load_recipe` of it gives an equal recipe."""
        return dump_yaml(self.model_dump())

    def write_resolved(self, directory: Path) -> Path:
        """Write `recipe.yaml` into a run's directory and return its path."""
        path = Path(directory) / RESOLVED_NAME
        title = "# The resolved recipe of this run: every field, defaults included.\n"
        write_text(path, title + self.to_yaml())
        return path

    def differences(self, other: "Recipe") -> list[str]:
        """`section.key: self -> other` for every field in which two recipes differ."""
        old, new = self.model_dump(), other.model_dump()
        return [
            f"{section}.{key}: {old[section].get(key)!r} -> {new[section].get(key)!r}"
            for section in old
            for key in {**old[section], **new[section]}
            if old[section].get(key) != new[section].get(key)
        ]


RECIPE = Tagged("", lambda: {"": Recipe}, default="")


def recipe_shapes() -> dict[str, Tagged]:
    """The sections with their kinds and fields: for the reference page."""
    return {name: shape for name in RECIPE.fields("") if (shape := RECIPE.inner(name)) is not None}


def json_schema() -> dict[str, Any]:
    """JSON schema for editors: point `# yaml-language-server: $schema=...` at a file with it."""
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return schema | Recipe.model_json_schema(by_alias=False)


def load_recipe(
    path: str | os.PathLike[str] | None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Recipe:
    """Read a recipe (a file, or a shipped one by name; None: defaults only), apply the overrides,
    and validate the result. Raises BadInput: file and line, or the override; the key; the fix."""
    return _read_recipe(None if path is None else recipe_file(path), overrides)


def as_recipe(
    source: "str | os.PathLike[str] | Mapping[str, Any] | Recipe | None",
    sections: Mapping[str, Any] = MappingProxyType({}),
) -> Recipe:
    """A recipe from any form that programs use: a file, the name of a shipped one, sections by
    name, or a recipe; None gives the defaults. `sections` override it.

        as_recipe("smollm2_cpu", {"training": {"lr": 3e-4, "steps": 200}})
    """
    if source is None or isinstance(source, Mapping):
        return _read_recipe(source, sections)
    if isinstance(source, Recipe):
        return _read_recipe(source.model_dump(exclude_unset=True), sections) if sections else source
    return load_recipe(source, sections)


def _read_recipe(
    source: Path | Mapping[str, Any] | None, overrides: Sequence[str] | Mapping[str, Any]
) -> Recipe:
    where = str(source) if isinstance(source, Path) else "recipe"
    layer = read_layers(source, overrides, recipe=RECIPE)
    try:
        return Recipe.model_validate(layer.values)
    except ValidationError as error:
        raise one_line(error, layer=layer, where=where, recipe=RECIPE) from error


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split a command's trailing arguments into at most one recipe file and its overrides."""
    files = [text for text in arguments if "=" not in text]
    overrides = [text for text in arguments if "=" in text]
    if len(files) > 1:
        fix = "overrides are written section.key=value"
        raise BadInput(f"one recipe at a time, not {' and '.join(files)}", fix=fix)
    return (Path(files[0]) if files else None), overrides


# --- shipped recipes ------------------------------------------------------------------------------

_HOME = Path(__file__).parents[1] / "recipes"  # in the package: a checkout has a link to it


def shipped_recipes() -> dict[str, Path]:
    """The files of all shipped recipes, by name, in alphabetical order."""
    return {path.stem: path for path in sorted(_HOME.glob("*.yaml"))}


def recipe_file(path: str | os.PathLike[str]) -> Path:
    """The file of a recipe that a user names: a path, or else the name of a shipped recipe. A
    directory of that name (a run, for example) does not hide it."""
    file, name, shipped = Path(path).expanduser(), os.fspath(path), shipped_recipes()
    if name in shipped and (file.is_dir() or not file.exists()):
        return shipped[name]
    if not file.exists():
        raise BadInput("no such recipe", where=name, fix=nearest(file.stem, list(shipped)))
    return file


def title(path: Path) -> str:
    """The purpose of a shipped recipe, which is its first line."""
    return path.read_text().partition("\n")[0].removeprefix("# ").rstrip(".")
