"""The value types of recipes: numbers as people write them, and the base class of every section.

Numbers may be quoted, and `true` is not one. Does not import torch.
"""

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from fledge.core.errors import nearest
from fledge.core.reading import shown


class Section(BaseModel):
    """A recipe section: frozen, no unknown keys, no NaN. Field docstrings are the reference (docs,
    JSON schema)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # run.name=7 on the command line is text
        use_attribute_docstrings=True,
    )


def refused(*place: str, value: object, why: str) -> ValidationError:
    """The error of a validator that spans several sections, about one key of one of them."""
    error = PydanticCustomError("refused", why)
    detail = InitErrorDetails(type=error, loc=place, input=value)
    return ValidationError.from_exception_data("recipe", [detail])


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _as_list(value: Any) -> Any:
    """Accept a single string for a list of one: `data.train=chats.jsonl`."""
    return [value] if isinstance(value, str | os.PathLike) else value


_Int = Annotated[int, BeforeValidator(_number, json_schema_input_type=int | str)]
Number = Annotated[float, BeforeValidator(_number, json_schema_input_type=float | str)]

MOST = 2**48  # bound of every count, far below 2**63
Count = Annotated[_Int, Field(ge=0, le=MOST)]
PositiveCount = Annotated[_Int, Field(gt=0, le=MOST)]
DraftedTokens = Annotated[_Int, Field(gt=0, le=1024)]  # more in a round would never be accepted
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
PositiveShare = Annotated[Number, Field(gt=0, le=1)]
ShareBelowOne = Annotated[Number, Field(ge=0, lt=1)]
Text = Annotated[str, BeforeValidator(_as_text), Field(min_length=1)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_as_list)]


class Tagged:
    """The annotation of a field that holds one of several sections, selected by a tag.

        target: Annotated[TargetSection, Tagged("backend", kinds, default="hf")]

    `kinds` is called every time, so that sections registered later are accepted as well. A value
    may be a section, its mapping, or with `bare` the tag alone (`loss: kl`). Without a tag it
    stands for a section of one kind, so that all sections can be walked alike.
    """

    def __init__(
        self,
        tag: str,
        kinds: Callable[[], Mapping[str, type[BaseModel]]],
        *,
        default: str,
        bare: bool = False,
    ) -> None:
        self.tag, self.kinds, self.default, self.bare = tag, kinds, default, bare

    @classmethod
    def of(cls, field: FieldInfo) -> "Tagged | None":
        """What a field holds if it is a section, of one kind or of several; else None."""
        tagged = [item for item in field.metadata if isinstance(item, cls)]
        model: Any = field.annotation
        if not tagged and isinstance(model, type) and issubclass(model, BaseModel):
            return cls("", lambda: {"": model}, default="")
        return tagged[0] if tagged else None

    def fields(self, kind: str) -> dict[str, FieldInfo]:
        return dict(self.kinds()[kind].model_fields)

    def all_keys(self) -> set[str]:
        return {key for kind in self.kinds() for key in self.fields(kind)}

    def inner(self, key: str, kind: str = "") -> "Tagged | None":
        """The section that a key holds, in this kind or else in the first that has the key."""
        models = self.kinds()
        for model in (models.get(kind), *models.values()):
            if model is not None and key in model.model_fields:
                return Tagged.of(model.model_fields[key])
        return None

    def kind_of(self, values: Mapping[str, Any], default: str = "") -> str:
        """The kind that a mapping selects: by its tag, else by a key that only one kind has and
        requires (`target.cached_target_path`), else the default."""
        if self.tag in values:
            return str(values[self.tag])
        present = {key for key, value in values.items() if value is not None}
        for kind in self.kinds() if self.tag else ():
            fields = self.fields(kind)
            if any(fields[key].is_required() for key in present & fields.keys()):
                return kind
        return default or self.default

    def spread(self, value: Any) -> Any:
        """The mapping that a bare tag stands for; any other value unchanged."""
        return {self.tag: value} if self.bare and isinstance(value, str) else value

    def dump(self, section: Section) -> Any:
        """The section's mapping, or its bare tag where it has no other fields."""
        values = section.model_dump()
        return values[self.tag] if self.bare and list(values) == [self.tag] else values

    def validate(self, value: Any) -> BaseModel:
        if isinstance(value, Section):
            return value
        value = self.spread(value)
        if not isinstance(value, Mapping):
            raise ValueError("must be a name or a mapping" if self.bare else "must be a mapping")
        kinds, name = self.kinds(), self.kind_of(value)
        if name not in kinds:
            why = f"unknown {self.tag} {shown(name)}; {nearest(name, sorted(kinds))}"
            raise refused(self.tag, value=value, why=why)
        return kinds[name].model_validate({**value, self.tag: name})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate, serialization=core_schema.plain_serializer_function_ser_schema(self.dump)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        kinds = {name: kind.__pydantic_core_schema__ for name, kind in self.kinds().items()}
        union: dict[str, Any] = handler(core_schema.tagged_union_schema(kinds, self.tag))
        if not self.bare:
            return union
        return {"anyOf": [{"enum": list(kinds), "type": "string"}, union]}
