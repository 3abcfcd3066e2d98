"""Files and folders → documents and labelled samples, with the place of whatever is wrong with them."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Literal, cast

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.files import LONGEST_PATH, entry_kind
from flopwise.base.units import show_bytes
from flopwise.catalog.hub import REPOSITORIES, find_dataset, is_hub_name
from flopwise.engine.data.known import Known
from flopwise.engine.data.request import Tell
from flopwise.engine.data.splits import Split, held_out, split_of, splits_among

Form = Literal["text", "jsonl", "csv", "json", "parquet", "arrow", "tokens", "megatron"]
FORMS: dict[str, Form] = {
    **{".txt": "text", ".md": "text", ".py": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"},
    **{".parquet": "parquet", ".arrow": "arrow"},
}
"""What is read out of a folder. A file that is named itself is text whatever else it is called."""
NAMED_FORMS: dict[str, Form] = {**FORMS, ".json": "json"}
"""The same of a file that is named itself: in folders .json files mostly say something of the others."""
TOKEN_FORMS: tuple[Form, ...] = ("tokens", "megatron")
"""Files of identifiers: bare numbers, or with an index of Megatron-LM beside them."""
TOKEN_ENDINGS = (".bin", ".npy")
MEGATRON = b"MMIDIDX\x00\x00"
"""What such an index begins with."""
COMPRESSED = (".gz", ".zst")

OTHER_TABLES = (".tsv",)
"""Text that was perhaps meant as something else."""

WEIGHTED = re.compile(r"(.+):([0-9]{1,6}(?:\.[0-9]{1,6})?)")

PIECE_BYTES = 2**20
"""A longer text is tokenized in pieces of about this size, each cut at the end of a line."""

BEGINNING_BYTES = 2**12
"""Of a file, what is looked at before it is read."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SIGNATURES = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\x93NUMPY": "an array of NumPy's",
    b"MMIDIDX": "an index of Megatron's",
    b"PK\x03\x04": "a zip archive",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"%PDF": "a PDF",
    b"SQLite format 3": "a database of SQLite's",
    b"\x89HDF": "an HDF5 file",
}
"""What files that are no text begin with."""
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
CONTROL = bytes({*range(32), 127} - {*b"\t\n\v\f\r\x1b"})
"""Bytes that text has hardly any of, whatever its encoding."""
MOST_CONTROL = 0.01
MOST_ZEROS = 0.001
"""What was scraped may hold one here and there; tokens of two bytes are zeros by half."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """A file to read."""

    path: Path
    name: str
    """Of a file its own, of one in a folder its path from there: the cache must not depend on where they lie."""
    form: Form
    times: float = 1.0
    """How often an epoch goes through it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file as it was when its key was made."""

    source: DataSource
    size_bytes: int
    sha256: str

    def ingredient(self) -> dict[str, object]:
        """What a cache's key is made of."""
        return {"name": self.source.name, "form": self.source.form, "bytes": self.size_bytes, "sha256": self.sha256}


class ReadingProgress:
    """Bytes done, told on."""

    def __init__(self, tell: Tell | None, what: str, of: int) -> None:
        self.tell = tell
        self.what = what
        self.done = 0
        self.of = of

    def add(self, size_bytes: int) -> None:
        self.done += size_bytes
        if self.tell is not None:
            self.tell(self.what, self.done, self.of)


