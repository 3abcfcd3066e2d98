"""PyTorch's memory snapshots: owners by their stacks, what the allocator holds unused, memory over time."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read import memory_snapshot
from flopwise.profile.read.memory_snapshot import looks_like, owner_of, read_source
from flopwise.profile.read.opening import TraceFile
from flopwise.records.profile import Profile

MIB = 2**20
PACKAGES = "/usr/lib/python3/site-packages/"


def frame(filename: str, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": 1, "name": name}


MAIN = frame("/home/me/train.py", "<module>")
FORWARD = [
    frame("??", "torch::autograd::VariableType::(anonymous namespace)::addmm(c10::DispatchKeySet)"),
    frame(PACKAGES + "torch/nn/modules/linear.py", "forward"),
    frame(PACKAGES + "torch/nn/modules/module.py", "_call_impl"),
    MAIN,
]
BACKWARD = [frame("??", "at::native::mm"), frame("??", "torch::autograd::Engine::thread_main(void*)")]
STEP = [
    frame(PACKAGES + "torch/optim/adamw.py", "_init_group"),
    frame(PACKAGES + "torch/optim/optimizer.py", "wrapper"),
    frame(PACKAGES + "torch/optim/lr_scheduler.py", "wrapper"),
    MAIN,
]
MOVED = [frame(PACKAGES + "torch/nn/modules/module.py", "convert"), MAIN]


def block(size: int, state: str, frames: list[dict[str, Any]], requested: int | None = None) -> dict[str, Any]:
    asked = size if requested is None else requested
    return {"address": 0, "size": size, "requested_size": asked, "state": state, "frames": frames}


def segment(blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    total = sum(entry["size"] for entry in blocks)
    return {
        "device": device,
        "address": 2**40,
        "total_size": total,
        "allocated_size": 0,
        "active_size": 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def event(action: str, size: int, time_us: int, **more: int) -> dict[str, Any]:
    return {"action": action, "size": size, "stream": 0, "time_us": 10**15 + time_us, "frames": [], **more}


def snapshot() -> dict[str, Any]:
    blocks = [
        block(10 * MIB, "active_allocated", MOVED),
        block(20 * MIB, "active_allocated", STEP),
        block(8 * MIB, "active_pending_free", FORWARD, requested=7 * MIB),
        block(4 * MIB, "active_allocated", BACKWARD),
        block(2 * MIB, "active_allocated", [MAIN]),
        block(6 * MIB, "inactive", []),
    ]
    # In use when recording began: 13 MiB, since 30 MiB more are asked for than given back until the 43 MiB of the end.
    trace = [
        event("segment_alloc", 50 * MIB, 0, addr=1),
        event("alloc", 30 * MIB, 1_000_000, addr=1),
        event("alloc", 60 * MIB, 2_000_000, addr=2),
        event("free_requested", 60 * MIB, 2_500_000, addr=2),
        event("free_completed", 60 * MIB, 3_000_000, addr=2),
        event("segment_free", 40 * MIB, 3_500_000, addr=2),
        event("oom", 80 * 2**30, 3_600_000, device_free=MIB),
        event("snapshot", 0, 4_000_000),
    ]
    return {
        "segments": [segment(blocks[:3]), segment(blocks[3:])],
        "device_traces": [trace, []],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "max_split_size": -1},
        "external_annotations": [],
    }


def profiles(data: bytes) -> tuple[Profile, ...]:
    assert looks_like(data[: 2**16])
    return read_source(TraceFile("snapshot.pickle", iter([data])), "run").profiles


@pytest.fixture(params=["pickle 2", "pickle 5", "json"])
def written(request: pytest.FixtureRequest) -> Iterator[bytes]:
    kind = request.param
    yield json.dumps(snapshot()).encode() if kind == "json" else pickle.dumps(snapshot(), int(kind[-1]))


def test_owners_and_fragmentation_add_up_to_what_is_reserved(written: bytes) -> None:
    (profile,) = profiles(written)
    assert profile.format == "memory-snapshot"
    assert {use.owner: use.bytes / MIB for use in profile.memory} == {
        "parameters": 10,
        "optimizer": 20,
        "activations": 8,
        "gradients": 4,
        "other": 2,
        "fragmentation": 6,
    }
    assert profile.memory_total_bytes == 50 * MIB == sum(use.bytes for use in profile.memory)
    assert profile.system["allocator.PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_memory_over_time_ends_at_what_is_in_use(written: bytes) -> None:
    (profile,) = profiles(written)
    assert profile.memory_over_time == (
        (0.0, 13.0 * MIB),
        (0.0, 43.0 * MIB),
        (1.0, 103.0 * MIB),
        (2.0, 43.0 * MIB),
    )
    assert any("103 MiB after 1.00 s" in note for note in profile.notes)
    assert any("held: 90.0 MiB" in note for note in profile.notes)


def test_running_out_of_memory_is_a_warning(written: bytes) -> None:
    (profile,) = profiles(written)
    assert profile.warnings == ("out of memory after 2.60 s: 80.0 GiB asked for, 1.00 MiB free",)


@pytest.mark.parametrize(
    ("owner", "frames"),
    [
        ("optimizer", STEP),
        ("parameters", MOVED),
        ("activations", FORWARD),
        ("gradients", BACKWARD),
        # Recomputed within the backward pass: the module's frame is nearer.
        ("activations", [*FORWARD[:2], frame(PACKAGES + "torch/utils/checkpoint.py", "recompute_fn"), *BACKWARD]),
        # A module's forward pass within a closure that the optimizer calls.
        ("activations", [*FORWARD[:2], *STEP]),
        ("gradients", [frame("/home/me/torchinductor/ab/cab.py", "call"), frame("runtime_wrappers.py", "backward")]),
        ("communication", [frame(PACKAGES + "torch/distributed/fsdp/_flat_param.py", "_alloc_padded_unsharded")]),
        ("inputs", [frame("C:\\python\\torch\\utils\\data\\_utils\\pin_memory.py", "pin_memory")]),
        ("other", [frame("/home/optimus/train.py", "step")]),
        ("other", [MAIN]),
        ("other", []),
        ("other", [{"filename": 1, "name": None}]),
    ],
)
def test_the_innermost_frame_that_is_known_decides(owner: str, frames: list[dict[str, Any]]) -> None:
    assert owner_of(frames) == owner


def test_every_device_has_its_own_profile() -> None:
    data = snapshot()
    data["segments"].append(segment([block(3 * MIB, "active_allocated", [])], device=2))
    data["device_traces"][1] = [event("alloc", MIB, 0), event("free_completed", MIB, 5)]
    found = profiles(pickle.dumps(data))
    assert [profile.name for profile in found] == ["run cuda:0", "run cuda:1", "run cuda:2"]
    assert [profile.memory_total_bytes for profile in found] == [50 * MIB, None, 3 * MIB]
    assert found[1].memory_over_time == ((0.0, 0.0), (0.0, float(MIB)), (5e-6, 0.0))


def test_a_bare_list_of_segments_is_read() -> None:
    (profile,) = profiles(pickle.dumps(snapshot()["segments"]))
    assert profile.memory_total_bytes == 50 * MIB
    assert profile.memory_over_time == ()


def test_stacks_of_older_snapshots_are_read() -> None:
    old = {"size": 4 * MIB, "state": "active_allocated", "history": [{"real_size": 3 * MIB, "frames": STEP}]}
    (profile,) = profiles(pickle.dumps({"segments": [{"total_size": 4 * MIB, "blocks": [old]}]}))
    assert [(use.owner, use.bytes) for use in profile.memory] == [("optimizer", 4 * MIB), ("fragmentation", 0)]
    assert any("1.00 MiB in use are rounding" in note for note in profile.notes)


def test_events_that_do_not_fit_the_blocks_are_told() -> None:
    (profile,) = profiles(pickle.dumps({"segments": [], "device_traces": [[event("alloc", MIB, 0)]]}))
    assert any("disagree by 1.00 MiB" in warning for warning in profile.warnings)
    assert min(level for _, level in profile.memory_over_time) == 0


def test_what_makes_no_sense_is_told() -> None:
    data = snapshot()
    data["segments"][0]["blocks"][0]["size"] = -5
    data["device_traces"][0][1]["size"] = "large"
    data["device_traces"][0][2]["time_us"] = None
    (profile,) = profiles(pickle.dumps(data))
    assert any("1 segments and blocks and 1 events make no sense" in warning for warning in profile.warnings)
    assert any("events without a time" in warning for warning in profile.warnings)
    assert profile.memory_over_time == ()


def test_a_look_at_too_much_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_snapshot, "MOST_VISITS", 1000)
    shared = segment([block(MIB, "active_allocated", FORWARD)] * 100)
    (profile,) = profiles(pickle.dumps({"segments": [shared] * 100}))
    assert any("only the first 1000" in warning for warning in profile.warnings)


def test_many_events_are_thinned_and_the_peak_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_snapshot, "MOST_POINTS", 10)
    sizes = [MIB] * 40 + [7 * MIB] + [MIB] * 40
    events = [
        {"action": action, "addr": 1, "size": size, "time_us": 2 * number + (action != "alloc")}
        for number, size in enumerate(sizes)
        for action in ("alloc", "free_completed")
    ]
    (profile,) = profiles(pickle.dumps({"segments": [], "device_traces": [events]}))
    assert len(profile.memory_over_time) <= 10
    assert (80e-6, 7.0 * MIB) in profile.memory_over_time
    assert profile.memory_over_time[-1] == (161e-6, 0.0)


def test_times_far_apart_do_not_wrap_around() -> None:
    events = [{"action": "alloc", "addr": 1, "size": MIB, "time_us": time_us} for time_us in (0, 2**60)]
    (profile,) = profiles(pickle.dumps({"segments": [], "device_traces": [events]}))
    assert profile.memory_over_time[-1][0] > 1e9


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"other": 1}),
        pickle.dumps(3),
        b'{"segments": [',
        b'{"segments": [], "device_traces": []}',
        b"[" * 100_000,
        b'{"segments": 1}',
        pickle.dumps(io.BytesIO()),
        pickle.dumps({"segments": [OSError()]}),
    ],
)
def test_what_is_no_snapshot_is_an_error_in_words(data: bytes) -> None:
    with pytest.raises(FlopwiseError):
        read_source(TraceFile("snapshot.pickle", iter([data])), "run")


def test_other_files_do_not_look_like_one() -> None:
    for head in (
        b'{"traceEvents": []}',
        b'{"schemaVersion": 1, "segments": 1}',
        b"\x80\x04]",
        b"",
        b"SQLite format 3\0",
    ):
        assert not looks_like(head)


@settings(max_examples=50)
@given(data=st.data(), kind=st.sampled_from(["json", "0", "2", "5"]))
def test_damage_raises_nothing_but_our_error(data: st.DataObject, kind: str) -> None:
    plain = json.dumps(snapshot()).encode() if kind == "json" else pickle.dumps(snapshot(), int(kind))
    whole = bytearray(plain)
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)) | st.just(len(whole)))
    try:
        read_source(TraceFile("snapshot", iter([bytes(whole[:cut])])), "run")
    except FlopwiseError:
        return


JUNK = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=50)
@given(data=st.data())
def test_any_value_anywhere_raises_nothing_but_our_error(data: st.DataObject) -> None:
    whole = snapshot()
    place = data.draw(
        st.sampled_from(
            [
                whole,
                whole["segments"][0],
                whole["segments"][0]["blocks"][0],
                whole["device_traces"][0][1],
                whole["segments"][0]["blocks"][1]["frames"][0],
                whole["device_traces"][0][6],
            ]
        )
    )
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JUNK)
    try:
        read_source(TraceFile("snapshot", iter([pickle.dumps(whole)])), "run")
    except FlopwiseError:
        return
