"""Whether more memory, or a larger batch, is ever planned slower: `python -m benchmarks.caps [--cells 3,7]`.

Ten trainings on one device, each walked over device caps, host caps and batches. A line for every two neighbours of
which the one with more memory is slower by over 0.1 %, or the larger batch by over 2 %: two batches of which each has
the other's chunks differ by what they move for each of their tokens alone. `--output FILE` writes every plan's rate,
and `--before FILE` compares with those that another state of the search has written.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from flopwise.door.asking import hardware_of, model_of, setup_of
from flopwise.door.planning import cap_device
from flopwise.plan.device.search import fastest_plan
from flopwise.setup.setup import CappedSetup
from flopwise.setup.trained import TrainedWords

GIB = 2**30
SLOWER, SLOWER_BATCH = 1e-3, 0.02

Key = tuple[int, float, float, int]
"""Cell, GiB of device and host, batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One training, and the caps and batches that it is planned for."""

    model: str
    on: str
    seq: str
    device: Sequence[float]
    """GiB."""
    host: Sequence[float]
    batches: Sequence[int]
    trained: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Any] = field(default_factory=dict)

    def setup(self) -> CappedSetup:
        """With no caps to speak of."""
        model = model_of(self.model, None, TrainedWords(**self.trained))
        setup = setup_of(model, hardware_of(self.on), name=self.on, seq=self.seq, **self.words)
        return cap_device(setup, device=GIB, host=0, host_given=True)


CELLS = (
    Cell(
        model="qwen3-30b-a3b",
        on="h200",
        seq="4k",
        device=(112, 120, 128, 132, 136, 139),
        host=(90, 100, 110, 140, 200),
        batches=(8, 16, 24, 32, 48, 64),
    ),
    Cell(
        model="qwen3-30b-a3b",
        on="h200",
        seq="4k",
        device=(40, 60, 80, 120),
        host=(60, 80, 110),
        batches=(8, 16, 24, 32),
        words={"optimizer": "adamw-8bit"},
    ),
    Cell(
        model="gpt-oss-20b",
        on="h200",
        seq="4k",
        device=(60, 80, 100, 120, 132, 138),
        host=(80, 110, 160),
        batches=(16, 32, 64, 96),
    ),
    Cell(
        model="llama-3-8b",
        on="h200",
        seq="8k",
        device=(24, 32, 40, 60, 80, 100, 120, 138),
        host=(60, 80, 110, 160),
        batches=(4, 8, 12, 16, 32),
    ),
    Cell(
        model="llama-3-8b",
        on="rtx-4090",
        seq="4k",
        device=(8, 10, 12, 14, 16, 18, 20, 22, 23.5),
        host=(60, 80, 96, 128),
        batches=(2, 4, 6, 8, 16, 24),
    ),
    Cell(
        model="llama-3-70b",
        on="rtx-4090",
        seq="4k",
        device=(16, 20, 23.5),
        host=(800, 900, 1000),
        batches=(4, 8, 12, 16),
    ),
    Cell(
        model="qwen3-8b",
        on="a100-80gb",
        seq="32k",
        device=(20, 30, 40, 50, 60, 70, 79),
        host=(80, 110, 160),
        batches=(1, 2, 3, 4),
    ),
    Cell(
        model="llama-3-70b",
        on="rtx-4090",
        seq="4k",
        device=(10, 12, 16, 20, 23.5),
        host=(40, 60, 90),
        batches=(2, 4, 6, 8),
        trained={"lora": 16},
        words={"base": "nf4"},
    ),
    Cell(
        model="mixtral-8x7b",
        on="h100-sxm",
        seq="8k",
        device=(40, 50, 60, 70, 78),
        host=(330, 400, 500),
        batches=(4, 8, 12, 16),
    ),
    Cell(
        model="gpt2-xl",
        on="rtx-3090",
        seq="1k",
        device=(4, 6, 8, 12, 16, 20, 23.5),
        host=(8, 16, 32),
        batches=(8, 16, 24, 32, 64),
        words={"clip": True},
    ),
    Cell(
        model="llama-3-1b",
        on="rtx-4090",
        seq="16k",
        device=(3, 4, 6, 8, 12, 16, 23.5),
        host=(0, 16, 32),
        batches=(1, 2, 3, 4, 8),
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A plan's rate, 0 where nothing fits, and what the search took."""

    tokens_per_s: float
    planning_s: float


