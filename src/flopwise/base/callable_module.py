"""Packages that are called like the function of their name: `flopwise.predict(…)` beside `flopwise.predict.step`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType


class CallableModule(ModuleType):
    """`flopwise.NAME`, which calls `flopwise.door.NAME`; type checkers see that function alone."""

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return _function(self)(*arguments, **keywords)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        # What `help` and notebooks show: of the function that people call, not of the package.
        return _function(self).__doc__

    @property
    def __signature__(self) -> Signature:
        return signature(_function(self))


def _function(module: ModuleType) -> Callable[..., object]:
    # Found when it is called: the door is above all rooms, and whatever was imported first must not matter.
    found: Callable[..., object] = getattr(import_module("flopwise.door"), module.__name__.rpartition(".")[2])
    return found


def make_callable(name: str) -> None:
    """Let the package of this name, which is being imported, be called."""
    sys.modules[name].__class__ = CallableModule
