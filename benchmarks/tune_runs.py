"""The runs of `tune.py`: one capture of the target's states, and drafts that train from it.

The capture covers all documents that any run trains on or is measured on, so that no run needs a
forward pass of the target. The states are two large tensors, shared by all processes.
"""

import itertools
import json
import multiprocessing
import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from collect_curves import compact
from fledge.core.distributed import pick_device
from fledge.core.errors import BadInput
from fledge.core.files import atomic_directory, cache_dir, write_text
from fledge.core.progress import unwatched
from fledge.core.rows import TokenBatch
from fledge.data.pack import collate, pack_rows
from fledge.data.rows import RowView, split_rows
from fledge.decode.strategy import rollouts_of
from fledge.measure.answers import cached_answers, read_prompts
from fledge.measure.figures import Acceptance
from fledge.measure.replay import Ints, Text, as_pack, packs_of, replay_held_out, target_picks
from fledge.recipe.schema import Recipe, load_recipe
from fledge.target.finite_check import checked_answer
from fledge.target.kinds import kind_of, target_tokenizer
from fledge.target.state_cache import RememberingTarget, colocated
from fledge.training.batches import StepBatch
from fledge.training.curves import Curve, curve_of
from fledge.training.drafts import target_section
from fledge.training.setup import Training, prepare_data, set_up, tokenised
from fledge.training.step import train_step

HELD_OUT = "held out"
PACK = 16384  # tokens per forward pass of the target
PROBE = 200  # steps that measure the speed of a variant
Sets = dict[str, list[TokenBatch]]  # by name: packs that drafts are measured on


@dataclass(frozen=True)
class Job:
    name: str
    overrides: tuple[str, ...]
    seed: int
    source: str  # a recipe, by name or file
    words: tuple[str, ...]  # all overrides of it

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.source, self.words)

    @property
    def draft(self) -> str:
        """The name of its directory, where drafts are kept."""
        return f"{self.name}-{self.seed}"

    @property
    def id(self) -> str:
        return " ".join([f"{self.name}:", *self.overrides, f"seed={self.seed}"])


# --- measured sets ------------------------------------------------------------------------------


def without_kinds(files: Sequence[str], kinds: Sequence[str], rows: int) -> dict[str, str]:
    """Files by kind, with at most `rows` rows each; '' is the file of all other rows. A row's kind
    is the first part of its id: `mbpp` of `mbpp/17`."""
    lines: dict[str, list[str]] = {kind: [] for kind in ("", *kinds)}
    for line in (line for file in files for line in Path(file).read_text().splitlines() if line):
        kind = str(json.loads(line).get("id", "")).partition("/")[0]
        lines[kind if kind in kinds else ""].append(line)
    if empty := [kind for kind, kind_lines in lines.items() if not kind_lines]:
        raise BadInput(f"no rows of kind '{empty[0]}'", where=", ".join(files))
    place, paths = cache_dir() / "tune", {}
    place.mkdir(parents=True, exist_ok=True)
    for kind, kind_lines in lines.items():
        path = place / f"{kind or 'but-' + '-'.join(kinds)}.jsonl"
        write_text(path, "\n".join(kind_lines[: rows if kind else None]) + "\n")
        paths[kind] = str(path)
    return paths


def set_name(prompts: str) -> str:
    return Path(prompts).name.partition(".")[0].removeprefix("eval_")


def packs(rows: RowView, count: int | None, pad_id: int) -> list[TokenBatch]:
    lengths = rows.lengths[:count]
    width = max(PACK, int(lengths.max()))
    return [collate(rows, [pack], width, pad_id) for pack in pack_rows(lengths, width).packs]


def answered(target: RememberingTarget, prompts: Sequence[str], max_new_tokens: int) -> Sets:
    """The target's own answers to each file of prompts."""
    model, sets = colocated(target), {}
    assert model is not None
    for file in prompts:
        questions = read_prompts([file])
        turns = cached_answers(model, questions, max_new_tokens=max_new_tokens, batch=64).turns
        texts = [Text(turn.prompt_ids, turn.answer_ids) for turn in turns]
        members = [[piece.row for piece in pack] for pack in packs_of(list(map(len, texts)), PACK)]
        sets[set_name(file)] = [as_pack([texts[i] for i in indices]) for indices in members]
    return sets


@dataclass(frozen=True)
class Judges:
    """What drafts are measured on."""

    rows: int  # held-out rows, at most
    files: dict[str, str]  # files of rows by kind, which no draft is trained on
    prompts: Sequence[str]  # files, or named sets, that the target answers
    max_new_tokens: int
    draft_tokens: int  # tokens drafted per round


@dataclass(frozen=True)
class Limits:
    """How long a run is, how often it is measured, and where its draft is kept."""

    points: int = 1  # measurements
    seconds: float = 0.0  # of training; 0: the steps of its recipe
    drafts: Path | None = None  # where drafts are kept, by name and seed


