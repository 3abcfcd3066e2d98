"""How often programs with odd habits notice `flopwise profile run`: `python -m benchmarks.odd_programs --times 20`.

Every one of `tests.support.odd_programs` runs so often with it and as often without it, on a GPU where there is one;
exit code, stdout and stderr have to be the same. Prints a table of agreement, and each difference once.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.odd_programs import PROFILED, PROGRAMS, differences, prepare, run


def compared(name: str) -> tuple[list[str], bool]:
    """What differed when a program ran once each way, and whether there was a profile."""
    program = PROGRAMS[name]
    with tempfile.TemporaryDirectory(prefix="odd-") as folder:
        place = Path(folder, "program")
        place.mkdir()
        prepare(program, place)
        profiled = run(program, place, Path(folder, "profile"))
        return differences(program, run(program, place), profiled), PROFILED in profiled.said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="how often each runs with and without")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once")
    parser.add_argument("names", nargs="*", help="words in the names of those that are wanted; default: all")
    wanted = parser.parse_args()
    names = [name for name in PROGRAMS if not wanted.names or any(word in name for word in wanted.names)]
    width = max(map(len, names))
    print(f"{'program':{width}}  runs  agree  profiled")
    every: Counter[str] = Counter()
    with ThreadPoolExecutor(wanted.jobs) as pool:
        for name in names:
            results = list(pool.map(compared, [name] * wanted.times))
            agree = sum(not found for found, _ in results)
            print(
                f"{name:{width}}  {len(results):4}  {agree:5}  {sum(profiled for _, profiled in results):8}", flush=True
            )
            every.update(f"{name}: {text}" for found, _ in results for text in found)
    for text, count in every.most_common():
        print(f"{count} × {text}")
    if every:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
