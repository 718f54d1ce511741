"""`fledge retarget`: adapts a draft to its target after that was fine-tuned or quantized.

The draft's input map is refitted in closed form (`refit.py`). The output is a draft that every
command accepts:

    OUT/config.json, OUT/model.safetensors   the refitted draft
    OUT/recipe.yaml                          a recipe that trains it further, on the new target
    OUT/retarget.json                        the figures

A tenth of the rows is held out, by the recipe's rule, and all lengths are measured on it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fledge.core.errors import BadInput
from fledge.core.files import atomic_directory, check_place, write_json
from fledge.core.progress import Watch, unwatched
from fledge.core.rows import TokenBatch
from fledge.data.pack import collate, pack_rows
from fledge.data.rows import RowView
from fledge.measure.evaluation import check_fits
from fledge.methods.registry import load_draft, method_of
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.files import read_draft_config
from fledge.recipe.schema import Recipe, as_recipe
from fledge.training import runs
from fledge.training.refit import (
    Fitted,
    Targets,
    acceptance_length,
    reading_of,
    refit,
    take_tables,
)
from fledge.training.setup import held_out_batches, prepare_data

if TYPE_CHECKING:
    import torch

    from fledge.target.hf.model import HFEagle3TargetModel

RECORD_NAME = "retarget.json"
_TRAIN = "train on: fledge train target.model=NEW draft.init_from=DRAFT data.train=ROWS"
_MOST_ROWS = 2000  # for the refit; the map has far fewer inputs than these rows have tokens
_JUDGED = 5  # every fifth row is used to choose the penalty before it is fitted, too


@dataclass(frozen=True)
class Retargeted:
    """The result of `retarget`. Lengths are tokens per round on held-out rows, by replay."""

    directory: str
    old: str
    target: str
    method: str
    rows: int  # number of fitted rows
    tokens: int
    penalty: float | None  # of the ridge regression; None: the map was left unchanged
    error_before: float  # relative error of the map's output on the new target's states
    error: float  # the same after the refit; both on rows that were not fitted
    taken: tuple[str, ...]  # tables that were replaced by the new target's
    num_draft_tokens: int
    held_out_rows: int
    old_length: float  # with the old target
    length_before: float  # with the new target, before the refit
    length: float  # with the new target, after the refit


def retarget(
    draft: Path,  # or a run
    target: str,  # the new target
    data: Sequence[str],
    *,
    old: str = "",  # '': the one that the draft's run names
    out: Path | None = None,  # None: beside the draft's run
    device: "torch.device | str | None" = None,
    trust_remote_code: bool = False,
    watch: Watch = unwatched,
) -> Retargeted:
    """Refit a draft to a changed target; nothing is written before it has been measured."""
    path = runs.draft_directory(draft)
    # Beside the draft's run, not inside it, because that run's recipe names the old target.
    run = runs.run_directory(path) or path
    out = out or run.with_name(f"{run.name}-retargeted")
    check_place(out, directory=True)
    if out.is_dir() and any(out.iterdir()):
        raise BadInput("already exists", where=str(out), fix="name a new directory: --out")
    recipe_before = runs.recipe_of(path)
    old = old or (recipe_before.target.model if recipe_before is not None else None) or ""
    if not old:
        what = "which target was it trained for? The refit needs that target's states"
        raise BadInput(what, where=str(path), fix=f"give --old MODEL; without it, {_TRAIN}")
    recipe = recipe_for(path, target, data, out, trust_remote_code=trust_remote_code)
    reading_of(load_draft(path), where=str(path))  # fails before the rows are read
    rows, held_out = _rows(recipe)
    with ExitStack() as stack:

        def opened(name: str) -> "HFEagle3TargetModel":
            loaded = runs.load_target(
                path, name, device=device, trust_remote_code=trust_remote_code
            )
            return runs.with_layers_of(stack.enter_context(loaded), path)

        watch("loading the targets", 0, 1)
        targets = Targets(opened(old), opened(target))
        refitted = load_draft(path).to(targets.new.get_input_embeddings().weight.device)
        _check_alike(refitted, targets)
        fit = _refit(refitted, targets, rows, recipe.packing.tokens, watch)
        taken = take_tables(refitted, targets)
        packs, depth = held_out_batches(held_out, recipe, pad_id=0), runs.trained_tokens(path)
        with atomic_directory(out) as directory:
            refitted.write(directory)
            watch("measuring", 0, 1)
            pairs = (targets.old, path), (targets.new, path), (targets.new, directory)
            old_length, before, after = (  # on the files
                acceptance_length(runs.load_draft_beside(side, files), side, packs, depth)
                for side, files in pairs
            )
            result = Retargeted(
                directory=str(out), old=old, target=target, method=method_of(refitted.config).title,
                rows=len(rows), tokens=int(rows.lengths.sum()), penalty=fit.penalty,
                error_before=fit.error_before, error=fit.error, taken=taken,
                num_draft_tokens=depth, held_out_rows=min(len(held_out), recipe.evaluation.rows),
                old_length=old_length, length_before=before, length=after,
            )  # fmt: skip
            recipe.write_resolved(directory)
            write_json(directory / RECORD_NAME, asdict(result))
    return result


def recipe_for(
    draft: Path, target: str, data: Sequence[str], out: Path, *, trust_remote_code: bool = False
) -> Recipe:
    """The recipe that trains the refitted draft further: that of its run with other rows and the
    new target, or its method's defaults if it belongs to no run."""
    run_recipe = runs.recipe_of(draft)
    changes: dict[str, dict[str, Any]] = {
        "target": {
            "backend": "hf",
            "model": target,
            "aux_layer_ids": runs.known_layers(draft),
            "trust_remote_code": trust_remote_code,
        },
        "data": {"train": list(data), "valid": [], "valid_rows": None},
        "draft": {"init_from": str(out)},
        "training": {"shard": 1, "context": 1},
        "run": {"output_dir": f"{out}-trained", "name": None},
    }
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


