"""A sweep that runs: every cell that is not finished is tried, in processes of its own, as often as it is wanted."""

from __future__ import annotations

import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flopwise.core.catalog import THIS_CPU
from flopwise.core.errors import FlopwiseError
from flopwise.core.files import WRITABLE_HINT
from flopwise.core.sweep import AUTO, ENDED, FINISHED, Attempt, Cell, CellState, SweepRecord, says_nothing, standing
from flopwise.core.sweep_store import CELLS, claimed, read_attempts, read_cell
from flopwise.core.units import show_bytes
from flopwise.engine.signals import Stop
from flopwise.sweep.attempts import (
    GRACE_S,
    Command,
    Trial,
    now,
    run_attempt,
    run_record,
    settled,
    train_command,
    without_process,
)
from flopwise.sweep.auto_batch import largest, most_sequences
from flopwise.sweep.slots import Slots, check_hardware

LOOKING_STEPS = 2
"""Of an attempt that only tells whether a micro-batch fits: the second one has all that the first one has left."""
LOOK_AGAIN_S = 0.5
"""Between looks at cells that another sweep has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellBegun:
    """An attempt at a cell begins; repeat 0 looks for the largest micro-batch."""

    cell: Cell
    repeat: int
    micro_batch_sequences: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded:
    cell: Cell
    attempt: Attempt
    seconds: float
    """That it took, its start included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellEnded:
    """Nothing more is tried of a cell."""

    cell: Cell
    attempts: tuple[Attempt, ...]
    """Those that stand for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSkipped:
    """Nothing had to be tried: it is finished, or has failed before and is not retried."""

    cell: Cell
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """What a reader should know: a file that cannot be read, a cell that another sweep has."""

    cell: str
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepEnded:
    attempts: tuple[Attempt, ...]
    stopped_by: str | None
    """The signal's name, where it was interrupted."""


Event = CellBegun | AttemptEnded | CellEnded | CellSkipped | Noticed | SweepEnded


def run_sweep(
    store: Path,
    record: SweepRecord,
    *,
    force: bool = False,
    retry: bool = False,
    slots: int | None = None,
    only: Sequence[str] = (),
    tell: Callable[[Event], None] | None = None,
    command: Command = train_command,
    grace_s: float = GRACE_S,
) -> list[Attempt]:
    """Try what is not finished; the attempts that stand for the cells, in their order, those of earlier sweeps too.

    `force` tries everything anew, `retry` what has failed or took too long. `only`: ids of the cells that are meant.
    SIGINT and SIGTERM end what runs, in an orderly way, and then this one, as KeyboardInterrupt or SystemExit; a second
    signal ends it at once, and its processes all the same.
    """
    _check_writable(store)
    sweep = _Sweep(store, record, tell or _unheard, command, grace_s)
    sweep.force, sweep.retry, sweep.only = force, retry, only
    wanted = [cell for cell in record.cells if not only or cell in only]
    cells = sweep.read(wanted)
    on_cpu = all(cell.settings.hardware == THIS_CPU for cell in cells)
    sweep.slots = Slots(record, slots, on_cpu=on_cpu)
    check_hardware((cell.settings for cell in cells), record, sweep.slots)
    with Stop() as stop:
        sweep.stop = stop
        while True:
            cells = sweep.once(cells)
            if not cells or stop.asked:
                break
            time.sleep(LOOK_AGAIN_S)
    attempts = [attempt for cell in wanted for attempt in sweep.found.get(cell, ())]
    sweep.tell(SweepEnded(attempts=tuple(attempts), stopped_by=stop.asked))
    if stop.asked == "SIGINT":
        raise KeyboardInterrupt
    if stop.asked:
        raise SystemExit(128 + signal.Signals[stop.asked])
    return attempts


def _unheard(_event: Event) -> None:
    return


def _check_writable(store: Path) -> None:
    folder = store / CELLS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FlopwiseError(f"cannot write {folder}", why=error.strerror, hint=WRITABLE_HINT) from None


class _Interrupted(Exception):  # noqa: N818 - no error
    """An end is wanted: nothing more is begun."""


class _NotTold(Exception):  # noqa: N818 - no error of ours
    """An attempt that should have told whether a micro-batch fits ended otherwise."""


