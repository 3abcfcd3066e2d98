"""How long sequences are, from what a caller has: a file of data, a file of numbers, words, or lengths themselves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.files import entry_kind
from flopwise.base.units import parse_tokens, present
from flopwise.engine.data.records import column_of, lines_of
from flopwise.engine.data.sources import find_sources, survey
from flopwise.work.lengths import MOST_COUNTED, Lengths, count_lengths
from flopwise.work.model import Model

WAYS = "a file (data.csv, data.jsonl:column, lengths.txt), mean=24, 5,17x3,128, or min=2,p50=17,p90=40,max=66"
NAMES = ("length", "lengths", "tokens", "input_ids", "text")
"""Columns that say how long a row is, the first that is there; of a text its tokens are counted."""
CHARACTERS_PER_TOKEN = 4.0
"""Of English text and usual tokenizers."""
MOST_TOKENIZED = 20_000
"""Texts of a file, at even distances, that tell what all are like."""
BYTE_VOCABULARY = 512
"""Models with no more tokens than this read bytes, with one token in front."""


def lengths_of(
    given: str | Path | Sequence[int] | Lengths,
    model: Model,
    *,
    tokenizer: str | Path | None = None,
    sequence: int | None = None,
) -> Lengths:
    """The distribution, none longer than a sequence may be."""
    most = sequence or model.context
    if isinstance(given, Lengths):
        return given.cut(most)
    if not isinstance(given, str | Path):
        return count_lengths(_checked(given)).cut(most)
    text = str(given).strip()
    if not text:
        raise FlopwiseError("--lengths is empty", why="a variable was not set?", hint=WAYS)
    found = _of_words(text)
    if found is None:
        return _of_file(text, model, _tokenizer_of(tokenizer)).cut(most)
    return found.cut(most)


def _checked(lengths: Iterable[object], where: str = "--lengths") -> Iterator[int]:
    for tokens in lengths:
        number = tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None
        if number is None and hasattr(tokens, "__index__") and not isinstance(tokens, bool):
            number = int(tokens.__index__())
        if number is None or number < 1:
            raise FlopwiseError(
                f"{where}: {shown(tokens)} is no length", why="whole numbers of tokens, from 1", hint=WAYS
            )
        yield number


# -- words -----------------------------------------------------------------------------------------------------------

_QUANTILE = re.compile(r"(mean|min|max|p\d{1,2}(?:\.\d+)?)\s*=\s*([^=]+)")
_COUNTED = re.compile(r"(\d+[kK]?)(?:\s*x\s*(\d+))?")


def _of_words(text: str) -> Lengths | None:
    """What words say; None: they are a path."""
    parts = [part.strip() for part in text.split(",")]
    if _COUNTED.fullmatch(parts[0]):
        return count_lengths(Counter(_counted(text)))
    if not _QUANTILE.fullmatch(parts[0]):
        return None
    points: dict[str, float] = {}
    for part in parts:
        read = _QUANTILE.fullmatch(present(part, text, "mean=24"))
        if read is None or read[1] in points:
            raise FlopwiseError(f"--lengths: cannot read {shown(part)}", why="once each, as name=tokens", hint=WAYS)
        points[read[1]] = _number(read[2])
    if "mean" not in points:
        return count_lengths(Counter(_between(points)))
    if len(points) > 1:
        raise FlopwiseError(
            "--lengths: a mean beside quantiles", why="quantiles say what the mean is", hint="one or the other"
        )
    mean = points["mean"]
    below = int(mean)
    share = round(1000 * (mean - below))
    told = "every sequence is taken to be as long as the mean"
    return replace(count_lengths(Counter({below: 1000 - share, below + 1: share} if share else {below: 1})), note=told)


def _number(text: str) -> float:
    try:
        number = float(text) if re.fullmatch(r"\d+\.\d+", text.strip()) else float(parse_tokens(text))
    except FlopwiseError as error:
        raise error.within("--lengths") from None
    if number < 1:
        raise FlopwiseError(f"--lengths: {shown(text)} is no length", why="it is at least 1", hint=WAYS)
    return number


def _counted(text: str) -> dict[int, int]:
    found = Counter[int]()
    for part in text.split(","):
        read = _COUNTED.fullmatch(present(part, text, "5,17x3,128").strip())
        if read is None or not 1 <= int(read[2] or 1) <= MOST_COUNTED:
            raise FlopwiseError(
                f"--lengths: cannot read {shown(part.strip())}", why="tokens, or tokens x count", hint=WAYS
            )
        found[int(_number(read[1]))] += int(read[2] or 1)
    return found


def _between(points: dict[str, float]) -> Iterator[int]:
    """A thousand lengths with these quantiles, evenly between them."""
    ends = {"min": 0.0, "max": 100.0}
    known = sorted((ends[name] if name in ends else float(name[1:]), tokens) for name, tokens in points.items())
    if known[-1][0] < 100.0 or any(first[1] > then[1] for first, then in pairwise(known)):
        raise FlopwiseError(
            "--lengths: these quantiles are of nothing",
            why="they rise, and `max` says where they end",
            hint="min=2,p50=17,p90=40,max=66",
        )
    if known[0][0] > 0.0:
        known.insert(0, (0.0, 1.0))
    for step in range(1000):
        place = (step + 0.5) / 10
        (begin, least), (end, most) = next(pair for pair in pairwise(known) if pair[1][0] >= place)
        yield max(1, round(least + (most - least) * (place - begin) / (end - begin)))


# -- files -----------------------------------------------------------------------------------------------------------


def _tokenizer_of(named: str | Path | None) -> str | None:
    return None if named is None or str(named).lower() in ("", "auto") else str(named)


def _of_file(text: str, model: Model, tokenizer: str | None) -> Lengths:
    """`data.csv`, or `data.csv:column`; what is no table has a number on each line."""
    name, colon, column = text.rpartition(":")
    if not colon or entry_kind(Path(text)) != "nothing":
        name, column = text, ""
    if entry_kind(Path(name)) == "nothing" and not re.search(r"[./\\]", name):
        raise FlopwiseError(f"--lengths: cannot read {shown(text)}", why="there is no such file", hint=WAYS)
    sources, _ = find_sources([name], labelled=False)
    values: list[object] = []
    for entry in survey(sources, None):
        columns = (column,) if column else NAMES
        values += lines_of(entry) if entry.source.form == "text" else column_of(entry, columns)
    if not values:
        raise FlopwiseError(f"--lengths: there is no row in {name}", hint=WAYS)
    first = _whole(values[0])
    if isinstance(first, list):
        return count_lengths(_checked((len(row) if isinstance(row, list) else row for row in values), name))
    # In a file of plain text a line is a number; who meant a text has the wrong file.
    if isinstance(first, str) and any(source.form != "text" for source in sources):
        return _of_texts(values, model, tokenizer, name)
    return count_lengths(_checked(map(_whole, values), name))


def _whole(value: object) -> object:
    """A number, where a table's or a line's words are one."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal():
        return int(value)
    return value


