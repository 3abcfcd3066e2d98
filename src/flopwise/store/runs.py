"""The store of runs: a folder with one folder for each run, numbered from `0001`.

A run's folder holds `record.json` (what it is and how far it came), `steps.jsonl` (one line for each step),
`plan.toml`, `log.txt` and `checkpoints`; where it was profiled, `profile.json` and the trace; once it has ended,
`row.json`, which listings read. JSON has no number for
NaN or infinity, and a loss can be either: they are written as the strings "nan", "inf" and "-inf", and read back as
numbers wherever a number belongs.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.files import WRITABLE_HINT, append_to, entry_kind, json_text, open_file, read_bounded, write_whole
from flopwise.records.measurement import RunRecord, StepRecord

VARIABLE = "FLOPWISE_STORE"
"""Names the store in the environment; an argument comes before it."""
DEFAULT_FOLDER = "runs"

RECORD = "record.json"
ROW = "row.json"
STEPS = "steps.jsonl"
PLAN = "plan.toml"
LOG = "log.txt"
PROFILE = "profile.json"
LOCK = ".lock"
CHECKPOINTS = "checkpoints"
"""What a run's folder holds."""

UNFINISHED = re.compile(
    rf"\.({'|'.join(re.escape(name) for name in (RECORD, ROW, STEPS, PLAN, PROFILE))})\.[a-z0-9_]{{8}}", re.ASCII
)
"""What `write_whole` calls these files until they are whole."""

LAST = "last"
"""Stands for the newest run."""

RUN_NAME = re.compile(r"[0-9]{4,9}", re.ASCII)
"""Whatever else lies in the folder is not ours and left alone; so are longer numbers, such as dates with times."""

MOST_RECORD_BYTES = 64 * 2**20
"""Of a record, a cell, an attempt or a sweep, which are kilobytes."""
MOST_STEPS_BYTES = 2**30
"""Of a file of steps: millions of them."""
LONGEST_STEP_BYTES = 2**20
"""Of one line, which has hundreds."""
TAIL_BYTES = 2**16
"""From the end of a file of steps: far more than one line."""

NOT_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}

Decoded = TypeVar("Decoded")


def store_folder(given: str | None) -> Path:
    """Where runs are kept: as given, else as FLOPWISE_STORE says, else `runs` in the current folder."""
    return Path(given or os.environ.get(VARIABLE) or DEFAULT_FOLDER)


def new_run(store: Path) -> Path:
    """A fresh folder under the next number. Two processes that ask at once get two numbers."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        number = max(_numbers(store), default=0)
        while True:
            number += 1
            folder = store / _name(number)
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise FlopwiseError(f"there can be no run in {store}", why=error.strerror, hint=WRITABLE_HINT) from None


def _name(number: int) -> str:
    return f"{number:04d}"


def _numbers(store: Path) -> list[int]:
    """Of every entry that is called like a run, whether it is complete or not."""
    with os.scandir(store) as entries:
        names = [entry.name for entry in entries if RUN_NAME.fullmatch(entry.name)]
    return [int(name) for name in names if name == _name(int(name)) and int(name)]


def to_text(value: object, *, indent: int = 2, faithful: bool = False) -> str:
    """A dataclass or a table as JSON that keeps NaN and infinity; `from_text` reads it back. Indent 0: one line.

    `faithful`: refuse paths whose bytes are no text, which would not be read back as they are.
    """
    plain = _with_words(msgspec.to_builtins(value))
    if faithful:
        try:
            msgspec.json.encode(plain)
        except UnicodeEncodeError as error:
            raise FlopwiseError(
                f"{shown(error.object)} cannot be written down",
                why="its bytes are no UTF-8, which the files of a run are",
                hint="rename that file or folder",
            ) from None
    return json_text(plain, indent=indent)


def _with_words(value: object) -> object:
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _with_words(item) for key, item in value.items()}
    return [_with_words(item) for item in value] if isinstance(value, list | tuple) else value


def from_text(text: str | bytes, kind: type[Decoded]) -> Decoded:
    """What `to_text` wrote, checked. Raises a FlopwiseError that does not know the file: tell it with `within`."""
    try:
        # msgspec does not look at the bytes of what it passes over.
        plain = text if isinstance(text, str) else text.decode()
        return msgspec.json.decode(plain, type=kind, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, FlopwiseError):
            raise error.__cause__ from None
        raise FlopwiseError(str(error)) from None
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise FlopwiseError("it is not valid JSON", why=str(error)) from None


def write_record(folder: Path, record: RunRecord) -> None:
    """Write `record.json` whole: a reader sees the old one or the new one. The row of the old one goes first."""
    with suppress(OSError):
        (folder / ROW).unlink(missing_ok=True)
    write_whole(folder / RECORD, to_text(record, faithful=True) + "\n", own=True)


def tidy_run(folder: Path) -> None:
    """Clear away what killed processes have left of files that they were about to rename. The run must be locked."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if UNFINISHED.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                Path(entry.path).unlink(missing_ok=True)