class _Sweep:
    """A sweep while it runs; its threads wait for processes, one each."""

    slots: Slots
    stop: Stop
    force = False
    retry = False
    only: Sequence[str] = ()

    def __init__(
        self, store: Path, record: SweepRecord, tell: Callable[[Event], None], command: Command, grace_s: float
    ) -> None:
        self.store, self.record, self.command, self.grace_s = store, record, command, grace_s
        self.found: dict[str, tuple[Attempt, ...]] = {}
        self.noticed: set[tuple[str, str]] = set()
        self._tell, self._telling = tell, threading.Lock()
        self._errors: list[BaseException] = []

    @property
    def asked(self) -> str | None:
        """Why an end is wanted: a signal's name, or that another thread has failed."""
        return self.stop.asked or ("an error" if self._errors else None)

    def tell(self, event: Event) -> None:
        with self._telling:
            self._tell(event)

    def notice(self, cell: str, words: str) -> None:
        """Tell it, once."""
        if (cell, words) not in self.noticed:
            self.noticed.add((cell, words))
            self.tell(Noticed(cell=cell, words=words))

    def read(self, names: Iterable[str]) -> list[Cell]:
        """The cells; one that cannot be read has an attempt that says so, and hides no other."""
        cells = []
        for name in names:
            try:
                cells.append(read_cell(self.store, name))
            except FlopwiseError as error:
                self._failed(name, error)
        return cells

    def _failed(self, cell: str, error: FlopwiseError) -> None:
        """A cell whose files cannot be read or written has an attempt in no file."""
        reason = error.what if error.why is None else f"{error.what}: {error.why}"
        self.found[cell] = (
            Attempt(
                number=0, cell=cell, repeat=1, state="failed", started=now(), ended=now(),
                sweep=self.record.name, steps=self.record.steps, reason=reason,
            ),
        )  # fmt: skip
        self.notice(cell, reason)

    # -- all cells ------------------------------------------------------------------------------------------------

    def once(self, cells: list[Cell]) -> list[Cell]:
        """Go through the cells once; those that another sweep has are to be looked at again."""
        queue, again = deque(cells), list[Cell]()

        def work() -> None:
            try:
                while not self.asked:
                    try:
                        cell = queue.popleft()
                    except IndexError:
                        return
                    if not self._is_settled(cell):
                        again.append(cell)
            except BaseException as error:
                self._errors.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.slots.count, len(cells)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            # With a limit, so that signals are looked at.
            while thread.is_alive():
                thread.join(0.1)
        if self._errors:
            raise self._errors[0]
        return sorted(again, key=cells.index)

    def _is_settled(self, cell: Cell) -> bool:
        """Whether a cell needs no other look."""
        try:
            with claimed(self.store, cell.id) as ours:
                if not ours:
                    self.notice(cell.id, "another sweep is at work on it")
                    return False
                return self._go(cell)
        except FlopwiseError as error:
            self._failed(cell.id, error)
            return True

    def _attempts(self, cell: Cell) -> list[Attempt]:
        """What was tried; attempts whose process is gone are settled."""
        attempts, problems = read_attempts(self.store, cell.id)
        for problem in problems:
            self.notice(cell.id, f"{problem.path} is passed over: {problem.why}")
        return [
            settled(self.store, attempt) if attempt.state == "failed" and attempt.ended is None else attempt
            for attempt in attempts
        ]

    # -- a cell ---------------------------------------------------------------------------------------------------

    def _go(self, cell: Cell) -> bool:
        attempts = self._attempts(cell)
        running = [attempt for attempt in attempts if attempt.state not in ENDED]
        if running:
            here = running[0].host == socket.gethostname()
            self.notice(cell.id, f"attempt {running[0].number} is running on {running[0].host}")
            if here:
                # Its sweep is gone; it is being ended, or ends by itself.
                return False
        elif self.force or not self._is_done(cell, attempts):
            try:
                self._measure(cell, [] if self.force else attempts)
            except _Interrupted:
                self.found[cell.id] = tuple(standing(self._attempts(cell)))
                return True
            self.found[cell.id] = tuple(standing(self._attempts(cell)))
            self.tell(CellEnded(cell=cell, attempts=self.found[cell.id]))
            return True
        self.found[cell.id] = tuple(standing(attempts))
        self.tell(CellSkipped(cell=cell, attempts=self.found[cell.id]))
        return True

    def _is_done(self, cell: Cell, attempts: list[Attempt]) -> bool:
        """Whether nothing is to be tried; what failed is, only where that is asked for."""
        if not self._missing(attempts):
            return True
        told = [attempt for attempt in attempts if attempt.state in ENDED and not says_nothing(attempt)]
        if told and told[-1].state == "skipped":
            # Left out by this sweep, it stays so unless it is named; another sweep may want it.
            return told[-1].sweep == self.record.name and not self.only
        if not told or told[-1].state == "ok":
            return False
        if told[-1].state != "oom":
            return not self.retry
        # Looking for a micro-batch, that one did not fit is no end.
        return not _looks(cell) or told[-1].micro_batch_sequences is None

    def _missing(self, attempts: list[Attempt]) -> list[int]:
        """Repeats without a measurement that can still be read."""
        there = {
            attempt.repeat
            for attempt in standing(attempts)
            if attempt.state == "ok" and run_record(self.store, attempt.run) is not None
        }
        return [repeat for repeat in range(1, self.record.repeats + 1) if repeat not in there]

    def _measure(self, cell: Cell, attempts: list[Attempt]) -> None:
        unfit = self.slots.too_few(cell.settings)
        if unfit is not None:
            self._without_process(cell, "failed", unfit)
            return
        too_much = _too_much(cell)
        if too_much is not None:
            self._without_process(cell, "oom", too_much)
            return
        fits = {
            attempt.micro_batch_sequences: attempt.state == "ok"
            for attempt in attempts
            if attempt.micro_batch_sequences is not None and attempt.state in FINISHED
        }
        missing = self._missing(attempts)
        while missing:
            micro = None
            if _looks(cell):
                try:
                    micro = self._look(cell, fits)
                except _NotTold:
                    return
                if micro == 0:
                    self._without_process(cell, "oom", "not even a micro-batch of one sequence fits")
                    return
            elif cell.settings.batch_sequences == AUTO and cell.settings.micro_batch_sequences != AUTO:
                micro = cell.settings.micro_batch_sequences
            attempt = self._attempt(cell, missing[0], micro)
            if attempt.state == "ok":
                missing.pop(0)
            elif attempt.state == "oom" and micro is not None and _looks(cell):
                # A measurement takes a little more than looking did.
                fits[micro] = False
            else:
                return

    def _look(self, cell: Cell, fits: dict[int, bool]) -> int:
        """The largest micro-batch that fits, 0 for none; what is known already, or follows, is not tried."""

        def works(micro: int) -> bool:
            if micro in fits:
                return fits[micro]
            if any(not is_good and other < micro for other, is_good in fits.items()):
                return False
            attempt = self._attempt(cell, 0, micro)
            if attempt.state not in FINISHED:
                raise _NotTold
            fits[micro] = attempt.state == "ok"
            return fits[micro]

        known = [micro for micro, is_good in fits.items() if is_good]
        foreseen = cell.foreseen.micro_batch_sequences if cell.foreseen else None
        return largest(works, max(known, default=foreseen or 1), most_sequences(cell.settings.sequence_tokens))

    def _trial(self, cell: Cell, repeat: int, micro: int | None = None) -> Trial:
        return Trial(
            cell=cell,
            sweep=self.record,
            repeat=repeat,
            steps=self.record.steps if repeat else LOOKING_STEPS,
            profile=self.record.profile and repeat > 0,
            batch_sequences=None if micro is None else micro * cell.settings.devices,
            micro_batch_sequences=micro,
        )

    def _attempt(self, cell: Cell, repeat: int, micro: int | None) -> Attempt:
        with self.slots.taken(cell.settings) as environment:
            if self.asked:
                raise _Interrupted
            self.tell(CellBegun(cell=cell, repeat=repeat, micro_batch_sequences=micro))
            begun = time.monotonic()
            attempt = run_attempt(
                self.store,
                self._trial(cell, repeat, micro),
                command=self.command,
                environment=environment,
                stop=self,
                grace_s=self.grace_s,
            )
        self.tell(AttemptEnded(cell=cell, attempt=attempt, seconds=time.monotonic() - begun))
        if self.asked:
            raise _Interrupted
        return attempt

    def _without_process(self, cell: Cell, state: CellState, reason: str) -> None:
        attempt = without_process(self.store, self._trial(cell, 1), state, reason)
        self.tell(AttemptEnded(cell=cell, attempt=attempt, seconds=0.0))


def _looks(cell: Cell) -> bool:
    """Whether the largest micro-batch is to be looked for."""
    return cell.settings.batch_sequences == AUTO and cell.settings.micro_batch_sequences == AUTO


def _too_much(cell: Cell) -> str | None:
    """Why the plan for one device, the same that would run, does not fit; of several, only running them tells."""
    foreseen, settings = cell.foreseen, cell.settings
    if foreseen is None or foreseen.fits or foreseen.method != "plan" or settings.devices > 1:
        return None
    if foreseen.device_bytes is None or settings.device_memory_bytes is None:
        return foreseen.reason or "no plan fits"
    return f"needs {show_bytes(foreseen.device_bytes)} of {show_bytes(settings.device_memory_bytes)}"
