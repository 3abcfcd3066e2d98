"""Shared by all tests: one thread for each worker, since the workers already take every core; no timed examples.

On CI the random examples are the same in every run, so that a red run can be repeated; elsewhere they are fresh.
"""

from __future__ import annotations

import os

from hypothesis import settings

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
# Where a test does take two threads, one that waits leaves its core to the other workers; without this it spins on it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile("flopwise", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("flopwise")
