"""The order in which each stream takes a program's tasks: computations as written, copies as early as memory allows.

Loads share one direction of the link. Which of those that could begin goes first is decided on a clock of nominal
rates: the one that is needed first. So what belongs to the head, or a gradient of the last layers, does not come while
the first layers wait for their weights, and comes before the link would be idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from flopwise.records.plan import Plan
from flopwise.records.program import Program, Stream, Task
from flopwise.work.transformer import Transformer

NOMINAL_FLOPS_PER_S, NOMINAL_BYTES_PER_S = 600e12, 50e9
"""Of a large GPU and its link. Only their ratio matters, and only for the order: others' ratios are not far from it."""

NOT_YET = -1.0
"""The end of a task that did not run yet."""


@dataclass(frozen=True, slots=True)
class NominalSeconds:
    """About how long tasks take: their products and attention, or their bytes."""

    block_flops: float
    """A token's, forward."""
    head_flops: float
    """A token's, forward and backward."""

    @classmethod
    def of_model(cls, block: int, head: int, plan: Plan, model: Transformer) -> NominalSeconds:
        """From the numbers of a block and of the head."""
        return cls(2.0 * (block + plan.sequence_tokens * model.hidden), 6.0 * head)

    def of(self, task: Task) -> float:
        if task.stream in ("copy-in", "copy-out"):
            return task.bytes / NOMINAL_BYTES_PER_S
        if task.kind in ("embed", "embed-backward", "optimize", "context"):
            return 0.0
        each = self.head_flops if task.kind == "head" else self.block_flops * (2 if "backward" in task.kind else 1)
        return each * task.tokens / NOMINAL_FLOPS_PER_S


def in_order_of_release(program: Program) -> Program:
    """The same tasks, every copy behind the last computation that it waits for instead of before the one that needs it.

    So no copy that could begin is held up by one before it on its stream that cannot.
    """
    key = _releases(program.tasks)
    return _sort(program, key, [0.0] * len(key))


def order_by_need(program: Program, nominal: NominalSeconds) -> Program:
    """The same, and of the loads that could begin the one first that is needed first."""
    tasks = program.tasks
    key = _releases(tasks)
    starts = _Clock(tasks, [nominal.of(task) for task in tasks], key).starts()
    behind = -1.0
    for index in sorted(_loads(tasks), key=lambda load: starts[load]):
        # A stream keeps its order: a load is behind all that go before it.
        behind = key[index] = max(behind, key[index])
    return _sort(program, key, starts)


def starts_by_need(tasks: Sequence[Task], seconds: Sequence[float]) -> list[float]:
    """When tasks begin that take so long, if the link always takes the load that is needed first."""
    return _Clock(tasks, seconds, _releases(tasks)).starts()


def _loads(tasks: Sequence[Task]) -> list[int]:
    return [index for index, task in enumerate(tasks) if task.stream == "copy-in"]


def _releases(tasks: Sequence[Task]) -> list[float]:
    """For each task the last computation that it waits for, directly or not; its own place for a computation."""
    found: list[float] = []
    for index, task in enumerate(tasks):
        if task.stream == "compute":
            found.append(float(index))
        else:
            found.append(max([found[before] for before in task.after], default=-1.0))
    return found


@dataclass(slots=True)
class _Clock:
    """When tasks would begin: computations one after another, copies on their streams."""

    tasks: Sequence[Task]
    seconds: Sequence[float]
    releases: Sequence[float]
    """For each task the last computation that it waits for."""
    _ends: list[float] = field(default_factory=list)
    _starts: list[float] = field(default_factory=list)
    _needed: list[int] = field(default_factory=list)
    """For each task the first computation that waits for it."""
    _free: dict[Stream, float] = field(default_factory=dict)
    _coming: list[tuple[float, int]] = field(default_factory=list)
    """Loads by the time from which they could begin."""
    _ready: list[tuple[int, int]] = field(default_factory=list)
    """Those that could begin now, by need."""

    def starts(self) -> list[float]:
        """Of every task."""
        tasks = self.tasks
        self._starts, self._ends, self._needed = [0.0] * len(tasks), [NOT_YET] * len(tasks), _first_needs(tasks)
        released: dict[int, list[int]] = {}
        for index, last in enumerate(self.releases):
            if tasks[index].stream != "compute":
                released.setdefault(int(last), []).append(index)
        self._release(released.get(-1, ()))
        for index, task in enumerate(tasks):
            if task.stream == "compute":
                self._bring(task.after)
                self._run(index)
                self._release(released.get(index, ()))
                self._advance(self._ends[index])
        self._bring(_loads(tasks))
        return self._starts

    def _release(self, copies: Sequence[int]) -> None:
        """Copies whose last computation is over: stores take their turn, loads may wait for others."""
        for index in copies:
            waits = self.tasks[index].after
            self._bring(waits)
            if self.tasks[index].stream == "copy-in":
                heappush(self._coming, (max([self._ends[before] for before in waits], default=0.0), index))
            else:
                self._run(index)

    def _bring(self, wanted: Sequence[int]) -> None:
        """Run loads until these are over."""
        for index in wanted:
            while self._ends[index] == NOT_YET:
                self._next_load()

    def _advance(self, until: float) -> None:
        """Run the loads that begin before then."""
        while self._free.get("copy-in", 0.0) < until and (self._ready or (self._coming and self._coming[0][0] < until)):
            self._next_load()

    def _next_load(self) -> None:
        now = self._free.get("copy-in", 0.0)
        if not self._ready:
            now = max(now, self._coming[0][0])
        while self._coming and self._coming[0][0] <= now:
            index = heappop(self._coming)[1]
            heappush(self._ready, (self._needed[index], index))
        self._run(heappop(self._ready)[1])

    def _run(self, index: int) -> None:
        task = self.tasks[index]
        begin = max([self._ends[before] for before in task.after], default=0.0)
        begin = max(begin, self._free.get(task.stream, 0.0))
        self._starts[index] = begin
        self._ends[index] = self._free[task.stream] = begin + self.seconds[index]


def _first_needs(tasks: Sequence[Task]) -> list[int]:
    """For each task the first computation that waits for it, directly or through other copies."""
    needed = [len(tasks)] * len(tasks)
    for index in range(len(tasks) - 1, -1, -1):
        of_this = index if tasks[index].stream == "compute" else needed[index]
        for before in tasks[index].after:
            needed[before] = min(needed[before], of_this)
    return needed


def _sort(program: Program, key: Sequence[float], starts: Sequence[float]) -> Program:
    """Tasks by their keys; behind a computation the copies that it lets begin, the first to begin first."""
    tasks = program.tasks
    order = sorted(
        range(len(tasks)), key=lambda index: (key[index], tasks[index].stream != "compute", starts[index], index)
    )
    place = [0] * len(order)
    for new, old in enumerate(order):
        place[old] = new
    ordered = [tasks[old] for old in order]
    return replace(program, tasks=tuple(_with_last_of_each(task, ordered, place) for task in ordered))


def _with_last_of_each(task: Task, tasks: list[Task], place: list[int]) -> Task:
    """The task in its new order, waiting for the last on each other stream alone: those before it are over by then."""
    latest: dict[Stream, int] = {}
    for before in task.after:
        new = place[before]
        stream = tasks[new].stream
        if stream != task.stream and new > latest.get(stream, -1):
            latest[stream] = new
    after = tuple(latest.values())
    return task if after == task.after else task._replace(after=after)
