"""`fledge retarget`: adapts a draft to its target after that was fine-tuned or quantized.

The draft's input map is refitted in closed form (`refit.py`); then it may be trained for some
steps, like any draft that starts from another. The output is an ordinary run:

    OUT/refit          the refitted draft
    OUT/recipe.yaml    a recipe that continues from there, with the new target
    OUT/best           the better of the refitted and the trained draft
    OUT/retarget.json  the figures

A tenth of the rows is held out, by the recipe's rule, and all lengths are measured on it.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fledge.core.errors import BadInput
from fledge.core.files import check_place, write_json
from fledge.core.progress import Watch, unwatched
from fledge.core.rows import TokenBatch
from fledge.data.pack import collate, pack_rows
from fledge.data.rows import RowView
from fledge.measure.evaluation import check_fits
from fledge.methods.registry import load_draft, method_of
from fledge.methods.shared.files import read_draft_config
from fledge.recipe.schema import Recipe, as_recipe
from fledge.training import runs
from fledge.training.checkpoint import mark_best
from fledge.training.fit import fit_recipe
from fledge.training.refit import Targets, measure, reading_of, refit, take_tables
from fledge.training.runs import draft_directory, recipe_of, run_directory, trained_tokens
from fledge.training.session import Observer
from fledge.training.setup import held_out_batches, prepare_data

if TYPE_CHECKING:
    import torch

    from fledge.target.hf.model import HFEagle3TargetModel

RECORD_NAME = "retarget.json"
_TRAIN = "train on: fledge train target.model=NEW draft.init_from=DRAFT data.train=ROWS"
_JUDGED = 5  # every fifth row is used to choose the penalty before it is fitted, too


@dataclass(frozen=True)
class Asked:
    """The options of `fledge retarget`."""

    draft: Path  # or a run
    target: str  # the new target
    data: Sequence[str]
    old: str = ""  # the old target; '': the one that the draft's run names
    steps: int = 0  # training steps after the refit
    out: Path | None = None  # None: beside the draft's run
    rows: int = 2000  # maximum number of rows for the refit
    dtype: "torch.dtype | str | None" = None
    device: "torch.device | str | None" = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Retargeted:
    """The result of `retarget`. Lengths are tokens per round on held-out rows, by replay."""

    directory: Path
    old: str
    target: str
    method: str
    rows: int  # number of fitted rows
    tokens: int
    penalty: float | None  # of the ridge regression; None: the map was left unchanged
    error_before: float  # relative error of the map's output on the new target's states
    error: float  # the same after the refit; both on rows that were not fitted
    taken: tuple[str, ...]  # tables that were replaced by the new target's
    kept: tuple[str, ...]  # tables that were not: the new target's are in another basis
    num_draft_tokens: int
    held_out_rows: int
    old_length: float  # with the old target
    length_before: float  # with the new target, before the refit
    length_with_old_states: float  # if the new target had the old states: see `refit.Lengths`
    length: float  # with the new target, after the refit
    steps: int = 0
    trained_length: float | None = None  # after training

    def share(self, length: float) -> float | None:
        """Share of the loss due to the new states that a length recovers; None if no loss."""
        lost = self.length_with_old_states - self.length_before
        return (length - self.length_before) / lost if lost > 0 else None

    def to_json(self) -> dict[str, Any]:
        recovered = self.share(self.length)
        return {**asdict(self), "directory": str(self.directory), "recovered": recovered}


def retarget(asked: Asked, observer: Observer, watch: Watch = unwatched) -> Retargeted:
    """Refit, train if steps are requested, and write a run; nothing is written before the refit."""
    path = draft_directory(asked.draft)
    # Beside the draft's run, not inside it, because that run's recipe names the old target.
    run = run_directory(path) or path
    out = asked.out or run.with_name(f"{run.name}-retargeted")
    check_place(out, directory=True)
    if out.is_dir() and any(out.iterdir()):
        raise BadInput("already exists", where=str(out), fix="name a new directory: --out")
    recipe_before = recipe_of(path)
    old = asked.old or (recipe_before.target.model if recipe_before is not None else None)
    if not old:
        what = "which target was it trained for? The refit needs that target's states"
        raise BadInput(what, where=str(path), fix=f"give --old MODEL; without it, {_TRAIN}")
    recipe = recipe_for(asked, path, out)
    reading_of(load_draft(path), where=str(path))  # fails before the rows are read
    result = _refit_and_measure(replace(asked, old=old), path, recipe, watch)
    if asked.steps:
        outcome = fit_recipe(recipe, observer)
        if outcome.signal:  # deferred until the run was saved
            signal.raise_signal(outcome.signal)
        length = outcome.state.best_length
        if length < result.length:  # `best` stays the refitted draft if that is the better one
            mark_best(out, out / "refit")
        result = replace(result, steps=outcome.state.step, trained_length=length)
    write_json(out / RECORD_NAME, result.to_json())
    return result


def recipe_for(asked: Asked, draft: Path, out: Path) -> Recipe:
    """The recipe that continues from the refitted draft: that of its run with other rows and the
    new target, or its method's defaults if it belongs to no run."""
    run_recipe = recipe_of(draft)
    changes: dict[str, dict[str, Any]] = {
        "target": {
            "backend": "hf",
            "model": asked.target,
            "aux_layer_ids": runs.known_layers(draft),
            "trust_remote_code": asked.trust_remote_code,
        },
        "data": {"train": list(asked.data), "valid": [], "valid_rows": None},
        "draft": {"init_from": str(out / "refit")},
        "training": {"shard": 1, "context": 1},
        "run": {"output_dir": str(out), "name": None},
    }
    if asked.dtype is not None:
        changes["target"]["dtype"] = str(asked.dtype).removeprefix("torch.")
    if asked.steps:
        changes["training"]["steps"] = asked.steps
    if asked.device is not None:
        changes["training"]["device"] = str(asked.device)
    if run_recipe is None:  # the draft's config has values for fields of the same names
        config = read_draft_config(draft)
        method = method_of(config)
        names = set(method.section.model_fields) - {"kind"}
        values = {name: getattr(config, name, None) for name in names}
        if "listened_layers" in names:
            values["listened_layers"] = config.num_aux_hidden_states
        present = {name: value for name, value in values.items() if value is not None}
        changes["objective"] = {"kind": method.name, **present}
    return as_recipe(run_recipe, changes)


