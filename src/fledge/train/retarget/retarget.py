"""`fledge retarget`: a draft follows its target, which was fine-tuned or quantized.

Its reading of the target is refitted in closed form (`refit.py`), then it may be trained for some
steps, as any draft that starts from another. What is written is a run like others:

    OUT/refit          the refitted draft
    OUT/recipe.yaml    a recipe that trains on from there, with the new target
    OUT/best           the better of the refitted and the trained draft
    OUT/retarget.json  the figures

A tenth of the rows is held out, by the recipe's rule, and all lengths are measured there.
"""

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fledge.core.errors import BadInput
from fledge.core.files import check_place, write_json
from fledge.data.pack import collate, pack_rows
from fledge.data.rows import RowView
from fledge.draft.files import read_draft_config
from fledge.measure.evaluation import check_fits
from fledge.methods.base import Method
from fledge.methods.registry import load_draft, method_of
from fledge.recipe.schema import Recipe, as_recipe
from fledge.train import loading
from fledge.train.checkpoint import mark_best
from fledge.train.fit import fit_recipe
from fledge.train.retarget.refit import Targets, measure, reading_of, refit, take_tables
from fledge.train.runs import draft_directory, recipe_of, run_directory, trained_tokens
from fledge.train.session import Observer
from fledge.train.setup import held_out_batches, prepare_data

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from fledge.core.rows import TokenBatch
    from fledge.target.hf.model import HFEagle3TargetModel

RECORD_NAME = "retarget.json"
_TRAIN = "train on: fledge train target.model=NEW draft.init_from=DRAFT data.train=ROWS"
_JUDGED = 5  # one row in so many chooses the penalty before it is fitted too
Watch = Callable[[str, float, int], None]


@dataclass(frozen=True)
class Asked:
    """What is to be done."""

    draft: Path  # or a run
    target: str  # the new one
    data: Sequence[str]
    old: str = ""  # '': the one that the draft's run names
    steps: int = 0  # of training after the refit
    out: Path | None = None  # None: beside the draft's run
    rows: int = 2000  # at most, for the refit
    dtype: "torch.dtype | str | None" = None
    device: "torch.device | str | None" = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Retargeted:
    """What came of it. Lengths are tokens per round on held-out rows, by replay."""

    directory: Path
    old: str
    target: str
    method: str
    rows: int  # that were fitted
    tokens: int
    penalty: float | None  # of the ridge; None: no change was better than any
    error_before: float  # by how much what the draft makes of the states is off, relative to it
    error: float  # and after the refit; both on rows that were not fitted
    taken: tuple[str, ...]  # the target's tables that the draft has
    num_draft_tokens: int
    held_out_rows: int
    old_length: float  # with the old target
    length_before: float  # with the new one, as the draft was
    length_with_old_states: float  # if the new one had the old one's: see `refit.Lengths`
    length: float  # refitted
    steps: int = 0
    trained_length: float | None = None  # after the steps

    @property
    def recovered(self) -> float | None:
        """Share of what the new states cost that the refit brought back; None: nothing."""
        return self.share(self.length)

    def share(self, length: float) -> float | None:
        """How much of what the new states cost a length has back."""
        lost = self.length_with_old_states - self.length_before
        return (length - self.length_before) / lost if lost > 0 else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "directory": str(self.directory), "recovered": self.recovered}


def retarget(asked: Asked, observer: Observer, watch: Watch = lambda *_: None) -> Retargeted:
    """Refit, train where steps are wanted, and write a run; nothing is written before the refit."""
    path = draft_directory(asked.draft)
    out = asked.out or _beside(path)
    _check_new(out)
    asked = replace(asked, old=_old_name(asked, path))
    recipe = recipe_for(asked, path, out)
    reading_of(load_draft(path), where=str(path))  # refused here, before the rows are read
    train, held_out, _ = prepare_data(recipe)
    done = _refitted(asked, path, recipe, train, held_out, watch)
    if asked.steps:
        done = _trained(done, recipe, observer)
    write_json(out / RECORD_NAME, done.to_json())
    return done


