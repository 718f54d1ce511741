"""The `objective` section of a recipe: each method has its own. This file does not import torch."""

from abc import abstractmethod
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, create_model, model_validator

from fledge.core.settings import NonNegative, Number, Section, Share, Tagged
from fledge.methods.losses.base import Loss
from fledge.methods.losses.registry import LOSSES


class ObjectiveSection(Section):
    """The `objective` section of a recipe."""

    not_options: ClassVar[frozenset[str]] = frozenset({"kind"})
    """Fields that are not arguments of the method's objective."""

    kind: str
    """The name of the method; declared here so that it is the first field."""

    @property
    @abstractmethod
    def depths(self) -> int:
        """The number of tokens that a draft is trained to propose, and that serving should use."""

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the method's objective."""
        names = set(type(self).model_fields) - self.not_options
        return {name: getattr(self, name) for name in names}


class LossChoice(Section, use_attribute_docstrings=False):
    """One of `objective.losses` with its parameters; each loss gets a section with its fields.

    For a class made at run time, pydantic would search the source of every loaded module for
    docstrings: a tenth of a second per loss.
    """

    kind: str = Field(description="The name of the loss.")

    def loss(self) -> Loss:
        return LOSSES[self.kind](**self.model_dump(exclude={"kind"}))


def loss_choices() -> dict[str, type[LossChoice]]:
    """The sections of all losses by name."""
    return {name: _choice_of(name, loss) for name, loss in LOSSES.items()}


@cache
def _choice_of(name: str, loss: type[Loss]) -> type[LossChoice]:
    numbers: dict[str, Any] = {
        number.name: (
            Annotated[Number, Field(**number.metadata["bounds"])],
            Field(number.default, description=number.metadata["about"]),
        )
        for number in fields(loss)  # type: ignore[arg-type]  # every loss is a dataclass
    }
    kind: Any = (
        Literal[name],
        Field(name, description=LossChoice.model_fields["kind"].description),
    )
    return create_model(
        loss.__name__, __base__=LossChoice, __doc__=loss.__doc__, kind=kind, **numbers
    )


class LossSection(ObjectiveSection):
    """The section of a method that trains with any of `objective.losses`."""

    not_options = frozenset({"kind", "loss", "lk_kl_scale", "lk_kl_decay"})

    loss: Annotated[LossChoice, Tagged("kind", loss_choices, default="ce", bare=True)] = Field(
        default_factory=lambda: loss_choices()["ce"].model_validate({})
    )
    """The loss on the draft's distribution: a name, or a mapping of kind and parameters."""

    lk_kl_scale: Share | None = Field(default=None, exclude=True)
    """Older spelling of loss.scale."""

    lk_kl_decay: NonNegative | None = Field(default=None, exclude=True)
    """Older spelling of loss.decay."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "loss": self.loss.loss()}

    @model_validator(mode="after")
    def _read_older_spellings(self) -> Self:
        """They belong to lk_lambda and are ignored for other losses. Recipes of earlier versions
        contain their defaults even if unused, so a default yields to the new spelling."""
        older = {"scale": self.lk_kl_scale, "decay": self.lk_kl_decay}
        loss = self.loss
        for name, value in older.items():
            field = type(loss).model_fields.get(name)
            if value is None or field is None:
                continue
            if name not in self.loss.model_fields_set:
                loss = loss.model_copy(update={name: value})
            elif value not in (getattr(loss, name), field.default):
                raise ValueError(
                    f"loss.{name} is {getattr(loss, name)}, but lk_kl_{name}, its older spelling, "
                    f"is {value}; leave one out"
                )
        self.__dict__.update(loss=loss, lk_kl_scale=None, lk_kl_decay=None)  # still being built
        return self
