"""Several processes for one training: which of them this one is, and how they meet."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

from flopwise.base.errors import FlopwiseError, shown

Launcher = Literal["alone", "torchrun", "slurm", "flopwise"]

LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that this process gets when its parent ends."""
SPAWNED = "FLOPWISE_SPAWNED"
"""For the ranks that `spawn` starts, the number of the process that does."""
LISTENER = "FLOPWISE_LISTENER"
"""For those, the number of the socket on which rank 0 listens."""
REFUSAL = "FLOPWISE_REFUSAL"
"""For those, the file in which a rank says why it ends."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
SLURM_PORTS = range(15_000, 30_000)
"""Below those that systems hand out by themselves; a job's number chooses one."""
BRACKETS = re.compile(r"\[([0-9]+)[0-9,\-]*\]")
HOST = re.compile(r"[A-Za-z0-9._\-]+")

MEETING_S = 600.0
"""In which all ranks have to be there."""
LATE_S = 3600.0
"""That ranks wait for one of them, which may be writing a checkpoint."""
PARTING_S = 5.0
"""That a rank which ends by an error waits for the others to have heard its last answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """This process among those of a training."""

    rank: int
    world: int
    local_rank: int
    """Among those of this machine: the number of its device."""
    address: str
    """Where rank 0 listens."""
    port: int
    launched_by: Launcher
    listener: int | None = None
    """A socket on which rank 0 listens already; None: it opens its own."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world or not 0 <= self.local_rank < self.world:
            raise FlopwiseError(
                f"rank {self.rank}, number {self.local_rank} on its machine, is none of {self.world} ranks",
                why=f"that is what the variables of {self.launched_by} say",
                hint="unset those that are left from another launch",
            )
        if not 0 <= self.port < 2**16:
            raise FlopwiseError(f"{self.port} is no port", hint="MASTER_PORT=29500")


def rank_of(environment: Mapping[str, str]) -> Rank:
    """From the variables of torchrun or of `spawn`, else of Slurm, else the only one."""
    if any(name in environment for name in TORCHRUN[:3]):
        _require(environment, TORCHRUN, "torchrun sets all of them")
        return Rank(
            rank=_number(environment, "RANK"),
            world=_number(environment, "WORLD_SIZE"),
            local_rank=_number(environment, "LOCAL_RANK"),
            address=environment["MASTER_ADDR"],
            port=_number(environment, "MASTER_PORT"),
            launched_by="flopwise" if SPAWNED in environment else "torchrun",
            listener=_number(environment, LISTENER) if LISTENER in environment else None,
        )
    # A batch script's own shell has a SLURM_PROCID too, but without -n neither tasks nor a step.
    if "SLURM_PROCID" in environment and not {"SLURM_NTASKS", "SLURM_STEP_ID"}.isdisjoint(environment):
        return _slurm_rank(environment)
    return Rank(rank=0, world=1, local_rank=0, address=LOOPBACK, port=0, launched_by="alone")


