"""The reader of published benchmark tables: what it reads, what it repairs, what it refuses."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.references.published.benchmark_tables import (
    BenchmarkRow,
    find_missing_column,
    markdown_tables,
    read_benchmark_tables,
)

DATA = Path(__file__).parents[1] / "data"
DOCUMENT = (DATA / "mpt_tables.md").read_text(encoding="utf-8")

COLUMNS = {  # printed name → column of the independent parse
    "Model": "model",
    "SeqLen (T)": "seq_len",
    "# GPUs": "n_gpus",
    "GPU": "gpu",
    "MFU": "mfu_pct",
    "HFU": "hfu_pct",
    "Model TFLOP": "model_tflop",
    "MicroBatchSize": "micro_batch",
    "GradAccum": "grad_accum",
    "GlobalBatchSize": "global_batch",
    "Throughput (S/s)": "seqs_per_s",
    "Throughput (T/s)": "tokens_per_s",
    "Throughput (T/s/GPU)": "tokens_per_s_per_gpu",
    "GlobalBatchSize (T)": "global_batch_tokens",
    "Precision": "precision",
    "MP Mode": "mp_mode",
    "Sharding Strategy": "sharding",
    "Activation Checkpointing": "act_ckpt",
    "Activation CPUOffload": "act_offload",
    "NumParams": "n_params",
}
NAMES = tuple(COLUMNS)
TABLE_SIZES = {
    "H100 80GB BF16": 52,
    "H100 80GB FP8": 7,
    "A100 80GB with 1600 Gbps node-node interconnect (RoCE)": 61,
    "A100 40GB with 1600 Gbps node-node interconnect (RoCE)": 78,
}
Grid = list[dict[str, str]]


def independent_rows() -> Grid:
    with (DATA / "mpt_rows.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def grid(heading: str) -> Grid:
    """The cells of one published table by printed name, taken from the independent parse."""
    rows = [row for row in independent_rows() if row["table"] == heading]
    return [{name: row[column] for name, column in COLUMNS.items()} for row in rows]


H100 = grid("H100 80GB BF16")


def write(rows: Grid, *, order: Sequence[str] = NAMES, header: Sequence[str] | None = None, heading: str = "T") -> str:
    """A markdown document with one table."""
    names = order if header is None else header
    lines = [f"## {heading}", "", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [f"| {' | '.join(row[name] for name in order)} |" for row in rows]
    return "\n".join(lines) + "\n"


def figures(rows: Sequence[BenchmarkRow]) -> list[tuple[object, ...]]:
    """All that a row says, without the place that it was read from."""
    return [dataclasses.astuple(dataclasses.replace(row, table="", line=0)) for row in rows]


def refusal(text: str) -> FlopwiseError:
    with pytest.raises(FlopwiseError) as caught:
        read_benchmark_tables(text)
    assert caught.value.what
    assert caught.value.why
    assert caught.value.hint
    return caught.value


H100_FIGURES = figures(read_benchmark_tables(write(H100)))


# The published document


def test_every_row_of_every_table_is_read() -> None:
    rows = read_benchmark_tables(DOCUMENT)
    assert len(rows) == 198
    assert Counter(row.table for row in rows) == TABLE_SIZES
    lines = DOCUMENT.splitlines()
    for row in rows:
        assert lines[row.line - 1].startswith(f"|  {row.model} | {row.sequence_tokens} | {row.devices} |")


def test_rows_agree_with_an_independent_parse() -> None:
    rows = read_benchmark_tables(DOCUMENT)
    for row, other in zip(rows, independent_rows(), strict=True):
        assert row.table == other["table"]
        assert row.model == other["model"]
        assert row.sequence_tokens == int(other["seq_len"])
        assert row.devices == int(other["n_gpus"])
        assert row.device == other["gpu"]
        assert row.mfu == pytest.approx(float(other["mfu_pct"]) / 100, rel=1e-12)
        assert row.hfu == pytest.approx(float(other["hfu_pct"]) / 100, rel=1e-12)
        assert row.model_flops_per_s_per_device == pytest.approx(float(other["model_tflop"]) * 1e14, rel=1e-12)
        assert row.micro_batch == int(other["micro_batch"])
        assert row.accumulation_steps == int(other["grad_accum"])
        assert row.global_batch == int(other["global_batch"])
        assert row.sequences_per_s == int(other["seqs_per_s"])
        assert row.tokens_per_s == int(other["tokens_per_s"])
        assert row.tokens_per_s_per_device == int(other["tokens_per_s_per_gpu"])
        assert row.global_batch_tokens == int(other["global_batch_tokens"])
        assert row.precision == other["precision"]
        assert row.mixed_precision_mode == other["mp_mode"]
        assert row.sharding == other["sharding"]
        assert str(row.activation_checkpointing) == other["act_ckpt"]
        assert str(row.activation_offload) == other["act_offload"]
        assert row.parameters == int(other["n_params"])


def test_identities_hold_in_all_rows() -> None:
    peaks = {"h100 bf16": 989.5e12, "h100 fp8": 1979e12, "a100 bf16": 312e12}
    for row in read_benchmark_tables(DOCUMENT):
        assert row.global_batch == row.devices * row.micro_batch * row.accumulation_steps
        assert row.global_batch_tokens == row.global_batch * row.sequence_tokens
        # Whole rates are cut, not rounded.
        assert row.tokens_per_s_per_device == row.tokens_per_s // row.devices
        assert row.sequences_per_s == row.tokens_per_s // row.sequence_tokens
        factor = 4 / 3 if row.activation_checkpointing else 1
        assert math.isclose(row.hfu, row.mfu * factor, abs_tol=1.2e-4)
        peak = peaks[f"{row.device[:4]} {row.precision.removeprefix('amp_')}"]
        assert math.isclose(row.model_flops_per_s_per_device, row.mfu * peak, abs_tol=0.51e-4 * peak)


def test_rates_are_the_decimals_as_printed() -> None:
    first = read_benchmark_tables(DOCUMENT)[0]
    assert (first.mfu, first.hfu) == (0.4257, 0.5676)
    assert first.model_flops_per_s_per_device == 421_258_300_000_000


def test_the_lost_name_of_the_a100_40gb_table_is_found() -> None:
    *whole, lossy = markdown_tables(DOCUMENT)
    assert [len(table.names) for table in whole] == [20, 20, 20]
    assert len(lossy.names) == 19
    assert {len(cells) for _, cells in lossy.rows} == {20}
    assert find_missing_column(lossy) == ("Model TFLOP", NAMES.index("Model TFLOP"))


# Repair


@pytest.mark.parametrize("heading", TABLE_SIZES)
def test_which_lost_names_can_be_found_in_published_order(heading: str) -> None:
    rows = grid(heading)
    true = figures(read_benchmark_tables(write(rows)))
    refused = set()
    for lost in NAMES:
        text = write(rows, header=[name for name in NAMES if name != lost])
        try:
            assert figures(read_benchmark_tables(text)) == true, lost
        except FlopwiseError as error:
            assert "several places fit" in error.what
            assert f"'{lost}' as column {NAMES.index(lost) + 1}" in str(error.why)
            refused.add(lost)
    # Side by side, only these two can change places without breaking a product.
    assert refused == {"MicroBatchSize", "GradAccum"}


@settings(max_examples=150, deadline=None)
@given(
    order=st.permutations(NAMES),
    lost=st.sampled_from(NAMES),
    rows=st.lists(st.sampled_from(H100), min_size=1, max_size=12),
)
def test_a_repair_is_right_or_refused(order: list[str], lost: str, rows: Grid) -> None:
    true = figures(read_benchmark_tables(write(rows)))
    text = write(rows, order=order, header=[name for name in order if name != lost])
    try:
        found = read_benchmark_tables(text)
    except FlopwiseError as error:
        assert "several places fit" in error.what
        assert lost in str(error.why)
        assert error.hint
    else:
        assert figures(found) == true


def test_places_with_equal_cells_are_one_reading() -> None:
    rows = [row for row in H100 if row["Activation Checkpointing"] == "False"]
    text = write(rows, header=[name for name in NAMES if name != "HFU"])
    assert figures(read_benchmark_tables(text)) == figures(read_benchmark_tables(write(rows)))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("MicroBatchSize", "2", "GlobalBatchSize is not # GPUs × MicroBatchSize × GradAccum"),
        ("GlobalBatchSize (T)", "1179649", "GlobalBatchSize (T) is not GlobalBatchSize × SeqLen (T)"),
        ("Throughput (T/s/GPU)", "2987", "Throughput (T/s/GPU) is not Throughput (T/s) / # GPUs"),
        ("Throughput (S/s)", "3", "Throughput (S/s) is not Throughput (T/s) / SeqLen (T)"),
        ("HFU", "47.42", "HFU is not MFU × 4/3"),
    ],
)
def test_a_typing_error_is_named_where_it_stops_a_repair(name: str, text: str, reason: str) -> None:
    rows = [dict(row) for row in H100]
    rows[9][name] = text
    error = refusal(write(rows, header=[name for name in NAMES if name != "Model TFLOP"]))
    assert "no place for a missing name fits" in error.what
    assert "'Model TFLOP' as column 7" in str(error.why)
    assert f"line 14: {reason}" in str(error.why)


def test_an_uneven_peak_stops_a_repair() -> None:
    rows = [dict(row) for row in H100]
    rows[3]["Model TFLOP"] = "9.548107"
    error = refusal(write(rows, header=[name for name in NAMES if name != "Model TFLOP"]))
    assert "Model TFLOP / MFU is not the same" in str(error.why)


def test_an_unknown_column_beside_the_lost_one_is_not_guessed() -> None:
    rows = [{**row, "Remark": "ok"} for row in H100]
    order = ["Precision", "Remark", *(name for name in NAMES if name != "Precision")]
    error = refusal(write(rows, order=order, header=order[1:]))
    assert "'Precision' as column 1 or 'Precision' as column 2" in str(error.why)


def test_a_number_is_not_taken_for_a_lost_name() -> None:
    rows = [{**row, "Remark": "7"} for row in H100]
    order = ["Precision", "Remark", *(name for name in NAMES if name != "Precision")]
    assert figures(read_benchmark_tables(write(rows, order=order, header=order[1:]))) == H100_FIGURES


# Variants of writing


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(NAMES))
def test_columns_are_read_by_name_in_any_order(order: list[str]) -> None:
    assert figures(read_benchmark_tables(write(H100, order=order))) == H100_FIGURES


@settings(max_examples=50, deadline=None)
@given(
    order=st.permutations(NAMES),
    blanks=st.lists(st.sampled_from(["", " ", "   ", "\t", "\u00a0"]), min_size=1, max_size=7),
    outer=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    tail=st.sampled_from(["", "  ", "\t"]),
)
def test_blanks_pipes_and_line_ends_do_not_matter(
    order: list[str], blanks: list[str], outer: bool, newline: str, tail: str
) -> None:
    lines = write(H100, order=order).splitlines()
    for at, line in enumerate(lines):
        if "|" in line:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            padded = [
                blanks[(at + place) % len(blanks)] + cell + blanks[(at * place) % len(blanks)]
                for place, cell in enumerate(cells)
            ]
            lines[at] = "|".join(["", *padded, ""] if outer else padded) + tail
    assert figures(read_benchmark_tables(newline.join(lines))) == H100_FIGURES


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Prose with a | in it.\n\n", "\nMore prose | here.\n"),
        ("", "prose right below\n"),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\n", "\n| c |\n|---|\n"),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n", "| c | d |\n|:-:|--:|\n| x | y |\n"),
        ("```\n| Model | MFU |\n|---|---|\n| x | y |\n```\n", "~~~\n| never | closed |\n|---|---|\n"),
        ("<!-- a\n| Model | MFU |\n|---|---|\n-->\n", "<!-- b -->\n"),
        ("\ufeff", ""),
    ],
)
def test_what_stands_around_a_table_is_passed_over(before: str, after: str) -> None:
    rows = read_benchmark_tables(before + write(H100) + after)
    assert figures(rows) == H100_FIGURES
    assert {row.table for row in rows} == {"T"}


def test_a_table_in_a_code_block_is_no_table() -> None:
    fenced = f"````text\n{write(H100)}```\n{write(H100)}```` text\n{write(H100)}````\n"
    assert figures(read_benchmark_tables(fenced + write(H100))) == H100_FIGURES
    assert refusal(fenced).what == "no markdown table found"


@pytest.mark.parametrize("stray", ["", "<!-- a remark -->", f"|{'---|' * 20}"])
def test_a_stray_line_does_not_cost_the_rows_below_it(stray: str) -> None:
    lines = write(H100).splitlines()
    lines.insert(20, stray)
    rows = read_benchmark_tables("\n".join(lines))
    assert figures(rows) == H100_FIGURES
    assert rows[-1].line == len(lines)


@pytest.mark.parametrize(
    ("above", "heading"),
    [
        ("# A\n## B #\n", "B"),
        ("C#\n===\n", "C#"),
        ("### C# ###\n\nprose\n\n", "C#"),
        ("D\n-----\n", "D"),
        ("##\n", ""),
        ("", ""),
    ],
)
def test_a_table_carries_the_heading_above_it(above: str, heading: str) -> None:
    text = above + write(H100[:1]).removeprefix("## T\n")
    assert read_benchmark_tables(text)[0].table == heading


def test_names_numbers_and_emphasis_may_be_spelled_otherwise() -> None:
    row = {name: f"**{cell}**" for name, cell in H100[0].items()}
    row["NumParams"] = "64,862,437,376"
    row["MFU"] = "42.57 %"
    row["Activation Checkpointing"] = "`true`"
    text = write([row], header=[f"*{name.upper().replace('(', '  (')}*" for name in NAMES])
    assert figures(read_benchmark_tables(text)) == H100_FIGURES[:1]


def test_a_column_of_no_concern_is_ignored() -> None:
    rows = [{**row, "Peak memory": "a \\| b"} for row in H100]
    order = [*NAMES[:5], "Peak memory", *NAMES[5:]]
    assert figures(read_benchmark_tables(write(rows, order=order))) == H100_FIGURES


@pytest.mark.parametrize("heading", TABLE_SIZES)
def test_the_flop_rate_is_told_in_three_units(heading: str) -> None:
    printed = grid(heading)
    rows = read_benchmark_tables(write(printed))
    with_exponent = [{**row, "Model TFLOP": row["Model TFLOP"] + "E+14"} for row in printed]
    assert figures(read_benchmark_tables(write(with_exponent))) == figures(rows)
    in_tera = [{**row, "Model TFLOP": str(int(float(row["Model TFLOP"]) * 100))} for row in printed]
    lossy = write(in_tera, header=[name for name in NAMES if name != "Model TFLOP"])
    for text in (write(in_tera), lossy):
        for cut, row in zip(read_benchmark_tables(text), rows, strict=True):
            error = row.model_flops_per_s_per_device - cut.model_flops_per_s_per_device
            assert -1 <= error < 1e12


# Refusals


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the text is empty"),
        (" \n\t\n", "the text is empty"),
        ("\x7fELF\x00\x00|\x00", "null bytes"),
        ("<html><TABLE><tr><td>1</td></tr></table></html>", "HTML table"),
        ("model,mfu\n70b,42.57\n", "line of dashes"),
        ("# Only\n\nprose | with | pipes\n", "line of dashes"),
        ("| Model | MFU |\n| 70b | 42 |\n", "line of dashes"),
    ],
)
def test_a_text_without_tables_is_refused(text: str, part: str) -> None:
    error = refusal(text)
    assert error.what == "no markdown table found"
    assert part in str(error.why)


def test_a_text_with_other_tables_only_says_what_is_lacking() -> None:
    kept = [name for name in NAMES if name not in {"HFU", "GPU"}]
    error = refusal("| a | b |\n|---|---|\n\n" + write(H100, order=kept))
    assert error.what == "no table has the columns of a training benchmark"
    assert error.why == "the nearest, at line 6, lacks: GPU, HFU"


def test_a_table_without_needed_columns_is_passed_over_beside_a_whole_one() -> None:
    kept = [name for name in NAMES if name != "HFU"]
    text = write(H100, order=kept) + "\n" + write(H100, heading="U")
    assert {row.table for row in read_benchmark_tables(text)} == {"U"}


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("SeqLen (T)", "2k", "a whole number"),
        ("SeqLen (T)", "0", "a whole number from 1 on"),
        ("# GPUs", "8.0", "a whole number"),
        ("# GPUs", "٣", "a whole number"),
        ("MicroBatchSize", "-1", "a whole number"),
        ("NumParams", "9" * 5000, "a whole number"),
        ("NumParams", "1,23", "a whole number"),
        ("MFU", "n/a", "a percentage from 0 to 100"),
        ("MFU", "104.2", "a percentage from 0 to 100"),
        ("HFU", "-1", "a percentage from 0 to 100"),
        ("Model TFLOP", "nan", "a number"),
        ("Model TFLOP", "1e999", "a number"),
        ("Model TFLOP", "", "a number"),
        ("Activation Checkpointing", "1", "True or False"),
        ("GPU", "", "a name"),
    ],
)
def test_a_cell_that_does_not_read_is_shown_with_its_place(name: str, text: str, wanted: str) -> None:
    rows = [dict(row) for row in H100]
    rows[2][name] = text
    error = refusal(write(rows))
    assert error.what.startswith(f"line 7, column '{name}': '{text[:39]}")
    assert error.what.endswith(f"is not {wanted}")
    assert len(error.what) < 120


@pytest.mark.parametrize(("cells", "count", "part"), [("| 7b | 2048 |", 2, "few"), ("|" * 23, 22, "many")])
@pytest.mark.parametrize("header", [NAMES, tuple(name for name in NAMES if name != "Model TFLOP")])
def test_a_row_of_another_width_is_refused(cells: str, count: int, part: str, header: tuple[str, ...]) -> None:
    lines = write(H100, header=header).splitlines()
    lines.insert(10, cells)
    error = refusal("\n".join(lines))
    assert error.what == f"line 11: the row has too {part} cells: {count} where 20 belong"
    assert str(len(header)) in str(error.why)


def test_a_nameless_column_beside_all_needed_names_is_refused() -> None:
    rows = [{**row, "Remark": "ok"} for row in H100]
    error = refusal(write(rows, order=[*NAMES, "Remark"], header=NAMES))
    assert error.what == "line 5: the row has too many cells: 21 where 20 belong"


def test_a_name_that_stands_twice_is_refused() -> None:
    assert "names 'MFU' more than once" in refusal(write(H100, order=[*NAMES, "MFU"])).what


def test_a_table_without_rows_is_refused() -> None:
    assert refusal(write([])).what == "the benchmark table at line 3 has no rows"


# Whatever text comes


@settings(max_examples=300, deadline=None)
@given(text=st.text() | st.text(alphabet="|-:#`~ \n\r\\<!>aM1.%*"))
def test_arbitrary_text_is_refused_politely(text: str) -> None:
    assert refusal(text).what in {
        "no markdown table found",
        "no table has the columns of a training benchmark",
    }


SMALL = write(H100[:4])


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(SMALL)),
            st.integers(0, 12),
            st.sampled_from(["", "|", "\n", "-", "1", "x", "```", "<!--", "\x0c", "\ud800", "٣"]),
        ),
        max_size=4,
    ),
)
def test_a_damaged_table_reads_or_is_refused(edits: list[tuple[int, int, str]]) -> None:
    text = SMALL
    for at, length, new in edits:
        text = text[:at] + new + text[at + length :]
    try:
        rows = read_benchmark_tables(text)
    except FlopwiseError as error:
        assert error.why
        assert error.hint
    else:
        assert rows
        assert all(0 <= row.mfu <= 1 and row.devices > 0 for row in rows)


def test_a_long_hostile_text_takes_no_long_time() -> None:
    text = "| a " * 20_000 + "\n" + "|-" * 20_000 + "\n" + "#" * 50_000 + " " * 50_000 + "\n" + "`" * 50_000
    assert refusal(text).what == "no table has the columns of a training benchmark"
