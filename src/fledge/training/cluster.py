"""Runs the ranks of a training on a Ray cluster, and restarts them when one is lost.

Each rank is an actor that calls what `fledge train` calls, in the environment that torchrun would
set up. When a rank is lost, the others are ended, because they could only wait for it; then all
restart from the newest checkpoint, wherever there is room. If there is room only for fewer ranks,
each takes the share of several, so that the steps stay the same.

The run's directory, its data and its models must have the same paths on every machine.
"""

import contextlib
import io
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.core.files import alone_in
from fledge.core.progress import Progress
from fledge.core.terminal import counted
from fledge.recipe.schema import Recipe
from fledge.target.kinds import kind_of
from fledge.target.ray.connection import (
    bundle,
    cause_of,
    connected,
    import_ray,
    reserved,
    terminate,
)
from fledge.training.checkpoint import newest_checkpoint
from fledge.training.drafts import target_section
from fledge.training.signals import StopSignal

Entry = Callable[[Recipe], int]  # what a rank runs
_POLL_S = 0.5
_LOSS_REPORT_S = 40.0  # time after a rank's error for Ray to report the loss of another rank
_START_S = 120.0  # time limit for starting the ranks' processes
_SMALLER_S = 5.0  # time to wait for room before fewer ranks are tried
_MAX_LOSSES = 3  # losses in a row without a new checkpoint
_TAIL_BYTES = 1 << 14  # read from the end of the metrics: a few lines


@dataclass(frozen=True)
class Layout:
    """The number of ranks, and what the cluster reserves for each."""

    ranks: int = 1
    cpus: float = 1.0
    gpus: float | None = None  # None: one if the cluster has any
    wait_s: float = 60.0  # time to wait for room


class Rank:
    """The actor that runs one rank."""

    def place(self) -> dict[str, Any]:
        """Where it runs, and a port that is free there."""
        ray = import_ray()
        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        gpus = list(context.get_accelerator_ids().get("GPU", ()))
        process = {"node_id": context.get_node_id(), "pid": os.getpid()}
        return {"node": ray.util.get_node_ip_address(), **process, "gpus": gpus, "port": port}

    def run(
        self, entry: Entry, recipe: Recipe, environment: Mapping[str, str], directory: str
    ) -> tuple[int, str]:
        """Run `entry`; return its exit code and what it wrote to stdout."""
        os.environ |= environment
        os.chdir(directory)
        if environment["RANK"] == "0":
            _wait_for_lock(Path(recipe.run.output_dir))
        with contextlib.redirect_stdout(io.StringIO()) as written:
            return entry(recipe), written.getvalue()


def _wait_for_lock(directory: Path) -> None:
    """Wait until the directory is unlocked: the previous rank 0 may still be exiting."""
    until = time.monotonic() + _START_S
    while directory.is_dir():
        try:
            with alone_in(directory):
                return
        except BadInput:
            if time.monotonic() >= until:
                raise
            time.sleep(_POLL_S)


def train_on_cluster(
    recipe: Recipe,
    entry: Entry,
    layout: Layout,
    *,
    address: str,
    progress: Progress,
) -> tuple[int, str]:
    """Train to the end, restarting lost ranks; return the first rank's exit code and stdout."""
    name = f"{recipe.run_name}-{secrets.token_hex(2)}"
    section, layers = target_section(recipe), recipe.method.aux_layers(recipe.objective)
    with connected(address), ExitStack() as undo:
        placed = kind_of(section).placed(section, aux_layers=layers, name=name)
        variables = dict(undo.enter_context(placed))
        with StopSignal() as stop:
            return _Run(recipe, entry, layout, progress, variables).to_the_end(stop)


