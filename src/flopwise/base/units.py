"""Quantities as people write them, both ways: `40GiB`, `64k` tokens, `1.5e12`; lists and ranges of them.

A comma separates values, always: `64,256` is two numbers or refused, never 64,256. `8_192` groups digits.

Bytes have binary (KiB, MiB, GiB, TiB) and decimal units (kB, MB, GB, TB), and a bare `G` is refused because both
are in use. For tokens and sequences k, M and G are powers of 1,024, as sequence lengths are written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

from flopwise.base.errors import FlopwiseError, Word, one_of, shown

BINARY_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
DECIMAL_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
TOKEN_UNITS = {"": 1, "k": 2**10, "M": 2**20, "G": 2**30}
LARGEST_COUNT = 2**53
"""Beyond this a float no longer holds every whole number; no batch is that large."""

MOST_DEVICES = 10**6
MOST_DIGITS = 18
MOST_VALUES = 100_000
"""Of one list: nobody waits for more."""
Auto = Literal["auto"]
AUTO: Final = "auto"
"""A value that is left to flopwise."""
Quantity = int | str
"""A number, or one as the command line takes it: 8192 or "8k", 2**30 or "1GiB"."""
Given = TypeVar("Given", bound=Quantity)
Parsed = TypeVar("Parsed")


def read_option(value: Given | None, option: str, parse: Callable[[Given], Parsed]) -> Parsed | None:
    """An option's value, None where it is left to flopwise; a mistake in it is told with the option's name."""
    if value is None or str(value).lower() == AUTO:
        return None
    try:
        return parse(value)
    except FlopwiseError as error:
        raise error.within(f"--{option}") from None


def read_word(value: str | None, known: Sequence[Word], option: str) -> Word | None:
    """One of the known words, None where it is left to flopwise."""
    choices: list[str] = [AUTO, *known]
    word = one_of(AUTO if value is None else value, choices, f"--{option}")
    return next((one for one in known if one == word), None)


def parse_cap(place: Literal["device", "host"]) -> Callable[[Quantity], int]:
    """Reads a cap on memory; no host memory at all may be meant."""
    return lambda given: check_cap(parse_bytes(given), str(given), place)


def parse_count(least: int, example: str) -> Callable[[str], int]:
    """Reads whole numbers from `least` on: 100, 1_000."""

    def parse(text: str) -> int:
        if "," in text:
            raise one_expected(text, "a whole number")
        plain = text.strip().replace("_", "")
        if not (plain.isascii() and plain.isdecimal()) or len(plain) > MOST_DIGITS or int(plain) < least:
            raise FlopwiseError(
                f"cannot be {shown(text)}", why=f"a whole number of at least {least} is expected", hint=example
            )
        return int(plain)

    return parse


_WHOLE = r"(?:\d{1,3}(?:_\d{3})+|\d+)"
"""Digits, in groups of three where they are grouped."""
_QUANTITY = re.compile(rf"\s*([+-]?(?:{_WHOLE}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*", re.ASCII)


def _split(given: str | float, what: str, example: str) -> tuple[float, str]:
    text = str(given)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        if "," in text:
            raise one_expected(text, what)
        raise FlopwiseError(
            f"cannot read {shown(given)} as {what}", why="a number with a unit is expected", hint=example
        )
    number = float(match[1].replace("_", ""))
    if not math.isfinite(number):
        raise FlopwiseError(f"{given!r} is too large", hint=example)
    if number < 0:
        raise FlopwiseError(f"{what} cannot be negative, got {given!r}", hint=example)
    return number, match[2]


def one_expected(text: str, what: str) -> FlopwiseError:
    """The error of a comma in what is to be one number."""
    together = text.replace(",", "").strip() if re.fullmatch(r"\s*\d{1,3}(,\d{3})+(\.\d*)?\s*\w*\s*", text) else ""
    return FlopwiseError(
        f"cannot read {shown(text)} as {what}",
        why="a comma separates values, and one is expected here",
        hint=f"{together} if it is one number; else run it once for each" if together else "run it once for each",
    )


RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_FIGURE = re.compile(r"(\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)\s?([kmg]?)", re.IGNORECASE)


def parse_figure(text: str) -> float:
    """A measured figure, as logs and tables print it: `66670`, `66,670`, `6.667e4`, `66.67k` (66,670)."""
    found = _FIGURE.fullmatch(text.strip())
    if found is None:
        raise FlopwiseError(
            f"cannot read {shown(text)} as a figure",
            why="a number is expected, perhaps with k, M or G for powers of 1,000",
            hint="66670, 66,670 or 66.67k",
        )
    return float(found[1].replace(",", "")) * RATE_UNITS[found[2].lower()]


def parse_bytes(text: str | float) -> int:
    """Bytes from `40GiB`, `80 GB`, `1.5e12` or a plain number."""
    example = "for instance 40GiB (2^30 bytes each) or 40GB (10^9)"
    number, unit = _split(text, "a size in bytes", example)
    units = {name.lower(): size for name, size in (*BINARY_UNITS.items(), *DECIMAL_UNITS.items())}
    if re.fullmatch(r"[KMGTP]i?b", unit):
        raise FlopwiseError(
            f"cannot read {text!r} as a size in bytes",
            why=f"{unit!r} means bits: a byte is a capital B",
            hint=f"{number:g}{unit[:-1]}B, or {example}",
        )
    if unit and unit.lower() not in units:
        bare = unit.lower().rstrip("b")
        why = f"{unit!r} is not a unit of bytes"
        if bare in ("k", "m", "g", "t", "p"):
            why = f"{unit!r} may mean {bare.upper()}iB (binary) or {bare.upper()}B (decimal)"
        raise FlopwiseError(f"cannot read {text!r} as a size in bytes", why=why, hint=example)
    size = number * units[unit.lower()] if unit else number
    if size > LARGEST_COUNT:
        raise FlopwiseError(f"{text!r} is more than any machine holds", hint=example)
    return round(size)


LONGEST_LIST = 64
"""Values that a list or a range may have; more of them is a mistake."""

_RANGE = re.compile(r"(.+?)-(.+?)([+*])(.+)")


LEAST_CAP_BYTES = 2**20
"""Less than this is a forgotten unit: no device is that small."""


def check_cap(size: int, text: str, place: Literal["device", "host"]) -> int:
    """A cap on memory, unless it is too little to be meant; no host memory at all may be."""
    if size >= LEAST_CAP_BYTES or (place == "host" and not size):
        return size
    words = text.replace(",", " ").split()
    forgotten = size and any(word.isdecimal() and int(word) == size for word in words)
    raise FlopwiseError(
        f"{size:,} bytes are no {place}'s memory",
        why="a number without a unit counts bytes" if forgotten else f"at least {LEAST_CAP_BYTES:,} are",
        hint=f"--{place}-mem {size if forgotten else 40}GiB",
    )


def parse_byte_list(text: str) -> list[int]:
    """Several sizes: `16,24,40GiB`, `64-192+32GiB` (from, to, by so much more) or `16-128*2GiB` (times).

    A unit at the end stands for all that have none.
    """
    example = "for instance 16,24,40GiB or 64-192+32GiB"
    unit = re.search(r"[A-Za-z]+$", text.strip())
    found: list[int] = []
    for part in (present(one, text, example) for one in text.split(",")):
        bounds = _RANGE.fullmatch(part.strip())
        if bounds is None:
            if re.fullmatch(r"\s*[\d.]+[A-Za-z]*-[\d.]+[A-Za-z]*\s*", part):
                raise FlopwiseError(
                    f"cannot read {shown(part.strip())} as a range of sizes",
                    why="it says not by how much",
                    hint=example,
                )
            found.append(_with_unit(part, unit))
            continue
        first, last = _with_unit(bounds[1], unit), _with_unit(bounds[2], unit)
        grows = bounds[3] == "*"
        step = _split(bounds[4], "a factor", example)[0] if grows else float(_with_unit(bounds[4], unit))
        if (grows and step <= 1) or step <= 0 or last < first or first == 0 < grows:
            raise FlopwiseError(
                f"cannot read {shown(part.strip())} as a range of sizes", why="it never reaches its end", hint=example
            )
        value = float(first)
        while value <= last and len(found) <= LONGEST_LIST:
            found.append(round(value))
            value = value * step if grows else value + step
    if len(found) > LONGEST_LIST:
        raise FlopwiseError(f"{shown(text)} is more than {LONGEST_LIST} sizes", hint=example)
    return list(dict.fromkeys(found))


def _with_unit(text: str, unit: re.Match[str] | None) -> int:
    plain = text.strip()
    return parse_bytes(plain if unit is None or plain[-1:].isalpha() else plain + unit[0])


def parse_watts(text: str | float) -> float:
    """Watts: 500, `500W`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[wW]?\s*", str(text))
    if found is None or not float(found[1]):
        raise FlopwiseError(
            f"cannot read {shown(str(text))} as a power limit", why="it is in watts", hint="--power 500W"
        )
    return float(found[1])


