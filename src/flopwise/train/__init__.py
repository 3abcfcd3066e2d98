"""From a model's name to a trained model: data, plan, executor and run folder put together.

import flopwise as fw

record = fw.train("llama-3-1b", data="corpus/", steps=100)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flopwise.base.callable_module import make_callable
from flopwise.base.processes import let_threads_sleep

if TYPE_CHECKING:
    from flopwise.train.events import Callback, Started
    from flopwise.train.request import TrainRequest
    from flopwise.train.running import run

__all__ = ["Callback", "Started", "TrainRequest", "run"]

make_callable(__name__)


def __getattr__(name: str) -> object:
    """Import on first use: torch takes a second."""
    import importlib

    places = {"Callback": "events", "Started": "events", "TrainRequest": "request", "run": "running"}
    if name in places:
        let_threads_sleep()
        try:
            return getattr(importlib.import_module(f"flopwise.train.{places[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "safetensors"):
                raise
            from flopwise.base.errors import FlopwiseError

            raise FlopwiseError(f"training needs {error.name}", hint="pip install 'flopwise[train]'") from None
    raise AttributeError(f"module 'flopwise.train' has no attribute {name!r}")