def _rows(recipe: Recipe) -> tuple[RowView, RowView]:
    """(rows to fit, evenly spread over all of them; held-out rows)."""
    rows, held_out, _ = prepare_data(recipe)
    if len(rows) < 2 or not len(held_out):
        what = f"{len(rows) + len(held_out)} rows are too few to fit, to choose and to measure on"
        raise BadInput(what, where="--data", fix="give at least 20; some hundreds are better")
    count = min(len(rows), _MOST_ROWS)
    return RowView(rows, np.linspace(0, len(rows) - 1, count).astype(np.int64)), held_out


def _refit(draft: DraftModel, targets: Targets, rows: RowView, budget: int, watch: Watch) -> Fitted:
    """Refit a draft in place; every fifth row is kept to choose the penalty."""
    judged = np.arange(len(rows)) % _JUDGED == 1
    parts = [RowView(rows, np.flatnonzero(judged == side)) for side in (False, True)]
    packings = [pack_rows(part.lengths, budget).packs for part in parts]

    def batches(side: int) -> Iterator[TokenBatch]:
        """One pack at a time is in memory."""
        for done, pack in enumerate(packings[side], len(packings[0]) * side):
            watch("refitting", done, sum(map(len, packings)))
            yield collate(parts[side], [pack], budget, pad_id=0)

    return refit(draft, targets, fitted=batches(0), judged=batches(1))


def _check_alike(draft: DraftModel, targets: Targets) -> None:
    """Raise BadInput unless the draft fits both targets, and they have the same shape."""
    for target, flag in zip(targets, ("--old", "--target"), strict=True):
        check_fits(target, draft, flag)
    before, after = targets.old.info(), targets.new.info()
    for what in ("depth", "vocab_size"):
        if getattr(before, what) != getattr(after, what):
            sizes = f"{what} of {getattr(before, what)} and {getattr(after, what)}"
            fix = "it needs a draft of its own: fledge train"
            raise BadInput(f"the old and the new target have a {sizes}", where="--target", fix=fix)
