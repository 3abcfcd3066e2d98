"""Runs a command line in this process and takes what it said apart: figures, which stay, and words, which may change.

`said/ID.txt` holds what each command of `commands.txt` said before; its figures are read from there, by the same rules.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shlex
import shutil
import sqlite3
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from unittest.mock import patch

import typer.main

from flopwise.cli import main

from .make_store import make_stores

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMANDS = HERE / "commands.txt"
SAID = HERE / "said"
CHANGED_WORDS = HERE / "changed_words.toml"
WIDTH = "160"
"""Of the terminal. Wide: where a cell is wrapped, one word more elsewhere puts figures in another order."""
MARK = "=====> "
"""Begins the line before each part of what was said."""
SETTINGS = {"COLUMNS": WIDTH, "NO_COLOR": "1", "TZ": "UTC", "HOME": "/nonexistent"}
OTHERS = ("FLOPWISE_STORE", "FORCE_COLOR", "RANK", "WORLD_SIZE", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "TERM")

# Built anew for every line, the commands and their options would take a quarter of the time.
BUILT_ONCE = cache(typer.main.get_command)

MASKS = (
    (re.compile(r"^flopwise \d+\.\d+\.\d+\S*$", re.MULTILINE), "flopwise <version>"),
    (re.compile(r"^searched for \S+ \S+$", re.MULTILINE), "searched for <time>"),
    # When a page was made.
    (re.compile(r'(?<="created":")[^"]*(?=","live":)'), "<time>"),
    # A cell's id is a hash of its set-up, twelve digits of it; so are fingerprints and commits where they are printed.
    (re.compile(r"\b(?=\d*[a-f])[0-9a-f]{12}\b"), "<hash>"),
    # One in three hundred has no letter: in tables it is known by the state behind run, attempt and repeat.
    (re.compile(r"(?<=,)\d{12}(?=(?:,[^,\n]*){3},(?:planned|predicted|ok|failed),)"), "<hash>"),
)
"""What changes by nature, and what stands in its place."""

UNITS = (
    *("%", "tok/s", "tokens/s", "FLOP/s", "TFLOP/s", "PFLOP/s", "GFLOP/s", "FLOP", "TFLOP", "PFLOP", "GFLOP"),
    *("B", "KiB", "MiB", "GiB", "TiB", "kB", "KB", "MB", "GB", "TB", "B/s", "kB/s", "MB/s", "GB/s", "TB/s", "GiB/s"),
    *("ns", "µs", "ms", "s", "min", "h", "d", "W", "J", "kJ", "Hz", "kHz", "MHz", "GHz", "k", "K", "M", "G", "T", "P"),
    *("E", "×"),
)
_UNIT = "|".join(re.escape(unit) for unit in sorted(UNITS, key=len, reverse=True))
WHOLE_FLOAT = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
"""A float in full, as JSON and CSV have it."""
FIGURE = re.compile(rf"(?<![\w.−+-])[-+−]?\d[\d,_]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:\s?(?:{_UNIT})(?!\w))?(?![\w])")
"""A number with its unit. Not one within a name: llama-3-8b, h100, dp8, bf16."""


@dataclass(frozen=True)
class Said:
    """What a command said: its exit code, its streams, and the files that it wrote."""

    code: int
    parts: Mapping[str, str]


def read_commands(path: Path = COMMANDS) -> dict[str, str]:
    """Command lines by id; what stands before `flopwise` are variables of the environment."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, command = line.split(maxsplit=1)
            if name in found:
                raise ValueError(f"{name} is there twice")
            found[name] = command
    return found


def make_folder(folder: Path) -> None:
    """What the commands read: files of other tools as they are, everything of our own as today's code writes it."""
    shutil.copytree(HERE / "inputs", folder, dirs_exist_ok=True)
    for name, target in (("data", ROOT / "tests" / "data"), ("results", ROOT / "benchmarks" / "results")):
        (folder / name).symlink_to(target)
    for script in folder.glob("*.sql"):
        with contextlib.closing(sqlite3.connect(script.with_suffix(".sqlite"))) as database:
            database.executescript(script.read_text(encoding="utf-8"))
        script.unlink()
    make_stores(folder)
    for name, line in read_commands().items():
        if name.startswith("make-"):
            run(line, folder, keep=True)


@contextlib.contextmanager
def _surroundings(folder: Path, variables: Mapping[str, str]) -> Iterator[None]:
    before, arguments, place = dict(os.environ), sys.argv, Path.cwd()
    for name in OTHERS:
        os.environ.pop(name, None)
    os.environ.update({**SETTINGS, **variables})
    time.tzset()
    os.chdir(folder)
    try:
        with patch("typer.main.get_command", BUILT_ONCE):
            yield
    finally:
        os.chdir(place)
        os.environ.clear()
        os.environ.update(before)
        time.tzset()
        sys.argv = arguments


def run(line: str, folder: Path, *, keep: bool = False) -> Said:
    """Run a line in `folder`. Files that it writes there are taken away again, unless they are to be kept."""
    words = shlex.split(line)
    start = words.index("flopwise")
    variables = dict(word.split("=", 1) for word in words[:start])
    there = _files(folder)
    out, err = io.StringIO(), io.StringIO()
    with _surroundings(folder, variables), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = words[start:]
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    assert isinstance(code, int), code
    parts = {"stdout": out.getvalue(), "stderr": err.getvalue()}
    for path in sorted(_files(folder) - there):
        parts[path.relative_to(folder).as_posix()] = path.read_text(encoding="utf-8")
        if not keep:
            path.unlink()
    shown = {name: _mask(_visible(text)) for name, text in parts.items() if text.strip()}
    return Said(code, shown)


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def _mask(text: str) -> str:
    for pattern, word in MASKS:
        text = pattern.sub(word, text)
    return text


