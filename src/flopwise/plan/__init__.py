"""Prediction → plan: which set-up is the fastest that fits, and why. Pure: no files, no clock, no formatting."""

from __future__ import annotations

from flopwise.core.cluster_plan import Answer, Option
from flopwise.core.plan import Plan, Planned
from flopwise.plan.answer import answer
from flopwise.plan.compile import compile_plan
from flopwise.plan.cuts import DeviceQuestion
from flopwise.plan.explain import planned
from flopwise.plan.search import Question, fastest

__all__ = [
    "Answer",
    "DeviceQuestion",
    "Option",
    "Plan",
    "Planned",
    "Question",
    "answer",
    "compile_plan",
    "fastest",
    "planned",
]
