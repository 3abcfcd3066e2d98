"""A pickle read as plain data, by an interpreter that can build nothing else.

It knows the opcodes of None, bool, int, float, str, bytes, lists, tuples, dicts and sets, and no others: whatever
imports a name or calls it is refused before it happens. What it builds is bounded in size and depth.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import show_bytes

LONGEST_KEY_TUPLE = 64
"""A tuple's hash is worked out anew each time that it is used as a key."""
LONGEST_LINE = 4096
"""Of a number in the text opcodes of protocol 0."""


STACK_BYTES = 16
"""Of a place on the interpreter's stack."""
PLACE_BYTES = 8
ENTRY_BYTES = 128
"""Of a key and its value in a dict, also while the dict grows; of a member of a set."""
CONTAINER_BYTES = 224
"""Of a list, a tuple, a dict or a set without what it holds, and of what is noted of its depth in the end."""
CONTAINERS = (list, tuple, dict, set)
READ_AHEAD_BYTES = 2**18


class Readable(Protocol):
    """What bytes come from."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much a pickle may ask for."""

    memory_bytes: int = 4 * 2**30
    """Of all that it builds, roughly; and no more than `built_per_byte` of them for each byte of the pickle."""
    built_per_byte: int = 96
    """Snapshots of torch, whose texts and stacks are given once and then referred to, build 20 to 45."""
    small_bytes: int = 16 * 2**20
    """That any pickle may build, however short it is."""
    string_bytes: int = 64 * 2**20
    integer_bytes: int = 1024
    nesting: int = 100
    memo: int = 50_000_000


class _Raw(io.RawIOBase):
    def __init__(self, source: Readable) -> None:
        self._source = source
        self.read_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - the writable buffer that io passes
        read = self._source.read(len(buffer))
        buffer[: len(read)] = read
        self.read_bytes += len(read)
        return len(read)


def buffered(source: Readable) -> io.BufferedReader:
    """A source with the small reads and lines of a file."""
    return io.BufferedReader(_Raw(source), 2**20)


def plain_data(source: Readable, limits: Limits | None = None) -> Any:  # noqa: ANN401 - whatever the file holds
    """The data of a pickle; what follows its end is left alone. Raises for anything that is no plain data."""
    data = _Interpreter(_Raw(source), limits or Limits()).run()
    _check_shape(data, (limits or Limits()).nesting)
    return data


def _bad(why: str) -> FlopwiseError:
    return FlopwiseError("a damaged pickle", why=why, hint="write the file again")


def _too_large(why: str) -> FlopwiseError:
    return FlopwiseError("a pickle too large to read", why=why, hint="record fewer events or shorter stacks")


_OPCODE_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


