"""A pickle read as plain data: None, bool, int, float, str, bytes, lists, tuples, dicts and sets, and nothing else.

`pickle.Unpickler` does the reading, with everything refused that could import a name. Before it runs, the opcodes are
looked through as arrays, since three things cannot be refused from within it: an index of the memo (five bytes may ask
for 64 GiB), what values take together (a byte is a set of 232), and the hash of a tuple that is used as a key (nested
by reference it takes for ever, nested deep it overflows the stack).
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Never

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import show_bytes
from flopwise.profile.read.opening import Readable, buffered

BLOCK_BYTES = 2**14
"""Whose opcodes are found at a time; each doubling of it costs one more pass over all bytes."""
LONGEST_LINE = 2**16
"""Of the text opcodes of protocol 0."""
LONGEST_KEY_BYTES = 9
"""Integers with more can be made to collide by the million as keys of a dict."""
MOST_ODD = 10_000
"""Longer integers, frozen sets, and tuples of anything but numbers. Snapshots of torch hold none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much a pickle may ask for."""

    file_bytes: int = 2**30
    memory_bytes: int = 4 * 2**30
    """Of all that it builds, roughly; and no more than `built_per_byte` of them for each byte of the pickle."""
    built_per_byte: int = 96
    """Snapshots of torch, whose texts and stacks are given once and then referred to, build 20 to 45."""
    small_bytes: int = 16 * 2**20
    """That any pickle may build, however short it is."""
    string_bytes: int = 64 * 2**20
    integer_bytes: int = 1024
    nesting: int = 100


class _PlainUnpickler(pickle.Unpickler):
    """The second line: no opcode that comes here is let through by `_check_opcodes`."""

    def find_class(self, module_name: str, global_name: str, /) -> Never:
        raise _not_plain(f"it wants {module_name}.{global_name}, which is refused")

    def persistent_load(self, pid: object) -> Never:
        raise _not_plain(f"it refers to {pid!r} outside, which is refused")


def plain_data(source: Readable, limits: Limits | None = None) -> Any:  # noqa: ANN401 - whatever the file holds
    """The data of a pickle; what follows its end is left alone. Raises for anything that is no plain data."""
    limits = limits or Limits()
    whole = io.BytesIO()
    while block := source.read(2**20):
        whole.write(block)
        if whole.tell() > limits.file_bytes:
            raise _too_large(f"it has more than {show_bytes(limits.file_bytes)}")
    size = whole.tell()
    whole.write(bytes(_PADDING))
    _Opcodes(np.frombuffer(whole.getbuffer(), np.uint8), size, limits).check()
    whole.seek(0)
    try:
        # Buffered, since single bytes are read where a pickle has no frames.
        data = _PlainUnpickler(buffered(whole)).load()
    except FlopwiseError:
        raise
    except Exception as error:  # the module promises no kinds of them
        raise _bad(str(error) or type(error).__name__) from None
    if type(data) in (list, tuple, dict):
        _check_depth(data, limits.nesting, limits.nesting, {})
    return data


def _bad(why: str) -> FlopwiseError:
    return FlopwiseError("a damaged pickle", why=why, hint="write the file again")


def _too_large(why: str) -> FlopwiseError:
    return FlopwiseError("a pickle too large to read", why=why, hint="record fewer events or shorter stacks")


def _not_plain(why: str) -> FlopwiseError:
    hint = "only None, bool, int, float, str, bytes, list, tuple, dict and set are read"
    return FlopwiseError("a pickle that is not plain data", why=why, hint=hint)


# -- the opcodes, as arrays ------------------------------------------------------------------------------------------

Numbers = NDArray[np.int64]
Codes = NDArray[np.uint8]

_PADDING = 8
"""Bytes behind the end, so that an argument may be looked at wherever an opcode stands."""
_FAR = 2**62
"""The length of what has no end."""
_CARRIED = 4
"""Opcodes of the block before that are looked at again: what a tuple of three and its place in the memo take."""

_OPCODES = {opcode.name: opcode for opcode in pickletools.opcodes}
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}

_SINGLES = "NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 LONG4 FLOAT BINFLOAT"
_TEXTS = "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8"
_CONTAINERS = "EMPTY_LIST LIST EMPTY_DICT DICT EMPTY_SET FROZENSET"
_TUPLES = "TUPLE TUPLE1 TUPLE2 TUPLE3"
_PUTS = "PUT BINPUT LONG_BINPUT MEMOIZE"
_GETS = "GET BINGET LONG_BINGET"
_REST = "PROTO FRAME MARK POP POP_MARK APPEND APPENDS EMPTY_TUPLE SETITEM SETITEMS ADDITEMS"
_PLAIN = " ".join((_SINGLES, _TEXTS, _CONTAINERS, _TUPLES, _PUTS, _GETS, _REST))


def _code(name: str) -> int:
    return ord(_OPCODES[name].code)


def _table(*entries: tuple[str, int]) -> Numbers:
    """A number for each byte that is one of the named opcodes; 0 for the others."""
    table = np.zeros(256, np.int64)
    for names, value in entries:
        table[[_code(name) for name in names.split()]] = value
    return table


def _argument(name: str) -> int:
    """Its bytes; -1 for a line, below that for what has its own size in front."""
    argument = _OPCODES[name].arg
    return 0 if argument is None else argument.n


_FIXED = _table(*((name, 1 + _argument(name)) for name in _PLAIN.split() if _argument(name) >= 0))
_HAS_LINE = _table(*((name, 1) for name in _PLAIN.split() if _argument(name) == pickletools.UP_TO_NEWLINE))
_SIZE_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_SIZED = _table(*((name, _SIZE_BYTES.get(_argument(name), 0)) for name in _PLAIN.split()))
_IS_SINGLE = _table((_SINGLES, 1))
_IS_INTEGER = _table(("INT LONG LONG1 LONG4", 1))
_IS_TUPLE = _table((_TUPLES, 1))
_IS_PUT = _table((_PUTS, 1))
_IS_GET = _table((_GETS, 1))
_GET_BYTES = _table(("BINGET", 1), ("LONG_BINGET", 4))
_PUT_BYTES = _table(("BINPUT", 1), ("LONG_BINPUT", 4))
_IS_SHARED_SAFELY = _table((f"{_TEXTS} {_CONTAINERS} {_SINGLES}", 1))
# Bytes that each takes at most: a value has places on the stack and in what holds it (64: half an entry of a dict that
# has just grown), a container is noted once more when its depth is looked for.
_COST = _table((_PLAIN, 16), (f"{_SINGLES} {_TEXTS} {_GETS} MARK", 64), (f"{_CONTAINERS} {_TUPLES}", 240), (_PUTS, 144))
_TEXT_COST = 4
"""For each byte of the pickle: one sign beyond Latin makes all of a text four bytes wide."""


class _Opcodes:
    """What the opcodes of a pickle ask for, added up block by block and judged in the end."""

    def __init__(self, data: Codes, size: int, limits: Limits) -> None:
        self._data = data
        self._size = size
        self._limits = limits
        self._cost = 0
        self._odd = 0
        self._puts = 0
        self._put_kinds: set[bool] = set()
        self._unshared = np.empty(0, np.int64)
        """Indices of the memo that hold a tuple, as far as is known, whose hash may take long."""
        self._before = np.zeros(_CARRIED, np.uint8)

    def check(self) -> None:
        """Refuse a pickle that is not plain, or would take more than its size warrants."""
        end = 0
        for places, lengths in self._blocks():
            codes = self._data[places]
            self._check_sizes(codes, lengths)
            self._check_memo(places, np.concatenate([self._before, codes]))
            self._cost += int(_COST[codes].sum()) + _TEXT_COST * int(lengths.sum())
            self._before = np.concatenate([self._before, codes])[-_CARRIED:]
            end = int(places[-1] + lengths[-1])
        allowed = min(self._limits.memory_bytes, self._limits.small_bytes + self._limits.built_per_byte * end)
        if self._cost > allowed:
            raise _too_large(f"it would take more than {show_bytes(allowed)}, far more than its own size")
        if self._odd > MOST_ODD:
            raise _not_plain(f"it has more than {MOST_ODD} nested tuples, frozen sets and very long integers")

    def _blocks(self) -> Iterator[tuple[Numbers, Numbers]]:
        """Where the opcodes of each block begin, and how long they are with their arguments; up to the end mark."""
        begin = 0
        while begin < self._size:
            lengths = self._lengths(begin, min(begin + BLOCK_BYTES, self._size))
            found = _followed(lengths)
            last = begin + int(found[-1])
            if lengths[found[-1]]:
                yield begin + found, lengths[found]
                begin = last + int(lengths[found[-1]])
                continue
            if len(found) > 1:
                yield begin + found[:-1], lengths[found[:-1]]
            _check_end(int(self._data[last]))
            return
        raise _bad("it ends before its end mark" if begin == self._size else "it ends in the middle of a value")

    def _lengths(self, begin: int, end: int) -> Numbers:
        """How long an opcode is with its argument, for each place of a block, did one begin there; 0: none may."""
        codes = self._data[begin:end]
        lengths = _FIXED[codes]
        sizes = _SIZED[codes]
        for count in (1, 4, 8):
            places = np.flatnonzero(sizes == count)
            sized = self._number(begin + places, count)
            lengths[places] = np.where(sized < 0, _FAR, np.minimum(sized, _FAR) + 1 + count)
        places = np.flatnonzero(_HAS_LINE[codes])
        ends = np.flatnonzero(self._data[begin : min(end + LONGEST_LINE, self._size)] == ord("\n"))
        ends = np.append(ends, _FAR)
        lengths[places] = ends[np.searchsorted(ends, places)] + 1 - places
        return lengths

    def _number(self, places: Numbers, count: int) -> Numbers:
        """The arguments of so many bytes of the opcodes at the places."""
        number = np.zeros(len(places), np.int64)
        for byte in range(count):
            number |= self._data[places + 1 + byte].astype(np.int64) << 8 * byte
        return number

    def _check_sizes(self, codes: Codes, lengths: Numbers) -> None:
        is_integer = _IS_INTEGER[codes].astype(bool)
        integer, text = int(lengths[is_integer].max(initial=0)), int(lengths.max())
        if text >= _FAR:
            raise _bad("a line of it has no end, or is too long")
        if integer > self._limits.integer_bytes:
            raise _too_large(f"an integer of {integer} bytes is in it")
        if text > self._limits.string_bytes:
            raise _too_large(f"a text of {text} bytes is in it")
        self._odd += int((is_integer & (lengths > LONGEST_KEY_BYTES + 2)).sum() + (codes == _code("FROZENSET")).sum())

    def _check_memo(self, places: Numbers, codes: Codes) -> None:
        """Indices grow by one, as pickle gives them; nothing refers to a tuple that may take long to hash."""
        safe = _shared_safely(codes)
        self._odd += int((_IS_TUPLE[codes[_CARRIED:]].astype(bool) & ~safe[_CARRIED:]).sum())
        (puts,) = np.nonzero(_IS_PUT[codes[_CARRIED:]])
        index = self._indices(places[puts], codes[_CARRIED:][puts])
        if (index > self._puts + 1 + np.arange(len(puts))).any() or len(self._put_kinds) > 1:
            raise _bad("what it remembers is not numbered in order")
        self._puts += len(puts)
        self._unshared = np.append(self._unshared, index[~safe[puts + _CARRIED - 1]])
        if len(self._unshared):
            (gets,) = np.nonzero(_IS_GET[codes[_CARRIED:]])
            shared = np.isin(self._indices(places[gets], codes[_CARRIED:][gets]), self._unshared)
            if shared.any():
                raise _not_plain("it refers again to a tuple of more than numbers")

    def _indices(self, places: Numbers, codes: Codes) -> Numbers:
        """Of the memo, which the opcodes at the places give."""
        index = self._puts + np.arange(len(places))
        sizes = _PUT_BYTES[codes] + _GET_BYTES[codes]
        for count in (1, 4):
            index[sizes == count] = self._number(places[sizes == count], count)
        for number in np.flatnonzero(_HAS_LINE[codes]):
            line = bytes(self._data[places[number] + 1 : places[number] + 12]).partition(b"\n")[0]
            if not line.isdigit():
                raise _bad("it refers to a value by something that is no number")
            index[number] = int(line)
        self._put_kinds.update((codes[_IS_PUT[codes] > 0] == _code("MEMOIZE")).tolist())
        return index


def _check_end(code: int) -> None:
    """Refuse an opcode that no length is known of, unless it is the end mark."""
    if code == ord("."):
        return
    if code not in _NAMES:
        raise _bad(f"byte {code:#04x} is no opcode")
    raise _not_plain(f"its opcode {_NAMES[code]} wants to run code or build objects, which is refused")


def _followed(lengths: Numbers) -> Numbers:
    """The places from the first on, each as far behind the one before as that is long; a length of 0 is the last."""
    size = len(lengths)
    jump = np.append(np.minimum(np.arange(size) + lengths, size), size)
    places = np.zeros(1, np.int64)
    while places[-1] < size and lengths[places[-1]]:
        # Twice as many each time: `jump` goes as many opcodes on as there are places.
        places = np.concatenate([places, jump[places]])
        jump = jump[jump]
    last = int(np.searchsorted(places, places[-1]))
    return places[: last if places[-1] == size else last + 1]


def _shared_safely(codes: Codes) -> NDArray[np.bool_]:
    """Whether each opcode leaves something whose hash is cheap however often it is asked for; false where unsure."""
    safe = _IS_SHARED_SAFELY[codes].astype(bool)
    is_single = _IS_SINGLE[codes].astype(bool)
    of_singles = np.ones(len(codes), bool)
    for count in (1, 2, 3):
        of_singles[count:] &= is_single[:-count]
        of_singles[:count] = False
        safe |= of_singles & (codes == _code(f"TUPLE{count}"))
    return safe


def _check_depth(value: Any, most: int, left: int, levels: dict[int, int]) -> int:  # noqa: ANN401 - any container
    """How many levels it has. Refuses what contains itself or is nested too deep: whoever walks it would not return.

    `levels` are those of containers that have been walked, 0 while they are: what is shared is walked once.
    """
    if left == 0:
        raise _not_plain(f"it is nested more than {most} deep")
    levels[id(value)] = deepest = 0
    # Keys and members of sets cannot hold lists or dicts.
    for child in value.values() if type(value) is dict else value:
        if type(child) in (list, tuple, dict):
            known = levels.get(id(child))
            if known == 0:
                raise _not_plain("something in it contains itself")
            deepest = max(deepest, _check_depth(child, most, left - 1, levels) if known is None else known)
            if deepest >= left:
                raise _not_plain(f"it is nested more than {most} deep")
    levels[id(value)] = deepest + 1
    return deepest + 1