class _Visible(HTMLParser):
    """Text of a page or a picture, and the data that it brings; not its style, its program and its coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in ("script", "style") and ("type", "application/json") not in attrs

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= self.hidden > 0 and tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self.hidden and data.strip():
            # Within data a page's signs are escaped, as in names of kernels: <128, 4>.
            signs = re.sub(r"\\u00(3c|3e|26)", lambda found: chr(int(found[1], 16)), data)
            self.texts.append(" ".join(signs.split()))


def _visible(text: str) -> str:
    if not re.match(r"\s*<(!doctype html|html|svg|\?xml)", text, re.IGNORECASE):
        return text
    page = _Visible()
    page.feed(text)
    return "<page>\n" + "\n".join(page.texts) + "\n"


# -- what was said, in a file ----------------------------------------------------------------------------------------


def to_text(said: Said, line: str) -> str:
    parts = [f"{MARK}{name}\n{text.rstrip()}\n" for name, text in said.parts.items()]
    return f"$ {line}\nexit {said.code}\n" + "".join(parts)


def from_text(text: str) -> Said:
    head, *parts = re.split(rf"^{MARK}", text, flags=re.MULTILINE)
    code = int(head.splitlines()[1].split()[1])
    return Said(code, dict(part.split("\n", 1) for part in parts))


def recorded(name: str) -> Said:
    return from_text((SAID / f"{name}.txt").read_text(encoding="utf-8"))


# -- figures and words -----------------------------------------------------------------------------------------------


def _leaves(value: object) -> Iterator[object]:
    """Values of an object of JSON or TOML, whatever they are called and wherever they stand."""
    if isinstance(value, dict):
        # Which layout it is, is no figure.
        for key, item in value.items():
            yield from () if key == "schema" else _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _leaves_of(name: str, text: str) -> list[object] | None:
    """Of a part that is an object and no text for people."""
    try:
        if name.endswith(".toml"):
            return list(_leaves(tomllib.loads(text)))
        return list(_leaves(json.loads(text))) if text.lstrip()[:1] in "{[" else None
    except ValueError:
        return None


def _by_column(text: str) -> str:
    """A table of columns with names in the order of these: where a column stands is no figure."""
    if not re.match(r"[a-z]\w*(,[a-z]\w*)+\r?\n", text):
        return text
    head, *rows = csv.reader(io.StringIO(text))
    if any(len(row) != len(head) for row in rows):
        return text
    order = sorted(range(len(head)), key=head.__getitem__)
    return "\n".join(" ; ".join(row[place] for place in order) for row in (head, *rows))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def figures(name: str, text: str) -> list[str] | Counter[str]:
    """In the order of a text; of an object or a page, whose parts may be moved about, each as often as it is there."""
    leaves = _leaves_of(name, text)
    if leaves is not None:
        return Counter(_digits(repr(value)) for value in leaves if _is_number(value))
    found = [_digits(" ".join(figure.split())) for figure in FIGURE.findall(_by_column(text))]
    return Counter(found) if text.startswith("<page>") else found


def _digits(figure: str) -> str:
    """As printed, but thirteen digits at most: the last bits of exp and log differ between processors."""
    is_long = len(figure) > 13 and WHOLE_FLOAT.fullmatch(figure)
    return f"{float(figure):.13g}" if is_long else figure


def words(name: str, text: str) -> str:
    """All but the figures; lines and rules of tables are left out."""
    leaves = _leaves_of(name, text)
    if leaves is not None:
        keys = re.findall(r'"[^"\\]+"(?=\s*:)|^[\w.]+(?= = )', text, re.MULTILINE)
        return " ".join(sorted([*keys, *(str(value) for value in leaves if not _is_number(value))]))
    return " ".join(re.sub(r"[─━│|\-]{2,}|[|│]", " ", FIGURE.sub("#", _by_column(text))).split())


def lost_figures(before: Said, after: Said) -> list[str]:
    """Which figures of which part are others now."""
    if before.code != after.code:
        return [f"exit code {before.code} is {after.code} now"]
    found = []
    for name, text in before.parts.items():
        then, now = figures(name, text), figures(name, after.parts.get(name, ""))
        if isinstance(then, Counter):
            gone, new = then - Counter(now), Counter(now) - then
            if gone:
                found.append(f"{name}: no longer there: {_few(gone)}; new: {_few(new)}")
        elif isinstance(now, Counter) or then != now:
            found.append(f"{name}: {_first_other(then, list(now))}")
    return found


def _few(values: Counter[str]) -> str:
    listed = sorted(values.elements())
    return ", ".join(listed[:20]) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "")


def _first_other(then: list[str], now: list[str]) -> str:
    pairs = enumerate(zip_longest(then, now, fillvalue="nothing"), 1)
    number, (one, other) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    around = " ".join(then[max(0, number - 4) : number - 1])
    return f"figure {number} of {len(then)}, after “{around}”: {one} is {other} now"


def changed_words(before: Said, after: Said) -> list[str]:
    """Where something else is said, or something more."""
    found = []
    for name in dict.fromkeys([*before.parts, *after.parts]):
        text, now = before.parts.get(name, ""), after.parts.get(name, "")
        then_words, now_words = words(name, text).split(), words(name, now).split()
        if then_words != now_words:
            found.append(f"{name}: {_first_other(then_words, now_words)}".replace("figure", "word", 1))
        elif isinstance(counted := figures(name, now), Counter) and (new := counted - Counter(figures(name, text))):
            found.append(f"{name}: new figures: {_few(new)}")
    return found
