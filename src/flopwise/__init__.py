"""flopwise: how fast can this model train on this hardware, will it fit, and where does the time go?

From Python:

    import flopwise as fw

    print(fw.predict("llama-3-8b", on="h200", seq="8k"))

`docs/api.md` has every function and the records that they return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flopwise.base.errors import DoesNotFit, FlopwiseError
    from flopwise.door import load_hardware, load_model, plan, predict, read_profile, results, train, verdicts
    from flopwise.door.rows import Results
    from flopwise.records.cluster_plan import PlannedCluster
    from flopwise.records.measurement import RunRecord
    from flopwise.records.outcome import Interval
    from flopwise.records.plan import Planned
    from flopwise.records.prediction import Prediction
    from flopwise.records.profile import Profile, Verdict
    from flopwise.setup.hardware import Hardware
    from flopwise.store.results import Result
    from flopwise.work.lstm import Lstm
    from flopwise.work.transformer import Transformer

__version__ = "0.1.0"
__all__ = [
    "DoesNotFit",
    "FlopwiseError",
    "Hardware",
    "Interval",
    "Lstm",
    "Planned",
    "PlannedCluster",
    "Prediction",
    "Profile",
    "Result",
    "Results",
    "RunRecord",
    "Transformer",
    "Verdict",
    "__version__",
    "load_hardware",
    "load_model",
    "plan",
    "predict",
    "read_profile",
    "results",
    "train",
    "verdicts",
]

_PLACES = {
    "base.errors": ("DoesNotFit", "FlopwiseError"),
    "door": ("load_hardware", "load_model", "read_profile", "results", "verdicts"),
    "door.rows": ("Results",),
    "records.cluster_plan": ("PlannedCluster",),
    "records.measurement": ("RunRecord",),
    "records.outcome": ("Interval",),
    "records.plan": ("Planned",),
    "records.prediction": ("Prediction",),
    "records.profile": ("Profile", "Verdict"),
    "setup.hardware": ("Hardware",),
    "store.results": ("Result",),
    "work.lstm": ("Lstm",),
    "work.transformer": ("Transformer",),
}
"""Module → what is taken from it. `plan`, `predict` and `train` are packages that can be called."""


def __getattr__(name: str) -> object:
    """Import on first use, so that `flopwise --help` does not read what it does not need."""
    import importlib

    if name in ("plan", "predict", "train"):
        return importlib.import_module(f"flopwise.{name}")
    for place, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"flopwise.{place}"), name)
    raise AttributeError(f"module 'flopwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
