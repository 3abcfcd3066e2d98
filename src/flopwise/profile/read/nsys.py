"""Nsight Systems' SQLite export: what ran on every GPU, when it was handed over, steps, sampled counters.

The database is somebody else's: it is opened read-only, only plain tables of it are looked at (a view or a virtual
table of the right name would run what its author wrote), and only the statements below are allowed to run. Tables
exist only where something was recorded and columns come and go with versions, so both are looked up first.
"""

from __future__ import annotations

import re
import sqlite3
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

import numpy as np

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import show_seconds
from flopwise.profile.explain.activity import (
    UNKNOWN_BYTES,
    Activity,
    ActivityBuilder,
    Numbers,
    rows,
    summarize,
    timeline_of,
)
from flopwise.profile.explain.kernel_classes import class_of
from flopwise.profile.read.kineto_devices import number_format_of, peaks_of
from flopwise.profile.read.opening import Tell
from flopwise.records.profile import Profile, Read, SourcedValue

MAGIC = b"SQLite format 3\0"
ROWS_AT_A_TIME = 20_000
MOST_ROWS = 30_000_000
MOST_DEVICES = 256
MOST_NAME = 4000
MOST_TIME_NS = 2**50
"""Thirteen days; times count from the beginning of the recording."""
MOST_MESSAGES = 5

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_STEP = re.compile(
    r"(profiler|global|train(?:ing)?)?[\s_.-]*(step|iter|iteration)s?(?P<number>[\s_#:=([-]*\d+[\s)\]]*)?",
    re.IGNORECASE,
)
_SAMPLED = {
    "matrix": "Tensor Active",
    "read": "DRAM Read Bandwidth",
    "write": "DRAM Write Bandwidth",
    "units": "SMs Active",
    "clock": "GPC Clock Frequency",
}
_DAMAGE = (sqlite3.Error, UnicodeDecodeError)
"""The latter where the database's own words, in an error of SQLite, are no text."""
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)


def looks_like(head: bytes) -> bool:
    """Whether a file that begins so is a SQLite database."""
    return head.startswith(MAGIC)


