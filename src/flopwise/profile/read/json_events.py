"""The events of a Chrome trace, read in blocks: a file of any size in bounded memory, a damaged one as far as it goes.

A block ends where one event seems to end and the next to begin. Whether it truly does is not looked for: with such a
place inside a string or a nested list, the block would not decode.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read.opening import Source

BLOCK_BYTES = 2 * 2**20
"""The smallest events take thirty times their bytes once they are decoded."""
LARGEST_EVENT_BYTES = 8 * 2**20
MOST_METADATA_BYTES = 4 * 2**20
_TRIED_CUTS = 6
_MOST_BRACES = 20_000
"""That are looked at for a cut; a block that ends in more nested ones is taken event by event."""

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*$")
_MOST_SPACE_BETWEEN = 64
# The keys that an event may begin with; Kineto's begin with `ph`.
_EVENT_BEGINS = re.compile(rb'\{\s*"(?:ph|cat|name|pid|tid|ts|tts|dur|args|id|bp|s|cname)"\s*:')
_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)[-+]?(?:nan|inf(?:inity)?)(?=\s*[,\]}])", re.IGNORECASE)
_AFTER_EVENTS = re.compile(rb'\s*(?:,\s*"|\}|$)')
_END_OF_LIST = re.compile(rb'\s*\](?=\s*(?:,\s*"|\}|$))')
_SPACE_AND_COMMA = b" \t\r\n,"
_ERROR_PLACE = re.compile(r"\(byte (\d+)\)")
_NAN = float("nan")
_NESTED_BEGINS = 4
_METADATA_KEYS = ("deviceProperties", "distributedInfo", "schemaVersion", "traceName", "record_shapes", "host_name")


class Arguments(msgspec.Struct, gc=False):
    """What of an event's `args` anybody asks for; None where it is not there. Nothing is promised of the types."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    external_id: Any = msgspec.field(default=None, name="External id")
    old_external_id: Any = msgspec.field(default=None, name="external id")
    bytes: Any = None
    message_elements: Any = msgspec.field(default=None, name="In msg nelems")
    message_type: Any = msgspec.field(default=None, name="dtype")
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    input_type: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    input_values: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Concrete Inputs")
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    reserved: Any = msgspec.field(default=None, name="Total Reserved")
    device_type: Any = msgspec.field(default=None, name="Device Type")
    device_id: Any = msgspec.field(default=None, name="Device Id")


