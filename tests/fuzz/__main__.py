"""Run the fuzzer for a given time: `make fuzz MINUTES=20`."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

FOUND = Path(__file__).parent / "found"
"""What was found, as cases that `tests/cli/test_fuzz.py` runs from then on."""
TOLD_EVERY_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="another one is another search")
    parser.add_argument("--only", default="", help="names of seeds, with commas: trace,checkpoint")
    parser.add_argument("--found", type=Path, default=FOUND, help="where to keep what is found")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, Random(options.seed), options.only, options.minutes, options.found)
        return 0
    return watch(options)


def watch(options: argparse.Namespace) -> int:
    """Keep so many workers busy until the time is over; one that dies leaves the case it died of."""
    ends = time.monotonic() + 60 * options.minutes
    seeds = itertools.count(options.seed)
    print(f"seed {options.seed}, {options.jobs} at once, {options.minutes:g} minutes")
    died = 0
    with tempfile.TemporaryDirectory(prefix="flopwise-fuzz-") as folder:
        workers: dict[Path, subprocess.Popen[bytes]] = {}
        told, names = time.monotonic(), itertools.count()
        # One thread each: the workers already take every core.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        while True:
            left = (ends - time.monotonic()) / 60
            while len(workers) < options.jobs and left > 0:
                place = Path(folder, f"worker-{next(names)}")
                place.mkdir()
                words = ["--worker", str(place), "--seed", str(next(seeds)), "--minutes", str(left)]
                words += ["--only", options.only, "--found", str(options.found)]
                with (place / "log").open("wb") as log:
                    command = [sys.executable, "-m", "tests.fuzz", *words]
                    workers[place] = subprocess.Popen(command, stderr=log, env=environment)
            for place, worker in list(workers.items()):
                if worker.poll() is not None:
                    del workers[place]
                    if worker.returncode:
                        died += 1
                        _keep_last(place, worker.returncode, options.found)
            if not workers:
                break
            if time.monotonic() - told > TOLD_EVERY_S:
                told = time.monotonic()
                print(
                    f"{max(0.0, ends - told) / 60:5.1f} minutes left: {sum(_counts(Path(folder)).values()):,} cases",
                    flush=True,
                )
            time.sleep(0.2)
        counts = _counts(Path(folder))
    found = sorted(path.name for path in options.found.iterdir()) if options.found.is_dir() else []
    print(", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    print(f"{sum(counts.values()):,} cases, {died} workers died, {len(found)} kept in {options.found}")
    return 1 if found or died else 0


def work(place: Path, chance: Random, only: str, minutes: float, found: Path) -> None:
    """Case after case, each on disk before it runs; what is wrong is kept, once for each place it is wrong in."""
    import resource

    from tests.fuzz.case import problem_of, write_case
    from tests.fuzz.corpus import Seed, measured_once, seeds

    # What asks for more than the machine has is refused here, not ended by the system.
    resource.setrlimit(resource.RLIMIT_AS, (24 * 2**30, 24 * 2**30))
    with measured_once():
        ends = time.monotonic() + 60 * minutes
        wanted = set(filter(None, only.split(",")))
        corpus: dict[str, list[Seed]] = {}
        for seed in seeds(place / "made"):
            corpus.setdefault(seed.name, []).append(seed)
        names = [name for name in corpus if not wanted or name in wanted]
        counts: Counter[str] = Counter()
        while time.monotonic() < ends:
            name = chance.choice(names)
            case = chance.choice(corpus[name]).case(chance)
            current = place / "current"
            shutil.rmtree(current, ignore_errors=True)
            current.mkdir()
            write_case(case, current)
            problem = problem_of(case, place / "scratch")
            counts[name] += 1
            (place / "counts").write_text("\n".join(f"{name} {count}" for name, count in counts.items()), "utf-8")
            if problem:
                _keep(current, name, problem, found)


def _keep(current: Path, name: str, problem: str, found: Path) -> None:
    # The last line says what, the one before it where: the same fault twice is one.
    kind = hashlib.sha256("\n".join(problem.splitlines()[-3:]).encode()).hexdigest()[:10]
    target = found / f"{name}-{kind}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(current, target)
        (target / "problem.txt").write_text(problem.replace(f"{Path.cwd()}/", ""), "utf-8", "replace")
        print(f"found {target.name}: {problem.splitlines()[-1][:150]}", flush=True)


def _keep_last(place: Path, code: int, found: Path) -> None:
    tail = (place / "log").read_text("utf-8", "replace")[-3000:]
    if (place / "current" / "case.json").is_file():
        _keep(place / "current", "died", f"{tail}\nthe worker ended with {code}", found)
    else:
        print(f"a worker ended with {code} before its first case:\n{tail}")


def _counts(folder: Path) -> Counter[str]:
    total: Counter[str] = Counter()
    for path in folder.glob("*/counts"):
        for line in path.read_text("utf-8").splitlines():
            name, _, count = line.partition(" ")
            total[name] += int(count)
    return total


if __name__ == "__main__":
    sys.exit(main())
