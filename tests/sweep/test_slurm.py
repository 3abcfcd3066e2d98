"""Sweeps under Slurm: the scripts, what Slurm says of jobs, and what is written of those that died."""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.store.cells import Cell, SweepRecord
from flopwise.store.sweeps import read_attempts
from flopwise.sweep.jobs import slurm_queue
from flopwise.sweep.jobs.slurm import SlurmOptions, read_jobs, reasons, render, settle, states, submit
from flopwise.sweep.jobs.slurm_queue import elapsed_seconds, parse_sacct, parse_squeue, task_ids
from flopwise.sweep.jobs.slurm_scripts import job_time_s, nodes_for, show_minutes
from tests.support.slurm_cells import Commands, attempt, cell, record_of, stored
from tests.support.sweep_stand_in import a_run

NEXT_YEAR = "2999-01-01T00:00:00+00:00"
"""Later than any submission of a test."""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tmp_path / "bin", monkeypatch)


def directives(text: str) -> dict[str, str]:
    """The options of a script, as words: sbatch reads quotes as a shell does, which knows no more signs here."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    pairs = [shlex.split(line)[0].partition("=") for line in lines]
    return {flag: value for flag, _, value in pairs}


# -- scripts ---------------------------------------------------------------------------------------------------------


def test_cells_with_as_many_devices_are_one_array(tmp_path: Path) -> None:
    cells = [cell(8, 512), cell(1, 512), cell(8, 1024), cell(1, 1024), cell(1, 2048)]
    small, large = render(record_of(*cells), cells, tmp_path, SlurmOptions(at_once=2, partition="gpu"))
    assert [small.devices, large.devices] == [1, 8]
    assert small.cells == (cells[1].id, cells[3].id, cells[4].id)
    assert directives(small.text) == {
        "--job-name": "flopwise-night",
        "--array": "0-2%2",
        "--nodes": "1",
        "--ntasks-per-node": "1",
        "--gpus-per-node": "1",
        # 4 × 60 s foreseen, 600 s to start and 120 s to end.
        "--time": "0-00:16:00",
        "--partition": "gpu",
        "--output": f"{tmp_path}/sweeps/night.slurm/%A_%a.out",
        "--open-mode": "append",
        "--no-requeue": "",
    }
    assert directives(large.text)["--array"] == "0-1%2"
    assert directives(large.text)["--gpus-per-node"] == "8"
    assert f"cells=({' '.join(large.cells)})" in large.text.splitlines()


def test_single_jobs_have_a_script_each(tmp_path: Path) -> None:
    cells = [cell(1, 512), cell(1, 1024)]
    scripts = render(record_of(*cells), cells, tmp_path, SlurmOptions(array=False))
    assert [script.cells for script in scripts] == [(one.id,) for one in cells]
    assert all("--array" not in directives(script.text) for script in scripts)
    assert all(directives(script.text)["--output"].endswith("/night.slurm/%j.out") for script in scripts)


def test_an_array_has_no_more_tasks_than_slurm_allows(tmp_path: Path) -> None:
    cells = [cell(1, tokens) for tokens in range(1, 2002)]
    scripts = render(record_of(*cells), cells, tmp_path, SlurmOptions())
    assert [directives(script.text)["--array"] for script in scripts] == ["0-999", "0-999", "0-0"]
    assert len({script.name for script in scripts}) == 3


def test_gpus_are_asked_for_as_the_site_wants(tmp_path: Path) -> None:
    one = cell(4)
    options = SlurmOptions(gpus_as="gres", gpu_type="a100", cpus_per_task=6, memory="64G", extra=("--qos=high",))
    found = directives(render(record_of(one), [one], tmp_path, options)[0].text)
    assert found["--gres"] == "gpu:a100:4"
    assert found["--cpus-per-task"] == "24"
    assert found["--mem"] == "64G"
    assert found["--qos"] == "high"


@pytest.mark.parametrize("how", ["device", "hardware"])
def test_cells_for_the_cpu_ask_for_no_gpu(tmp_path: Path, how: str) -> None:
    one = cell(hardware="this-cpu") if how == "hardware" else cell()
    record = record_of(one, device="cpu" if how == "device" else "auto")
    found = directives(render(record, [one], tmp_path, SlurmOptions())[0].text)
    assert found and "gpu" not in " ".join((*found, *found.values())).replace(str(tmp_path), "")


def test_several_nodes_start_each_attempt_with_srun(tmp_path: Path) -> None:
    one = cell(16)
    script = render(record_of(one), [one], tmp_path, SlurmOptions(cpus_per_task=4))[0]
    found = directives(script.text)
    assert (found["--nodes"], found["--ntasks-per-node"], found["--gpus-per-node"]) == ("2", "8", "8")
    line = next(line for line in script.text.splitlines() if "FLOPWISE_ATTEMPT_PREFIX" in line)
    prefix = shlex.split(shlex.split(line)[1].partition("=")[2])
    assert prefix[0] == "srun"
    assert {"--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=4"} <= set(prefix)


@pytest.mark.parametrize(
    ("devices", "per_node", "nodes"), [(1, 8, 1), (8, 8, 1), (9, 8, 3), (12, 8, 2), (16, 8, 2), (17, 8, 17), (4, 1, 4)]
)
def test_every_node_takes_as_many_devices(devices: int, per_node: int, nodes: int) -> None:
    assert nodes_for(devices, per_node) == nodes


@pytest.mark.parametrize(
    "folder", ["with blank", "it's", 'a "quoted" one', "50%j", "#hash", "$HOME", "`id`", "a;b", "ünïcode", "!x"]
)
def test_odd_paths_arrive_whole(tmp_path: Path, folder: str) -> None:
    """The script is run by bash, with a stand-in for the interpreter that tells its words."""
    store = tmp_path / folder
    python, told = tmp_path / f"{folder} python", tmp_path / "told"
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {shlex.quote(str(told))}\npwd >> {shlex.quote(str(told))}\n")
    python.chmod(0o755)
    store.mkdir()
    cells = [cell(1, 512), cell(1, 1024)]
    options = SlurmOptions(python=str(python), workdir=str(store), activate='test "$SLURM_NTASKS" = 1')
    script = render(record_of(*cells), cells, store, options)[0]
    path = tmp_path / "script.sh"
    path.write_text(script.text)
    environment = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    subprocess.run(["/bin/bash", str(path)], check=True, env=environment, timeout=120)
    words = [
        "-P",
        "-m",
        "flopwise",
        "sweep",
        "--resume",
        "night",
        "--only",
        cells[1].id,
        "--store",
        str(store),
        str(store),
    ]
    assert told.read_text().splitlines() == words
    output = directives(script.text)["--output"]
    assert output.replace("%%", "%") == f"{store}/sweeps/night.slurm/%A_%a.out"


@pytest.mark.parametrize("folder", ["back\\slash", "two\nlines"])
def test_paths_that_slurm_cannot_write_to_are_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(FlopwiseError, match="Slurm cannot write to"):
        render(record_of(cell()), [cell()], tmp_path / folder, SlurmOptions())


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "a b"},
        {"partition": "-x"},
        {"account": "x\n#SBATCH --uid=0"},
        {"memory": "64 GB"},
        {"extra": ("qos",)},
        {"extra": ("--a\nrm -r x",)},
        {"gpus_per_node": 0},
        {"time_limit_s": float("inf")},
        {"gpu_type": "$(id)"},
    ],
    ids=str,
)
def test_options_that_sbatch_would_misread_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(FlopwiseError) as caught:
        SlurmOptions(**options)  # type: ignore[arg-type]
    assert caught.value.hint


def test_a_name_that_is_no_sweep_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError, match="cannot be called"):
        render(record_of(cell(), name="../x"), [cell()], tmp_path, SlurmOptions())


@pytest.mark.parametrize(
    ("attempt_s", "limit_s", "batch", "repeats", "expected"),
    [
        (60.0, None, 8, 1, 4 * 60 + 600 + 120),
        (60.0, 300.0, 8, 1, 300 + 120),
        (60.0, 300.0, 8, 3, 3 * 420),
        (None, 300.0, 8, 1, 420),
        (None, None, 8, 1, 3600 + 120),
        # Looking for the largest micro-batch takes up to eight attempts more.
        (60.0, 300.0, "auto", 1, 9 * 420),
    ],
)
def test_a_job_has_time_for_every_attempt(
    attempt_s: float | None, limit_s: float | None, batch: int | str, repeats: int, expected: float
) -> None:
    one = cell(attempt_s=attempt_s, batch_sequences=batch, micro_batch_sequences=batch)
    assert job_time_s(record_of(one, time_limit_s=limit_s, repeats=repeats), one) == expected


@given(st.integers(min_value=0, max_value=10**6))
def test_times_are_read_back(minutes: int) -> None:
    assert elapsed_seconds(show_minutes(minutes)) == 60 * minutes


# -- what Slurm says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("123", ["123"]),
        ("123_4", ["123_4"]),
        ("123_[5-9]", ["123_5", "123_6", "123_7", "123_8", "123_9"]),
        ("123_[5-9%2]", ["123_5", "123_6", "123_7", "123_8", "123_9"]),
        ("123_[1,3,5-6]", ["123_1", "123_3", "123_5", "123_6"]),
        ("123_[0-6:3]", ["123_0", "123_3", "123_6"]),
        ("123+0", ["123"]),
        ("123.batch", []),
        ("123_4.0", []),
        ("", []),
        ("123_[", []),
        ("123_[9-1]", []),
        ("123_[0-4000000000]", []),
    ],
)
def test_names_of_tasks(name: str, expected: list[str]) -> None:
    assert task_ids(name) == expected


def test_sacct_is_read() -> None:
    """Lines as `sacct -n -P -X` prints them, among others that are none of a job."""
    text = (
        "123_0|COMPLETED|0:0|00:01:02\n123_1|FAILED|1:0|1-00:00:01\n123_2|CANCELLED by 1000|0:15|00:00:00\n"
        "123_[3-4%2]|PENDING|0:0|00:00:00\n123_5|OUT_OF_MEMORY|0:125|00:00:09\n124|TIMEOUT|0:0|01:00:00\n"
        "124.batch|COMPLETED|0:0|01:00:00\nslurm: hello\n125|RUNNING|0:0|00:10\n126|NODE_FAIL|0:0|Unknown|\n||\n"
    )
    tasks = parse_sacct(text)
    assert {name: task.state for name, task in tasks.items()} == {
        **{"123_0": "COMPLETED", "123_1": "FAILED", "123_2": "CANCELLED", "123_3": "PENDING", "123_4": "PENDING"},
        **{"123_5": "OUT_OF_MEMORY", "124": "TIMEOUT", "125": "RUNNING", "126": "NODE_FAIL"},
    }
    assert {name: task.cell_state for name, task in tasks.items()} == {
        **{"123_0": "ok", "123_1": "failed", "123_2": "failed", "123_3": "planned", "123_4": "planned"},
        **{"123_5": "oom", "124": "timeout", "125": "running", "126": "failed"},
    }
    assert (tasks["123_1"].exit_code, tasks["123_1"].elapsed_s) == (1, 86401.0)
    assert tasks["123_2"].reason == "job 123_2 ended as CANCELLED by 1000, signal 15"
    assert tasks["126"].elapsed_s is None


def test_squeue_is_read() -> None:
    """Lines as `squeue -h -r -t all` of Slurm 22.05 printed them."""
    tasks = parse_squeue("1_0|COMPLETED|None|0:05\n1_3|FAILED|NonZeroExitCode|0:06\n1_4|PENDING|Resources|0:00\n")
    assert [task.cell_state for task in tasks.values()] == ["ok", "failed", "planned"]
    assert tasks["1_3"].reason == "job 1_3 ended as FAILED (NonZeroExitCode)"


@pytest.mark.parametrize("state", ["COMPLETING", "SUSPENDED", "STAGE_OUT", "A_STATE_OF_TOMORROW"])
def test_a_state_that_is_no_end_leaves_the_job_running(state: str) -> None:
    task = parse_sacct(f"7|{state}|0:0|00:00:01")["7"]
    assert task.cell_state == "running"
    assert not task.is_over


@given(st.text(alphabet="0123456789_[]-,%+.|:ABCDEF \n", max_size=60))
def test_no_line_breaks_the_reading(text: str) -> None:
    for task in (*parse_sacct(text).values(), *parse_squeue(text).values()):
        assert re.fullmatch(r"[0-9]+(_[0-9]+)?", task.id)
        assert task.reason


# -- submitting ------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> tuple[Path, SweepRecord, list[Cell]]:
    """A stored sweep with two cells of one device and one of four."""
    cells = [cell(1, 512), cell(1, 1024), cell(4, 512)]
    store = tmp_path / "a store"
    return store, stored(store, *cells), cells


Three = tuple[Path, SweepRecord, list[Cell]]


def test_submitting_keeps_the_jobs_numbers(three: Three, commands: Commands) -> None:
    store, record, cells = three
    commands.count("sbatch")
    submission = submit(store, record, SlurmOptions())
    assert [(job.id, job.cells) for job in submission.jobs] == [
        ("501", (cells[0].id, cells[1].id)),
        ("502", (cells[2].id,)),
    ]
    folder = store / "sweeps" / "night.slurm"
    assert commands.called("sbatch") == [
        *("--parsable", str(folder / submission.jobs[0].script)),
        *("--parsable", str(folder / submission.jobs[1].script)),
    ]
    commands.say("sacct", "501_0|COMPLETED|0:0|00:01:00\n501_1|RUNNING|0:0|00:00:10\n502_0|PENDING|0:0|00:00:00\n")
    commands.say("squeue")
    attempt(store, cells[0], state="ok", ended=NEXT_YEAR, job="501_0", run=a_run(store))
    assert list(states(store, record).values()) == ["ok", "running", "planned"]
    assert commands.called("sacct") == ["-n", "-P", "-X", "--format=JobID,State,ExitCode,Elapsed", "-j", "501,502"]


def test_a_cell_is_not_submitted_twice(three: Three, commands: Commands) -> None:
    store, record, cells = three
    commands.count("sbatch")
    submit(store, record, SlurmOptions())
    attempt(store, cells[0], state="ok", ended=NEXT_YEAR, job="501_0", run=a_run(store))
    attempt(store, cells[1], state="failed", ended=NEXT_YEAR, reason="exit code 3", job="501_1")
    commands.say("sacct", "501_0|COMPLETED|0:0|00:01:00\n501_1|FAILED|1:0|00:00:10\n502_0|PENDING|0:0|00:00:00\n")
    commands.say("squeue")
    again = submit(store, record, SlurmOptions())
    assert (again.finished, again.failed, again.queued) == ((cells[0].id,), (cells[1].id,), (cells[2].id,))
    assert again.jobs == ()
    retried = submit(store, record, SlurmOptions(flags=("--retry",)))
    assert [job.cells for job in retried.jobs] == [(cells[1].id,)]
    forced = submit(store, record, SlurmOptions(flags=("--force",)), cells=cells[:1])
    assert [job.cells for job in forced.jobs] == [(cells[0].id,)]
    assert " --resume night --force --only " in (forced.folder / forced.jobs[0].script).read_text()


def test_a_cell_that_the_sweep_leaves_out_is_not_submitted_unless_it_is_named(three: Three, commands: Commands) -> None:
    store, plain, cells = three
    record = replace(plain, request={"skipped": {cells[0].id: "too slow"}})
    commands.count("sbatch")
    commands.say("sacct")
    commands.say("squeue")
    first = submit(store, record, SlurmOptions(flags=("--force",)))
    assert first.skipped == (cells[0].id,)
    assert [job.cells for job in first.jobs] == [(cells[1].id,), (cells[2].id,)]
    second = submit(store, record, SlurmOptions(), cells=cells[:1], named=[cells[0].id])
    assert [job.cells for job in second.jobs] == [(cells[0].id,)]


@pytest.mark.parametrize("changes", [{"run": "0009"}, {"steps": 4}], ids=["lost", "fewer steps"])
def test_what_a_sweep_here_would_measure_again_is_submitted(
    three: Three, commands: Commands, changes: dict[str, object]
) -> None:
    store, record, cells = three
    commands.count("sbatch")
    attempt(store, cells[0], **({"state": "ok", "ended": NEXT_YEAR, "run": a_run(store)} | changes))
    submission = submit(store, record, SlurmOptions(), cells=cells[:1])
    assert (len(submission.jobs), submission.finished) == (1, ())
    assert states(store, replace(record, cells=record.cells[1:])) == dict.fromkeys(record.cells[1:], "planned")


def test_two_submissions_at_once_lose_no_job(three: Three, commands: Commands) -> None:
    store, record, cells = three
    commands.count("sbatch")
    script = commands.folder / "sbatch"
    script.write_text(script.read_text().replace("#!/bin/sh\n", "#!/bin/sh\nsleep 0.3\n"))
    commands.say("sacct")
    commands.say("squeue")
    threads = [threading.Thread(target=submit, args=(store, record, SlurmOptions())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    listed = read_jobs(store, record.name).jobs
    assert [job.id for job in listed] == ["501", "502"], "the second finds the jobs of the first"
    assert sorted(name for job in listed for name in job.cells) == sorted(cell.id for cell in cells)


def test_a_refusal_is_told_and_loses_no_job(three: Three, commands: Commands) -> None:
    store, record, _ = three
    commands.say("sbatch", error="sbatch: error: Batch job submission failed: Invalid account\n", code=1)
    with pytest.raises(FlopwiseError, match="sbatch refused") as caught:
        submit(store, record, SlurmOptions())
    assert caught.value.why == "sbatch: error: Batch job submission failed: Invalid account"
    assert not (store / "sweeps" / "night.slurm" / "jobs.json").exists()


@pytest.mark.parametrize(("said", "number"), [("77", "77"), ("77;cluster", "77"), ("hello\n77\n", "77")])
def test_what_sbatch_prints(tmp_path: Path, commands: Commands, said: str, number: str) -> None:
    commands.say("sbatch", said)
    assert slurm_queue.sbatch(tmp_path / "x.sh") == number


def test_without_slurm_there_is_a_hint(three: Three, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, record, _ = three
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FlopwiseError, match="no sbatch on this machine") as caught:
        submit(store, record, SlurmOptions())
    assert "login node" in (caught.value.hint or "")


def test_a_controller_that_hangs_is_not_waited_for(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = commands.folder / "sbatch"
    script.write_text("#!/bin/sh\nexec sleep 20\n")
    script.chmod(0o755)
    monkeypatch.setattr(slurm_queue, "ANSWER_S", 0.2)
    with pytest.raises(FlopwiseError, match="did not answer within"):
        slurm_queue.sbatch(tmp_path / "x.sh")


def test_without_accounting_squeue_is_asked(three: Three, commands: Commands) -> None:
    store, record, _ = three
    commands.count("sbatch")
    submit(store, record, SlurmOptions())
    commands.say("sacct", error="Slurm accounting storage is disabled\n", code=1)
    commands.say("squeue", "501_0|RUNNING|None|0:05\n501_1|FAILED|NonZeroExitCode|0:05\n502_0|PENDING|Resources|0:00\n")
    assert list(states(store, record).values()) == ["running", "failed", "planned"]
    assert list(reasons(store, record).values()) == ["job 501_1 ended as FAILED (NonZeroExitCode)"]


def test_where_nothing_answers_no_cell_is_judged(three: Three, commands: Commands) -> None:
    store, record, _ = three
    commands.count("sbatch")
    submit(store, record, SlurmOptions())
    commands.say("sacct", error="sacct: error: slurmdbd is down\n", code=1)
    commands.say("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(FlopwiseError, match="Slurm does not answer"):
        settle(store, record)
    assert all(read_attempts(store, name) == ([], []) for name in record.cells)
