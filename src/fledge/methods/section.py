"""The `objective` section of a recipe, which each method has of its own.

This file does not import torch, and training steps do not import this file (nor pydantic).
"""

from abc import abstractmethod
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from fledge.core.settings import Number, Section, Tagged
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
        values = {name: getattr(self, name) for name in names}
        return {k: v.loss() if isinstance(v, LossChoice) else v for k, v in values.items()}


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

    loss: Annotated[LossChoice, Tagged("kind", loss_choices, default="ce", bare=True)] = Field(
        default_factory=lambda: loss_choices()["ce"].model_validate({})
    )
    """The loss on the draft's distribution: a name, or a mapping of kind and parameters."""
