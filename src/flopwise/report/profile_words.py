"""A profile's figures and verdicts in words: scaled units, titles, clauses, and the paragraph that `why` prints."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from flopwise.base.units import significant
from flopwise.records.profile import METRIC, Clue, Profile, Unit, Value, Verdict, VerdictKind
from flopwise.report.training import printable

UNKNOWN = "-"
LONGEST_NAME = 60
"""Signs of a name of a file that a line repeats."""
SLOWED = 0.1
"""Traced steps that take so much longer are told apart from others."""
FEWEST_WORDS, MOST_WORDS = 60, 140
"""Of the paragraph."""

MOST_WARNINGS, LONGEST_WARNING = 3, 200
"""That a sentence repeats, and signs of each."""

BEYOND_READING = 1e15

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
DECIMAL = ("", "k", "M", "G", "T", "P", "E")

# -- numbers ---------------------------------------------------------------------------------------------------------


def scaled(value: float, unit: Unit) -> str:
    """A figure in the unit that suits its size: `5.472 GiB`, `654.344 GFLOP`, `322.1 us`, `0.041 %`."""
    return _WRITERS[unit](value) if isfinite(value) else f"{value}"


def seconds(value: float) -> str:
    """Two decimals: `us` below half a millisecond, `ms` below a second."""
    for limit, scale, unit in ((0.5e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if 0 < abs(value) < limit:
            return f"{_plain(value * scale, 2)} {unit}"
    return f"{_plain(value, 2)} s"


def percent(share: float) -> str:
    """Two decimals, or two digits of what is below 0.1 %."""
    hundredths = 100 * share
    if 0 < abs(hundredths) < 0.1:
        return f"{_stripped(significant(hundredths, 2))} %"
    return f"{_plain(hundredths, 2)} %"


def about(share: float) -> str:
    """A share within a sentence: `43 %`, `2.6 %`."""
    return f"{_plain(100 * share, 0 if abs(share) >= 0.0995 else 1)} %"


def change_words(change: float | None) -> str:
    """Relative to another figure: `+12.3 %`, `×4.2` for what is several times as large, `=` for the same."""
    if change is None or not isfinite(change):
        return ""
    if change >= 2:
        return f"×{digits(1 + change)}"
    if abs(change) < 5e-4:
        return "="
    return f"{'−' if change < 0 else '+'}{abs(100 * change):.1f} %"


def _stepped(value: float, step: int, units: Sequence[str]) -> str:
    """Three decimals in the largest unit that the figure has one of."""
    number = 0
    while number < len(units) - 1 and abs(round(value, 3)) >= step:
        value /= step
        number += 1
    return f"{_plain(value, 3)} {units[number]}"


def digits(value: float) -> str:
    """Three significant digits, thousands separated; powers of ten for what is beyond any reading."""
    return significant(value) if abs(value) < BEYOND_READING else f"{value:.3g}"


def _plain(value: float, decimals: int) -> str:
    return _stripped(f"{value:.{decimals}f}") if abs(value) < BEYOND_READING else f"{value:.3g}"


def _stripped(text: str) -> str:
    """Without zeros that say nothing, as `16` for `16.00`."""
    short = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if short in ("-0", "") else short


def _count(value: float) -> str:
    is_whole = value == round(value) or abs(value) >= 1e4
    return f"{value:,.0f}" if is_whole and abs(value) < BEYOND_READING else _plain(value, 2)


_WRITERS: dict[Unit, Callable[[float], str]] = {
    "B": lambda value: _stepped(value, 1024, BINARY),
    "FLOP": lambda value: _stepped(value, 1000, [f"{prefix}FLOP" for prefix in DECIMAL]),
    "Hz": lambda value: _stepped(value, 1000, [f"{prefix}Hz" for prefix in DECIMAL]),
    "s": seconds,
    "share": percent,
    "count": _count,
    "FLOP/B": lambda value: f"{_plain(value, 2)} FLOP/B",
    "1": lambda value: _plain(value, 4) if abs(value) < 1e6 else _count(value),
    "1/s": lambda value: f"{digits(value)}/s",
    "W": lambda value: f"{digits(value)} W",
    "J": lambda value: f"{digits(value)} J",
    "degC": lambda value: f"{digits(value)} °C",
}


def value_words(name: str, value: Value) -> str:
    """One of a profile's values, by its name."""
    return scaled(value.value, METRIC[name].unit)


