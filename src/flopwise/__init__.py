"""flopwise: how fast can this model train on this hardware, will it fit, and where does the time go?

From Python:

    from flopwise import hardware, model, predict

    predict.step(predict.Setup(model=model("llama-3-8b"), hardware=hardware("h200")))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flopwise import plan, predict, train
    from flopwise.base.errors import FlopwiseError
    from flopwise.catalog.load import load_model as model
    from flopwise.profile.measure.this_machine import find_hardware as hardware

__version__ = "0.1.0"
__all__ = ["FlopwiseError", "__version__", "hardware", "model", "plan", "predict", "train"]


def __getattr__(name: str) -> object:
    """Import on first use, so that `flopwise --help` does not read what it does not need."""
    import importlib

    places = {
        "FlopwiseError": ("flopwise.base.errors", "FlopwiseError"),
        "hardware": ("flopwise.profile.measure.this_machine", "find_hardware"),
        "model": ("flopwise.catalog.load", "load_model"),
    }
    if name in ("plan", "predict", "train"):
        return importlib.import_module(f"flopwise.{name}")
    if name in places:
        module, attribute = places[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'flopwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
