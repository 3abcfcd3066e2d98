"""Read documents of Neuron profiler tables: markdown into which summaries, memory tables and train metrics were pasted.

Numbers are printed there in scaled units and rounded (bytes and FLOP to three decimals, times and percentages to two,
zeros at the end left out); percentages are percentages, unlike in the profiler's JSON (`neuron_json`). A paste loses
cells and headers: that is read all the same and told as an irregularity. What cannot be read is told as damage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from flopwise.base.errors import FlopwiseError, shown
from flopwise.profile.read.neuron_metrics import (
    METRIC_NAME,
    NeuronDocument,
    NeuronMemory,
    NeuronRow,
    NeuronSection,
    document_profiles,
    group_of,
    unit_of,
)
from flopwise.profile.read.opening import TraceFile
from flopwise.profile.read.trainer_metrics import (
    LONGEST_LINE,
    TrainMetric,
    block_name,
    clean_line,
    metric_line,
    text_lines,
)
from flopwise.records.profile import Read

MOST_KEPT = 16 * 2**20
"""Characters of a document that are kept, with a hundred more for each line; the rest of it is not read."""
MOST_TOLD = 100
"""Irregularities, and pieces of damage, that are told of one section."""

DECIMALS = {"B": 3, "FLOP": 3, "s": 2, "%": 2, "FLOP/B": 2, "1": 2}
"""Digits behind the point to which the profiler rounds, by base unit, in whichever scaled unit it prints."""
BYTE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
FLOP_UNITS = {"FLOPS": 1, "KFLOPS": 1e3, "MFLOPS": 1e6, "GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15, "EFLOPS": 1e18}
TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1}
_SCALES: dict[str, tuple[str, float]] = {
    **{unit: ("B", scale) for unit, scale in BYTE_UNITS.items()},
    **{unit: ("FLOP", scale) for unit, scale in FLOP_UNITS.items()},
    **{unit: ("s", scale) for unit, scale in TIME_UNITS.items()},
    "flops/byte": ("FLOP/B", 1),
    "%": ("%", 1),
}

SUMMARY_HEADER = ("Group", "Name", "Value")
MEMORY_HEADER = ("ND Idx", "NC Idx", "Usage Type", "Amount")
CONFIGURATION_LINE = "Summary metrics account for Logical NeuronCore config"

_HEADING = re.compile(r"(#{1,6})(?:\s+(.*))?$")
_CONFIGURATION = re.compile(re.escape(CONFIGURATION_LINE) + r"\s*=\s*(\d{1,3})\b")
_AMOUNT = re.compile(r"(\d{1,30}(?:\.(\d{1,30}))?)\s*([A-Za-zµμ%/]{1,12})?$")
_RULE = re.compile(r":?-+:?$")
_INDEX = re.compile(r"\d{1,6}$")
_TELLTALE = re.compile(
    rb"Logical NeuronCore config|\|\s{0,80}Group\s{0,80}\|\s{0,80}Name\s{0,80}\||\|\s{0,80}ND Idx\s{0,80}\|"
    rb"|\|[\s*]{0,80}(?:neuroncore_cycle_count|tensor_engine_active_time|dma_active_time)[\s*]"
)

Table = Literal["summary", "memory", "other"]


def read_value(name: str, raw: str, group: str) -> NeuronRow | None:
    """A metric's cell, such as `54.82 **ms**`, in base units; None where it is not what this metric can be."""
    told = unit_of(name)
    expected = told if group_of(name) is not None or told == "text" else None
    words = raw.strip("* ")
    found = _AMOUNT.match(raw.replace("*", " ").strip())
    if expected == "text" or (expected is None and (found is None or (found[3] or "%") not in _SCALES)):
        return NeuronRow(group=group, value=words, unit="text", raw=raw, half_ulp=None) if words else None
    if found is None or (found[3] is not None and found[3] not in _SCALES):
        return None
    digits, decimals = found[1], len(found[2] or "")
    if found[3] is None:
        unit, scale = ("count" if expected in (None, "count") and not decimals else "1"), 1.0
    else:
        unit, scale = _SCALES[found[3]]
    if expected is not None and unit != expected and (expected, unit) != ("1", "count"):
        return None
    if unit == "count":
        return NeuronRow(group=group, value=int(digits), unit=unit, raw=raw, half_ulp=0.0)
    whole = unit in ("B", "FLOP") and scale == 1 and not decimals
    half_ulp = 0.0 if whole else 0.5 * 10.0 ** -max(DECIMALS[unit], decimals) * scale
    return NeuronRow(group=group, value=float(digits) * scale, unit=unit, raw=raw, half_ulp=half_ulp)