def _of_texts(texts: Sequence[object], model: Model, tokenizer: str | None, name: str) -> Lengths:
    """By the tokenizer, or by how many characters a token mostly has, which is told."""
    odd = next((text for text in texts if not isinstance(text, str)), None)
    if odd is not None:
        raise FlopwiseError(f"{name}: {shown(odd)} is no text", why="the rows before are", hint=WAYS)
    rows = [str(text) for text in texts if str(text).strip()]
    if not rows:
        raise FlopwiseError(f"--lengths: every text of {name} is blank", hint=WAYS)
    vocabulary = getattr(model, "vocab", 0)
    some = list(islice(rows, 0, None, -(-len(rows) // MOST_TOKENIZED)))
    if tokenizer is not None or vocabulary <= BYTE_VOCABULARY:
        from flopwise.engine.data.tokenizer import load_tokenizer

        found = load_tokenizer(tokenizer, vocabulary).samples(some, model.context)
        return count_lengths(_checked(each.size for each in found if each.size))
    lengths = (max(1, round(len(text) / CHARACTERS_PER_TOKEN)) for text in rows)
    told = (
        f"tokens of {Path(name).name} are estimated, {CHARACTERS_PER_TOKEN:g} characters each: no --tokenizer is named"
    )
    return replace(count_lengths(lengths), note=told)
