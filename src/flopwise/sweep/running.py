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

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import WRITABLE_HINT
from flopwise.base.units import AUTO, show_bytes
from flopwise.engine.signals import Stop
from flopwise.store.cells import ENDED, FINISHED, Attempt, Cell, CellState, SweepRecord, standing_attempts
from flopwise.store.sweeps import CELLS, claimed, looks, missing_repeats, now, read_attempts, read_cell, verdict
from flopwise.sweep.attempts import (
    GRACE_S,
    Command,
    Trial,
    run_attempt,
    settle_attempt,
    train_command,
    without_process,
)
from flopwise.sweep.auto_batch import LOOKING_STEPS, largest, most_sequences
from flopwise.sweep.slots import Slots, check_hardware, slots_for

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
    named: Sequence[str] = (),
    tell: Callable[[Event], None] | None = None,
    command: Command = train_command,
    grace_s: float = GRACE_S,
) -> list[Attempt]:
    """Try what is not finished; the attempts that stand for the cells, in their order, those of earlier sweeps too.

    `force` tries everything anew, whatever an attempt on another machine says; `retry` what has failed or took too
    long. `only`: ids of the cells that are meant; `named`: those that are tried though the sweep leaves them out. A
    cell whose attempt may still run on another machine is left to it, and has that attempt in the answer.
    SIGINT and SIGTERM end what runs, in an orderly way, and then this one, as KeyboardInterrupt or SystemExit; a second
    signal ends it at once, and its processes all the same.
    """
    _check_writable(store)
    sweep = _Sweep(store, record, tell or _unheard, command, grace_s)
    sweep.force, sweep.retry, sweep.named = force, retry, named
    wanted = [cell for cell in record.cells if not only or cell in only]
    cells = sweep.read(wanted)
    sweep.slots = slots_for(record, [cell.settings for cell in cells], slots)
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
    named: Sequence[str] = ()

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
                self._note_failure(name, error)
        return cells

    def _note_failure(self, cell: str, error: FlopwiseError) -> None:
        """A cell whose files cannot be read or written has an attempt in no file."""
        reason = error.what if error.why is None else f"{error.what}: {error.why}"
        self.found[cell] = (
            Attempt(
                number=0,
                cell=cell,
                repeat=1,
                state="failed",
                started=now(),
                ended=now(),
                sweep=self.record.name,
                steps=self.record.steps,
                reason=reason,
            ),
        )
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
            self._note_failure(cell.id, error)
            return True

    def _attempts(self, cell: Cell) -> list[Attempt]:
        """What was tried; attempts whose process is gone are settled."""
        attempts, problems = read_attempts(self.store, cell.id)
        for problem in problems:
            self.notice(cell.id, f"{problem.path} is passed over: {problem.why}")
        return [
            settle_attempt(self.store, attempt) if attempt.state == "failed" and attempt.ended is None else attempt
            for attempt in attempts
        ]

    # -- a cell ---------------------------------------------------------------------------------------------------

    def _go(self, cell: Cell) -> bool:
        attempts = self._attempts(cell)
        running = [attempt for attempt in attempts if attempt.state not in ENDED]
        for attempt in running:
            self.notice(cell.id, f"attempt {attempt.number} is running on {attempt.host}")
            if attempt.host == socket.gethostname():
                # Its sweep is gone; it is being ended, or ends by itself.
                return False
        found = verdict(self.store, self.record, cell, attempts, named=cell.id in self.named)
        if self.force and found != "skipped":
            found = "open"
        elsewhere = [] if self.force or found in ("finished", "skipped") else running
        if not elsewhere and (found == "open" or (found == "failed" and self.retry)):
            self._tell_of_more_steps(cell, attempts)
            try:
                self._measure(cell, [] if self.force else attempts)
            except _Interrupted:
                self.found[cell.id] = tuple(standing_attempts(self._attempts(cell)))
                return True
            self.found[cell.id] = tuple(standing_attempts(self._attempts(cell)))
            self.tell(CellEnded(cell=cell, attempts=self.found[cell.id]))
            return True
        # An attempt elsewhere is part of the answer, be it only one that looks for a micro-batch.
        self.found[cell.id] = tuple(dict.fromkeys([*standing_attempts(attempts), *elsewhere]))
        self.tell(CellSkipped(cell=cell, attempts=self.found[cell.id]))
        return True

    def _tell_of_more_steps(self, cell: Cell, attempts: list[Attempt]) -> None:
        """Say why a cell that has a measurement is measured again."""
        steps = [attempt.steps for attempt in standing_attempts(attempts) if attempt.state == "ok"]
        if steps and not self.force and min(steps) < self.record.steps:
            before, wanted = min(steps), self.record.steps
            self.notice(cell.id, f"measured over {before:,} steps before, and again, since {wanted:,} are wanted")

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
        missing = missing_repeats(self.store, self.record, attempts)
        while missing:
            micro = None
            if looks(cell):
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
            elif attempt.state == "oom" and micro is not None and looks(cell):
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
        with self.slots.take(cell.settings) as environment:
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


def _too_much(cell: Cell) -> str | None:
    """Why the plan for one device, the same that would run, does not fit; of several, only running them tells."""
    foreseen, settings = cell.foreseen, cell.settings
    if foreseen is None or foreseen.fits or foreseen.method != "plan" or settings.devices > 1:
        return None
    if foreseen.device_bytes is None or settings.device_memory_bytes is None:
        return foreseen.reason or "no plan fits"
    return f"needs {show_bytes(foreseen.device_bytes)} of {show_bytes(settings.device_memory_bytes)}"
