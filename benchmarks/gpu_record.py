"""Rows of measurements in CSV files, with what they were measured on; a run that is killed keeps what it had."""

from __future__ import annotations

import csv
import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import WRITABLE_HINT, write_whole
from flopwise.profile.measure.sampling import sampler_for
from flopwise.train.measuring import commit

Row = Mapping[str, object]
OK = "ok"
"""The outcome of what was measured."""
FORWARD_SHARE = 1 / 3
"""Of a step's time, about what its forward pass takes."""
STOPPED = 130
"""The exit code of what was interrupted from the keyboard."""


@contextmanager
def mistakes_told() -> Iterator[None]:
    """What a user can put right is told on stderr in words, and the command exits with 2.

    To be told to end is to be interrupted: what runs for this process must not outlive it.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except FlopwiseError as error:
        print(error, file=sys.stderr)
        raise SystemExit(FlopwiseError.exit_code) from None
    except KeyboardInterrupt:
        print("stopped; what was measured until now is kept", file=sys.stderr)
        raise SystemExit(STOPPED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def make_folder(folder: Path) -> None:
    """Make a folder where there is none, and refuse one that cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        why = "it is a file, not a folder" if isinstance(error, FileExistsError) else why
        raise FlopwiseError(f"cannot write into {folder}", why=why, hint=WRITABLE_HINT) from None


def provenance(device: str) -> dict[str, str]:
    """Date, commit, versions and card: the columns that every row ends with."""
    import torch

    sampler = sampler_for(device)
    cudnn = torch.backends.cudnn.version() if device == "cuda" else None  # type: ignore[no-untyped-call]
    return {
        "card": sampler.device_name or device,
        "driver": sampler.driver_version or "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": str(cudnn or ""),
        "triton": _version("triton"),
        "flash_attn_4": _version("flash-attn-4"),
        "quack_kernels": _version("quack-kernels"),
        "transformers": _version("transformers"),
        "commit": commit().get("commit", ""),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add rows at the end of a file and have them on the disk; columns that it does not have yet are added to it."""
    if not rows:
        return
    try:
        _append(path, rows)
    except OSError as error:
        print(_text(list(dict.fromkeys(name for row in rows for name in row)), rows, header=True))
        raise FlopwiseError(
            f"cannot write to {path}", why=f"{error.strerror}; the rows are printed instead", hint=WRITABLE_HINT
        ) from None


def _append(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    held = _columns(path)
    if held is not None and set(columns) <= set(held):
        columns = held
    elif held is not None:
        columns = [*held, *(name for name in columns if name not in held)]
        write_whole(path, _text(columns, read_rows(path), header=True))
    # A file that was cut off within its last line must not swallow the first row.
    cut = held is not None and not path.read_bytes().endswith(b"\n")
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write("\n" * cut + _text(columns, rows, header=held is None))
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of a file, as text; none where there is no such file."""
    if not path.exists():
        return []
    with _opened(path) as file:
        return [{name: value or "" for name, value in row.items() if name} for row in csv.DictReader(file)]


def earlier_times(folder: Path) -> dict[tuple[str, str], tuple[float, float]]:
    """Seconds beside the steps and of a step, of jobs that ended well before; the last of each counts."""
    found = {}
    for kind in ("cell", "peer"):
        for row in read_rows(folder / f"{kind}s.csv"):
            # A row that somebody has damaged foretells nothing.
            with suppress(KeyError, ValueError):
                if row["outcome"] != OK:
                    continue
                step_s, passes = float(row["step_s"]), int(row.get("warm_up_passes") or 0)
                count = int(row["steps"]) + int(row["warm_up_steps"]) + FORWARD_SHARE * passes
                alone_s = float(row["wall_s"]) + float(row.get("spared_s") or 0.0)
                found[kind, row[kind]] = (max(0.0, alone_s - count * step_s), step_s)
    return found


def _columns(path: Path) -> list[str] | None:
    if not path.exists():
        return None
    with _opened(path) as file:
        return next(csv.reader(file), None)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """A file of rows to read, or what is wrong with it."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield file
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        hint = "another --output, or move the file away"
        raise FlopwiseError(f"{path} is no table of rows", why=str(error), hint=hint) from None


def _text(columns: Sequence[str], rows: Sequence[Row], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(columns), lineterminator="\n", restval="")
    if header:
        writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in rows)
    return text.getvalue()
