"""Description → prediction. Pure: no files, no clock, no formatting, no torch."""

from __future__ import annotations

from flopwise.predict.step import step
from flopwise.setup.setup import Setup

__all__ = ["Setup", "step"]
