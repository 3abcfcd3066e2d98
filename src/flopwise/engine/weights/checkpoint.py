"""Checkpoints of a run: complete or not there at all, checked before they are used, never unpickled.

`checkpoints/step-00000012` of a run's folder holds `model.safetensors`, `optimizer.safetensors`, `state.json` and,
where the caller has one, `config.json`. It is written under a temporary name and renamed when everything is on the
disk, so that a process killed at any moment leaves the checkpoint before or the new one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.files import WRITABLE_HINT, append_to, entry_kind, to_json
from flopwise.engine.weights.tensor_files import open_tensors, tensor_file
from flopwise.setup.training import Training
from flopwise.store.runs import CHECKPOINTS, from_text, to_text

FORMAT = 2
"""1 did not say whether its numbers are finite."""
WEIGHTS = "model.safetensors"
ADAPTERS = "adapter_model.safetensors"
"""In its place where adapters alone are trained, under PEFT's names."""
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
CONFIG = "config.json"
STATE = "state.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json"),
)
GENERATION = "generation_config.json"
HANDED_ON = (*TOKENIZER_FILES, GENERATION, ADAPTER_CONFIG)
"""What a checkpoint may hold beside them: files of the model that it was made of, as they came."""

NAME = re.compile(r"(?:\.replaced-)?step-([0-9]{8,})")
REPLACED = ".replaced-"
"""Stands before the name of a checkpoint while another takes its place; without that other one it is still good."""
REMOVED = ".removed-"
UNFINISHED = ".step-"
LOCK = ".lock"
LOCK_WAIT_S = 600.0

SEAL_START = b'{\n  "seal": "'
"""How `state.json` begins. The checksum of all that follows it comes next."""
SEAL_DIGITS = 64

NAMED = 8
"""Tensors that are not finite which a state names."""

LABELS = ("name", "title", "source", "note", "family")
"""Fields of a description that may differ: they change no number."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """What a file of a checkpoint must be."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """`state.json`: where a training stood, and what it was a training of."""

    step: int
    """Steps done."""
    position: int
    """Sequences consumed of the data's endless order."""
    model: dict[str, Any]
    """The description's table."""
    training: Training
    data: dict[str, Any]
    """What it is trained on; where it has a `fingerprint`, that alone tells whether it is the same."""
    precision: str
    batch_sequences: int
    sequence_tokens: int
    totals: dict[str, float]
    """Running sums that the loop wants back."""
    files: dict[str, FileSum]
    """By name; filled in by `save`."""
    not_finite: tuple[str, ...]
    """What holds NaN or infinity: the first such tensors, which `save` adds, and figures of the evaluation. Empty where
    there are none; else nothing can be gone on with from here, and it is kept for those who look for the cause."""
    format: int = FORMAT


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of a file by name, on the host; each is read when it is asked for. Changing one changes no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_tensors(path)
            self._names: tuple[str, ...] = tuple(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise _damaged(path, str(error)) from None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self.path, str(error)) from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint whose files are as they were written."""

    state: CheckpointState
    weights: LazyTensors
    optimizer: LazyTensors


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint of a run's folder, looked at without reading its tensors."""

    path: Path
    step: int
    problem: str = ""
    """Why it cannot be used; empty where it is complete and its numbers are finite."""


