"""Description → prediction. Pure: no files, no clock, no formatting, no torch."""

from __future__ import annotations

from flopwise.base.callable_module import make_callable
from flopwise.predict.step import step
from flopwise.setup.setup import Setup

__all__ = ["Setup", "step"]

make_callable(__name__)