def parse_tokens(text: str | int) -> int:
    """A count of tokens: `8192`, `8k` (8,192), `2M` (2,097,152)."""
    return _parse_whole(text, "a number of tokens", "for instance 8192, 8k (8,192) or 2M (2,097,152)")


def parse_sequences(text: str | int) -> int:
    """A count of sequences, in the units of tokens: `48`, `2k`."""
    return _parse_whole(text, "a number of sequences", "for instance 48 or 2k (2,048)")


def parse_devices(text: str | int) -> int:
    """A count of devices: `8`."""
    plain = str(text).strip()
    if "," in plain:
        raise one_expected(plain, "a number of devices")
    if not (plain.isascii() and plain.isdecimal()) or len(plain) > 9 or not 1 <= int(plain) <= MOST_DEVICES:
        raise FlopwiseError(
            f"{shown(text)} is no number of devices", why=f"whole devices, from 1 to {MOST_DEVICES:,}", hint="--gpus 8"
        )
    return int(plain)


def _parse_whole(text: str | int, what: str, example: str) -> int:
    number, unit = _split(text, what, example)
    units = {name.lower(): size for name, size in TOKEN_UNITS.items()}
    if unit.lower() not in units:
        raise FlopwiseError(f"cannot read {text!r} as {what}", why=f"{unit!r} is not k, M or G", hint=example)
    count = number * units[unit.lower()]
    if count != int(count) or count < 1:
        raise FlopwiseError(f"{what} must be a whole number of at least 1, got {text!r}", hint=example)
    if count > LARGEST_COUNT:
        raise FlopwiseError(f"{text!r} is too large for {what}", hint=example)
    return int(count)