def read_path(path: Path, name: str, tell: Tell | None = None) -> Read:
    """A profile for each GPU that something ran on."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
        connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    except (OSError, ValueError, sqlite3.Error) as error:
        raise FlopwiseError(f"{name} cannot be opened", why=str(error), hint="name an export of nsys") from None
    with closing(connection):
        if not looks_like(head):
            raise FlopwiseError(f"{name} is no SQLite database", hint="is it packed, or encrypted? Unpack it first")
        database = _Database(connection, name)
        trace = _Trace(database)
        for number, table in enumerate((KERNELS, COPIES, FILLS, GRAPHS)):
            trace.read(table)
            if tell is not None:
                tell(f"reading {name}", (number + 1) * size // 5, size)
        if not trace.builders:
            raise _nothing(name, database)
        steps = _steps(database)
        profiles = [_profile(name, trace, gpu, steps, database) for gpu in sorted(trace.builders)]
        if tell is not None:
            tell(f"reading {name}", size, size)
    return Read(profiles=tuple(profiles))


def _nothing(name: str, database: _Database) -> FlopwiseError:
    known = ", ".join(sorted(database.tables)[:6])
    return FlopwiseError(
        f"{name} holds no activity of a GPU",
        why="; ".join(database.warnings) or f"its tables: {known or 'none'}",
        hint="nsys profile --trace=cuda,nvtx …, then nsys export --type sqlite",
    )


class _Database:
    """Somebody else's database: its plain tables, read row by row, damage as warnings."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self.warnings: list[str] = []
        self.tables: dict[str, frozenset[str]] = {}
        """Columns by table."""
        self._connection = connection
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        try:
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA cell_size_check=ON")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2**24)
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            try:
                plain = self._plain_tables()
            except _DAMAGE as error:
                # A file shorter than it says is refused unless its schema may be written; nothing here can write.
                connection.execute("PRAGMA writable_schema=ON")
                plain = self._plain_tables()
                self.warnings.append(f"the database is cut off or damaged: {error}")
            for table in plain:
                columns = connection.execute(f"PRAGMA table_info({table})").fetchmany(2000)
                self.tables[table] = frozenset(str(column[1]) for column in columns)
        except _DAMAGE as error:
            raise FlopwiseError(
                f"{name} cannot be read as a database",
                why=str(error),
                hint="export it again: nsys export --type sqlite",
            ) from None
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)

    def _plain_tables(self) -> list[str]:
        # A virtual table has no page of its own.
        found = self._connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND rootpage > 0")
        return [
            table
            for table, sql in found.fetchmany(10_000)
            if isinstance(table, str) and isinstance(sql, str)
            if re.fullmatch(r"\w{1,100}", table) and re.match(r"CREATE TABLE\b", sql, re.IGNORECASE)
        ]

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is such a table with all these columns."""
        return self.tables.get(table, frozenset()).issuperset(columns) and table in self.tables

    def rows(
        self, table: str, *columns: str, where: str = "", given: tuple[int, ...] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """Rows of a table, None for a column that it does not have; none where there is no such table."""
        for batch in self.batches(table, *columns, where=where, given=given):
            yield from batch

    def batches(
        self, table: str, *columns: str, where: str = "", given: tuple[int, ...] = ()
    ) -> Iterator[list[tuple[Any, ...]]]:
        """The same, many rows at a time."""
        if table not in self.tables:
            return
        known = self.tables[table]
        asked = ", ".join(f'"{column}"' if column in known else "NULL" for column in columns)
        done = 0
        batch: list[tuple[Any, ...]] = []
        try:
            # Table and columns are among those of this module's own statements.
            cursor = self._connection.execute(f"SELECT {asked} FROM {table} {where}", given)  # noqa: S608
            # One by one: of many fetched at once, those before the damage would be lost.
            for row in islice(cursor, MOST_ROWS):
                done += 1
                batch.append(row)
                if len(batch) == ROWS_AT_A_TIME:
                    yield batch
                    batch = []
        except _DAMAGE as error:
            self.warnings.append(f"{table} could be read in part only, {done} rows: {error}")
        if batch:
            yield batch
        if done >= MOST_ROWS:
            self.warnings.append(f"only the first {MOST_ROWS} rows of {table} were read")

    def strings(self, table: str, column: str) -> dict[int, str]:
        """The texts that a column points at."""
        if not self.has(table, column):
            return {}
        where = f'WHERE id IN (SELECT "{column}" FROM {table})'  # noqa: S608 - see `batches`
        found = self.rows("StringIds", "id", "value", where=where) if self.has("StringIds", "id", "value") else ()
        return {number: text[:MOST_NAME] for number, text in found if type(number) is int and isinstance(text, str)}


def _time(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST_TIME_NS else None


def _process(global_id: object) -> int:
    """The process in a `globalTid` or `globalPid`; 0 where there is none."""
    return (global_id >> 24) & 0xFFFFFF if type(global_id) is int else 0


@dataclass(slots=True)
class _Trace:
    """All that ran, by GPU."""

    database: _Database
    builders: dict[int, ActivityBuilder] = field(default_factory=dict)
    processes: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """Of each GPU: who ran how much on it."""
    graphs: int = 0
    _gpus: dict[tuple[int, int], int] | None = None
    _launches: _Launches | None = None

    def read(self, table: str) -> None:
        column = "demangledName" if self.database.has(table, "demangledName") else "shortName"
        names = self.database.strings(table, column)
        odd = 0
        columns = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes", "copyKind", column)
        for batch in self.database.batches(table, *columns):
            launched = self._launch_times(batch)
            for row, launch in zip(batch, launched, strict=True):
                start, end, device, stream = _time(row[0]), _time(row[1]), row[2], row[3]
                device = 0 if device is None else device
                if start is None or end is None or end < start or type(device) is not int or not 0 <= device < 2**16:
                    odd += 1
                    continue
                builder = self._builder(_process(row[5]), device)
                if builder is None:
                    odd += 1
                    continue
                stream = stream if type(stream) is int and abs(stream) < 2**62 else 0
                if table == KERNELS:
                    kernel = names.get(row[8]) or "(kernel without a name)"
                    builder.add(kernel, class_of(kernel), start, end, stream=stream, launch_ns=launch)
                elif table == GRAPHS:
                    self.graphs += 1
                    builder.add("CUDA graph", "other", start, end, stream=stream, launch_ns=launch)
                else:
                    kind = "Memset" if table == FILLS else f"Memcpy {_COPY_KINDS.get(row[7], 'other')}"
                    moved = row[6] if type(row[6]) is int and 0 <= row[6] < 2**60 else UNKNOWN_BYTES
                    category = "gpu_memset" if table == FILLS else "gpu_memcpy"
                    kernel_class = class_of(kind, category=category)
                    builder.add(kind, kernel_class, start, end, stream=stream, moved_bytes=moved, launch_ns=launch)
        if odd:
            self.database.warnings.append(f"{odd} rows of {table} make no sense and are left out")

    def _builder(self, process: int, device: int) -> ActivityBuilder | None:
        """A process numbers the GPUs that it sees from 0; the file says which ones those are."""
        if self._gpus is None:
            self._gpus = {}
            for gpu, ordinal, owner in self.database.rows("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid"):
                if type(gpu) is int and type(ordinal) is int and 0 <= gpu < 2**16 and len(self._gpus) < 10**5:
                    self._gpus[owner if type(owner) is int else 0, ordinal] = gpu
        gpu = self._gpus.get((process, device), self._gpus.get((0, device), device))
        if gpu not in self.builders and len(self.builders) >= MOST_DEVICES:
            return None
        self.processes[gpu][process] += 1
        return self.builders.setdefault(gpu, ActivityBuilder())

    def _launch_times(self, batch: list[tuple[Any, ...]]) -> list[int]:
        """When the host handed each row over; -1: not said."""
        if self._launches is None:
            self._launches = _Launches.of(self.database)
        return self._launches.times([(row[5], row[4]) for row in batch])


@dataclass(frozen=True, slots=True)
class _Launches:
    """When the host called for what ran, by process and correlation number."""

    keys: Numbers
    starts_ns: Numbers
    by_process: bool
    """Whether the file says which process called."""

    @classmethod
    def of(cls, database: _Database) -> _Launches:
        keys, starts = array("q"), array("q")
        by_process = database.has(LAUNCHES, "globalTid") and database.has(KERNELS, "globalPid")
        for correlation, start, thread in database.rows(LAUNCHES, "correlationId", "start", "globalTid"):
            key, begun = _launch_key(thread if by_process else None, correlation), _time(start)
            if key >= 0 and begun is not None:
                keys.append(key)
                starts.append(begun)
        order = np.argsort(np.array(keys, dtype=np.int64), kind="stable")
        return cls(np.array(keys, dtype=np.int64)[order], np.array(starts, dtype=np.int64)[order], by_process)

    def times(self, called: list[tuple[object, object]]) -> list[int]:
        """For (process, correlation number) each: the time, or -1."""
        if not len(self.keys):
            return [-1] * len(called)
        wanted = np.array(
            [_launch_key(process if self.by_process else None, number) for process, number in called], dtype=np.int64
        )
        places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        found: list[int] = np.where(self.keys[places] == wanted, self.starts_ns[places], -1).tolist()
        return found


def _launch_key(global_id: object, correlation: object) -> int:
    """Correlation numbers are a process's own."""
    if type(correlation) is not int or not 0 <= correlation < 2**32:
        return -1
    return _process(global_id) << 32 | correlation