def find_sources(
    named: Iterable[str], *, labelled: bool, tokens: bool = False
) -> tuple[tuple[DataSource, ...], tuple[str, ...]]:
    """The files that names stand for, in the order they are read, and notes on what was left out.

    `labelled`: only what has columns will do. `tokens`: files hold token identifiers, whatever they are called.
    """
    found: list[DataSource] = []
    notes: list[str] = []
    for given in named:
        name, times = split_weight(given)
        path = find_named(name)
        kind = entry_kind(path)
        if kind == "folder":
            beneath, left_out = _beneath(path, labelled=labelled, tokens=tokens)
            found += [replace(source, times=times) for source in beneath]
            notes += left_out
        elif kind == "file":
            found.append(replace(_named_file(path, labelled=labelled), times=times))
            if path.suffix.lower() in OTHER_TABLES:
                notes.append(f"{path} is read as plain text: columns are read from .jsonl and .csv files")
        elif kind == "nothing":
            fetched = f", or `hf download {name} --repo-type dataset`" if is_hub_name(name) else ""
            raise FlopwiseError(
                f"there is no file or folder {_shown_path(name)}", hint=f"check the path of the data{fetched}"
            )
        else:
            raise FlopwiseError(
                f"{_shown_path(name)} cannot be read",
                why="it is a device or a pipe, or a folder above it may not be looked into",
                hint="name a file or a folder that can be read",
            )
    if labelled and any(source.times != 1 for source in found):
        raise FlopwiseError(
            "labelled rows have no weight", why="each is seen once an epoch", hint="the file's name alone"
        )
    if tokens:
        found = [source if source.form == "megatron" else replace(source, form="tokens") for source in found]
    paths = [source.path.resolve() for source in found]
    if len(set(paths)) < len(paths):
        notes.append(f"{len(paths) - len(set(paths)):,} of {len(paths):,} files are read more than once")
    return tuple(found), tuple(notes)


def split_weight(name: str) -> tuple[str, float]:
    """A name and how often an epoch goes through what it names: `books/:2`, `web.jsonl:0.5`; a path may hold colons."""
    match = WEIGHTED.fullmatch(name)
    if match is None or entry_kind(Path(name)) != "nothing":
        return name, 1.0
    if not float(match[2]):
        raise FlopwiseError(
            f"{_shown_path(name)} is seen 0 times",
            why="the number is how often an epoch goes through it",
            hint="leave it out",
        )
    return match[1], float(match[2])


def _named_file(path: Path, *, labelled: bool) -> DataSource:
    form: Form = "megatron" if index_of(path) else NAMED_FORMS.get(ending_of(path), "text")
    if labelled and form in ("text", "megatron"):
        raise FlopwiseError(
            f"{path} has no labels",
            why="text with labels is read from .jsonl, .csv and .parquet files",
            hint='a .csv with the header text,label, or a .jsonl of {"text": …, "label": …}',
        )
    return DataSource(path, _printable(path.name), form)


def index_of(path: Path) -> Path | None:
    """The index of a file of tokens that Megatron-LM has made, which lies beside it."""
    index = path.with_suffix(".idx")
    if path.suffix.lower() != ".bin" or entry_kind(index) != "file":
        return None
    with index.open("rb") as stream:
        return index if stream.read(len(MEGATRON)) == MEGATRON else None


def ending_of(path: Path) -> str:
    """What a file's name ends in, that of a compressed one without what it is compressed by."""
    name = path.name.lower()
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    return Path(name).suffix


def open_source(path: Path) -> BinaryIO:
    """A file's content, decompressed."""
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        try:
            import zstandard  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise FlopwiseError(
                f"{path} cannot be read", why="the package zstandard is not installed", hint="pip install zstandard"
            ) from None
        return cast(BinaryIO, zstandard.open(path, "rb"))
    return path.open("rb")


def _shown_path(name: str) -> str:
    """A path for an error: whole, unless it is beyond reading."""
    return name if name.isprintable() and len(name) <= LONGEST_PATH else shown(name)


def _printable(name: str) -> str:
    # A file's name may hold bytes that are no text, which JSON could not repeat.
    return name.encode("utf-8", "backslashreplace").decode()


def _beneath(folder: Path, *, labelled: bool, tokens: bool) -> tuple[list[DataSource], list[str]]:
    """Files of a folder that are trained on by their path from there, and notes on what was left out of it."""
    relative, notes = _files_beneath(folder, labelled=labelled, tokens=tokens)
    chosen, more = _trained_on(folder, relative)
    sources = [DataSource(relative[name], _printable(name), _form_beneath(relative[name])) for name in sorted(chosen)]
    return sources, [*notes, *more]


def _form_beneath(path: Path) -> Form:
    return "megatron" if index_of(path) else FORMS.get(ending_of(path), "tokens")