class Event(msgspec.Struct, gc=False):
    """One event; times in microseconds, NaN where they are missing."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = _NAN
    dur: float = _NAN
    pid: Any = None
    tid: Any = None
    args: Arguments | None = None


_events = msgspec.json.Decoder(list[Event])
_event = msgspec.json.Decoder(Event)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DAMAGE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

Found = tuple[list[Event], bytes, bool]
"""Events of a block, what is left of it, and whether the list ended in it."""


class EventStream:
    """Iterates over the events of a trace in lists; `metadata` and `warnings` are complete when they are all read."""

    def __init__(self, source: Source) -> None:
        self.metadata: dict[str, Any] = {}
        """What stands beside `traceEvents`; empty for a bare array."""
        self._source = source
        self._before = b""
        self._after = b""
        self._skipped_bytes = 0
        self._skipped_places = 0
        self._wrong: Counter[str] = Counter()
        self._first: dict[str, int] = {}
        self._is_cut = False
        self._is_odd = False

    @property
    def warnings(self) -> list[str]:
        """What could not be read, one sentence for each kind of damage."""
        told = list(self._source.warnings)
        name = self._source.name
        if self._is_cut:
            told.append(f"{name} is cut off: the list of its events has no end")
        if self._is_odd:
            told.append(f"{name}: what stands beside the list of its events is damaged, and may hide events")
        if self._skipped_places:
            told.append(f"{name}: {self._skipped_bytes} bytes in {self._skipped_places} places are damaged, left out")
        told.extend(f"{name}: {count} events {what}, left out" for what, count in sorted(self._wrong.items()))
        told.extend(f"{name}: only the first {most} {what} are summed up" for what, most in sorted(self._first.items()))
        return told

    def wrong(self, what: str, count: int = 1) -> None:
        """Count events that their reader had no use for, under one heading."""
        self._wrong[what] += count

    def only_first(self, most: int, what: str) -> None:
        """Tell that there are more than these, of which the reader took no more."""
        self._first[what] = most

    def __iter__(self) -> Iterator[list[Event]]:
        waiting = self._begin()
        ended = False
        while not ended:
            block = self._source.read(max(BLOCK_BYTES // 4, BLOCK_BYTES - len(waiting)))
            ended = not block
            waiting = (waiting + block).lstrip(_SPACE_AND_COMMA)
            events, waiting, finished = self._last(waiting) if ended else self._next(waiting)
            if events:
                yield events
            if finished:
                self._keep_after(waiting)
                break
        else:
            self._is_cut = True
        if self._before or self._after.strip():
            self.metadata, is_whole = _metadata(self._before, self._after)
            self._is_odd = not is_whole and not self._is_cut

    def _begin(self) -> bytes:
        """What is read ahead of the list's first event; leaves `_before` with the keys that stand before it."""
        if self._source.head(4096).lstrip().startswith(b"["):
            return self._source.read(4096).lstrip()[1:]
        ahead = b""
        while block := self._source.read(BLOCK_BYTES):
            ahead += block
            found = _EVENTS_KEY.search(ahead)
            if found is not None:
                self._before = (self._before + ahead[: found.start()])[:MOST_METADATA_BYTES]
                return ahead[found.end() :]
            kept = ahead[-_MOST_SPACE_BETWEEN:]
            self._before = (self._before + ahead[: -len(kept)])[:MOST_METADATA_BYTES]
            ahead = kept
        if (self._before + ahead).lstrip().startswith(b"{") and not ahead.rstrip().endswith(b"}"):
            why = "; ".join(["it ends before its list `traceEvents` begins", *self._source.warnings])
            raise FlopwiseError(f"{self._source.name} is cut off", why=why, hint="copy or record the trace again")
        raise FlopwiseError(
            f"{self._source.name} is no trace",
            why="it has no list `traceEvents`",
            hint="`export_chrome_trace` writes one",
        )

    def _next(self, waiting: bytes) -> Found:
        """A block that is not the last."""
        for tried, (end, begin) in enumerate(_cuts(waiting)):
            events, place = _decoded(waiting[:end])
            if events is not None:
                return events, waiting[begin:], False
            if place != _TOO_SHORT:
                return self._damaged(waiting, waiting[:end], waiting[begin:], place)
            if tried + 1 >= _TRIED_CUTS:
                break
        if len(waiting) < LARGEST_EVENT_BYTES:
            return [], waiting, False
        return self._salvaged(waiting, is_last=False)

    def _last(self, waiting: bytes) -> Found:
        block = waiting.rstrip().removesuffix(b",")
        events, place = _decoded(block)
        if events is not None:
            return events, b"", False
        if place == _TOO_SHORT:
            return self._salvaged(waiting, is_last=True)
        return self._damaged(waiting, block, b"", place)

    def _damaged(self, waiting: bytes, block: bytes, rest: bytes, place: int) -> Found:
        """A block that does not decode: for the end of the list, for numbers that are none, or for damage."""
        if place >= 0 and _AFTER_EVENTS.match(waiting, place):
            events, _ = _decoded(waiting[: place - 1])
            if events is not None:
                return events, waiting[place:], True
        mended, count = _NOT_A_NUMBER.subn(rb"\1null", block)
        if count:
            events, _ = _decoded(mended)
            if events is not None:
                return events, rest, False
        return self._salvaged(waiting, is_last=not rest)

    def _salvaged(self, waiting: bytes, *, is_last: bool) -> Found:
        """Event by event, from one that seems to begin to the next; what does not decode is left out and counted."""
        begins = [found.start() for found in _EVENT_BEGINS.finditer(waiting)]
        begins.append(len(waiting))
        events: list[Event] = []
        number, done = 0, 0
        while number + 1 < len(begins):
            self._skip(waiting[done : begins[number]])
            piece = _salvaged_event(waiting, begins, number)
            done = begins[number]
            if piece.is_open and is_last:
                # That the file is cut off is told as such.
                return events, b"", False
            if piece.event is None and not piece.is_wrong and (piece.is_open or number + 2 == len(begins)):
                break
            number += piece.used
            done = piece.end
            if piece.is_wrong:
                self.wrong("have fields of a wrong kind")
            if piece.event is not None and piece.event.ph:
                events.append(piece.event)
            is_whole = piece.is_wrong or (piece.event is not None and piece.event.ph != "")
            if is_whole and (end := _END_OF_LIST.match(waiting, done)):
                return events, waiting[end.end() :], True
        rest = waiting[done:].lstrip(_SPACE_AND_COMMA)
        if is_last and len(rest) < _MOST_SPACE_BETWEEN:
            # No more than the beginning of an event: the file is cut off, which is told as such.
            return events, b"", False
        if is_last or len(rest) >= LARGEST_EVENT_BYTES:
            self._skip(rest)
            rest = b""
        return events, rest, False

    def _skip(self, damaged: bytes) -> None:
        if damaged := damaged.strip(_SPACE_AND_COMMA):
            self._skipped_bytes += len(damaged)
            self._skipped_places += 1

    def _keep_after(self, waiting: bytes) -> None:
        self._after = waiting[:MOST_METADATA_BYTES]
        while block := self._source.read(BLOCK_BYTES):
            self._after = (self._after + block)[:MOST_METADATA_BYTES]


