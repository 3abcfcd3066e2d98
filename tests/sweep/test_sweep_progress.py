"""A sweep on stderr: lines for a log, one live line for a terminal, and the time that is left."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from flopwise.base.units import AUTO
from flopwise.cli.sweep_progress import LiveProgress, PlainProgress, TimeLeft, cell_words, watching, words_of_end
from flopwise.store.cells import Cell, CellOutcome
from flopwise.sweep.predicting import sweep_seconds
from flopwise.sweep.running import AttemptEnded, CellBegun, CellEnded, CellSkipped, Event, Noticed, SweepEnded
from tests.store.test_sweep_store import an_attempt
from tests.support.sweep_stand_in import a_cell


def cells_of(count: int = 4, attempt_s: float | None = 10.0) -> list[Cell]:
    foreseen = CellOutcome(fits=True, method="plan", attempt_s=attempt_s)
    return [a_cell(sequence_tokens=1024 * (number + 1), foreseen=foreseen) for number in range(count)]


def an_end(cell: Cell, seconds: float = 10.0, state: str = "ok", **changes: Any) -> AttemptEnded:
    return AttemptEnded(cell=cell, attempt=an_attempt(state=state, cell=cell.id, **changes), seconds=seconds)


def whole(cell: Cell, seconds: float = 10.0) -> list[Event]:
    return [CellBegun(cell=cell, repeat=1), an_end(cell, seconds, run="0001"), CellEnded(cell=cell, attempts=())]


def test_what_is_left_is_as_far_off_as_what_has_ended() -> None:
    cells = cells_of()
    left = TimeLeft(cells)
    assert (left.done, left.total, left.seconds()) == (0, 4, 40.0)
    shown = PlainProgress(left)
    shown.say = lambda line: None  # type: ignore[method-assign]  # noqa: ARG005
    for event in whole(cells[0], 20.0):
        shown(event)
    assert (left.done, left.seconds()) == (1, 60.0), "three more, each twice as long as predicted"
    shown(CellSkipped(cell=cells[1], attempts=()))
    assert left.seconds() == 40.0
    # What did not come to its end tells nothing of how long the others take.
    shown(an_end(cells[2], 0.1, "oom"))
    shown(CellEnded(cell=cells[2], attempts=()))
    assert (left.done, left.seconds()) == (3, 20.0)
    for event in whole(cells[3], 20.0):
        shown(event)
    assert (left.done, left.seconds()) == (4, 0.0)


def test_repeats_and_looking_are_counted_and_what_cannot_fit_is_not() -> None:
    cell = cells_of(1)[0]
    assert TimeLeft([cell], repeats=3).seconds() == 30.0
    auto = replace(cell, settings=replace(cell.settings, batch_sequences=AUTO, micro_batch_sequences=AUTO))
    assert TimeLeft([auto], repeats=1).seconds() == 40.0
    assert TimeLeft([replace(cell, foreseen=CellOutcome(fits=False, method="plan"))]).seconds() == 0.0


def test_looking_takes_few_steps_and_both_say_the_same() -> None:
    foreseen = CellOutcome(fits=True, method="plan", step_s=2.0, attempt_s=15.0 + 20 * 2.0)
    auto = a_cell(foreseen=foreseen, batch_sequences=AUTO, micro_batch_sequences=AUTO)
    left = TimeLeft([auto], repeats=2, steps=20)
    # Twice 55 s, and three short ones of 15 s and two steps.
    assert left.seconds() == sweep_seconds([auto], steps=20, repeats=2) == pytest.approx(2 * 55.0 + 3 * 19.0)
    left.ended(auto, an_attempt(cell=auto.id, repeat=0), 19.0)
    assert left.seconds() == pytest.approx(2 * 55.0 + 2 * 19.0)


def test_what_runs_beside_each_other_takes_less_time() -> None:
    cells = cells_of(4)
    left = TimeLeft(cells, share=lambda _: 0.5)
    assert left.seconds() == sweep_seconds(cells, steps=1, repeats=1, share=lambda _: 0.5) == 20.0
    for cell in cells[:3]:
        left.closed(cell.id)
    assert left.seconds() == 10.0, "one alone takes as long as it takes"


def test_cells_without_a_prediction_are_taken_for_average() -> None:
    cells = cells_of(2)
    assert TimeLeft([cells[0], replace(cells[1], foreseen=None)]).seconds() == 20.0
    assert TimeLeft([replace(cell, foreseen=None) for cell in cells]).seconds() is None


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (an_end(a_cell(), 4.5, run="0142"), "ok       mpt-small · sequence 64 · batch 4  4.50 s  run 0142"),
        (
            an_end(a_cell(device_memory_bytes=2**21), 0.0, "oom", reason="needs 35 MiB\nof 2\x1b[31m MiB"),
            "oom      mpt-small · sequence 64 · batch 4 · cap 2.00 MiB  needs 35 MiB of 2?[31m MiB",
        ),
        (
            an_end(a_cell(batch_sequences=AUTO, devices=8), 61.0, repeat=0, micro_batch_sequences=11, run="1"),
            "ok       mpt-small · 8 devices · sequence 64 · micro-batch 11  61.0 s  looking for the largest"
            " micro-batch",
        ),
    ],
    ids=["ok", "oom", "looking"],
)
def test_an_attempt_is_a_line(event: AttemptEnded, expected: str) -> None:
    assert words_of_end(event) == expected


def test_a_log_has_a_line_for_each_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    cells = cells_of(3)
    with watching(cells, repeats=1) as tell:
        for event in [
            *whole(cells[0]),
            CellSkipped(cell=cells[1], attempts=()),
            Noticed(cell=cells[2].id, words="another sweep is at work on it"),
            SweepEnded(attempts=(), stopped_by="SIGINT"),
        ]:
            tell(event)
    out, lines = capsys.readouterr()
    assert out == "", "stdout is for data"
    assert lines.splitlines() == [
        "ok       mpt-small · sequence 1,024 · batch 4  10.0 s  run 0001",
        f"note: cell {cells[2].id}: another sweep is at work on it",
        "1 cell was there already",
        "stopped by SIGINT after 2 of 3 cells",
    ]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_has_one_line_that_is_renewed(columns: int) -> None:
    cells, stream, clock = cells_of(4), io.StringIO(), [0.0]
    console = Console(file=stream, force_terminal=True, width=columns, highlight=False, markup=False, emoji=False)
    live = LiveProgress(console, TimeLeft(cells), clock=lambda: clock[0])
    for event in [*whole(cells[0], 20.0), CellBegun(cell=cells[1], repeat=1), CellBegun(cell=cells[2], repeat=1)]:
        live(event)
    clock[0] += 7.0
    assert live.words_of_left() == "0:53 left"
    live.bar.refresh()
    live.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "ok       mpt-small · sequence 1,024 · batch 4  20.0 s  run 0001" in shown
    assert "1/4 cells 0:53 left mpt-small · sequence 2,048" in shown
    assert cell_words(cells[1]) == "mpt-small · sequence 2,048 · batch 4"
    assert all(len(line) <= columns for line in re.split(r"[\r\n]", shown))