def _files_beneath(folder: Path, *, labelled: bool, tokens: bool) -> tuple[dict[str, Path], list[str]]:
    """Files of a folder by their path from there, and notes on what was left out of it; most of it must not be."""
    endings = [ending for ending, form in FORMS.items() if form != "text" or not labelled]
    if tokens:
        endings = list(TOKEN_ENDINGS)
    root = folder.resolve()
    files: dict[Path, Path] = {}
    links: dict[Path, Path] = {}
    others: Counter[str] = Counter()
    outside = 0
    for above, folders, names in os.walk(root, onerror=_refuse):
        outside += sum(_leads_out(Path(above, name), root) for name in folders if not name.startswith("."))
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(above, name)
            if name.startswith(".") or entry_kind(path) != "file":
                continue
            if index_of(path.with_suffix(".bin")) == path:
                continue
            if ending_of(path) not in endings and not index_of(path):
                others[path.suffix.lower() or "no ending"] += path.lstat().st_size
            elif _leads_out(path, root):
                outside += 1
            elif path.is_symlink():
                links[path] = path.resolve()
            else:
                files[path] = path
    # A link to a file that is read anyway would only repeat it.
    files.update({link: target for link, target in links.items() if target not in files})
    kinds = ", ".join(kind for kind, _ in others.most_common(4))
    notes = [f"{folder}: links that lead out of the folder were left out ({outside:,})"] if outside else []
    if not files:
        raise FlopwiseError(
            f"there is nothing to read in {folder}",
            why=f"links that lead out of it are not followed ({outside:,})"
            if outside
            else f"it holds files of other kinds: {_printable(kinds)}"
            if others
            else "no file of it fits",
            hint=f"it needs files that end in {', '.join(endings)}; hidden ones are left out",
        )
    if others:
        taken, left = sum(path.stat().st_size for path in files), others.total()
        told = f"{show_bytes(left)} of {show_bytes(left + taken)} are in files that are not read: {_printable(kinds)}"
        if left > taken:
            raise FlopwiseError(
                f"most of {folder} would be left out",
                why=told,
                hint=f"name the files that are meant; of a folder those are read that end in {', '.join(endings)}",
            )
        notes.append(f"{folder}: {told}")
    relative = {path.relative_to(root).as_posix(): path for path in files}
    return relative, notes


def _trained_on(folder: Path, relative: dict[str, Path]) -> tuple[list[str], list[str]]:
    """Of a folder's files those that are trained on, and notes on the others."""
    splits = _splits(relative)
    if splits:
        others = sorted({split_of(name) or "what is of no split" for name in set(relative).difference(splits["train"])})
        return splits["train"], [f"{folder}: of its splits train is trained on, not {', '.join(others)}"]
    if any(ending_of(path) in (".parquet", ".arrow") for path in relative.values()):
        # What a data set's own page says of it is none of its rows.
        pages = [name for name in relative if name.lower().endswith(".md")]
        if pages:
            return [name for name in relative if name not in pages], [f"{folder}: {', '.join(pages[:3])} is left out"]
    return list(relative), []


def is_split(name: str) -> bool:
    """Whether a file's name may say what it is for: of sources and pages `test` says something else."""
    return not name.lower().endswith((".py", ".md"))


def _splits(relative: Iterable[str]) -> dict[Split, list[str]]:
    return splits_among(name for name in relative if is_split(name))


def held_out_alone(named: Iterable[str], *, tokens: bool) -> tuple[str, ...]:
    """Notes on folders that are trained on, though their files' names say that they are for something else."""
    notes = []
    for name in named:
        path = find_named(split_weight(name)[0])
        if entry_kind(path) != "folder":
            continue
        files = [file for file in _files_beneath(path, labelled=False, tokens=tokens)[0] if is_split(file)]
        kinds = {split for file in files if (split := split_of(file)) is not None}
        if kinds and "train" not in kinds:
            listed = " and ".join(sorted(kinds))
            notes.append(
                f"{name}: it has no split train, and {listed} is trained on; --eval-data FOLDER is for what is not"
            )
    return tuple(notes)


def evaluated_on(named: Iterable[str], *, tokens: bool) -> tuple[str, ...]:
    """What is named for an evaluation, of folders with splits what they hold out."""
    found: list[str] = []
    for name in named:
        path = find_named(name)
        beneath = _files_beneath(path, labelled=False, tokens=tokens)[0] if entry_kind(path) == "folder" else {}
        splits = _splits(beneath)
        found += [str(path / file) for file in held_out(splits)] or [name]
    return tuple(found)


