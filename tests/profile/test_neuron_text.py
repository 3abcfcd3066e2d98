"""Neuron documents are read exactly and printed back; nothing done to them raises more than a FlopwiseError."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read import neuron_text, trainer_metrics
from flopwise.profile.read.neuron_metrics import NeuronDocument, NeuronRow, NeuronSection, document_profiles
from flopwise.profile.read.neuron_text import MOST_KEPT, MOST_TOLD, read_document
from flopwise.profile.read.opening import TraceFile
from flopwise.profile.read.trainer_metrics import LONGEST_LINE, TrainMetric
from flopwise.report.neuron import neuron_document, neuron_section

DATA = Path(__file__).parents[1] / "data" / "neuron"
DOCUMENTS = {"000": DATA / "batch_sizes.md", "001": DATA / "paddings.md"}
GOLDENS = sorted(DATA.glob("0*_*.json"))
LINES = DOCUMENTS["001"].read_bytes().split(b"\n")


def document(prefix: str) -> NeuronDocument:
    return read_document(DOCUMENTS[prefix].read_bytes().split(b"\n"))


def read(text: str) -> NeuronDocument:
    return read_document(text.encode().split(b"\n"))


def as_golden(section: NeuronSection) -> dict[str, Any]:
    """The section as the records beside these documents spell it."""
    plain = dataclasses.asdict(section)
    plain["memory_usage"] = list(plain.pop("memory"))
    assert plain.pop("damage") == ()
    for rows in (plain["train_metrics"], plain["summary"]):
        for name, row in rows.items():
            rows[name] = {key: value for key, value in row.items() if value is not None}
    plain["notes"], plain["irregularities"] = list(plain["notes"]), list(plain["irregularities"])
    if plain["logical_neuroncore_config"] is None:
        del plain["logical_neuroncore_config"]
    return plain


def test_there_are_thirteen_sections() -> None:
    assert len(GOLDENS) == 13
    assert [len(document(prefix).sections) for prefix in DOCUMENTS] == [8, 5]


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_section_equals_its_record(path: Path) -> None:
    golden = json.loads(path.read_text())
    del golden["source"]
    sections = {section.line: section for section in document(path.name[:3]).sections}
    found = as_golden(sections[golden["line"]])
    assert found == golden
    assert list(found["summary"]) == list(golden["summary"])
    assert list(found["train_metrics"]) == list(golden["train_metrics"])


def values_of(section: NeuronSection) -> NeuronSection:
    """All but where it stood and how it was spelt."""
    metrics = {name: dataclasses.replace(metric, raw="") for name, metric in section.train_metrics.items()}
    return dataclasses.replace(
        section,
        line=0,
        irregularities=(),
        train_metrics=metrics,
        summary={name: dataclasses.replace(row, raw="") for name, row in section.summary.items()},
        memory=tuple(dataclasses.replace(row, raw="") for row in section.memory),
    )


@pytest.mark.parametrize("prefix", DOCUMENTS)
def test_what_is_printed_reads_back(prefix: str) -> None:
    original = document(prefix)
    # Without what was written, so that only values can be printed.
    bare = NeuronDocument(sections=tuple(values_of(section) for section in original.sections))
    again = read(neuron_document(bare))
    assert [values_of(section) for section in again.sections] == list(bare.sections)
    assert [list(section.summary) for section in again.sections] == [list(part.summary) for part in bare.sections]
    assert all(not section.damage for section in again.sections)


@pytest.mark.parametrize("prefix", DOCUMENTS)
def test_cells_are_printed_as_the_profiler_prints_them(prefix: str) -> None:
    original = document(prefix)
    again = read(neuron_document(NeuronDocument(sections=tuple(map(values_of, original.sections)))))
    for before, after in zip(original.sections, again.sections, strict=True):
        assert {name: row.raw for name, row in before.summary.items()} == {
            name: row.raw for name, row in after.summary.items()
        }
        assert [row.raw for row in before.memory] == [row.raw for row in after.memory]
        assert {name: row.raw for name, row in before.train_metrics.items()} == {
            name: row.raw for name, row in after.train_metrics.items()
        }


def test_printed_layout_is_the_documents_own() -> None:
    printed = neuron_section(values_of(document("000").sections[0])).splitlines()
    written = DOCUMENTS["000"].read_text().splitlines()
    # The first section of that document is regular: what its author had, less a few blank lines.
    assert [line for line in printed if line] == [line for line in written[2:127] if line]


def test_a_section_of_our_own_reads_back() -> None:
    section = NeuronSection(
        heading="Ours",
        level=2,
        notes=("# no heading", "| no table |", "plain"),
        train_metrics={
            "train_runtime": TrainMetric(value=93784.29, unit="s", raw=""),
            "train_mem_gpu": TrainMetric(value=3 << 20, unit="B", raw="", note=trainer_metrics.MEGA_NOTE),
            "learning_rate": TrainMetric(value=5e-05, unit="1", raw=""),
            "train_loss": TrainMetric(value="nan", unit="text", raw=""),
        },
        summary={
            "total_time": NeuronRow(group="overall_stats", value=1.25, unit="s", raw="", half_ulp=0.005),
            "mfu_estimated_percent": NeuronRow(group="tensor_engine", value=0.2039, unit="share", raw="", half_ulp=0),
            "driver_version": NeuronRow(group="system", value="a|b", unit="text", raw="", half_ulp=None),
            "made_up": NeuronRow(group="system", value=3.0, unit="1", raw="", half_ulp=0.005),
        },
    )
    (again,) = read(neuron_section(section)).sections
    assert again.notes == section.notes
    assert {name: metric.value for name, metric in again.train_metrics.items()} == {
        name: metric.value for name, metric in section.train_metrics.items()
    }
    assert {name: row.value for name, row in again.summary.items()} == {
        "total_time": 1.25,
        "mfu_estimated_percent": 20.39,
        "driver_version": "a|b",
        "made_up": 3.0,
    }
    assert again.summary["made_up"].unit == "1"


TABLE = "# A\n| Group | Name | Value |\n| --- | --- | --- |\n| overall_stats | **total_time** | 54.82 **ms** |\n"


@pytest.mark.parametrize(
    "row",
    [
        "| **model_flops** | 12 **GiB** | |",
        "| **model_flops** | 12 | |",
        "| **dma_active_time** | 3 **parsecs** | |",
        "| **event_count** | 1.5 | |",
        "| **event_count** | -5 | |",
        f"| **event_count** | {'9' * 5000} | |",
        "| **hbm_read_bytes** | 1e99 **GiB** | |",
        "| **total_time** | 1 **ms** | |",
        "| **event_count**",
        "| a | b | c | d |",
        "| | **event_count** | |",
    ],
)
def test_unreadable_row_is_damage_and_the_rest_is_read(row: str) -> None:
    (section,) = read(f"{TABLE}{row}\n| **trace_count** | 7 | |\n").sections
    assert len(section.damage) == 1
    assert section.damage[0].startswith("line 5: ")
    assert {name: row.value for name, row in section.summary.items()} == {"total_time": 0.05482, "trace_count": 7}
    (profile,) = document_profiles(NeuronDocument(sections=(section,)))
    assert profile.warnings == section.damage


@pytest.mark.parametrize(
    "row",
    ["| 0 | 0 | tensor |", "| 0 | x | tensor | 1 **KiB** |", "| 0 | 0 | tensor | 5 |", "| 0 | 0 | Tensor | 1 **B** |"],
)
def test_unreadable_memory_row_is_damage(row: str) -> None:
    text = f"# A\n| ND Idx | NC Idx | Usage Type | Amount |\n| - | - | - | - |\n| 0 | 0 | Tensor | 2 **KiB** |\n{row}\n"
    (section,) = read(text).sections
    assert [(row.usage_type, row.bytes) for row in section.memory] == [("Tensor", 2048)]
    assert len(section.damage) == 1


def test_memory_kinds_differ_by_case() -> None:
    section = document("001").sections[2]
    sizes = {row.usage_type: row.bytes for row in section.memory}
    assert sizes["tensor"] > 40 * sizes["Tensor"]


def test_other_layouts_are_irregular_but_read() -> None:
    (section,) = read("# A\n| overall_stats | event_count | 3 |\n| **trace_count** | 4 |\n").sections
    assert {name: (row.group, row.value) for name, row in section.summary.items()} == {
        "event_count": ("overall_stats", 3),
        "trace_count": ("overall_stats", 4),
    }
    assert section.irregularities[0].startswith("line 2: summary table header missing")
    headless, named = read(f"{TABLE.removeprefix('# A')}# B\n| Who | What |\n| - | - |\n| a | b |\n").sections
    assert (headless.heading, headless.level, named.heading) == ("", 0, "B")
    assert named.irregularities[0] == "line 6: a table that is none of the profiler's, not read"
    (unclosed,) = read(f"# A\n```\n***** train metrics *****\n epoch = 3.0\n{TABLE.removeprefix('# A')}").sections
    assert unclosed.irregularities[0] == "line 2: code block is never closed"
    assert (set(unclosed.train_metrics), set(unclosed.summary)) == ({"epoch"}, {"total_time"})


def test_long_lines_are_cut_and_told() -> None:
    source = TraceFile("a", iter([TABLE.encode(), b"x" * (3 * LONGEST_LINE), b"\n| **trace_count** | 7 | |\n"]))
    native = neuron_text.read_source(source, "a").native
    (section,) = native.sections
    assert section.damage == (f"line 5: longer than {LONGEST_LINE} bytes, the rest of the line is left out",)
    assert len(section.notes[0]) == LONGEST_LINE


def test_endless_documents_are_cut() -> None:
    line = b"x" * 20000
    found = read_document([*TABLE.encode().split(b"\n"), *[line] * (MOST_KEPT // 20000 + 10)])
    (section,) = found.sections
    assert section.damage[-1].endswith("the rest of it is not read")
    assert sum(map(len, section.notes)) <= MOST_KEPT + 20000
    with pytest.raises(FlopwiseError, match="too large"):
        read_document([line] * (MOST_KEPT // 20000 + 10))
    (noisy,) = read(TABLE + "| **event_count** | ? | |\n" * 300).sections
    assert noisy.damage[MOST_TOLD:] == ("and 200 more",)


@pytest.mark.parametrize(
    "text", ["", "# A\n\nwords\n", "| a | b |\n| - | - |\n", "\0\0\0", "# A\n| Group | Name | Value |\n"]
)
def test_nothing_to_read_is_an_error(text: str) -> None:
    with pytest.raises(FlopwiseError, match="no summary, memory table or train metrics"):
        read(text)


def test_documents_are_recognised() -> None:
    for path in DOCUMENTS.values():
        head = path.read_bytes()[: 2**16]
        assert neuron_text.looks_like(head)
    assert not neuron_text.looks_like(b"# Title\n\nwords | and | more\n")
    assert not neuron_text.looks_like(b'{"a": "| **dma_active_time** |"}')
    assert not neuron_text.looks_like(b"")


def survive(lines: list[bytes]) -> None:
    try:
        found = read_document(lines)
    except FlopwiseError:
        return
    document_profiles(found)
    printed = neuron_document(found)
    assert neuron_document(read(printed)) == printed


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(LINES) - 1),
            st.one_of(
                st.binary(max_size=30),
                st.sampled_from(
                    [b"```", b"# X", b"| | | | |", b"| - |", b"***** eval metrics *****", b"| 0 | 0 | io |"]
                ),
                st.integers(0, len(LINES) - 1).map(lambda index: LINES[index]),
                st.tuples(st.integers(0, len(LINES) - 1), st.integers(0, 60)).map(lambda cut: LINES[cut[0]][: cut[1]]),
            ),
        ),
        max_size=12,
    )
)
def test_mutated_documents_are_survived(changes: list[tuple[int, bytes]]) -> None:
    lines = list(LINES)
    for index, line in changes:
        lines[index] = line
    survive(lines)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, sum(map(len, LINES)) + len(LINES)))
def test_documents_cut_anywhere_are_survived(length: int) -> None:
    survive(b"\n".join(LINES)[:length].split(b"\n"))


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=400), st.text(alphabet="|*#`-=%. \n0123456789abkGiBms_", max_size=400))
def test_random_bytes_are_survived(noise: bytes, marks: str) -> None:
    survive(noise.split(b"\n"))
    survive((TABLE + marks).encode().split(b"\n"))
