"""`stitch`: a copy of a target whose files contain a tuned head. Whatever does not change is a hard
link to the target's own file."""

import os
import shutil
from pathlib import Path

from safetensors import safe_open

from fledge.core.errors import BadInput
from fledge.core.files import atomic_directory, save_tensors
from fledge.core.reading import load_tensors
from fledge.methods.mtp.checkpoint import depth_of, head_tensors, own_name
from fledge.methods.mtp.draft import MtpDraftModel
from fledge.methods.registry import load_draft
from fledge.models.weight_files import weight_files
from fledge.training.runs import draft_directory


def stitch(source: Path, target: Path, out: Path) -> list[str]:
    """Write the head of `source` (a run or a draft) into a copy of the target's files at `out`;
    returns the names of the files that are not links. The target must have such a head already:
    only the values of its tensors change, in their own precision."""
    draft = load_draft(draft_directory(source))
    if not isinstance(draft, MtpDraftModel):
        raise BadInput("not a native head", where=str(source), fix="fledge export")
    if out.exists():
        raise BadInput("exists already", where=str(out), fix="name a new directory for --out")
    family, layers = draft.spec.family, depth_of(draft.config)
    changed = []
    for path in weight_files(target):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as handle:
                names = [*handle.keys()]
            if any(own_name(name, family, layers) for name in names):
                changed.append(path)
    if not changed:
        what = f"no head of {family.title} among the target's weights"
        raise BadInput(what, where=str(target), fix="fledge export writes a head of its own")
    with atomic_directory(out) as directory:
        for entry in sorted(target.iterdir()):
            if entry.is_file() and entry not in changed:
                _link(entry.resolve(), directory / entry.name)
        for path in changed:
            tensors = load_tensors(path)
            new = head_tensors(draft.state_dict(), tensors, family, layers)
            if wrong := [name for name in new if new[name].shape != tensors[name].shape]:
                raise BadInput(f"{wrong[0]}: another shape than the draft's", where=str(path))
            tensors |= {name: t.to(tensors[name].dtype).contiguous() for name, t in new.items()}
            save_tensors(directory / path.name, tensors, {"format": "pt"})
    return [path.name for path in changed]


def _link(source: Path, destination: Path) -> None:
    """A hard link, or a copy where the disks differ."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)
