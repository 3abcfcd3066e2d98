"""What the page shows of one run, read from its folder: of whatever has become of its files no more than is sound."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flopwise.base.errors import FlopwiseError

if TYPE_CHECKING:
    from flopwise.records.measurement import StepRecord
    from flopwise.records.profile import Profile
    from flopwise.report.page.data import RunDetail
    from flopwise.report.page.progress import RunProgress

MOST_STEPS_BYTES = 64 * 2**20
"""Of a file of steps: beyond it the curve is left out."""

MOST_LOG_BYTES = 2**14
MOST_LAST_STEPS = 200
"""Of a run that goes on: enough to find its last evaluation in most."""

Tell = Callable[[str], None]


def detail_of(folder: Path, tell: Tell) -> RunDetail:
    """A run's details; of one that cannot be read, why. `tell` hears of parts that are left out."""
    from flopwise.profile.explain.verdicts import verdicts
    from flopwise.report.page.data import RunDetail, run_detail
    from flopwise.store.rows import UNREADABLE
    from flopwise.store.runs import read_record

    try:
        record = read_record(folder)
    except FlopwiseError as error:
        why = error.what if error.why is None else f"{error.what}: {error.why}"
        return RunDetail(run=folder.name, model="-", state=UNREADABLE, reason=why)
    profile = _profile(folder, tell) if record.profile else None
    return run_detail(record, profile, verdicts(profile) if profile else (), _steps(folder, tell), _log(folder))


def _log(folder: Path) -> str:
    """The end of a run's log; nothing where it cannot be read."""
    from flopwise.base.files import open_file
    from flopwise.store.runs import LOG

    try:
        with open_file(folder / LOG) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - MOST_LOG_BYTES))
            return stream.read(MOST_LOG_BYTES).decode("utf-8", "replace")
    except (OSError, FlopwiseError):
        return ""


def progress_of_run(folder: Path, tell: Tell) -> RunProgress | None:
    """How far a run is that goes on; None where that cannot be read."""
    from flopwise.report.page.progress import progress_of
    from flopwise.store.runs import last_steps, read_record

    try:
        return progress_of(read_record(folder), last_steps(folder, MOST_LAST_STEPS))
    except FlopwiseError as error:
        tell(f"note: {error.what}")
        return None


def _profile(folder: Path, tell: Tell) -> Profile | None:
    from flopwise.store.rows import MOST_PROFILE_BYTES, read_profile
    from flopwise.store.runs import PROFILE

    profile = read_profile(folder)
    if profile is None and (folder / PROFILE).is_file():
        tell(f"note: {folder / PROFILE}: it is damaged, or larger than {MOST_PROFILE_BYTES / 2**20:.0f} MiB")
    return profile


def _steps(folder: Path, tell: Tell) -> list[StepRecord]:
    from flopwise.base.files import entry_kind
    from flopwise.store.runs import STEPS, read_steps

    path = folder / STEPS
    # Whatever else has taken the file's place could be waited for without end.
    if entry_kind(path) != "file":
        return []
    try:
        if path.stat().st_size > MOST_STEPS_BYTES:
            tell(f"note: {path}: it is larger than {MOST_STEPS_BYTES / 2**20:.0f} MiB")
            return []
        return read_steps(folder)
    except FlopwiseError as error:
        tell(f"note: {error.what}")
    except OSError as error:
        tell(f"note: {path}: {error.strerror}")
    return []