def held_out_of(named: Iterable[str], *, tokens: bool) -> tuple[str, ...]:
    """Files of folders that are trained on, which those hold out by their splits."""
    names = [split_weight(name)[0] for name in named]
    return tuple(file for name in names for file in evaluated_on((name,), tokens=tokens) if file != name)


def evaluation_of(named: Iterable[str], trained_on: Iterable[str], *, tokens: bool) -> tuple[str, ...]:
    """What a training is evaluated on: what is named for it, else what the data's own folders hold out."""
    return evaluated_on(named, tokens=tokens) or held_out_of(trained_on, tokens=tokens)


def find_named(name: str) -> Path:
    """A path, or where the hub's own tool has put a data set of that name."""
    if is_hub_name(name):
        with suppress(FlopwiseError):
            return find_dataset(name)
    return Path(name)


def _leads_out(path: Path, root: Path) -> bool:
    return path.is_symlink() and not path.resolve().is_relative_to(_repository(root))


def _repository(root: Path) -> Path:
    """In the hub's cache a folder's files are links to others of the same repository."""
    return next((above for above in (root, *root.parents) if above.name.startswith(REPOSITORIES)), root)


def _refuse(error: OSError) -> None:
    raise FlopwiseError(f"the folder {error.filename} cannot be read", why=error.strerror, hint="check its permissions")


def survey(sources: Iterable[DataSource], tell: Tell | None, cache: Path | None = None) -> tuple[Entry, ...]:
    """Every file's size and digest, read piece by piece; `cache`: where those of large ones are remembered."""
    sources = tuple(sources)
    entries = []
    try:
        progress = ReadingProgress(tell, "read", sum(source.path.stat().st_size for source in sources))
        known = None if cache is None else Known(cache)
        for source in sources:

            def read(source: DataSource = source) -> str:
                return _read_through(source.path, progress)

            digest = _with_index(source) + (read() if known is None else known.digest(source.path, read))
            entries.append(Entry(source, source.path.stat().st_size, digest))
    except OSError as error:
        raise unreadable(error) from None
    if not any(entry.size_bytes for entry in entries):
        raise _empty(sources)
    return tuple(entries)


def _with_index(source: DataSource) -> str:
    """What else a file's tokens follow from."""
    index = index_of(source.path) if source.form == "megatron" else None
    return "" if index is None else f"{_digest_of(index).hexdigest()} "


