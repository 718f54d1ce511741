"""Packages that are called: `fledge.train(recipe)` is a function, `fledge.train` is a room.

`import fledge.train.fit`, anywhere, makes the attribute `train` of fledge the package, whatever it
was before. So there is one object for both: the package itself, which passes a call on to the
function. The function's module is imported at the first call; until then the package is as light as
an empty one. Type checkers see the functions (`fledge/__init__.py` declares them).
"""

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    _called: str  # module:name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:  # what help() and notebooks show
        return signature(self._function())

    def _function(self) -> Callable[..., Any]:
        module, _, name = self._called.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function


def make_callable(package: str, function: str) -> None:
    """Let a call of `package` call `function`, which is written `module:name`."""
    module = sys.modules[package]
    module.__class__ = _CallablePackage
    vars(module)["_called"] = function
