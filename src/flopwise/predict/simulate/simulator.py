"""Play a `Program` against the durations of its tasks and the rates of a link: when each task runs, what is waited for.

Each stream takes its tasks in the order of the list. A task starts when the one before it on its stream and all of its
`after` have ended. Kernels and work on the host take the seconds they are given. A copy takes its bytes over the link's
rate, and is slower for as long as the other direction is busy too: both are then slowed by the same factor, so each of
them ends later by what the overlap costs. That is exact, whichever of them starts or stops in the middle of the other.

`simulate` makes the record of it. `play` is the arithmetic alone, over plain lists, for those who play many programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flopwise.base.errors import FlopwiseError
from flopwise.records.program import OWNERS, STREAMS, Owner, Program, Stream, Task, Value
from flopwise.records.simulation import MemoryPoint, Simulation
from flopwise.setup.hardware import Link
from flopwise.work.parameters import Place

NOT_YET = -1.0
"""The end of a task that has none so far; moments are never negative."""

COPY_IN, COPY_OUT = STREAMS.index("copy-in"), STREAMS.index("copy-out")

LAST_COPIES = "the last copies"
HOST_UPDATE = "update on the host"


def simulate(program: Program, seconds: Sequence[float], link: Link | None, *, peaks: bool = True) -> Simulation:
    """When every task runs if those on `compute` and `host` take `seconds`, one each; copies follow from their bytes.

    What `seconds` says of copies is not looked at. Without a link only copies of no bytes can be played. `peaks=False`
    leaves the peaks of memory empty, which halves the time that a simulation takes.
    """
    tasks = program.tasks
    assert len(seconds) == len(tasks), f"{len(seconds)} durations for {len(tasks)} tasks"
    queues: dict[Stream, list[int]] = {stream: [] for stream in STREAMS}
    for index, task in enumerate(tasks):
        queues[task.stream].append(index)
    copies = [*queues["copy-in"], *queues["copy-out"]]
    if link is None and any(tasks[index].bytes for index in copies):
        raise FlopwiseError(
            "the plan copies over a link to host memory that the hardware's description does not have",
            why="what is kept on the host goes over that link, and its rate decides the time",
            hint="a plan that keeps everything on the device, or add [link] to a TOML of your own"
            " (`flopwise show NAME -w mine.toml` starts one)",
        )
    rate = 1.0 if link is None else link.bandwidth_bytes_per_s.value
    durations = list(seconds)
    for index in copies:
        durations[index] = tasks[index].bytes / rate
    after = [task.after for task in tasks]
    starts, ends = play(list(queues.values()), durations, after, both_ways_slowdown(link))
    idle, exposed_copy_s = _idle(program, queues, starts, ends)
    device, host = _peaks(program, starts, ends) if peaks else ({}, {})
    return Simulation(
        program=program,
        starts=tuple(starts),
        ends=tuple(ends),
        step_s=max(ends, default=0.0),
        busy={stream: sum([ends[index] - starts[index] for index in queue]) for stream, queue in queues.items()},
        idle=idle,
        exposed_copy_s=exposed_copy_s,
        peak_device_bytes=device,
        peak_host_bytes=host,
    )


def both_ways_slowdown(link: Link | None) -> float:
    """How many times longer a copy takes while the other direction is busy too; 1 where it is not known to."""
    if link is None or link.both_ways_bytes_per_s is None:
        return 1.0
    return link.bandwidth_bytes_per_s.value / link.both_ways_bytes_per_s.value


def play(
    queues: Sequence[Sequence[int]], seconds: Sequence[float], after: Sequence[Sequence[int]], slowdown: float
) -> tuple[list[float], list[float]]:
    """Starts and ends of tasks that are known by number; `queues` lists those of each stream, in `STREAMS`' order.

    `seconds` of a copy are those it takes alone; times `slowdown` while both directions are busy. Waits in a circle are
    an assertion error.
    """
    assert min(seconds, default=0.0) >= 0.0, "a task takes less than no time"
    count = len(seconds)
    starts, alone = [0.0] * count, [0.0] * count
    # What a stream that is through awaits is the one entry beyond the tasks, which never ends.
    ends = [NOT_YET] * (count + 1)
    shared = (COPY_IN, COPY_OUT) if slowdown != 1.0 else ()
    streams = [
        _in_turn(queue, seconds, after, starts, ends, alone=alone if number in shared else None)
        for number, queue in enumerate(queues)
    ]
    awaited = [next(stream, count) for stream in streams]
    while True:
        moved = True
        while moved:
            moved = False
            for number, other in enumerate(awaited):
                if other >= 0 and ends[other] >= 0.0:
                    awaited[number] = next(streams[number], count)
                    moved = True
        # Whatever has no end yet waits for one of the copies under way. So a copy that is alone here stays alone until
        # it ends, and of two copies nothing can begin before the first of them ends.
        inward, outward = awaited[COPY_IN], awaited[COPY_OUT]
        if inward < 0 and outward < 0:
            _delay(~inward, ~outward, slowdown, starts, alone)
            number = COPY_IN if alone[~inward] <= alone[~outward] else COPY_OUT
        elif inward < 0 or outward < 0:
            number = COPY_IN if inward < 0 else COPY_OUT
        else:
            break
        ended = ~awaited[number]
        ends[ended] = alone[ended]
        awaited[number] = next(streams[number], count)
    stuck = [other for other in awaited if other != count]
    assert not stuck, f"tasks wait for each other in a circle: nothing ends task {stuck[0]}"
    ends.pop()
    return starts, ends


def _in_turn(
    queue: Sequence[int],
    seconds: Sequence[float],
    after: Sequence[Sequence[int]],
    starts: list[float],
    ends: list[float],
    *,
    alone: list[float] | None,
) -> Iterator[int]:
    """Give starts and ends to the tasks of a stream, and stop at each task whose end must be known to go on.

    With `alone`, this is a direction of the link: it writes there when a task would end if it had the link to itself,
    and stops with the complement of its number until somebody has settled when it does end.
    """
    free = 0.0
    for task in queue:
        start = free
        for other in after[task]:
            while (end := ends[other]) < 0.0:
                yield other
            start = max(start, end)
        starts[task] = start
        free = start + seconds[task]
        if alone is not None and free > start:
            alone[task] = free
            yield ~task
            free = ends[task]
        else:
            ends[task] = free


def _delay(first: int, second: int, slowdown: float, starts: Sequence[float], alone: list[float]) -> None:
    """Put off the ends of two copies by what it costs them to share the link until one of them ends."""
    # Where one of them has met another copy before, its delay is in `alone`, and this one started no sooner than that
    # one ended: they have been together since the later start.
    together = min(alone[first], alone[second]) - max(starts[first], starts[second])
    if together > 0.0:
        delay = together * (slowdown - 1.0)
        alone[first] += delay
        alone[second] += delay


WORDS: dict[Owner, str] = {"optimizer": "optimizer state"}
"""What a copy moves, where the plain word is another one."""


def _awaited_words(task: Task) -> str:
    """What a device that waits for this task is said to wait for."""
    if task.stream == "host":
        return HOST_UPDATE
    what = "" if task.what is None else WORDS.get(task.what, task.what)
    return what if task.stream == "copy-in" else f"room for {what}"


def _idle(
    program: Program, queues: dict[Stream, list[int]], starts: Sequence[float], ends: Sequence[float]
) -> tuple[dict[str, float], float]:
    """Seconds that the compute stream waits, by what for, and those of them in which it waits for copies."""
    idle, exposed_copy_s = waits_between(program, queues["compute"], starts, ends, 0.0)
    free = max((ends[index] for index in queues["compute"][-1:]), default=0.0)
    copied = max((ends[queue[-1]] for queue in (queues["copy-in"], queues["copy-out"]) if queue), default=0.0)
    updated = max((ends[index] for index in queues["host"][-1:]), default=0.0)
    rest = max(copied, updated) - free
    if rest > 0.0:
        words = LAST_COPIES if copied >= updated else HOST_UPDATE
        idle[words] = idle.get(words, 0.0) + rest
        exposed_copy_s += rest if copied >= updated else 0.0
    return idle, exposed_copy_s


def waits_between(
    program: Program, computed: Sequence[int], starts: Sequence[float], ends: Sequence[float], free: float
) -> tuple[dict[str, float], float]:
    """The same before some tasks of the compute stream that follow each other, which is free from `free` on."""
    idle: dict[str, float] = {}
    exposed_copy_s = 0.0
    for start, end, task in _waits(program, computed, starts, ends, free):
        words = _awaited_words(task)
        idle[words] = idle.get(words, 0.0) + (end - start)
        exposed_copy_s += end - start if task.stream != "host" else 0.0
    return idle, exposed_copy_s


def _waits(
    program: Program, computed: Sequence[int], starts: Sequence[float], ends: Sequence[float], free: float
) -> Iterator[tuple[float, float, Task]]:
    """From when to when the compute stream waits before some of its tasks, and for which task."""
    for index in computed:
        if starts[index] > free:
            yield free, starts[index], program.tasks[max(program.tasks[index].after, key=ends.__getitem__)]
        free = ends[index]


def waits_of(simulation: Simulation) -> list[tuple[float, float, str]]:
    """Every wait of the compute stream within the step: from when, to when, for what in words."""
    program, starts, ends = simulation.program, simulation.starts, simulation.ends
    computed = [index for index, task in enumerate(program.tasks) if task.stream == "compute"]
    waits = [(start, end, _awaited_words(task)) for start, end, task in _waits(program, computed, starts, ends, 0.0)]
    free = max((ends[index] for index in computed[-1:]), default=0.0)
    if simulation.step_s > free:
        last = {task.stream for task, end in zip(program.tasks, ends, strict=True) if end == simulation.step_s}
        waits.append((free, simulation.step_s, HOST_UPDATE if last == {"host"} else LAST_COPIES))
    return waits


def memory_points(simulation: Simulation) -> list[MemoryPoint]:
    """Bytes in use by owner, from each moment on at which they change; the first point is the start of the step.

    A buffer is in use from the start of the task that writes a value into it, or of the step, to the end of the last
    one that reads or writes this value; a value that must be there when the step is over is in use to the end.
    Borrowed buffers count under the owner of what lies in them. Every point names every owner there is.
    """
    program = simulation.program
    slots = _slots(program)
    points = []
    for moment, used in _in_use(program, slots, simulation.starts, simulation.ends):
        device, host = _of_place("device", slots, used), _of_place("host", slots, used)
        points.append(MemoryPoint(seconds=moment, device=device, host=host))
    return points


def _of_place(place: Place, slots: dict[tuple[Place, Owner], int], used: Sequence[int]) -> dict[str, int]:
    return {owner: used[slot] for (where, owner), slot in slots.items() if where == place}


def _without_zeros(by_owner: dict[str, int]) -> dict[str, int]:
    return {owner: size for owner, size in by_owner.items() if size}


def _peaks(program: Program, starts: Sequence[float], ends: Sequence[float]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by owner on device and host, each at the first moment at which its total is largest."""
    slots = _slots(program)
    devices = sum(place == "device" for place, _ in slots)
    most_device = most_host = 0
    device, host = [0] * len(slots), [0] * len(slots)
    for _, used in _in_use(program, slots, starts, ends):
        on_device = sum(used[:devices])
        on_host = sum(used) - on_device
        if on_device > most_device:
            most_device, device = on_device, used.copy()
        if on_host > most_host:
            most_host, host = on_host, used.copy()
    return _without_zeros(_of_place("device", slots, device)), _without_zeros(_of_place("host", slots, host))