_TOO_SHORT, _BROKEN = -1, -2


def _decoded(text: bytes) -> tuple[list[Event] | None, int]:
    """The events of a list without its brackets; or None, and where the list ends within the text.

    Instead of a place: _TOO_SHORT where something is still open at the end, _BROKEN for anything else.
    """
    try:
        return _events.decode(b"[%b]" % text), 0
    except _DAMAGE as error:
        if "truncated" in str(error):
            return None, _TOO_SHORT
        end = _end_before_more(b"[%b]" % text, error)
        return None, _BROKEN if end is None else end - 1


def _end_before_more(text: bytes, error: Exception) -> int | None:
    """Where the first value of the text ends, if the error is that something follows it."""
    message = str(error)
    place = _ERROR_PLACE.search(message)
    if place is None or "trailing characters" not in message:
        return None
    return len(text[: int(place[1]) - 1].rstrip())


def _cuts(text: bytes) -> Iterator[tuple[int, int]]:
    """Places between two objects, from the last on: where the one ends and where the other begins."""
    begin = len(text)
    for _ in range(_MOST_BRACES):
        begin = text.rfind(b"{", 0, begin)
        if begin <= 0:
            return
        space = text[max(0, begin - _MOST_SPACE_BETWEEN) : begin]
        if found := _BETWEEN.search(space):
            yield begin - len(space) + found.start() + 1, begin


class _Piece(msgspec.Struct, gc=False):
    used: int
    """Places at which an event seems to begin that this one reaches over, its own among them."""
    end: int
    event: Event | None = None
    is_wrong: bool = False
    is_open: bool = False


def _salvaged_event(text: bytes, begins: list[int], number: int) -> _Piece:
    """The event at a place; objects nested in it may look like events of their own."""
    begin = begins[number]
    last = len(begins) - 1
    for used in range(1, 1 + min(_NESTED_BEGINS, last - number)):
        piece = text[begin : begins[number + used]].rstrip().removesuffix(b",").rstrip()
        event, problem, length = _decoded_event(piece)
        if event is not None:
            return _Piece(used=used, end=begin + length, event=event)
        if problem == "wrong":
            return _Piece(used=used, end=begin + length, is_wrong=True)
        if problem == "damaged":
            break
        if number + used == last:
            return _Piece(used=used, end=len(text), is_open=True)
    return _Piece(used=1, end=begin)


def _decoded_event(piece: bytes) -> tuple[Event | None, Literal["", "short", "wrong", "damaged"], int]:
    """One event, or what is wrong with it; and the length of what was decoded."""
    tries = (piece, None)
    for text in tries:
        try:
            mended = _NOT_A_NUMBER.sub(rb"\1null", piece.decode(errors="replace").encode()) if text is None else text
            return _event.decode(mended), "", len(piece)
        except _DAMAGE as error:
            end = _end_before_more(piece, error) if text is not None else None
            if end is not None:
                found, problem, _ = _decoded_event(piece[:end])
                return found, problem, end
            if "truncated" in str(error):
                return None, "short", 0
    try:
        _object.decode(piece)
    except _DAMAGE as error:
        end = _end_before_more(piece, error)
        if end is not None:
            return None, "wrong", end
        return None, "short" if "truncated" in str(error) else "damaged", 0
    return None, "wrong", len(piece)


def _metadata(before: bytes, after: bytes) -> tuple[dict[str, Any], bool]:
    """The keys beside `traceEvents`, as many as can be read, and whether those are all."""
    head = before.rstrip()
    for text in (b'%b"traceEvents":[]%b' % (head, after), b'%b"traceEvents":[]}' % head):
        try:
            found = msgspec.json.decode(text)
        except _DAMAGE:
            continue
        if isinstance(found, dict):
            return {key: value for key, value in found.items() if key != "traceEvents"}, text.endswith(after)
    return _loose_keys(before.decode(errors="replace") + after.decode(errors="replace")), False


def _loose_keys(text: str) -> dict[str, Any]:
    """Keys and values found one by one in text that does not decode as a whole."""
    decoder = json.JSONDecoder()
    found: dict[str, Any] = {}
    for key in _METADATA_KEYS:
        place = re.search(rf'"{key}"\s*:\s*', text)
        if place is None:
            continue
        try:
            found[key] = decoder.raw_decode(text, place.end())[0]
        except (ValueError, RecursionError):
            continue
    return found
