"""A calibration for people and for programs: what the device's kernels reach, and how well the constants meet it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from flopwise.base.files import to_json, with_schema
from flopwise.base.units import show_bytes, show_seconds, show_share, significant
from flopwise.calibrate.calibrated import copy_rates, median_of
from flopwise.records.calibration import AttentionRow, Calibration, FitErrors, Fitted, ProductRow
from flopwise.report.tables import text_table
from flopwise.setup.hardware import Hardware

KINDS = {"forward": "forward", "to_source": "to the input", "to_matrix": "to the matrix"}
WAYS = {
    "to_device": "host to device",
    "to_host": "device to host",
    "to_device_beside": "host to device, both at once",
    "to_host_beside": "device to host, both at once",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRecord:
    """A calibration, what became of it and where it went."""

    file: str
    hardware: Hardware
    held_out: Fitted
    calibration: Calibration


def calibration_json(record: CalibrationRecord) -> str:
    """Every row that was timed, beside the description."""
    return to_json(with_schema(record, "calibration"))


def calibration_page(record: CalibrationRecord) -> RenderableType:
    """Rates by class of shape, attention by length, bandwidths, clocks, and what to do with the file."""
    calibration, hardware = record.calibration, record.hardware
    versions = ", ".join(f"{name} {version}" for name, version in calibration.versions.items())
    heading = f"{calibration.device_name} · {calibration.units} units · {show_bytes(calibration.memory_bytes)}"
    parts: list[RenderableType] = [
        Text(heading, style="bold"),
        Text(f"measured in {show_seconds(calibration.seconds)} with {versions}"),
        Text(""),
        _products(calibration, hardware),
    ]
    if calibration.attentions:
        parts += [Text(""), _attention(calibration, hardware)]
    parts += [Text(""), _figures(record)]
    parts += [Text(f"note: {note}") for note in calibration.notes]
    parts += [Text(""), Text(f"written to {record.file}; use it with --on {record.file}")]
    return Group(*parts)


def _scale(calibration: Calibration) -> tuple[float, str]:
    """What rates of arithmetic are told in."""
    best = max((row.flops_per_s for row in calibration.products), default=0.0)
    return (1e12, "TFLOP/s") if best >= 1e12 else (1e9, "GFLOP/s")


def _products(calibration: Calibration, hardware: Hardware) -> Text:
    """Large products (every side at least 1024) by format and purpose, and the small ones together."""
    lines = []
    rows, (scale, unit) = calibration.products, _scale(calibration)
    for number_format in dict.fromkeys(row.number_format for row in rows):
        own = [row for row in rows if row.number_format == number_format]
        classes: list[tuple[str, list[ProductRow]]] = [
            (f"large, {words}", [row for row in own if row.is_large and row.kind == kind])
            for kind, words in KINDS.items()
        ]
        classes.append(("small", [row for row in own if not row.is_large]))
        for words, mine in classes:
            if mine:
                lines.append((number_format, words, *_product_cells(mine, scale, hardware)))
    columns = ("products", "shapes", "rows", f"median {unit}", "of the peak", f"best {unit}")
    text = text_table(columns, lines, ("products", "shapes"))
    if any(not row.is_large for row in rows):
        text.append("\nsmall: a side is shorter than 1,024; such products may not fill the device")
    return text


def _product_cells(rows: Sequence[ProductRow], scale: float, hardware: Hardware) -> tuple[str, ...]:
    rates = [row.flops_per_s for row in rows]
    median = statistics.median(rates)
    peak = hardware.device.peak_flops.get(rows[0].number_format)
    share = "-" if peak is None else show_share(median / peak.value)
    return str(len(rows)), significant(median / scale), share, significant(max(rates) / scale)


def _attention(calibration: Calibration, hardware: Hardware) -> Text:
    """Causal attention by length, each width of heads with as many of them as were timed."""
    rows, (scale, unit) = calibration.attentions, _scale(calibration)
    peak = hardware.device.peak_flops[calibration.number_format].value
    widths = sorted({row.head_dim for row in rows}, reverse=True)
    columns = ["tokens", f"{widths[0]} forward", "of peak", f"{widths[0]} backward", " of peak"]
    columns += [f"{width} {direction}" for width in widths[1:] for direction in ("forward", "backward")]
    lines = []
    for tokens in sorted({row.tokens for row in rows}):
        line = [f"{tokens:,}"]
        for width in widths:
            for direction in ("forward", "backward"):
                found = _fullest(
                    row for row in rows if (row.tokens, row.head_dim, row.direction) == (tokens, width, direction)
                )
                line.append("-" if found is None else significant(found.flops_per_s / scale))
                if width == widths[0]:
                    line.append("-" if found is None else show_share(found.flops_per_s / peak))
        lines.append(line)
    text = Text(f"causal attention in {calibration.number_format}, {unit} by width of heads\n")
    text.append_text(text_table(columns, lines, ()))
    return text


def _fullest(rows: Iterable[AttentionRow]) -> AttentionRow | None:
    return max(rows, key=lambda row: row.sequences * row.heads, default=None)


def _figures(record: CalibrationRecord) -> Text:
    calibration, fitted = record.calibration, record.held_out
    lines: list[tuple[str, str]] = []
    if calibration.kept_up_flops_per_s is not None:
        lines.append(("product kept up", f"{significant(calibration.kept_up_flops_per_s / 1e12)} TFLOP/s"))
    largest = max((row.bytes for row in calibration.streams), default=0)
    for row in calibration.streams:
        if row.bytes * 2 > largest:
            lines.append((f"memory, {row.kernel}", _per_s(row.bytes_per_s)))
    lines += [(WAYS[way], _per_s(rate)) for way, rate in copy_rates(calibration).items()]
    if calibration.update_bytes_per_s is not None:
        lines.append(("update on the host", _per_s(calibration.update_bytes_per_s)))
    lines.append(("shortest kernel", show_seconds(calibration.launch_s)))
    lines.append(("host, a kernel", show_seconds(calibration.host_launch_s)))
    clock = median_of(sample.clock_hz for sample in calibration.samples)
    power = median_of(sample.power_w for sample in calibration.samples)
    if clock is not None:
        lines.append(("clock under load", f"{clock / 1e6:,.0f} MHz"))
    if power is not None:
        limit = calibration.power_limit_w
        lines.append(("power under load", f"{power:.0f} W" + (f" of {limit:.0f} W" if limit else "")))
    names: tuple[tuple[str, FitErrors | None], ...] = (
        ("products", fitted.products),
        ("attention", fitted.attention),
        ("memory", fitted.streams),
    )
    lines += [(f"fit of {name}", _errors(errors)) for name, errors in names]
    width = max(len(name) for name, _ in lines)
    return Text("\n".join(f"{name.ljust(width)}  {value}" for name, value in lines))


def _errors(errors: FitErrors | None) -> str:
    if errors is None:
        return "too few shapes to hold any out"
    return f"{show_share(errors.median)} in the median, {show_share(errors.largest)} at most, held out"


def _per_s(rate: float) -> str:
    unit, scale = ("TB/s", 1e12) if rate >= 1e12 else ("GB/s", 1e9)
    return f"{significant(rate / scale)} {unit}"
