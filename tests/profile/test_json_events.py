"""Events of Chrome traces, in blocks and up to damage."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read import json_events
from flopwise.profile.read.json_events import Event, EventStream
from flopwise.profile.read.kineto_columns import Columns
from flopwise.profile.read.opening import TraceFile

HEAD = '{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}, {"id": 1}], "traceEvents": ['
TAIL = '], "traceName": "x.json", "distributedInfo": {"rank": 3}}'


def _event(number: int, **changes: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": f"kernel {number}", "ts": number, "dur": 1, "args": {}} | changes


def _text(count: int, indent: int | None = None) -> str:
    return json.dumps({"traceEvents": [_event(number) for number in range(count)], "traceName": "x"}, indent=indent)


def _read(text: str | bytes, block: int = 64) -> tuple[list[Event], EventStream]:
    content = text.encode() if isinstance(text, str) else text
    pieces: Iterator[bytes] = (content[begin : begin + block] for begin in range(0, len(content), block))
    stream = EventStream(TraceFile("x.json", pieces))
    return [event for events in stream for event in events], stream


def _names(events: list[Event]) -> list[str]:
    return [event.name for event in events]


@pytest.fixture(params=[150, 1000, json_events.BLOCK_BYTES])
def _block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_events, "BLOCK_BYTES", request.param)


pytestmark = pytest.mark.usefixtures("_block_bytes")
ALL = [f"kernel {number}" for number in range(40)]


@pytest.mark.parametrize("indent", [None, 0, 4])
def test_every_event_once_and_in_order(indent: int | None) -> None:
    events, stream = _read(_text(40, indent))
    assert _names(events) == ALL
    assert [event.ts for event in events] == list(range(40))
    assert stream.warnings == []
    assert stream.metadata == {"traceName": "x"}


def test_keys_before_and_after_the_events() -> None:
    events, stream = _read(HEAD + ", ".join(json.dumps(_event(number)) for number in range(40)) + TAIL)
    assert _names(events) == ALL
    assert stream.metadata["deviceProperties"] == [{"id": 0, "name": "GPU"}, {"id": 1}]
    assert stream.metadata["distributedInfo"] == {"rank": 3}
    assert stream.warnings == []


def test_lists_of_objects_after_the_events_are_not_events() -> None:
    tail = '], "deviceProperties": [' + ", ".join('{"name": "GPU"}' for _ in range(40)) + "]}"
    events, stream = _read('{"traceEvents": [' + ", ".join(json.dumps(_event(number)) for number in range(40)) + tail)
    assert _names(events) == ALL
    assert len(stream.metadata["deviceProperties"]) == 40


@pytest.mark.parametrize("text", ["[]", ' {"traceEvents": []}', "[ ", '{"traceEvents": [', '{"traceEvents":[]'])
def test_no_events(text: str) -> None:
    events, _ = _read(text)
    assert events == []


def test_a_bare_list() -> None:
    events, stream = _read(json.dumps([_event(number) for number in range(40)]))
    assert _names(events) == ALL
    assert stream.warnings == []
    assert stream.metadata == {}


def test_what_looks_like_the_end_of_an_event_may_be_inside_one() -> None:
    tricky = [_event(n, name="a }, { b", args={"x": [{"ph": "X"}, {"ph": "Y"}], "y": "}]}, {"}) for n in range(40)]
    events, stream = _read(json.dumps(tricky))
    assert _names(events) == ["a }, { b"] * 40
    assert stream.warnings == []


@pytest.mark.parametrize("cut", range(20, 400, 17))
def test_a_cut_file_gives_its_whole_events(cut: int) -> None:
    text = _text(40)
    events, stream = _read(text[:-cut])
    whole = text[:-cut].count("}}, {") + (1 if text[:-cut].endswith(("}}", "}}, ", "}},", "}}, {")) else 0)
    assert len(events) >= whole - 1
    assert _names(events) == ALL[: len(events)]
    assert stream.warnings == ["x.json is cut off: the list of its events has no end"]


@pytest.mark.parametrize(
    "damage", ['{"ph": "X", \x00\x01 garbage {{{ ]]', '{"ph": "X" "cat": 5}', "{}} {}", '{"ph": tru}']
)
def test_what_comes_before_damage_is_read_and_the_damage_told(damage: str) -> None:
    parts = [json.dumps(_event(number)) for number in range(40)]
    parts[20] = damage
    text = "[" + ", ".join(parts) + "]"
    events, stream = _read(text)
    assert _names(events) == ALL[:20]
    (warning,) = stream.warnings
    place = re.fullmatch(r"x.json is damaged at its byte (\d+): its events are read up to there", warning)
    assert place is not None
    begin = text.index(damage)
    assert begin < int(place[1]) <= begin + len(damage) + 1


@pytest.mark.parametrize(
    "damage",
    [
        '{"ph": "X", "name": "a", "args": {"z": ' + "[" * 5000 + "]" * 5000 + "}}",
        '{"ph": "X", "name": "a", "args": {"device": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}}",
    ],
)
def test_events_nested_without_end_are_told_as_damage(damage: str) -> None:
    parts = [json.dumps(_event(number)) for number in range(40)]
    parts[20] = damage
    events, stream = _read("[" + ", ".join(parts) + "]")
    assert _names(events) == ALL[: len(events)]
    assert len(events) <= 20
    assert len(stream.warnings) == 1
    assert "damaged" in stream.warnings[0]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "inf", "nan"])
def test_numbers_that_are_none_are_left_out(word: str) -> None:
    parts = [json.dumps(_event(number)) for number in range(40)]
    parts[7] = parts[7].replace("{}", f'{{"memory bandwidth (GB/s)": {word}, "device": 5}}')
    events, stream = _read("[" + ", ".join(parts) + "]")
    assert _names(events) == ALL
    assert events[7].args is not None
    assert events[7].args.device == 5
    assert stream.warnings == []


@pytest.mark.parametrize(
    "wrong",
    [
        '{"ph": "X", "name": 5}',
        '{"ph": "X", "name": "a", "ts": "then"}',
        '{"ph": "X", "name": "a", "ts": 1e400}',
        '{"ph": "X", "name": "a", "ts": ' + "9" * 5000 + "}",
        '{"ph": "X", "name": "a", "pid": ' + "9" * 5000 + "}",
        '{"ph": "X", "name": "a", "args": [1, 2]}',
        "17",
        '"text"',
        "null",
    ],
    ids=range(9),
)
def test_a_wrong_event_costs_only_itself(wrong: str) -> None:
    parts = [json.dumps(_event(number)) for number in range(40)]
    parts.insert(20, wrong)
    events, stream = _read("[" + ", ".join(parts) + "]")
    assert [name for name in _names(events) if name.startswith("kernel")] == ALL
    assert len(stream.warnings) == 1


def test_bytes_that_are_no_text_are_replaced() -> None:
    parts = [json.dumps(_event(number)).encode() for number in range(40)]
    parts[5] = parts[5].replace(b"kernel 5", b"kernel \xff\xfe")
    events, _ = _read(b"[" + b", ".join(parts) + b"]")
    assert len(events) == 40
    assert events[5].name == "kernel \ufffd\ufffd"


def test_one_enormous_event_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_events, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(json_events, "LARGEST_EVENT_BYTES", 4000)
    parts = [json.dumps(_event(number)) for number in range(40)]
    parts[20] = json.dumps(_event(20, name="x" * 50_000))
    events, stream = _read("[" + ", ".join(parts) + "]")
    assert _names(events) == ALL[:20]
    assert any("damaged" in warning for warning in stream.warnings)


@pytest.mark.parametrize("text", ["{}", '{"a": 1}', "hello", '{"traceEvents": {}}', '{"traceEvents": null}'])
def test_what_is_no_trace_is_an_error(text: str) -> None:
    with pytest.raises(FlopwiseError, match="no trace"):
        _read(text)


def test_keys_of_a_cut_file_are_still_found() -> None:
    broken = HEAD.replace('"schemaVersion": 1,', '"schemaVersion": 1, "broken": tru,')
    _, stream = _read(broken + json.dumps(_event(0)))
    assert stream.metadata["deviceProperties"] == [{"id": 0, "name": "GPU"}, {"id": 1}]
    assert stream.metadata["schemaVersion"] == 1


VALID = _text(12).encode()


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_damage_anywhere_never_raises_anything_else(data: st.DataObject) -> None:
    content = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        end = place + data.draw(st.integers(0, 40))
        content[place:end] = data.draw(
            st.binary(max_size=20) | st.sampled_from([b"{", b"]", b'"', b"NaN", b"[[[[", b"},"])
        )
    try:
        events, stream = _read(bytes(content), 100)
    except FlopwiseError:
        return
    assert len(events) <= 12 + 8
    assert len(events) >= 7 or stream.warnings


@given(st.binary(max_size=300))
@settings(max_examples=50, deadline=None)
def test_random_bytes(noise: bytes) -> None:
    events, _ = _read(b"[" + noise)
    assert len(events) < 20
    try:
        _read(noise)
    except FlopwiseError as error:
        assert error.hint


@pytest.mark.parametrize("_block_bytes", [json_events.BLOCK_BYTES], indirect=True)
def test_the_smallest_events_take_little_memory() -> None:
    blocks = iter([b'{"traceEvents":[{}', *[b",{}" * 10_000] * 150, b"]}"])
    columns = Columns()
    tracemalloc.start()
    try:
        columns.gather(EventStream(TraceFile("x.json", blocks)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert columns.events == 1_500_001
    assert peak_bytes < 100e6