def capture(jobs: Sequence[Job], judges: Judges, limits: Limits, *, on_device: bool) -> "Ground":
    """Run the target over everything that drafts are trained or measured on."""
    recipe = jobs[0].recipe
    device = pick_device(recipe.training.device)
    with RememberingTarget(_open(jobs, device), 2**62) as target:
        pad_id = target_tokenizer(recipe.target).pad_token_id or 0
        train, held_out, _ = prepare_data(recipe)
        sets = {HELD_OUT: packs(held_out, judges.rows, pad_id)}
        for kind, file in judges.files.items():
            view, _ = split_rows(tokenised((file,), recipe, unwatched), 0)
            sets[kind] = packs(view, None, pad_id)
        sets |= answered(target, judges.prompts, judges.max_new_tokens)
        for batch in itertools.chain(packs(train, None, pad_id), *sets.values()):
            checked_answer(target, batch)
        states = States.of(target)
    torch.cuda.empty_cache()  # free the pieces of the capture: the workers need the memory
    if not on_device:
        states = States(states.keys, states.lengths, states.aux_ND.cpu(), states.hidden_ND.cpu())
    # pickled, because torch would pass every small tensor of a pack as a separate file
    return Ground(list(jobs), states, pickle.dumps(sets), judges.draft_tokens, limits)


def _open(jobs: Sequence[Job], device: torch.device) -> Any:
    """The target, with all aux layers that any draft uses."""
    if jobs[0].recipe.target.backend != "hf":
        raise BadInput("states are captured in this process", where="target.backend", fix="hf")
    sections = [target_section(job.recipe) for job in jobs]
    layers = tuple(sorted({i for section in sections for i in section.aux_layer_ids or ()}))
    section = sections[0].model_copy(update={"aux_layer_ids": layers})
    return kind_of(section).open(section, device=device, aux_layers=len(layers))


@dataclass(frozen=True)
class States:
    """States of documents, end to end, in two large tensors that processes can share."""

    keys: list[bytes]
    lengths: list[int]
    aux_ND: torch.Tensor
    hidden_ND: torch.Tensor

    @classmethod
    def of(cls, target: RememberingTarget) -> "States":
        """A copy of all that the target knows."""
        aux, hidden = zip(*target.known.values(), strict=True)
        keys, lengths = list(target.known), [len(part) for part in aux]
        return cls(keys, lengths, torch.cat(aux), torch.cat(hidden))


# --- one training -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ground:
    """What all trainings share; it can be passed to another process."""

    jobs: list[Job]
    states: States
    packed_sets: bytes
    draft_tokens: int
    limits: Limits


