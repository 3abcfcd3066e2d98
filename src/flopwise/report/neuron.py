"""A Neuron document printed in the layout that such documents are read in: a printed section reads back as itself.

Every number comes from its value, in the profiler's scaled units and to its number of digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from flopwise.profile.read.neuron_metrics import NeuronDocument, NeuronMemory, NeuronRow, NeuronSection, group_of
from flopwise.profile.read.neuron_text import (
    BYTE_UNITS,
    CONFIGURATION_LINE,
    DECIMALS,
    FLOP_UNITS,
    MEMORY_HEADER,
    SUMMARY_HEADER,
    is_free_text,
)
from flopwise.profile.read.trainer_metrics import TrainMetric

# From where on a unit of time is used, as far as the profiler's printing tells: it has 409.83 us and 0.53 ms.
_TIME_STEPS = ((1.0, "s", 1.0), (0.5e-3, "ms", 1e-3), (0.5e-6, "us", 1e-6), (0.0, "ns", 1e-9))
_MOST_DECIMALS = 12


def neuron_document(document: NeuronDocument) -> str:
    """All sections, below a table of contents."""
    return "\n".join(["[TOC]\n", *(neuron_section(section) for section in document.sections)])


def neuron_section(section: NeuronSection) -> str:
    """One section: heading, notes, train metrics, summary, memory."""
    parts = [f"{'#' * section.level} {section.heading}".rstrip()] if section.level else []
    parts += [_note(note) for note in section.notes]
    if section.train_metrics:
        parts.append("\n".join(["```", "***** train metrics *****", *_metric_lines(section.train_metrics), "```"]))
    if section.logical_neuroncore_config is not None:
        parts.append(f"**{CONFIGURATION_LINE} = {section.logical_neuroncore_config}**")
    if section.summary:
        parts.append(_table(SUMMARY_HEADER, list(_summary_rows(section.summary))))
    if section.memory:
        parts.append(_table(MEMORY_HEADER, [_memory_row(row) for row in section.memory]))
    return "\n\n".join(parts) + "\n"


def _note(note: str) -> str:
    line = " ".join(note.splitlines()).strip()
    if line.startswith(("```", "~~~")):
        return f"> {line}"
    # Within a code block a line that looks like markdown is text.
    return line if is_free_text(line) else f"```\n{line}\n```"


def _metric_lines(metrics: Mapping[str, TrainMetric]) -> list[str]:
    printed = {name: _metric(metric) for name, metric in metrics.items()}
    name_width, width = max(map(len, printed)), max(map(len, printed.values()))
    return [f"  {name:<{name_width}} = {value:>{width}}" for name, value in printed.items()]


def _metric(metric: TrainMetric) -> str:
    value = metric.value
    if isinstance(value, str):
        return value
    if metric.unit == "s" and value >= 0:
        # Hundredths are cut; the little more keeps those that were read from being cut twice.
        hundredths = math.floor(value * 100 + 1e-6)
        minutes, rest = divmod(hundredths, 6000)
        return f"{minutes // 60}:{minutes % 60:02d}:{rest // 100:02d}.{rest % 100:02d}"
    if metric.unit == "FLOP":
        return f"{int(value) >> 30}GF"
    if metric.unit == "B":
        return f"{int(value) >> 20}MB"
    return str(value)


def _summary_rows(summary: Mapping[str, NeuronRow]) -> Iterator[tuple[str, str, str]]:
    """The group stands in its first row only, and the other rows begin one cell further left."""
    group: str | None = None
    for name, row in summary.items():
        value = _value(name, row)
        yield (f"**{name}**", value, "") if row.group == group else (_cell(row.group), f"**{name}**", value)
        group = row.group


def _memory_row(row: NeuronMemory) -> tuple[str, str, str, str]:
    return str(row.nd_idx), str(row.nc_idx), _cell(row.usage_type), _bytes(row.bytes, row.half_ulp_bytes)


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


def _value(name: str, row: NeuronRow) -> str:
    value, half_ulp = row.value, row.half_ulp or 0.0
    if isinstance(value, str):
        return _cell(value)
    match row.unit:
        case "B":
            text = _bytes(value, half_ulp)
        case "FLOP":
            text = _scale(value, half_ulp, FLOP_UNITS, 1000)
        case "s":
            unit, scale = next((unit, scale) for least, unit, scale in _TIME_STEPS if value >= least)
            text = f"{_digits(value / scale, DECIMALS['s'], half_ulp / scale)} **{unit}**"
        case "%":
            text = _percent(value, half_ulp)
        case "share":
            text = _percent(value * 100, half_ulp * 100)
        case "FLOP/B":
            text = f"{_digits(value, DECIMALS['FLOP/B'], half_ulp)} **flops/byte**"
        case "count":
            text = str(round(value))
        case _:
            text = _digits(value, DECIMALS["1"], half_ulp)
            # Of a metric that nothing is known of, the point is what tells a ratio from a count.
            text = text if "." in text or group_of(name) is not None else f"{text}.0"
    return text


def _percent(percent: float, half_ulp: float) -> str:
    """To two decimals; below a tenth to two significant digits."""
    decimals = DECIMALS["%"]
    if 0 < percent < 0.1:
        decimals = min(_MOST_DECIMALS, 1 - math.floor(math.log10(percent)))
    return f"{_digits(percent, decimals, half_ulp)} **%**"


def _bytes(value: float, half_ulp: float) -> str:
    return _scale(value, half_ulp, BYTE_UNITS, 1024)


def _scale(value: float, half_ulp: float, units: Mapping[str, float], step: float) -> str:
    """In the largest unit of which it is at least one."""
    text = ""
    for unit, scale in units.items():
        text = f"{_digits(value / scale, 3, half_ulp / scale)} **{unit}**"
        if round(value / scale, 3) < step:
            break
    return text


def _digits(number: float, decimals: int, half_ulp: float) -> str:
    """Rounded, without zeros at the end; more decimals where the number is known to more."""
    if half_ulp > 0:
        decimals = max(decimals, min(_MOST_DECIMALS, round(-math.log10(2 * half_ulp))))
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = (header, ["-" * width for width in widths], *rows)
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )
