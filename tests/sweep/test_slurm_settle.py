"""Jobs of Slurm that are over: what is written of attempts that they left open, or never made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flopwise.cli.serving import Live
from flopwise.store.cells import Attempt, Cell, CellState, SweepRecord, says_nothing
from flopwise.store.sweeps import claimed, now, read_attempts
from flopwise.sweep.jobs import slurm
from flopwise.sweep.jobs.slurm import SlurmOptions, find_unsettled, read_jobs, settle, settle_here, states, submit
from tests.cli.test_cli_fuzz import answered
from tests.support.slurm_cells import Commands, attempt, cell, stored
from tests.support.sweep_stand_in import a_run

LATER = "2999-01-01T00:00:00+00:00"
"""Than any submission of a test."""
OUTPUT = "its output is sweeps/night.slurm/501_0.out"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands(tmp_path / "bin", monkeypatch)
    found.count("sbatch")
    found.say("squeue")
    return found


@pytest.fixture
def one(tmp_path: Path, commands: Commands) -> tuple[Path, SweepRecord, Cell]:
    """A sweep of one cell that was submitted as task 501_0."""
    only = cell()
    record = stored(tmp_path / "store", only)
    submit(tmp_path / "store", record, SlurmOptions())
    assert commands.called("sbatch")
    return tmp_path / "store", record, only


One = tuple[Path, SweepRecord, Cell]


def attempts_of(store: Path, of: Cell) -> list[Attempt]:
    found, problems = read_attempts(store, of.id)
    assert problems == []
    return found


@pytest.mark.parametrize(
    ("said", "ended", "reason"),
    [
        ("OUT_OF_MEMORY|0:125", ("oom", None), "job 501_0 was ended for the host memory that it took: OUT_OF_MEMORY"),
        ("TIMEOUT|0:0", ("timeout", 0), "job 501_0 ended as TIMEOUT"),
        ("FAILED|3:0", ("failed", 3), "job 501_0 ended as FAILED, exit code 3"),
        ("NODE_FAIL|0:0", ("failed", 0), "interrupted: job 501_0 ended as NODE_FAIL"),
        ("CANCELLED by 7|0:0", ("failed", 0), "interrupted: job 501_0 ended as CANCELLED by 7"),
        ("COMPLETED|0:0", ("failed", 0), "job 501_0 ended as COMPLETED"),
    ],
)
def test_an_open_attempt_ends_as_its_job_did(
    one: One, commands: Commands, said: str, ended: tuple[CellState, int | None], reason: str
) -> None:
    store, record, only = one
    state, code = ended
    commands.say("sacct", f"501_0|{said}|00:01:00\n")
    attempt(store, only, job="501_0")
    assert states(store, record) == {only.id: state}
    written = settle(store, record)
    assert written == attempts_of(store, only)
    assert len(written) == 1
    assert (written[0].state, written[0].exit_code) == (state, code)
    assert written[0].reason == f"{reason}; {OUTPUT}"
    assert written[0].ended is not None
    assert states(store, record) == {only.id: state}
    assert settle(store, record) == []


@pytest.mark.parametrize("said", ["RUNNING|0:0", "PENDING|0:0", "COMPLETING|0:0"])
def test_a_job_that_is_not_over_is_left_alone(one: One, commands: Commands, said: str) -> None:
    store, record, only = one
    commands.say("sacct", f"501_0|{said}|00:01:00\n")
    before = attempt(store, only, job="501_0")
    assert settle(store, record) == []
    assert attempts_of(store, only) == [before]


@pytest.mark.parametrize(
    ("said", "state"), [("FAILED|127:0", "failed"), ("CANCELLED by 0|0:0", "failed"), ("TIMEOUT|0:0", "timeout")]
)
def test_a_job_that_died_before_its_first_attempt_gets_one(
    one: One, commands: Commands, said: str, state: CellState
) -> None:
    store, record, only = one
    commands.say("sacct", f"501_0|{said}|00:01:00\n")
    assert states(store, record) == {only.id: state}
    written = settle(store, record)
    assert [(made.state, made.job, made.number, made.repeat) for made in written] == [(state, "501_0", 1, 1)]
    assert "job 501_0 ended as" in (written[0].reason or "")
    # A failure says nothing of a cell that was not tried: the next submission takes it without --retry.
    assert says_nothing(written[0]) == (state == "failed")
    assert settle(store, record) == []
    assert attempts_of(store, only) == written
    again = submit(store, record, SlurmOptions())
    assert (len(again.jobs), again.failed) == ((1, ()) if state == "failed" else (0, (only.id,)))


def test_what_is_settled_can_be_submitted_again(one: One, commands: Commands) -> None:
    store, record, only = one
    commands.say("sacct", "501_0|NODE_FAIL|0:0|00:01:00\n")
    attempt(store, only, job="501_0")
    settle(store, record)
    again = submit(store, record, SlurmOptions())
    assert [job.id for job in again.jobs] == ["502"]
    assert [job.id for job in read_jobs(store, record.name).jobs] == ["501", "502"]
    commands.say("sacct", "501_0|NODE_FAIL|0:0|00:01:00\n502_0|RUNNING|0:0|00:00:01\n")
    assert states(store, record) == {only.id: "running"}


def test_a_job_with_nothing_to_do_leaves_no_trace(one: One, commands: Commands) -> None:
    store, record, only = one
    commands.say("sacct", "501_0|COMPLETED|0:0|00:00:01\n")
    assert settle(store, record) == []
    assert states(store, record) == {only.id: "planned"}


def test_the_attempts_own_word_comes_first(one: One, commands: Commands) -> None:
    """`flopwise sweep` fails where its cell does, and has written why."""
    store, record, only = one
    commands.say("sacct", "501_0|FAILED|1:0|00:01:00\n")
    before = attempt(store, only, state="timeout", ended=LATER, reason="not done within 5 min", job="501_0")
    assert states(store, record) == {only.id: "timeout"}
    assert settle(store, record) == []
    assert attempts_of(store, only) == [before]


def test_slurm_tells_why_an_attempt_was_interrupted(one: One, commands: Commands) -> None:
    """At its time limit a job gets SIGTERM, which is all that the attempt knows."""
    store, record, only = one
    commands.say("sacct", "501_0|TIMEOUT|0:0|00:16:00\n")
    attempt(store, only, state="failed", ended=LATER, reason="interrupted by SIGTERM", interrupted=True, job="501_0")
    assert states(store, record) == {only.id: "timeout"}
    assert [made.reason for made in settle(store, record)] == [f"job 501_0 ended as TIMEOUT; {OUTPUT}"]
    assert settle(store, record) == []


def test_attempts_of_others_are_left_alone(one: One, commands: Commands) -> None:
    """One of an earlier job, and one that another sweep made of the same cell."""
    store, record, only = one
    commands.say("sacct", "501_0|FAILED|1:0|00:00:10\n")
    earlier = attempt(store, only, job="400_0")
    other = attempt(store, only, sweep="other", started=LATER)
    written = settle(store, record)
    assert attempts_of(store, only) == [earlier, other, *written]
    assert len(written) == 1


def test_an_attempt_without_a_job_s_number_is_known_by_its_time(one: One, commands: Commands) -> None:
    store, record, only = one
    commands.say("sacct", "501_0|TIMEOUT|0:0|00:16:00\n")
    attempt(store, only, started=LATER)
    written = settle(store, record)
    assert [(made.number, made.state, made.job) for made in written] == [(1, "timeout", "501_0")]


@pytest.mark.parametrize("started", ["yesterday", "", "2026-01-01T00:00:00", "0001-01-01T00:00:00"])
def test_an_attempt_that_began_at_no_time_is_none_of_the_job(one: One, commands: Commands, started: str) -> None:
    store, record, only = one
    commands.say("sacct", "501_0|TIMEOUT|0:0|00:16:00\n")
    attempt(store, only, started=started)
    assert [made.number for made in settle(store, record)] == [2]
    assert settle(store, record) == []
    assert set(states(store, record)) == {only.id}


def test_a_cell_that_somebody_has_is_left_alone(one: One, commands: Commands) -> None:
    store, record, only = one
    commands.say("sacct", "501_0|FAILED|1:0|00:00:10\n")
    with claimed(store, only.id) as ours:
        assert ours
        assert settle(store, record) == []


def test_a_job_that_slurm_has_forgotten_is_over(one: One, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    store, record, only = one
    commands.say("sacct", error="Slurm accounting storage is disabled\n", code=1)
    commands.say("squeue", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    attempt(store, only, job="501_0")
    # A new job may not be known yet.
    assert states(store, record) == {only.id: "planned"}
    assert settle(store, record) == []
    monkeypatch.setattr(slurm, "FORGOTTEN_AFTER_S", -10.0)
    assert states(store, record) == {only.id: "failed"}
    assert [made.reason for made in settle(store, record)] == [
        f"interrupted: Slurm no longer knows job 501_0; {OUTPUT}"
    ]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([], "planned"),
        ([{"state": "ok"}], "planned"),
        ([{"state": "ok"}, {"state": "ok", "repeat": 2}], "ok"),
        ([{"state": "ok"}, {"state": "timeout", "repeat": 2}], "timeout"),
        ([{"state": "oom", "repeat": 0, "micro_batch_sequences": 4}], "planned"),
        ([{"state": "oom", "repeat": 0, "micro_batch_sequences": 4}, {"state": "oom"}], "oom"),
        ([{"state": "failed"}, {"state": "ok"}, {"state": "ok", "repeat": 2}], "ok"),
    ],
    ids=str,
)
def test_two_measurements_are_wanted(tmp_path: Path, made: list[dict[str, object]], expected: CellState) -> None:
    """Without any job, a cell's attempts tell its state."""
    only = cell(batch_sequences="auto", micro_batch_sequences="auto")
    record = stored(tmp_path, only, repeats=2)
    a_run(tmp_path)
    for changes in made:
        attempt(tmp_path, only, **({"ended": LATER, "run": "0001"} | changes))
    assert states(tmp_path, record) == {only.id: expected}


