"""Target workers, the queue between and the ranks that train, event by event: tokens/s and waiting
before any of them exists.

What is simulated is what `target/ray/` and `ahead.py` do. A rank asks for `ahead` batches beyond
the one that it waits for, of which so many are under way at once; it asks the worker that has the
fewest of its questions, of these the one that it asked longest ago. A worker answers one question
at a time, in order. Answers reach a rank one at a time. All ranks take a step together, when each
of them has its answer. Nothing is drawn: the same figures give the same run.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

Event = tuple[float, int, str, int, int]  # when, in which order, what, whose, which batch


@dataclass(frozen=True)
class Pipeline:
    """A cluster in figures. Seconds that vary are taken in turn; one number: all alike."""

    target_s: float | Sequence[float]  # in which a worker answers about one batch
    step_s: float | Sequence[float]  # in which a rank trains on one
    carry_s: float = 0.0  # from worker to rank
    workers: int = 1
    ranks: int = 1
    prefetch: int = 2  # questions under way at each worker, over all ranks

    @property
    def ahead(self) -> int:
        """Questions of one rank that are under way at once."""
        return -(-self.prefetch * self.workers // self.ranks)

    @property
    def bound_s(self) -> float:
        """Seconds between two steps that nothing can undercut: workers, trainers, the way between,
        and how many questions may be under way. Of one rank and times that do not vary, it is what
        happens: the steps are a cycle of waits, and these are all the cycles that there are."""
        target_s, step_s = (sum(values) / len(values) for values in self._varying())
        shared = self.ranks * target_s / self.workers
        return max(shared, step_s, self.carry_s, (target_s + self.carry_s) / self.ahead)

    def run(self, steps: int) -> "Simulated":
        """So many steps, from the first question on."""
        return _Simulation(self, steps).run()

    def _varying(self) -> tuple[Sequence[float], Sequence[float]]:
        target_s, step_s = self.target_s, self.step_s
        return (
            target_s if isinstance(target_s, Sequence) else (target_s,),
            step_s if isinstance(step_s, Sequence) else (step_s,),
        )


@dataclass(frozen=True)
class Simulated:
    """A run that did not happen."""

    pipeline: Pipeline
    ready_s: tuple[float, ...]  # by step: when all ranks had their answers
    end_s: tuple[float, ...]  # ... and when they had trained on them
    taken: tuple[tuple[int, ...], ...]  # by rank: the batches that it trained on
    answered: tuple[int, ...]  # by worker: questions

    def step_s(self, skip: int = 0) -> float:
        """Seconds from step to step, without the first ones, in which queues fill."""
        begin = self.end_s[skip - 1] if skip else 0.0
        return (self.end_s[-1] - begin) / (len(self.end_s) - skip)

    def batches_per_s(self, skip: int = 0) -> float:
        """Of all ranks together."""
        return self.pipeline.ranks / self.step_s(skip)

    def waiting_share(self, skip: int = 0) -> float:
        """The share of time in which the ranks had nothing to train on."""
        begins = (0.0, *self.end_s)[skip:]
        waits = (r - b for r, b in zip(self.ready_s[skip:], begins, strict=False))
        return sum(waits) / (self.end_s[-1] - begins[0])

    def busy_share(self, skip: int = 0) -> float:
        """The share of time in which a worker computes, on average."""
        values, _ = self.pipeline._varying()
        target_s = sum(values) / len(values)
        return self.batches_per_s(skip) * target_s / self.pipeline.workers


@dataclass
class _Rank:
    """One that trains, as its questions see it."""

    load: list[int]  # its questions at each worker
    asked_at: list[int]  # when it last asked each of them, as a number
    submitted: int = 0  # batches that it wants answers about
    asked: int = 0  # ... of which so many were put to a worker
    under_way: int = 0
    places: dict[int, int] = field(default_factory=dict)  # which worker has which batch
    answers: deque[int] = field(default_factory=deque)  # at the other end of its link
    carrying: bool = False
    arrived: set[int] = field(default_factory=set)
    taken: list[int] = field(default_factory=list)


class _Simulation:
    def __init__(self, pipeline: Pipeline, steps: int) -> None:
        self._given, self._steps = pipeline, steps
        self._target_s, self._step_s = pipeline._varying()
        workers, ranks = range(pipeline.workers), range(pipeline.ranks)
        # ties go round from the rank's own number on, so that ranks begin at different workers
        self._ranks = [
            _Rank([0] * len(workers), [(w - r) % len(workers) - len(workers) for w in workers])
            for r in ranks
        ]
        self._queues: list[deque[tuple[int, int]]] = [deque() for _ in workers]
        self._answered = [0] * len(workers)
        self._events: list[Event] = []
        self._order: Iterator[int] = count()
        self._ready: list[float] = []
        self._ends: list[float] = []

    def run(self) -> Simulated:
        for rank in range(len(self._ranks)):
            self._submit(0.0, rank)
        while self._events:
            now, _, what, whose, batch = heapq.heappop(self._events)
            if what == "answered":
                self._on_answered(now, whose)
            elif what == "carried":
                self._on_carried(now, whose, batch)
            else:
                self._on_trained(now)
        taken = tuple(tuple(rank.taken) for rank in self._ranks)
        return Simulated(
            self._given, tuple(self._ready), tuple(self._ends), taken, tuple(self._answered)
        )

    def _later(self, when: float, what: str, whose: int = 0, batch: int = 0) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, whose, batch))

    def _submit(self, now: float, rank: int) -> None:
        """A rank wants the batch of the coming step, and those ahead of it."""
        one = self._ranks[rank]
        one.submitted = min(self._steps, len(one.taken) + 1 + self._given.ahead)
        while one.under_way < self._given.ahead and one.asked < one.submitted:
            self._ask(now, rank)

    def _ask(self, now: float, rank: int) -> None:
        one, batch = self._ranks[rank], self._ranks[rank].asked
        worker = min(range(len(one.load)), key=lambda w: (one.load[w], one.asked_at[w]))
        one.load[worker] += 1
        one.asked_at[worker] = one.asked
        one.asked += 1
        one.under_way += 1
        one.places[batch] = worker
        self._queues[worker].append((rank, batch))
        if len(self._queues[worker]) == 1:
            self._begin(now, worker)

    def _begin(self, now: float, worker: int) -> None:
        rank, batch = self._queues[worker][0]
        number = batch * len(self._ranks) + rank
        self._later(now + self._target_s[number % len(self._target_s)], "answered", worker)

    def _on_answered(self, now: float, worker: int) -> None:
        rank, batch = self._queues[worker].popleft()
        self._answered[worker] += 1
        if self._queues[worker]:
            self._begin(now, worker)
        one = self._ranks[rank]
        one.answers.append(batch)
        if not one.carrying:
            self._carry(now, rank)

    def _carry(self, now: float, rank: int) -> None:
        one = self._ranks[rank]
        one.carrying = True
        self._later(now + self._given.carry_s, "carried", rank, one.answers.popleft())

    def _on_carried(self, now: float, rank: int, batch: int) -> None:
        one = self._ranks[rank]
        one.carrying = False
        one.under_way -= 1
        one.load[one.places.pop(batch)] -= 1
        one.arrived.add(batch)
        if one.answers:
            self._carry(now, rank)
        self._submit(now, rank)
        self._step_if_ready(now)

    def _step_if_ready(self, now: float) -> None:
        step = len(self._ends)
        if len(self._ready) > step or not all(step in one.arrived for one in self._ranks):
            return
        self._ready.append(now)
        self._later(now + self._step_s[step % len(self._step_s)], "trained")

    def _on_trained(self, now: float) -> None:
        step = len(self._ends)
        self._ends.append(now)
        for rank, one in enumerate(self._ranks):
            one.arrived.remove(step)
            one.taken.append(step)
            self._submit(now, rank)
        self._step_if_ready(now)
