"""Every run of a store as a row, fast: `.index.json` keeps the rows of runs that have ended.

The index is a cache and nothing more. A row counts while the run's files have the size, the time and the place that
they had; a store that cannot be written to, or an index that is damaged, costs time and never an answer.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import opened_file, read_bounded, write_whole
from flopwise.records.measurement import RunRecord, StepRecord
from flopwise.records.profile import Profile
from flopwise.store import cells as sweep
from flopwise.store import results
from flopwise.store.results import FIELDS, Result, result_of_run
from flopwise.store.runs import LOCK, PROFILE, RECORD, RUN_NAME, STEPS, VARIABLE, Listed, from_text, read_record

INDEX = ".index.json"
LAYOUT = 1
"""Of the index; another one is made anew."""
MOST_INDEX_BYTES = 512 * 2**20
MOST_PROFILE_BYTES = 64 * 2**20
"""A larger profile is left alone: a row needs four numbers of it."""
WORTH_WRITING_BYTES = 2**18
"""So much must have been read anew for the index to be written: a small store needs none."""
FEW_RUNS = 16
"""So many are read faster than an index of thousands."""
TAIL_BYTES = 2**16
"""From the end of a file of steps: far more than one line."""
UNREADABLE = "unreadable"

Judge = Callable[[Profile], str | None]
Mark = tuple[int, int, int]
"""Of a file: time, size, place; all 0 where there is none."""
NO_FILE: Mark = (0, 0, 0)
UNSEEN = "unseen"
"""Stands for the judge of a row whose run has a profile that was not looked at."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """A run as listings need it, with what its row of results leaves out."""

    name: str
    values: tuple[Any, ...]
    """Of the row, under `FIELDS`."""
    run_state: str
    task: str | None = None
    steps_done: int = 0
    steps_asked: int = 0
    ended: str | None = None
    problem: str | None = None
    """Why its record cannot be read."""
    origin: object = field(default=None, compare=False, repr=False)
    """The same object for as long as the index that it comes from stands; None: it was read just now."""

    def get(self, field: str) -> Any:  # noqa: ANN401 - as the field's type is
        return self.values[PLACES[field]]

    @property
    def result(self) -> Result:
        return Result(**dict(zip(FIELDS, self.values, strict=True)))


PLACES = {name: place for place, name in enumerate(FIELDS)}

_Values: Any = msgspec.defstruct("_Values", list(get_type_hints(Result).items()), array_like=True)


class _Entry(msgspec.Struct, array_like=True):
    record: Mark
    profile: Mark
    judge: str
    run_state: str
    task: str | None
    steps_done: int
    steps_asked: int
    ended: str | None
    values: _Values


class _Index(msgspec.Struct):
    layout: int
    maker: str
    fields: list[str]
    runs: dict[str, _Entry]


def indexed_runs(
    store: Path, names: Iterable[str] | None = None, *, judge: Judge | None = None, profiles: bool = True
) -> list[Indexed]:
    """Runs by their number: all, or those of these names that are there. Without `profiles` none is looked at."""
    found = run_names(store) if names is None else sorted(set(names), key=int)
    is_few = names is not None and len(found) <= FEW_RUNS
    kept = {} if is_few else _read_index(store)
    wanted = judge_mark(judge) if profiles else UNSEEN
    entries: dict[str, _Entry] = {}
    runs: list[Indexed] = []
    fresh_bytes = 0
    root = os.fspath(store)
    for name in found:
        folder = f"{root}/{name}"
        record, profile = mark_of(f"{folder}/{RECORD}"), mark_of(f"{folder}/{PROFILE}")
        entry = kept.get(name)
        if entry is None or entry.record != record or entry.profile != profile or not _serves(entry, wanted):
            run, entry = _fresh(Path(folder), record, profile, judge if profiles else None, wanted)
            fresh_bytes += (record[1] + (profile[1] if profiles else 0)) if entry else 0
        else:
            run = _from_entry(name, entry)
        runs.append(run)
        if entry is not None:
            entries[name] = entry
    if fresh_bytes >= WORTH_WRITING_BYTES and not is_few:
        _write_index(store, entries if names is None else kept | entries)
    return runs


def run_names(store: Path) -> list[str]:
    """Of every folder that is called like a run, by number; none where there is no store."""
    try:
        with os.scandir(store) as entries:
            names = [entry.name for entry in entries if RUN_NAME.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FlopwiseError(
            f"{store} cannot be listed", why=error.strerror, hint=f"name a folder of runs: --store, or {VARIABLE}"
        ) from None
    return sorted((name for name in names if int(name) and name == f"{int(name):04d}"), key=int)


def judge_mark(judge: Judge | None) -> str | None:
    """The name that rows are kept under; None: it has none of its own, and its rows are not kept."""
    if judge is None:
        return ""
    name = f"{getattr(judge, '__module__', '?')}.{getattr(judge, '__qualname__', '<>')}"
    return None if "<" in name else name


def _serves(entry: _Entry, wanted: str | None) -> bool:
    return entry.profile == NO_FILE or wanted in (UNSEEN, entry.judge)


def mark_of(path: str) -> Mark:
    """As a file is now, without opening it."""
    try:
        found = os.stat(path)  # noqa: PTH116 - a path object for each of 10,000 runs takes longer than the call
    except OSError:
        return NO_FILE
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _from_entry(name: str, entry: _Entry) -> Indexed:
    return Indexed(
        name,
        msgspec.structs.astuple(entry.values),
        entry.run_state,
        entry.task,
        entry.steps_done,
        entry.steps_asked,
        entry.ended,
        origin=entry.values,
    )


def _fresh(
    folder: Path, record_mark: Mark, profile_mark: Mark, judge: Judge | None, wanted: str | None
) -> tuple[Indexed, _Entry | None]:
    """A run as its files say now; an entry too where it may be kept."""
    try:
        record = read_record(folder)
    except FlopwiseError as error:
        problem = error.what if error.why is None else f"{error.what}: {error.why}"
        return _without_record(folder, problem), None
    looked = profile_mark != NO_FILE and wanted != UNSEEN
    profile = read_profile(folder) if looked else None
    row = replace(result_of_run(record, profile, judge(profile) if judge and profile else None), run=folder.name)
    run = _indexed(folder.name, record, row)
    if record.state == "running" or (looked and wanted is None):
        return run, None
    values = _Values(*run.values)
    steps = (record.steps_done, record.training.steps)
    return run, _Entry(record_mark, profile_mark, wanted or "", record.state, record.task, *steps, record.ended, values)


def indexed(listed: Listed) -> Indexed:
    """A run that was read already."""
    if listed.record is None:
        return _without_record(listed.folder, listed.problem)
    return _indexed(listed.folder.name, listed.record, result_of_run(listed.record))


def _indexed(name: str, record: RunRecord, row: Result) -> Indexed:
    values = tuple(getattr(row, field) for field in FIELDS)
    return Indexed(name, values, record.state, record.task, record.steps_done, record.training.steps, record.ended)


def _without_record(folder: Path, problem: str) -> Indexed:
    row = Result(cell=None, run=folder.name, state=UNREADABLE, reason=problem)
    return Indexed(folder.name, tuple(getattr(row, field) for field in FIELDS), UNREADABLE, problem=problem)


def read_profile(folder: Path) -> Profile | None:
    """A run's own profile; None where there is none that can be read."""
    path = folder / PROFILE
    try:
        return from_text(read_bounded(path, MOST_PROFILE_BYTES), Profile)
    except (OSError, FlopwiseError):
        return None


