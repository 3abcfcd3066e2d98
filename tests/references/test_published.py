"""Published tables: what their readers make of them, checked against the printed figures, and what they refuse."""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import ROOT, hardware_names
from flopwise.references.published import (
    NAMED_FILES,
    TABLES,
    megatron,
    mpt,
    nanotron,
    protocol_of,
    read_cases,
    read_cases_and_skipped,
    table_of,
    vtrain,
)
from flopwise.references.published.rows import parse_rows
from flopwise.references.validate.protocol import Case
from flopwise.setup.stack import NEUTRAL
from flopwise.work.describe import describe
from flopwise.work.transformer import Transformer

FOLDER = ROOT / "tables"
FILES = {
    mpt.FILE: ("mpt", mpt.COLUMNS),
    vtrain.FILE: ("vtrain", vtrain.COLUMNS),
    nanotron.FILE: ("nanotron", nanotron.COLUMNS),
    megatron.FILES[0]: ("megatron", megatron.COLUMNS),
    megatron.FILES[1]: ("megatron-2", megatron.SECOND_COLUMNS),
}


def printed(file: str) -> list[dict[str, str]]:
    with (FOLDER / file).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def parameters(case: Case) -> int:
    return describe(case.setup.model, case.setup.sequence_tokens).parameters


def micro_batches(case: Case) -> float:
    return case.setup.batch_sequences / (case.setup.parallel.data * case.setup.micro_batch_sequences)


@pytest.mark.parametrize(
    ("table", "rows"), [("mpt", 198), ("vtrain", 1440), ("nanotron", 830), ("megatron", 10), ("megatron-2", 12)]
)
def test_every_shipped_table_is_read_whole(table: str, rows: int) -> None:
    cases = read_cases(table)
    assert [case.row for case in cases] == list(range(1, rows + 1))
    for case in cases:
        assert case.setup.hardware.name in hardware_names()
        assert case.step_s is None or 0 < case.step_s < 3600
        assert micro_batches(case) == int(micro_batches(case))
        case.setup.parallel.check(case.setup.model, case.setup.sequence_tokens)


def test_the_tables_are_those_and_no_others() -> None:
    assert ("mpt", "vtrain", "nanotron", "megatron", "megatron-2", *NAMED_FILES) == TABLES
    others = ("deepflow_lstm.csv", "offload_h100.csv", "offload_ampere.csv", "nanotron_collectives.csv")
    assert {path.name for path in FOLDER.glob("*.csv")} == {*FILES, *NAMED_FILES.values(), *others}
    told = (FOLDER / "SOURCES.md").read_text(encoding="utf-8")
    assert all(path.name in told for path in FOLDER.glob("*.csv"))


@pytest.mark.parametrize("file", FILES)
def test_no_column_beyond_the_named_ones_is_read(file: str, tmp_path: Path) -> None:
    table, columns = FILES[file]
    rows = [{column: row[column] for column in reversed(columns)} for row in printed(file)]
    cases = read_cases(table, write(tmp_path / "own.csv", rows))
    assert cases == read_cases(table)


# -- parameters against the printed ones ------------------------------------------------------------------------------


def test_mpt_models_have_the_printed_parameters() -> None:
    for case, row in zip(read_cases("mpt"), printed(mpt.FILE), strict=True):
        assert parameters(case) == int(row["n_params"])


def test_nanotron_models_have_the_printed_parameters() -> None:
    for case, row in zip(read_cases("nanotron"), printed(nanotron.FILE), strict=True):
        billions = parameters(case) / 1e9
        assert billions == pytest.approx(float(row["num_params"]), rel=2e-3)
        if row["Total Params"]:
            # Stages at both ends of a pipeline hold a tied matrix each, and nanotron counts both.
            twice = (
                case.setup.model.vocab * case.setup.model.hidden / 1e9
                if row["pp"] != "1" and case.size != "8.86B"
                else 0
            )
            assert billions + twice == pytest.approx(float(row["Total Params Numeric"]), rel=3e-3)