class _Interpreter:
    def __init__(self, raw: _Raw, limits: Limits) -> None:
        self._raw = raw
        # The small reads and lines of a file.
        self._file = io.BufferedReader(raw, READ_AHEAD_BYTES)
        self._limits = limits
        self._spent = 0
        self._allowed = min(limits.small_bytes, limits.memory_bytes)
        self._stack: list[Any] = []
        self._marks: list[int] = []
        """Where on the stack each mark stands."""
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:  # noqa: ANN401 - whatever the file holds
        read = self._file.read
        while True:
            code = read(1)
            if not code:
                raise _bad("it ends before its end mark")
            if code == b".":
                break
            step = _STEPS.get(code)
            if step is None:
                raise self._refused(code[0])
            self._spend(STACK_BYTES)
            step(self)
        data = self._pop()
        if self._stack or self._marks:
            raise _bad("more than one thing is left at its end")
        return data

    def _refused(self, code: int) -> FlopwiseError:
        name = _OPCODE_NAMES.get(code)
        if name is None:
            return _bad(f"byte {code:#04x} is no opcode")
        return FlopwiseError(
            "a pickle that is not plain data",
            why=f"its opcode {name} wants to run code or build objects, which is refused",
            hint="only None, bool, int, float, str, bytes, list, tuple, dict and set are read",
        )

    def _spend(self, size: int) -> None:
        self._spent += size
        if self._spent <= self._allowed:
            return
        # What may be built grows with what was read.
        limits = self._limits
        earned = limits.small_bytes + limits.built_per_byte * self._raw.read_bytes
        self._allowed = min(limits.memory_bytes, earned)
        if self._spent > self._allowed:
            raise _too_large(f"it would take more than {show_bytes(self._allowed)}, far more than its own size")

    def _exactly(self, size: int) -> bytes:
        read = self._file.read(size)
        if len(read) != size:
            raise _bad("it ends in the middle of a value")
        return read

    def _line(self, most: int = LONGEST_LINE) -> bytes:
        line = self._file.readline(most)
        if not line.endswith(b"\n"):
            raise _bad("a line of it has no end, or is too long")
        return line[:-1]

    def _number(self, layout: str) -> Any:  # noqa: ANN401 - int or float, as the layout says
        return struct.unpack(layout, self._exactly(struct.calcsize(layout)))[0]

    def _push(self, value: Any, size: int = 48) -> None:  # noqa: ANN401 - any plain value
        self._spend(size)
        self._stack.append(value)

    def _pop(self) -> Any:  # noqa: ANN401 - any plain value
        self._check_top()
        return self._stack.pop()

    def _check_top(self) -> None:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise _bad("an opcode finds nothing to work on")

    def _to_mark(self) -> list[Any]:
        if not self._marks:
            raise _bad("a mark is missing")
        position = self._marks.pop()
        # A copy of each, and its place in what it is put into.
        self._spend(2 * PLACE_BYTES * (len(self._stack) - position))
        values = self._stack[position:]
        del self._stack[position:]
        return values

    def _container(self, kind: type) -> Any:  # noqa: ANN401 - list, dict or set
        self._check_top()
        if type(self._stack[-1]) is not kind:
            raise _bad(f"there is no {kind.__name__} to fill")
        return self._stack[-1]

    # What single opcodes do.

    def protocol(self) -> None:
        if self._exactly(1)[0] > 5:
            raise _bad("it is of a protocol later than 5")

    def frame(self) -> None:
        self._exactly(8)

    def mark(self) -> None:
        self._spend(48)
        self._marks.append(len(self._stack))

    def pop(self) -> None:
        self._pop()

    def pop_mark(self) -> None:
        self._to_mark()

    def text_integer(self) -> None:
        line = self._line(2 * self._limits.integer_bytes).removesuffix(b"L")
        if line in (b"00", b"01"):
            self._push(line == b"01")
            return
        try:
            self._push(int(line))
        except ValueError:
            raise _bad("a number in it is none") from None

    def text_float(self) -> None:
        try:
            self._push(float(self._line()))
        except ValueError:
            raise _bad("a number in it is none") from None

    def number(self, layout: str) -> None:
        self._push(self._number(layout))

    def long(self, layout: str) -> None:
        size = self._number(layout)
        if not 0 <= size <= self._limits.integer_bytes:
            raise _too_large(f"an integer of {size} bytes is in it")
        self._push(int.from_bytes(self._exactly(size), "little", signed=True), 48 + size)

    def text_string(self) -> None:
        line = self._line(self._limits.string_bytes)
        try:
            self._push(line.decode("raw-unicode-escape"), 64 + 4 * len(line))
        except UnicodeDecodeError:
            raise _bad("a text in it cannot be decoded") from None

    def _sized(self, layout: str) -> bytes:
        size = self._number(layout)
        if size > self._limits.string_bytes:
            raise _too_large(f"a text of {size} bytes is in it")
        self._spend(size)
        return self._exactly(size)

    def string(self, layout: str) -> None:
        read = self._sized(layout)
        try:
            text = read.decode("utf-8", "surrogatepass")
            # One sign beyond ASCII makes all of them two or four bytes wide.
            self._push(text, 64 + (0 if text.isascii() else 4 * len(text)))
        except UnicodeDecodeError:
            raise _bad("a text in it cannot be decoded") from None

    def raw_bytes(self, layout: str) -> None:
        self._push(self._sized(layout), 64)

    def list_to_mark(self) -> None:
        values = self._to_mark()
        self._push(values, CONTAINER_BYTES)

    def tuple_to_mark(self) -> None:
        values = self._to_mark()
        self._push(tuple(values), CONTAINER_BYTES)

    def tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)), CONTAINER_BYTES)

    def append(self) -> None:
        value = self._pop()
        self._container(list).append(value)

    def appends(self) -> None:
        values = self._to_mark()
        self._container(list).extend(values)

    def _fill(self, target: dict[Any, Any], values: list[Any]) -> None:
        if len(values) % 2:
            raise _bad("a key of a dict has no value")
        self._spend(ENTRY_BYTES * len(values) // 2)
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_key(key)] = value

    def dict_to_mark(self) -> None:
        values = self._to_mark()
        made: dict[Any, Any] = {}
        self._fill(made, values)
        self._push(made, CONTAINER_BYTES)

    def set_item(self) -> None:
        value = self._pop()
        key = self._pop()
        self._fill(self._container(dict), [key, value])

    def set_items(self) -> None:
        values = self._to_mark()
        self._fill(self._container(dict), values)

    def add_items(self) -> None:
        values = self._to_mark()
        self._spend(ENTRY_BYTES * len(values))
        self._container(set).update(map(_key, values))

    def frozen_set(self) -> None:
        values = self._to_mark()
        self._push(frozenset(map(_key, values)), CONTAINER_BYTES + ENTRY_BYTES * len(values))

    def put(self, where: int) -> None:
        self._check_top()
        if len(self._memo) >= self._limits.memo:
            raise _too_large("it remembers too many of its values")
        self._spend(ENTRY_BYTES)
        self._memo[where] = self._stack[-1]

    def put_next(self) -> None:
        self.put(len(self._memo))

    def get(self, where: int) -> None:
        if where not in self._memo:
            raise _bad("it refers to a value that it has not given")
        self._stack.append(self._memo[where])

    def text_place(self) -> int:
        line = self._line()
        if not line.isdigit() or len(line) > 12:
            raise _bad("it refers to a value by something that is no number")
        return int(line)

    def place(self, size: int) -> int:
        return int.from_bytes(self._exactly(size), "little")