def read_record(folder: Path) -> RunRecord:
    """A run's record; an error that says so where it was never written or is damaged."""
    try:
        record = from_text(read_bounded(folder / RECORD, MOST_RECORD_BYTES), RunRecord)
    except FlopwiseError as error:
        why = error.what if error.why is None else f"{error.what}: {error.why}"
        raise _no_record(folder, why) from None
    except OSError as error:
        raise _no_record(folder, error.strerror) from None
    # A metric may be a word as well, so that decoding alone cannot know which of them are numbers.
    if any(value in NOT_FINITE for value in record.metrics.values()):
        return replace(record, metrics={key: _number(value) for key, value in record.metrics.items()})
    return record


def _no_record(folder: Path, why: str | None) -> FlopwiseError:
    hint = "name another run, or begin a new one"
    if entry_kind(folder) != "folder":
        return FlopwiseError(f"there is no run {folder}", hint=hint)
    if entry_kind(folder / RECORD) == "nothing":
        why = "it ended before its record was written, or is no run"
        return FlopwiseError(f"{folder} holds no {RECORD}", why=why, hint=hint)
    return FlopwiseError(f"{folder / RECORD} is damaged", why=why, hint=hint)


def _number(value: float | str) -> float | str:
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def run_names(store: Path) -> list[str]:
    """Of every folder that is called like a run, by number; none where there is no store."""
    try:
        return [_name(number) for number in sorted(_numbers(store))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FlopwiseError(
            f"{store} cannot be listed", why=error.strerror, hint=f"name a folder of runs: --store, or {VARIABLE}"
        ) from None


def find_run(store: Path, name: str) -> Path:
    """A run's folder by its number, with or without zeros in front, by its path, or `last`: the newest with a record.

    What has no record yet is found by its number all the same, for its log may tell why.
    """
    if "/" in name or name in (".", ".."):
        path = Path(name)
        if entry_kind(path / RECORD) == "file":
            return path
        raise FlopwiseError(
            f"{name} is not the folder of a run",
            why=f"it holds no {RECORD}",
            hint="the folder of one run, or its number; --store FOLDER names a folder of many",
        )
    try:
        numbers = sorted(_numbers(store))
    except OSError:
        numbers = []
    is_number = name.isascii() and name.isdigit() and len(name) <= 18
    if is_number and int(name) in numbers:
        return store / _name(int(name))
    if name == LAST:
        for number in reversed(numbers):
            if entry_kind(store / _name(number) / RECORD) == "file":
                return store / _name(number)
    if name == LAST or not numbers:
        raise FlopwiseError(f"there are no runs in {store}", hint=f"--store FOLDER, or {VARIABLE}, names another store")
    hint = f"a number, a path or `{LAST}`; --store FOLDER names another store than {store}"
    if not is_number:
        raise unknown_name("run", name, [*(_name(number) for number in numbers), LAST], hint=hint)
    near = sorted(sorted(numbers, key=lambda number: abs(number - int(name)))[:3])
    why = f"nearest: {', '.join(_name(number) for number in near)}"
    raise FlopwiseError(f"there is no run {int(name)} in {store}", why=why, hint=hint)


class StepLog:
    """`steps.jsonl`, open for more: every line is in the file, whole, when `append` returns."""

    def __init__(self, folder: Path) -> None:
        """Go on behind the last whole line; half of one, of a run that was killed, is cut off."""
        self.path = folder / STEPS
        if entry_kind(self.path) not in ("file", "nothing"):
            # A pipe would be waited for, and a device takes whatever it is given.
            raise FlopwiseError(
                f"cannot write {self.path}", why="it is no file", hint="move it out of the run's folder"
            )
        try:
            self._stream = append_to(self.path)
            size_bytes = self._stream.seek(0, os.SEEK_END)
            whole_bytes = _whole_bytes(self.path, size_bytes)
            if whole_bytes < size_bytes:
                self._stream.truncate(whole_bytes)
        except OSError as error:
            raise self._error(error) from None
        self._whole_bytes = whole_bytes

    def append(self, record: StepRecord) -> None:
        """Add a step. Where the disk is full the file stays as it was."""
        line = f"{to_text(record, indent=0)}\n".encode()
        try:
            if self._stream.write(line) != len(line):
                raise OSError(0, "only a part of the line could be written")
        except OSError as error:
            # Where that fails too, half a line is left, and cut off when the run is gone on with.
            with suppress(OSError):
                self._stream.truncate(self._whole_bytes)
            raise self._error(error) from None
        self._whole_bytes += len(line)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _error(self, error: OSError) -> FlopwiseError:
        return FlopwiseError(f"cannot write {self.path}", why=error.strerror, hint=WRITABLE_HINT)


def _whole_bytes(path: Path, size_bytes: int, piece_bytes: int = 2**16) -> int:
    """Bytes up to and with the last newline, looked for from the end."""
    with path.open("rb") as stream:
        end = size_bytes
        while end:
            start = max(0, end - piece_bytes)
            stream.seek(start)
            newline = stream.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def read_steps(folder: Path) -> list[StepRecord]:
    """Every step that was written whole; none where there is no file yet."""
    steps = []
    for number, line in enumerate(_lines(folder), 1):
        try:
            steps.append(_step(line))
        except FlopwiseError as error:
            raise FlopwiseError(
                f"{folder / STEPS}: line {number:,} is damaged",
                why=error.what,
                hint="take the line out, or resume the run, which does it",
            ) from None
    return steps


def _step(line: bytes) -> StepRecord:
    if len(line) > LONGEST_STEP_BYTES:
        raise FlopwiseError(f"it is longer than {LONGEST_STEP_BYTES:,} bytes")
    return from_text(line, StepRecord)


def _lines(folder: Path) -> list[bytes]:
    """Without what follows the last newline: a line counts when it is whole."""
    path = folder / STEPS
    try:
        return read_bounded(path, MOST_STEPS_BYTES).split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FlopwiseError(f"{path} cannot be read", why=error.strerror, hint="check its permissions") from None
    except FlopwiseError as error:
        raise FlopwiseError(f"{path} cannot be read", why=error.what, hint="move it out of the run's folder") from None


def last_step(folder: Path) -> StepRecord | None:
    """The last step that was written whole, from the end of the file alone; None where there is none."""
    return next(iter(last_steps(folder, 1)), None)


def last_steps(folder: Path, most: int) -> list[StepRecord]:
    """The last steps that were written whole, as many of `most` as the end of the file holds."""
    path = folder / STEPS
    try:
        with open_file(path) as stream:
            end = stream.seek(0, os.SEEK_END)
            begin = max(0, end - TAIL_BYTES)
            stream.seek(begin)
            lines = stream.read(TAIL_BYTES).split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FlopwiseError(f"{path} cannot be read", why=error.strerror, hint="check its permissions") from None
    except FlopwiseError as error:
        raise FlopwiseError(f"{path} cannot be read", why=error.what, hint="move it out of the run's folder") from None
    # The first line of a tail is half a line, unless it is all that there is.
    whole = lines[1:] if begin and len(lines) > 1 else lines
    try:
        return [from_text(line, StepRecord) for line in whole[-most:]]
    except FlopwiseError as error:
        raise FlopwiseError(f"{path}: its last line is damaged", why=error.what, hint="look at the file") from None


def trim_steps(folder: Path, last_step: int) -> int:
    """Drop the lines of later steps, which a resumed run does again, and damaged ones. Returns how many there were."""
    path = folder / STEPS
    if entry_kind(path) == "nothing":
        return 0
    lines = _lines(folder)
    kept = [line.decode() for line in lines if _step_of(line) <= last_step]
    if len(kept) < len(lines):
        write_whole(path, "".join(f"{line}\n" for line in kept), own=True)
    return len(lines) - len(kept)


def _step_of(line: bytes) -> float:
    try:
        return _step(line).step
    except FlopwiseError:
        return float("inf")


class RunLock:
    """Held by the process that trains in a run's folder, and gone with it; a second one is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Self:
        try:
            self._stream = append_to(self.folder / LOCK)
        except OSError as error:
            raise FlopwiseError(
                f"nothing can be written to the folder of run {self.folder.name}",
                why=f"{self.folder / LOCK}: {error.strerror}",
                hint=WRITABLE_HINT,
            ) from None
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._stream.close()
            raise FlopwiseError(
                f"run {self.folder.name} is being trained by another process",
                hint="wait for its end, or stop it first",
            ) from None
        except OSError:
            # The file system has no locks: then nobody is kept out.
            pass
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def process_is_gone(folder: Path) -> bool:
    """Whether nobody holds the lock of a run; False too where there is no lock to ask, or none can be held."""
    try:
        with open_file(folder / LOCK) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, FlopwiseError):
        return False
    return True
