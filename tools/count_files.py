"""Count what a reader has to open: the files of fledge whose code runs, and how they hang together.

    python tools/count_files.py step [METHOD]    # one training step on a tiny target
    python tools/count_files.py export RUN       # one export for vLLM

A change of folder is a pair of folders between which a file that runs imports another one; imports
for type checkers do not run.
"""

import ast
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fledge

SRC = Path(fledge.__file__).parent


def files_run(work: Callable[[], object]) -> set[Path]:
    """The files of fledge in which a function is called, in this thread."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {Path(file) for file in files if Path(file).is_relative_to(SRC)}


def changes_of_folder(files: set[Path]) -> set[tuple[str, str]]:
    modules = {".".join(("fledge", *p.relative_to(SRC).with_suffix("").parts)): p for p in files}
    pairs = set()
    for file in files:
        tree = ast.parse(file.read_text())
        tree.body = [node for node in tree.body if not _is_for_types(node)]
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            pairs |= {(file.parent, modules[name].parent) for name in names if name in modules}
    return {(str(a), str(b)) for a, b in pairs if a != b}


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def step(method: str = "eagle3") -> set[Path]:
    import torch

    from fledge.bench.train_step import Case, build_batches, build_parts
    from fledge.training.step import train_step

    case = Case(shape="tiny", kind=method, seq=64)
    parts, batches = build_parts(case, torch.device("cpu")), build_batches(case, 2)
    train_step(parts, batches[0], lr=1e-3)  # what only the first step does is not counted
    return files_run(lambda: train_step(parts, batches[1], lr=1e-3))


def export(run: str) -> set[Path]:
    with tempfile.TemporaryDirectory() as place:
        fledge.export(run, engine="vllm", out=Path(place) / "first")  # what runs on import only
        return files_run(lambda: fledge.export(run, engine="vllm", out=Path(place) / "export"))


def main() -> None:
    what, *arguments = sys.argv[1:]
    files = {"step": step, "export": export}[what](*arguments)
    for file in sorted(files):
        print(file.relative_to(SRC))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    print(f"{len(files)} files, {lines} lines, {len(changes_of_folder(files))} changes of folder")


if __name__ == "__main__":
    main()
