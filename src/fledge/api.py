"""fledge from Python: what `fledge train`, `fledge eval` and `fledge export` do, as functions.

    trained = fledge.train("smollm2_cpu", data={"train": "chats.jsonl"}, training={"steps": 200})
    measured = fledge.evaluate(trained.best)
    exported = fledge.export(trained.best, engine="vllm")

They print nothing, let `BadInput` propagate, and return frozen dataclasses. Importing this module
does not import torch.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.core.errors import BadInput
from fledge.core.progress import Watch, unwatched
from fledge.models.stored import quiet_transformers

if TYPE_CHECKING:
    import torch

    from fledge.decode.strategy import TreeShape
    from fledge.formats.self_check import CheckOptions, SelfCheck
    from fledge.measure.answers import Answers, Prompt
    from fledge.measure.evaluation import DraftReport, EvalOptions
    from fledge.recipe.schema import Recipe
    from fledge.target.hf.model import HFEagle3TargetModel
    from fledge.training.session import Observer, Outcome

AnyPath = str | os.PathLike[str]
Prompts = AnyPath | Sequence[AnyPath | Mapping[str, Any]]


# --- train --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A run and its results."""

    directory: Path
    best: Path  # a loadable draft: the best checkpoint; without held-out rows, the newest
    step: int
    finished: bool
    already_finished: bool  # the run was finished before; nothing was trained
    acceptance_length: float | None  # of the best, replayed on held-out rows; None: no such rows
    before: Mapping[str, Any]  # the held-out figures before training: acceptance_length, joint, ...
    after: Mapping[str, Any]  # the latest held-out figures
    seconds: float  # of training, summed over all resumed sessions
    warnings: tuple[str, ...]


def train(
    recipe: "AnyPath | Mapping[str, Any] | Recipe | None" = None,
    /,
    *,
    observer: "Observer | None" = None,
    **sections: Mapping[str, Any],
) -> Trained:
    """Train a draft, or continue its run, to the end.

    `recipe` is a file, the name of a shipped one, a mapping of sections, or a `Recipe`; keywords
    override its sections: `training={"lr": 3e-4}`. `observer` is notified of events (`note`,
    `logged`, `evaluated`); nothing is printed.

    An interrupt takes effect after the current step, once the run is saved; the same call then
    continues it. A second interrupt takes effect at once and loses the work since the last save.
    """
    from fledge.recipe.schema import as_recipe
    from fledge.training.continuation import check_existing
    from fledge.training.fit import fit_recipe

    resolved = as_recipe(recipe, sections).settled()
    check_existing(resolved)
    with quiet_transformers():
        outcome = fit_recipe(resolved, observer or _SilentObserver())
    if outcome.signal:  # deferred until the run was saved; deliver it now
        signal.raise_signal(outcome.signal)
    return _trained(Path(resolved.run.output_dir), outcome)


def _trained(directory: Path, outcome: "Outcome") -> Trained:
    from fledge.training.checkpoint import checkpoint_path

    state, best = outcome.state, directory / "best"
    return Trained(
        directory=directory,
        best=best if best.is_dir() else checkpoint_path(directory, state.step),
        step=state.step,
        finished=outcome.finished,
        already_finished=outcome.already,
        acceptance_length=state.best_length if state.best_step else None,
        before=state.first,
        after=state.last,
        seconds=state.seconds,
        warnings=outcome.warnings,
    )


class _SilentObserver:
    """An observer that ignores every event."""

    def note(self, text: str) -> None: ...
    def logged(self, values: dict[str, Any]) -> None: ...
    def evaluated(self, values: dict[str, Any]) -> None: ...


