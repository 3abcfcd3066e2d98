"""Copied as `sitecustomize.py` into a folder of its own, so that Python runs it at the start of a profiled program.

Waits for the program to import torch, then hands over to `flopwise.profile.hook`; does nothing where it never does.
Standard library alone: the program may run in an environment without flopwise.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VARIABLE = "FLOPWISE_PROFILE"
"""Holds the settings as JSON; without it nothing happens."""


class TorchFinder:
    """Finds torch where everybody else does, and is told when it is imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None but for torch. Programs also ask only whether torch is there, so this may be called many times."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                # Each search makes a fresh loader: the change ends with it.
                execute = functools.partial(self._execute, spec.loader.exec_module)
                spec.loader.exec_module = execute  # type: ignore[method-assign]
                return spec
        return None

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()


def begin(settings: str) -> None:
    """Hand over to the hook now or when torch is imported."""
    then = functools.partial(hand_over, settings)
    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, TorchFinder(then))


def hand_over(settings: str) -> None:
    """Torch is imported: watch its steps. Whatever goes wrong, the program goes on."""
    import json

    try:
        chosen = json.loads(settings)
        if "flopwise" not in sys.modules:
            _load_package(chosen["package"])
        importlib.import_module("flopwise.profile.hook").install(chosen)
    except Exception as error:  # noqa: BLE001,RUF100 - never the program's problem
        sys.stderr.write(f"flopwise: this program is not profiled: {type(error).__name__}: {error}\n")


def _load_package(folder: str) -> None:
    """By its place, so that nothing else that lies beside it can be imported."""
    place = os.path.join(folder, "__init__.py")  # noqa: PTH118 - pathlib would be one more import for every program
    spec = importlib.util.spec_from_file_location("flopwise", place, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no package in {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["flopwise"] = module
    spec.loader.exec_module(module)


def step_aside(folder: str) -> None:
    """Leave the path as if this had never been on it, and run the `sitecustomize` that it stood in front of."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    _settings = os.environ.get(VARIABLE)
    if _settings:
        begin(_settings)
    step_aside(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100,PTH120