class Bench:
    """Trains and measures drafts, one after another."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._sets: Sets = pickle.loads(ground.packed_sets)
        self._picks: dict[tuple[str, int], Ints] = {}  # of the target, the same for all drafts

    @cached_property
    def _target(self) -> RememberingTarget:
        device = pick_device(self._ground.jobs[0].recipe.training.device)
        target, states = _open(self._ground.jobs, device), self._ground.states
        remembering = RememberingTarget(target, 0)
        parts = [torch.split(x, states.lengths) for x in (states.aux_ND, states.hidden_ND)]
        remembering.known = dict(zip(states.keys, zip(*parts, strict=True), strict=True))
        return remembering

    def run(self, job: Job) -> dict[str, Any]:
        begin = time.perf_counter()
        recipe = job.recipe
        if self._ground.limits.seconds:
            steps = max(1, int(self._steps_per_s(recipe) * self._ground.limits.seconds))
            recipe = load_recipe(job.source, [*job.words, f"training.steps={steps}"])
        training = set_up(recipe, target=self._target)
        stream, vocabulary = training.stream, training.vocabulary
        course = self._train(training)
        self._keep_draft(training, job)
        curve = {"course": compact(course.curve(recipe))} if course.logged else {}
        return {
            "id": job.id, "name": job.name, "overrides": list(job.overrides), "seed": job.seed,
            "method": recipe.objective.kind,
            "steps": stream.steps, "tokens": stream.steps * stream.packs_per_step * stream.tokens,
            "seconds": course.seconds, "wall_s": time.perf_counter() - begin,
            "vocabulary": vocabulary.size, "coverage": vocabulary.coverage,
            **course.points[-1], "curve": course.points, **curve,
        }  # fmt: skip

    def _keep_draft(self, training: Training, job: Job) -> None:
        if drafts := self._ground.limits.drafts:
            with atomic_directory(drafts / job.draft) as directory:
                training.draft.write(directory)

    def _steps_per_s(self, recipe: Recipe) -> float:
        """Steps per second in the second half of a short run."""
        training = set_up(recipe, target=self._target)
        training.draft.train()
        begin = 0.0
        for batch in training.stream.prefetched(0, 2):
            result = train_step(training.parts, batch, lr=0.0)
            if batch.step + 1 in (PROBE // 2, PROBE):
                bool(result.bad)  # synchronizes with the device
                begin, before = time.perf_counter(), begin
            if batch.step + 1 >= PROBE:
                return (PROBE - PROBE // 2) / (begin - before)
        raise BadInput(f"--seconds needs runs of {PROBE} steps or more", where="--tokens")

    def _train(self, training: Training) -> "Course":
        parts, stream, points = training.parts, training.stream, self._ground.limits.points
        parts.objective.draft_model.train()
        due = {max(1, stream.steps * i // points) for i in range(1, points + 1)}
        course, last = Course(training), None
        for batch in stream.prefetched(0, 2):
            result = train_step(parts, batch, lr=training.lr(batch.step))
            # one step late, so that the device is not waited for
            course.skipped += 0 if last is None else int(last.flags.read()[0])
            course.stepped(batch)
            last = result
            if batch.step + 1 in due:
                course.skipped, last = course.skipped + int(result.bad), None  # synchronizes
                with course.paused():
                    at_end = batch.step + 1 == stream.steps
                    acceptance = self._measure(training, self._sets if at_end else [HELD_OUT])
                course.measured(batch.step + 1, float(result.sums.loss), acceptance)
        return course

    @torch.no_grad()
    def _measure(self, training: Training, names: Iterable[str]) -> dict[str, Acceptance]:
        """Acceptance by set."""
        parts, draft, count = training.parts, training.draft, self._ground.draft_tokens
        head = parts.target.info().head.to(parts.device)
        acceptance = {}
        draft.eval()
        rollouts = rollouts_of(draft, count, dtype=parts.objective.compute_dtype)
        for name in names:
            acceptance[name] = Acceptance.none(count)
            for index, batch in enumerate(self._sets[name]):
                answer = parts.target.answer(batch).to(parts.device)
                if (name, index) not in self._picks:
                    picks = target_picks(answer, batch, head, rollouts.selected_token_ids)
                    self._picks[name, index] = picks
                acceptance[name] += replay_held_out(
                    answer, batch, rollouts, self._picks[name, index]
                )
        draft.train()
        return acceptance


class Course:
    """Records a run's measured lengths, so that it can be forecast."""

    def __init__(self, training: Training) -> None:
        self._steps = training.stream.steps
        self._begin, self._before = time.perf_counter(), 0.0
        self.skipped = 0
        self.points: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []

    @property
    def seconds(self) -> float:
        """Seconds of training, without measurements."""
        return self._before

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._before += time.perf_counter() - self._begin
        yield
        self._begin = time.perf_counter()

    def stepped(self, batch: StepBatch) -> None:
        seconds = self._before + time.perf_counter() - self._begin
        self.logged.append({"step": batch.step + 1, "epoch": batch.epoch, "seconds": seconds})

    def measured(self, step: int, loss: float, found: dict[str, Acceptance]) -> None:
        lengths = {name: acceptance.length for name, acceptance in found.items()}
        self.points.append(
            {"step": step, "loss": loss, "skipped": self.skipped, "lengths": lengths}
        )
        self._evaluations.append({"step": step, "evaluation": found[HELD_OUT].to_json()})

    def curve(self, recipe: Recipe) -> Curve:
        return curve_of(recipe, self._steps, self.logged, self._evaluations)


# --- several side by side -----------------------------------------------------------------------


def work(end: Any, ground: Ground) -> None:
    """Main function of a worker process: runs jobs until the other end of the pipe is closed."""
    torch.set_num_threads(1)
    bench = Bench(ground)
    try:
        while True:
            job = end.recv()
            try:
                end.send(bench.run(job))
            except BadInput as error:
                end.send({"error": f"{job.id}: {error}"})
    except (EOFError, BrokenPipeError):
        return


def results(ground: Ground, jobs: Iterable[Job], *, workers: int) -> Iterator[dict[str, Any]]:
    """Yields the result of each job as it finishes; the next of `jobs` is drawn when a worker is
    free. With 0 workers, everything runs in this process."""
    if workers == 0:
        bench = Bench(ground)
        yield from (bench.run(job) for job in jobs)
        return
    context, todo = multiprocessing.get_context("spawn"), iter(jobs)
    free = []
    for _ in range(workers):
        our_end, worker_end = context.Pipe()
        context.Process(target=work, args=(worker_end, ground), daemon=True).start()
        worker_end.close()
        free.append(our_end)
    busy: list[Any] = []
    while True:
        for end, job in zip(list(free), todo, strict=False):
            end.send(job)
            free.remove(end)
            busy.append(end)
        if not busy:
            return
        ready = wait(busy)
        for end in [connection for connection in busy if connection in ready]:
            try:
                yield end.recv()
            except EOFError:
                sys.exit("a worker died (out of memory? give fewer --workers)")
            busy.remove(end)
            free.append(end)
