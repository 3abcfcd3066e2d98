"""A profile on a page and in files: the layout holds, nothing is lost, and no name of a file does any harm."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from rich.cells import cell_len

from flopwise.profile.explain.comparing import compare
from flopwise.profile.explain.verdicts import verdicts
from flopwise.records.measurement import MemoryRow
from flopwise.records.profile import (
    METRICS,
    Clue,
    MemoryUse,
    Peaks,
    Profile,
    SourcedValue,
    Spent,
    TaskTime,
    Verdict,
    known,
)
from flopwise.report.profile_timeline import furthest, kind_of, profile_trace, sums
from flopwise.report.profiles import FIELDS, curve, memory_rows, profiles_document, reached_words
from flopwise.store.runs import from_text
from tests.support.printing import printed, profiles_csv, profiles_json, profiles_markdown

GIB = 2.0**30


@dataclass
class Several:
    """What is printed of several profiles."""

    rows: list[Profile]


HOSTILE = "a|b\n<script>alert(1)</script>\x1b[31m [bold]x[/bold] `c` \x9b2J \u202e& \"q\" 'z' \\"
PEAKS = Peaks(flops=1e15, bandwidth=4e12, number_format="bf16", source="datasheet")


def a_task(name: str, stream: str, predicted: tuple[float, float], measured: tuple[float, float]) -> TaskTime:
    return TaskTime(
        name=name,
        stream=stream,
        predicted_start_s=predicted[0],
        predicted_end_s=predicted[1],
        measured_start_s=measured[0],
        measured_end_s=measured[1],
    )


def a_profile(**changes: Any) -> Profile:
    """A profile with something in every field."""
    full = Profile(
        name="run 0142",
        format="flopwise",
        device="H200",
        steps=3,
        batch_sequences=24,
        sequence_tokens=8192,
        precision="bf16",
        peaks=PEAKS,
        values={
            **known("measured", [("step_wall_s", 0.8), ("device_span_s", 0.7), ("device_busy_s", 0.6)]),
            **known("measured", [("idle_s", 0.1), ("copy_active_s", 0.3), ("copy_exposed_s", 0.09)]),
            **known("counted", [("model_flops", 2.4e14), ("mfu", 0.343)]),
            **known("modelled", [("mbu", 0.24), ("intensity", 150.0), ("ridge", 250.0)]),
        },
        classes=(
            Spent(name="gemm", kind="gemm", seconds=0.35, count=96),
            Spent(name="copy", kind="copy", seconds=0.25, count=9),
        ),
        kernels=(
            Spent(name="gemm_kernel", kind="gemm", seconds=0.3, count=96, flops=1.5e14, bytes=1e11),
            Spent(name="add_kernel", kind="pointwise", seconds=0.1, count=12, bytes=2e11),
            Spent(name="unknown_kernel", kind="other", seconds=0.05, count=1),
        ),
        operators=(Spent(name="aten::mm", kind="gemm", seconds=0.3, count=96),),
        memory=(MemoryUse(owner="parameters", bytes=8 * GIB), MemoryUse(owner="activations", bytes=10 * GIB)),
        memory_total_bytes=20 * GIB,
        memory_capacity_bytes=80 * GIB,
        memory_over_time=((0.0, 4 * GIB), (0.5, 20 * GIB), (1.0, 8 * GIB)),
        memory_planned=(MemoryRow(place="device", owner="weights", planned_bytes=2**30, measured_bytes=2**31),),
        tasks=(
            a_task("load weights 0", "copy-in", (0.0, 0.1), (5.0, 5.2)),
            a_task("forward 0.1", "compute", (0.1, 0.3), (5.2, 5.4)),
            a_task("forward 1.1", "compute", (0.3, 0.5), (5.4, 5.9)),
        ),
        train_metrics={"train_loss": 2.5, "train_runtime": 254.32, "state": "done"},
        system={"driver": "580.12"},
        notes=("a note",),
        warnings=("the trace ends within step 3",),
    )
    return replace(full, **changes)


def hostile_profile() -> Profile:
    """Every word of a file is meant to do harm."""
    spent = Spent(name=HOSTILE, kind="gemm", seconds=0.3, count=1, flops=1e14)
    return a_profile(
        name=HOSTILE,
        device=HOSTILE,
        precision=HOSTILE,
        classes=(spent,),
        kernels=(spent,),
        operators=(spent,),
        memory=(MemoryUse(owner="other", bytes=1e9, name=HOSTILE),),
        memory_planned=(MemoryRow(place="device", owner=HOSTILE, planned_bytes=1, measured_bytes=2),),
        tasks=(a_task(HOSTILE, HOSTILE, (0.0, 1.0), (0.0, 2.0)),),
        train_metrics={HOSTILE: HOSTILE, f"{HOSTILE}_loss": 1.0},
        system={HOSTILE: HOSTILE},
        notes=(HOSTILE,),
        warnings=(HOSTILE,),
    )


def invalid_verdict() -> Verdict:
    evidence = Clue(what=HOSTILE, value=2.0, unit="1", bound=1.0)
    return Verdict(kind="invalid", share=None, evidence=(evidence,), advice=HOSTILE, detail=HOSTILE)


def page_of(profile: Profile, width: int) -> list[str]:
    return printed(profiles_document([(profile, verdicts(profile))]), width)


# -- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_page_fits_its_width(width: int) -> None:
    long = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float>>" * 3
    kernels = (Spent(name=long, kind="pointwise", seconds=0.1, count=1234567, bytes=2e11),)
    for profile in (a_profile(kernels=kernels, name=long), hostile_profile()):
        for line in page_of(profile, width):
            assert cell_len(line) <= width, line


def test_a_group_of_nothing_but_zeros_is_one_row() -> None:
    nothing = known("measured", [(name, 0.0) for name in ("comm_active_s", "comm_time_s", "comm_count")])
    lines = page_of(a_profile(values={**a_profile().values, **nothing}), 100)
    assert [line.split() for line in lines if "comm" in line] == [["communication", "none"]]


def test_a_group_is_named_on_its_first_row_only() -> None:
    lines = page_of(a_profile(), 80)
    begin = lines.index(next(line for line in lines if line.startswith("Group")))
    rows = lines[begin + 1 : lines.index("Figures with no source beside them are measured.")]
    assert [row.split()[0] for row in rows if not row.startswith(" ")] == ["overall", "matrix_engine", "data_movement"]
    assert [row.split()[-1] for row in rows if row.split()[-1] in ("counted", "modelled")] == [
        *("counted", "modelled", "modelled", "counted", "modelled"),
    ]


def test_what_a_file_says_is_told_once() -> None:
    profile = a_profile(values={**known("ingested", [("device_span_s", 0.7)]), **known("modelled", [("mbu", 0.24)])})
    lines = page_of(profile, 80)
    assert not any("ingested" in line for line in lines)
    assert "Figures with no source beside them are as the file says." in lines


def test_kernels_stand_against_their_roofs() -> None:
    gemm, add, unknown = (line.split() for line in page_of(a_profile(), 120) if "_kernel" in line and " ms" in line)
    # 1.5e14 FLOP at 1e15 FLOP/s take 150 ms of the 300 ms; 2e11 bytes at 4e12 B/s take 50 ms of 100 ms.
    assert gemm == [*("gemm_kernel", "gemm", "300", "ms", "50", "%", "96"), *("500", "TFLOP/s", "50", "%", "150", "ms")]
    assert add[-6:] == ["2,000", "GB/s", "50", "%", "50", "ms"]
    assert unknown[-3:] == ["-", "-", "-"]


def test_a_rate_is_that_of_the_lower_roof() -> None:
    both = Spent(name="x", kind="gemm", seconds=0.1, count=1, flops=1e12, bytes=1e11)
    assert reached_words(both, PEAKS) == "1,000 GB/s"
    assert reached_words(replace(both, seconds=0.0), PEAKS) == "-"
    assert reached_words(replace(both, flops=3e6, bytes=None), None) == "30.0 MFLOP/s"


def test_operators_that_are_the_kernels_are_listed_once() -> None:
    assert not any(line == "operators" for line in page_of(a_profile(operators=a_profile().kernels), 80))
    assert any(line == "operators" for line in page_of(a_profile(), 80))


def test_memory_adds_up_with_what_is_unaccounted() -> None:
    assert [(owner, size / GIB) for owner, size, _ in memory_rows(a_profile())] == [
        *(("activations", 10.0), ("parameters", 8.0), ("unaccounted", 2.0), ("total", 20.0)),
    ]
    lines = page_of(a_profile(), 80)
    assert "25 % of the device's 80 GiB is taken." in lines
    assert any(re.fullmatch(r"weights\s+1.00 GiB\s+2.00 GiB", line) for line in lines)


def test_more_than_the_total_is_told_with_its_sign() -> None:
    lines = page_of(a_profile(memory_total_bytes=17 * GIB), 80)
    assert any(line.split()[:3] == ["unaccounted", "−1", "GiB"] for line in lines)


def test_the_curve_keeps_the_peak() -> None:
    points = [(float(number), GIB) for number in range(1000)]
    points[500] = (500.0, 8 * GIB)
    bars = curve(points, 20)
    assert len(bars) == 20
    assert bars.count("█") == 1
    assert bars[10] == "█"
    assert curve([(0.0, 1.0)]) == ""
    assert curve([(0.0, float("nan")), (1.0, float("inf"))]) == ""


def test_verdicts_notes_warnings_and_metrics_are_on_the_page() -> None:
    text = "\n".join(page_of(a_profile(), 80))
    assert "limited by: data-movement-bound 11 %" in text
    assert "1. data-movement-bound, up to 11 % of the time" in text
    assert "- the trace ends within step 3" in text
    assert "- a note" in text
    assert "train_runtime = 0:04:14.32" in text


def test_peaks_and_origin_are_told() -> None:
    text = "\n".join(page_of(a_profile(origin=("trace.json",)), 80))
    assert "Peaks: 1,000 TFLOP/s bf16 and 4,000 GB/s (datasheet)." in " ".join(text.split())
    assert "read from trace.json" in text
    assert page_of(Profile(name=" \n", format="ncu"), 80) == ["(no name) · ncu"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e300])
def test_figures_that_cannot_be_right_are_shown_in_every_form(value: float) -> None:
    spent = Spent(name="x", kind="gemm", seconds=value, count=value, flops=value, bytes=value)
    profile = a_profile(
        values={metric.name: SourcedValue(value, "measured") for metric in METRICS},
        classes=(spent,),
        kernels=(spent,),
        memory=(MemoryUse(owner="other", bytes=value),),
        memory_total_bytes=value,
        memory_over_time=((0.0, value), (1.0, 1.0), (value, value)),
        tasks=(a_task("forward 1", "compute", (0.0, value), (value, 1.0)),),
        train_metrics={"train_loss": value, "train_runtime": value, "total_flos": value, "eval_accuracy": value},
    )
    judged = [(profile, verdicts(profile)), (a_profile(), ())]
    assert [line for line in terminal_text(judged).splitlines() if cell_len(line) > 80] == []
    assert "train_loss" in profiles_markdown(judged)
    rows = list(csv.DictReader(io.StringIO(profiles_csv(judged))))
    assert any(row["name"] == "mfu" and row["value"] == str(value) for row in rows)
    assert from_text(profiles_json(judged), Several).rows[1] == a_profile()
    json.loads(profile_trace(profile))
    for first in (judged, judged[::-1]):
        compare([each for each, _ in first])


def test_an_empty_profile_has_a_page() -> None:
    lines = page_of(Profile(name="empty", format="kineto"), 80)
    assert lines == ["empty · kineto"]


@pytest.mark.parametrize("width", [80, 120])
def test_several_profiles_are_a_table(width: int) -> None:
    names = [f"a rather long name of a section · padding {number}" for number in (16, 32, 64)]
    profiles = [a_profile(name=name) for name in names] + [Profile(name="empty", format="trainer")]
    lines = printed(profiles_document([(profile, verdicts(profile)) for profile in profiles]), width)
    # Each of the three was cut, and the table says so of each.
    assert lines[5:7] == ["", "warnings"]
    assert sum("the trace ends within step 3" in line for line in lines[7:]) == 3
    lines = lines[:5]
    assert all(cell_len(line) <= width for line in lines)
    assert len({line.split("  ")[0] for line in lines}) == 5, "names that differ at their end must stay apart"
    assert lines[1].endswith("data-movement-bound 11 %")


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_tasks_are_summed_and_the_furthest_come_first() -> None:
    tasks = a_profile().tasks
    assert [kind_of(task) for task in tasks] == ["load weights", "forward", "forward"]
    found = sums(tasks, kind_of)
    count, both = found["forward"]
    assert count == 2
    assert both.predicted_s == pytest.approx(0.4)
    assert both.measured_s == pytest.approx(0.7)
    assert [task.name for task in furthest(tasks, 2)] == ["forward 1.1", "load weights 0"]


def test_tasks_that_are_known_one_way_only_are_left_out() -> None:
    half = replace(a_profile().tasks[0], measured_end_s=None)
    assert sums((half,), kind_of) == {}
    assert furthest((half,)) == []
    assert any("none is both predicted and measured" in line for line in page_of(a_profile(tasks=(half,)), 80))


def test_the_trace_has_two_processes_with_the_same_rows() -> None:
    events = json.loads(profile_trace(a_profile()))["traceEvents"]
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert names == {(1, "predicted"), (2, "measured")}
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {(1, 1): "copy in", (1, 2): "compute", (2, 1): "copy in", (2, 2): "compute"}
    spans = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert (1, "forward 1.1", 300_000.0, 200_000.0) in spans
    # Both begin at 0: the measured step began at 5 s.
    assert [(start, taken) for pid, name, start, taken in spans if pid == 2 and name == "load weights 0"] == [
        (0.0, pytest.approx(200_000.0)),
    ]


# -- files -----------------------------------------------------------------------------------------------------------


def test_json_decodes_to_the_profile() -> None:
    for profile in (a_profile(), hostile_profile()):
        text = profiles_json([(profile, verdicts(profile))])
        assert from_text(text, Profile) == profile
        assert json.loads(text)["verdicts"][0]["kind"] == "data_movement_bound"
    both = profiles_json([(a_profile(), ()), (hostile_profile(), ())])
    assert from_text(both, Several).rows == [a_profile(), hostile_profile()]


def test_json_survives_numbers_and_names_that_are_none() -> None:
    odd = a_profile(name="half \udcff", values=known("measured", [("mfu", float("nan")), ("mbu", float("inf"))]))
    decoded = from_text(profiles_json([(odd, ())]), Profile)
    assert decoded.name == "half \\xff"
    assert decoded.get("mbu") == float("inf")
    assert str(decoded.get("mfu")) == "nan"


def test_csv_is_tidy_and_exact() -> None:
    rows = list(csv.DictReader(io.StringIO(profiles_csv([(a_profile(), ()), (a_profile(), ())]))))
    assert tuple(rows[0]) == FIELDS
    found = {(row["profile"], row["group"], row["name"], row["unit"]): row for row in rows}
    assert {row["profile"] for row in rows} == {"run 0142", "run 0142 (2)"}
    mfu = found["run 0142", "matrix_engine", "mfu", "share"]
    assert (float(mfu["value"]), mfu["source"]) == (0.343, "counted")
    assert float(found["run 0142", "memory", "total", "B"]["value"]) == 20 * GIB
    assert float(found["run 0142", "kernels", "gemm_kernel", "FLOP"]["value"]) == 1.5e14
    assert profiles_csv([]) == ",".join(FIELDS) + "\n"


def test_markdown_tables_are_whole() -> None:
    for profile in (a_profile(), hostile_profile()):
        text = profiles_markdown([(profile, (*verdicts(profile), invalid_verdict()))])
        table: list[str] = []
        tables = 0
        for line in [*text.splitlines(), ""]:
            if line.startswith("|"):
                table.append(line)
            elif table:
                assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1, table
                table, tables = [], tables + 1
        assert tables >= 9


Writer = Callable[[Sequence[tuple[Profile, Sequence[Verdict]]]], str]


def terminal_text(judged: Sequence[tuple[Profile, Sequence[Verdict]]]) -> str:
    (profile, found), *_ = judged
    return "\n".join(
        [*printed(profiles_document([(profile, found)]), 80), *printed(profiles_document([*judged, *judged]), 80)]
    )


def trace_text(judged: Sequence[tuple[Profile, Sequence[Verdict]]]) -> str:
    return profile_trace(judged[0][0])


@pytest.mark.parametrize("write", [terminal_text, profiles_markdown, profiles_csv, profiles_json, trace_text])
def test_no_form_lets_a_name_act(write: Writer) -> None:
    text = write([(hostile_profile(), (*verdicts(hostile_profile()), invalid_verdict()))])
    assert "script" in text, "the name is still told"
    for sign in "\x1b\x9b\u202e":
        assert sign not in text
    if write is profiles_markdown:
        assert "<script" not in text
