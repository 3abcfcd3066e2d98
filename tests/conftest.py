"""Shared by all tests: one thread for each worker, since the workers already take every core; no timed examples.

Files that take long come first, so that no worker is left with one; what takes long is no part of `make check`.

On CI the random examples are the same in every run, so that a red run can be repeated; elsewhere they are fresh.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Generator
from functools import cache

import pytest
import typer.main
from hypothesis import settings

from tests.support.cpu_seconds import function_of, read_seconds

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
# Where a test does take two threads, one that waits leaves its core to the other workers; without this it spins on it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Built anew for each of thousands of lines, the commands and their options would take more time than most answers.
typer.main.get_command = cache(typer.main.get_command)

settings.register_profile("flopwise", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("flopwise")

# What tests skip without: a name, how their reasons for skipping read, and how to have it.
PROVIDERS = (
    ("Chromium", r"Chromium", "apt-get install chromium"),
    ("Slurm and munge", r"not installed: .*(slurm|munge|sbatch|srun)", "apt-get install slurm-wlm munge"),
    ("Hopper kernels", r"quack-kernels|FlashAttention-4", "pip install '.[train,hopper]', on an H100 or H200"),
    ("a CUDA device", r"CUDA device|'triton'", "make test on a machine with an NVIDIA GPU and torch's CUDA build"),
    ("Playwright, axe-core", r"Playwright|axe-core", "make test, which installs locks/dev.txt"),
    ("a user who may not read everything", r"root may read|readable for this user", "make test as a user but root"),
)


def pytest_configure() -> None:
    # A shell starts what it runs in the background with SIGINT ignored, and a training leaves ignored signals ignored.
    # Tests that stop a training by SIGINT would see it go on to its end.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


QUICK_S = 0.7
"""Test functions that take longer, all their cases together, are left out of `make check`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seconds = read_seconds()
    of_file = defaultdict[str, float](float)
    for name, taken in seconds.items():
        of_file[name.partition("::")[0]] += taken
    for item in items:
        if seconds.get(function_of(item), 0.0) > QUICK_S:
            item.add_marker("slow")
    items.sort(key=lambda item: -of_file[item.nodeid.partition("::")[0]])


def pytest_collection_finish() -> None:
    # Eight thousand tests and torch are a million objects: looking through them again and again took a tenth of all.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """At the very end, one line for each thing that is missing here: how many tests skipped, and how to have it."""
    yield
    skipped = Counter(_missing(str(report.longrepr)) for report in terminalreporter.stats.get("skipped", []))
    told = [(name, how, skipped[name]) for name, _, how in PROVIDERS if skipped[name]]
    if told:
        terminalreporter.section("not tested here")
    for name, how, count in told:
        terminalreporter.line(f"{name}: {count} skipped; to have it: {how}")


def _missing(reason: str) -> str | None:
    return next((name for name, pattern, _ in PROVIDERS if re.search(pattern, reason)), None)
