"""Whatever a profiler wrote → profiles: finds out by its content what a file is, and has the right reader read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import entry_kind, schema_name
from flopwise.profile.measure.sampling import CounterRecord, counters_values, read_counter_record
from flopwise.profile.read import (
    kineto,
    memory_snapshot,
    ncu,
    neuron_json,
    neuron_text,
    nsys,
    simulated,
    trainer_metrics,
)
from flopwise.profile.read.opening import Tell, TraceFile, open_trace
from flopwise.records.profile import Profile, Read
from flopwise.store.runs import PROFILE, from_text

HEAD_BYTES = 64 * 2**10
"""Of a file, what tells its kind."""
MOST_PROFILE_BYTES = 256 * 2**20
"""Of our own records, which are kilobytes."""

TRACE_ENDINGS = (".json", ".json.gz")
KINDS = (
    "a Neuron summary (text or JSON), a PyTorch or Chrome trace, an Nsight Systems SQLite export, an Nsight Compute "
    "CSV, a Hugging Face trainer's results, a torch memory snapshot, a profile of flopwise, or a step of `plan --trace`"
)


_FIRST_FIELDS = (b"name", b"format", b"origin", b"world", b"batch_sequences", b"sequence_tokens", b"peaks")


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an object says that it is, and the profiles of one that has several."""

    schema: str = ""
    rows: tuple[Profile, ...] = ()


class _Own:
    """Profiles that flopwise wrote."""

    @staticmethod
    def looks_like(head: bytes) -> bool:
        # The first fields: what follows them may be longer than what is looked at.
        return head.lstrip()[:1] in b"{[" and all(b'"%b"' % name in head for name in _FIRST_FIELDS)

    @staticmethod
    def read_source(source: TraceFile, name: str) -> Read:
        content = source.read(MOST_PROFILE_BYTES)
        try:
            if content.lstrip()[:1] == b"[":
                return Read(profiles=tuple(from_text(content, list[Profile])))
            if from_text(content, _Kind).schema == schema_name("profile", several=True):
                return Read(profiles=from_text(content, _Kind).rows)
            return Read(profiles=(from_text(content, Profile),))
        except FlopwiseError as error:
            raise error.within(name, hint="profile the run again: `flopwise train … --profile`") from None


class Reader(Protocol):
    """What reads a kind of file; most are modules."""

    def looks_like(self, head: bytes, /) -> bool: ...

    def read_source(self, source: TraceFile, name: str, /) -> Read: ...


READERS: tuple[Reader, ...] = (
    *(_Own(), simulated, kineto, memory_snapshot, neuron_json, neuron_text, trainer_metrics, ncu),
)
"""In the order in which they are asked; what is easily mistaken for something else comes first."""


def read_profiles(paths: Sequence[Path], tell: Tell | None = None) -> tuple[Read, ...]:
    """What every path holds: a file, the folder of a run, or a folder of traces. Ranks of one run come together too."""
    reads = tuple(read for path in paths for read in _read(path, tell))
    ranks = [profile for read in reads for profile in read.profiles if profile.format == "kineto"]
    numbers = {profile.rank for profile in ranks}
    worlds = {profile.world for profile in ranks}
    if len(ranks) < 2 or None in numbers or len(numbers) < len(ranks) or len(worlds) > 1:
        return reads
    return (Read(profiles=(kineto.ranks_together(ranks),)), *reads)


def _read(path: Path, tell: Tell | None) -> tuple[Read, ...]:
    if entry_kind(path) == "folder":
        return _read_folder(path, tell)
    with open_trace(path, tell) as source:
        head = source.head(HEAD_BYTES)
        if nsys.looks_like(head):
            return (nsys.read_path(path, path.name, tell),)
        reader = next((reader for reader in READERS if reader.looks_like(head)), None)
        if reader is None:
            raise FlopwiseError(
                f"{path.name} is nothing that a profiler writes, as far as can be told",
                why="; ".join([*source.warnings, f"known: {KINDS}"]),
                hint="look at its beginning; an .nsys-rep or .ncu-rep has to be exported first",
            )
        read = reader.read_source(source, path.name)
        # What the file itself lacks is known when all of it was read.
        late = tuple(source.warnings)
    return (replace(read, profiles=tuple(_with(profile, path, late) for profile in read.profiles)),)


def _with(profile: Profile, path: Path, warnings: tuple[str, ...]) -> Profile:
    more = tuple(warning for warning in warnings if warning not in profile.warnings)
    origin = profile.origin or (path.name,)
    return replace(profile, warnings=(*profile.warnings, *more), origin=origin)


def _read_folder(folder: Path, tell: Tell | None) -> tuple[Read, ...]:
    own = folder / PROFILE
    if entry_kind(own) == "file":
        return _read(own, tell)
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise FlopwiseError(
            f"{folder} cannot be looked into",
            why=error.strerror,
            hint="check the folder's permissions, or name a file in it",
        ) from None
    traces = [entry for entry in entries if entry.name.endswith(TRACE_ENDINGS) and "trace" in entry.name]
    if not traces:
        raise FlopwiseError(
            f"{folder} holds no profile",
            why=f"neither a {PROFILE} nor traces are in it",
            hint="`flopwise train … --profile` makes one, or name a file",
        )
    several = len(traces) > 1
    return tuple(
        replace(read, profiles=tuple(_of_folder(profile, trace, several=several) for profile in read.profiles))
        for trace in traces
        for read in _read(trace, tell)
    )


def _of_folder(profile: Profile, trace: Path, *, several: bool) -> Profile:
    """Called by the folder, which says more than that it is a trace; with the counters that lie beside it."""
    name = trace.parent.resolve().name or trace.name
    return _with_counters(replace(profile, name=f"{name} {profile.name}" if several else name), trace)


def _with_counters(profile: Profile, trace: Path) -> Profile:
    """With what was counted beside the trace, where that lies in the same folder."""
    path = trace.with_name(trace.name.replace("trace", "counters", 1).removesuffix(".gz"))
    span_s = profile.get("device_span_s")
    if span_s is None or path == trace or entry_kind(path) != "file":
        return profile
    try:
        record = read_counter_record(path)
    except FlopwiseError as error:
        return replace(profile, warnings=(*profile.warnings, error.what))
    counted = counters_values(record.counters, span_s, steps=record.steps)
    return replace(
        profile,
        device=profile.device or record.device,
        values={**profile.values, **counted},
        notes=(*profile.notes, _tracing_note(profile, record)),
    )


def _tracing_note(profile: Profile, record: CounterRecord) -> str:
    """Tracing slows a program down; by how much, steps behind it tell."""
    wall_s, seconds = profile.get("step_wall_s"), record.counters.seconds
    if record.window == "profiled" or not wall_s or not seconds or not record.steps:
        return "all steps that were timed were traced, which slows the host: the program alone may be faster"
    slower = wall_s / (seconds / record.steps)
    return f"times are those of traced steps, which took {slower:.2f} times as long as steps behind them"