@dataclass(slots=True)
class _Section:
    """A section while it is read."""

    heading: str
    level: int
    parent: str | None
    line: int
    notes: list[str] = field(default_factory=list)
    train_metrics: dict[str, TrainMetric] = field(default_factory=dict)
    summary: dict[str, NeuronRow] = field(default_factory=dict)
    memory: dict[tuple[int, int, str], NeuronMemory] = field(default_factory=dict)
    irregularities: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    configuration: int | None = None
    stated_group: str | None = None
    """Of the summary table that is read, the last that a cell told."""
    group: str = ""
    """Of the last row."""

    def finish(self) -> NeuronSection:
        irregularities = list(_some(self.irregularities))
        for part, what in (
            (self.train_metrics, "train metrics block"),
            (self.summary, "profiler summary table"),
            (self.memory, "device-memory table"),
        ):
            if not part:
                irregularities.append(f"no {what}")
        if extra := [name for name in self.summary if group_of(name) is None]:
            irregularities.append(f"has extra rows {', '.join(_some(extra))}")
        return NeuronSection(
            heading=self.heading,
            level=self.level,
            parent=self.parent,
            line=self.line,
            notes=tuple(self.notes),
            train_metrics=self.train_metrics,
            summary=self.summary,
            memory=tuple(self.memory.values()),
            irregularities=tuple(irregularities),
            damage=tuple(_some(self.damage)),
            logical_neuroncore_config=self.configuration,
        )


def _some(told: list[str]) -> list[str]:
    return told if len(told) <= MOST_TOLD else [*told[:MOST_TOLD], f"and {len(told) - MOST_TOLD} more"]


class _TextReader:
    """Takes a document line by line."""

    def __init__(self) -> None:
        self.sections: list[NeuronSection] = []
        self.is_full = False
        self.first_damage: str | None = None
        self._section = _Section("", 0, None, 1)
        self._above: list[tuple[int, str]] = []
        self._kept = 0
        self._fence: int | None = None
        self._fence_is_metrics = False
        self._in_block = False
        self._table: Table | None = None

    def take(self, number: int, line: bytes) -> None:
        text = clean_line(line)
        if len(line) > LONGEST_LINE:
            self._tell_damage(number, f"longer than {LONGEST_LINE} bytes, the rest of the line is left out")
        stripped = text.strip()
        if not stripped.startswith("|"):
            self._table = None
        if stripped.startswith(("```", "~~~")):
            self._fence = number if self._fence is None else None
            self._in_block = self._fence_is_metrics = False
        elif block_name(stripped) is not None:
            self._in_block = self._fence_is_metrics = True
        elif self._in_block and (metric := metric_line(stripped)) is not None:
            self._take_metric(number, *metric)
        elif stripped:
            self._in_block = False
            self._take_markdown(number, text, stripped)

    def finish(self) -> list[NeuronSection]:
        if self._fence is not None:
            self._irregular(self._fence, "code block is never closed")
        section = self._section.finish()
        # What stands above the first heading is a section only where it has figures.
        if section.level or section.has_data:
            self.sections.append(section)
        return self.sections

    def _keep(self, number: int, characters: int) -> None:
        self._kept += characters + 100
        if self._kept > MOST_KEPT and not self.is_full:
            self.is_full = True
            self.first_damage = None
            self._tell_damage(number, "the document is too large, the rest of it is not read")

    def _irregular(self, number: int, what: str) -> None:
        self._section.irregularities.append(f"line {number}: {what}")
        self._keep(number, len(what))

    def _tell_damage(self, number: int, what: str) -> None:
        self._section.damage.append(f"line {number}: {what}")
        self.first_damage = self.first_damage or self._section.damage[-1]
        self._keep(number, len(what))

    def _take_metric(self, number: int, name: str, metric: TrainMetric) -> None:
        known = self._section.train_metrics.setdefault(name, metric)
        if known.value != metric.value:
            self._tell_damage(number, f"{name} is given twice, the first is kept")
        self._keep(number, len(name) + len(metric.raw))

    def _take_markdown(self, number: int, text: str, stripped: str) -> None:
        heading = _HEADING.match(text.rstrip())
        configuration = _CONFIGURATION.search(stripped)
        cells = _cells(stripped) if stripped.startswith("|") else []
        if self._fence is not None:
            begins_table = self._table is None and _header_of(cells) is not None
            if not (configuration or begins_table or (heading and self._fence_is_metrics)):
                self._note(number, stripped)
                return
            self._irregular(self._fence, "code block is never closed")
            self._fence = None
        if heading:
            self._begin(number, len(heading[1]), (heading[2] or "").strip())
        elif configuration:
            self._section.configuration = int(configuration[1])
        elif cells:
            self._take_row(number, cells)
        elif stripped != "[TOC]":
            self._note(number, stripped)

    def _note(self, number: int, text: str) -> None:
        self._section.notes.append(text)
        self._keep(number, len(text))

    def _begin(self, number: int, level: int, heading: str) -> None:
        section = self._section.finish()
        if section.level or section.has_data:
            self.sections.append(section)
        self._above = [(above, name) for above, name in self._above if above < level]
        parent = self._above[-1][1] if self._above else None
        self._above.append((level, heading))
        self._section = _Section(heading, level, parent, number)
        self._keep(number, len(heading))

    def _take_row(self, number: int, cells: list[str]) -> None:
        if self._table is None:
            self._table = self._begin_table(number, cells)
            if _header_of(cells) is not None or not any(cells):
                return
        if all(_RULE.match(cell) for cell in cells):
            return
        if self._table == "summary":
            self._take_summary_row(number, cells)
        elif self._table == "memory":
            self._take_memory_row(number, cells)

    def _begin_table(self, number: int, cells: list[str]) -> Table:
        header = _header_of(cells)
        kind: Table = header or "other"
        if header is None and not any(cells) and len(cells) in (3, 4):
            kind = "memory" if len(cells) == 4 else "summary"
            self._irregular(number, f"{kind} table header is blank")
        elif header is None and len(cells) == 4 and _INDEX.match(cells[0]) and _INDEX.match(cells[1]):
            kind = "memory"
        elif header is None and any(group_of(_name(cell)) is not None for cell in cells[:2]):
            kind = "summary"
        if header is None and kind != "other" and any(cells):
            self._irregular(number, f"{kind} table header missing; first data row is in the header position")
        if kind == "other":
            self._irregular(number, "a table that is none of the profiler's, not read")
        if kind == "summary":
            self._section.stated_group = None
        return kind

    def _take_summary_row(self, number: int, cells: list[str]) -> None:
        while cells and not cells[-1]:
            cells.pop()
        if not cells:
            return
        section = self._section
        if len(cells) == 3:
            section.stated_group = _name(cells[0]) or section.stated_group
        # Of a row whose group was lost in pasting, name and value have moved one cell to the left.
        *_, name_cell, raw = ("", *cells)
        name = _name(name_cell)
        if len(cells) not in (2, 3) or not METRIC_NAME.match(name):
            self._tell_damage(number, f"not a row of a summary: {shown(' | '.join(cells))}")
            return
        group = section.stated_group or group_of(name) or section.group
        row = read_value(name, raw, group)
        if row is None:
            self._tell_damage(number, f"{name} cannot be {shown(raw)}")
        elif section.summary.setdefault(name, row) is not row:
            self._tell_damage(number, f"{name} is given twice, the first is kept")
        else:
            section.group = group
        self._keep(number, len(name) + len(raw))

    def _take_memory_row(self, number: int, cells: list[str]) -> None:
        while cells and not cells[-1]:
            cells.pop()
        if not cells:
            return
        indices = [int(cell) for cell in cells[:2] if _INDEX.match(cell)]
        amount = read_value("bytes", cells[3], "") if len(cells) == 4 else None
        usage = cells[2].strip("* ") if amount is not None else ""
        if len(indices) != 2 or not usage or amount is None or amount.unit != "B" or isinstance(amount.value, str):
            self._tell_damage(number, f"not a row of device memory: {shown(' | '.join(cells))}")
            return
        row = NeuronMemory(
            nd_idx=indices[0],
            nc_idx=indices[1],
            usage_type=usage,
            bytes=amount.value,
            half_ulp_bytes=amount.half_ulp or 0.0,
            raw=amount.raw,
        )
        if self._section.memory.setdefault((row.nd_idx, row.nc_idx, usage), row) is not row:
            self._tell_damage(number, f"{shown(usage)} is given twice for one core, the first is kept")
        self._keep(number, len(usage) + len(row.raw))