def safe(text: str, longest: int = LONGEST_NAME) -> str:
    """A name of a file on one line, nothing in it that a terminal acts on, cut where it is beyond reading."""
    # Far more than will be shown is not even looked at: names may be megabytes.
    line = printable(text[: 4 * longest])
    return line if len(line) <= longest and len(text) <= 4 * longest else f"{line[: longest - 1]}…"


def name_words(profile: Profile) -> str:
    """A profile's name on one line; there is always something."""
    return safe(profile.name).strip() or "(no name)"


def warning_words(warnings: Sequence[str]) -> str:
    """What is damaged or missing, on a line: figures of a part stand nowhere without it."""
    told = "; ".join(safe(warning, LONGEST_WARNING) for warning in warnings[:MOST_WARNINGS])
    more = f"; and {len(warnings) - MOST_WARNINGS:,} more" if len(warnings) > MOST_WARNINGS else ""
    return f"{told}{more}"


def shortened(name: str, room: int) -> str:
    """A name cut in its middle: names of runs often differ at the end."""
    line = safe(name, 400)
    if len(line) <= room:
        return line
    tail = (room - 1) // 2
    return f"{line[: room - 1 - tail]}…{line[len(line) - tail :]}"


# -- verdicts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Title:
    """What a verdict is called, and what a run does that has it."""

    title: str
    predicate: str


TITLES: dict[VerdictKind, Title] = {
    "host_bound": Title("host-bound", "is host-bound"),
    "memory_bound": Title("memory-bound", "is bound by device memory"),
    "data_movement_bound": Title("data-movement-bound", "is bound by data movement"),
    "spill_bound": Title("spills", "spills on-chip memory"),
    "layout_overhead": Title("layout overhead", "changes layouts"),
    "matrix_underfilled": Title("matrix unit underfilled", "leaves the matrix unit underfilled"),
    "communication_bound": Title("communication-bound", "is bound by communication"),
    "throttled": Title("throttled", "is throttled"),
    "compute_bound": Title("compute-bound", "is bound by computation"),
    "capacity": Title("memory nearly full", "has little device memory to spare"),
    "invalid": Title("invalid value", "has a figure that cannot be right"),
}

CLAUSES = {
    "the device's share of the step's wall time": "the device is busy {} of the step's wall time",
    "the device's time without anything handed to it": "for {} of its time the device has been handed nothing",
    "device-memory bandwidth in use": "{} of the device-memory bandwidth is in use",
    "FLOPs a byte, of the ridge's": "it computes {}",
    "copies with no computation beside them": "copies with no computation beside them take {} of the device's time",
    "copy engines' activity": "copy engines have work for {} of the device's time",
    "mean size of what is moved at a time": "{} are moved at a time on average",
    "reads of what had overflowed on-chip memory": "{} of the bytes read had overflowed on-chip memory",
    "executed FLOPs that only change a layout": "{} of the executed FLOPs only change a layout",
    "the peak reached while the matrix unit is active": "{} of the peak is reached while the matrix unit is active",
    "collectives with no computation beside them": (
        "collectives with no computation beside them take {} of the device's time"
    ),
    "collectives, hidden or not": "collectives run for {} of the device's time",
    "throughput that hardware limits took": "hardware limits took {} of the throughput",
    "mean clock": "the mean clock is {}",
    "boost clock": "the highest clock is {}",
    "mean power": "the mean power is {}",
    "the matrix unit's active time": "the matrix unit is active {} of the device's time",
    "MFU over the MFU that memory allows": "the MFU is {} of what memory allows",
    "the device's memory taken": "{} of the device's memory is taken",
    "memory taken that is in pieces nobody can use": "{} of the memory taken is in pieces that nobody can use",
}
"""Figures that the rules name, as a clause; any other is told as `what: figure`."""

RELATIONS = {"<": "under", "<=": "no more than", ">": "over", ">=": "no less than"}


def title(verdict: Verdict) -> str:
    """Its name; of an invalid figure also the rule that is broken."""
    found = TITLES[verdict.kind].title
    return f"{found}: {safe(verdict.detail)}" if verdict.kind == "invalid" and verdict.detail else found


