"""Prediction → plan: which set-up is the fastest that fits, and why. Pure: no files, no clock, no formatting."""

from __future__ import annotations

from flopwise.base.callable_module import make_callable
from flopwise.plan.cluster.answer import answer
from flopwise.plan.cluster.search import fastest
from flopwise.plan.device.explain import make_plan
from flopwise.plan.program.compile import compile_plan
from flopwise.records.cluster_plan import Answer, FoundStrategy
from flopwise.records.plan import Plan, Planned
from flopwise.setup.setup import CappedSetup, Setup

__all__ = [
    "Answer",
    "CappedSetup",
    "FoundStrategy",
    "Plan",
    "Planned",
    "Setup",
    "answer",
    "compile_plan",
    "fastest",
    "make_plan",
]

make_callable(__name__)
