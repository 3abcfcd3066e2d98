"""Sweeps under a real Slurm, which is started for these tests alone.

To run them, install Slurm and munge; no service has to be set up, and the tests need not run as root:

    apt-get install -y --no-install-recommends slurm-wlm munge
    python -m pytest tests/sweep/test_slurm_real.py

Debian starts no service of Slurm without a configuration; `systemctl disable --now munge` ends that of munge, which
is not used either. Elsewhere the tests skip themselves. Slurm has no accounting here, so that squeue has to answer.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flopwise.store.cells import CellState, SweepRecord
from flopwise.store.sweeps import read_attempts
from flopwise.sweep.jobs.slurm import SlurmOptions, render, settle, slurm_folder, states, submit
from flopwise.sweep.jobs.slurm_queue import sbatch
from tests.support.private_slurm import PATH, missing, private_slurm
from tests.support.slurm_cells import cell, stored
from tests.support.sweep_stand_in import a_cell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]

LIMIT_S = 180.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Path]:
    # A socket's path has no more than 107 characters, which those of pytest can have.
    with tempfile.TemporaryDirectory(prefix="flopwise-") as folder:
        # munge's socket lies below it, and others may look for it.
        Path(folder).chmod(0o711)
        with private_slurm(Path(folder)) as configuration:
            yield configuration


@pytest.fixture(autouse=True)
def used(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def until(is_so: Callable[[], bool], what: str) -> None:
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < LIMIT_S, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.3)


def said(*words: str) -> str:
    return subprocess.run(words, timeout=120, check=True, capture_output=True, text=True).stdout


def outputs(store: Path, record: SweepRecord) -> dict[str, str]:
    return {path.name: path.read_text() for path in slurm_folder(store, record.name).glob("*.out")}


def test_an_array_is_seen_from_its_submission_to_its_end(tmp_path: Path) -> None:
    """Its command is a script: the first cell ends well, the second fails, the third is cancelled."""
    store = tmp_path / "a 'store' with \"quotes\", 50%j and #"
    cells = [cell(1, 512), cell(1, 1024), cell(1, 2048)]
    record = stored(store, *cells, device="cpu")
    # Not with a blank: Slurm's proctrack/linuxproc loses a process with one in its name.
    python = tmp_path / "stand-in"
    lines = [
        "#!/bin/bash",
        'echo "$FLOPWISE_JOB $8 ${10} ${SLURM_PROCID-none}"',
        "sleep 3",
        f'case "$8" in {cells[0].id})',
    ]
    lines += ["exit 0;;", f"{cells[1].id}) echo no such thing >&2; exit 3;;", "*) sleep 600;;", "esac"]
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)
    options = SlurmOptions(python=str(python), cpus_per_task=1, workdir=str(store), extra=("--time=7",))
    job = submit(store, record, options).jobs[0].id
    assert said("squeue", "-h", "-r", "-j", job, "-o", "%l") == "7:00\n" * 3
    names = [one.id for one in cells]
    assert set(states(store, record).values()) <= {"planned", "running"}
    assert submit(store, record, SlurmOptions()).queued == tuple(names)
    until(lambda: set(states(store, record).values()) == {"running"}, "all three run")
    until(lambda: states(store, record)[names[1]] == "failed", "the second one has failed")
    said("scancel", f"{job}_2")
    until(lambda: states(store, record)[names[2]] == "failed", "the third one is cancelled")
    expected: dict[str, CellState] = {names[0]: "planned", names[1]: "failed", names[2]: "failed"}
    until(lambda: states(store, record) == expected, "all have ended")

    found = outputs(store, record)
    assert found[f"{job}_0.out"] == f"{job}_0 {names[0]} {store} none\n"
    assert found[f"{job}_1.out"] == f"{job}_1 {names[1]} {store} none\nno such thing\n"
    written = {made.cell: made for made in settle(store, record)}
    assert sorted(written) == sorted(names[1:])
    assert written[names[1]].reason == (
        f"interrupted: job {job}_1 ended as FAILED (NonZeroExitCode); its output is sweeps/night.slurm/{job}_1.out"
    )
    assert (written[names[2]].reason or "").startswith(f"interrupted: job {job}_2 ended as CANCELLED")
    assert settle(store, record) == []


def test_a_job_at_its_time_limit_is_told_apart(tmp_path: Path) -> None:
    """Limits are counted in minutes; that its end is brought forward spares the waiting."""
    only = cell(1, 512)
    record = stored(tmp_path, only, device="cpu")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    job = submit(tmp_path, record, SlurmOptions(python=str(python), array=False, time_limit_s=60)).jobs[0].id
    until(lambda: states(tmp_path, record) == {only.id: "running"}, "it runs")
    said("scontrol", "update", f"JobId={job}", "EndTime=now")
    until(lambda: states(tmp_path, record) == {only.id: "timeout"}, "it was ended")
    assert [(made.state, made.job) for made in settle(tmp_path, record)] == [("timeout", job)]


def test_a_cell_is_trained_by_a_job(tmp_path: Path) -> None:
    """The whole way: `flopwise sweep --resume` in an array's task, on one tiny cell."""
    only = a_cell()
    record = stored(tmp_path, only, steps=3, device="cpu", profile=False)
    job = submit(tmp_path, record, SlurmOptions(cpus_per_task=1)).jobs[0].id
    until(lambda: states(tmp_path, record) == {only.id: "ok"}, f"it is trained: {outputs(tmp_path, record)}")
    attempts, problems = read_attempts(tmp_path, only.id)
    assert problems == []
    assert [(made.state, made.job, made.sweep) for made in attempts] == [("ok", f"{job}_0", "night")]
    assert settle(tmp_path, record) == []
    # The job itself ends a moment after its attempt.
    until(lambda: submit(tmp_path, record, SlurmOptions()).finished == (only.id,), "the job is over")


def test_ranks_of_several_nodes_are_started_by_srun(tmp_path: Path) -> None:
    """There is one node: of the script for two, the number of nodes is changed, and two ranks meet on it."""
    only = a_cell(devices=2)
    record = stored(tmp_path, only, steps=3, device="cpu", profile=False)
    script = render(record, [only], tmp_path, SlurmOptions(gpus_per_node=1, array=False, cpus_per_task=1))[0]
    assert script.nodes == 2
    text = script.text.replace("--nodes=2", "--nodes=1").replace("--ntasks-per-node=1", "--ntasks-per-node=2")
    slurm_folder(tmp_path, record.name).mkdir()
    path = tmp_path / "one-node.sh"
    path.write_text(text)
    job = sbatch(path)
    until(lambda: any(made.ended for made in read_attempts(tmp_path, only.id)[0]), "it is trained")
    attempts, _ = read_attempts(tmp_path, only.id)
    assert [(made.state, made.reason, made.job) for made in attempts] == [("ok", None, job)]
