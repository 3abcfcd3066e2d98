"""Cells, attempts and sweeps in the store: numbers that are claimed once, and damage that hides nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.setup.written import CellSetup, cell_id
from flopwise.store.cells import Attempt, CellOutcome, SweepRecord, says_nothing, standing_attempts
from flopwise.store.sweeps import (
    CELL,
    CELLS,
    LOCK,
    SILENT_AFTER_S,
    STALE_AFTER_S,
    SWEEPS,
    beat,
    cell_folder,
    claimed,
    is_gone,
    list_cells,
    moment,
    new_attempt,
    read_attempts,
    read_cell,
    read_sweep,
    sweep_names,
    verdict,
    write_attempt,
    write_cell,
    write_sweep,
)
from tests.support.sweep_stand_in import a_cell, a_sweep

GONE = "its process was killed, or its machine went down"


def now(seconds_ago: float = 0.0) -> str:
    return (datetime.now().astimezone() - timedelta(seconds=seconds_ago)).isoformat(timespec="seconds")


def an_attempt(number: int = 1, repeat: int = 1, state: str = "ok", **changes: Any) -> Attempt:
    plain = Attempt(
        number=number,
        cell="0" * 12,
        repeat=repeat,
        state="ok",
        started="2026-11-15T12:00:00+01:00",
        ended="2026-11-15T12:00:09+01:00",
        steps=3,
    )
    return replace(plain, state=state, **changes)  # type: ignore[arg-type]


# -- cells -----------------------------------------------------------------------------------------------------------


def test_a_cell_is_read_back_equal(tmp_path: Path) -> None:
    foreseen = CellOutcome(fits=True, method="plan", step_s=0.25, device_bytes=2**40 + 1, reason="[bold]ä")
    cell = a_cell(tmp_path, foreseen=foreseen, batch_sequences="auto")
    assert read_cell(tmp_path, cell.id) == cell
    assert list_cells(tmp_path) == ([cell], [])


def test_a_cells_name_is_its_shape_and_not_its_words() -> None:
    cell = a_cell()
    other = {**cell.settings.model, "title": "another", "source": "elsewhere"}
    assert cell_id(replace(cell.settings, model=other)) == cell.id
    assert cell_id(replace(cell.settings, model={**cell.settings.model, "layers": 3})) != cell.id
    turned = dict(reversed(list(cell.settings.model.items())))
    assert cell_id(replace(cell.settings, model=turned)) == cell.id


def test_every_field_of_the_settings_makes_another_cell() -> None:
    plain = a_cell().settings
    changed: dict[str, Any] = {
        "hardware": "h200",
        "devices": 2,
        "sequence_tokens": 65,
        "lengths": "packed:5,17",
        "batch_sequences": "auto",
        "micro_batch_sequences": "auto",
        "precision": "bf16",
        "optimizer": "sgd",
        "task": "classification",
        "device_memory_bytes": 1,
        "host_memory_bytes": 1,
        "model": {"name": "other"},
    }
    assert set(changed) == set(CellSetup.__dataclass_fields__)
    names = {cell_id(replace(plain, **{name: value})) for name, value in changed.items()}
    assert len(names) == len(changed) and cell_id(plain) not in names


@pytest.mark.parametrize("name", ["../../../etc", "0123", "0123456789AB", "", "0123456789ab/", "0123456789ab\n"])
def test_only_a_name_of_a_cell_is_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(FlopwiseError, match="is no cell"):
        cell_folder(tmp_path, name)


def test_a_store_that_no_folder_can_be_is_told_in_words() -> None:
    with pytest.raises(FlopwiseError, match="cannot be listed"):
        sweep_names(Path("\0"))


def test_damage_hides_no_other_cell(tmp_path: Path) -> None:
    good, half, empty = a_cell(tmp_path), a_cell(tmp_path, devices=2), a_cell(tmp_path, devices=3)
    path = cell_folder(tmp_path, half.id) / CELL
    path.write_text(path.read_text()[:100])
    (cell_folder(tmp_path, empty.id) / CELL).unlink()
    (tmp_path / CELLS / "notes.txt").write_text("not ours")
    (tmp_path / CELLS / ("f" * 12)).write_text("a file where a folder belongs")
    cells, problems = list_cells(tmp_path)
    assert cells == [good]
    assert {problem.path.name for problem in problems} == {half.id, empty.id, "f" * 12}
    assert any("damaged" in problem.why for problem in problems)


def test_nothing_is_there_before_the_first_cell(tmp_path: Path) -> None:
    assert list_cells(tmp_path / "new") == ([], [])
    assert sweep_names(tmp_path / "new") == []
    assert read_attempts(tmp_path, "0" * 12) == ([], [])


# -- claims ----------------------------------------------------------------------------------------------------------


def test_a_cell_has_one_claim_at_a_time(tmp_path: Path) -> None:
    cell = a_cell(tmp_path)
    with claimed(tmp_path, cell.id) as first, claimed(tmp_path, cell.id) as second:
        assert (first, second) == (True, False)
    with claimed(tmp_path, cell.id) as again:
        assert again


def test_a_claim_goes_with_its_process(tmp_path: Path) -> None:
    cell = a_cell(tmp_path)
    code = f"""
        import sys
        from pathlib import Path
        from flopwise.store.sweeps import claimed
        with claimed(Path({str(tmp_path)!r}), {cell.id!r}) as ours:
            print(ours, flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        with claimed(tmp_path, cell.id) as ours:
            assert not ours
        other.kill()
    with claimed(tmp_path, cell.id) as ours:
        assert ours


def test_a_lock_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    cell = a_cell(tmp_path)
    (cell_folder(tmp_path, cell.id) / LOCK).mkdir()
    with pytest.raises(FlopwiseError, match="cannot write"), claimed(tmp_path, cell.id):
        pass


def test_a_file_in_the_place_of_cells_is_told(tmp_path: Path) -> None:
    (tmp_path / CELLS).write_text("not ours")
    with pytest.raises(FlopwiseError, match="cannot write"):
        write_cell(tmp_path, a_cell())
    with pytest.raises(FlopwiseError, match="cannot write"):
        new_attempt(tmp_path, an_attempt())


# -- attempts --------------------------------------------------------------------------------------------------------


def test_a_number_is_nobody_elses(tmp_path: Path) -> None:
    found = list[int]()

    def claim() -> None:
        for _ in range(5):
            found.append(new_attempt(tmp_path, an_attempt()).number)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 21))
    attempts, problems = read_attempts(tmp_path, "0" * 12)
    assert [attempt.number for attempt in attempts] == list(range(1, 21)) and problems == []
    assert {path.suffix for path in cell_folder(tmp_path, "0" * 12).iterdir()} == {".json"}