def _cells(line: str) -> list[str]:
    inner = line.removeprefix("|")
    if inner.endswith("|") and not inner.endswith("\\|"):
        inner = inner[:-1]
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner)]


def _name(cell: str) -> str:
    return cell.strip("* ").replace("\\_", "_")


def _header_of(cells: list[str]) -> Table | None:
    words = tuple(_name(cell).lower() for cell in cells)
    if words == tuple(word.lower() for word in SUMMARY_HEADER):
        return "summary"
    return "memory" if words == tuple(word.lower() for word in MEMORY_HEADER) else None


def is_free_text(line: str) -> bool:
    """Whether a line, outside of code blocks, is no heading, table, block of figures or other markdown that is read."""
    stripped = line.strip()
    structure = stripped.startswith(("|", "```", "~~~")) or stripped in ("", "[TOC]")
    found = _HEADING.match(stripped) or _CONFIGURATION.search(stripped) or block_name(stripped)
    return not structure and found is None


def read_document(lines: Iterable[bytes], name: str = "the document") -> NeuronDocument:
    """Sections of a document, from its lines; `name` is what an error calls it."""
    reader = _TextReader()
    for number, line in enumerate(lines, start=1):
        reader.take(number, line)
        if reader.is_full:
            break
    sections = reader.finish()
    if not any(section.has_data for section in sections):
        raise FlopwiseError(
            f"{name} has no summary, memory table or train metrics of a Neuron profile",
            why=reader.first_damage,
            hint="paste the profiler's summary table (Group | Name | Value) below a heading",
        )
    return NeuronDocument(sections=tuple(sections))


def looks_like(head: bytes) -> bool:
    """Whether a file that begins like this is such a document."""
    beginning = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return re.match(rb"\{|\[\s*[\[{\"]", beginning) is None and _TELLTALE.search(head) is not None


def read_source(source: TraceFile, name: str) -> Read:
    """The document as profiles, and as itself for printing."""
    document = read_document(text_lines(source), name)
    return Read(profiles=document_profiles(document, origin=(name,)), native=document)
