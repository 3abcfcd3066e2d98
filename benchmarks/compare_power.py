"""How often `flopwise compare` is right: `python -m benchmarks.compare_power [--pairs 300] [--store FOLDER]`.

Pairs of simulated sides with a known slow-down: neighbouring steps alike (AR(1)), each run with an offset of its own,
some steps far longer. For every setting the share of pairs that are called slower, at the default threshold of 3 %,
and the share of intervals that hold the true change. With a store, the noise of its own runs is printed first.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.store.runs import read_record, read_steps, run_names
from flopwise.store.statistics import Seconds, change, steady_seconds

THRESHOLD = 0.03
SLOW_DOWNS = (0.0, 0.01, 0.05)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """How step times scatter."""

    title: str
    steps: float
    """Standard deviation of steps, relatively, outliers left out."""
    correlation: float
    """Of neighbours."""
    runs: float
    """Standard deviation of runs' medians."""
    outliers: float
    """Share of steps that take far longer."""
    longer: float = 0.5
    """By how much they do, on average."""


NOISES = (
    Noise(title="GPU, fixed clock", steps=0.002, correlation=0.3, runs=0.002, outliers=0.01),
    Noise(title="GPU, power-capped", steps=0.006, correlation=0.6, runs=0.006, outliers=0.02),
    Noise(title="CPU, quiet", steps=0.017, correlation=0.15, runs=0.008, outliers=0.02, longer=0.2),
    Noise(title="CPU, beside others", steps=0.03, correlation=0.5, runs=0.015, outliers=0.05),
)
"""Steps on a CPU as those of a small model on two cores had them, alone and beside other work; a GPU's are plausible.
"""


def simulated(noise: Noise, steps: int, slow_down: float, generator: np.random.Generator) -> Seconds:
    """The steps of one run."""
    fresh = generator.normal(0.0, (1 - noise.correlation**2) ** 0.5, steps)
    levels = np.empty(steps)
    level = float(generator.normal())
    for place in range(steps):
        level = noise.correlation * level + fresh[place]
        levels[place] = level
    late = np.where(generator.random(steps) < noise.outliers, 1 + generator.exponential(noise.longer, steps), 1.0)
    offset = 1 + noise.runs * generator.normal()
    return np.asarray((1 + slow_down) * offset * (1 + noise.steps * levels) * late)


def rates(noise: Noise, *, runs: int, steps: int, slow_down: float, pairs: int) -> tuple[float, float]:
    """Share of pairs that are called slower, and of intervals that hold the true change."""
    generator = np.random.default_rng([runs, steps, round(1000 * slow_down)])
    alarms = holding = 0
    for _ in range(pairs):
        sides = [[simulated(noise, steps, slow, generator) for _ in range(runs)] for slow in (0.0, slow_down)]
        found = change(*sides)
        alarms += found.verdict(THRESHOLD) == "slower"
        holding += found.low is not None and found.high is not None and found.low <= slow_down <= found.high
    return alarms / pairs, holding / pairs


def noise_of(store: Path) -> Noise:
    """As the runs of a store have it, taken as repeats of one another."""
    found: list[Seconds] = []
    for name in run_names(store):
        try:
            found.append(steady_seconds(read_record(store / name), read_steps(store / name)))
        except FlopwiseError:
            continue
    found = [seconds for seconds in found if len(seconds) > 8]
    relative = [seconds / np.median(seconds) - 1 for seconds in found]
    deviation = float(np.mean([np.subtract(*np.quantile(each, (0.8, 0.2))) for each in relative])) / 1.683
    late = np.concatenate(relative) > 4 * deviation
    neighbours = [np.corrcoef(each[1:].argsort().argsort(), each[:-1].argsort().argsort())[0, 1] for each in relative]
    return Noise(
        title=str(store),
        steps=deviation,
        correlation=float(np.mean(neighbours)),
        runs=float(np.std([np.log(np.median(seconds)) for seconds in found], ddof=1)),
        outliers=float(late.mean()),
        longer=float(np.concatenate(relative)[late].mean()) if late.any() else 0.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--store", help="Runs with the same settings, whose noise is printed.")
    given = parser.parse_args()
    if given.store:
        print(noise_of(Path(given.store)))
    heads = [f"slower at {slow:.0%}" for slow in SLOW_DOWNS]
    print(f"{'noise':20}{'runs':>6}{'steps':>7}" + "".join(f"{head:>15}" for head in heads) + f"{'interval holds':>17}")
    for noise in NOISES:
        for runs, steps in ((1, 15), (1, 50), (3, 15), (3, 50)):
            results = [rates(noise, runs=runs, steps=steps, slow_down=slow, pairs=given.pairs) for slow in SLOW_DOWNS]
            shares = "".join(f"{alarm:>15.1%}" for alarm, _ in results)
            print(f"{noise.title:20}{runs:>6}{steps:>7}{shares}{np.mean([held for _, held in results]):>17.1%}")


if __name__ == "__main__":
    main()
