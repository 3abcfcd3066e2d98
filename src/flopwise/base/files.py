"""Files as data: TOML and JSON read into frozen dataclasses with checks, and written whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import stat
import tempfile
import tomllib
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

from flopwise.base.errors import FlopwiseError, nearest, shown

LARGEST_FILE_BYTES = 8 * 2**20
"""Descriptions are kilobytes; a larger file is something else, such as weights."""

SMALL_FILE_BYTES = 2**16

MOST_TOML_LETTERS = 2 * 2**20
MOST_KEY_PARTS = 8
MOST_NESTING = 64
"""Of lists and tables within a line of TOML."""

_QUOTED = re.compile(
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*+(?:"""|\Z)'
    r"|'''[^']*(?:'(?!'')[^']*)*+(?:'''|\Z)"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*+"?'
    r"|'[^'\n]*'?|#[^\n]*",
    re.DOTALL,
)
"""Strings and comments of TOML; one that has no end goes to the end of its line or of the text."""
_BETWEEN_KEYS = re.compile(r"[^\w. \t-]+")
_BRACKETS = re.compile(r"[\[\]{}]")

_UNSAFE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What a terminal or a page may act on and JSON's writers leave as it is."""
_NO_TEXT = re.compile("[\udc80-\udcff]")
"""How Python keeps bytes of a path that are no UTF-8."""

LONGEST_PATH = 200
"""Characters of a path that an error repeats."""
READABLE_HINT = "name a TOML or JSON file that can be read, or a catalogue entry"
NEW_FILE = stat.S_IFREG | 0o644
"""What a file is that was not there before."""
WRITABLE_HINT = "check the folder, its permissions and the space left on it"

Described = TypeVar("Described")


def entry_kind(path: Path) -> Literal["file", "folder", "other", "nothing"]:
    """What lies at a path; `other` also for what is there but may not be looked at."""
    try:
        mode = path.stat().st_mode
    except PermissionError:
        return "other"
    except (OSError, ValueError):
        # No such entry, a name that is too long, a null character: nothing can be there.
        return "nothing"
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