def plan_all(cells: Sequence[int]) -> dict[Key, Row]:
    """Every pair of caps with the batch in the middle, and every batch with the middle caps."""
    found = {}
    for number in cells:
        cell, setup = CELLS[number], CELLS[number].setup()
        for device, host, batch in _points(cell):
            asked = replace(
                setup, device_cap_bytes=int(device * GIB), host_cap_bytes=int(host * GIB), batch_sequences=batch
            )
            began = time.process_time()
            best = fastest_plan(asked)
            rate = best.plan.tokens_per_step / best.times.step_s if best else 0.0
            found[number, device, host, batch] = Row(rate, time.process_time() - began)
    return found


def _points(cell: Cell) -> Iterator[tuple[float, float, int]]:
    middle = cell.batches[len(cell.batches) // 2]
    yield from ((*caps, middle) for caps in product(cell.device, cell.host))
    few = cell.device[len(cell.device) // 2], cell.host[len(cell.host) // 2]
    for caps in (few, (cell.device[-1], few[1])):
        yield from ((*caps, batch) for batch in cell.batches if batch != middle)


def slower_ones(found: Mapping[Key, Row]) -> Iterator[tuple[float, str]]:
    """Share by which a plan is slower than a neighbour's with less memory or batch, and the two in words."""
    for place, words in ((1, "GiB of device"), (2, "GiB of host"), (3, "sequences")):
        lines: dict[tuple[float, ...], list[Key]] = {}
        for key in sorted(found):
            lines.setdefault((*key[:place], *key[place + 1 :]), []).append(key)
        for line in lines.values():
            for less, more in pairwise(line):
                behind = found[less].tokens_per_s / max(found[more].tokens_per_s, 1e-9) - 1
                if behind > (SLOWER_BATCH if place == 3 else SLOWER):
                    cell = CELLS[less[0]]
                    yield (
                        behind,
                        f"{less[0]} {cell.model} on {cell.on}, {less[1]:g} + {less[2]:g} GiB, batch {less[3]}:"
                        f" {found[less].tokens_per_s:,.0f} tok/s, {more[place]:g} {words}"
                        f" {found[more].tokens_per_s:,.0f} ({-behind:.2%})",
                    )


def write(path: Path, found: Mapping[Key, Row]) -> None:
    """A line for each plan."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows((*key, row.tokens_per_s, row.planning_s) for key, row in found.items())


def read(path: Path) -> dict[Key, Row]:
    """What `write` has written."""
    with path.open(newline="") as file:
        return {
            (int(cell), float(device), float(host), int(batch)): Row(float(rate), float(seconds))
            for cell, device, host, batch, rate, seconds in csv.reader(file)
        }


def compare(before: Mapping[Key, Row], after: Mapping[Key, Row]) -> Iterator[str]:
    """For each cell how the rates have changed, and what the searches took."""
    for number in sorted({key[0] for key in after}):
        keys = [key for key in after if key[0] == number and before.get(key, Row(0, 0)).tokens_per_s]
        ratios = sorted((after[key].tokens_per_s / before[key].tokens_per_s, key) for key in keys)
        if not ratios:
            continue
        took = [sum(rows[key].planning_s for key in keys) for rows in (before, after)]
        middle = statistics.median(ratio for ratio, _ in ratios)
        worse = sum(ratio < 1 - SLOWER for ratio, _ in ratios)
        yield (
            f"{number} {CELLS[number].model} on {CELLS[number].on}: {len(ratios)} plans, median {middle:.4f} times as"
            f" fast, best {ratios[-1][0]:.4f}, worst {ratios[0][0]:.4f} {ratios[0][1][1:]}, {worse} slower;"
            f" planning {took[0]:.1f} → {took[1]:.1f} s"
        )


def main() -> int:
    """Walk, print, and tell by the exit code whether anything was slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default=",".join(map(str, range(len(CELLS)))))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    found = plan_all([int(number) for number in options.cells.split(",")])
    if options.output:
        write(options.output, found)
    if options.before:
        print("\n".join(compare(read(options.before), found)))
    slower = sorted(slower_ones(found), reverse=True)
    print("\n".join(words for _, words in slower))
    seconds = sum(row.planning_s for row in found.values())
    print(f"{len(slower)} neighbours of {len(found)} plans are slower; planning took {seconds:.1f} s of a processor")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