def clause(evidence: Clue, *, bounded: bool = True) -> str:
    """`the device is busy 43 % of the step's wall time, under 70 %`, or without the bound."""
    figure = _figure(evidence.value, evidence.unit)
    template = CLAUSES.get(evidence.what)
    told = template.format(figure) if template else f"{safe(evidence.what)}: {figure}"
    if evidence.bound is None or not evidence.relation or not bounded:
        return told
    return f"{told}, {RELATIONS[evidence.relation]} {_figure(evidence.bound, evidence.unit)}"


def _figure(value: float, unit: Unit) -> str:
    return about(value) if unit == "share" and isfinite(value) else scaled(value, unit)


def evidence_words(verdict: Verdict) -> str:
    """All that a verdict rests on."""
    if verdict.kind == "invalid":
        return "; ".join(_found(each) for each in verdict.evidence)
    return "; ".join(clause(each) for each in verdict.evidence)


def _found(evidence: Clue) -> str:
    # Enough digits to tell apart what differs by a per cent.
    beside = "" if evidence.bound is None else f" beside {evidence.bound:.5g}"
    return f"found {evidence.value:.5g}{beside}"


def stake_words(verdict: Verdict) -> str:
    """What is at stake at most."""
    return UNKNOWN if verdict.share is None else about(verdict.share)


# -- why -------------------------------------------------------------------------------------------------------------


def why_paragraph(profile: Profile, verdicts: Sequence[Verdict]) -> str:
    """What the run is, what limits it, what does not although it looks so, and what to do first: one paragraph."""
    limits = [verdict for verdict in verdicts if verdict.kind != "invalid"]
    invalid = [verdict for verdict in verdicts if verdict.kind == "invalid"]
    sentences = [
        _what_it_is(profile),
        f"Warning: {warning_words(profile.warnings)}." if profile.warnings else "",
        _how_it_went(profile),
        _first_limit(profile, limits),
        _other_limits(limits),
        _idle_bandwidth(profile, limits),
        _cheap_throttling(profile, limits),
        _invalid(invalid),
        _first_advice(limits),
    ]
    # Where there is no room, what says the least goes first.
    for number in (6, 2, 5, 4):
        if _words(sentences) > MOST_WORDS:
            sentences[number] = ""
    for more in _more(profile):
        if _words(sentences) < FEWEST_WORDS and _words([*sentences, more]) <= MOST_WORDS:
            sentences.insert(len(sentences) - 1, more)
    return " ".join(sentence for sentence in sentences if sentence)


def why_lines(profile: Profile, verdicts: Sequence[Verdict], width: int) -> list[str]:
    """The paragraph in lines of at most `width`, none of which begins with a unit."""
    firm = re.sub(r"(?<=\d) (?=(?:%|us|ms|s|FLOP/B)\b|%)", "\u00a0", why_paragraph(profile, verdicts))
    return [line.replace("\u00a0", " ") for line in textwrap.wrap(firm, width, break_on_hyphens=False)]


def _words(sentences: Sequence[str]) -> int:
    return sum(len(sentence.split()) for sentence in sentences)


def _what_it_is(profile: Profile) -> str:
    if not (profile.device or profile.batch_sequences or profile.sequence_tokens or profile.precision):
        return f"This is {name_words(profile)}."
    told = f"{name_words(profile)} ran"
    if profile.device:
        told += f" on {safe(profile.device, 40)}"
    if profile.world is not None and profile.world > 1:
        told += f", one of {profile.world:,} devices,"
    if profile.batch_sequences is not None:
        of = f" of {profile.sequence_tokens:,} tokens" if profile.sequence_tokens is not None else ""
        told += f" with {profile.batch_sequences:,} sequences{of} a step"
    elif profile.sequence_tokens is not None:
        told += f" with sequences of {profile.sequence_tokens:,} tokens"
    if profile.precision:
        told += f" in {safe(profile.precision, 20)}"
    return f"{told.removesuffix(',')}."


def _how_it_went(profile: Profile) -> str:
    wall, span, mfu = (profile.get(name) for name in ("step_wall_s", "device_span_s", "mfu"))
    a_step = "A step" if profile.steps is not None or wall is not None else "What was profiled"
    told = []
    if wall is not None:
        # On a CPU the two are one.
        apart = span is not None and abs(span - wall) > 1e-3 * wall
        steady = _untraced_s(profile)
        if steady is not None and abs(wall - steady) > SLOWED * steady:
            told.append(f"{a_step} takes {seconds(steady)} ({seconds(wall)} while it is traced)")
        else:
            told.append(
                f"{a_step} takes {seconds(wall)}" + (f", the device {seconds(span)} of it" if span and apart else "")
            )
    elif span is not None:
        told.append(f"{a_step} takes the device {seconds(span)}")
    if mfu is not None:
        told.append(f"{'at ' if told else 'It reaches '}{about(mfu)} MFU")
    return f"{', '.join(told)}." if told else ""