def test_megatron_models_have_the_printed_parameters() -> None:
    rows = [row for file in megatron.FILES for row in printed(file)]
    for case, row in zip((*read_cases("megatron"), *read_cases("megatron-2")), rows, strict=True):
        # 1.652 G is printed as 1.7.
        assert parameters(case) / 1e9 == pytest.approx(
            float(row["params_b"]), rel=3e-2 if case.size == "1.7B" else 1.1e-2
        )


# -- a few rows by hand -----------------------------------------------------------------------------------------------


def test_mpt_rows_by_hand() -> None:
    cases = read_cases("mpt")
    first = cases[0]
    assert (first.size, first.setup.hardware.name, first.setup.parallel.devices, first.setup.parallel.zero) == (
        "70b",
        "h100-sxm",
        64,
        3,
    )
    assert first.step_s == 2048 * 2048 / 66523
    assert (first.setup.recompute, first.setup.formats.gradients) == ("input", "fp32")
    assert first.label == "s2048 · 64 h100-sxm · mb8 · ckpt"
    fp8 = next(case for case in cases if case.label.endswith("fp8"))
    assert (fp8.setup.formats.matrix, fp8.setup.formats.compute, fp8.setup.formats.weights) == (
        "fp8",
        "bf16",
        "fp32",
    )
    last = cases[-1]
    assert (last.size, last.setup.hardware.name, last.setup.sequence_tokens) == ("125m", "a100-40gb", 512)
    assert (last.setup.formats.gradients, last.setup.recompute) == ("bf16", "none")
    assert last.step_s == 2496 * 512 / 1253886
    older = next(case for case in cases if case.setup.hardware.name == "a100-40gb" and case.setup.recompute != "none")
    assert older.setup.recompute == "full"
    assert sum(case.setup.recompute == "none" for case in cases) == 128
    assert {"fp8" in case.label for case in cases if not case.fitted} == {True}
    assert sum(case.fitted for case in cases) == 191


def test_vtrain_rows_by_hand() -> None:
    first = read_cases("vtrain")[0]
    assert (first.size, first.setup.parallel.pipeline, first.setup.parallel.devices) == ("h1024-l24", 2, 2)
    assert (first.step_s, micro_batches(first)) == (0.372160408, 2)
    assert (first.setup.attention, first.setup.recompute, first.fits) == ("eager", "none", None)
    assert Counter(case.size for case in read_cases("vtrain"))["h2048-l20"] == 180


def test_vtrain_times_are_sums_and_not_measurements() -> None:
    """What the reader's module says of the table: a hop between stages takes 2·bytes ÷ 25 GiB/s, to the digit."""
    times = {(case.size, case.label): case.step_s for case in read_cases("vtrain")}

    def seconds(layers: int, pipeline: int, batch: int) -> float:
        time = times[f"h2048-l{layers}", f"dp1 tp1 pp{pipeline} · batch {batch} · mb4"]
        assert time is not None
        return time

    def at_no_layers(pipeline: int, batch: int) -> float:
        return 2 * seconds(12, pipeline, batch) - seconds(24, pipeline, batch)

    def without_micro_batches(pipeline: int) -> float:
        return 2 * at_no_layers(pipeline, 8) - at_no_layers(pipeline, 16)

    hop_s = (without_micro_batches(4) - without_micro_batches(2)) / 4
    assert hop_s == pytest.approx(2 * (4 * 1024 * 2048 * 2) / (25 * 2**30), rel=1e-6)


def test_nanotron_rows_by_hand() -> None:
    cases = read_cases("nanotron")
    first = cases[0]
    assert (first.size, first.setup.parallel.data, first.setup.batch_sequences) == ("1.34B", 8, 256)
    assert first.step_s == pytest.approx(256 * 4096 / (40149.94 * 8))
    assert first.reserved_bytes == round(50.18 * 2**30)
    assert (cases[1].step_s, cases[1].fits) == (None, True)  # before the pipeline's repair
    assert Counter(case.fits for case in cases) == {False: 542, True: 217, None: 71}
    assert sum(case.step_s is not None for case in cases) == 130
    assert sum(case.step_s is not None and case.fitted for case in cases) == 125
    assert all(case.fits for case in cases if case.step_s is not None and case.fitted)