def _refit_and_measure(asked: Asked, path: Path, recipe: Recipe, watch: Watch) -> Retargeted:
    """Refit the draft, write it, and measure it."""
    rows, held_out, _ = prepare_data(recipe)
    if len(rows) < 2 or not len(held_out):
        what = f"{len(rows) + len(held_out)} rows are too few to fit, to choose and to measure on"
        raise BadInput(what, where="--data", fix="give at least 20; some hundreds are better")
    count = min(len(rows), max(2, asked.rows))  # evenly spread over all of them
    rows = RowView(rows, np.linspace(0, len(rows) - 1, count).astype(np.int64))
    out = Path(recipe.run.output_dir)
    with ExitStack() as stack:
        watch("loading the targets", 0, 1)
        old = stack.enter_context(_open_target(asked, path, "--old"))
        new = stack.enter_context(_open_target(asked, path, "--target"))
        _check_alike(path, old, new)
        draft = load_draft(path).to(new.get_input_embeddings().weight.device)
        targets, pad_id = Targets(old, new), getattr(new.tokenizer, "pad_token_id", None) or 0
        judged = np.arange(len(rows)) % _JUDGED == 1
        parts = [RowView(rows, np.flatnonzero(judged == side)) for side in (False, True)]
        packings = [pack_rows(part.lengths, recipe.packing.tokens).packs for part in parts]
        total = sum(map(len, packings))

        def batches(side: int) -> Iterator[TokenBatch]:
            """One pack at a time is in memory."""
            for done, pack in enumerate(packings[side], len(packings[0]) * side):
                watch("refitting", done, total)
                yield collate(parts[side], [pack], recipe.packing.tokens, pad_id)

        fit = refit(draft, targets, fitted=batches(0), judged=batches(1))
        tables = take_tables(draft, targets)
        draft.save_pretrained(out / "refit")
        recipe.write_resolved(out)
        mark_best(out, out / "refit")
        pairs = ((old, path), (new, path), (new, out / "refit"))
        for_old, for_new, refitted = (runs.load_draft_beside(*pair) for pair in pairs)
        tokens = trained_tokens(path)
        watch("measuring", 0, 1)
        lengths = measure(
            targets, (for_old, for_new, refitted), held_out_batches(held_out, recipe, pad_id),
            num_draft_tokens=tokens,
        )  # fmt: skip
    return Retargeted(
        directory=out, old=asked.old, target=asked.target, method=method_of(draft.config).title,
        rows=len(rows), tokens=int(rows.lengths.sum()), penalty=fit.penalty,
        error_before=fit.error_before, error=fit.error, taken=tables.taken, kept=tables.kept,
        num_draft_tokens=tokens, held_out_rows=min(len(held_out), recipe.evaluation.rows),
        old_length=lengths.old.length, length_before=lengths.before.length,
        length_with_old_states=lengths.with_old_states.length, length=lengths.refitted.length,
    )  # fmt: skip


def _open_target(asked: Asked, path: Path, flag: str) -> "HFEagle3TargetModel":
    """Load the old or the new target with the draft's aux layers."""
    name = asked.old if flag == "--old" else asked.target
    try:
        target = runs.load_target(
            path, name, dtype=asked.dtype, device=asked.device,
            trust_remote_code=asked.trust_remote_code,
        )  # fmt: skip
    except BadInput as error:
        if flag != "--old":
            raise
        fix = f"give --old MODEL if you have it; without it, {_TRAIN}"
        where = error.where or flag
        raise BadInput(f"the old target: {error.what}", where=where, fix=fix) from error
    return runs.with_layers_of(target, path)


def _check_alike(path: Path, old: "HFEagle3TargetModel", new: "HFEagle3TargetModel") -> None:
    """Raise BadInput unless one model can be a changed version of the other."""
    for target, flag in ((old, "--old"), (new, "--target")):
        check_fits(target, load_draft(path), flag)
    before, after, complaint = old.info(), new.info(), ""
    for what, sizes in (
        ("layers", (before.depth, after.depth)),
        ("tokens", (before.vocab_size, after.vocab_size)),
    ):
        if sizes[0] != sizes[1]:
            complaint = f"have {what} {sizes[0]} and {sizes[1]}"
    # A target without a tokenizer of its own is assumed to have the other's.
    tokenizers = [target.tokenizer for target in (old, new) if target.tokenizer is not None]
    if len(tokenizers) == 2 and tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        complaint = complaint or "have different tokens"
    if complaint:
        fix = "it needs a draft of its own: fledge train"
        raise BadInput(f"the old and the new target {complaint}", where="--target", fix=fix)