@dataclass(frozen=True, slots=True)
class _Steps:
    """Ranges of one name on one thread, one after the other."""

    name: str
    process: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def window(self) -> tuple[int, int]:
        return self.ranges[0][0], self.ranges[-1][1]


def _steps(database: _Database) -> list[_Steps]:
    """What may be steps, the longest stretch first."""
    texts = database.strings("NVTX_EVENTS", "textId")
    groups: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for start, end, text, number, thread in database.rows("NVTX_EVENTS", "start", "end", "text", "textId", "globalTid"):
        name = (text if isinstance(text, str) else texts.get(number, "")).strip()
        match = _STEP.fullmatch(name) if len(name) < 100 else None
        begun, ended = _time(start), _time(end)
        if match is None or begun is None or ended is None or ended <= begun:
            continue
        base = name[: match.start("number")] if match["number"] else name
        groups[base, thread if type(thread) is int else 0].append((begun, ended))
    found = []
    for (base, thread), ranges in groups.items():
        ranges.sort()
        apart = all(before[1] <= after[0] for before, after in pairwise(ranges))
        if len(ranges) > 1 and apart:
            found.append(_Steps(base, _process(thread), tuple(ranges)))
    return sorted(found, key=lambda steps: steps.window[0] - steps.window[1])


def _in_steps(steps: list[_Steps], processes: Counter[int], activity: Activity) -> tuple[_Steps | None, Activity]:
    """The steps of a process that uses the GPU, and what was launched in them: it may run later.

    Of what nobody knows the launch, what ran in them. Without steps: everything.
    """
    for each in [each for each in steps if each.process in processes] or steps:
        begin, end = each.window
        launched = (activity.launch_ns >= begin) & (activity.launch_ns < end)
        ran = (activity.start_ns >= begin) & (activity.end_ns <= end)
        chosen = np.where(activity.launch_ns >= 0, launched, ran)
        if chosen.any():
            return each, rows(activity, chosen)
    return None, activity


