"""Lets SGLang be imported on a machine without a GPU. Test side only: never part of the package.

SGLang imports `sgl_kernel` (its CUDA kernels) and `torchvision` (image preprocessing)
unconditionally, and neither has a build for CPU torch. Code that runs on a CPU calls neither, so
stub modules suffice in which every name exists and none can be called. They come last in the import
order (a real package wins) and are visible to SGLang alone: transformers must still find that there
is no torchvision. Python imports a file of this name at startup, also in the engine's child
processes, when its directory is on PYTHONPATH.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

ABSENT = ("sgl_kernel", "torchvision")


class Missing:
    """A name in an absent package: it can be read and passed around, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> "Missing":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} does not exist on this machine (CPU stub)")


class AbsentModule(types.ModuleType):
    def __getattr__(self, attribute: str) -> Missing:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{self.__name__}.{attribute}")


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages and everything below them, when no other finder does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ABSENT or not _imported_by_sglang():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: attributes are created on access."""


def _imported_by_sglang() -> bool:
    """Whether the import statement that led here is in SGLang's code."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        (__name__, "importlib", "_frozen_importlib")
    ):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("sglang.")


os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # how SGLang decides that it is on a CPU
sys.meta_path.append(AbsentPackages())
