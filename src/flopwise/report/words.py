"""Figures and texts of others in words, as everything that is printed has them: one set of formatters.

`base.units` shows a quantity to three digits (`show_seconds`, `show_bytes`, …). Here are those that may be unknown, and
those of profiles, which keep a fixed number of decimals as the tools do that they are read from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import encodable
from flopwise.base.units import show_bytes, show_seconds, show_share, significant
from flopwise.work.lengths import parse_lengths

if TYPE_CHECKING:
    from flopwise.records.profile import Unit

UNKNOWN = "-"
LONGEST_NAME = 60
"""Signs of a name of a file that a line repeats."""
BEYOND_READING = 1e15

# -- texts of others -------------------------------------------------------------------------------------------------

KEPT = "\n\u00a0\u2009\u202f"
"""Signs that are not called printable and do no harm: ends of lines, and blanks that do not break."""


def visible(text: str) -> str:
    """Text in lines, with a question mark for what a terminal would act on: escapes, controls, turns of direction."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in KEPT else "?" for sign in encodable(text))


def printable(text: str) -> str:
    """A name of a record on one line, without signs that a terminal would act on."""
    return visible(" ".join(text.split()))


def safe(text: str, longest: int = LONGEST_NAME) -> str:
    """A name of a file on one line, nothing in it that a terminal acts on, cut where it is beyond reading."""
    # Far more than will be shown is not even looked at: names may be megabytes.
    line = printable(text[: 4 * longest])
    return line if len(line) <= longest and len(text) <= 4 * longest else f"{line[: longest - 1]}…"


def shorten(name: str, room: int) -> str:
    """A name cut in its middle: names of runs often differ at the end."""
    line = safe(name, 400)
    if len(line) <= room:
        return line
    tail = (room - 1) // 2
    return f"{line[: room - 1 - tail]}…{line[len(line) - tail :]}"


def count_nouns(count: int, noun: str) -> str:
    """`1 slot`, `2 slots`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def list_words(words: Sequence[str]) -> str:
    """`one`, `one and two`, `one, two and three`."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


# -- figures that may be unknown -------------------------------------------------------------------------------------


def count_words(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count:,}"


def loss_words(loss: float | None) -> str:
    """Four digits, however small or large."""
    if loss is None or not isfinite(loss):
        return UNKNOWN if loss is None else str(loss)
    return significant(loss, 4) if loss == 0 or 1e-3 <= abs(loss) < 1e6 else f"{loss:.2e}"


def rate_words(per_s: float | None, digits: int = 3) -> str:
    """Tokens a second, without the unit."""
    return UNKNOWN if per_s is None else significant(per_s, digits)


def padded_words(per_s: float | None) -> str:
    """Behind a rate in tokens a second, what it is with padding; nothing where there is none."""
    return "" if per_s is None else f" ({rate_words(per_s)} with padding)"


def lengths_words(words: str | None) -> str:
    """How long sequences are, of the words that records hold; nothing where all are alike."""
    if words is None:
        return ""
    try:
        return parse_lengths(words).brief
    except FlopwiseError:
        # A record may be damaged.
        return printable(words)


def share_words(share: float | None) -> str:
    return UNKNOWN if share is None else show_share(share)


def seconds_words(seconds: float | None) -> str:
    if seconds is None or not isfinite(seconds):
        return UNKNOWN if seconds is None else f"{seconds} s"
    return show_seconds(seconds) if seconds else "0 s"


def size_words(size: int | None) -> str:
    return show_bytes(size) if size else UNKNOWN


def signed_share(share: float | None, decimals: int = 1) -> str:
    """A change, or how far something is off: `+0.6 %`, `−12 %`."""
    if share is None or not isfinite(share):
        return UNKNOWN
    return f"{'−' if share < 0 else '+'}{abs(100 * share):.{decimals}f} %"


def clock_words(seconds: float) -> str:
    """A duration as a clock has it: `0:53`, `2:03:04`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


# -- figures of profiles, with a fixed number of decimals ------------------------------------------------------------

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def scale_figure(value: float, unit: Unit) -> str:
    """A figure in the unit that suits its size: `5.472 GiB`, `654.344 GFLOP`, `322.1 us`, `0.041 %`."""
    return _WRITERS[unit](value) if isfinite(value) else f"{value}"


def seconds(value: float, digits: int | None = None) -> str:
    """Two decimals, or so many digits: `us` below half a millisecond, `ms` below a second."""
    size = abs(value)
    scale, unit = (1e6, "us") if size < 0.5e-3 else (1e3, "ms") if size < 1 else (1.0, "s")
    if digits is not None:
        return f"{'−' if value < 0 else ''}{significant(size * scale, digits)} {unit}"
    return f"{plain(value * scale, 2)} {unit}" if size else "0 s"


def percent(share: float) -> str:
    """Two decimals, or two digits of what is below 0.1 %."""
    hundredths = 100 * share
    if 0 < abs(hundredths) < 0.1:
        return f"{_strip(significant(hundredths, 2))} %"
    return f"{plain(hundredths, 2)} %"


def about(share: float | None) -> str:
    """A share within a sentence: `43 %`, `2.6 %`."""
    return UNKNOWN if share is None else f"{plain(100 * share, 0 if abs(share) >= 0.0995 else 1)} %"


def change_words(change: float | None) -> str:
    """Relative to another figure: `+12.3 %`, `×4.2` for what is several times as large, `=` for the same."""
    if change is None or not isfinite(change):
        return ""
    if change >= 2:
        return f"×{digits(1 + change)}"
    return "=" if abs(change) < 5e-4 else signed_share(change)


def digits(value: float) -> str:
    """Three significant digits, thousands separated; powers of ten for what is beyond any reading."""
    return significant(value) if abs(value) < BEYOND_READING else f"{value:.3g}"


def plain(value: float, decimals: int) -> str:
    """At most so many decimals, without zeros that say nothing."""
    return _strip(f"{value:.{decimals}f}") if abs(value) < BEYOND_READING else f"{value:.3g}"


def _strip(text: str) -> str:
    """`16` for `16.00`."""
    short = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if short in ("-0", "") else short


def _step(value: float, step: int, units: Sequence[str]) -> str:
    """Three decimals in the largest unit that the figure has one of."""
    number = 0
    while number < len(units) - 1 and abs(round(value, 3)) >= step:
        value /= step
        number += 1
    return f"{plain(value, 3)} {units[number]}"


def _count(value: float) -> str:
    is_whole = value == round(value) or abs(value) >= 1e4
    return f"{value:,.0f}" if is_whole and abs(value) < BEYOND_READING else plain(value, 2)


_WRITERS: dict[Unit, Callable[[float], str]] = {
    "B": lambda value: _step(value, 1024, BINARY),
    "FLOP": lambda value: _step(value, 1000, [f"{prefix}FLOP" for prefix in DECIMAL]),
    "Hz": lambda value: _step(value, 1000, [f"{prefix}Hz" for prefix in DECIMAL]),
    "s": seconds,
    "share": percent,
    "count": _count,
    "FLOP/B": lambda value: f"{plain(value, 2)} FLOP/B",
    "1": lambda value: plain(value, 4) if abs(value) < 1e6 else _count(value),
    "1/s": lambda value: f"{digits(value)}/s",
    "W": lambda value: f"{digits(value)} W",
    "J": lambda value: f"{digits(value)} J",
    "degC": lambda value: f"{digits(value)} °C",
}
