"""The tasks of a regeneration, and the protocol of what answers them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from fledge.data.drops import BadRow
from fledge.data.regenerate_dialogue import Dialogue


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, and whether reasoning is kept."""

    max_new_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    keep_reasoning: bool = True
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A row to answer."""

    number: int  # in the data, from 0
    place: str
    row: dict[str, Any]
    dialogue: Dialogue
    done: bool = False  # by an earlier process; only completes a group of rows answered together


@dataclass(frozen=True)
class EndedTask:
    """A finished task: its dialogue is complete, or `bad` is the reason why not."""

    task: Task
    bad: BadRow | None = None
    hopeless: bool = False  # any other row would fail, too: the server is down


class Answerer(Protocol):
    """Answers tasks: takes new ones while it has capacity, and reports each when finished."""

    together: int  # size of consecutive groups of rows whose answers may depend on one another

    def identity(self) -> dict[str, Any]:
        """Target and template: what must not change when a job is resumed."""
        ...

    def run(self, tasks: Iterator[Task], report: Callable[[EndedTask], None]) -> None: ...
