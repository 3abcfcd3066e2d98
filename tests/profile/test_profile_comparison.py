"""Profiles side by side: changes, their order, the lines through them, and every form they are written in."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from flopwise.base.errors import FlopwiseError
from flopwise.cli.output import schema_json
from flopwise.profile.explain.comparing import FigureRow, HostWait, ProfileComparison, column_names, column_of, compare
from flopwise.profile.explain.verdicts import Thresholds, verdicts
from flopwise.profile.read import neuron_text
from flopwise.profile.read.opening import open_trace
from flopwise.records.profile import Profile, Spent, known
from flopwise.report.document import to_csv, to_markdown
from flopwise.report.profile_comparison import (
    FIELDS,
    comparison_document,
    comparison_record,
    sentences,
    split_rows,
)
from flopwise.store.runs import from_text
from tests.report.test_profile_report import HOSTILE, a_profile, hostile_profile
from tests.support.printing import printed

NEURON = Path(__file__).parents[1] / "data" / "neuron"


def documents(*names: str) -> list[Profile]:
    """All sections of the documents."""
    found: list[Profile] = []
    for name in names:
        with open_trace(NEURON / name, None) as source:
            found += neuron_text.read_source(source, name).profiles
    return found


def timed(batch: int, device_s: float, **changes: object) -> Profile:
    profile = Profile(
        name=f"batch {batch}",
        format="flopwise",
        batch_sequences=batch,
        sequence_tokens=128,
        values=known("measured", [("device_span_s", device_s)]),
    )
    return replace(profile, **changes)  # type: ignore[arg-type]


def row_of(comparison: ProfileComparison, name: str) -> FigureRow:
    return next(row for row in comparison.rows if row.name == name)


# -- rows ------------------------------------------------------------------------------------------------------------


def test_changes_are_relative_to_the_first_or_to_the_baseline() -> None:
    profiles = [timed(1, 0.2), timed(2, 0.3), Profile(name="unknown", format="trainer")]
    row = row_of(compare(profiles), "device_span_s")
    assert [cell.value for cell in row.cells] == [0.2, 0.3, None]
    assert [cell.change for cell in row.cells] == [None, pytest.approx(0.5), None]
    other = row_of(compare(profiles, baseline="batch 2"), "device_span_s")
    assert [cell.change for cell in other.cells] == [pytest.approx(-1 / 3), None, None]
    assert all(cell.change is None for cell in row_of(compare(profiles, baseline="unknown"), "device_span_s").cells)


def test_nothing_is_relative_to_zero_or_to_no_number() -> None:
    for first in (0.0, float("nan"), float("inf")):
        profiles = [timed(1, 0.2, values=known("measured", [("mfu", value)])) for value in (first, 0.3)]
        assert [cell.change for cell in row_of(compare(profiles), "mfu").cells] == [None, None]


def test_what_matters_comes_first() -> None:
    base = a_profile(classes=(Spent(name="gemm", kind="gemm", seconds=0.3, count=1),), train_metrics={"eval_loss": 1.0})
    values = {**base.values, **known("measured", [("step_wall_s", 0.9), ("copy_active_s", 0.31), ("idle_s", 0.15)])}
    other = replace(base, values=values, classes=(Spent(name="gemm", kind="gemm", seconds=0.5, count=1),))
    names = [row.name for row in compare([base, other]).rows]
    assert names[:6] == ["step_wall_s", "device_span_s", "mfu", "gemm_s", "idle_s", "copy_active_s"]
    assert names[-1] == "eval_loss"
    assert names.index("model_flops") < names.index("mbu") < names.index("device_of_wall")


def test_shares_follow_from_the_figures() -> None:
    comparison = compare([a_profile(), a_profile()])
    expected = {"device_of_wall": 0.875, "busy_of_wall": 0.75, "copy_active_share": 3 / 7, "gemm_share": 0.35 / 0.6}
    for name, share in expected.items():
        assert row_of(comparison, name).cells[0].value == pytest.approx(share)
    assert not any(row.name.startswith("spill") for row in comparison.rows)


def test_a_class_that_one_profile_lacks_took_it_no_time() -> None:
    other = a_profile(classes=(Spent(name="gemm", kind="gemm", seconds=0.3, count=1),))
    cells = row_of(compare([a_profile(), other, a_profile(classes=())]), "copy_s").cells
    assert [cell.value for cell in cells] == [0.25, 0.0, None]


def test_columns_have_names_of_their_own() -> None:
    names = column_names([timed(1, 0.1), timed(1, 0.2), timed(1, 0.3, name="batch 1 (2)")])
    assert names == ("batch 1", "batch 1 (2)", "batch 1 (2) (2)")
    assert column_of(names, "BATCH 1") == 0
    with pytest.raises(FlopwiseError, match="no profile is called 'batch 9'") as error:
        column_of(names, "batch 9")
    assert "did you mean batch 1" in (error.value.why or "")
    with pytest.raises(FlopwiseError, match="nothing to compare"):
        compare([])


def test_many_columns_of_one_name_are_named_one_by_one() -> None:
    class Name(str):
        """Counts how often it is written into another one."""

        __slots__ = ()
        written = 0

        def __format__(self, form: str) -> str:
            Name.written += 1
            return str(self)

    alike = timed(1, 0.1, name=Name("x"))
    names = column_names([alike] * 500)
    assert names == ("x", *(f"x ({number})" for number in range(2, 501)))
    assert Name.written < 1000


# -- lines -----------------------------------------------------------------------------------------------------------


def test_the_documents_give_the_known_lines() -> None:
    found = compare(documents("batch_sizes.md", "paddings.md"))
    (fit,) = found.fits
    assert fit.fixed_s == pytest.approx(0.033, abs=3e-4)
    assert fit.per_sequence_s == pytest.approx(2.555e-3, abs=5e-6)
    assert (fit.least_batch, fit.is_partial, fit.points) == (8, True, 6)
    assert found.wall_fit is not None
    assert found.wall_fit.once_s == pytest.approx(40, abs=1)
    assert found.wall_fit.per_step_s == pytest.approx(0.0686, abs=3e-4)
    assert found.host_wait is not None
    assert (found.host_wait.waiting, found.host_wait.known) == (6, 6)
    assert [row.sequence_tokens for row in found.lengths] == [16, 32, 64, 128]
    assert [row.device_s is not None for row in found.lengths] == [False, True, False, False]
    told = " ".join(sentences(found))
    assert "the device works only 33–52 % of the wall time" in told
    assert "Device time is 33 ms + 2.56 ms × batch from batch 8 on" in told


@settings(max_examples=30)
@given(st.floats(1e-3, 1.0), st.floats(1e-4, 1e-1), st.lists(st.integers(1, 512), min_size=3, max_size=8, unique=True))
def test_a_line_is_found_again(fixed: float, slope: float, batches: list[int]) -> None:
    (fit,) = compare([timed(batch, fixed + slope * batch) for batch in batches]).fits
    assert fit.fixed_s == pytest.approx(fixed, rel=1e-6, abs=1e-9)
    assert fit.per_sequence_s == pytest.approx(slope, rel=1e-6)
    assert (fit.least_batch, fit.is_partial) == (min(batches), False)


def test_small_batches_off_the_line_are_left_out() -> None:
    line = [timed(batch, 0.01 + 0.001 * batch) for batch in (16, 32, 64, 128)]
    (fit,) = compare([timed(1, 0.02), *line]).fits
    assert (fit.least_batch, fit.is_partial, fit.points) == (16, True, 4)
    assert fit.fixed_s == pytest.approx(0.01)


def test_a_line_may_be_level_or_go_through_zero() -> None:
    for fixed, slope in ((0.3, 0.0), (0.0, 0.1)):
        (fit,) = compare([timed(batch, fixed + slope * batch) for batch in (1, 2, 3, 7)]).fits
        assert fit.fixed_s == pytest.approx(fixed, abs=1e-9)
        assert fit.per_sequence_s == pytest.approx(slope, abs=1e-9)
        assert min(fit.fixed_s, fit.per_sequence_s) >= 0


def test_no_line_where_there_is_none() -> None:
    assert compare([timed(1, 0.1), timed(2, 0.2)]).fits == ()
    assert compare([timed(8, 0.1), timed(8, 0.2), timed(8, 0.3)]).fits == ()
    lengths = [timed(batch, 0.1 * batch, sequence_tokens=64 * batch) for batch in (1, 2, 3)]
    assert compare(lengths).fits == ()
    assert compare([timed(1, 1.0), timed(2, 4.0), timed(4, 16.0)]).fits == (), "far off the line"
    assert compare([timed(batch, 1.0 - 0.01 * batch) for batch in (1, 2, 3)]).fits == (), "faster with more to do"
    assert compare([timed(batch, 0.1 * batch - 0.05) for batch in (1, 2, 3)]).fits == (), "less than no time at 0"
    devices = [timed(batch, 0.1 * batch, device=f"device {batch}") for batch in (1, 2, 3)]
    assert compare(devices).fits == ()
    assert compare(devices).wall_fit is None


def test_the_host_is_named_only_where_most_wait_for_it() -> None:
    waiting, busy = (
        timed(8, 0.3, values=known("measured", [("device_span_s", 0.3), ("step_wall_s", wall)])) for wall in (1.0, 0.31)
    )
    assert compare([waiting, waiting, busy]).host_wait is not None
    assert compare([waiting, busy]).host_wait is None
    assert compare([busy, timed(1, 0.1)]).host_wait is None
    assert compare([waiting, waiting], thresholds=Thresholds(host_device_share=0.2)).host_wait is None
    # Idle time that waits for the host is another matter: the device's span is all of the wall time.
    figures = [("device_span_s", 0.99), ("step_wall_s", 1.0), ("idle_s", 0.5), ("idle_host_s", 0.5)]
    idle = timed(8, 0.99, values=known("measured", figures))
    assert any(verdict.kind == "host_bound" for verdict in verdicts(idle))
    assert compare([idle, idle]).host_wait is None
    assert compare([waiting, waiting, idle]).host_wait == HostWait(waiting=2, known=3, least_share=0.3, most_share=0.3)


# -- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_and_shows_every_profile(width: int) -> None:
    profiles = [*documents("batch_sizes.md", "paddings.md"), hostile_profile()]
    lines = printed(comparison_document(compare(profiles)), width)
    assert max(cell_len(line) for line in lines) <= width
    text = "\n".join(lines)
    for profile in profiles[:-1]:
        assert profile.name in text
    assert "+36.4 %" in text, "batch 16 takes 73.37 ms, the baseline 53.78 ms"
    assert "\x1b" not in text
    assert lines[-1] == "Changes are relative to Baseline."


def test_what_is_the_same_is_told_once() -> None:
    comparison = compare(
        [a_profile(), replace(a_profile(), values={**a_profile().values, **known("measured", [("mbu", 0.3)])})]
    )
    differing, same = split_rows(comparison)
    assert [row.name for row in differing] == ["mbu"]
    assert "ridge" in {row.name for row in same}
    lines = printed(comparison_document(comparison), 80)
    assert any(line.startswith("The same in all: ") for line in lines)


def test_csv_has_a_row_for_each_known_figure() -> None:
    comparison = compare([timed(1, 0.2), timed(2, 0.3)])
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison_document(comparison)))))
    assert tuple(rows[0]) == FIELDS
    assert [(row["profile"], row["value"], row["source"], row["baseline"]) for row in rows] == [
        *(("batch 1", "0.2", "measured", "batch 1"), ("batch 2", "0.3", "measured", "batch 1")),
    ]
    assert float(rows[1]["change"]) == pytest.approx(0.5)


def test_json_decodes_to_the_comparison() -> None:
    comparison = compare([*documents("batch_sizes.md"), hostile_profile()])
    text = schema_json(comparison_record(comparison), "profile-comparison")
    assert from_text(text, ProfileComparison) == comparison
    assert json.loads(text)["sentences"] == sentences(comparison)


def test_markdown_is_one_table_whatever_names_hold() -> None:
    several = compare([hostile_profile(), replace(a_profile(), name=f"{HOSTILE} 2"), a_profile()])
    text = to_markdown(comparison_document(several))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}
    assert "<script" not in text
    for form in (text, to_csv(comparison_document(compare([hostile_profile(), a_profile()])))):
        assert not any(sign in form for sign in "\x1b\x9b\u202e")
