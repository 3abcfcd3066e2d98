"""Description → prediction. Pure: no files, no clock, no formatting, no torch."""

from __future__ import annotations

from flopwise.base.callable_module import make_callable
from flopwise.predict.choose import Request
from flopwise.predict.step import step

__all__ = ["Request", "step"]

make_callable(__name__)