# --- evaluate -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """What drafts gain on the target's own answers: one report per draft, in the order given."""

    reports: "tuple[DraftReport, ...]"
    answers: "Answers"
    prompts: tuple[str, ...]  # files and sets
    target: Mapping[str, Any]  # weights_fingerprint, dtype, device, aux_layer_ids
    trained_on: tuple[int | None, ...]  # per draft: answers to prompts of its training rows

    @property
    def acceptance_length(self) -> float:
        """Tokens per round of the first draft."""
        return self.reports[0].acceptance.length

    @property
    def speedup(self) -> float | None:
        """Measured, of the first draft; None if no text was timed or the timing was disturbed."""
        speed = self.reports[0].speed
        return None if speed is None or speed.disturbed else speed.measured

    @property
    def agrees(self) -> bool:
        """Whether live decoding matches the replay; if not, do not trust these figures."""
        return all(report.live is None or report.live.agrees for report in self.reports)

    def to_json(self) -> dict[str, Any]:
        """The JSON that `fledge eval --json` prints."""
        turns = self.answers.turns
        return {
            "prompts": list(self.prompts),
            "answers": len(turns),
            "answer_tokens": sum(len(turn.answer_ids) for turn in turns),
            "cut_answers": sum(turn.finish == "length" for turn in turns),
            "skipped_prompts": self.answers.skipped,
            "target": dict(self.target),
            "drafts": [
                report.to_json() | {"prompts_trained_on": count}
                for report, count in zip(self.reports, self.trained_on, strict=True)
            ],
        }


