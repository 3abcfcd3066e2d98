"""flopwise: how fast can this model train on this hardware, will it fit, and where does the time go?

From Python:

    from flopwise import hardware, model, predict

    predict.step(model("llama-3-8b"), hardware("h200"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flopwise.core.catalog import load_hardware as hardware
    from flopwise.core.catalog import load_model as model

__version__ = "0.1.0"
__all__ = ["__version__", "hardware", "model"]


def __getattr__(name: str) -> object:
    """Import on first use, so that `flopwise --help` does not read what it does not need."""
    if name in ("hardware", "model"):
        from flopwise.core import catalog

        return getattr(catalog, f"load_{name}")
    raise AttributeError(f"module 'flopwise' has no attribute {name!r}")
