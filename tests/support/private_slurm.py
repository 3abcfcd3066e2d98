"""A Slurm of one node for the length of a test: its own folder, ports, key and configuration, and nothing of root's."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun")
START_S = 120.0
CPUS = 4
"""That it takes itself to have, however many there are."""
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in NEEDED if shutil.which(name, path=PATH) is None]


@contextmanager
def private_slurm(folder: Path) -> Iterator[Path]:
    """Its configuration file, for SLURM_CONF; every daemon has ended when this is left."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(128))
    (folder / "munge" / "key").chmod(0o600)
    configuration = folder / "slurm.conf"
    configuration.write_text(_configuration(folder))
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": PATH}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_started(_munged(folder / "munge"), folder / "munged.log", environment))
        _until((folder / "munge" / "socket").exists, daemons, folder)
        for name in ("slurmctld", "slurmd"):
            command = [name, "-D", "-c", "-f", str(configuration)]
            daemons.append(_started(command, folder / f"{name}.out", environment))
        _until(lambda: _is_idle(environment), daemons, folder)
        yield configuration
    finally:
        # Jobs first: their processes would outlive the daemons.
        if len(daemons) == 3:
            _end_jobs(environment)
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _munged(folder: Path) -> list[str]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return ["munged", "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items())]


def _configuration(folder: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    settings = {
        "ClusterName": "flopwise",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": _free_port(),
        "SlurmdPort": _free_port(),
        "SlurmUser": getpass.getuser(),
        "SlurmdUser": getpass.getuser(),
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder / 'munge' / 'socket'}",
        "CredType": "cred/munge",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd.log",
        "SlurmdParameters": "config_overrides",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "JobCompType": "jobcomp/none",
        "SchedulerParameters": "sched_interval=1,batch_sched_delay=0",
        "KillWait": 2,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines.append(f"NodeName={host} NodeAddr=127.0.0.1 CPUs={CPUS} State=UNKNOWN")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _started(command: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    program = shutil.which(command[0], path=PATH)
    assert program is not None
    with log.open("wb") as stream:
        return subprocess.Popen([program, *command[1:]], env=environment, stdout=stream, stderr=subprocess.STDOUT)


def _is_idle(environment: dict[str, str]) -> bool:
    return _said(["sinfo", "-h", "-o", "%T"], environment) == "idle"


def _end_jobs(environment: dict[str, str]) -> None:
    _said(["scancel", f"--user={getpass.getuser()}"], environment)
    begun = time.monotonic()
    while _said(["squeue", "-h", "-o", "%i"], environment) and time.monotonic() - begun < START_S:
        time.sleep(0.2)


def _said(command: Sequence[str], environment: dict[str, str]) -> str:
    program = shutil.which(command[0], path=PATH) or command[0]
    answer = subprocess.run(
        [program, *command[1:]], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return answer.stdout.strip()


def _until(is_so: Callable[[], bool], daemons: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    begun = time.monotonic()
    while not is_so():
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() - begun > START_S:
            logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in sorted(folder.glob("*.out")))
            raise AssertionError(f"Slurm did not start; ended: {ended}\n{logs}")
        time.sleep(0.1)