def evaluate(
    draft: AnyPath | Sequence[AnyPath],
    target: "str | HFEagle3TargetModel" = "",
    prompts: Prompts = "mixed",
    *,
    limit: int | None = None,
    draft_tokens: int | None = None,
    method: str | None = None,
    tree: "TreeShape | None" = None,
    max_new_tokens: int = 256,
    live: int = 4,
    samples: int = 0,
    batch: int = 16,
    aux_layer_ids: Sequence[int] | None = None,
    dtype: "torch.dtype | str | None" = None,
    device: "torch.device | str | None" = None,
    trust_remote_code: bool = False,
    watch: Watch | None = None,
) -> Evaluation:
    """Measure the exact acceptance of drafts (or of runs: their best) on the target's own answers.

    `target` is a name, or a loaded target, which stays open; by default the run's own. `prompts`
    are files, named sets, or rows such as `{"prompt": "Why is the sky blue?"}`. `draft_tokens` and
    `method` default to what each draft was trained for. `live` answers are also decoded live, to
    verify the replay and to measure the speed-up.
    """
    from fledge.decode.strategy import TreeShape
    from fledge.measure.evaluation import EvalOptions

    options = EvalOptions(
        method=method, draft_tokens=draft_tokens, tree=tree or TreeShape(), limit=limit,
        max_new_tokens=max_new_tokens, live=live, samples=samples, batch=batch,
        aux_layer_ids=aux_layer_ids, dtype=dtype, device=device,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    drafts = [draft] if isinstance(draft, str | os.PathLike) else list(draft)
    with quiet_transformers():
        paths = [Path(path) for path in drafts]
        return evaluate_drafts(paths, target, prompts, options, watch or unwatched)


def evaluate_drafts(
    drafts: Sequence[Path],
    target: "str | HFEagle3TargetModel",
    prompts: Prompts,
    options: "EvalOptions",
    watch: Watch = unwatched,
) -> Evaluation:
    """`evaluate` with its options in one object, which the command line makes too."""
    from fledge.measure.answers import cached_answers
    from fledge.measure.evaluation import DraftEvaluation, check_fits
    from fledge.training import runs

    paths, labels = [runs.draft_directory(path) for path in drafts], shortest_names(drafts)
    for path in paths:
        runs.check_method(path, options.method)
    counts = [options.draft_tokens or runs.trained_tokens(path) for path in paths]
    names, loaded_prompts = _load_prompts(prompts, options.limit)
    if isinstance(target, str):
        watch("loading the target", 0, 1)
        opened: Any = runs.load_target(paths[0], target, **options.loading)
    else:
        opened = nullcontext(target)  # the caller's, and stays open
    with opened as backend:
        loaded = []
        for label, path in zip(labels, paths, strict=True):  # fails before the target answers
            # the same target, with the aux layers that this draft reads
            view = backend if options.aux_layer_ids else runs.with_layers_of(backend, path)
            loaded.append((label, view, runs.load_draft_beside(view, path)))
            check_fits(view, loaded[-1][2], label)
        answers = cached_answers(
            backend, loaded_prompts, max_new_tokens=options.max_new_tokens, batch=options.batch,
            watch=watch,
        )  # fmt: skip
        if not answers.turns:
            raise BadInput("no prompt leaves room for an answer", fix="lower --max-new-tokens")
        reports = [
            DraftEvaluation(view, draft, answers.turns, options, count, watch).evaluate(
                label, trained_length=runs.trained_length(path)
            )
            for path, (label, view, draft), count in zip(paths, loaded, counts, strict=True)
        ]
        trained_on = tuple(_trained_on(path, answers) for path in paths)
        return Evaluation(tuple(reports), answers, tuple(names), _facts(backend), trained_on)


def _trained_on(draft: Path, answers: "Answers") -> int | None:
    """How many answers are to prompts that a draft was trained on; None if its run is unknown."""
    import numpy as np

    from fledge.data.rows import digest
    from fledge.training.runs import trained_prompts

    known = trained_prompts(draft)
    asked = np.array([digest(np.array(turn.prompt_ids)) for turn in answers.turns], dtype=np.uint64)
    return None if known is None else int(np.isin(asked, known).sum())


def _load_prompts(prompts: Prompts, limit: int | None) -> "tuple[list[str], list[Prompt]]":
    """Returns (names of the sources, prompts)."""
    from fledge.measure.answers import given_prompts, read_prompts

    items = [prompts] if isinstance(prompts, str | os.PathLike) else list(prompts)
    rows = [item for item in items if isinstance(item, Mapping)]
    names = [os.fspath(item) for item in items if not isinstance(item, Mapping)]
    loaded = [] if rows and not names else read_prompts(names, limit=limit)
    return names + ["given"] * bool(rows), loaded + given_prompts(rows, limit=limit)


def _facts(target: "HFEagle3TargetModel") -> dict[str, Any]:
    info = target.info()
    return {
        "weights_fingerprint": info.weights_fingerprint,
        "dtype": str(info.dtype).removeprefix("torch."),
        "device": str(target.model.device),
        "aux_layer_ids": target.aux_layer_ids,
    }


def shortest_names(drafts: Sequence[Path]) -> list[str]:
    """The last parts of the drafts' paths, or the whole paths if these do not tell them apart."""
    names = [path.absolute().name for path in drafts]
    return names if len(set(names)) == len(drafts) else [str(path) for path in drafts]


# --- export -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """A directory that an engine serves, and what was checked on it."""

    directory: Path
    engine: str
    engine_version: str
    num_draft_tokens: int
    checks: "SelfCheck"
    record: Mapping[str, Any]  # the export record stored in the directory

    @property
    def acceptance_length(self) -> float | None:
        """Of the files, on the prompts of the check; None if exported without the target."""
        decoded = self.checks.decoded
        return None if decoded is None else decoded.acceptance_length


def export(
    draft: AnyPath,
    *,
    engine: str,
    out: AnyPath | None = None,
    check: "CheckOptions | None" = None,
    watch: Watch | None = None,
    **options: Any,
) -> Exported:
    """Write a draft (or a run's best) in the format of `engine`, and verify that the files
    reproduce what training measured. `out` defaults to `exports/ENGINE` in the run; `options` are
    those of `export_draft`: target, engine_version, dtype, num_draft_tokens, device, ..."""
    from fledge.formats.export import export_draft, read_export_record
    from fledge.formats.self_check import SelfCheck
    from fledge.formats.source import default_out

    source = Path(draft)
    place = default_out(source, engine) if out is None else Path(out)
    with quiet_transformers():
        written = export_draft(source, place, engine=engine, check=check, watch=watch, **options)
    record = read_export_record(written)
    return Exported(
        directory=written,
        engine=record["engine"],
        engine_version=record["engine_version"],
        num_draft_tokens=record["num_draft_tokens"],
        checks=SelfCheck.of(record["self_check"]),
        record=record,
    )
