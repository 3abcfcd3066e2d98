"""Records what each test costs: `python -m pytest -p tests.support.cpu_seconds` rewrites `tests/cpu_seconds.json`.

Seconds of processors, of a test's own process and of those that it starts, so that a busy machine gives the same. Run
without `-n`; of a part of the tests, only those are recorded anew.
"""

from __future__ import annotations

import json
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "cpu_seconds.json"
LEAST_S = 0.5
"""Functions that take less are not listed."""


def function_of(item: pytest.Item) -> str:
    """Its cases together: they share what is set up for the first."""
    return item.nodeid.partition("[")[0]


def read_seconds() -> dict[str, float]:
    """Test functions that take long → seconds of all their cases."""
    found: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def _used_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


_taken: dict[str, float] = defaultdict(float)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    begun = _used_s()
    try:
        return (yield)
    finally:
        _taken[function_of(item)] += _used_s() - begun


def pytest_sessionfinish() -> None:
    kept = {name: seconds for name, seconds in read_seconds().items() if name not in _taken}
    long = {name: round(seconds, 1) for name, seconds in _taken.items() if seconds >= LEAST_S}
    FILE.write_text(json.dumps(kept | long, indent=1, sort_keys=True) + "\n", encoding="utf-8")
