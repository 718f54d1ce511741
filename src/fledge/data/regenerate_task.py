"""What a regeneration asks, and of whom: the tasks, and who answers them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from fledge.data.drops import BadRow
from fledge.data.regenerate_dialogue import Dialogue


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn, and what becomes of reasoning."""

    max_new_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    keep_reasoning: bool = True
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A row to be answered."""

    number: int  # in the data, from 0
    place: str
    row: dict[str, Any]
    dialogue: Dialogue
    done: bool = False  # by an earlier process: here for the sake of those asked beside it


@dataclass(frozen=True)
class EndedTask:
    """A finished task: its dialogue is complete, or there is a reason why not."""

    task: Task
    bad: BadRow | None = None
    hopeless: bool = False  # any other row would have failed too: the server is down


class Answerer(Protocol):
    """Answers tasks: takes new ones while it has room, and reports each when it is finished."""

    together: int  # rows, from the data's first on, whose answers may depend on one another

    def identity(self) -> dict[str, Any]:
        """Target and template: what must not change between a job and its continuation."""
        ...

    def run(self, tasks: Iterator[Task], report: Callable[[EndedTask], None]) -> None: ...
