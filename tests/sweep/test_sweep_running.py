"""A sweep over cells: what is tried, what is not tried again, and what two of them do beside each other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import AUTO
from flopwise.store.cells import Attempt, Cell, CellOutcome
from flopwise.store.sweeps import CELL, CELLS, LOCK, cell_folder, claimed, new_attempt, read_attempts
from flopwise.sweep.attempts import Trial
from flopwise.sweep.auto_batch import LOOKING_STEPS
from flopwise.sweep.running import (
    AttemptEnded,
    CellBegun,
    CellEnded,
    CellSkipped,
    Event,
    Noticed,
    SweepEnded,
    run_sweep,
)
from tests.store.test_sweep_store import an_attempt, now
from tests.support.sweep_stand_in import a_cell, a_sweep, alive, stand_in, until

ROOT = Path(__file__).parents[2]


def cells_of(store: Path, count: int = 3, **changes: Any) -> list[Cell]:
    return [a_cell(store, sequence_tokens=64 * (number + 1), **changes) for number in range(count)]


def runs_of(store: Path) -> list[str]:
    return sorted(path.name for path in store.glob("0*"))


def swept(store: Path, cells: list[Cell], how: Any = "ok", **changes: Any) -> tuple[list[Attempt], list[Event]]:
    events: list[Event] = []
    record = changes.pop("record", None) or a_sweep(*cells)
    attempts = run_sweep(store, record, command=stand_in(store, how), tell=events.append, grace_s=0.5, **changes)
    return attempts, events


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_every_cell_is_tried_in_its_order(tmp_path: Path) -> None:
    cells = cells_of(tmp_path)
    attempts, events = swept(tmp_path, cells)
    assert [(attempt.cell, attempt.state, attempt.repeat) for attempt in attempts] == [
        (cell.id, "ok", 1) for cell in cells
    ]
    assert kinds(events) == ["CellBegun", "AttemptEnded", "CellEnded"] * 3 + ["SweepEnded"]
    assert [event.cell for event in events if isinstance(event, CellBegun)] == cells
    assert {attempt.sweep for attempt in attempts} == {"small"}


def test_what_is_finished_is_not_done_again_unless_forced(tmp_path: Path) -> None:
    cells = cells_of(tmp_path)
    how = {cells[0].id: "ok", cells[1].id: "memory", cells[2].id: "ok"}
    first, _ = swept(tmp_path, cells, how)
    again, events = swept(tmp_path, cells, "signal:SIGSEGV")
    assert again == first and runs_of(tmp_path) == ["0001", "0002"]
    assert kinds(events) == ["CellSkipped"] * 3 + ["SweepEnded"]
    forced, _ = swept(tmp_path, cells, "ok", force=True)
    assert [attempt.state for attempt in forced] == ["ok"] * 3
    assert [attempt.number for attempt in forced] == [2, 2, 2]


@pytest.mark.parametrize(("how", "state"), [("crash", "failed"), ("sleep:600", "timeout")])
def test_what_failed_is_tried_again_only_when_asked(tmp_path: Path, how: str, state: str) -> None:
    cells = cells_of(tmp_path, 1)
    record = a_sweep(*cells, time_limit_s=0.5 if state == "timeout" else None)
    (first,), _ = swept(tmp_path, cells, how, record=record)
    assert first.state == state
    (same,), events = swept(tmp_path, cells, "ok", record=record)
    assert same == first and isinstance(events[0], CellSkipped)
    (second,), _ = swept(tmp_path, cells, "ok", retry=True)
    assert (second.state, second.number) == ("ok", 2)


@pytest.mark.parametrize("changes", [{"interrupted": True}, {"ended": None, "pid": 2**22 - 1}])
def test_what_was_interrupted_is_tried_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    cells = cells_of(tmp_path, 1)
    new_attempt(tmp_path, an_attempt(state="failed", cell=cells[0].id, started=now(), **changes))
    (attempt,), _ = swept(tmp_path, cells)
    assert (attempt.state, attempt.number) == ("ok", 2)


def test_repeats_are_runs_of_their_own(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 2)
    record = a_sweep(*cells, repeats=3)
    attempts, _ = swept(tmp_path, cells, record=record)
    assert [attempt.repeat for attempt in attempts] == [1, 2, 3, 1, 2, 3]
    assert [attempt.run for attempt in attempts] == runs_of(tmp_path) and len(runs_of(tmp_path)) == 6
    assert len({attempt.pid for attempt in attempts}) == 6
    more, _ = swept(tmp_path, cells, record=replace(record, repeats=4))
    assert len(more) == 8 and len(runs_of(tmp_path)) == 8


def test_a_failed_repeat_ends_its_cell_and_keeps_what_was_measured(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 1)
    swept(tmp_path, cells)
    record = a_sweep(*cells, repeats=3)
    attempts, _ = swept(tmp_path, cells, "crash", record=record)
    assert [(attempt.repeat, attempt.state) for attempt in attempts] == [(1, "ok"), (2, "failed")]
    attempts, _ = swept(tmp_path, cells, "ok", record=record, retry=True)
    assert [(attempt.repeat, attempt.number) for attempt in attempts] == [(1, 1), (2, 3), (3, 4)]


def test_only_some_cells(tmp_path: Path) -> None:
    cells = cells_of(tmp_path)
    attempts, _ = swept(tmp_path, cells, only=[cells[1].id])
    assert [attempt.cell for attempt in attempts] == [cells[1].id]


def test_what_a_sweep_leaves_out_stays_so_unless_it_is_named(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 1)
    left_out = new_attempt(tmp_path, an_attempt(state="skipped", cell=cells[0].id, sweep="small", reason="too slow"))
    assert swept(tmp_path, cells)[0] == [left_out]
    (other,), _ = swept(tmp_path, cells, record=replace(a_sweep(*cells), name="another"))
    assert (other.state, other.number) == ("ok", 2)


@pytest.mark.parametrize("force", [False, True])
def test_what_was_decided_decides_whatever_was_measured_of_it(tmp_path: Path, force: bool) -> None:
    cells = cells_of(tmp_path, 2)
    measured = new_attempt(tmp_path, an_attempt(cell=cells[0].id, sweep="another", run="0001", steps=1))
    record = replace(a_sweep(*cells), request={"skipped": {cells[0].id: "too slow"}})
    first, second = swept(tmp_path, cells, record=record, only=[cell.id for cell in cells], force=force)[0]
    assert first == measured and second.state == "ok"
    (named,), _ = swept(tmp_path, cells, record=record, only=[cells[0].id], named=[cells[0].id])
    assert (named.state, named.number) == ("ok", 2)


def test_a_rule_that_is_gone_leaves_nothing_out(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 1)
    new_attempt(tmp_path, an_attempt(state="skipped", cell=cells[0].id, sweep="small", reason="too slow"))
    (attempt,), _ = swept(tmp_path, cells, record=replace(a_sweep(*cells), request={"skipped": {}}))
    assert (attempt.state, attempt.number) == ("ok", 2)


def test_more_steps_are_another_measurement_and_fewer_are_none(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 2)
    how = {cells[0].id: "ok", cells[1].id: "memory"}
    first, _ = swept(tmp_path, cells, how)
    assert swept(tmp_path, cells, "crash", record=a_sweep(*cells, steps=2))[0] == first
    again, events = swept(tmp_path, cells, "ok", record=a_sweep(*cells, steps=5))
    assert [(attempt.state, attempt.number, attempt.steps) for attempt in again] == [("ok", 2, 5), ("oom", 1, 3)]
    assert [(event.cell, event.words) for event in events if isinstance(event, Noticed)] == [
        (cells[0].id, "measured over 3 steps before, and again, since 5 are wanted")
    ]


def test_what_is_foreseen_not_to_fit_needs_no_process(tmp_path: Path) -> None:
    foreseen = CellOutcome(fits=False, method="plan", device_bytes=3 * 2**30, reason="no plan fits")
    capped = a_cell(tmp_path, foreseen=foreseen, device_memory_bytes=2**30)
    open_ = a_cell(tmp_path, foreseen=foreseen)
    several = a_cell(tmp_path, foreseen=replace(foreseen, method="predict"), devices=2)
    attempts, _ = swept(tmp_path, [capped, open_, several])
    assert [(attempt.state, attempt.reason, attempt.pid is None) for attempt in attempts] == [
        ("oom", "needs 3.00 GiB of 1.00 GiB", True),
        ("oom", "no plan fits", True),
        ("ok", None, False),
    ]


# -- the largest micro-batch -----------------------------------------------------------------------------------------


def looked(store: Path, cell: Cell) -> list[tuple[int | None, str]]:
    return [
        (attempt.micro_batch_sequences, attempt.state)
        for attempt in read_attempts(store, cell.id)[0]
        if attempt.repeat == 0
    ]


@pytest.mark.parametrize(("fits", "guess"), [(1, 4), (11, None), (11, 11), (7, 11), (64, 60)])
def test_the_largest_micro_batch_is_found(tmp_path: Path, fits: int, guess: int | None) -> None:
    foreseen = None if guess is None else CellOutcome(fits=True, method="plan", micro_batch_sequences=guess)
    cell = a_cell(
        tmp_path, batch_sequences=AUTO, micro_batch_sequences=AUTO, sequence_tokens=4096, devices=2, foreseen=foreseen
    )
    ((attempt,), events) = swept(tmp_path, [cell], f"fits:{fits}")
    assert (attempt.repeat, attempt.state) == (1, "ok")
    assert (attempt.micro_batch_sequences, attempt.batch_sequences, attempt.steps) == (fits, 2 * fits, 3)
    tries = looked(tmp_path, cell)
    assert len(tries) == len(set(tries)), "nothing is tried twice"
    begun = [event.micro_batch_sequences for event in events if isinstance(event, CellBegun)]
    assert begun == [micro for micro, _ in tries] + [fits]
    assert all(attempt.steps == LOOKING_STEPS for attempt in read_attempts(tmp_path, cell.id)[0] if attempt.repeat == 0)


def test_where_not_even_one_fits_the_cell_is_out_of_memory(tmp_path: Path) -> None:
    cell = a_cell(tmp_path, batch_sequences=AUTO, micro_batch_sequences=AUTO)
    (attempt,), _ = swept(tmp_path, [cell], "fits:0")
    assert (attempt.state, attempt.reason) == ("oom", "not even a micro-batch of one sequence fits")
    (again,), events = swept(tmp_path, [cell], "fits:0")
    assert again == attempt and isinstance(events[0], CellSkipped)


def test_what_is_known_of_micro_batches_is_not_tried_again(tmp_path: Path) -> None:
    cell = a_cell(tmp_path, batch_sequences=AUTO, micro_batch_sequences=AUTO)
    for micro in (1, 2, 4, 8):
        new_attempt(tmp_path, an_attempt(0, 0, "ok", cell=cell.id, micro_batch_sequences=micro))
    new_attempt(tmp_path, an_attempt(0, 0, "oom", cell=cell.id, micro_batch_sequences=12))
    (attempt,), _ = swept(tmp_path, [cell], "fits:11")
    assert attempt.micro_batch_sequences == 11
    assert {micro for micro, _ in looked(tmp_path, cell)[5:]} <= {9, 10, 11}


def test_a_measurement_that_takes_more_than_looking_did_goes_one_lower(tmp_path: Path) -> None:
    cell = a_cell(tmp_path, batch_sequences=AUTO, micro_batch_sequences=AUTO)

    def command(trial: Trial, store: Path, model: Path) -> list[str]:
        return stand_in(store, "fits:4" if trial.repeat == 0 else "fits:3")(trial, store, model)

    stand_in(tmp_path)
    (attempt,) = run_sweep(tmp_path, a_sweep(cell), command=command)
    assert (attempt.state, attempt.micro_batch_sequences) == ("ok", 3)


def test_a_crash_while_looking_is_the_cells(tmp_path: Path) -> None:
    cell = a_cell(tmp_path, batch_sequences=AUTO, micro_batch_sequences=AUTO)
    (attempt,), _ = swept(tmp_path, [cell], "signal:SIGSEGV")
    assert (attempt.repeat, attempt.state, attempt.reason) == (0, "failed", "SIGSEGV")
    (same,), _ = swept(tmp_path, [cell], "fits:2")
    assert same == attempt
    (after,), _ = swept(tmp_path, [cell], "fits:2", retry=True)
    assert (after.state, after.micro_batch_sequences) == ("ok", 2)


def test_a_micro_batch_that_is_given_is_not_looked_for(tmp_path: Path) -> None:
    cell = a_cell(tmp_path, batch_sequences=AUTO, micro_batch_sequences=5, devices=3)
    (attempt,), _ = swept(tmp_path, [cell], "fits:5")
    assert (attempt.number, attempt.micro_batch_sequences, attempt.batch_sequences) == (1, 5, 15)


# -- beside others, and the end --------------------------------------------------------------------------------------


def test_two_sweeps_measure_every_cell_once(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 6)
    command, results = stand_in(tmp_path, "ok:0.1"), list[list[Attempt]]()
    orders = [cells[:5], list(reversed(cells))]

    def work(order: list[Cell], name: str) -> None:
        results.append(run_sweep(tmp_path, replace(a_sweep(*order), name=name), command=command))

    threads = [threading.Thread(target=work, args=(order, f"s{number}")) for number, order in enumerate(orders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs_of(tmp_path)) == 6
    assert all(len(read_attempts(tmp_path, cell.id)[0]) == 1 for cell in cells)
    assert sorted(len(result) for result in results) == [5, 6]
    assert {attempt.state for result in results for attempt in result} == {"ok"}


def test_a_cell_that_another_has_is_waited_for(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 2)
    events, found = list[Event](), list[Attempt]()

    def work() -> None:
        found.extend(run_sweep(tmp_path, a_sweep(*cells), command=stand_in(tmp_path), tell=events.append))

    thread = threading.Thread(target=work)
    with claimed(tmp_path, cells[0].id):
        thread.start()
        until(lambda: any(isinstance(event, CellEnded) for event in events))
        new_attempt(tmp_path, an_attempt(cell=cells[0].id, reason=None, run="0001"))
    thread.join(20)
    assert [attempt.cell for attempt in found] == [cell.id for cell in cells]
    assert runs_of(tmp_path) == ["0001"], "the other's result is taken"
    assert [event.words for event in events if isinstance(event, Noticed)] == ["another sweep is at work on it"]


def test_slots_run_beside_each_other_and_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cells = cells_of(tmp_path, 2)
    events: list[Event] = []
    script = "import os, time; time.sleep(1); raise SystemExit('threads ' + os.environ['OMP_NUM_THREADS'])"
    attempts = run_sweep(
        tmp_path, a_sweep(*cells), slots=2, command=lambda *_: [sys.executable, "-c", script], tell=events.append
    )
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [attempt.reason for attempt in attempts] == [f"threads {share}"] * 2
    assert kinds(events)[:2] == ["CellBegun", "CellBegun"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_what_runs_and_the_next_sweep_goes_on(tmp_path: Path, number: int, code: int) -> None:
    cells = cells_of(tmp_path, 3)
    stand_in(tmp_path)
    script = f"""
        import sys
        from pathlib import Path
        from tests.support.sweep_stand_in import a_sweep, stand_in
        from flopwise.store.sweeps import read_cell
        from flopwise.sweep.running import run_sweep
        store = Path({str(tmp_path)!r})
        names = {[cell.id for cell in cells]!r}
        cells = [read_cell(store, name) for name in names]
        how = dict(zip(names, ["ok", "family:600", "ok"]))
        try:
            run_sweep(store, a_sweep(*cells), command=stand_in(store, how), grace_s=0.5)
        except KeyboardInterrupt:
            sys.exit(130)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT) as sweep:
        until((tmp_path / "0002" / "record.json").exists)
        sweep.send_signal(number)
        assert sweep.wait(20) == code
    (stopped,), _ = read_attempts(tmp_path, cells[1].id)
    assert (stopped.state, stopped.reason) == ("failed", f"interrupted by {signal.Signals(number).name}")
    assert stopped.pid is not None and alive(stopped.pid) == []
    assert read_attempts(tmp_path, cells[2].id)[0] == []
    attempts, events = swept(tmp_path, cells)
    assert [(attempt.state, attempt.number) for attempt in attempts] == [("ok", 1), ("ok", 2), ("ok", 1)]
    assert Counter(kinds(events))["CellSkipped"] == 1


