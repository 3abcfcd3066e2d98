"""Collects the tasks of a program; what each waits for follows from the buffers that it uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from flopwise.base.errors import FlopwiseError
from flopwise.records.outcome import WRITTEN_BY
from flopwise.records.program import Buffer, Kind, Owner, Program, Stream, Task, Use, Value
from flopwise.work.parameters import End

NOBODY = -1
"""The writer of what is there when a step begins."""


class Builder:
    """Buffers, the value that each holds so far, and the tasks in order."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tasks: list[Task] = []
        self.at_start: dict[int, Value] = {}
        self._held: list[Use | None] = []
        """For each buffer what is in it, as the use that all who read it share."""
        self._computes: list[bool] = []
        self._writer: list[int] = []
        self._users: list[list[int]] = []
        """For each buffer the tasks that wrote and read the value in it."""
        self.also_after: tuple[int, ...] = ()
        """Tasks that everything from here on waits for."""

    def buffer(self, buffer: Buffer, holds: Value | None = None) -> int:
        """A new buffer; `holds` is the value in it when the step begins."""
        index = len(self.buffers)
        self.buffers.append(buffer)
        self._held.append(None if holds is None else Use(index, holds))
        self._writer.append(NOBODY)
        self._users.append([])
        if holds is not None:
            self.at_start[index] = holds
        return index

    def value(self, buffer: int) -> Value | None:
        """What a buffer holds now."""
        held = self._held[buffer]
        return None if held is None else held.value

    def require(self, buffer: int) -> Value:
        """The same of a buffer that must hold something."""
        held = self._held[buffer]
        assert held is not None
        return held.value

    def forget(self, buffer: int) -> None:
        """What a buffer holds is out of date: nobody reads it any more."""
        self._held[buffer] = None

    def task(
        self,
        kind: Kind,
        stream: Stream,
        *,
        reads: Iterable[int],
        writes: Iterable[tuple[int, Value]],
        round_: int,
        layer: int | None = None,
        chunk: int | None = None,
        what: Owner | None = None,
        level: str = "",
        tokens: int = 0,
        parameters: int = 0,
        size: int = 0,
        operators: tuple[str, ...] = (),
        end: End | None = None,
        first: int = 0,
    ) -> int:
        """Append a task: it reads what the buffers hold now and leaves the given values in others."""
        index = len(self.tasks)
        computes = stream == "compute"
        after = set(self.also_after)
        read = []
        self._computes.append(computes)
        for buffer in reads:
            held = self._held[buffer]
            assert held is not None
            read.append(held)
            after.add(self._writer[buffer])
            users = self._users[buffer]
            # Computations keep their order: who waits for the last of several waits for all.
            if computes and users and self._computes[users[-1]]:
                users[-1] = index
            else:
                users.append(index)
        written = []
        for buffer, value in writes:
            use = self._held[buffer] = Use(buffer, value)
            written.append(use)
            after.update(self._users[buffer])
            self._writer[buffer] = index
            self._users[buffer] = [index]
        after -= {index, NOBODY}
        if computes:
            # For the same reason none of them has to wait for another.
            after = {before for before in after if not self._computes[before]}
        self.tasks.append(
            Task(
                kind=kind,
                stream=stream,
                round=round_,
                layer=layer,
                chunk=chunk,
                what=what,
                level=level,
                tokens=tokens,
                parameters=parameters,
                bytes=size,
                operators=operators,
                reads=tuple(read),
                writes=tuple(written),
                after=tuple(after),
                end=end,
                first=first,
            )
        )
        return index

    def last(self, stream: Stream) -> tuple[int, ...]:
        """The last task of a stream so far, if there is one."""
        found = next(
            (index for index in range(len(self.tasks) - 1, -1, -1) if self.tasks[index].stream == stream), None
        )
        return () if found is None else (found,)

    def program(self, at_end: dict[int, Value], rounds: int) -> Program:
        """What was collected."""
        return Program(tuple(self.buffers), tuple(self.tasks), dict(self.at_start), at_end, rounds)


class FreeSlots:
    """Slots of one size; the one that was given back the longest ago is taken first, so that its last copy is over."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = deque(slots)

    def take(self) -> int:
        if not self._free:
            raise FlopwiseError(
                "the plan has too few slots for activations",
                why="all of them hold what stays when one more is needed for a layer at work",
                hint=WRITTEN_BY,
            )
        return self._free.popleft()

    def give(self, slot: int) -> None:
        self._free.append(slot)
