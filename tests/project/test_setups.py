"""A set-up is written down once: what has its fields is a Setup, a set-up in words, or an Outcome."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import flopwise
from flopwise.records.outcome import Outcome
from flopwise.setup.setup import Setup
from flopwise.setup.written import CellSetup, WrittenSetup, WrittenStrategy

FAMILY = (Setup, WrittenSetup, Outcome)
WORDS = {field.name for kind in (Setup, WrittenStrategy, CellSetup) for field in fields(kind)} - {"sequence_tokens"}
MOST = 3
"""Other fields of a set-up that stand beside a sequence's tokens elsewhere."""


def records() -> Iterator[type]:
    """Every dataclass of the package that can be imported here."""
    for module in pkgutil.walk_packages(flopwise.__path__, "flopwise."):
        if module.name.endswith("__main__") or ".start_up" in module.name:
            continue
        try:
            found = vars(importlib.import_module(module.name))
        except ImportError:
            continue
        yield from (kind for kind in found.values() if isinstance(kind, type) and is_dataclass(kind))


def test_only_setups_and_outcomes_have_the_fields_of_one() -> None:
    found = {kind: {field.name for field in fields(kind)} for kind in set(records())}
    assert len(found) > 200
    odd = {
        kind.__qualname__: sorted(names & WORDS)
        for kind, names in found.items()
        if "sequence_tokens" in names and len(names & WORDS) > MOST and not issubclass(kind, FAMILY)
    }
    assert odd == {}
