"""Prediction → plan: which set-up is the fastest that fits, and why. Pure: no files, no clock, no formatting."""

from __future__ import annotations

from flopwise.plan.answer import Answer, answer
from flopwise.plan.search import Option, Question, fastest

__all__ = ["Answer", "Option", "Question", "answer", "fastest"]
