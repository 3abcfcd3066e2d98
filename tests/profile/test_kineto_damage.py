"""Traces that are damaged, hostile or endless: a sound profile of the rest, or an error in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read import kineto_columns
from flopwise.profile.read.reading import read_profiles
from tests.support.traces import (
    Json,
    an_event,
    assert_sound,
    gpu_trace,
    memory,
    microseconds,
    only,
    profiles_of,
)


def test_a_cut_trace_says_so() -> None:
    content = json.dumps(gpu_trace()).encode()
    found = only(content[: content.index(b"multi_tensor")])
    assert_sound(found)
    assert any("cut off" in warning for warning in found.warnings)
    assert microseconds(found, "device_busy_s") == 52.5


@pytest.mark.parametrize("time", ['"soon"', "null", "true", "[1]"])
@pytest.mark.parametrize("place", [0, -1])
def test_an_event_of_a_wrong_kind_hides_nothing_else(time: str, place: int) -> None:
    """Not even as the last of the list, where what stands behind the list follows it."""
    trace = gpu_trace()
    sound = only(trace)
    trace["traceEvents"].insert(len(trace["traceEvents"]) if place else 0, {"ph": "X", "cat": "kernel", "ts": "@"})
    found = only(json.dumps(trace).replace('"@"', time).encode())
    assert (found.values, found.device, found.rank) == (sound.values, sound.device, sound.rank)
    assert found.warnings == ("x.json: 1 events have fields of a wrong kind, left out",)


def test_impossible_times_are_left_out_and_told() -> None:
    trace = gpu_trace()
    bad = [an_event("kernel", "gemm", 20, 10, device=0), an_event("kernel", "gemm", 0, 1e300, device=0)]
    missing = an_event("kernel", "gemm", 0, 10, device=0)
    del missing["ts"]
    trace["traceEvents"] += [*bad, missing]
    found = only(trace)
    assert microseconds(found, "device_busy_s") == 57.5
    assert found.warnings == (
        "x.json: 1 events have a negative duration, left out",
        "x.json: 2 events have no time or no duration, or an impossible one, left out",
    )


@pytest.mark.parametrize(
    ("limit", "what", "category"),
    [
        ("MOST_OPERATORS", "operators", "cpu_op"),
        ("MOST_DEVICE_ROWS", "activities on devices", "kernel"),
        ("MOST_LAUNCHES", "launches", "cuda_runtime"),
        ("MOST_STEPS", "steps", "user_annotation"),
        ("MOST_STEPS", "steps of optimizers", "user_annotation"),
        ("MOST_THREADS", "threads", "cpu_op"),
        ("_MOST_DEVICES", "devices", "kernel"),
        ("MOST_MEMORY_ROWS", "changes of memory", "cpu_instant_event"),
    ],
)
def test_more_than_the_most_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, limit: str, what: str, category: str
) -> None:
    names = {"steps": "ProfilerStep#{}", "steps of optimizers": "Optimizer.step#AdamW.step"}
    more = [
        an_event(category, names.get(what, "some").format(n), 50 + n, 51 + n, device=n % 8, correlation=100 + n)
        | {"tid": n}
        for n in range(10, 30)
    ]
    if what == "changes of memory":
        more = [memory(n, n, n) for n in range(10, 30)]
    content = gpu_trace()
    content["traceEvents"] += more
    assert profiles_of(content)[0].warnings == ()
    monkeypatch.setattr(kineto_columns, limit, 20 if limit == "MOST_DEVICE_ROWS" else 5)
    found = profiles_of(content)
    assert found[0].warnings == (
        f"x.json: only the first {20 if limit == 'MOST_DEVICE_ROWS' else 5} {what} are summed up",
    )
    for each in found:
        assert_sound(each)
    if what == "devices":
        assert len(found) == 5


def test_names_are_kept_once_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = {"traceEvents": [an_event("kernel", f"{n}" * 100, 10 * n, 10 * n + 10 - n, device=0) for n in range(9)]}
    monkeypatch.setattr(kineto_columns, "_MOST_NAME_BYTES", 700)
    found = only(trace)
    assert {spent.name: spent.count for spent in found.kernels} == {
        **{f"{n}" * 100: 1 for n in range(5)},
        kineto_columns.OTHER_NAMES: 4,
    }


def test_an_optimizer_that_took_no_time_is_none() -> None:
    events = [an_event("cpu_op", "aten::add", 1, 5), an_event("user_annotation", "Optimizer.step#AdamW.step", 2, 2)]
    assert [spent.kind for spent in only({"traceEvents": events}).classes] == ["pointwise"]


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(FlopwiseError, match="cannot be looked into") as error:
        read_profiles([tmp_path])
    assert error.value.why == "Permission denied"
    assert error.value.hint


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_damage_gives_a_sound_profile_or_an_error_in_words(data: st.DataObject) -> None:
    content = bytearray(json.dumps(gpu_trace()).encode())
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(content)))
        change = data.draw(
            st.binary(max_size=12)
            | st.sampled_from(
                [b"1e400", b"-1", b"9" * 400, b"NaN", b"null", b'"x"', b"[]", b"{}", b"},{", b"]", b"e300"]
            )
        )
        content[place : place + data.draw(st.integers(0, 30))] = change
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    try:
        profiles = profiles_of(bytes(content))
    except FlopwiseError as error:
        assert error.hint
        return
    for found in profiles:
        assert_sound(found)


WORDS = st.sampled_from(
    ["kernel", "gpu_memcpy", "cpu_op", "cuda_runtime", "user_annotation", "ProfilerStep#1", "aten::mm"]
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["device", "stream", "correlation", "External id", "bytes", "Input Dims", "Input type", "dtype"]),
    ANY,
)
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "i", "M", 5]), "cat": WORDS | ANY, "name": WORDS | ANY},
    optional={"ts": st.floats() | ANY, "dur": st.floats() | ANY, "pid": ANY, "tid": ANY, "args": ARGUMENTS | ANY},
)


@given(st.lists(EVENTS, max_size=6), ANY, ANY)
@settings(max_examples=40, deadline=None)
def test_fields_of_any_kind(events: list[Json], properties: object, spread: object) -> None:
    trace = {"deviceProperties": properties, "distributedInfo": spread, "traceEvents": events}
    try:
        profiles = profiles_of(trace)
    except FlopwiseError as error:
        assert error.hint
        return
    for found in profiles:
        assert_sound(found)