def test_a_list_of_jobs_that_is_damaged_is_told(one: One) -> None:
    store, record, _ = one
    path = store / "sweeps" / "night.slurm" / "jobs.json"
    path.write_text('{"jobs": 3}')
    with pytest.raises(ValueError, match="is damaged"):
        states(store, record)


def test_a_sweep_that_was_never_submitted_asks_nobody(tmp_path: Path, commands: Commands) -> None:
    record = stored(tmp_path / "other", cell())
    assert list(states(tmp_path / "other", record).values()) == ["planned"]
    assert settle(tmp_path / "other", replace(record, repeats=3)) == []
    assert commands.called("sacct") == commands.called("squeue") == []


def test_a_sweep_that_runs_here_settles_where_that_can_be(
    one: One, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not within a job, and not on a machine without Slurm, to which the store may have been copied."""
    store, record, only = one
    commands.say("sacct", "501_0|TIMEOUT|0:0|00:16:00\n")
    attempt(store, only, job="501_0")
    with monkeypatch.context() as inside:
        inside.setenv("FLOPWISE_JOB", "501_0")
        assert settle_here(store, record) == []
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PATH", str(tmp_path))
        assert settle_here(store, record) == []
    assert settle_here(stored_elsewhere(tmp_path), record) == []
    assert [made.state for made in settle_here(store, record)] == ["timeout"]


def stored_elsewhere(tmp_path: Path) -> Path:
    """A store with the same sweep, which was never submitted from there."""
    stored(tmp_path / "elsewhere", cell())
    return tmp_path / "elsewhere"


# -- who reads results -----------------------------------------------------------------------------------------------


def files(store: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("made", [True, False], ids=["with an attempt", "without one"])
@pytest.mark.parametrize(
    "words",
    [["report"], ["report", "night"], ["collect"], ["compare", "night", "night"]],
    ids=" ".join,
)
def test_who_reads_results_writes_nothing_and_tells_of_jobs(
    one: One, commands: Commands, tmp_path: Path, words: list[str], made: bool
) -> None:
    store, _, only = one
    words = [*words, "--into", str(tmp_path)] if words == ["collect"] else words
    commands.say("sacct", "501_0|TIMEOUT|0:0|00:16:00\n")
    if made:
        attempt(store, only, job="501_0", started=now())
    before = files(store)
    told = answered([*words, "--store", str(store)])[2]
    note = "note: of night a cell has a job whose end is not written down"
    assert note in told
    assert f"flopwise sweep --resume night --settle --store {store}" in told
    assert files(store) == before
    assert commands.called("sacct") == []
    # What is settled is told as it ended, and of no job any more.
    code, out, _ = answered(["sweep", "--resume", "night", "--settle", "--store", str(store)])
    assert (code, "timeout" in out, "501_0" in out) == (0, True, True)
    assert [found.state for found in attempts_of(store, only)] == ["timeout"]
    again = answered([*words, "--store", str(store)])
    assert note not in again[2]
    if words[0] == "report":
        assert "timeout" in again[1]


def test_a_page_that_is_served_tells_of_jobs_once(
    one: One, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    store, _, _ = one
    before = files(store)
    live = Live(store, clock=iter(range(0, 1000, 10)).__next__)
    for _ in range(3):
        assert live.answer("/data.json") is not None
    assert capsys.readouterr().err.count("a job whose end is not written down") == 1
    assert files(store) == before
    assert commands.called("sacct") == []


def test_nobody_is_told_of_jobs_where_none_can_be_asked_for(
    one: One, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, record, only = one
    assert find_unsettled(store, record) == [only.id]
    with monkeypatch.context() as inside:
        inside.setenv("FLOPWISE_JOB", "501_0")
        assert find_unsettled(store, record) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_unsettled(store, record) == []


@pytest.mark.parametrize("words", [["--settle"], ["--resume", "night", "--settle", "--retry"]])
def test_settling_is_for_a_stored_sweep_alone(words: list[str]) -> None:
    code, _, told = answered(["sweep", *words])
    assert code == 2
    assert "--resume NAME --settle" in told