def _read_through(path: Path, progress: ReadingProgress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(PIECE_BYTES):
            digest.update(block)
            progress.add(len(block))
    return digest.hexdigest()


def check_beginnings(sources: Iterable[DataSource]) -> None:
    """Refuse files that cannot be opened or do not begin as text; nothing at all is the embedded default."""
    sources = tuple(sources)
    empty = True
    for source in sources:
        try:
            with open_source(source.path) as stream:
                content = bytearray(stream.read(BEGINNING_BYTES))
        except (OSError, EOFError) as error:
            raise unreadable(error, source.path) from None
        if content and source.form in BINARY_FORMS:
            empty = False
            check_binary(source)
        elif content:
            empty = False
            # The last character may be cut.
            whole = len(content) < BEGINNING_BYTES
            decode_text(source.path, bytes(content if whole else content[: _last_character(content)]), 0)
    if sources and empty:
        raise _empty(sources)


def _empty(sources: tuple[DataSource, ...]) -> FlopwiseError:
    names = ", ".join(str(source.path) for source in sources[:3]) + (", …" if len(sources) > 3 else "")
    return FlopwiseError(f"the data is empty: {names}", hint="name files with text in them")


BINARY_FORMS = {"parquet": b"PAR1", "arrow": None, "tokens": None, "megatron": None}
"""Forms that are no text, with what a file of each begins with where that is always the same."""


def check_binary(source: DataSource) -> None:
    """Refuse a table of another kind than its name says, and one that nothing is installed to read."""
    if source.form in TOKEN_FORMS:
        return
    start = BINARY_FORMS[source.form]
    with source.path.open("rb") as stream:
        if start is not None and stream.read(len(start)) != start:
            raise FlopwiseError(
                f"{source.path} is no Parquet file", why="it does not begin as one does", hint="fetch the file again"
            )
    if find_spec("pyarrow") is None:
        raise FlopwiseError(
            f"{source.path} cannot be read",
            why=f"{source.form} files are read by the package pyarrow, which is not installed",
            hint="pip install pyarrow, or write its rows as .jsonl",
        )


def unreadable(error: OSError | EOFError, path: Path | None = None) -> FlopwiseError:
    named, why = getattr(error, "filename", None), getattr(error, "strerror", None)
    return FlopwiseError(
        f"{named or path or 'a file'} cannot be read",
        why=why or str(error),
        hint="check its permissions and its disk" if why else "fetch the file again; it may be cut short",
    )


def pieces(entry: Entry, progress: ReadingProgress | None, *, whole_lines: bool = False) -> Iterator[str]:
    """The text of a file in pieces of about PIECE_BYTES, each up to the end of a line.

    A line that is longer is cut between two characters, unless lines have to stay whole.
    """
    path = entry.source.path
    digest = hashlib.sha256()
    compressed = path.suffix.lower() in COMPRESSED
    first = 0
    held = bytearray()
    try:
        with open_source(path) as stream:
            while block := stream.read(PIECE_BYTES):
                if not compressed:
                    digest.update(block)
                    if progress is not None:
                        progress.add(len(block))
                held += block
                if len(block) < PIECE_BYTES:
                    continue
                cut = held.rfind(b"\n", len(held) - len(block)) + 1
                if not cut and not whole_lines:
                    cut = _last_character(held)
                if cut:
                    yield decode_text(path, bytes(held[:cut]), first)
                    first += cut
                    del held[:cut]
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(error if not isinstance(error, zlib.error) else EOFError(str(error)), path) from None
    if compressed:
        digest = _digest_of(path)
        if progress is not None:
            progress.add(entry.size_bytes)
    if digest.hexdigest() != entry.sha256:
        raise FlopwiseError(
            f"{path} changed while it was read", why="its tokens would not be those of any one file", hint="try again"
        )
    if held:
        yield decode_text(path, bytes(held), first)


def _digest_of(path: Path) -> hashlib._Hash:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256")


def _last_character(content: bytearray) -> int:
    """Where the last character begins."""
    for back in range(1, min(4, len(content)) + 1):
        if content[-back] & 0xC0 != 0x80:
            return len(content) - back
    return len(content)


def decode_text(path: Path, content: bytes, first: int) -> str:
    if first == 0:
        # Some editors begin a file with a byte-order mark; it is no part of the text.
        first += len(content) - len(content.removeprefix(BYTE_ORDER_MARK))
        content = content.removeprefix(BYTE_ORDER_MARK)
    if first == 0:
        _check_signature(path, content)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"byte {first + error.start:,} is 0x{content[error.start]:02x}: {error.reason}"
        if len(content) - len(content.translate(None, CONTROL)) > MOST_CONTROL * len(content):
            raise _binary(path, f"{why}, and there are more control characters than text has") from None
        raise FlopwiseError(
            f"{path} is not UTF-8 text",
            why=why,
            hint=f"convert it: iconv -f latin1 -t utf-8 {path.name} > converted; or leave it out",
        ) from None
    if (zeros := text.count("\0")) > MOST_ZEROS * len(text):
        raise _binary(path, f"{zeros:,} of its bytes are 0, the first of them byte {first + content.index(0):,}")
    return text


def _check_signature(path: Path, content: bytes) -> None:
    """Refuse what says in its first bytes that it is another kind of file."""
    kind = next((kind for start, kind in SIGNATURES.items() if content.startswith(start)), None)
    if kind is not None:
        raise _binary(path, f"it begins as {kind} does")
    if content.startswith(UTF_16):
        raise FlopwiseError(
            f"{path} is UTF-16 text",
            why="text is read as UTF-8",
            hint=f"convert it: iconv -f utf-16 -t utf-8 {path.name} > converted",
        )


def _binary(path: Path, why: str) -> FlopwiseError:
    return FlopwiseError(
        f"{path} is no text",
        why=f"{why}: trained on as text it would teach nothing",
        hint="text, or rows as .jsonl or .csv; leave it out otherwise",
    )
