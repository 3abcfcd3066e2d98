"""Description → prediction. Pure: no files, no clock, no formatting, no torch."""

from __future__ import annotations

from flopwise.base.callable_module import make_callable
from flopwise.predict.step import step, steps
from flopwise.setup.setup import Setup

__all__ = ["Setup", "step", "steps"]

make_callable(__name__)
