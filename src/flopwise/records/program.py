"""`Program`: a plan as tasks. The simulator plays it against a hardware description, the engine on a device.

A task runs on one of four streams, each of which takes its tasks in the order of the list. It reads and writes
*buffers*: pieces of memory with an owner, each holding one *value* at a time ("weights 3 v1"). What a task waits for
(`after`) follows from the buffers; `check` proves it once more from the tasks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from flopwise.base.errors import FlopwiseError
from flopwise.work.parameters import End, Place

Stream = Literal["compute", "copy-in", "copy-out", "host"]
STREAMS: tuple[Stream, ...] = get_args(Stream)

Kind = Literal[
    "embed",
    "forward",
    "forward-before",
    "attention",
    "forward-after",
    "context",
    "head",
    "backward",
    "backward-after",
    "attention-backward",
    "backward-before",
    "embed-backward",
    "optimize",
    "load",
    "store",
]
"""`forward` is a layer over a chunk. Where attention runs over a whole sequence, it comes in three: what is before
attention, attention, what is after; backward in the opposite order. `context` brings a chunk's keys and values to where
attention looks for them: from the chunk's slot, or made again from its input. `head` is forward and backward of a head
chunk."""
KINDS: tuple[Kind, ...] = get_args(Kind)

Owner = Literal["weights", "gradients", "optimizer", "activations", "stream", "context", "head", "workspace"]
"""Whose memory it is. `stream`: what passes from layer to layer, and its gradient. `context`: keys and values."""
OWNERS: tuple[Owner, ...] = get_args(Owner)


ALIGNMENT_BYTES = 256
"""Every buffer begins where the widest loads may."""


def aligned(size: int) -> int:
    """Rounded up to whole lines."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of memory for one value at a time."""

    name: str
    owner: Owner
    place: Place
    bytes: int
    borrowed: bool = False
    """It lies in memory that another owner uses at another time, and is not counted again."""


@dataclass(frozen=True, slots=True)
class Use:
    """A buffer and the value that is read from or written to it."""

    buffer: int
    value: str


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work on one stream."""

    kind: Kind
    stream: Stream
    round: int
    layer: int | None
    """None: the embedding, the head, or what belongs to them."""
    chunk: int | None
    what: str
    """For copies and updates: whose (`weights`, `gradients`, `optimizer`, `activations`, `context`); else nothing."""
    level: str
    """Save level of the (layer, chunk), for its forward, backward and copies; else nothing."""
    tokens: int
    parameters: int
    """Of an update."""
    bytes: int
    """Over the link."""
    operators: tuple[str, ...]
    """Of the model's description, those that run."""
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    after: tuple[int, ...]
    """Tasks of other streams that must have ended; those before it on its own stream have anyway."""
    end: End | None = None
    """Embedding or head, where there is no layer."""
    first: int = 0
    """Of a head chunk its first token within the chunk, of an update its first parameter within the layer or end."""


def task_name(task: Task) -> str:
    """What a person calls a task: `forward 3.1` is that of layer 3 and chunk 1, `load weights 3` that of a layer."""
    copied = f"{task.end} {task.what}" if task.end else task.what
    words: list[str] = [task.kind, copied] if task.kind in {"load", "store"} else [task.kind]
    if task.kind == "optimize" and task.end:
        words.append(task.end)
    number = ".".join(str(part) for part in (task.layer, task.chunk) if part is not None)
    level = f"({task.level})" if task.level and task.kind.startswith("backward") else ""
    return " ".join(word for word in (*words, number, level) if word)


@dataclass(frozen=True, slots=True)
class Program:
    """Tasks in an order that every stream keeps to."""

    buffers: tuple[Buffer, ...]
    tasks: tuple[Task, ...]
    at_start: dict[int, str]
    """Buffer → the value in it when a step begins."""
    at_end: dict[int, str]
    """Buffer → the value that must be in it when the step is over."""
    rounds: int

    def bytes_by_owner(self, place: Place) -> dict[str, int]:
        """Memory of that place by owner."""
        found = dict.fromkeys(OWNERS, 0)
        for buffer in self.buffers:
            if buffer.place == place and not buffer.borrowed:
                found[buffer.owner] += buffer.bytes
        return {owner: size for owner, size in found.items() if size}


def check(program: Program) -> None:
    """Prove from the tasks alone that every order the streams may run in is right, or say which task is wrong.

    No value is read before it is there or after it is gone, none is overwritten while somebody may still read it, and
    at the end every value is where it has to be. Quadratic in the tasks: for tests and for programs from a file.
    """
    ends = _Ancestors(program.tasks)
    held: dict[int, _Held] = {buffer: _Held(value, None, []) for buffer, value in program.at_start.items()}
    for index, task in enumerate(program.tasks):
        for use in task.reads:
            there = held.get(use.buffer)
            name = program.buffers[use.buffer].name
            if there is None or there.value != use.value:
                raise _wrong(task, index, f"reads {use.value} from {name}, which holds {there and there.value}")
            if there.writer is not None and not ends.before(there.writer, index):
                raise _wrong(task, index, f"may read {use.value} before task {there.writer} has written it")
            there.readers.append(index)
        for use in task.writes:
            there = held.get(use.buffer)
            name = program.buffers[use.buffer].name
            for other in [] if there is None else [*there.readers, *([] if there.writer is None else [there.writer])]:
                if other != index and not ends.before(other, index):
                    raise _wrong(task, index, f"writes {name} while task {other} may still use it")
            held[use.buffer] = _Held(use.value, index, [])
    for buffer, value in program.at_end.items():
        there = held.get(buffer)
        if there is None or there.value != value:
            raise FlopwiseError(
                f"the program ends with {there and there.value} in {program.buffers[buffer].name}",
                why=f"{value} must be there",
            )


@dataclass(slots=True)
class _Held:
    value: str
    writer: int | None
    readers: list[int]


class _Ancestors:
    """Which tasks have ended whenever a task begins, as one bit each."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.sets: list[int] = []
        last: dict[str, int] = {}
        for index, task in enumerate(tasks):
            found = 0
            before = last.get(task.stream)
            for other in (*task.after, *(() if before is None else (before,))):
                if other >= index:
                    raise _wrong(task, index, f"waits for task {other}, which comes after it")
                found |= self.sets[other] | (1 << other)
            self.sets.append(found)
            last[task.stream] = index

    def before(self, first: int, then: int) -> bool:
        return bool(self.sets[then] >> first & 1)


def _wrong(task: Task, index: int, why: str) -> FlopwiseError:
    where = "" if task.layer is None else f" of layer {task.layer}"
    return FlopwiseError(f"task {index} ({task.kind}{where}) is wrong", why=why)