# -- damage ----------------------------------------------------------------------------------------------------------


def test_a_store_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / CELLS).write_text("not ours")
    with pytest.raises(FlopwiseError, match="cannot write"):
        run_sweep(tmp_path, a_sweep(a_cell()))


def test_damage_of_one_cell_is_a_row_and_ends_no_other(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 4)
    (cell_folder(tmp_path, cells[0].id) / CELL).write_text("{")
    (cell_folder(tmp_path, cells[1].id) / LOCK).mkdir()
    (cell_folder(tmp_path, cells[2].id) / "attempt-0001.json").write_text('{"number": 1')
    record = replace(a_sweep(*cells), cells=("../../../etc", *(cell.id for cell in cells)))
    attempts, events = swept(tmp_path, cells, record=record)
    assert [attempt.state for attempt in attempts] == ["failed", "failed", "failed", "ok", "ok"]
    assert "is no cell" in (attempts[0].reason or "")
    assert "damaged" in (attempts[1].reason or "")
    assert "cannot write" in (attempts[2].reason or "")
    assert attempts[3].number == 2
    assert len([event for event in events if isinstance(event, Noticed)]) == 4
    assert (cell_folder(tmp_path, cells[2].id) / "attempt-0001.json").read_text() == '{"number": 1', "kept as it was"