@dataclass
class _Run:
    recipe: Recipe
    entry: Entry
    layout: Layout
    progress: Progress
    variables: dict[str, str]
    restarts: int = 0

    def to_the_end(self, stop: StopSignal) -> tuple[int, str]:
        losses, step = 0, self._step()
        while True:
            outcome = self._attempt(stop)
            if isinstance(outcome, tuple):
                return outcome
            if stop.received:
                return 128 + stop.received, ""
            losses = losses + 1 if self._step() == step else 1
            step = self._step()
            if losses >= _MAX_LOSSES:
                what = f"{losses} starts in a row were lost at step {step} ({outcome})"
                raise BadInput(what, fix="look at ray's logs; the same command continues the run")
            self.restarts += 1
            self.progress.say(f"{outcome}; all ranks start again from step {step}")

    def _attempt(self, stop: StopSignal) -> tuple[int, str] | str:
        """Start all ranks once; return the outcome, or a description of what was lost."""
        ray = import_ray()
        with ExitStack() as undo:
            strategies = self._room(undo)
            actors = []
            for strategy in strategies:
                options = ray.remote(Rank).options(
                    num_cpus=self.layout.cpus, num_gpus=self._gpus(), scheduling_strategy=strategy
                )
                actors.append(options.remote())
                undo.callback(ray.kill, actors[-1])
            count, references = len(actors), [actor.place.remote() for actor in actors]
            _, missing = ray.wait(references, num_returns=count, timeout=_START_S)
            if missing:
                return f"{len(missing)} of {count} ranks did not start"
            try:
                places = ray.get(references)
            except ray.exceptions.RayError as error:
                return type(error).__name__
            self.progress(f"training on {counted(count, 'rank')}")
            recipe, directory = self._cut_for(count), os.getcwd()
            runs = {
                actor.run.remote(self.entry, recipe, environment, directory): index
                for index, (actor, environment) in enumerate(
                    zip(actors, _environments(places, self.variables), strict=True)
                )
            }
            return self._watch(runs, places[0], stop)

    def _watch(
        self, runs: dict[Any, int], first: Mapping[str, Any], stop: StopSignal
    ) -> tuple[int, str] | str:
        """Wait until all ranks are done or one is lost; returns as `_attempt` does."""
        ray = import_ray()
        pending, done = list(runs), dict[int, tuple[int, str]]()
        failed: list[BaseException] = []
        lost, until, told = "", float("inf"), False
        while pending and not lost and time.monotonic() < until:
            ready, pending = ray.wait(pending, timeout=_POLL_S)
            for reference in ready:
                try:
                    done[runs[reference]] = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    failed.append(cause_of(error))
                    until = min(until, time.monotonic() + _LOSS_REPORT_S)
                except ray.exceptions.RayError as error:
                    lost = f"rank {runs[reference]} is lost ({type(error).__name__})"
            if stop.received and not told:
                told = True  # the others hear it from the first rank
                terminate(first["node_id"], first["pid"])
            self._show_progress()
        refused = [e for e in failed if isinstance(e, BadInput)]
        if refused:
            raise refused[0]
        if not lost and not failed:
            return done[0]
        if lost:
            return lost
        raise failed[0]

    def _room(self, undo: ExitStack) -> list[Any]:
        """Reserve room for as many ranks as possible; returns where each of them goes."""
        one, wanted = bundle(self.layout.cpus, self._gpus()), self.layout.ranks
        sizes = list(self._sizes()) if self.restarts else [wanted]
        for count in sizes:
            wait_s = self.layout.wait_s if count == wanted else _SMALLER_S
            with ExitStack() as attempt:
                room = reserved([one] * count, strategy="PACK", wait_s=wait_s)
                if (places := attempt.enter_context(room)) is not None:
                    if count < wanted:
                        self.progress.say(f"room for {count} of {wanted} ranks")
                    undo.push(attempt.pop_all())
                    return places
        resources = ", ".join(f"{amount:g} {name}" for name, amount in one.items())
        raise BadInput(
            f"no room for {sizes[-1]} ranks of {resources} each",
            where="--ranks",
            fix="give the cluster more machines; the same command continues the run",
        )

    def _sizes(self) -> Iterator[int]:
        """Numbers of ranks that can take the same steps, largest first."""
        training, ranks = self.recipe.training, self.layout.ranks
        for count in range(ranks, 0, -1):
            if ranks % count == 0 and count % (training.shard * training.context) == 0:
                yield count

    def _cut_for(self, count: int) -> Recipe:
        """The recipe for the same steps on fewer ranks: each accumulates more micro-batches."""
        training = self.recipe.training
        accumulate = training.accumulate * (self.layout.ranks // count)
        training = training.model_copy(update={"accumulate": accumulate})
        return self.recipe.model_copy(update={"training": training})

    def _gpus(self) -> float:
        if self.layout.gpus is not None or self.recipe.training.device == "cpu":
            return self.layout.gpus or 0
        return 1 if import_ray().cluster_resources().get("GPU", 0) else 0

    def _step(self) -> int:
        newest, _ = newest_checkpoint(Path(self.recipe.run.output_dir))
        return 0 if newest is None else newest.step

    def _show_progress(self) -> None:
        """Show what the first rank wrote last."""
        last = last_figures(Path(self.recipe.run.output_dir) / "metrics.jsonl")
        if last:
            note = f"{last['tokens_per_s']:,.0f} tok/s target {last['target_share']:.0%}"
            steps = self.recipe.training.steps or 0
            self.progress("training", last["step"], steps, "steps", note, now=True)


def last_figures(metrics: Path) -> dict[str, Any]:
    """The latest step, tokens/s and share of time in which the ranks waited for the target; empty
    if no line of training is complete."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:  # not started yet
        return {}
    for line in reversed(lines):
        try:
            values = json.loads(line)
            return {name: values[name] for name in ("step", "tokens_per_s", "target_share")}
        except (ValueError, KeyError, TypeError):  # half a line, or one about an evaluation
            continue
    return {}


def _environments(
    places: Sequence[dict[str, Any]], variables: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """The environment variables that torchrun would set for each rank. All ranks on a machine see
    all of their GPUs, so that they can copy directly between them."""
    for rank, place in enumerate(places):
        local = [i for i, other in enumerate(places) if other["node_id"] == place["node_id"]]
        env = {
            **variables,
            "RANK": str(rank), "LOCAL_RANK": str(local.index(rank)),
            "WORLD_SIZE": str(len(places)), "LOCAL_WORLD_SIZE": str(len(local)),
            "MASTER_ADDR": places[0]["node"], "MASTER_PORT": str(places[0]["port"]),
        }  # fmt: skip
        if place["gpus"]:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(g for i in local for g in places[i]["gpus"])
        yield env
