"""The store of runs: numbers that are claimed once, records that survive, listings that nothing breaks."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model, model_table
from flopwise.records.measurement import Measurement, MemoryRow, RunRecord, StepRecord
from flopwise.setup.training import Training
from flopwise.store.runs import (
    RECORD,
    STEPS,
    VARIABLE,
    StepLog,
    find_run,
    new_run,
    read_record,
    read_steps,
    store_folder,
    to_text,
    trim_steps,
    write_record,
)
from tests.support.listing import list_runs

NAN = float("nan")


def a_step(step: int, loss: float = 2.5) -> StepRecord:
    return StepRecord(
        step=step, loss=loss, learning_rate=3e-4, step_s=0.25, tokens=512, samples=4, tokens_per_s=2048.0, mfu=None
    )


def a_measurement(last_loss: float = 1.0) -> Measurement:
    return Measurement(
        model="tiny",
        hardware="cpu",
        devices=1,
        sequence_tokens=128,
        batch_sequences=4,
        micro_batch_sequences=2,
        batch_tokens=512,
        precision="bf16",
        optimizer="adamw",
        n_params=12_345,
        steps=7,
        step_s=0.5,
        step_s_p20=0.4,
        step_s_p80=0.6,
        tokens_per_s=1024.0,
        tokens_per_s_p20=1000.0,
        tokens_per_s_p80=1100.0,
        model_flops=10**15,
        hardware_flops=10**15 + 1,
        convention="palm",
        mfu=None,
        hfu=0.25,
        peak_flops=None,
        peak_format=None,
        first_loss=10.5,
        last_loss=last_loss,
        memory=(MemoryRow(place="device", owner="weights", planned_bytes=2**40, measured_bytes=2**40 + 1),),
    )


def a_record(name: str = "0001", **changes: object) -> RunRecord:
    record = RunRecord(
        id=name,
        state="running",
        started="2025-05-05T12:00:00+02:00",
        model=model_table(load_model("llama-3-8b")),
        task="language",
        training=Training(steps=10, clip_norm=1.0),
        plan={"rounds": 2, "saves": "fFiI" * 64, "state": {"weights": {"blocks": 3, "ends": ["head"]}}},
        data={"sources": ["books.txt"], "fingerprint": "12ab", "tokens": 10**10},
        environment={"python": "3.11", "device": "cpu"},
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def test_the_store_is_given_or_from_the_environment_or_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert store_folder(None) == Path("runs")
    monkeypatch.setenv(VARIABLE, "elsewhere/kept")
    assert store_folder(None) == Path("elsewhere/kept")
    assert store_folder("mine") == Path("mine")
    monkeypatch.setenv(VARIABLE, "")
    assert store_folder(None) == Path("runs")


def test_numbers_go_up_and_foreign_entries_do_not_count(tmp_path: Path) -> None:
    store = tmp_path / "not" / "there"
    assert [new_run(store).name for _ in range(3)] == ["0001", "0002", "0003"]
    for name in ("notes", ".hidden", "12", "00017", "20250505120000", "١٢٣٤", "0000"):
        (store / name).mkdir()
    (store / "README.md").write_text("mine")
    (store / "0004").write_text("a file that took the name")
    assert new_run(store).name == "0005"
    (store / "9999").mkdir()
    assert [new_run(store).name for _ in range(2)] == ["10000", "10001"]
    assert [listed.folder.name for listed in list_runs(store)] == [
        *("0001", "0002", "0003", "0004", "0005", "9999"),
        *("10000", "10001"),
    ]


def test_a_store_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for store in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(FlopwiseError, match="there can be no run in"):
            new_run(store)
    with pytest.raises(FlopwiseError, match="cannot be listed"):
        list_runs(tmp_path / "file")
    assert list_runs(tmp_path / "nothing") == []


def claim(store: Path, count: int, results: multiprocessing.SimpleQueue[list[str]]) -> None:
    results.put([new_run(store).name for _ in range(count)])


def test_two_processes_never_get_the_same_number(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.SimpleQueue[list[str]] = context.SimpleQueue()
    processes = [context.Process(target=claim, args=(tmp_path, 50, results)) for _ in range(2)]
    for process in processes:
        process.start()
    names = [*results.get(), *results.get()]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(names) == [f"{number:04d}" for number in range(1, 101)]


def test_a_record_comes_back_equal(tmp_path: Path) -> None:
    for record in (
        a_record(),
        a_record(
            state="failed",
            ended="2025-05-05T13:00:00+02:00",
            steps_done=9,
            checkpoint="checkpoints/step-00000009",
            measurement=a_measurement(),
            metrics={"epoch": 1.5, "train_runtime": "0:01:02"},
            reason="the disk is full",
        ),
    ):
        write_record(tmp_path, record)
        assert read_record(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]


@pytest.mark.parametrize(("value", "word"), [(NAN, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_what_json_has_no_number_for_survives(value: float, word: str, tmp_path: Path) -> None:
    metrics: dict[str, float | str] = {"train_loss": value, "eval_loss": 1.0, "note": "none"}
    write_record(tmp_path, a_record(measurement=a_measurement(value), metrics=metrics))
    with StepLog(tmp_path) as log:
        log.append(replace(a_step(1, value), gradient_norm=value, evaluation={"eval_loss": value}))
    record, step = read_record(tmp_path), read_steps(tmp_path)[0]
    assert record.measurement is not None and step.evaluation is not None
    found = (record.measurement.last_loss, record.metrics["train_loss"], step.loss, step.gradient_norm)
    for number in (*found, step.evaluation["eval_loss"]):
        assert isinstance(number, float)
        assert str(number) == str(value)
    assert (record.metrics["eval_loss"], record.metrics["note"], step.mfu) == (1.0, "none", None)
    # Other readers see a word that their own conversion to a number understands, not a null.
    assert json.loads((tmp_path / STEPS).read_text())["loss"] == word


@given(st.floats(), st.floats())
def test_any_number_of_a_step_survives(tmp_path_factory: pytest.TempPathFactory, loss: float, norm: float) -> None:
    folder = tmp_path_factory.mktemp("run")
    step = replace(a_step(3, loss), gradient_norm=norm)
    with StepLog(folder) as log:
        log.append(step)
    (found,) = read_steps(folder)
    assert repr(found) == repr(step)


def test_damaged_and_half_written_runs_are_listed_as_such(tmp_path: Path) -> None:
    good = a_record("0007", state="done", steps_done=10)
    for _ in range(7):
        new_run(tmp_path)
    write_record(tmp_path / "0007", good)
    whole = (tmp_path / "0007" / RECORD).read_bytes()
    (tmp_path / "0002" / RECORD).write_bytes(whole[: len(whole) // 2])
    (tmp_path / "0003" / RECORD).write_bytes(whole.replace(b'"done"', b'"dancing"'))
    (tmp_path / "0004" / RECORD).write_bytes(b"\xff\xfe\x00 binary")
    (tmp_path / "0005" / RECORD).mkdir()
    os.mkfifo(tmp_path / "0006" / RECORD)
    (tmp_path / "0008").write_text("not even a folder")
    listed = list_runs(tmp_path)
    assert [entry.folder.name for entry in listed] == [f"{number:04d}" for number in range(1, 9)]
    assert [entry.record for entry in listed] == [None] * 6 + [good, None]
    problems = [entry.problem for entry in listed]
    assert problems[6] == "" and all(problem for index, problem in enumerate(problems) if index != 6)
    assert "holds no record.json" in problems[0]
    assert "dancing" in problems[2]
    for entry in listed:
        if entry.record is None:
            with pytest.raises(FlopwiseError, match=r"damaged|holds no|there is no run"):
                read_record(entry.folder)


@given(st.data())
def test_any_cut_of_a_record_is_told(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = tmp_path_factory.mktemp("store")
    folder = new_run(store)
    write_record(folder, a_record())
    whole = (folder / RECORD).read_bytes()
    # The very end is a newline, without which it is still whole.
    (folder / RECORD).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])
    (entry,) = list_runs(store)
    assert entry.record is None and "damaged" in entry.problem


def test_settings_that_a_training_cannot_have_are_damage(tmp_path: Path) -> None:
    write_record(tmp_path, a_record())
    text = (tmp_path / RECORD).read_text()
    (tmp_path / RECORD).write_text(text.replace('"steps": 10', '"steps": -10'))
    with pytest.raises(FlopwiseError, match=r"(?s)is damaged.*-10 steps"):
        read_record(tmp_path)


def test_runs_are_found_by_number_path_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FlopwiseError, match="there are no runs in"):
        find_run(tmp_path, "last")
    with pytest.raises(FlopwiseError, match="there are no runs in"):
        find_run(tmp_path / "nothing", "3")
    for _ in range(12):
        new_run(tmp_path)
    for number in (3, 11):
        write_record(tmp_path / f"{number:04d}", a_record())
    assert find_run(tmp_path, "3") == find_run(tmp_path, "0003") == find_run(tmp_path, "00003") == tmp_path / "0003"
    assert find_run(tmp_path, "12") == tmp_path / "0012"
    assert find_run(tmp_path, "last") == tmp_path / "0011"
    monkeypatch.chdir(tmp_path / "0003")
    assert find_run(tmp_path, "../0011") == Path("../0011")
    assert find_run(tmp_path, ".") == Path()
    for name in ("./nothing", str(tmp_path), str(tmp_path / "0012")):
        with pytest.raises(FlopwiseError, match="is not the folder of a run"):
            find_run(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "near"), [("14", "0010, 0011, 0012"), ("0", "0001, 0002, 0003"), ("las", "last"), ("9" * 500, "known")]
)
def test_unknown_runs_are_told_with_near_ones(name: str, near: str, tmp_path: Path) -> None:
    for _ in range(12):
        write_record(new_run(tmp_path), a_record())
    with pytest.raises(FlopwiseError) as caught:
        find_run(tmp_path, name)
    assert near in (caught.value.why or "") and caught.value.hint and len(str(caught.value)) < 600


def test_steps_are_appended_and_trimmed(tmp_path: Path) -> None:
    assert read_steps(tmp_path) == [] and trim_steps(tmp_path, 3) == 0
    with StepLog(tmp_path) as log:
        for step in range(1, 8):
            log.append(a_step(step))
            assert [entry.step for entry in read_steps(tmp_path)] == list(range(1, step + 1))
    assert trim_steps(tmp_path, 7) == 0
    assert trim_steps(tmp_path, 4) == 3
    with StepLog(tmp_path) as log:
        log.append(a_step(5, 1.25))
    assert read_steps(tmp_path) == [*(a_step(step) for step in range(1, 5)), a_step(5, 1.25)]
    assert trim_steps(tmp_path, 0) == 5
    assert read_steps(tmp_path) == []


def test_half_a_last_line_is_tolerated_and_gone_on_resuming(tmp_path: Path) -> None:
    path = tmp_path / STEPS
    with StepLog(tmp_path) as log:
        log.append(a_step(1))
        log.append(a_step(2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert read_steps(tmp_path) == [a_step(1)]
    with StepLog(tmp_path) as log:
        log.append(a_step(2, 0.5))
    assert read_steps(tmp_path) == [a_step(1), a_step(2, 0.5)]
    # Half a line longer than what is looked at in one go, and with nothing whole before it.
    path.write_bytes(b"{" * 200_001)
    assert read_steps(tmp_path) == []
    with StepLog(tmp_path) as log:
        log.append(a_step(1))
    assert read_steps(tmp_path) == [a_step(1)]


def test_a_damaged_line_is_told_and_dropped_on_resuming(tmp_path: Path) -> None:
    with StepLog(tmp_path) as log:
        for step in range(1, 4):
            log.append(a_step(step))
    path = tmp_path / STEPS
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"\xff\x00" + lines[1][5:], *lines[2:]]))
    with pytest.raises(FlopwiseError, match=r"line 2 is damaged"):
        read_steps(tmp_path)
    assert trim_steps(tmp_path, 3) == 1
    assert read_steps(tmp_path) == [a_step(1), a_step(3)]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    # A limit on the size of files stands in for a full disk; it would hold for this process to its end.
    script = f"""
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from flopwise.base.errors import FlopwiseError
        from flopwise.store.runs import StepLog, read_steps
        from tests.store.test_store import a_step
        folder = Path({str(tmp_path)!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))
        log = StepLog(folder)
        written = 0
        try:
            while True:
                log.append(a_step(written + 1))
                written += 1
        except FlopwiseError as error:
            assert "cannot write" in error.what and error.why, error
        assert 2 <= written <= 6 and read_steps(folder) == [a_step(step + 1) for step in range(written)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, {resource.RLIM_INFINITY}))
        log.append(a_step(written + 1))
        assert read_steps(folder)[-1].step == written + 1 == len(read_steps(folder))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_a_thousand_runs_are_listed(tmp_path: Path) -> None:
    count = 1_000
    record = a_record(state="done", measurement=a_measurement())
    write_record(new_run(tmp_path), record)
    content = (tmp_path / "0001" / RECORD).read_bytes()
    for number in range(2, count + 1):
        folder = tmp_path / f"{number:04d}"
        folder.mkdir()
        (folder / RECORD).write_bytes(content)
    listed = list_runs(tmp_path)
    assert len(listed) == count and all(entry.record == record for entry in listed[::100])


def test_a_line_that_is_no_text_is_damaged_though_its_numbers_are_not(tmp_path: Path) -> None:
    (tmp_path / STEPS).write_bytes(to_text(a_step(1), indent=0).encode()[:-1] + b',"odd":"\xff"}\n')
    with pytest.raises(FlopwiseError, match="line 1 is damaged"):
        read_steps(tmp_path)
    assert trim_steps(tmp_path, 5) == 1
    assert (tmp_path / STEPS).read_bytes() == b""