def test_nanotron_rows_that_contradict_themselves() -> None:
    cases, rows = read_cases("nanotron"), printed(nanotron.FILE)
    both = [
        case for case, row in zip(cases, rows, strict=True) if (row["status"], row["oom_error"]) == ("Success", "True")
    ]
    assert len(both) == 3
    assert all(case.fits is None and not case.fitted for case in both)
    # The node with slow links: its rows ran, and say nothing about the framework.
    slow = [
        case for case, row in zip(cases, rows, strict=True) if row[nanotron.LINK] and float(row[nanotron.LINK]) < 50
    ]
    assert [case.row for case in slow] == [200, 201, 209, 215, 219, 220]
    assert [case.row for case in cases if not case.fitted] == [case.row for case in slow]
    # Row 215 is older than the pipeline's repair.
    assert [case.row for case in slow if case.step_s is None] == [215]


def test_nanotron_rows_out_of_memory_take_heads_and_tying_from_those_that_ran() -> None:
    cases = read_cases("nanotron")
    models = {case.size: case.setup.model for case in cases}
    assert {case.setup.model for case in cases} == set(models.values())
    tied = {size: getattr(model, "tied", None) for size, model in models.items()}
    assert tied == {"1.34B": True, "3.57B": True, "8.86B": False, "80B": False, "469B": False}
    assert all(case.setup.parallel.sequence == (case.setup.parallel.tensor > 1) for case in cases)


def test_megatron_rows_by_hand() -> None:
    cases, second = read_cases("megatron"), read_cases("megatron-2")
    by_size = {case.size: case.setup.parallel for case in cases}
    assert {size: parallel.chunks for size, parallel in by_size.items() if parallel.chunks > 1} == {
        "76B": 3,
        "145B": 2,
        "310B": 2,
        "530B": 3,
    }
    trillion = cases[9]
    assert (trillion.setup.parallel.tensor, trillion.setup.parallel.pipeline, trillion.setup.parallel.data) == (
        8,
        64,
        6,
    )
    # 96·3072·2048·128·25600²·(1 + 2048/(6·25600) + 51200/(16·128·25600)) = 5.139e19 FLOPs, on 3,072 × 163 TFLOP/s.
    assert trillion.step_s == pytest.approx(5.139e19 / (3072 * 163e12), rel=1e-3)
    assert [case.fitted for case in (*cases, *second)] == [True] * 10 + [False] * 12
    zero = second[0]
    assert (zero.row, zero.setup.parallel.zero, zero.setup.parallel.data, micro_batches(zero)) == (1, 3, 384, 1)
    assert all(case.setup.recompute == "full" for case in (*cases, *second))


def test_megatron_times_agree_with_the_printed_days() -> None:
    for case, row in zip(read_cases("megatron-2"), printed(megatron.FILES[1]), strict=True):
        assert case.step_s is not None
        days = 300e9 / case.setup.batch_tokens * case.step_s / 86_400
        assert days == pytest.approx(float(row["days_for_300B_tokens"]), rel=0.02)


def test_a_file_of_either_megatron_table_goes_by_either_name() -> None:
    first, second = (FOLDER / file for file in megatron.FILES)
    for name in ("megatron", "Megatron-2"):
        assert table_of(name, first) == "megatron"
        assert read_cases(name, second) == read_cases("megatron-2")
    assert table_of("mpt", second) == "mpt"


