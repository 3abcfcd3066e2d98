"""Description → prediction. Pure: no files, no clock, no formatting, no torch."""

from __future__ import annotations

from flopwise.predict.choose import Request
from flopwise.predict.step import step

__all__ = ["Request", "step"]
