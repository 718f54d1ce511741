"""The section of a recipe that says what is trained for: each method has its own. No torch here."""

from typing import Any, ClassVar

from fledge.core.settings import Section


class ObjectiveSection(Section):
    """What a recipe says under `objective`."""

    not_options: ClassVar[tuple[str, ...]] = ()  # fields that are not the objective's concern

    kind: str
    """Each method says its own name; it stands here so that it comes first."""

    @property
    def depths(self) -> int:
        """Tokens that a draft is trained to propose: as many as serving should ask for."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """What the method's objective is told, by the names of its arguments."""
        names = set(type(self).model_fields) - {"kind", *self.not_options}
        return {name: getattr(self, name) for name in names}