_COUNT_RANGE = re.compile(r"\s*(.+?)\s*-\s*(.+?)\s*([+*])\s*(.*?)\s*")
_HALF_RANGE = re.compile(r"\s*[\d.]+[A-Za-z]*\s*-\s*[\d.]+[A-Za-z]*\s*")


def parse_counts(text: str, parse: Callable[[str], int], example: str, *, auto: bool = False) -> list[int | Auto]:
    """Whole numbers: `1,2,4`, `512-8k*2` (times 2 up to 8k), `1-16+5` (5 more each time), or a mixture of these."""
    found: list[int | Auto] = []
    for part in text.split(","):
        bounds = _COUNT_RANGE.fullmatch(present(part, text))
        if auto and part.strip().lower() == AUTO:
            found.append(AUTO)
        elif bounds is not None:
            found += _range(bounds, parse, example)
        elif _HALF_RANGE.fullmatch(part):
            raise FlopwiseError(
                f"cannot read {shown(part.strip())} as a range", why="it does not say by how much", hint=example
            )
        else:
            found.append(parse(part))
    return found


def present(part: str, text: str, example: str = "1,2,4") -> str:
    """A part of a list, if there is anything between its commas."""
    if not part.strip():
        raise FlopwiseError(f"cannot read {shown(text)}", why="a value between commas is missing", hint=example)
    return part


