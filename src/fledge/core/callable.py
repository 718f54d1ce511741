"""Callable packages: `fledge.train(recipe)` is a function call, `fledge.train` is a package.

`import fledge.train.fit`, anywhere, sets the attribute `train` of fledge to the package, whatever
it was before. So one object serves as both: the package itself, which forwards calls to the
function. The function's module is imported at the first call; until then the package costs no more
than an empty one. Type checkers see the functions (`fledge/__init__.py` declares them).
"""

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    _target: str  # the function to call, as module:name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:  # what help() and notebooks show
        return signature(self._function())

    def _function(self) -> Callable[..., Any]:
        module, _, name = self._target.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function


def make_callable(package: str, function: str) -> None:
    """Make calls of `package` call `function`, given as `module:name`."""
    module = sys.modules[package]
    module.__class__ = _CallablePackage
    vars(module)["_target"] = function