def test_a_file_system_without_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert [new_attempt(tmp_path, an_attempt()).number for _ in range(3)] == [1, 2, 3]
    assert len(read_attempts(tmp_path, "0" * 12)[0]) == 3


def test_a_half_written_attempt_is_a_problem_and_its_number_is_taken(tmp_path: Path) -> None:
    first = new_attempt(tmp_path, an_attempt())
    folder = cell_folder(tmp_path, first.cell)
    (folder / "attempt-0002.json").write_text('{"number": 2, "cel')
    (folder / "attempt-0003.json").touch()
    (folder / "attempt-0004.json.bak").write_text("not ours")
    third = new_attempt(tmp_path, an_attempt())
    attempts, problems = read_attempts(tmp_path, first.cell)
    assert [attempt.number for attempt in attempts] == [1, 4] and third.number == 4
    assert [problem.path.name for problem in problems] == ["attempt-0002.json", "attempt-0003.json"]


def test_an_attempt_whose_process_is_gone_has_failed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    running: dict[str, Any] = {"state": "running", "ended": None, "started": now(), "host": socket.gethostname()}
    gone = new_attempt(tmp_path, an_attempt(**running, pid=process.pid))
    ours = new_attempt(tmp_path, an_attempt(**running, pid=os.getpid()))
    (first, second), _ = read_attempts(tmp_path, gone.cell)
    assert (first.state, first.reason) == ("failed", GONE) and says_nothing(first)
    assert second == ours