def open_file(path: Path | str) -> BinaryIO:
    """A regular file, or a link to one, open for reading; never waits for what a pipe or a device has.

    Raises OSError where there is none or it may not be read, and for what is no file a FlopwiseError that does not
    know its name: tell it with `within`.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    kind = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
    raise FlopwiseError(f"it is {kind}, not a file")


def read_bounded(path: Path | str, most_bytes: int) -> bytes:
    """All of a regular file of at most so many bytes; raises as `open_file`, and for a larger one."""
    with open_file(path) as stream:
        # Room for all that may come costs more than to read the kilobytes that most files are: 45 µs for 64 MiB.
        first = min(most_bytes, SMALL_FILE_BYTES) + 1
        content: bytes | None = stream.read(first)
        if content is not None and len(content) == first <= most_bytes:
            content += stream.read(most_bytes + 1 - first)
    if content is None:
        raise BlockingIOError(errno.EAGAIN, "it has nothing to read yet")
    if len(content) > most_bytes:
        raise FlopwiseError(f"it is larger than {most_bytes:,} bytes")
    return content


def read_text(path: Path) -> str:
    """The text of a description, or an error that says why it cannot be one."""
    try:
        mode = path.stat().st_mode
        content = _first_bytes(path, LARGEST_FILE_BYTES + 1) if stat.S_ISREG(mode) else None
    except FileNotFoundError:
        raise FlopwiseError(f"there is no file {path}", hint="check the path, or name a catalogue entry") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FlopwiseError(f"{_shorten_path(path)} cannot be read", why=reason, hint=READABLE_HINT) from None
    if content is None:
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise FlopwiseError(f"{path} is {kind}, not a file", hint=READABLE_HINT)
    if len(content) > LARGEST_FILE_BYTES:
        raise FlopwiseError(
            f"{path} is too large for a description",
            why=f"at most {LARGEST_FILE_BYTES:,} bytes are read",
            hint="name the model's config.json, not its weights",
        )
    try:
        # Some editors begin a file with a byte-order mark; it is no part of the text.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FlopwiseError(f"{path} is not text", why=f"byte {error.start} is not UTF-8", hint=READABLE_HINT) from None


def _first_bytes(path: Path, limit: int) -> bytes:
    # Some files of /proc are called regular and still wait for a writer: never wait with them.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        content: bytes | None = stream.read(limit)
    if content is None:
        raise BlockingIOError(errno.EAGAIN, "it has nothing to read yet")
    return content


def _shorten_path(path: Path) -> str:
    """A path for an error, cut where it is beyond reading."""
    text = str(path)
    return text if len(text) <= LONGEST_PATH and text.isprintable() else shown(text)


def parse_toml(text: str) -> dict[str, Any]:
    """TOML of anybody's as a table; raises a ValueError for what is none, or would take far more memory than its text.

    The library keeps every beginning of a dotted key: one of 25,000 parts takes gigabytes.
    """
    if len(text) > MOST_TOML_LETTERS:
        raise ValueError(f"it is longer than {MOST_TOML_LETTERS:,} characters")
    # Dots and brackets within strings and comments are neither keys nor lists.
    bare = _QUOTED.sub("s", text)
    if any(piece.count(".") >= MOST_KEY_PARTS for piece in _BETWEEN_KEYS.split(bare)):
        raise ValueError(f"a key in it has more than {MOST_KEY_PARTS} parts")
    depth = 0
    for bracket in _BRACKETS.findall(bare):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_NESTING:
            raise ValueError(f"it is nested more than {MOST_NESTING} deep")
    return tomllib.loads(text)


def read_table(path: Path) -> dict[str, Any]:
    """The top-level table of a TOML or JSON file; what begins with a brace is JSON whatever the file is called."""
    text = read_text(path)
    is_json = path.suffix.lower() == ".json" or text.lstrip().startswith("{")
    try:
        table = msgspec.json.decode(text) if is_json else parse_toml(text)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        # A plain ValueError comes from tomllib too, for integers of thousands of digits.
        raise FlopwiseError(
            f"{path} is not valid {'JSON' if is_json else 'TOML'}",
            why=str(error),
            hint="`flopwise show NAME` prints one",
        ) from None
    if not isinstance(table, dict):
        raise FlopwiseError(
            f"{path} does not hold a table",
            why=f"its top level is {shown(table)}",
            hint="`flopwise show NAME` prints one",
        )
    if is_json:
        # `flopwise show -o json` says what it prints.
        table.pop("schema", None)
    return table


def decode(table: dict[str, Any], kind: type[Described], where: str) -> Described:
    """A table as a checked dataclass; `where` names the file in an error."""
    try:
        check_keys(table, kind, where)
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        message, cause = str(error), error.__cause__
        place = re.search(r" - at `\$\.?(.*)`$", message)
        field = place[1] if place else ""
        if isinstance(cause, FlopwiseError):
            inner = cause.within(field) if field else cause
            raise inner.within(where, hint=_field_hint(kind, field)) from None
        what = message[: place.start()] if place else message
        raise FlopwiseError(
            f"{where}: {what}" + (f" in {field}" if field else ""),
            why=_choices(kind, field),
            hint=_field_hint(kind, field),
        ) from None
    except (OverflowError, RecursionError) as error:
        raise FlopwiseError(
            f"{where}: a value is out of range", why=str(error), hint="`flopwise show NAME` prints an example"
        ) from None


def _choices(kind: type[Any], field: str) -> str | None:
    """What a field may be, where there are only a few words for it."""
    known = typing.get_type_hints(kind).get(field)
    if typing.get_origin(known) is not typing.Literal:
        return None
    return f"it is one of {', '.join(map(repr, typing.get_args(known)))}"


def _field_hint(kind: type[Any], field: str) -> str:
    if field:
        return f"correct `{field}`; `flopwise show NAME` prints an example"
    required = [
        item.name
        for item in dataclasses.fields(kind)
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    return f"required: {', '.join(required)}; `flopwise show NAME` prints an example"


def check_keys(value: object, kind: object, where: str) -> None:
    """Refuse keys that the description does not have, anywhere below: a typing mistake must not pass unseen."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for choice in arguments:
            if dataclasses.is_dataclass(choice) or typing.get_origin(choice):
                check_keys(value, choice, where)
    elif origin is tuple and isinstance(value, list):
        for index, item in enumerate(value):
            check_keys(item, arguments[0], f"{where}[{index}]")
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            check_keys(item, arguments[1], f"{where}: {key}")
    elif dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        hints = _hints(kind)
        for key, item in value.items():
            if key not in hints:
                close = nearest(str(key), hints)
                why = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(hints)}"
                raise FlopwiseError(
                    f"{where}: there is no field {key!r}", why=why, hint="`flopwise show NAME` prints every field"
                )
            check_keys(item, hints[key], f"{where}: {key}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Annotations are texts, and evaluating them takes longer than all else of reading a description."""
    return typing.get_type_hints(kind)


def plain(value: object) -> dict[str, Any]:
    """A dataclass as tables, lists and numbers, without the fields that are None."""
    table = _without_none(msgspec.to_builtins(value))
    assert isinstance(table, dict)
    return table


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value


def to_toml(value: object) -> str:
    """A dataclass as TOML, which `decode` reads back equal."""
    import tomli_w

    text = tomli_w.dumps(plain(value))
    if text != encodable(text):
        why = "it holds bytes that are no UTF-8, which TOML cannot"
        raise FlopwiseError("a path is not text", why=why, hint="rename it")
    return text


SCHEMA_VERSIONS: dict[str, int] = {}
"""Kinds of objects that commands print, by how often a key of theirs was renamed or left out; those not named are at 1.
`docs/json.md` says what may change without."""


def schema_name(kind: str, *, several: bool = False) -> str:
    """What an object says that it is: `flopwise.prediction/1`, of several `flopwise.prediction-list/1`."""
    return f"flopwise.{kind}{'-list' if several else ''}/{SCHEMA_VERSIONS.get(kind, 1)}"


def with_schema(value: object, kind: str) -> dict[str, Any]:
    """A record as an object that says what it is; of a list, with its `rows`."""
    found = msgspec.to_builtins(value)
    if isinstance(found, list):
        return {"schema": schema_name(kind, several=True), "rows": found}
    return {"schema": schema_name(kind), **found}


def to_json(value: object) -> str:
    """A value as indented JSON; None stays, as null."""
    return json_text(msgspec.to_builtins(value), indent=2)


def json_text(value: object, *, indent: int) -> str:
    """Plain tables, lists and scalars as JSON; indent 0: one line. No sign is left in it that a terminal acts on.

    It decodes to what it was, but for bytes of paths that are no text: see `encodable`.
    """
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_all_encodable(value))
    text = (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _all_encodable(value: object) -> object:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {_all_encodable(key): _all_encodable(item) for key, item in value.items()}
    return [_all_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def encodable(text: str) -> str:
    r"""Text that UTF-8 has bytes for: bytes of a path that are none stand as `\xff`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        named = _NO_TEXT.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
        return named.encode("utf-8", "backslashreplace").decode()
    return text


def append_to(path: Path) -> io.FileIO:
    """A file of our own, open for more: made where it is missing, and never emptied.

    Its name can be foretold, and others may be able to write to its folder: what a link in its place leads to is not
    touched, a pipe is not waited for. Raises an OSError that says so.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, and not followed") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is a device or a pipe")
    return io.FileIO(handle, "ab")


def write_whole(path: Path, text: str, *, own: bool = False) -> None:
    """Write beside the target and rename into place, so that no reader ever sees half of it.

    A link stays one, and what it leads to is replaced, with the permissions that it had. A device or a pipe cannot be
    replaced, and is written to. `own`: a file that we alone write; it takes the place of whatever else has its name.
    """
    try:
        target = path.parent.resolve() / path.name if own else path.resolve()
        mode = target.stat().st_mode if target.exists() else NEW_FILE
        if own and (target.is_symlink() or not stat.S_ISREG(mode)):
            mode = NEW_FILE
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            with target.open("w", encoding="utf-8") as stream:
                stream.write(encodable(text))
            return
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_written(path, error) from None
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(encodable(text))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(stat.S_IMODE(mode))
        temporary.replace(target)
    except (OSError, UnicodeEncodeError) as error:
        raise _not_written(path, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def _not_written(path: Path, error: Exception) -> FlopwiseError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return FlopwiseError(f"cannot write {path}", why=why, hint=WRITABLE_HINT)
