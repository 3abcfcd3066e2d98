"""The events of a Chrome trace, read in blocks: a file of any size in bounded memory, a damaged one up to the damage.

Blocks, because a decoded event takes up to thirty times its bytes: a trace of 1 GB is read within 1 GiB of memory,
which neither `json.load` nor msgspec on the whole file can do. A block ends where one event seems to end and the next
to begin. Whether it truly does is not looked for: with such a place inside a string or a nested list, the block would
not decode.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import msgspec

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read.opening import TraceFile

BLOCK_BYTES = 2 * 2**20
"""The smallest events take thirty times their bytes once they are decoded."""
LARGEST_EVENT_BYTES = 8 * 2**20
MOST_METADATA_BYTES = 4 * 2**20
_TRIED_CUTS = 6
_TRIED_LAST_CUTS = 64
"""Where a file is cut off or damaged, which it is once."""
_MOST_BRACES = 20_000
"""That are looked at for a cut."""

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*$")
_MOST_SPACE_BETWEEN = 64
_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)[-+]?(?:nan|inf(?:inity)?)(?=\s*[,\]}])", re.IGNORECASE)
_AFTER_EVENTS = re.compile(rb'\s*(?:,\s*"|\}|$)')
_SPACE_AND_COMMA = b" \t\r\n,"
_ERROR_PLACE = re.compile(r"\(byte (\d+)\)")
_NAN = float("nan")
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
_raw_events = msgspec.json.Decoder(list[msgspec.Raw])
_DAMAGE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

Found = tuple[list[Event], bytes, bool]
"""Events of a block, what is left of it, and whether the list ended in it."""


class EventStream:
    """Iterates over the events of a trace in lists; `metadata` and `warnings` are complete when they are all read."""

    def __init__(self, source: TraceFile) -> None:
        self.metadata: dict[str, Any] = {}
        """What stands beside `traceEvents`; empty for a bare array."""
        self._source = source
        self._before = b""
        self._after = b""
        self._read_bytes = 0
        self._damaged_at: int | None = None
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
        if self._damaged_at is not None:
            told.append(f"{name} is damaged at its byte {self._damaged_at}: its events are read up to there")
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
        finished = ended = False
        while not (finished or ended or self._damaged_at is not None):
            block = self._source.read(max(BLOCK_BYTES // 4, BLOCK_BYTES - len(waiting)))
            self._read_bytes += len(block)
            ended = not block
            waiting = (waiting + block).lstrip(_SPACE_AND_COMMA)
            events, waiting, finished = self._next(waiting, is_last=ended)
            if events:
                yield events
        if finished:
            self._keep_after(waiting)
        self._is_cut = ended and not finished and self._damaged_at is None
        if self._before or self._after.strip():
            self.metadata, is_whole = _metadata(self._before, self._after)
            self._is_odd = finished and not is_whole

    def _begin(self) -> bytes:
        """What is read ahead of the list's first event; leaves `_before` with the keys that stand before it."""
        if self._source.head(4096).lstrip().startswith(b"["):
            return self._ahead(4096).lstrip()[1:]
        ahead = b""
        while block := self._ahead(BLOCK_BYTES):
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

    def _ahead(self, size: int) -> bytes:
        block = self._source.read(size)
        self._read_bytes += len(block)
        return block

    def _next(self, waiting: bytes, *, is_last: bool) -> Found:
        """The events of a block, up to the last place where one seems to end; of the last block, all that are whole."""
        whole = [(len(waiting.rstrip(_SPACE_AND_COMMA)), len(waiting))] if is_last else []
        cuts = islice(_cuts(waiting), _TRIED_LAST_CUTS if is_last else _TRIED_CUTS)
        for end, begin in chain(whole, cuts):
            for block in (waiting[:end], _mend(waiting[:end])):
                events, place = self._decode(block)
                if events is not None:
                    return events, waiting[begin:], False
                if place == _TOO_SHORT:
                    break
                if place >= 0 and _AFTER_EVENTS.match(after := block[place:] + waiting[end:]):
                    return self._decode(block[: place - 1])[0] or [], after, True
            if place != _TOO_SHORT:
                return self._up_to_damage(block, len(waiting)), b"", False
        if is_last or len(waiting) < LARGEST_EVENT_BYTES:
            return [], waiting, False
        self._damaged_at = self._read_bytes - len(waiting)
        return [], b"", False

    def _decode(self, text: bytes) -> tuple[list[Event] | None, int]:
        """The events of a list without its brackets; or None, and where the list ends within the text.

        Instead of a place: _TOO_SHORT where something is still open at the end, _BROKEN for anything else.
        """
        text = b"[%b]" % text
        try:
            return _events.decode(text), 0
        except msgspec.ValidationError:
            pass
        except _DAMAGE as error:
            return None, _place_of(error, text)
        try:
            return self._of_right_kind(_raw_events.decode(text)), 0
        except _DAMAGE as error:
            return None, _place_of(error, text)

    def _of_right_kind(self, found: list[msgspec.Raw]) -> list[Event]:
        """Those that are events, of valid JSON."""
        events = []
        for raw in found:
            try:
                events.append(_event.decode(raw))
            except _DAMAGE:
                self.wrong("have fields of a wrong kind")
        return events

    def _up_to_damage(self, block: bytes, waiting_bytes: int) -> list[Event]:
        """The events of a block that does not decode, as far as they do."""
        try:
            _raw_events.decode(b"[%b]" % block)
            at = 0
        except _DAMAGE as error:
            place = _ERROR_PLACE.search(str(error))
            at = 0 if place is None else int(place[1]) - 1
        self._damaged_at = self._read_bytes - waiting_bytes + at
        for end, _ in islice(_cuts(block[:at] + b"{"), _TRIED_LAST_CUTS):
            events, _ = self._decode(block[:end])
            if events is not None:
                return events
        return []

    def _keep_after(self, waiting: bytes) -> None:
        self._after = waiting[:MOST_METADATA_BYTES]
        while block := self._source.read(BLOCK_BYTES):
            self._after = (self._after + block)[:MOST_METADATA_BYTES]


_TOO_SHORT, _BROKEN = -1, -2


def _mend(text: bytes) -> bytes:
    """With null for the numbers that JSON has not, and a sign in place of bytes that are no text."""
    return _NOT_A_NUMBER.sub(rb"\1null", text.decode(errors="replace").encode())


def _place_of(error: Exception, text: bytes) -> int:
    """Where the list that the text begins with ends, less its bracket, if the error is that something follows it."""
    message = str(error)
    place = _ERROR_PLACE.search(message)
    if place is not None and "trailing characters" in message:
        return len(text[: int(place[1]) - 1].rstrip()) - 1
    is_short = "truncated" in message or (place is not None and int(place[1]) >= len(text) - 1)
    # The latter: only our own bracket, behind the text, is wrong.
    return _TOO_SHORT if is_short else _BROKEN


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