def _slots(program: Program) -> dict[tuple[Place, Owner], int]:
    """The places and owners of the program's buffers, numbered: the device's first."""
    there = {(buffer.place, buffer.owner) for buffer in program.buffers}
    places: tuple[Place, ...] = ("device", "host")
    pairs = [(place, owner) for place in places for owner in OWNERS if (place, owner) in there]
    return {pair: number for number, pair in enumerate(pairs)}


def _in_use(
    program: Program, slots: dict[tuple[Place, Owner], int], starts: Sequence[float], ends: Sequence[float]
) -> Iterator[tuple[float, list[int]]]:
    """Every moment at which the bytes in use change, and those of each slot from then on (one list, which changes)."""
    used = [0] * len(slots)
    slot_of = [slots[buffer.place, buffer.owner] for buffer in program.buffers]
    sizes = [buffer.bytes for buffer in program.buffers]
    now = 0.0
    for moment, buffer, sign in sorted(_changes(program, starts, ends)):
        if moment > now:
            yield now, used
            now = moment
        used[slot_of[buffer]] += sign * sizes[buffer]
    yield now, used


def _changes(program: Program, starts: Sequence[float], ends: Sequence[float]) -> list[tuple[float, int, int]]:
    """(moment, buffer, +1 or -1) wherever a buffer comes into use or falls out of it."""
    held: list[Value | None] = [program.at_start.get(buffer) for buffer in range(len(program.buffers))]
    # The end of the last task so far that used the value in each buffer.
    last = [0.0] * len(held)
    changes = [(0.0, buffer, 1) for buffer in program.at_start]
    for start, end, task in zip(starts, ends, program.tasks, strict=True):
        for buffer, _ in task.reads:
            last[buffer] = max(last[buffer], end)
        for buffer, value in task.writes:
            before = held[buffer]
            # Most values are written once: asking for the same object first spares comparing their fields.
            if before is not value and before != value:
                if before is not None:
                    # A task that reads the old value and writes the new one into its place uses the buffer once.
                    changes.append((min(last[buffer], start), buffer, -1))
                changes.append((start, buffer, 1))
                held[buffer], last[buffer] = value, end
            last[buffer] = max(last[buffer], end)
    kept = program.at_end
    changes += [
        (last[buffer], buffer, -1)
        for buffer, there in enumerate(held)
        if there is not None and kept.get(buffer) != there
    ]
    return changes
