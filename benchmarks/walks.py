"""How far a reader walks through the sources to follow a command: `python -m benchmarks.walks`.

Every function of flopwise that a command enters counts once, in the order of first entry; class bodies, comprehensions
and lambdas do not. A switch is two neighbours of that order in different modules, or in different rooms. Prints a row
for each command.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

import flopwise

ROOT = str(Path(flopwise.__file__).parent)

COMMANDS = {
    "predict": "predict llama-3-8b --on h100-sxm --seq 8k --batch 16",
    "plan": "plan llama-3-8b --on h200 --seq 8k --device-mem 40GiB --host-mem 110GiB",
    "train": "train --steps 3 --profile --device cpu",
    "profile show": "profile show last",
    "report": "report last",
}
"""In this order: the last two look at the run that `train` leaves."""


class Walk:
    """Functions in the order in which they are first entered, and how deep the deepest lies among them."""

    def __init__(self) -> None:
        self.entered: dict[tuple[str, str], None] = {}
        self.depth = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
            key = (code.co_filename[len(ROOT) + 1 :], code.co_qualname)
            if key not in self.entered and not _is_class_body(frame):
                self.entered[key] = None
                self.depth = max(self.depth, _depth(frame))

    def switches(self, parts: int | None) -> int:
        """Neighbours that differ in the first so many parts of their path."""
        places = [Path(file).parts[:parts] for file, _ in self.entered]
        return sum(one != other for one, other in itertools.pairwise(places))


def _is_class_body(frame: FrameType) -> bool:
    """A function's names are compiled to slots, those of a class body are looked up."""
    return not frame.f_code.co_flags & inspect.CO_OPTIMIZED


def _depth(frame: FrameType) -> int:
    depth, caller = 0, frame.f_back
    while caller is not None:
        depth += caller.f_code.co_filename.startswith(ROOT)
        caller = caller.f_back
    return depth


def walk(words: list[str]) -> Walk:
    """The walk of one command, in this process."""
    from flopwise.cli import main

    found = Walk()
    before, sys.argv = sys.argv, ["flopwise", *words]
    threading.setprofile(found)
    sys.setprofile(found)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main()
    except SystemExit as end:
        if end.code not in (0, None):
            raise RuntimeError(f"{' '.join(words)} ended with {end.code}") from None
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        sys.argv = before
    return found


def main() -> None:
    print(f"{'command':14}{'functions':>10}{'modules':>9}{'module switches':>17}{'room switches':>15}{'depth':>7}")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, words in COMMANDS.items():
            found = walk(words.split())
            modules = len({file for file, _ in found.entered})
            row = (len(found.entered), modules, found.switches(None), found.switches(1), found.depth)
            print(f"{name:14}{row[0]:>10}{row[1]:>9}{row[2]:>17}{row[3]:>15}{row[4]:>7}", flush=True)


if __name__ == "__main__":
    main()