def _profile(name: str, trace: _Trace, gpu: int, steps: list[_Steps], database: _Database) -> Profile:
    chosen, activity = _in_steps(steps, trace.processes[gpu], trace.builders[gpu].build())
    count = None if chosen is None else len(chosen.ranges)
    summary = summarize(activity, steps=count)
    span_s = summary.values["device_span_s"].value
    wall, notes = _wall(chosen, span_s)
    if trace.graphs:
        notes.append("CUDA graphs were recorded as a whole (nsys --cuda-graph-trace=node shows their kernels)")
    card = _card(database, gpu)
    number_format = number_format_of(activity, {})
    peaks, why_none = peaks_of(card.name, number_format)
    notes += [why_none] if why_none else []
    means = _average_samples(database, gpu, (int(activity.start_ns.min()), int(activity.end_ns.max())))
    bandwidth = card.bandwidth if peaks is None else peaks.bandwidth
    several = len(trace.builders) > 1
    return Profile(
        name=f"{name} GPU {gpu}" if several else name,
        format="nsys",
        origin=(name,),
        device=card.name,
        precision=number_format,
        steps=count,
        peaks=peaks,
        values=summary.values | wall | _counters(means, span_s, bandwidth),
        classes=summary.classes,
        kernels=summary.kernels,
        timeline=timeline_of(activity, () if chosen is None else chosen.ranges),
        memory_capacity_bytes=card.memory_bytes,
        system=_system(database),
        notes=tuple(notes),
        warnings=(*dict.fromkeys(database.warnings), *_messages(database)),
    )


def _wall(steps: _Steps | None, span_s: float) -> tuple[dict[str, SourcedValue], list[str]]:
    """A step's time as the host has it, where it is one, and what there is to say of the steps."""
    if steps is None:
        return {}, ["no NVTX ranges named like steps are in it: figures are those of the whole recording"]
    lengths = [end - start for start, end in steps.ranges]
    notes = [f"steps are the {len(lengths)} NVTX ranges {steps.name!r}"]
    if max(lengths) > 2 * median(lengths):
        longest, middle = show_seconds(max(lengths) / 1e9), show_seconds(median(lengths) / 1e9)
        notes.append(f"the longest step took {longest}, the middle one {middle}: is a warm-up among them?")
    wall_s = (steps.window[1] - steps.window[0]) / 1e9 / len(lengths)
    if wall_s < span_s:
        notes.append("the host was through with its ranges before the device was: they are no step's wall time")
        return {}, notes
    return {"step_wall_s": SourcedValue(wall_s, "ingested")}, notes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Card:
    name: str | None = None
    memory_bytes: float | None = None
    bandwidth: float | None = None