def last_step(folder: Path) -> StepRecord | None:
    """The last step that was written whole, from the end of the file alone; None where there is none."""
    path = folder / STEPS
    try:
        with opened_file(path) as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, end - TAIL_BYTES))
            lines = stream.read(TAIL_BYTES).split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FlopwiseError(f"{path} cannot be read", why=error.strerror, hint="check its permissions") from None
    except FlopwiseError as error:
        raise FlopwiseError(f"{path} cannot be read", why=error.what, hint="move it out of the run's folder") from None
    if not lines:
        return None
    try:
        return from_text(lines[-1], StepRecord)
    except FlopwiseError as error:
        raise FlopwiseError(f"{path}: its last line is damaged", why=error.what, hint="look at the file") from None


def process_is_gone(folder: Path) -> bool:
    """Whether nobody holds the lock of a run; False too where there is no lock to ask, or none can be held."""
    try:
        with opened_file(folder / LOCK) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, FlopwiseError):
        return False
    return True


# -- the file --------------------------------------------------------------------------------------------------------


_REMEMBERED: dict[str, tuple[Mark, dict[str, _Entry]]] = {}
"""The index that was read last, for a process that reads it again and again; nobody changes what it holds."""


def _maker() -> str:
    """The version that makes the rows, and when the code that does it last changed: a checkout keeps its version."""
    version = sys.modules[__name__.partition(".")[0]].__version__
    return " ".join([version, *(str(mark_of(str(part.__file__))[0]) for part in (results, sweep))])


def is_ours(path: Path) -> bool:
    """A plain file of a size that can be read: a link might lead anywhere, and a pipe never ends."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= MOST_INDEX_BYTES


Index = TypeVar("Index")
Entry = TypeVar("Entry")


def read_remembered(
    path: Path,
    kind: type[Index],
    entries: Callable[[Index], dict[str, Entry]],
    memory: dict[str, tuple[Mark, dict[str, Entry]]],
) -> dict[str, Entry]:
    """What an index holds: from memory where the file is the one that was read last, nothing where it is damaged."""
    if not is_ours(path):
        return {}
    mark, place = mark_of(os.fspath(path)), os.path.realpath(path)
    if place in memory and memory[place][0] == mark:
        return memory[place][1]
    try:
        found = msgspec.json.decode(read_bounded(path, MOST_INDEX_BYTES), type=kind, strict=False)
    except (OSError, FlopwiseError, msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return {}
    memory.clear()
    memory[place] = (mark, entries(found))
    return memory[place][1]


def _read_index(store: Path) -> dict[str, _Entry]:
    return read_remembered(store / INDEX, _Index, _current, _REMEMBERED)


def _current(index: _Index) -> dict[str, _Entry]:
    """Its rows, if this version made them."""
    is_current = index.layout == LAYOUT and index.maker == _maker() and tuple(index.fields) == FIELDS
    return index.runs if is_current else {}


def _write_index(store: Path, entries: dict[str, _Entry]) -> None:
    path = store / INDEX
    if (path.is_symlink() or path.exists()) and not is_ours(path):
        return
    # JSON has no number for NaN and infinity: as everywhere in the store they are words.
    runs = {name: _with_words(msgspec.structs.astuple(entry)) for name, entry in entries.items()}
    index = {"layout": LAYOUT, "maker": _maker(), "fields": FIELDS, "runs": runs}
    try:
        write_whole(path, msgspec.json.encode(index).decode())
    except FlopwiseError:
        # The rows were read all the same.
        return


def _with_words(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    values = [
        str(value) if type(value) is float and not isfinite(value) else value
        for value in msgspec.structs.astuple(entry[-1])
    ]
    return (*entry[:-1], values)
