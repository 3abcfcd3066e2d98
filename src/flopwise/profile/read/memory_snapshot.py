"""PyTorch's memory snapshots: `torch.cuda.memory._dump_snapshot`, as it pickles them or as JSON.

A snapshot says what the caching allocator holds and which stack asked for it, not what it is for. The owner is told
from the stack: the innermost frame that one of `_RULES` knows decides. A step's frames in an optimizer mean its state,
C++ frames of autograd's engine or a `backward` mean gradients and their temporaries, a module's `forward` means
activations, moving or loading a module means parameters. Without recorded stacks everything is `other`, and so is the
backward pass where Python's frames alone were recorded: it runs on a thread without any.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, get_args

import msgspec
import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import show_bytes, show_seconds
from flopwise.profile.explain.intervals import Numbers, highest_points
from flopwise.profile.read.opening import BLOCK_BYTES, TraceFile
from flopwise.profile.read.plain_pickle import plain_data
from flopwise.records.profile import MemoryOwner, MemoryUse, Profile, Read

MOST_JSON_BYTES = 2**30
MOST_VISITS = 20_000_000
"""Blocks, frames and events that are looked at: shared parts of a pickle can look like many more than it holds."""
MOST_POINTS = 1000
MOST_DEVICES = 64
MOST_WARNINGS = 5
_LARGEST = 2**60
"""Bytes and microseconds beyond it are nonsense."""
_LONGEST_US = 2**53
"""More would not fit 64 bits as nanoseconds."""

_WORDS = (b"segments", b"device_traces", b"segment_type")
_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")

_RULES: tuple[tuple[MemoryOwner, str, str], ...] = (
    ("optimizer", r"/(optim|optimizers?)/(?!lr_scheduler)|/optim\w*\.py$", r""),
    ("parameters", r"/torch/nn/(parameter|init)\.py$|/torch/serialization\.py$|/safetensors/", r""),
    ("parameters", r"/torch/nn/modules/", r"^(__init__|reset_parameters|_apply|to|cuda|to_empty|convert)$"),
    ("parameters", r"", r"^(from_pretrained|load_state_dict|_load_from_state_dict)$"),
    ("inputs", r"/torch/utils/data/", r""),
    ("communication", r"/torch/distributed/|/deepspeed/comm/", r""),
    ("gradients", r"", r"^_?backward$|autograd::Engine|AccumulateGrad|Backward\d*::apply|^_engine_run_backward$"),
    ("activations", r"", r"^forward$"),
    ("activations", r"/torch/nn/functional\.py$", r""),
    ("activations", r"/torch/nn/modules/module\.py$", r"^_(wrapped_)?call_impl$"),
)
"""(owner, pattern of the file, pattern of the function): both must be found in the frame."""

_PICKLE = re.compile(rb"\x80[\x02-\x05]|[(\]}]")
_JSON = re.compile(
    rb'\s*(\{\s*"(segments|device_traces|allocator_settings|external_annotations)"'
    rb'|\[\s*\{\s*"(device|address|total_size|segment_type)")'
)


def looks_like(head: bytes) -> bool:
    """Whether a file that begins so may be a snapshot."""
    if _PICKLE.match(head):
        return any(word in head for word in _WORDS)
    return _JSON.match(head) is not None


def read_source(source: TraceFile, name: str) -> Read:
    """A profile for each device that the snapshot holds memory or events of."""
    data = _load(source)
    if isinstance(data, list):
        data = {"segments": data}
    if not isinstance(data, dict) or not ("segments" in data or "device_traces" in data):
        raise FlopwiseError(
            f"{source.name} is no memory snapshot of PyTorch",
            why="it has neither `segments` nor `device_traces`",
            hint="write one with torch.cuda.memory._dump_snapshot(file)",
        )
    visits = _Visits()
    heaps = _heaps(_list(data.get("segments")), visits)
    traces = _traces(data)
    replays = {number: _Replay.of(trace, visits) for number, trace in enumerate(traces) if trace}
    devices = sorted({*heaps, *replays})
    if not devices:
        raise FlopwiseError(
            f"{source.name} holds no memory and no events",
            hint="take the snapshot after torch.cuda.memory._record_memory_history() and some steps",
        )
    common = [*source.warnings]
    if visits.left < 0:
        common.append(f"only the first {MOST_VISITS} blocks, frames and events were looked at")
    profiles = []
    for device in devices:
        several = f"{name} cuda:{device}" if len(devices) > 1 else name
        heap, replay = heaps.get(device) or _Heap(), replays.get(device) or _Replay()
        profile = _profile(several, heap, replay, common)
        profiles.append(replace(profile, origin=(source.name,), system=_system(data, device)))
    return Read(profiles=tuple(profiles))


def _traces(data: Mapping[Any, Any]) -> list[list[Any]]:
    """The events of each device; a list that stands there for a second device is none of its own."""
    given = _list(data.get("device_traces"))[:MOST_DEVICES]
    first = {id(trace): number for number, trace in reversed(list(enumerate(given)))}
    return [_list(trace) if first[id(trace)] == number else [] for number, trace in enumerate(given)]


def _load(source: TraceFile) -> Any:  # noqa: ANN401 - whatever the file holds
    if source.head(64).lstrip()[:1] in (b"{", b"["):
        blocks, size = [], 0
        while block := source.read(BLOCK_BYTES):
            blocks.append(block)
            size += len(block)
            if size > MOST_JSON_BYTES:
                raise FlopwiseError(
                    f"{source.name} is larger than {show_bytes(MOST_JSON_BYTES)} of JSON",
                    hint="record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000)",
                )
        try:
            return msgspec.json.decode(b"".join(blocks))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise FlopwiseError(f"{source.name} is no valid JSON", why=str(error), hint="write it again") from None
    try:
        return plain_data(source)
    except FlopwiseError as error:
        raise error.within(source.name) from None


class _Visits:
    """A budget of things to look at."""

    def __init__(self) -> None:
        self.left = MOST_VISITS

    def of(self, things: list[Any]) -> Iterator[dict[Any, Any]]:
        """Those of a list that are dicts, until the budget is used up."""
        for thing in things:
            self.left -= 1
            if self.left < 0:
                return
            if isinstance(thing, dict):
                yield thing


@dataclass(slots=True)
class _Heap:
    """What the allocator holds on a device."""

    reserved: int = 0
    by_owner: Counter[MemoryOwner] = field(default_factory=Counter)
    """Bytes of the blocks that are in use."""
    requested: int = 0
    """Of those: what was asked for."""
    with_stack: int = 0
    waiting: int = 0
    """Freed, and still in use by another stream."""
    damaged: int = 0
    """Segments and blocks that make no sense."""

    @property
    def in_use(self) -> int:
        return self.by_owner.total()


def _heaps(segments: list[Any], visits: _Visits) -> dict[int, _Heap]:
    heaps: dict[int, _Heap] = {}
    for segment in visits.of(segments):
        device = _whole(segment.get("device", 0))
        if device is None or device >= MOST_DEVICES:
            continue
        heap = heaps.setdefault(device, _Heap())
        blocks_size = sum(_add_block(heap, block, visits) for block in visits.of(_list(segment.get("blocks"))))
        size = _whole(segment.get("total_size"))
        if size is None or size < blocks_size:
            heap.damaged += 1
        heap.reserved += max(size or 0, blocks_size)
    return heaps


def _add_block(heap: _Heap, block: dict[Any, Any], visits: _Visits) -> int:
    """Take the block; returns its bytes."""
    size = _whole(block.get("size"))
    if size is None:
        heap.damaged += 1
        return 0
    state = block.get("state")
    if state not in _IN_USE:
        heap.damaged += state != "inactive"
        return size
    frames = _list(block.get("frames"))
    requested = _whole(block.get("requested_size"))
    history = _list(block.get("history"))
    if history and isinstance(history[0], dict):  # snapshots before torch 2.1
        frames = frames or _list(history[0].get("frames"))
        requested = _whole(history[0].get("real_size")) if requested is None else requested
    heap.by_owner[owner_of(visits.of(frames))] += size
    heap.requested += size if requested is None else min(requested, size)
    heap.with_stack += size if frames else 0
    heap.waiting += size if state != _IN_USE[0] else 0
    return size


def owner_of(frames: Iterable[Mapping[Any, Any]]) -> MemoryOwner:
    """Whom memory belongs to, by the stack that asked for it, its innermost frame first."""
    for frame in frames:
        filename, name = frame.get("filename"), frame.get("name")
        if isinstance(filename, str) and isinstance(name, str):
            owner = _owner_of_frame(filename[-500:], name[:500])
            if owner is not None:
                return owner
    return "other"


@lru_cache(maxsize=10_000)
def _owner_of_frame(filename: str, name: str) -> MemoryOwner | None:
    path = "/" + filename.replace("\\", "/")
    return next((owner for owner, file, called in _RULES if re.search(file, path) and re.search(called, name)), None)


@dataclass(slots=True)
class _Replay:
    """A device's events, added up."""

    times_us: array[int] = field(default_factory=lambda: array("q"))
    """-1 where the event has none."""
    changes: array[int] = field(default_factory=lambda: array("q"))
    """Bytes asked for (more than 0) or given back."""
    reserved: int = 0
    """How the allocator's memory changed until now."""
    reserved_peak: int = 0
    """The most that it had grown by."""
    failures: list[tuple[int | None, int | None, int | None]] = field(default_factory=list)
    """Out of memory: when, bytes asked for, bytes free."""
    damaged: int = 0

    @classmethod
    def of(cls, trace: list[Any], visits: _Visits) -> _Replay:
        replay = cls()
        for event in visits.of(trace):
            replay.add(event)
        return replay

    def add(self, event: Mapping[Any, Any]) -> None:
        action, size, time_us = event.get("action"), _whole(event.get("size")), _whole(event.get("time_us"))
        if action == "oom":
            self.failures.append((time_us, size, _whole(event.get("device_free"))))
        elif size is None:
            self.damaged += action != "snapshot"
        elif action in ("alloc", "free_completed"):
            self.times_us.append(-1 if time_us is None else time_us)
            self.changes.append(size if action == "alloc" else -size)
        elif action in ("segment_alloc", "segment_map"):
            self.reserved += size
            self.reserved_peak = max(self.reserved_peak, self.reserved)
        elif action in ("segment_free", "segment_unmap"):
            self.reserved -= size