def test_a_number_that_another_process_has_by_now_is_gone() -> None:
    attempt = an_attempt(state="running", started=now(10**9), host=socket.gethostname(), pid=os.getpid())
    assert is_gone(attempt), "this process is younger than that"
    assert not is_gone(replace(attempt, started=now()))


def test_a_process_that_nobody_waits_for_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    attempt = an_attempt(state="running", started=now(), host=socket.gethostname(), pid=process.pid)
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT):
        pass
    assert is_gone(attempt), "it has ended, and only its entry is left"
    process.wait()


@pytest.mark.parametrize(
    ("limit_s", "ago_s", "gone"),
    [(None, 10**6, False), (10.0, 0, False), (10.0, STALE_AFTER_S, False), (10.0, STALE_AFTER_S + 20, True)],
)
def test_on_another_machine_only_time_tells(limit_s: float | None, ago_s: float, gone: bool) -> None:
    attempt = an_attempt(state="running", started=now(ago_s), host="another.example", pid=1, time_limit_s=limit_s)
    assert is_gone(attempt) is gone


@pytest.mark.parametrize(("silent_s", "gone"), [(0.0, False), (200.0, False), (SILENT_AFTER_S + 60.0, True)])
def test_on_another_machine_a_file_that_nobody_touches_tells(tmp_path: Path, silent_s: float, gone: bool) -> None:
    made = new_attempt(
        tmp_path, an_attempt(state="running", ended=None, started=now(10**6), host="another.example", pid=1)
    )
    path = cell_folder(tmp_path, made.cell) / "attempt-0001.json"
    os.utime(path, (time.time() - silent_s,) * 2)
    ((attempt,), _) = read_attempts(tmp_path, made.cell)
    assert attempt.state == ("failed" if gone else "running")
    beat(tmp_path, made)
    assert read_attempts(tmp_path, made.cell)[0] == [made]


def test_an_attempt_of_this_machine_lives_as_long_as_its_process(tmp_path: Path) -> None:
    running: dict[str, Any] = {"state": "running", "ended": None, "started": now(), "host": socket.gethostname()}
    made = new_attempt(tmp_path, an_attempt(**running, pid=os.getpid()))
    os.utime(cell_folder(tmp_path, made.cell) / "attempt-0001.json", (1e9, 1e9))
    assert read_attempts(tmp_path, made.cell)[0] == [made]


@pytest.mark.parametrize("text", ["yesterday", "", "2026-13-01T00:00:00+00:00", "0001-01-01T00:00:00"])
def test_what_is_no_time_is_none_and_no_error(text: str) -> None:
    found = moment(text)
    assert found is None or found.tzinfo is not None


def test_an_attempt_that_began_at_no_time_is_gone(tmp_path: Path) -> None:
    new_attempt(
        tmp_path, an_attempt(state="running", started="yesterday", ended=None, host=socket.gethostname(), pid=1)
    )
    ((attempt,), _) = read_attempts(tmp_path, "0" * 12)
    assert attempt.state == "failed"


@given(
    reason=st.none() | st.text(max_size=40),
    seconds=st.none() | st.floats(0, 1e9),
    code=st.none() | st.integers(-64, 255),
)
def test_an_attempt_is_read_back_equal(reason: str | None, seconds: float | None, code: int | None) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        attempt = an_attempt(state="failed", reason=reason, time_limit_s=seconds, exit_code=code)
        made = new_attempt(Path(name), attempt)
        assert read_attempts(Path(name), attempt.cell)[0] == [made]
        changed = replace(made, state="ok")
        write_attempt(Path(name), changed)
        assert read_attempts(Path(name), attempt.cell)[0] == [changed]