def save(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: CheckpointState,
    config: dict[str, Any] | None,
    keep: int,
    handed_on: Mapping[str, bytes] | None = None,
    best: int | None = None,
) -> Path:
    """Write a checkpoint of `state.step` into a run's folder and remove old ones, so that the `keep` newest are left,
    and that of step `best`.

    One with numbers that are not finite says so (`CheckpointState.not_finite`), and takes no other one's place. Tensors
    may be views, lie on a device and have any of `tensor_files.DTYPES`. `handed_on` are further files, by name. One
    that is there for the step already is replaced. Where it cannot be written, the error says why and the checkpoints
    from before are as they were.
    """
    if keep < 1:
        raise FlopwiseError(f"{keep} checkpoints cannot be kept", hint="keep at least 1")
    parent = folder / CHECKPOINTS
    target = path_of(folder, state.step)
    temporary = parent / f".{target.name}-{os.getpid()}"
    try:
        parent.mkdir(exist_ok=True)
        with _lock(parent):
            _tidy(parent)
            try:
                temporary.mkdir()
                texts = {} if config is None else {CONFIG: to_json(config).encode() + b"\n"}
                _write(temporary, weights, optimizer, state, {**texts, **(handed_on or {})})
                _put(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            _sync_folder(folder)
            _prune(folder, state.step, keep, best)
    except OSError as error:
        raise _unwritable(target, error) from None
    return target


def save_model(target: Path, *, weights: Mapping[str, Tensor], texts: Mapping[str, bytes]) -> Path:
    """Write a model that others can load into a folder of its own: whole, or not at all."""
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        temporary.mkdir()
        try:
            _write_file(temporary / WEIGHTS, tensor_file(weights, []))
            for name, content in texts.items():
                _write_file(temporary / name, iter([content]))
            _put(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise _unwritable(target, error) from None
    return target


def path_of(folder: Path, step: int) -> Path:
    """Where a run's folder has the checkpoint of a step."""
    return folder / CHECKPOINTS / f"step-{step:08d}"


def _write(
    folder: Path,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: CheckpointState,
    others: Mapping[str, bytes],
) -> None:
    bad: list[str] = []
    name = ADAPTERS if ADAPTER_CONFIG in others else WEIGHTS
    files = {
        name: _write_file(folder / name, tensor_file(weights, bad)),
        OPTIMIZER: _write_file(folder / OPTIMIZER, tensor_file(optimizer, bad)),
    }
    for name, content in others.items():
        files[name] = _write_file(folder / name, iter([content]))
    told = (*bad[:NAMED], *state.not_finite)
    _write_file(folder / STATE, iter([_seal(replace(state, files=files, not_finite=told))]))
    _sync_folder(folder)


def _write_file(path: Path, pieces: Iterator[bytes | memoryview]) -> FileSum:
    """Write and sync; the checksum is that of what was meant to be written."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as stream:
        for piece in pieces:
            digest.update(piece)
            _write_all(stream, memoryview(piece))
        os.fsync(stream.fileno())
        return FileSum(stream.tell(), digest.hexdigest())


def _write_all(stream: FileIO, piece: memoryview) -> None:
    while piece:
        piece = piece[stream.write(piece) :]


def _seal(state: CheckpointState) -> bytes:
    """`state.json`: its first entry is the checksum of everything behind it, since no other file can vouch for it."""
    table = {"seal": "0" * SEAL_DIGITS, **msgspec.to_builtins(state)}
    rest = to_text(table, faithful=True).encode()[len(SEAL_START) + SEAL_DIGITS :] + b"\n"
    return SEAL_START + hashlib.sha256(rest).hexdigest().encode() + rest


def _put(temporary: Path, target: Path) -> None:
    """Rename into place. One that is there steps aside under a name that `latest` still finds."""
    aside = target.with_name(f"{REPLACED}{target.name}")
    replacing = entry_kind(target) != "nothing"
    if replacing:
        target.rename(aside)
    try:
        temporary.rename(target)
        _sync_folder(target.parent)
    except OSError:
        if replacing and entry_kind(target) == "nothing":
            aside.rename(target)
        raise
    if replacing:
        _remove(aside)


def _prune(folder: Path, saved_step: int, keep: int, best: int | None) -> None:
    """Remove what is older than the `keep` newest good ones but the best; that just saved counts among them if it is
    one."""
    found = checkpoints(folder)
    good = [entry.step for entry in found if not entry.problem]
    if saved_step in good:
        good.remove(saved_step)
        good.insert(0, saved_step)
    for entry in found:
        if good and entry.step < min(good[:keep]) and entry.step != best:
            _remove(entry.path)


def _remove(path: Path) -> None:
    """First the name goes, then the files: half a checkpoint never has a good name."""
    away = path.with_name(f"{REMOVED}{path.name.lstrip('.')}-{os.getpid()}")
    # What cannot be removed is in nobody's way; the next save tries again.
    with suppress(OSError):
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def _tidy(parent: Path) -> None:
    """Clear away what killed processes have left. Nobody else writes: the folder is locked."""
    for path in list(parent.iterdir()):
        if path.name.startswith((UNFINISHED, REMOVED)):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(REPLACED):
            good = path.with_name(path.name.removeprefix(REPLACED))
            if entry_kind(good) == "nothing":
                path.rename(good)
            else:
                _remove(path)


@contextmanager
def _lock(parent: Path) -> Iterator[None]:
    """One saver at a time. The system lets go of the lock when its holder dies, however it does."""
    with append_to(parent / LOCK) as stream:
        patience_ends = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > patience_ends:
                    raise FlopwiseError(
                        f"another process has been saving into {parent} for {LOCK_WAIT_S / 60:.0f} minutes",
                        hint="end it, or train into a run of its own",
                    ) from None
                time.sleep(0.02)
            except OSError:
                # A file system without locks: that there is one saver is then up to the caller.
                break
        try:
            yield
        finally:
            # Told so, because a process forked meanwhile would keep it with the file open.
            with suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_UN)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a folder, and need not.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def _unwritable(target: Path, error: OSError) -> FlopwiseError:
    hint = "check the folder and its permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or keep fewer checkpoints"
    elif error.errno == errno.EFBIG:
        hint = "raise the limit on the size of files (`ulimit -f`), or use another file system"
    why = f"{error.strerror}; the checkpoints from before are untouched"
    return FlopwiseError(f"cannot save the checkpoint {target}", why=why, hint=hint)


def checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """A run's checkpoints, the newest first, each with the problem that a look at its state and sizes shows."""
    return [FoundCheckpoint(path, step, _problem(path)) for step, path in _by_step(folder / CHECKPOINTS)]


def _by_step(parent: Path) -> list[tuple[int, Path]]:
    """Whatever has a checkpoint's name, the latest step first."""
    try:
        names = {path.name for path in parent.iterdir()}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FlopwiseError(f"{parent} cannot be read", why=error.strerror, hint="check its permissions") from None
    # One that stepped aside counts only until the other is in its place.
    matches = [NAME.fullmatch(name) for name in names if name.removeprefix(REPLACED) not in names - {name}]
    return sorted(((int(match[1]), parent / match[0]) for match in matches if match), reverse=True)


def _problem(checkpoint: Path) -> str:
    try:
        state = read_state(checkpoint)
        for name, expected in state.files.items():
            _check_size(checkpoint / name, expected)
        check_finite(checkpoint, state)
    except FlopwiseError as error:
        return error.what if error.why is None else f"{error.what}: {error.why}"
    return ""


def latest(folder: Path) -> Path | None:
    """The newest good checkpoint of a run; `checkpoints` tells which newer ones were passed over, and why.

    Checksums of tensors are left to `load`.
    """
    return next((found.path for found in checkpoints(folder) if not found.problem), None)


def drop_later(folder: Path, last_step: int) -> None:
    """Remove the checkpoints of later steps, for a run that goes on from an earlier one does them again.

    What killed processes have left goes with them.
    """
    parent = folder / CHECKPOINTS
    if entry_kind(parent) == "nothing":
        return
    try:
        with _lock(parent):
            _tidy(parent)
            for found in checkpoints(folder):
                if found.step > last_step:
                    _remove(found.path)
    except OSError as error:
        why = error.strerror
        raise FlopwiseError(f"nothing can be written to {parent}", why=why, hint=WRITABLE_HINT) from None


def load(checkpoint: Path) -> Loaded:
    """A checkpoint, after the size and checksum of every file have been found as they were written.

    Its numbers may be anything: `check_finite` tells whether it can be gone on with.
    """
    state = read_state(checkpoint)
    for name, expected in state.files.items():
        path = checkpoint / name
        _check_size(path, expected)
        try:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise _damaged(path, f"it cannot be read: {error.strerror}") from None
        if digest != expected.sha256:
            raise _damaged(path, f"its sha256 begins with {digest[:12]}, not {expected.sha256[:12]}")
    weights = ADAPTERS if ADAPTERS in state.files else WEIGHTS
    return Loaded(state, LazyTensors(checkpoint / weights), LazyTensors(checkpoint / OPTIMIZER))


def read_state(checkpoint: Path) -> CheckpointState:
    """`state.json` alone, with its seal checked."""
    path = checkpoint / STATE
    if entry_kind(checkpoint) == "nothing":
        raise FlopwiseError(f"there is no checkpoint {checkpoint}", hint="check the path, or resume from the last one")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise _damaged(path, "it is missing" if error.errno == errno.ENOENT else f"{error.strerror}") from None
    seal, rest = text[len(SEAL_START) :][:SEAL_DIGITS], text[len(SEAL_START) + SEAL_DIGITS :]
    if not text.startswith(SEAL_START) or seal != hashlib.sha256(rest).hexdigest().encode():
        raise _damaged(path, "its contents do not have the checksum that it begins with")
    try:
        written = from_text(text, dict[str, Any]).get("format")
        if written != FORMAT:
            raise FlopwiseError(
                f"{path} has format {shown(written)}",
                why=f"this version of flopwise reads {FORMAT}",
                hint="resume with the version that wrote it",
            )
        state = from_text(text, CheckpointState)
    except FlopwiseError as error:
        raise error if error.hint else _damaged(path, str(error)) from None
    own = {ADAPTERS if ADAPTERS in state.files else WEIGHTS, OPTIMIZER}
    others = set(state.files) - own - {CONFIG}
    if not own <= set(state.files) or not others <= set(HANDED_ON):
        raise _damaged(path, f"it lists the files {', '.join(sorted(state.files)) or 'of nothing'}")
    return state


def check_finite(checkpoint: Path, state: CheckpointState) -> None:
    """Refuse a checkpoint of a training that had diverged."""
    if state.not_finite:
        more = ", …" if len(state.not_finite) > 1 else ""
        raise FlopwiseError(
            f"{checkpoint} is not finite",
            why=f"NaN or infinity in {state.not_finite[0]}{more}: the training had diverged",
            hint=_way_out(checkpoint),
        )


def _check_size(path: Path, expected: FileSum) -> None:
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise _damaged(path, "it is missing" if error.errno == errno.ENOENT else f"{error.strerror}") from None
    if size_bytes != expected.size_bytes:
        raise _damaged(path, f"it has {size_bytes:,} bytes instead of {expected.size_bytes:,}")


def _damaged(path: Path, why: str) -> FlopwiseError:
    return FlopwiseError(f"{path} is damaged", why=why, hint=_way_out(path.parent))


def _way_out(checkpoint: Path) -> str:
    """The checkpoint before, by name; whether that one is good shows when it is loaded."""
    match = NAME.fullmatch(checkpoint.name)
    older = [other for step, other in _by_step(checkpoint.parent) if match and step < int(match[1])]
    if older:
        return f"`--resume` passes it over and takes {older[0].name}"
    return "begin a new run: there is no checkpoint before this one"


def check_matches(
    state: CheckpointState,
    *,
    model: dict[str, Any],
    data: dict[str, Any],
    precision: str,
    batch_sequences: int,
    sequence_tokens: int,
    training: Training | None = None,
) -> None:
    """Refuse to go on with another training than that of the checkpoint. Its settings, where given, may differ in
    how many steps there are."""
    compared: list[tuple[str, object, object]] = [
        ("precision", state.precision, precision),
        ("sequence_tokens", state.sequence_tokens, sequence_tokens),
        ("batch_sequences", state.batch_sequences, batch_sequences),
    ]
    then, now = _as_read(state.model), _as_read(model)
    names = [name for name in dict.fromkeys([*then, *now]) if name not in LABELS]
    compared += [(f"model: {name}", then.get(name), now.get(name)) for name in names]
    then, now = _as_read(state.data), _as_read(data)
    names = ["fingerprint"] if "fingerprint" in then else list(dict.fromkeys([*then, *now]))
    compared += [(f"data: {name}", then.get(name), now.get(name)) for name in names]
    if training is not None:
        names = [item.name for item in fields(Training) if item.name != "steps"]
        compared += [(f"training: {name}", getattr(state.training, name), getattr(training, name)) for name in names]
    for name, before, after in compared:
        if before != after:
            raise FlopwiseError(
                f"{name} differs from that of the checkpoint",
                why=f"{shown(before)} in the checkpoint, {shown(after)} now",
                hint="resume with what it began with, or begin a new run",
            )


def _as_read(table: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file: tuples are lists there."""
    return from_text(to_text(table), dict[str, Any])