def _range(bounds: re.Match[str], parse: Callable[[str], int], example: str) -> list[int]:
    first, last = parse(bounds[1]), parse(bounds[2])
    whole = bounds[0].strip()
    if last < first:
        raise FlopwiseError(
            f"{shown(whole)} is an empty range",
            why=f"it begins at {first:,} and ends at {last:,}",
            hint=f"{bounds[2]}-{bounds[1]}{bounds[3]}{bounds[4]}",
        )
    step = _step(bounds, parse, example)
    if bounds[3] == "+":
        if (last - first) // step >= MOST_VALUES:
            raise FlopwiseError(f"{shown(whole)} is more than {MOST_VALUES:,} values", hint=example)
        return list(range(first, last + 1, step))
    found = [first]
    while found[-1] * step <= last:
        found.append(found[-1] * step)
    return found


def _step(bounds: re.Match[str], parse: Callable[[str], int], example: str) -> int:
    """What a range goes on by, such that it gets anywhere."""
    text, least = bounds[4], 2 if bounds[3] == "*" else 1
    zeros = text.strip("0") == "" and text != ""
    if bounds[3] == "+" and text and not zeros:
        return parse(text)
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < least:
        what = "a factor is a whole number of at least 2" if least == 2 else "a step is at least 1"
        raise FlopwiseError(f"{shown(bounds[0].strip())} never reaches its end", why=what, hint=example)
    return int(text)


def exact_tokens(count: int) -> str:
    """A count of tokens as `parse_tokens` reads it back without loss: 8192 is `8k`, 8000 is `8000`."""
    unit, scale = next((unit, scale) for unit, scale in reversed(TOKEN_UNITS.items()) if count % scale == 0)
    return f"{count // scale}{unit}"


def exact_bytes(size: int) -> str:
    """A size as `parse_bytes` reads it back without loss: 51539607552 is `48GiB`."""
    fitting = [(name, scale) for name, scale in BINARY_UNITS.items() if size and size % scale == 0]
    name, scale = max(fitting, key=lambda one: one[1], default=("", 1))
    return f"{size // scale}{name}"


def significant(value: float, digits: int = 3) -> str:
    """A number for a person: `digits` significant digits, thousands separated, never 1e+03."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    rounded = f"{value:,.{decimals}f}"
    # 9.996 rounds to 10.00 with three digits asked for: one decimal too many.
    if decimals and float(rounded.replace(",", "")) >= 10 ** (digits - decimals):
        rounded = f"{value:,.{decimals - 1}f}"
    return rounded


def show_bytes(size: float) -> str:
    """Bytes for a person, in binary units: `83.1 GiB`."""
    unit, scale = "B", 1
    for name, candidate in BINARY_UNITS.items():
        if abs(size) >= candidate:
            unit, scale = name, candidate
    return f"{significant(size / scale)} {unit}"


def show_count(count: float, unit: str = "") -> str:
    """A large count in decimal prefixes: `8.03 G`, `1.23 PFLOP`."""
    prefix, scale = "", 1.0
    for name, candidate in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15), ("E", 1e18), ("Z", 1e21)):
        if abs(count) >= candidate:
            prefix, scale = name, candidate
    return f"{significant(count / scale)} {prefix}{unit}".rstrip()


def show_seconds(seconds: float) -> str:
    """A time for a person: `17.4 s`, `3.21 ms`, `45.0 µs`, `2.1 h`."""
    for limit, scale, unit in ((1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (600.0, 1.0, "s"), (36_000.0, 60.0, "min")):
        if seconds < limit:
            return f"{significant(seconds / scale)} {unit}"
    return f"{significant(seconds / 3600)} h" if seconds < 172_800 else f"{significant(seconds / 86_400)} days"


def show_share(share: float) -> str:
    """A share for a person: `58.8 %`."""
    return f"{100 * share:.1f} %"
