"""`python -m tests.replay --record [ID …]` writes down what commands say; of those that are there, only with --again.

Even then figures stay: where they differ, nothing is written. Who means it removes `said/ID.txt` first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from .replaying import SAID, lost_figures, make_folder, read_commands, recorded, run, to_text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__)
    parser.add_argument("--record", action="store_true", required=True, help="write what the commands say")
    parser.add_argument("--again", action="store_true", help="also of those that are there: their words anew")
    parser.add_argument("ids", nargs="*", metavar="ID", help="default: all that are not there")
    given = parser.parse_args()
    commands = read_commands()
    there = {path.stem for path in SAID.glob("*.txt")}
    wanted = given.ids or [name for name in commands if given.again or name not in there]
    if unknown := set(wanted) - set(commands):
        parser.error(f"no such command: {', '.join(sorted(unknown))}")
    if not given.again and (known := there & set(wanted)):
        parser.error(f"recorded before: {', '.join(sorted(known))}; --again writes their words anew")
    SAID.mkdir(exist_ok=True)
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        for name in wanted:
            begun = time.process_time()
            said = run(commands[name], Path(folder))
            lost = lost_figures(recorded(name), said) if name in there else []
            refused += bool(lost)
            if not lost:
                (SAID / f"{name}.txt").write_text(to_text(said, commands[name]), encoding="utf-8")
            size = sum(map(len, said.parts.values()))
            seconds = time.process_time() - begun
            sys.stderr.write(f"{seconds:6.2f} s {size:7} exit {said.code} {name} {' '.join(lost)}\n")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
