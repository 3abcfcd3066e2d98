"""`Program`: a plan as tasks. The simulator plays it against a hardware description, the engine on a device.

A task runs on one of four streams, each of which takes its tasks in the order of the list. It reads and writes
*buffers*: pieces of memory with an owner and a role, each holding one *value* at a time. What a task waits for
(`after`) follows from the buffers; `check` proves it once more from the tasks alone.

Planner, simulator and engine find buffers and values by their fields. Their names are for people alone: no code reads
one back, so a role that is renamed on one side is an error of the type checker on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from flopwise.base.errors import FlopwiseError
from flopwise.work.parameters import End, Part, Place

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
attention looks for them: from the chunk's slot, or recomputed from its input. `head` is forward and backward of a head
chunk."""
KINDS: tuple[Kind, ...] = get_args(Kind)

BACKWARD_OF_BLOCKS: frozenset[Kind] = frozenset(("backward", "backward-after", "backward-before"))
"""Tasks whose time depends on the save level, which their names tell."""

Owner = Literal["weights", "gradients", "optimizer", "activations", "residual", "context", "head", "workspace"]
"""Whose memory it is. `residual`: the residual stream from layer to layer, and its gradient. `context`: keys and
values."""
OWNERS: tuple[Owner, ...] = get_args(Owner)

Role = Literal["home", "slot", "residual", "keys", "key gradients", "inputs", "attention", "temporaries", "logits"]
"""What a buffer is for.

home: one part's state, or what one (layer, chunk) saved, and nothing else ever
slot: what is in flight: state of one layer after another, or the activations of the (layer, chunk) at work
residual: a chunk's residual stream between two layers, then its gradient
keys, key gradients: of a chunk of a sequence that is cut, where attention finds them; of all chunks, summed
inputs: a chunk's input of the layer at work, for the backward of what is before attention
attention: queries, results and their gradients of a whole sequence
temporaries, logits: what lives only within a task; of the head's tasks the logits
"""

ValueKind = Literal[
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "residual",
    "residual gradient",
    "context",
    "key gradients",
    "inputs",
    "queries",
    "attended",
    "attended gradients",
    "attention gradients",
    "temporaries",
]


ALIGNMENT_BYTES = 256
"""Every buffer begins where the widest loads may."""
LOGITS_ALIGNMENT_BYTES = 16
"""Rows of logits begin at a multiple: a vocabulary of 50,257 would otherwise be multiplied at a third of the speed."""


def aligned(size: int) -> int:
    """Rounded up to whole lines."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Buffer(NamedTuple):
    """A piece of memory for one value at a time."""

    owner: Owner
    place: Place
    role: Role
    bytes: int
    part: Part | None = None
    """Whose home it is."""
    number: int | None = None
    """Among others of its role and part: the chunk, the piece of an optimizer state, or the slot."""
    borrowed: bool = False
    """It lies in memory that another owner uses at another time, and is not counted again."""

    @property
    def name(self) -> str:
        """What a person calls it: `host optimizer head.0`, `activation slot 7`, `context 2`."""
        if self.role == "home":
            owner = f"{self.place} {self.owner}" if self.place == "host" or self.owner == "activations" else self.owner
            return f"{owner} {self.part}" if self.number is None else f"{owner} {self.part}.{self.number}"
        if self.role == "slot":
            owner = "activation" if self.owner == "activations" else self.owner
            return f"{owner} slot of the ends" if self.number is None else f"{owner} slot {self.number}"
        word = ROLE_WORDS.get(self.role, self.role)
        return word if self.number is None else f"{word} {self.number}"


ROLE_WORDS: dict[Role, str] = {
    "keys": "context",
    "key gradients": "context gradients",
    "attention": "attention of a sequence",
    "temporaries": "workspace",
    "logits": "head chunk",
}
"""Roles, where people use another word."""


class Value(NamedTuple):
    """What is in a buffer. Two values are the same numbers exactly if all of this is equal."""

    kind: ValueKind
    part: Part | None = None
    """The layer, the embedding or the head that it belongs to."""
    number: int | None = None
    """The chunk; of an optimizer state the piece; of weights in the middle of an update the pieces that are done."""
    round: int | None = None
    """None: it lives longer than a round."""
    version: int = 0
    """Weights and optimizer state: 0 before the step's update, 1 after it. Of gradients and the residual stream, which
    several tasks of a chunk write: which of them was last. Activations: 1 when all is there again that was not kept."""

    @property
    def name(self) -> str:
        """What a person calls it: `weights 3 v1`, `optimizer head.0 v0`, `activations 3.1 r0`."""
        part, number, version = self.part, self.number, self.version
        if self.kind == "weights":
            return f"weights {part} v{version}" if number is None else f"weights {part} v{version}+{number}"
        if self.kind == "optimizer":
            return f"optimizer {part}.{number} v{version}"
        if self.kind == "gradients":
            return f"gradients {part} r{self.round}.{number}.{version}"
        if self.kind == "temporaries":
            return "temporaries"
        return f"{self.kind} {part}.{number} r{self.round}" + (f" v{version}" if version else "")

    def __str__(self) -> str:
        return self.name


class Use(NamedTuple):
    """A buffer and the value that is read from or written to it."""

    buffer: int
    value: Value


class Task(NamedTuple):
    """A piece of work on one stream. A step has some ten thousand, and a search makes hundreds of steps."""

    kind: Kind
    stream: Stream
    round: int
    layer: int | None
    """None: the embedding, the head, or what belongs to them."""
    chunk: int | None
    what: Owner | None
    """For copies and updates: whose; else nothing."""
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
    copied = f"{task.end} {task.what}" if task.end else task.what or ""
    words: list[str] = [task.kind, copied] if task.kind in {"load", "store"} else [task.kind]
    if task.kind == "optimize" and task.end:
        words.append(task.end)
    number = ".".join(str(part) for part in (task.layer, task.chunk) if part is not None)
    level = f"({task.level})" if task.level and task.kind in BACKWARD_OF_BLOCKS else ""
    return " ".join(word for word in (*words, number, level) if word)


@dataclass(frozen=True, slots=True)
class Program:
    """Tasks in an order that every stream keeps to."""

    buffers: tuple[Buffer, ...]
    tasks: tuple[Task, ...]
    at_start: dict[int, Value]
    """Buffer → the value in it when a step begins."""
    at_end: dict[int, Value]
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
    value: Value
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