@pytest.mark.parametrize("table", TABLES)
def test_protocols_name_every_size_of_their_table_as_a_fold(table: str) -> None:
    protocol, cases = protocol_of(table), read_cases(table)
    assert protocol.table == table
    assert sorted(protocol.sizes) == sorted({case.size for case in cases})
    others = {"deepspeed"} if table == "megatron-2" else set()
    assert {case.stack for case in cases} == {protocol.stack} | others
    assert protocol.fitted_table in TABLES
    assert (protocol.fitted_table == table) == any(case.fitted for case in cases)


def test_protocols_with_mistakes_are_refused() -> None:
    good = protocol_of("megatron")
    with pytest.raises(FlopwiseError, match="no metric is called"):
        replace(good, metric="speed")  # type: ignore[arg-type]
    with pytest.raises(FlopwiseError, match="no constant is called 'product'"):
        replace(good, start={"product": 1.0})
    with pytest.raises(FlopwiseError, match="fits 6 \\+ 1 constants"):
        replace(good, start=dict.fromkeys(list(NEUTRAL)[:6], 1.0), memory={"activations": 1.0})


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(table: str, path: Path) -> str:
    with pytest.raises(FlopwiseError) as caught:
        read_cases(table, path)
    assert caught.value.hint
    return str(caught.value)


def test_an_unknown_table_is_told_the_known_ones() -> None:
    with pytest.raises(FlopwiseError, match="no table is called 'mtp'\ndid you mean mpt"):
        read_cases("mtp")


@pytest.mark.parametrize("table", TABLES)
def test_files_that_are_no_tables(table: str, tmp_path: Path) -> None:
    assert "there is no file" in refused(table, tmp_path / "none.csv")
    assert "is a folder" in refused(table, tmp_path)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8" in refused(table, binary)
    empty = tmp_path / "empty.csv"
    empty.write_text("\n\n", encoding="utf-8")
    assert "is empty" in refused(table, empty)
    open_quote = tmp_path / "quote.csv"
    open_quote.write_text('model,"open\n', encoding="utf-8")
    assert "cannot be read" in refused(table, open_quote)


@pytest.mark.parametrize("file", FILES)
def test_missing_columns_and_missing_rows(file: str, tmp_path: Path) -> None:
    table, columns = FILES[file]
    rows = printed(file)[:1]
    for column in columns:
        lacking = [{name: cell for name, cell in row.items() if name != column} for row in rows]
        message = refused(table, write(tmp_path / "lacking.csv", lacking))
        assert f"lacks the column {column}" in message
        assert columns[0 if column != columns[0] else 1] in message
    header = tmp_path / "header.csv"
    header.write_text(",".join(rows[0]) + "\n", encoding="utf-8")
    assert "has no rows" in refused(table, header)


@pytest.mark.parametrize(
    ("file", "column", "cell", "expected"),
    [
        (mpt.FILE, "seq_len", "2k", "line 3: seq_len = '2k' is not a number"),
        (mpt.FILE, "seq_len", "0", "line 3: seq_len = '0' is out of range"),
        (mpt.FILE, "seq_len", "nan", "is out of range"),
        (mpt.FILE, "seq_len", "1e300", "is out of range"),
        (mpt.FILE, "micro_batch", "2.5", "micro_batch = '2.5' is not a whole number"),
        (mpt.FILE, "tokens_per_s", "", "tokens_per_s = '' is empty"),
        (mpt.FILE, "gpu", "h1000", "line 3: no GPU is called 'h1000'"),
        (mpt.FILE, "model", "8b", "line 3: no MPT model is called '8b'"),
        (mpt.FILE, "precision", "int4", "no precision is called 'int4'"),
        (mpt.FILE, "sharding", "HALF_SHARD", "no sharding strategy is called 'HALF_SHARD'"),
        (mpt.FILE, "act_ckpt", "maybe", "no truth value is called 'maybe'"),
        (mpt.FILE, "global_batch", "1025", "global_batch = '1025' is not a multiple of 32 data ranks"),
        (vtrain.FILE, "# GPUs", "6", "line 3: 2 tensor × 2 data × 2 pipeline ranks on 6 GPUs"),
        (vtrain.FILE, "attention heads", "7", "line 3: gpt-h1024-l24: 7 heads do not divide a width of 1024"),
        (nanotron.FILE, "status", "Fine", "no status is called 'Fine'"),
        (nanotron.FILE, "zero_stage", "3", "no ZeRO stage of nanotron is called '3'"),
        (nanotron.FILE, "tok/s/gpu", "", "a success without `tok/s/gpu`"),
        (megatron.FILES[0], "model_parallel_size", "4", "this model ran on 2"),
        (megatron.FILES[1], "scheme", "FSDP", "no scheme is called 'FSDP'"),
        (megatron.FILES[1], "params_b", "1", "no size in table 2 is called '1'"),
    ],
)
def test_bad_cells_are_told_with_their_place(file: str, column: str, cell: str, expected: str, tmp_path: Path) -> None:
    rows = printed(file)[:2]
    rows[1][column] = cell
    read = read_cases_and_skipped(FILES[file][0], write(tmp_path / "bad.csv", rows))
    (skipped,) = read.skipped
    assert (len(read.cases), skipped.row) == (1, 2)
    assert expected in skipped.why
    assert "line 3: " in skipped.why
    # A file of nothing else is refused, with its first row's reason.
    assert expected in refused(FILES[file][0], write(tmp_path / "worse.csv", [rows[1]])).replace("line 2", "line 3")


