"""Sweeps that train for real on the CPU: killed, crashed, out of memory, beside each other; the rows stay the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import AUTO
from flopwise.catalog.load import load_hardware, model_table
from flopwise.setup.hardware import Hardware
from flopwise.setup.setup import Setup
from flopwise.store.cells import Attempt, Cell, CellOutcome, SweepRecord, standing_attempts
from flopwise.store.results import Result, result_of_cell, result_of_run
from flopwise.store.rows import read_profile, read_row, row_of
from flopwise.store.runs import ROW, read_record
from flopwise.store.sweeps import read_attempts, read_cell, read_sweep, write_sweep
from flopwise.sweep import keeper
from flopwise.sweep.running import CellSkipped, Event, run_sweep
from flopwise.train.planning import find_plan
from flopwise.work.formats import parse_formats
from tests.support.launched import described_cpu
from tests.support.listing import list_runs
from tests.support.sweep_stand_in import MPT, a_cell, a_sweep, alive, until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LEAST_CAP_BYTES = 2**21
"""Less than any of these models takes."""
VARIES = (
    *("run", "attempt", "started", "step_s", "step_s_p20", "step_s_p80", "tokens_per_s", "tokens_per_s_p20"),
    *("tokens_per_s_p80", "tokens_per_s_per_device", "samples_per_s", "model_flops_per_s_per_device", "mfu", "hfu"),
    *("peak_flops", "predicted_step_s", "predicted_tokens_per_s", "prediction_error", "device_bytes", "host_bytes"),
)
"""Times, dates, numbers of runs, and what is measured: this CPU's peak, and what follows from it, among them."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that describes this CPU: no process has to measure it."""
    file = tmp_path_factory.mktemp("machine") / "mine.toml"
    file.write_text(described_cpu())
    return str(file)


def grid(store: Path, machine: str) -> list[Cell]:
    """Two small models, two lengths and two batches, of which every pair is there, and one cell that cannot fit."""
    wider = replace(MPT, name="mpt-wider", hidden=96, ffn=384)
    cells = [
        a_cell(store, hardware=machine, model=model_table(model), sequence_tokens=tokens, batch_sequences=batch)
        for model, tokens, batch in ((MPT, 32, 2), (MPT, 64, 3), (wider, 32, 3), (wider, 64, 2))
    ]
    return [*cells[:3], a_cell(store, hardware=machine, device_memory_bytes=LEAST_CAP_BYTES), *cells[3:]]


def prepared(store: Path, cells: list[Cell], name: str = "small") -> SweepRecord:
    record = a_sweep(*cells, name=name, profile=False)
    write_sweep(store, record)
    return record


def drive(store: str, name: str, **changes: Any) -> None:
    """What a process of its own does."""
    run_sweep(Path(store), read_sweep(Path(store), name), **changes)


def sweeping(store: Path, name: str = "small") -> subprocess.Popen[bytes]:
    code = f"from tests.sweep.test_sweep_real import drive; drive({str(store)!r}, {name!r}, grace_s=5.0)"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)


def rows(store: Path, cells: list[Cell]) -> list[dict[str, Any]]:
    found = []
    for cell in cells:
        for attempt in standing_attempts(read_attempts(store, cell.id)[0]):
            run = result_of_run(read_record(store / attempt.run)) if attempt.run else None
            found.append(plain(result_of_cell(read_cell(store, cell.id), attempt, run)))
    return found


def plain(row: Result) -> dict[str, Any]:
    table = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in VARIES}
    return {**table, "last_loss": None if row.last_loss is None else round(row.last_loss, 3)}


def workers(store: Path, cells: list[Cell]) -> list[int]:
    """Processes that train for attempts, beside those that keep them."""
    keepers = [
        attempt.pid or 0 for cell in cells for attempt in read_attempts(store, cell.id)[0] if attempt.state == "running"
    ]
    return [pid for session in keepers for pid in keeper.members(session) if pid != session]


def ended(store: Path, cells: list[Cell]) -> list[Attempt]:
    return [attempt for cell in cells for attempt in read_attempts(store, cell.id)[0] if attempt.ended]


def done_runs(store: Path) -> int:
    return sum(run.record is not None and run.record.state == "done" for run in list_runs(store))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, machine: str) -> tuple[Path, list[Cell]]:
    store = tmp_path_factory.mktemp("undisturbed")
    cells = grid(store, machine)
    run_sweep(store, prepared(store, cells), slots=2)
    return store, cells


