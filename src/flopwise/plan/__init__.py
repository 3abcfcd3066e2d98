"""Prediction → plan: which set-up is the fastest that fits, and why. Pure: no files, no clock, no formatting."""

from __future__ import annotations

from flopwise.core.cluster_plan import Answer, Option
from flopwise.plan.answer import answer
from flopwise.plan.search import Question, fastest

__all__ = ["Answer", "Option", "Question", "answer", "fastest"]