def _beside(draft: Path) -> Path:
    """Beside the draft's run, whose recipe names the old target, and not inside it."""
    run = run_directory(draft) or draft
    return run.with_name(f"{run.name}-retargeted")


def _check_new(out: Path) -> None:
    check_place(out, directory=True)
    if out.is_dir() and any(out.iterdir()):
        raise BadInput("is there already", where=str(out), fix="name a new directory: --out")


# --- the recipe ---------------------------------------------------------------------------------


def recipe_for(asked: Asked, draft: Path, out: Path) -> Recipe:
    """The recipe that trains on from the refitted draft: its run's own, with other rows and the new
    target; without a run, the defaults of its method."""
    config, known = read_draft_config(draft), recipe_of(draft)
    target: dict[str, Any] = {
        "backend": "hf",
        "model": asked.target,
        "aux_layer_ids": loading.known_layers(draft),
        "trust_remote_code": asked.trust_remote_code,
    }
    if asked.dtype is not None:
        target["dtype"] = str(asked.dtype).removeprefix("torch.")
    changes: dict[str, dict[str, Any]] = {
        "target": target,
        "data": {"train": list(asked.data), "valid": [], "valid_rows": None},
        "draft": {"init_from": str(out / "refit")},
        "training": {"shard": 1, "context": 1, "extend": False},
        "run": {"output_dir": str(out), "name": None},
    }
    if asked.steps:
        changes["training"]["steps"] = asked.steps
    if asked.device is not None:
        changes["training"]["device"] = str(asked.device)
    if known is None:
        changes["objective"] = _objective(method_of(config), config)
    return as_recipe(known, changes)


def _objective(method: Method, config: Any) -> dict[str, Any]:
    """The section of a draft that belongs to no run: what its config says by the same names."""
    names = set(method.section.model_fields) - {"kind"}
    said = {name: getattr(config, name, None) for name in names}
    if "listened_layers" in names:
        said["listened_layers"] = config.num_aux_hidden_states
    known = {name: value for name, value in said.items() if value is not None}
    return {"kind": method.name, **known}


# --- the refit ----------------------------------------------------------------------------------


def _refitted(
    asked: Asked, path: Path, recipe: Recipe, train: RowView, held_out: RowView, watch: Watch
) -> Retargeted:
    """Write the refitted draft, and measure it."""
    if len(train) < 2 or not len(held_out):
        what = f"{len(train) + len(held_out)} rows are too few to fit, to choose and to measure on"
        raise BadInput(what, where="--data", fix="give at least 20; some hundreds are better")
    out = Path(recipe.run.output_dir)
    with ExitStack() as stack:
        watch("loading the targets", 0, 1)
        old, new = (
            stack.enter_context(_opened(asked, path, one, flag))
            for one, flag in ((asked.old, "--old"), (asked.target, "--target"))
        )
        _check_alike(path, old, new)
        draft = load_draft(path).to(new.get_input_embeddings().weight.device)
        targets, pad_id = Targets(old, new), getattr(new.tokenizer, "pad_token_id", None) or 0
        work = _Packs(_spread(train, asked.rows), recipe.packing.tokens, pad_id, watch)
        found = refit(
            draft, targets, fitted=work.of(judged=False), judged=work.of(judged=True),
            on_pack=work.step,
        )  # fmt: skip
        taken = take_tables(draft, targets)
        draft.save_pretrained(out / "refit")
        recipe.write_resolved(out)
        mark_best(out, out / "refit")
        watch("measuring", 0, 1)
        tokens, batches = trained_tokens(path), held_out_batches(held_out, recipe, pad_id)
        beside = ((old, path), (new, path), (new, out / "refit"))
        on_old, on_new, moved = (loading.load_draft_beside(*pair) for pair in beside)
        lengths = measure(targets, (on_old, on_new, moved), batches, num_draft_tokens=tokens)
    return Retargeted(
        directory=out, old=asked.old, target=asked.target, method=method_of(draft.config).title,
        rows=len(work.rows), tokens=int(work.rows.lengths.sum()), penalty=found.penalty,
        error_before=found.error_before, error=found.error, taken=tuple(taken),
        num_draft_tokens=tokens, held_out_rows=min(len(held_out), recipe.evaluation.rows),
        old_length=lengths.old.length, length_before=lengths.before.length,
        length_with_old_states=lengths.with_old_states.length, length=lengths.refitted.length,
    )  # fmt: skip


