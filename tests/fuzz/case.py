"""One case: a folder with something damaged, the commands that read it, run here, and what is wrong with the answer."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest.mock import patch

from tests.cli.test_cli_fuzz import answered

MOST_CPU_S = 60
"""Of this process for one command: a busy machine takes no more of it, only longer."""
MOST_WALL_S = 900
"""Without any progress, as before a pipe that nobody writes to."""
MOST_GROWTH_BYTES = 3 * 2**30
"""Of what the process has held at its peak, by one command."""
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal would obey, and what turns text round."""
FAITHFUL = {"json", "csv", "native"}
"""Forms for programs: they hold what the file holds."""
CASE = "case.json"
HERE = b"@HERE@"
"""Stands in files for the folder that a case is run in."""


@dataclass(frozen=True, slots=True)
class Case:
    """A folder that is not whole."""

    seed: str
    files: dict[str, bytes]
    commands: list[list[str]]
    ends_as: str | None = None
    """SHA-256 of the weights with which a training must end, where it ends well."""


class _TooLongError(BaseException):
    """No FlopwiseError, and nothing that anybody catches."""


def write_case(case: Case, folder: Path) -> None:
    """The case as a folder that can be read back, and run in."""
    for name, content in case.files.items():
        path = folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    table = {"seed": case.seed, "commands": case.commands, "ends_as": case.ends_as}
    (folder / CASE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def read_case(folder: Path) -> Case:
    table = json.loads((folder / CASE).read_text("utf-8"))
    root = folder / "files"
    files = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    return Case(table["seed"], files, table["commands"], table["ends_as"])


def problem_of(case: Case, scratch: Path) -> str:
    """What is wrong with an answer to one of its commands; nothing where all are good."""
    for name, content in case.files.items():
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.replace(HERE, bytes(scratch)))
    scratch.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(scratch)
    places = {"XDG_CACHE_HOME": str(scratch / "cache"), "FLOPWISE_STORE": "runs"}
    try:
        with patch.dict(os.environ, places):
            for words in case.commands:
                found = _problem(words) or _other_end(case, scratch)
                if found:
                    return f"flopwise {' '.join(words)}\n{found}"
    finally:
        os.chdir(before)
        shutil.rmtree(scratch, ignore_errors=True)
    return ""


def _problem(words: list[str]) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with _limited():
            code, out, err = answered(words)
    except _TooLongError as error:
        return f"takes too long: {error}"
    except BaseException:  # noqa: BLE001,RUF100 - whatever came out is what is looked for
        return traceback.format_exc()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > MOST_GROWTH_BYTES:
        return f"took {grown / 2**30:.1f} GiB"
    if code not in (0, 1, 2) or "Traceback (most recent call last)" in err:
        return f"exit code {code}\n{err}"
    if code == 2 and "hint: " not in err and "Usage: " not in err:
        return f"no hint\n{err}"
    # What was typed is repeated by the parser as it was typed.
    told = "\n".join(line for line in err.splitlines() if not line.startswith("Error: "))
    raw = RAW.search(told) or (None if FAITHFUL.intersection(words) else RAW.search(out))
    return f"{raw[0]!r} reaches the terminal\n{err or out}" if raw else ""


def _other_end(case: Case, scratch: Path) -> str:
    """A training that says it went well and ended with other weights than it does undisturbed."""
    if case.ends_as is None:
        return ""
    ended = [path for path in scratch.rglob("record.json") if '"done"' in path.read_text("utf-8", "replace")]
    if not ended or final_weights(scratch) == case.ends_as:
        return ""
    return "ends as done with other weights than an undisturbed training"


def final_weights(folder: Path) -> str:
    """SHA-256 of the weights of the last step."""
    last = max(folder.rglob("checkpoints/step-*/model.safetensors"), key=lambda path: path.parent.name)
    return hashlib.sha256(last.read_bytes()).hexdigest()


@contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, _frame: FrameType | None) -> None:
        raise _TooLongError(f"{MOST_CPU_S} s of CPU" if number == signal.SIGPROF else f"{MOST_WALL_S} s")

    before = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, MOST_WALL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
