"""What `--profile` costs outside its window: `python -m benchmarks.profile_cost [--steps 80] [--pairs 5]`.

The same plan is trained with and without it, in turn, on this machine's CPU. Steps behind the window are compared as a
ratio of medians; so are those that are traced, which may cost more.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from flopwise.store.runs import PLAN, read_steps
from flopwise.train import run as train_run
from flopwise.train.profiling import TRACED_STEPS, WARM_UP_STEPS

LAST_TRACED = WARM_UP_STEPS + TRACED_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    behind: list[float] = []
    within: list[float] = []
    with tempfile.TemporaryDirectory() as store:
        # What is left open is chosen by measuring this machine, and would differ from run to run.
        first = train_run(steps=2, device="cpu", checkpoint=False, store=store)
        plan = str(Path(store) / first.id / PLAN)
        for _ in range(given.pairs):
            _pair(plan, given.steps, behind, within)
    print(f"behind the window: {median(behind):.3f} times as long ({min(behind):.3f}–{max(behind):.3f})")
    print(f"while traced:      {median(within):.3f} times as long ({min(within):.3f}–{max(within):.3f})")


def _pair(plan: str, steps: int, behind: list[float], within: list[float]) -> None:
    plain, profiled = (_steps(plan, steps, profile) for profile in (False, True))
    # The window ends when a second was counted, which half of the steps outlast.
    last = steps // 2
    behind.append(median(profiled[last:]) / median(plain[last:]))
    within.append(median(profiled[WARM_UP_STEPS:LAST_TRACED]) / median(plain[WARM_UP_STEPS:LAST_TRACED]))


def _steps(plan: str, steps: int, profile: bool) -> list[float]:
    with tempfile.TemporaryDirectory() as store:
        record = train_run(model=plan, steps=steps, device="cpu", checkpoint=False, profile=profile, store=store)
        return [step.step_s for step in read_steps(Path(store) / record.id)]


if __name__ == "__main__":
    main()
