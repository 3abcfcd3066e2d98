"""Read the Neuron profiler's JSON: `view --output-format summary-json`, or `json` with its long lists left aside.

Unlike in the tables of its user interface (`neuron_text`), every `*_percent` is a fraction of 1 here and nothing is
scaled: seconds, bytes, FLOP. So percentages are taken as they are, with the unit `share`, and never divided by 100.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from flopwise.base.errors import FlopwiseError, shown
from flopwise.profile.read.neuron_metrics import (
    METRIC_NAME,
    NeuronDocument,
    NeuronRow,
    NeuronSection,
    group_of,
    section_profile,
    unit_of,
)
from flopwise.profile.read.opening import TraceFile
from flopwise.records.profile import Read

MOST_SUMMARY_BYTES = 16 * 2**20
"""A summary has a hundred numbers; what is longer is none."""
MOST_ROWS = 10_000
MOST_SECTIONS = 1_000
MOST_CANDIDATES = 16
"""Places that say `"summary":` and are looked at."""
_BLOCK_BYTES = 2**20
_KEY_BYTES = 256

_KEY = re.compile(rb'"summary"\s{0,64}:\s{0,64}(?=[\[{])')
_NUMBER = re.compile(r"\d{1,30}(?:\.\d{1,30})?(?:[eE][+-]?\d{1,3})?$")
_TELLTALE = re.compile(
    rb'"(?:neuroncore_cycle_count|tensor_engine_active_time|mfu_estimated_percent|mbu_estimated_percent'
    rb'|dma_active_time|hbm_read_bytes|total_active_time)"|"summary"\s{0,64}:\s{0,64}\[|"(?:instruction|dma)"\s{0,64}:'
)
_DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= 30 else math.inf)
"""Numbers of thousands of digits become infinite, which is then told as damage."""


def looks_like(head: bytes) -> bool:
    """Whether a file that begins like this is the profiler's JSON."""
    beginning = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not beginning.startswith((b"{", b"[")) or b'"traceEvents"' in head or b'"log_history"' in head:
        return False
    return _TELLTALE.search(head) is not None


def read_source(source: TraceFile, name: str) -> Read:
    """A profile for each summary of the file; what else it holds is passed over and not kept."""
    sections = read_sections(source, name)
    profiles = tuple(section_profile(section, origin=(name,), written_as="neuron-json") for section in sections)
    return Read(profiles=profiles, native=NeuronDocument(sections=sections))


def read_sections(source: TraceFile, name: str) -> tuple[NeuronSection, ...]:
    """The file's summaries: under the key `summary`, in a list, or one alone."""
    summaries = list(_summaries(_summary(source)))
    if not summaries:
        raise FlopwiseError(
            f"{name} has no summary of a Neuron profile",
            hint="write one with `neuron-profile view --output-format summary-json`",
        )
    sections = []
    for number, summary in enumerate(summaries[:MOST_SECTIONS]):
        heading = name if len(summaries) == 1 else f"{name} {number}"
        sections.append(_section(summary, heading))
    return tuple(sections)


def _summary(source: TraceFile) -> object:
    """What stands under `summary`; the whole file where nothing does and it is small; None: neither."""
    buffer = b""
    is_whole = True
    position = candidates = 0
    while block := source.read(_BLOCK_BYTES):
        buffer += block
        while (found := _KEY.search(buffer, position)) and candidates < MOST_CANDIDATES:
            candidates += 1
            position = found.end()
            value, buffer = _value_at(buffer, position, source)
            if next(_summaries(value), None) is not None:
                return value
        if len(buffer) > MOST_SUMMARY_BYTES:
            is_whole = False
        if not is_whole:
            buffer = buffer[-_KEY_BYTES:]
        position = max(position if is_whole else 0, len(buffer) - _KEY_BYTES, 0)
    return _decode(buffer)[0] if is_whole else None


def _value_at(buffer: bytes, start: int, source: TraceFile) -> tuple[object, bytes]:
    """The JSON value that begins at `start`, None if there is none, and the buffer with what was read on for it."""
    while True:
        value, is_complete = _decode(buffer[start : start + MOST_SUMMARY_BYTES])
        if is_complete or len(buffer) - start >= MOST_SUMMARY_BYTES:
            return value, buffer
        more = source.read(max(_BLOCK_BYTES, len(buffer) - start))
        if not more:
            return None, buffer
        buffer += more


def _decode(content: bytes) -> tuple[object, bool]:
    text = content.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    try:
        return _DECODER.raw_decode(text)[0], True
    except (ValueError, RecursionError):
        return None, False


def _summaries(value: object) -> Iterator[Mapping[str, Any]]:
    """Objects with metrics of the profiler in them."""
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, dict):
            flat = _flat(entry)
            if any(group_of(name) not in (None, "system") or name == "total_active_time" for name in flat):
                yield entry


def _flat(entry: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Group and value by metric; metrics may stand in an object for each group."""
    flat: dict[str, tuple[str, Any]] = {}
    for name, value in entry.items():
        inner = value.items() if isinstance(value, dict) else ((name, value),)
        group = name if isinstance(value, dict) else ""
        for metric, found in inner:
            if len(flat) < MOST_ROWS:
                flat.setdefault(metric, (group_of(metric) or group, found))
    return flat


def _section(entry: Mapping[str, Any], heading: str) -> NeuronSection:
    rows: dict[str, NeuronRow] = {}
    damage: list[str] = []
    for name, (group, value) in _flat(entry).items():
        if value is None or isinstance(value, list | dict | bool):
            continue
        row = _row(name, value, group) if METRIC_NAME.match(name) else None
        if row is None:
            damage.append(f"{shown(name)} cannot be {shown(value)}")
            continue
        rows[name] = row
        if row.unit == "share" and not isinstance(row.value, str) and row.value > 1 and "throttl" not in name:
            damage.append(f"{name} is {row.value:g} where a fraction of 1 is expected")
    _settle_nanoseconds(rows)
    return NeuronSection(heading=heading, level=1, summary=rows, damage=tuple(damage[:100]))


def _row(name: str, value: object, group: str) -> NeuronRow | None:
    unit = unit_of(name)
    if unit == "text" or (unit is None and isinstance(value, str)):
        word = str(value)[:1000]
        word = word if word.isprintable() else " ".join(word.split())
        return NeuronRow(group=group, value=word, unit="text", raw=word, half_ulp=None) if word.isprintable() else None
    if isinstance(value, str) and _NUMBER.match(value):
        value = float(value)
    if not isinstance(value, int | float) or not 0 <= value < 1e300:
        return None
    if unit == "count" and value == int(value):
        value = int(value)
    unit = "share" if unit == "%" else unit or ("count" if isinstance(value, int) else "1")
    return NeuronRow(group=group, value=value, unit=unit, raw=repr(value), half_ulp=0.0)


def _settle_nanoseconds(rows: dict[str, NeuronRow]) -> None:
    """Times whose name ends with `_ns` are seconds all the same, unless they exceed the total."""
    total = rows.get("total_time")
    for name, row in rows.items():
        if not name.endswith("_time_ns") or total is None or isinstance(row.value, str) or isinstance(total.value, str):
            continue
        if row.value > total.value:
            rows[name] = dataclasses.replace(row, value=row.value * 1e-9)