def test_a_measurement_whose_run_is_gone_is_made_again(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 2)
    swept(tmp_path, cells)
    (tmp_path / "0001" / "record.json").unlink()
    (tmp_path / "0001").rmdir()
    attempts, events = swept(tmp_path, cells)
    assert [attempt.number for attempt in attempts] == [2, 1]
    assert Counter(kinds(events)) == {
        "CellBegun": 1,
        "AttemptEnded": 1,
        "CellEnded": 1,
        "CellSkipped": 1,
        "SweepEnded": 1,
    }


def test_an_attempt_on_another_machine_is_left_alone(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 1)
    there = new_attempt(
        tmp_path,
        an_attempt(state="running", ended=None, started=now(), cell=cells[0].id, host="another.example", pid=1),
    )
    (attempt,), events = swept(tmp_path, cells)
    assert attempt == there
    assert [event.words for event in events if isinstance(event, Noticed)] == [
        "attempt 1 is running on another.example"
    ]
    assert read_attempts(tmp_path, cells[0].id)[0] == [there]
    (forced,), _ = swept(tmp_path, cells, force=True)
    assert (forced.state, forced.number) == ("ok", 2)
    assert swept(tmp_path, cells)[0] == [forced], "what is measured is not left to it"


def test_an_attempt_on_another_machine_that_is_silent_is_tried_again(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 1)
    left = an_attempt(state="running", ended=None, started=now(), cell=cells[0].id, host="another.example", pid=1)
    new_attempt(tmp_path, left)
    os.utime(cell_folder(tmp_path, cells[0].id) / "attempt-0001.json", (1e9, 1e9))
    (attempt,), _ = swept(tmp_path, cells)
    assert (attempt.state, attempt.number) == ("ok", 2)