def test_a_run_is_of_the_cell_that_it_was_made_for(undisturbed: tuple[Path, list[Cell]]) -> None:
    store, cells = undisturbed
    states = [attempt.state for cell in cells for attempt in standing_attempts(read_attempts(store, cell.id)[0])]
    assert states == ["ok"] * 3 + ["oom"] + ["ok"]
    for cell in cells:
        for attempt in read_attempts(store, cell.id)[0]:
            if attempt.run is not None:
                record = read_record(store / attempt.run)
                assert (record.cell, record.attempt) == (cell.id, attempt.number)
                assert read_row(store / attempt.run) == row_of(record, read_profile(store / attempt.run))
                assert (store / attempt.run / ROW).exists()
    (refused,) = standing_attempts(read_attempts(store, cells[3].id)[0])
    assert (refused.reason or "").startswith("no plan fits mpt-small on this-cpu in 2.00 MiB of device memory")


def test_a_sweep_that_is_killed_and_crashes_has_the_same_rows(
    tmp_path: Path, machine: str, undisturbed: tuple[Path, list[Cell]]
) -> None:
    cells = grid(tmp_path, machine)
    record = prepared(tmp_path, cells)
    # The sweep is killed while its third cell trains: with it goes all that it has started.
    with sweeping(tmp_path) as sweep:
        worker = until(lambda: workers(tmp_path, cells) if len(ended(tmp_path, cells)) >= 2 else [], 300)[0]
        session = os.getsid(worker)
        time.sleep(1.5)
        sweep.kill()
    until(lambda: not alive(session) and not workers(tmp_path, cells), 300)
    before = ended(tmp_path, cells)
    # The next one goes on, and one of its processes crashes.
    with sweeping(tmp_path) as sweep:
        os.kill(until(lambda: workers(tmp_path, cells), 300)[0], signal.SIGSEGV)
        assert sweep.wait(600) == 0
    failed = [attempt for attempt in ended(tmp_path, cells) if attempt.state == "failed"]
    assert [(attempt.reason, attempt.exit_code) for attempt in failed] == [("SIGSEGV", -signal.SIGSEGV)]
    # What failed is tried once more, and nothing else is.
    events: list[Event] = []
    run_sweep(tmp_path, record, retry=True, tell=events.append)
    assert sum(isinstance(event, CellSkipped) for event in events) == len(cells) - 1
    assert rows(tmp_path, cells) == rows(*undisturbed)
    assert done_runs(tmp_path) == done_runs(undisturbed[0]) == 4, "no cell was trained twice to its end"
    after = {(attempt.cell, attempt.number): attempt for attempt in ended(tmp_path, cells)}
    assert len(before) >= 2 and all(after[attempt.cell, attempt.number] == attempt for attempt in before)


def test_two_sweeps_at_once_measure_every_cell_once(tmp_path: Path, machine: str) -> None:
    cells = [cell for cell in grid(tmp_path, machine) if cell.settings.device_memory_bytes is None]
    prepared(tmp_path, cells[:3], "first")
    prepared(tmp_path, cells[:0:-1], "second")
    with sweeping(tmp_path, "first") as first, sweeping(tmp_path, "second") as second:
        assert (first.wait(600), second.wait(600)) == (0, 0)
    found = {cell.id: read_attempts(tmp_path, cell.id)[0] for cell in cells}
    assert [[attempt.state for attempt in attempts] for attempts in found.values()] == [["ok"]] * 4
    assert done_runs(tmp_path) == len(list_runs(tmp_path)) == 4
    assert {attempt.sweep for attempts in found.values() for attempt in attempts} == {"first", "second"}


# -- the largest micro-batch -----------------------------------------------------------------------------------------


def fits(micro: int, cap_bytes: int, hardware: Hardware) -> bool:
    setup = Setup(
        model=MPT,
        hardware=hardware,
        hardware_name="mine",
        sequence_tokens=64,
        batch_sequences=micro,
        micro_batch_sequences=micro,
        formats=parse_formats("fp32"),
        device_cap_bytes=cap_bytes,
    )
    try:
        find_plan(setup)
    except FlopwiseError:
        return False
    return True


def test_the_largest_micro_batch_is_found_for_real(tmp_path: Path, machine: str) -> None:
    low, high, here = 2**20, 2**27, load_hardware(machine)
    assert fits(12, high, here) and not fits(12, low, here)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(12, middle, here) else (middle, high)
    assert fits(11, low, here), "a cap that eleven fit and twelve do not"
    cell = a_cell(
        tmp_path,
        hardware=machine,
        batch_sequences=AUTO,
        micro_batch_sequences=AUTO,
        device_memory_bytes=low,
        foreseen=CellOutcome(fits=True, method="plan", micro_batch_sequences=12),
    )
    (attempt,) = run_sweep(tmp_path, prepared(tmp_path, [cell]))
    assert (attempt.state, attempt.micro_batch_sequences, attempt.batch_sequences) == ("ok", 11, 11)
    measured = read_record(tmp_path / (attempt.run or "")).measurement
    assert measured is not None and (measured.micro_batch_sequences, measured.batch_sequences) == (11, 11)
    tried = [(attempt.micro_batch_sequences, attempt.state) for attempt in read_attempts(tmp_path, cell.id)[0]]
    assert tried == [(12, "oom"), (11, "ok"), (11, "ok")]