def test_rows_of_another_length_and_columns_twice(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("# GPUs,global batch\n1\n", encoding="utf-8")
    with pytest.raises(FlopwiseError, match="1 cells where the header names 2 columns"):
        parse_rows("a,b\n1\n", "text", ("a",))
    with pytest.raises(FlopwiseError, match="has the column a 2 times"):
        parse_rows("a,b,a\n1,2,3\n", "text", ("a",))


def test_a_row_of_another_length_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", printed(megatron.FILES[0]))
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:3], "39B,1", *lines[3:]]), encoding="utf-8")
    read = read_cases_and_skipped("megatron", path)
    assert (len(read.cases), [skipped.row for skipped in read.skipped]) == (10, [3])
    assert "2 cells where the header names" in read.skipped[0].why


def test_a_sweep_in_which_nothing_was_measured(tmp_path: Path) -> None:
    rows = [row for row in printed(nanotron.FILE) if row["status"] == "Other"]
    assert "has no usable row" in refused("nanotron", write(tmp_path / "other.csv", rows))


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet='model,seq_len"\n\r\t 0123e.-#ñ\x00', max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        rows = parse_rows(text, "text", ("model",))
    except FlopwiseError:
        return
    assert all(row.number > 0 and row.line > 1 for row in rows)


def test_whole_numbers_may_be_written_as_decimals() -> None:
    (row,) = parse_rows("n,x\n\n 16.0 ,1e3\n", "text", ("n", "x"))
    assert (row.line, row.number, row.count("n"), row.count("x")) == (3, 1, 16, 1000)
    assert math.isclose(row.number_of("x"), 1000)


def test_other_models_in_the_columns_of_the_megatron_table(tmp_path: Path) -> None:
    """A model of 48 layers, 6,144 wide, on eight tensor ranks; its heads are assumed to have 128 channels."""
    header = ",".join(megatron.COLUMNS)
    file = tmp_path / "rows.csv"
    file.write_text(f"{header}\n22B,6144,48,8,8,4,2048,51200,135\n")
    (case,) = read_cases("megatron", file)
    assert (case.setup.parallel.tensor, case.setup.parallel.pipeline, case.setup.micro_batch_sequences) == (8, 1, 1)
    assert isinstance(case.setup.model, Transformer)
    assert (case.setup.model.heads, case.setup.model.layers) == (48, 48)
    file.write_text(f"{header}\n22B,6100,48,8,8,4,2048,51200,135\n")
    with pytest.raises(FlopwiseError, match="is not a multiple of 128"):
        read_cases("megatron", file)