def _key(value: Any) -> Any:  # noqa: ANN401 - any plain value
    """The value, if it may be a key: cheap to hash, however often it is used, and no cause of collisions."""
    kind = type(value)
    if kind is tuple:
        if len(value) > LONGEST_KEY_TUPLE or any(type(part) is tuple for part in value):
            raise _bad("a key in it is a tuple too large for one")
        for part in value:
            _key(part)
    elif kind in (list, dict, set, frozenset):
        raise _bad(f"a key in it is a {kind.__name__}")
    elif kind is int and value.bit_length() > 64:
        raise _bad("a key in it is a number of more than 64 bits")
    return value


_Step = Callable[[_Interpreter], None]


def _pushing(make: Callable[[], Any]) -> _Step:
    return lambda machine: machine._push(make(), CONTAINER_BYTES if type(make()) in CONTAINERS else 0)


_STEPS: dict[bytes, _Step] = {
    b"\x80": _Interpreter.protocol,
    b"\x95": _Interpreter.frame,
    b"(": _Interpreter.mark,
    b"0": _Interpreter.pop,
    b"1": _Interpreter.pop_mark,
    b"N": _pushing(lambda: None),
    b"\x88": _pushing(lambda: True),
    b"\x89": _pushing(lambda: False),
    b"I": _Interpreter.text_integer,
    b"L": _Interpreter.text_integer,
    b"J": lambda machine: machine.number("<i"),
    b"K": lambda machine: machine.number("<B"),
    b"M": lambda machine: machine.number("<H"),
    b"\x8a": lambda machine: machine.long("<B"),
    b"\x8b": lambda machine: machine.long("<i"),
    b"F": _Interpreter.text_float,
    b"G": lambda machine: machine.number(">d"),
    b"V": _Interpreter.text_string,
    b"X": lambda machine: machine.string("<I"),
    b"\x8c": lambda machine: machine.string("<B"),
    b"\x8d": lambda machine: machine.string("<Q"),
    b"B": lambda machine: machine.raw_bytes("<I"),
    b"C": lambda machine: machine.raw_bytes("<B"),
    b"\x8e": lambda machine: machine.raw_bytes("<Q"),
    b"]": _pushing(list),
    b"l": _Interpreter.list_to_mark,
    b"a": _Interpreter.append,
    b"e": _Interpreter.appends,
    b")": _pushing(tuple),
    b"t": _Interpreter.tuple_to_mark,
    b"\x85": lambda machine: machine.tuple_of(1),
    b"\x86": lambda machine: machine.tuple_of(2),
    b"\x87": lambda machine: machine.tuple_of(3),
    b"}": _pushing(dict),
    b"d": _Interpreter.dict_to_mark,
    b"s": _Interpreter.set_item,
    b"u": _Interpreter.set_items,
    b"\x8f": _pushing(set),
    b"\x90": _Interpreter.add_items,
    b"\x91": _Interpreter.frozen_set,
    b"p": lambda machine: machine.put(machine.text_place()),
    b"q": lambda machine: machine.put(machine.place(1)),
    b"r": lambda machine: machine.put(machine.place(4)),
    b"\x94": _Interpreter.put_next,
    b"g": lambda machine: machine.get(machine.text_place()),
    b"h": lambda machine: machine.get(machine.place(1)),
    b"j": lambda machine: machine.get(machine.place(4)),
}


def _children(value: Any) -> Iterator[Any] | None:  # noqa: ANN401 - any plain value
    # Keys and members of sets are scalars, or tuples of them: see `_key`.
    if type(value) is dict:
        return iter(value.values())
    return iter(value) if type(value) in (list, tuple) else None


def _check_shape(data: Any, nesting: int) -> None:  # noqa: ANN401 - any plain value
    """Refuse data that contains itself or is nested too deep: whoever walks it would not come back."""
    depths: dict[int, int] = {}
    """Of containers that are done: the levels below them. 0: still being walked."""
    walk: list[tuple[Any, Iterable[Any], int]] = []

    def enter(value: Any) -> None:  # noqa: ANN401 - any plain value
        children = _children(value)
        if children is not None:
            depths[id(value)] = 0
            walk.append((value, children, 1))

    enter(data)
    while walk:
        value, children, deepest = walk.pop()
        for child in children:
            if type(child) not in (list, tuple, dict):
                continue
            known = depths.get(id(child))
            if known == 0:
                raise FlopwiseError("a pickle that is not plain data", why="something in it contains itself")
            if known is None:
                walk.append((value, children, deepest))
                enter(child)
                break
            deepest = max(deepest, known + 1)
        else:
            depths[id(value)] = deepest
            if walk:
                above, rest, so_far = walk.pop()
                walk.append((above, rest, max(so_far, deepest + 1)))
        if len(walk) > nesting or deepest > nesting:
            raise FlopwiseError("a pickle that is not plain data", why=f"it is nested more than {nesting} deep")