def _untraced_s(profile: Profile) -> float | None:
    """A step of our own run as its rates have it: they leave traced steps out."""
    rate, batch = profile.get("samples_per_s"), profile.batch_sequences
    if profile.format != "flopwise" or not rate or not batch:
        return None
    return batch * (profile.world or 1) / rate


def _whole(profile: Profile) -> str:
    return "the step" if profile.get("step_wall_s") is not None else "the device's time"


def _first_limit(profile: Profile, limits: Sequence[Verdict]) -> str:
    if not limits:
        return "No rule finds a limit in the figures that are there."
    first = limits[0]
    at_stake = f" Up to {about(first.share)} of {_whole(profile)} is at stake." if first.share is not None else ""
    return f"Most of all it {TITLES[first.kind].predicate}: {clause(first.evidence[0])}.{at_stake}"


def _other_limits(limits: Sequence[Verdict]) -> str:
    """The second with its evidence, the third."""
    told = []
    for number, verdict in enumerate(limits[1:3]):
        at_stake = f"up to {about(verdict.share)}" if verdict.share is not None else ""
        reasons = [at_stake, "" if number else clause(verdict.evidence[0], bounded=False)]
        beside = "; ".join(reason for reason in reasons if reason)
        told.append(f"it {TITLES[verdict.kind].predicate}" + (f" ({beside})" if beside else ""))
    return f"Next, {', then '.join(told)}." if told else ""


def _idle_bandwidth(profile: Profile, limits: Sequence[Verdict]) -> str:
    """Below the ridge, and still not bound by memory."""
    intensity, ridge, use = (profile.get(name) for name in ("intensity", "ridge", "mbu"))
    if intensity is None or ridge is None or use is None or intensity >= ridge:
        return ""
    if any(verdict.kind == "memory_bound" for verdict in limits):
        return ""
    return (
        f"Its {scaled(intensity, 'FLOP/B')} lie below the ridge of {_plain(ridge, 2)}, but only {about(use)} of the "
        "memory bandwidth is used: this is not the limit."
    )


def _cheap_throttling(profile: Profile, limits: Sequence[Verdict]) -> str:
    limited, loss = profile.get("throttle_share"), profile.get("throttle_loss")
    if limited is None or loss is None or limited < 0.05 or any(verdict.kind == "throttled" for verdict in limits):
        return ""
    return f"Throttling for {about(limited)} of the time costs only {about(loss)}."


def _invalid(invalid: Sequence[Verdict]) -> str:
    if not invalid:
        return ""
    rules = ", ".join(safe(verdict.detail, 40) for verdict in invalid[:2])
    more = f" and {len(invalid) - 2} more" if len(invalid) > 2 else ""
    return f"Figures that break {rules}{more} cannot be right: conclude nothing from them."


def _first_advice(limits: Sequence[Verdict]) -> str:
    if not limits:
        return "A profile with more figures would tell more."
    return f"Try first: {limits[0].advice}."


def _more(profile: Profile) -> Iterator[str]:
    """For a paragraph that is short since little is known."""
    wanted = {
        "step_wall_s": "a step's wall time",
        "device_span_s": "the device's time",
        "model_flops": "the model's FLOPs",
        "hbm_read_bytes": "device-memory traffic",
        "copy_active_s": "the copy engines' activity",
        "comm_active_s": "the time of collectives",
    }
    unknown = [words for name, words in wanted.items() if profile.get(name) is None]
    if profile.peaks is None:
        unknown.append("the device's peaks")
    if unknown:
        listed = ", ".join(unknown[:-1]) + (" and " if len(unknown) > 1 else "") + unknown[-1]
        yield f"Not known: {listed}; limits that show in them cannot be told from this profile."
    if profile.kernels:
        longest = profile.kernels[0]
        yield f"The longest kernel is {safe(longest.name, 40)} with {seconds(longest.seconds)}."
    yield (
        "The verdicts rest on fixed rules: each holds one figure of the profile against a bound, says how much time is "
        "at stake at most, and leaves out whatever the profile does not know; --threshold moves the bounds."
    )
