"""Ranks for tests: small programs that need no torch, started as `flopwise train --gpus` starts its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from flopwise.base.files import to_toml
from flopwise.profile.measure.this_machine import this_cpu

BEGIN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])


def note(name, text=""):
    # Renamed into place, so that whoever sees it sees all of it.
    (folder / f".{name}").write_text(str(text))
    (folder / f".{name}").rename(folder / name)


"""
LAUNCH = """
import signal, sys
# A runner in the background may have left one ignored, `nohup` the other.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from flopwise.engine.spawning import spawn
sys.exit(spawn(sys.argv[1:2], int(sys.argv[2]), module="small_rank"))
"""
LONGEST_S = 120.0
"""For what takes a moment: a busy machine is no reason to fail."""


def described_cpu() -> str:
    """A description of this machine, which spares every process that has it a second of measuring."""
    return to_toml(this_cpu())


def launch(folder: Path, body: str, ranks: int, stderr: int | None = None) -> subprocess.Popen[str]:
    """A launcher of ranks that run `body`, with `folder`, `rank` and `note(name, text)` at hand."""
    (folder / "small_rank.py").write_text(BEGIN + textwrap.dedent(body))
    places = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-c", LAUNCH, str(folder), str(ranks)]
    return subprocess.Popen(command, env=environment, text=True, stderr=stderr)


def wait_for(condition: Callable[[], bool], what: str, longest_s: float = LONGEST_S) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < longest_s, what
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether there is such a process that has not ended: one that nobody has waited for has."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return fields[0] not in (b"Z", b"X")


def children_of(process: int) -> list[int]:
    """All that a process has started, and what these have started."""
    found: list[int] = []
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            found += [child, *children_of(child)]
    return found