def test_an_attempt_that_lives_here_is_waited_for_even_by_force(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 1)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"]) as process:
        left = an_attempt(state="running", ended=None, started=now(), cell=cells[0].id, pid=process.pid)
        new_attempt(tmp_path, replace(left, host=socket.gethostname()))
        (attempt,), events = swept(tmp_path, cells, force=True)
        assert process.poll() is not None
    assert attempt.number == 2 and kinds(events)[0] == "Noticed"


def test_an_attempt_that_outlives_its_sweep_is_waited_for(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 1)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"]) as process:
        left = an_attempt(state="running", ended=None, started=now(), cell=cells[0].id, pid=process.pid)
        new_attempt(tmp_path, replace(left, host=socket.gethostname()))
        (attempt,), events = swept(tmp_path, cells)
    assert (attempt.state, attempt.number) == ("ok", 2)
    assert kinds(events)[0] == "Noticed"
    assert read_attempts(tmp_path, cells[0].id)[0][0].state == "failed"


def test_a_mistake_of_ours_is_not_swallowed(tmp_path: Path) -> None:
    def command(*_: object) -> list[str]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_sweep(tmp_path, a_sweep(*cells_of(tmp_path, 2)), command=command)


def test_events_hold_what_a_page_shows(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, 1)
    attempts, events = swept(tmp_path, cells)
    ended = next(event for event in events if isinstance(event, AttemptEnded))
    assert ended.attempt == attempts[0] and 0 < ended.seconds < 20
    assert events[-1] == SweepEnded(attempts=tuple(attempts), stopped_by=None)
    assert json.loads((cell_folder(tmp_path, cells[0].id) / "attempt-0001.json").read_text())["state"] == "ok"
