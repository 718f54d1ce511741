"""Event simulation of target workers, training ranks and the queues between them: throughput and
waiting times before any of them exists.

It models what `target/ray/` and `ahead.py` do. A rank requests `ahead` batches beyond the one that
it waits for, with at most `ahead` requests in flight; it sends each to the worker with the fewest
of its requests, and among these to the one that it asked longest ago. A worker answers one request
at a time, in order. Answers reach a rank one at a time. All ranks take a step together, once each
has its answer. There is no randomness: the same parameters give the same run.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

Event = tuple[float, int, str, int, int]  # time, tie-breaker, kind, rank or worker, batch


@dataclass(frozen=True)
class Pipeline:
    """The parameters of a cluster. Times that are sequences are cycled through."""

    target_s: float | Sequence[float]  # time of a worker to answer about one batch
    step_s: float | Sequence[float]  # time of a rank to train on one batch
    carry_s: float = 0.0  # transfer time from worker to rank
    workers: int = 1
    ranks: int = 1
    prefetch: int = 2  # requests in flight at each worker, over all ranks

    @property
    def ahead(self) -> int:
        """The maximum number of requests of one rank in flight."""
        return -(-self.prefetch * self.workers // self.ranks)

    @property
    def bound_s(self) -> float:
        """A lower bound of the seconds per step, from the capacity of workers, ranks and links, and
        from the number of requests in flight. It is exact for one rank and constant times: steps
        are then a cycle of waits, and these are all possible cycles."""
        target_s, step_s = (sum(values) / len(values) for values in self._varying())
        shared = self.ranks * target_s / self.workers
        return max(shared, step_s, self.carry_s, (target_s + self.carry_s) / self.ahead)

    def run(self, steps: int) -> "Simulated":
        """Simulate `steps` steps, from the first request on."""
        return _Simulation(self, steps).run()

    def _varying(self) -> tuple[Sequence[float], Sequence[float]]:
        """Times of workers and of ranks as sequences."""
        target_s, step_s = self.target_s, self.step_s
        return (
            target_s if isinstance(target_s, Sequence) else (target_s,),
            step_s if isinstance(step_s, Sequence) else (step_s,),
        )


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation."""

    pipeline: Pipeline
    ready_s: tuple[float, ...]  # by step: when all ranks had their answers
    end_s: tuple[float, ...]  # by step: when all ranks had trained on them
    taken: tuple[tuple[int, ...], ...]  # by rank: the batches that it trained on
    answered: tuple[int, ...]  # by worker: the number of its answers

    def step_s(self, skip: int = 0) -> float:
        """Mean seconds per step, without the first `skip` steps, in which queues fill."""
        begin = self.end_s[skip - 1] if skip else 0.0
        return (self.end_s[-1] - begin) / (len(self.end_s) - skip)

    def batches_per_s(self, skip: int = 0) -> float:
        """Batches per second of all ranks together."""
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
    """The requests of one rank."""

    load: list[int]  # its requests in flight at each worker
    asked_at: list[int]  # for each worker, the number of this rank's latest request to it
    submitted: int = 0  # number of batches that it wants answers about
    asked: int = 0  # number of these that were sent to a worker
    under_way: int = 0
    places: dict[int, int] = field(default_factory=dict)  # batch -> worker
    answers: deque[int] = field(default_factory=deque)  # answered batches, not yet transferred
    carrying: bool = False  # whether its link is busy
    arrived: set[int] = field(default_factory=set)
    taken: list[int] = field(default_factory=list)


class _Simulation:
    def __init__(self, pipeline: Pipeline, steps: int) -> None:
        self._given, self._steps = pipeline, steps
        self._target_s, self._step_s = pipeline._varying()
        workers, ranks = range(pipeline.workers), range(pipeline.ranks)
        # The initial order rotates with the rank, so that ranks start at different workers.
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
            now, _, kind, index, batch = heapq.heappop(self._events)
            if kind == "answered":
                self._on_answered(now, index)
            elif kind == "carried":
                self._on_carried(now, index, batch)
            else:
                self._on_trained(now)
        taken = tuple(tuple(rank.taken) for rank in self._ranks)
        return Simulated(
            self._given, tuple(self._ready), tuple(self._ends), taken, tuple(self._answered)
        )

    def _schedule(self, when: float, kind: str, index: int = 0, batch: int = 0) -> None:
        heapq.heappush(self._events, (when, next(self._order), kind, index, batch))

    def _submit(self, now: float, rank: int) -> None:
        """Let a rank request the batch of its next step, and those ahead of it."""
        state = self._ranks[rank]
        state.submitted = min(self._steps, len(state.taken) + 1 + self._given.ahead)
        while state.under_way < self._given.ahead and state.asked < state.submitted:
            self._ask(now, rank)

    def _ask(self, now: float, rank: int) -> None:
        state, batch = self._ranks[rank], self._ranks[rank].asked
        worker = min(range(len(state.load)), key=lambda w: (state.load[w], state.asked_at[w]))
        state.load[worker] += 1
        state.asked_at[worker] = state.asked
        state.asked += 1
        state.under_way += 1
        state.places[batch] = worker
        self._queues[worker].append((rank, batch))
        if len(self._queues[worker]) == 1:
            self._begin(now, worker)

    def _begin(self, now: float, worker: int) -> None:
        rank, batch = self._queues[worker][0]
        number = batch * len(self._ranks) + rank
        self._schedule(now + self._target_s[number % len(self._target_s)], "answered", worker)

    def _on_answered(self, now: float, worker: int) -> None:
        rank, batch = self._queues[worker].popleft()
        self._answered[worker] += 1
        if self._queues[worker]:
            self._begin(now, worker)
        state = self._ranks[rank]
        state.answers.append(batch)
        if not state.carrying:
            self._carry(now, rank)

    def _carry(self, now: float, rank: int) -> None:
        state = self._ranks[rank]
        state.carrying = True
        self._schedule(now + self._given.carry_s, "carried", rank, state.answers.popleft())

    def _on_carried(self, now: float, rank: int, batch: int) -> None:
        state = self._ranks[rank]
        state.carrying = False
        state.under_way -= 1
        state.load[state.places.pop(batch)] -= 1
        state.arrived.add(batch)
        if state.answers:
            self._carry(now, rank)
        self._submit(now, rank)
        self._step_if_ready(now)

    def _step_if_ready(self, now: float) -> None:
        step = len(self._ends)
        if len(self._ready) > step or not all(step in rank.arrived for rank in self._ranks):
            return
        self._ready.append(now)
        self._schedule(now + self._step_s[step % len(self._step_s)], "trained")

    def _on_trained(self, now: float) -> None:
        step = len(self._ends)
        self._ends.append(now)
        for rank, state in enumerate(self._ranks):
            state.arrived.remove(step)
            state.taken.append(step)
            self._submit(now, rank)
        self._step_if_ready(now)