def _old_name(asked: Asked, path: Path) -> str:
    recipe = recipe_of(path)
    name = asked.old or (recipe.target.model if recipe is not None else None)
    if not name:
        what = "which target was it trained for? Its states are what the refit goes by"
        raise BadInput(what, where=str(path), fix=f"give --old MODEL; without it, {_TRAIN}")
    return name


def _opened(asked: Asked, path: Path, name: str, flag: str) -> "HFEagle3TargetModel":
    """A target as the draft hears it."""
    try:
        target = loading.load_target(
            path, name, dtype=asked.dtype, device=asked.device,
            trust_remote_code=asked.trust_remote_code,
        )  # fmt: skip
    except BadInput as error:
        if flag == "--old":
            raise BadInput(
                f"the old target: {error.what}", where=error.where or flag,
                fix=f"give --old MODEL where it is at hand; without it, {_TRAIN}",
            ) from error  # fmt: skip
        raise
    return loading.heard_by(target, path)


def _check_alike(path: Path, old: "HFEagle3TargetModel", new: "HFEagle3TargetModel") -> None:
    """Refuse two models of which one is not the other, changed."""
    for target, flag in ((old, "--old"), (new, "--target")):
        check_fits(target, load_draft(path), flag)
    infos, fix = (old.info(), new.info()), "it needs a draft of its own: fledge train"
    for what, sizes in (
        ("layers", [info.depth for info in infos]),
        ("tokens", [info.vocab_size for info in infos]),
    ):
        if sizes[0] != sizes[1]:
            complaint = f"the old and the new target have {what} {sizes[0]} and {sizes[1]}"
            raise BadInput(complaint, where="--target", fix=fix)
    # a directory without a tokenizer of its own takes the other's word for it
    known = [one.tokenizer.get_vocab() for one in (old, new) if one.tokenizer is not None]
    if len(known) == 2 and known[0] != known[1]:
        complaint = "the old and the new target have other tokens"
        raise BadInput(complaint, where="--target", fix=fix)


def _spread(rows: RowView, most: int) -> RowView:
    """At most so many of them, from all over."""
    count = min(len(rows), max(2, most))
    return RowView(rows, np.linspace(0, len(rows) - 1, count).astype(np.int64))


class _Packs:
    """The rows of a refit, pack by pack: never more than one in memory."""

    def __init__(self, rows: RowView, width: int, pad_id: int, watch: Watch) -> None:
        self.rows, self._width, self._pad_id, self._watch = rows, width, pad_id, watch
        every = np.arange(len(rows))
        self._parts = {
            judged: RowView(rows, every[(every % _JUDGED == 1) == judged])
            for judged in (False, True)
        }
        self._packings = {
            judged: pack_rows(part.lengths, width).packs for judged, part in self._parts.items()
        }
        self._done, self._total = 0, sum(map(len, self._packings.values()))

    def of(self, *, judged: bool) -> "Iterator[TokenBatch]":
        for pack in self._packings[judged]:
            yield collate(self._parts[judged], [pack], self._width, self._pad_id)

    def step(self) -> None:
        self._done += 1
        self._watch("refitting", self._done, self._total)


# --- the steps ----------------------------------------------------------------------------------


def _trained(done: Retargeted, recipe: Recipe, observer: Observer) -> Retargeted:
    """Train on, as any run; `best` stays the refitted draft where that is the better one."""
    outcome = fit_recipe(recipe, observer)
    if outcome.signal:  # it had to wait until the run was saved
        signal.raise_signal(outcome.signal)
    length = outcome.state.best_length
    if length < done.length:
        mark_best(done.directory, done.directory / "refit")
    return replace(done, steps=outcome.state.step, trained_length=length)