def _profile(name: str, heap: _Heap, replay: _Replay, common: list[str]) -> Profile:
    warnings = [*common, *_failures(replay)]
    if heap.damaged or replay.damaged:
        warnings.append(f"{heap.damaged} segments and blocks and {replay.damaged} events make no sense")
    notes = ["owners are told from the stacks that asked for the memory"]
    if heap.in_use and heap.with_stack < heap.in_use:
        without = show_bytes(heap.in_use - heap.with_stack)
        notes.append(f"no stack is recorded for {without} of the {show_bytes(heap.in_use)} in use")
    if heap.in_use > heap.requested:
        notes.append(f"{show_bytes(heap.in_use - heap.requested)} in use are rounding: nobody asked for them")
    if heap.waiting:
        notes.append(f"{show_bytes(heap.waiting)} are freed and wait for another stream")
    over_time: tuple[tuple[float, float], ...] = ()
    if replay.changes:
        # As floating point: damaged sizes would wrap around, and true ones are exact up to 8 PiB.
        changes = np.concatenate([[0.0], np.cumsum(np.array(replay.changes, dtype=np.float64))])
        base = heap.requested - float(changes[-1])
        lowest = base + float(changes.min())
        if lowest < 0:
            warnings.append(f"events and blocks disagree by {show_bytes(-lowest)}: the events begin or end too early")
            base -= lowest
        levels = base + changes
        when = ""
        if min(replay.times_us) >= 0:
            elapsed_ns = _elapsed_ns(replay)
            over_time = highest_points(elapsed_ns, levels, MOST_POINTS)
            when = f" after {show_seconds(float(elapsed_ns[levels.argmax()]) / 1e9)}"
        else:
            warnings.append("events without a time: memory over time is not known")
        notes.append(f"peak of what was asked for: {show_bytes(float(levels.max()))}{when}")
    if replay.reserved_peak:
        peak = heap.reserved + max(0, replay.reserved_peak - replay.reserved)
        notes.append(f"peak of what the allocator held: {show_bytes(peak)}")
    return Profile(
        name=name,
        format="memory-snapshot",
        memory=_memory(heap),
        memory_total_bytes=float(heap.reserved) or None,
        memory_over_time=over_time,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _memory(heap: _Heap) -> tuple[MemoryUse, ...]:
    rows = [
        MemoryUse(owner=owner, bytes=float(heap.by_owner[owner]), name="active")
        for owner in get_args(MemoryOwner)
        if heap.by_owner[owner]
    ]
    if heap.reserved:
        rows.append(MemoryUse(owner="fragmentation", bytes=float(heap.reserved - heap.in_use), name="inactive"))
    return tuple(rows)


def _failures(replay: _Replay) -> Iterator[str]:
    start = replay.times_us[0] if replay.times_us else None
    for time_us, size, free in replay.failures[:MOST_WARNINGS]:
        when = "" if time_us is None or start is None else f" after {show_seconds(max(0, time_us - start) / 1e6)}"
        asked = "an allocation" if size is None else show_bytes(size)
        left = "" if free is None else f", {show_bytes(free)} free"
        yield f"out of memory{when}: {asked} asked for{left}"
    if len(replay.failures) > MOST_WARNINGS:
        yield f"out of memory {len(replay.failures) - MOST_WARNINGS} times more"


def _elapsed_ns(replay: _Replay) -> Numbers:
    """Since the first event: before it, and after each."""
    times = np.maximum.accumulate(np.asarray(replay.times_us))
    elapsed_us = np.minimum(times - times[0], _LONGEST_US)
    return np.concatenate([elapsed_us[:1], elapsed_us]) * 1000


def _system(data: Mapping[Any, Any], device: int) -> dict[str, str]:
    system = {"device": f"cuda:{device}"}
    settings = data.get("allocator_settings")
    for key, value in list(settings.items())[:30] if isinstance(settings, dict) else ():
        if isinstance(key, str) and isinstance(value, str | int | float):
            system[f"allocator.{key[:60]}"] = str(value)[:200]
    return system


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _whole(value: object) -> int | None:
    """A size, number or time that makes sense."""
    return value if type(value) is int and 0 <= value <= _LARGEST else None
