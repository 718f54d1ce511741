"""Checkpoints: written atomically, verified when read, and loadable as drafts.

    run/
      checkpoints/step-00000500/   config.json, model.safetensors   the draft itself
                                   training.safetensors             moments, guard, sums
                                   state.json                       step, fingerprints, checksums
      best -> checkpoints/step-... the checkpoint with the best measured acceptance

`state.json` holds a checksum of every other file. A checkpoint that does not match its checksums is
skipped with a message, and the one before it is used.
"""

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.files import fsync_path, save_tensors, write_json
from fledge.core.reading import (
    MapOf,
    Table,
    Text,
    Whole,
    check,
    load_tensors,
    read_json,
)
from fledge.data.tokenise import checksum
from fledge.methods.shared.files import CONFIG_NAME, WEIGHTS_NAME
from fledge.training.optimizer import state_like
from fledge.training.sharding import sharded_like

TRAINING_NAME = "training.safetensors"
STATE_NAME = "state.json"
STEPS = "steps"  # key in state.json: the run's planned length when the checkpoint was saved
PACKS = "packs_per_step"  # key in state.json: packs per step over all ranks
_LINK = ".best.tmp"  # temporary name of the `best` link
_NEEDED = (CONFIG_NAME, WEIGHTS_NAME, TRAINING_NAME)
_STATE = Table({"step": Whole()})  # of any trained draft
_CHECKPOINT = Table({"fingerprints": MapOf(Text()), "checksums": MapOf(Whole())})


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found intact."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def finished(self) -> bool:
        """Whether it is its run's last checkpoint and was evaluated."""
        last = self.state.get("last") or {"step": self.step}  # no held-out rows: never evaluated
        return bool(self.state.get(STEPS) == self.step == last["step"])

    def tensors(self) -> dict[str, Tensor]:
        """The training state beside the draft."""
        return load_tensors(self.path / TRAINING_NAME)

    def draft_tensors(self) -> dict[str, Tensor]:
        return load_tensors(self.path / WEIGHTS_NAME)


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def complete(directory: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Add the training state to a directory that holds the draft, so that a run can resume exactly;
    the caller then renames the directory to its final name."""
    host_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_tensors(directory / TRAINING_NAME, host_tensors)
    sums = {file.name: checksum(file) for file in sorted(directory.iterdir())}
    write_json(directory / STATE_NAME, {**state, "checksums": sums})


def read_state(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint's state.json: step, acceptance, fingerprints."""
    what = "the checkpoint's state"
    state: dict[str, Any] = read_json(path / STATE_NAME, _STATE, what=what)
    return state


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint; raises BadInput if anything is wrong with it."""
    state = read_state(path)
    check(state, _CHECKPOINT, where=str(path / STATE_NAME), what="the checkpoint's state")
    sums = state["checksums"]
    if missing := [name for name in _NEEDED if name not in sums]:
        raise BadInput(f"not a whole checkpoint: no {missing[0]} in it", where=str(path))
    files = ((path / name, crc) for name, crc in sums.items())
    if wrong := [f.name for f, crc in files if not f.is_file() or checksum(f) != crc]:
        raise BadInput(f"damaged: {', '.join(wrong)}", where=str(path))
    return Checkpoint(path, state)


def matching(
    tensors: Mapping[str, Tensor], want: Mapping[str, Tensor], *, prefix: str = ""
) -> dict[str, Tensor]:
    """The checkpoint's tensors for the names in `want`; raises BadInput if one is missing or
    differs from the wanted one in shape or dtype."""
    matched = {}
    for name, wanted in want.items():
        saved = tensors.get(f"{prefix}{name}")
        if saved is None or saved.shape != wanted.shape or saved.dtype != wanted.dtype:
            actual = "missing" if saved is None else f"{saved.dtype} {list(saved.shape)}"
            what = f"{prefix}{name} is {actual}, expected {wanted.dtype} {list(wanted.shape)}"
            raise BadInput(what, where="the newest checkpoint", fix="remove it")
        matched[name] = saved
    return matched


def newest_checkpoint(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint, and what was wrong with newer ones."""
    complaints: list[str] = []
    for path in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        try:
            return read_checkpoint(path), complaints
        except BadInput as error:
            complaints.append(str(error))
    return None, complaints


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint, intact or not; 0 if there is none."""
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    return int(max(names, default="step-0").removeprefix("step-"))


def best_step(run: Path) -> int | None:
    """The step that `best` points to; None if there is no valid link."""
    link = run / "best"
    match = re.fullmatch(r"step-(\d{1,12})", link.readlink().name) if link.is_symlink() else None
    return None if match is None else int(match[1])


def mark_best(run: Path, path: Path) -> None:
    """Point `best` to a checkpoint, atomically."""
    temporary = run / _LINK
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(path, run))
    temporary.replace(run / "best")
    fsync_path(run)


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best, and leftovers of killed saves."""
    root = run / "checkpoints"
    checkpoints = sorted(root.glob("step-*"))
    best = best_step(run)
    for path in checkpoints[:-keep]:
        if best is None or path != checkpoint_path(run, best):
            doomed = path.with_name(f".{path.name}.old")  # removal takes time, renaming is atomic
            path.replace(doomed)
            shutil.rmtree(doomed)
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    (run / _LINK).unlink(missing_ok=True)


def finish_save(run: Path, best: int, *, keep: int | None) -> None:
    """Finish what a process left undone if it was killed right after writing its last checkpoint.
    `best`: the best step, as recorded in that checkpoint."""
    path = checkpoint_path(run, best)
    if best_step(run) != best and path.is_dir():
        mark_best(run, path)
    if keep is not None:
        prune(run, keep)


def optimizer_tensors(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str]
) -> dict[str, Tensor]:
    """Moments and step counts by parameter name; `names` maps id(parameter) to its name."""
    return {
        f"optimizer.{names[id(parameter)]}.{key}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> None:
    """Restore an optimizer's state. A parameter that has not had a gradient yet has none; otherwise
    its state must be complete."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            prefix = f"optimizer.{names[id(parameter)]}."
            like = state_like(optimizer, parameter)
            has_state = any(f"{prefix}{name}" in tensors for name in like)
            state = matching(tensors, like, prefix=prefix) if has_state else {}
            optimizer.state[parameter] = {
                name: sharded_like(tensor, like[name]).to(parameter.device)
                for name, tensor in state.items()
            }