def test_what_stands_for_a_cell() -> None:
    looked = [an_attempt(1, 0, "ok"), an_attempt(2, 0, "oom")]
    assert standing_attempts([]) == []
    assert standing_attempts(looked[:1]) == []
    assert standing_attempts(looked) == [looked[1]]
    first, second = an_attempt(3, 1, "ok"), an_attempt(4, 2, "failed", reason="SIGSEGV")
    assert standing_attempts([second, *looked, first]) == [first, second]
    interrupted = an_attempt(5, 1, "failed", reason="interrupted by SIGINT", interrupted=True)
    assert standing_attempts([first, interrupted]) == [first]
    assert standing_attempts([interrupted]) == [interrupted]
    again = an_attempt(6, 1, "oom")
    assert standing_attempts([first, interrupted, again]) == [again]


# -- sweeps ----------------------------------------------------------------------------------------------------------


def test_a_sweep_is_read_back_equal_and_found_by_its_name(tmp_path: Path) -> None:
    record = replace(a_sweep(a_cell()), name="mpt.on-h200_1", request={"seq": "512-8k*2"}, time_limit_s=1.5)
    write_sweep(tmp_path, record)
    (tmp_path / SWEEPS / "notes.txt").write_text("not ours")
    assert read_sweep(tmp_path, record.name) == record
    assert sweep_names(tmp_path) == [record.name]
    with pytest.raises(FlopwiseError, match="no sweep is called") as told:
        read_sweep(tmp_path, "mpt.on-h200_2")
    assert "mpt.on-h200_1" in str(told.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("last", "runs"),
        ("LAST", "runs"),
        ("3", "runs"),
        ("0142", "runs"),
        ("3-17", "runs"),
        ("0123456789ab", "a cell"),
        ("a.csv", "a file"),
        ("a.json", "a file"),
        ("a.MD", "a file"),
        ("a.markdown", "a file"),
        ("a.txt", "a file"),
        ("a.html", "a file"),
        ("a.toml", "a file"),
    ],
)
def test_a_sweep_is_not_called_what_stands_for_something_else(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(FlopwiseError, match="cannot be called") as told:
        write_sweep(tmp_path, replace(a_sweep(), name=name))
    assert told.value.why == f"`flopwise report` would take it for {why}"
    assert told.value.hint


@pytest.mark.parametrize("name", ["last-week", "3-17-b", "v1.2", "0123456789abc", "html"])
def test_names_that_only_look_a_little_like_it_are_taken(tmp_path: Path, name: str) -> None:
    write_sweep(tmp_path, replace(a_sweep(), name=name))
    assert sweep_names(tmp_path) == [name]


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "-x", "x" * 65, "a b", "ä"])
def test_a_sweeps_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(FlopwiseError, match="cannot be called"):
        write_sweep(tmp_path, replace(a_sweep(), name=name))
    with pytest.raises(FlopwiseError, match="no sweep is called"):
        read_sweep(tmp_path, name)


@pytest.mark.parametrize(
    ("limit_s", "earlier_s", "expected"),
    [(1.0, 1.0, "failed"), (60.0, 1.0, "open"), (None, 1.0, "open"), (1.0, 60.0, "failed")],
)
def test_what_took_too_long_is_tried_again_with_more_time(
    tmp_path: Path, limit_s: float | None, earlier_s: float, expected: str
) -> None:
    cell = a_cell(tmp_path)
    record = SweepRecord(name="x", created="", cells=(cell.id,), steps=3, time_limit_s=limit_s)
    tried = Attempt(
        number=1,
        cell=cell.id,
        repeat=1,
        state="timeout",
        started="2026-01-01T00:00:00+00:00",
        steps=3,
        time_limit_s=earlier_s,
        reason="not done in time",
    )
    assert verdict(tmp_path, record, cell, [tried]) == expected