def _slurm_rank(environment: Mapping[str, str]) -> Rank:
    """MASTER_ADDR and MASTER_PORT, where a script sets them, come before the job's first node and number."""
    _require(environment, ("SLURM_NTASKS", "SLURM_LOCALID"), "srun sets all of them")
    address = environment.get("MASTER_ADDR", "")
    if not address:
        nodes = next((environment[name] for name in SLURM_NODES if environment.get(name)), None)
        if nodes is None:
            _require(environment, SLURM_NODES[1:2], "srun sets all of them")
        address = first_host(nodes or "")
    if environment.get("MASTER_PORT"):
        port = _number(environment, "MASTER_PORT")
    else:
        _require(environment, ("SLURM_JOB_ID",), "the port follows from it")
        port = SLURM_PORTS[_number(environment, "SLURM_JOB_ID") % len(SLURM_PORTS)]
    return Rank(
        rank=_number(environment, "SLURM_PROCID"),
        world=_number(environment, "SLURM_NTASKS"),
        local_rank=_number(environment, "SLURM_LOCALID"),
        address=address,
        port=port,
        launched_by="slurm",
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's short list of nodes: node01 of `node[01-04,7]`."""
    # Commas within brackets are gone with them, so that the next one is between nodes.
    host = BRACKETS.sub(r"\1", nodes).partition(",")[0].strip()
    if not HOST.fullmatch(host):
        raise FlopwiseError(
            f"cannot read the first node of {shown(nodes)}",
            why="it is a list like node[01-04,7]",
            hint="set MASTER_ADDR to the node of rank 0",
        )
    return host


def _require(environment: Mapping[str, str], names: Sequence[str], why: str) -> None:
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise FlopwiseError(
            f"this is one of several ranks, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            why=why,
            hint="start it with torchrun, srun or `flopwise train --gpus 2`, or unset what is left from another launch",
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise FlopwiseError(f"{name} is {shown(text)}, which is no number", hint=f"{name}=0, or unset it")
    return int(text)


# -- being one of them ------------------------------------------------------------------------------------------------


def end_with_launcher() -> None:
    """Have the system kill this process, where it is a rank that `spawn` has started, when that launcher is gone."""
    launcher = os.environ.get(SPAWNED)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have gone before the system was told.
    if str(os.getppid()) != launcher:
        os._exit(128 + signal.SIGKILL)


class RankLostError(FlopwiseError):
    """Another rank is gone or late; that one knows why."""


def note_refusal(error: FlopwiseError) -> None:
    """Let the launcher know of which error this rank ends, so that ranks need not repeat what rank 0 said.

    Nothing for one that only lost the others. It is all said on the rank's own terminal as well.
    """
    place = os.environ.get(REFUSAL)
    if place is not None:
        with suppress(OSError):
            Path(place).write_text("" if isinstance(error, RankLostError) else error.what, encoding="utf-8")


# -- how they meet ----------------------------------------------------------------------------------------------------
# torch is imported by the ranks only, not by the process that starts them.


class Group:
    """While it is entered, the ranks can talk: NCCL between GPUs, gloo between CPUs.

    A GPU's process takes its own device here. An error that comes of a rank which is gone or late leaves as a
    FlopwiseError; with NCCL, torch's watchdog ends the process instead.
    """

    def __init__(self, rank: Rank, device_type: str, *, meeting_s: float = MEETING_S, late_s: float = LATE_S) -> None:
        import torch

        self.rank, self.meeting_s, self.late_s = rank, meeting_s, late_s
        self.device = torch.device(device_type)
        if device_type == "cuda":
            if rank.local_rank >= torch.cuda.device_count():
                raise FlopwiseError(
                    f"rank {rank.rank} is number {rank.local_rank} on its machine, which has "
                    f"{torch.cuda.device_count()} GPUs",
                    why="they are counted from 0",
                    hint="no more ranks on a machine than it has GPUs",
                )
            self.device = torch.device("cuda", rank.local_rank)

    def __enter__(self) -> Self:
        import torch
        from torch import distributed

        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        try:
            self._meeting = store = self._store()
            distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=self.rank.rank,
                world_size=self.rank.world,
                timeout=timedelta(seconds=self.late_s),
                device_id=self.device if on_gpu else None,
            )
        except RuntimeError as error:
            raise self._not_met(error) from None
        return self

    def _store(self) -> Any:  # noqa: ANN401 - torch does not export their type
        """Where ranks find each other's addresses; one that is alone needs none but its own memory."""
        from torch import distributed

        rank = self.rank
        if rank.world == 1:
            return distributed.HashStore()  # type: ignore[attr-defined]
        limit = timedelta(seconds=self.meeting_s)
        listens = rank.rank == 0
        return distributed.TCPStore(  # type: ignore[attr-defined]
            rank.address, rank.port, rank.world, listens, timeout=limit, master_listen_fd=self._listener()
        )

    def _listener(self) -> int | None:
        """A socket for the store to have as its own, once."""
        if self.rank.rank or self.rank.listener is None:
            return None
        return os.dup(self.rank.listener)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from torch import distributed

        lost = error
        try:
            if error is None:
                # Nobody tears down what another one still talks through.
                distributed.barrier()
            elif isinstance(error, FlopwiseError):
                self._part()
            distributed.destroy_process_group()
        except RuntimeError as failed:
            # What went wrong before says more than that it could not be tidied up.
            if error is None:
                lost = failed
                if not _is_lost(failed):
                    raise
        if lost is not None and _is_lost(lost):
            raise RankLostError(
                f"rank {self.rank.rank} lost the others",
                why=_first_line(lost),
                hint="the rank that failed first says why",
            ) from lost

    def _part(self) -> None:
        """Wait until every rank has left its last collective, where all end by the same error.

        gloo may tell a rank that was not yet awake for an answer that the connection is closed, though the answer came:
        on busy cores rank 0 then lost the others instead of saying what all of them had seen.
        """
        names = [f"parting/{rank}" for rank in range(self.rank.world)]
        with suppress(RuntimeError):
            self._meeting.set(names[self.rank.rank], "")
            self._meeting.wait(names, timedelta(seconds=PARTING_S))

    def _not_met(self, error: Exception) -> FlopwiseError:
        rank = self.rank
        return FlopwiseError(
            f"{rank.world} ranks did not meet at {rank.address}:{rank.port} within {self.meeting_s:g} s",
            why=_first_line(error),
            hint="start all of them (under Slurm with srun); MASTER_ADDR and MASTER_PORT name another place",
        )


def leave(code: int = 0) -> NoReturn:
    """End a rank's process when all is done, without the interpreter's own end.

    gloo's threads may still hold tensors of the last collectives, and letting go of them while the interpreter is
    being finalized aborts the process (pytorch/pytorch#179291): seldom, and more often on busy cores.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_lost(error: BaseException) -> bool:
    """Whether another rank is gone or late; gloo has no exception of its own for it."""
    from torch import distributed

    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