def _card(database: _Database, gpu: int) -> _Card:
    """What the file says of a GPU."""
    columns = ("id", "name", "totalMemory", "memoryBandwidth")
    for number, name, memory, bandwidth in database.rows("TARGET_INFO_GPU", *columns):
        if number == gpu and isinstance(name, str) and name.strip():
            return _Card(
                name=name.strip()[:200],
                memory_bytes=float(memory) if type(memory) is int and 2**20 < memory < 2**50 else None,
                bandwidth=float(bandwidth) if type(bandwidth) is int and 1e9 < bandwidth < 1e15 else None,
            )
    return _Card()


def _average_samples(database: _Database, gpu: int, window: tuple[int, int]) -> dict[str, float]:
    """Means of what was sampled on the GPU itself within the window, under the short names of `_SAMPLED`."""
    wanted: dict[tuple[int, int], str] = {}
    for kind, metric, name in database.rows("TARGET_INFO_GPU_METRICS", "typeId", "metricId", "metricName"):
        # The GPU's number is the lowest byte of the type.
        if type(kind) is int and type(metric) is int and isinstance(name, str) and kind & 0xFF == gpu:
            # "Tensor Active / FP16 Active" counts more than the matrix unit.
            found = next((short for short, full in _SAMPLED.items() if name.startswith(full) and "/" not in name), None)
            if found is not None:
                wanted[kind, metric] = found
    sums: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    if wanted and database.has("GPU_METRICS", "timestamp", "typeId", "metricId", "value"):
        columns, where = ("typeId", "metricId", "value"), "WHERE timestamp >= ? AND timestamp <= ?"
        for kind, metric, value in database.rows("GPU_METRICS", *columns, where=where, given=window):
            found = wanted.get((kind, metric))
            if found is not None and isinstance(value, int | float) and 0 <= value < 1e12:
                sums[found] += value
                counts[found] += 1
    return {name: sums[name] / counts[name] for name in counts}


def _counters(means: dict[str, float], span_s: float, bandwidth: float | None) -> dict[str, SourcedValue]:
    """What the samples say of a step."""
    shares = {name: mean / 100 for name, mean in means.items() if name != "clock" and mean <= 100}
    values: dict[str, SourcedValue] = {}
    if clock := means.get("clock"):
        values["clock_mean_hz"] = SourcedValue(clock * 1e6 if clock < 1e5 else clock, "ingested")
    if "matrix" in shares:
        values["matrix_active_s"] = SourcedValue(shares["matrix"] * span_s, "ingested")
    if "units" in shares:
        values["unit_share"] = SourcedValue(shares["units"], "ingested")
    if "read" in shares and "write" in shares:
        values["mbu"] = SourcedValue(shares["read"] + shares["write"], "ingested")
    for name, share in (("hbm_read_bytes", shares.get("read")), ("hbm_write_bytes", shares.get("write"))):
        if share is not None and bandwidth is not None:
            values[name] = SourcedValue(share * bandwidth * span_s, "modelled")
    return values


def _system(database: _Database) -> dict[str, str]:
    system = {}
    for name, value in database.rows("META_DATA_EXPORT", "name", "value", where="LIMIT 200"):
        if name in ("EXPORT_SCHEMA_VERSION", "EXPORT_PRODUCT_VERSION"):
            system[f"nsys.{name.lower()}"] = str(value)[:100]
    return system


def _messages(database: _Database) -> list[str]:
    """What nsys itself says went wrong: warnings and errors."""
    found = database.rows("DIAGNOSTIC_EVENT", "severity", "text", where="LIMIT 10000")
    texts = dict.fromkeys(
        " ".join(text.split())[:200]
        for severity, text in found
        if isinstance(text, str) and type(severity) is int and severity >= 2
    )
    return [f"nsys: {text}" for text in list(texts)[:MOST_MESSAGES]]
