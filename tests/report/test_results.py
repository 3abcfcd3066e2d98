"""Rows of results: made from runs and cells, and as a table and `results.md`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from flopwise.catalog.load import load_model, model_table
from flopwise.records.profile import Profile, SourcedValue
from flopwise.references.published.benchmark_tables import markdown_tables
from flopwise.references.published.results import read_results
from flopwise.report.results import (
    field_words,
    heading_of,
    peak_lines,
    precision_parts,
    provenance_lines,
    results_document,
    spread_words,
)
from flopwise.setup.written import CellSetup, cell_id
from flopwise.store.cells import Attempt, Cell, CellOutcome
from flopwise.store.results import (
    FIELDS,
    Result,
    add_price,
    check_result,
    recompute_words,
    result_of_cell,
    result_of_run,
    values_of,
)
from tests.report.test_training_report import a_measurement, a_record
from tests.support.printing import printed, results_markdown
from tests.support.result_rows import OOM_REASON, a_result, lost, mixed

DOCUMENT = Path(__file__).parents[1] / "data" / "mpt_tables.md"


def a_profile(**changes: Any) -> Profile:
    values = {"power_w": 650.0, "power_limit_w": 700.0, "clock_mean_hz": 1.755e9, "energy_j": 11_000.0}
    known = {name: SourcedValue(value=value, source="measured") for name, value in values.items()}
    return replace(Profile(name="0142", format="flopwise", steps=4, values=known), **changes)


# -- rows of runs ----------------------------------------------------------------------------------------------------


def test_a_run_as_a_row() -> None:
    record = a_record()
    measured = record.measurement
    assert measured is not None
    row = result_of_run(replace(record, bound="compute"), a_profile())
    assert (row.run, row.state, row.source, row.bound) == ("0142", "ok", "measured", "compute")
    assert (row.model, row.hardware, row.seed) == ("llama-3-8b", "h200", 7)
    assert row.samples_per_s == pytest.approx(measured.batch_sequences / measured.step_s)
    assert row.model_flops_per_s_per_device == pytest.approx(measured.model_flops / measured.step_s)
    assert row.energy_j_per_token == pytest.approx(11_000 / (measured.tokens_per_s * measured.step_s))
    assert row.prediction_error == pytest.approx(11_300 / measured.tokens_per_s - 1)
    assert (row.power_w, row.power_limit_w, row.clock_hz) == (650.0, 700.0, 1.755e9)
    assert (row.card, row.torch, row.commit) == ("NVIDIA H200", "2.13.0", "0" * 40)
    # The plan's table says nothing of these; what was measured does.
    assert (row.sequence_tokens, row.precision) == (measured.sequence_tokens, measured.precision)


def test_what_a_run_does_not_know_is_none() -> None:
    row = result_of_run(a_record(measurement=None, plan={}, environment={}, state="failed", reason="killed"))
    assert (row.state, row.reason) == ("failed", "killed")
    for name in (
        "hardware",
        "sequence_tokens",
        "precision",
        "batch_sequences",
        "tokens_per_s",
        "mfu",
        "card",
        "driver",
    ):
        assert getattr(row, name) is None, name


def test_memory_that_nobody_looked_at_is_not_0_bytes() -> None:
    measured = a_measurement()
    device = tuple(row for row in measured.memory if row.place == "device")
    row = result_of_run(a_record(measurement=a_measurement(memory=device)))
    assert row.host_bytes is None
    assert row.device_bytes == sum(part.measured_bytes for part in device)


def test_energy_is_not_divided_where_the_profile_does_not_know_its_steps() -> None:
    assert result_of_run(a_record(), a_profile(steps=None)).energy_j_per_token is None


def test_energy_is_of_tokens_without_their_padding_and_of_a_processor_is_that_of_all() -> None:
    measured = a_measurement(devices=2)
    # Half of every batch is padding.
    measured = replace(measured, tokens_per_s=measured.batch_tokens / measured.step_s / 2)
    on_gpus = result_of_run(a_record(measurement=measured), a_profile())
    on_cpu = result_of_run(a_record(measurement=measured, environment={"device": "cpu"}), a_profile())
    assert on_gpus.energy_j_per_token == pytest.approx(2 * 11_000 / (measured.batch_tokens / 2))
    # Its counters know nothing of processes.
    assert on_cpu.energy_j_per_token == pytest.approx(11_000 / (measured.batch_tokens / 2))


def test_a_run_that_failed_has_the_hardware_and_cell_of_one_that_did_not() -> None:
    """Its plan may say `this-machine`: the record says which one that is."""
    plan = {"hardware": "this-machine", "precision": "bf16", "sequence_tokens": 8192}
    known: dict[str, Any] = {"plan": plan, "hardware": "h200", "cell": "0123456789ab"}
    failed = result_of_run(a_record(state="failed", measurement=None, **known))
    good = result_of_run(a_record(measurement=a_measurement(hardware="h200"), **known))
    assert failed.hardware == good.hardware == "h200"
    assert failed.cell == good.cell == "0123456789ab"


def test_the_card_is_what_the_run_was_on() -> None:
    machine = {"cpu": "EPYC", "gpu": "NVIDIA L40S", "driver": "580.95.05"}
    on_cpu = result_of_run(a_record(environment={**machine, "device": "cpu"}))
    assert (on_cpu.card, on_cpu.driver) == ("EPYC", None)
    on_gpu = result_of_run(a_record(environment={**machine, "device": "cuda", "device_name": "NVIDIA H200"}))
    assert (on_gpu.card, on_gpu.driver) == ("NVIDIA H200", "580.95.05")


def test_a_prediction_stands_though_the_measurement_has_none() -> None:
    measured = a_measurement(predicted_step_s=None, predicted_tokens_per_s=None)
    plan = {"hardware": "h200", "expected": {"step_s": 17.0, "tokens_per_s": 2 * measured.tokens_per_s}}
    row = result_of_run(a_record(measurement=measured, plan=plan))
    assert row.predicted_step_s == 17.0
    assert row.prediction_error == pytest.approx(1.0)


def test_what_a_plan_promises_of_other_hardware_is_no_prediction() -> None:
    measured = a_measurement(predicted_step_s=None, predicted_tokens_per_s=None)
    plan = {"hardware": "b200", "expected": {"step_s": 17.0, "tokens_per_s": 2 * measured.tokens_per_s}}
    row = result_of_run(a_record(measurement=measured, plan=plan))
    assert (row.predicted_step_s, row.predicted_tokens_per_s, row.prediction_error) == (None, None, None)


def test_several_devices_share_the_rate() -> None:
    measured = a_measurement(devices=8, batch_sequences=52, micro_batch_sequences=3)
    row = result_of_run(a_record(measurement=measured, plan={"devices": 8, "parallel": {"zero": 3}}), a_profile())
    assert row.tokens_per_s_per_device == measured.tokens_per_s / 8
    # 52 sequences on 8 devices are at most 7 each: three micro-batches of 3.
    assert row.accumulation_steps == 3
    assert row.energy_j_per_token == pytest.approx(8 * 11_000 / (measured.tokens_per_s * measured.step_s))
    assert row.sharding == "zero3"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({}, None),
        ({"recompute": "selective"}, "selective"),
        ({"saves": ["ff", "FF"]}, "none"),
        ({"saves": ["fi", "Ia"]}, "saves 1 full, 1 attention, 2 input"),
    ],
    ids=["nothing", "policy", "all", "some"],
)
def test_what_is_made_again_in_words(plan: dict[str, Any], words: str | None) -> None:
    assert recompute_words(plan) == words


# -- rows of cells ---------------------------------------------------------------------------------------------------

SETTINGS = CellSetup(
    model=model_table(load_model("gpt2")),
    hardware="h200",
    devices=2,
    sequence_tokens=1024,
    batch_sequences=16,
    micro_batch_sequences="auto",
    precision="bf16",
)
FORESEEN = CellOutcome(
    fits=True, method="plan", micro_batch_sequences=4, step_s=0.5, tokens_per_s=32_768.0, bound="memory"
)


def an_attempt(**changes: Any) -> Attempt:
    started = "2026-03-01T12:00:00+01:00"
    return replace(
        Attempt(number=2, cell=cell_id(SETTINGS), repeat=1, state="ok", started=started, steps=10), **changes
    )


def test_a_cell_that_nobody_has_tried() -> None:
    row = result_of_cell(Cell(id=cell_id(SETTINGS), settings=SETTINGS, foreseen=FORESEEN), None)
    assert (row.state, row.source, row.model, row.devices) == ("planned", "predicted", "gpt2", 2)
    assert (row.predicted_tokens_per_s, row.micro_batch_sequences, row.bound) == (32_768.0, 4, "memory")
    assert (row.batch_tokens, row.tokens_per_s) == (16_384, None)


def test_a_cell_out_of_memory_keeps_its_reason_and_prediction() -> None:
    cell = Cell(id=cell_id(SETTINGS), settings=SETTINGS, foreseen=FORESEEN)
    row = result_of_cell(cell, an_attempt(state="oom", reason=OOM_REASON, micro_batch_sequences=8, pid=7))
    assert (row.state, row.reason, row.attempt, row.repeat) == ("oom", OOM_REASON, 2, 1)
    assert (row.predicted_fits, row.tokens_per_s, row.source) == (True, None, "measured")
    # Where no process was started, nothing was measured.
    assert result_of_cell(cell, an_attempt(state="oom", reason=OOM_REASON)).source == "predicted"


def test_what_a_run_has_measured_stands_over_what_was_foreseen() -> None:
    run = result_of_run(a_record())
    row = result_of_cell(Cell(id="0" * 12, settings=SETTINGS, foreseen=FORESEEN), an_attempt(run="0142"), run)
    assert (row.cell, row.run, row.tokens_per_s) == ("0" * 12, "0142", run.tokens_per_s)
    assert row.predicted_tokens_per_s == run.predicted_tokens_per_s
    assert row.bound == "memory"


def test_a_run_and_its_cell_have_the_same_settings() -> None:
    plan = {"hardware": "h200", "devices": 2, "sequence_tokens": 1024, "precision": "bf16", "optimizer": "adamw"}
    record = a_record(
        measurement=None, model=SETTINGS.model, plan=plan, hardware="h200", request={"batch_sequences": 16}
    )
    run = values_of(result_of_run(record))
    planned = values_of(result_of_cell(Cell(id=cell_id(SETTINGS), settings=SETTINGS), None))
    shared = ("model", "hardware", "devices", "sequence_tokens", "batch_sequences", "precision", "optimizer")
    assert {name: run[name] for name in shared} == {name: planned[name] for name in shared}


# -- money and mistakes ----------------------------------------------------------------------------------------------


def test_tokens_per_dollar() -> None:
    # 10,000 tokens/s on 4 devices at 2.50 an hour each: 36 M tokens for 10 dollars.
    row = add_price(a_result(tokens_per_s=10_000.0, devices=4), 2.5)
    assert row.tokens_per_dollar == pytest.approx(3.6e6)
    assert add_price(lost("oom", "no"), 2.5).tokens_per_dollar is None
    planned = add_price(lost("planned", None, predicted_tokens_per_s=10_000.0), 2.5)
    assert planned.tokens_per_dollar == pytest.approx(14.4e6)


def test_more_than_the_peak_is_an_error() -> None:
    assert check_result(a_result(mfu=1.0, hfu=1.0)) == a_result(mfu=1.0, hfu=1.0)
    wrong = check_result(a_result(mfu=1.33))
    assert wrong.state == "error"
    assert wrong.reason == "MFU 133.0 % of 990 TFLOP/s bf16: the peak, its format or the FLOPs are wrong"
    assert check_result(wrong) == wrong
    for odd in ({"hfu": float("nan")}, {"tokens_per_s": -5.0}, {"step_s": float("inf")}, {"devices": 0}):
        assert check_result(a_result(**odd)).state == "error"
        assert "no run has such figures" in (check_result(a_result(**odd)).reason or "")


# -- the table -------------------------------------------------------------------------------------------------------


def table_lines(rows: list[Result], width: int, columns: list[str] | None = None) -> list[str]:
    return printed(results_document(rows, columns), width)


@pytest.mark.parametrize("width", [80, 100, 120, 160, 220])
def test_the_table_keeps_to_its_width_and_loses_no_row(width: int) -> None:
    rows = [add_price(row, 2.5) for row in mixed()]
    lines = table_lines(rows, width)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    header = next(line for line in lines if line.startswith("run"))
    for name in ("run", "state", "model", "sequence", "tok/s", "MFU", "tok/$"):
        assert name in header.split(), name
    states = [line.split()[1] for line in lines[lines.index(header) + 1 :][: len(rows)]]
    assert states == ["ok", "ok", "oom", "timeout", "failed", "skipped", "error"]
    flat = " ".join(text.split())
    for reason in (OOM_REASON, "it took more than 600 s", "its process was killed", "no plan fits in 8 GiB"):
        assert reason in flat
    assert "133.0 % and HFU 150.0 % of 990 TFLOP/s bf16" in flat


def test_columns_give_way_in_their_order() -> None:
    def shown(width: int) -> list[str]:
        return next(line for line in table_lines(mixed(), width) if line.startswith("run")).split()

    assert shown(220)[-2:] == ["bound", "cell"]
    assert "p20–p80" in shown(120)
    assert "micro" not in shown(120)
    assert "p20–p80" not in shown(80)
    assert set(shown(80)) < set(shown(120)) < set(shown(160))


def test_what_all_rows_share_stands_above() -> None:
    lines = table_lines([a_result(), a_result(run="0143", sequence_tokens=4096)], 120)
    assert lines[0] == ("llama-3-8b · on h200 · 1 device · precision bf16 · device cap 40.0 GiB · host cap 110 GiB")
    assert "model" not in lines[2].split()
    assert lines[3].split()[:4] == ["0142", "ok", "8,192", "24"]


def test_an_impossible_utilisation_is_never_printed_as_one() -> None:
    row = a_result(mfu=1.33, hfu=1.5)
    line = table_lines([row], 220)[1]
    assert "133" not in line
    assert line.split().count("error") == 3
    body = markdown_tables(results_markdown([row]))[0]
    cells = dict(zip(body.names, body.rows[0][1], strict=True))
    assert (cells["MFU"], cells["HFU"], cells["State"]) == ("error", "error", "error")
    assert cells["Reason"].startswith("MFU 133.0 % and HFU 150.0 %")


def test_chosen_columns_alone() -> None:
    lines = table_lines([a_result(), lost("oom", OOM_REASON)], 80, ["run", "mfu", "device_bytes", "prediction_error"])
    assert lines[0] == "run      mfu  device_bytes  prediction_error"
    assert lines[1].split() == ["0142", "58.4", "%", "33.0", "GiB", "+0.6", "%"]
    assert lines[2].split() == ["0142", "-", "-", "-"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(word=st.text(max_size=40), number=st.floats(), width=st.integers(80, 200))
def test_any_words_and_numbers_can_be_shown(word: str, number: float, width: int) -> None:
    floats = dict.fromkeys(
        ("tokens_per_s", "tokens_per_s_p20", "step_s", "mfu", "prediction_error", "peak_flops"), number
    )
    row = a_result(**floats, model=word, hardware=word, precision=word, reason=word, run=word or None)
    for name in FIELDS:
        assert "\n" not in field_words(row, name)
    assert table_lines([row, lost("oom", word)], width)
    tables = markdown_tables(results_markdown([row, row]))
    assert {len(cells) for table in tables for _, cells in table.rows} <= {len(table.names) for table in tables}


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (11_190.0, 11_260.0, "11,190–11,260"),
        (1.234, 1.239, "1.23–1.24"),
        (1.2341, 1.2342, "1.2341–1.2342"),
        (5.0, 5.0, "5.00–5.00"),
        (None, 5.0, "-"),
    ],
)
def test_a_spread_is_told_with_digits_enough(low: float | None, high: float | None, words: str) -> None:
    assert spread_words(low, high) == words


# -- results.md ------------------------------------------------------------------------------------------------------


def test_the_columns_begin_as_the_published_ones() -> None:
    published = markdown_tables(DOCUMENT.read_text(encoding="utf-8"))[0].names
    ours = markdown_tables(results_markdown(mixed()))[0].names
    assert ours[: len(published)] == published
    further = ("p20–p80 (T/s)", "Convention", "Peak memory (GiB)", "Energy (J/T)", "Predicted (T/s)", "Error")
    assert {*further, "State", "Cell", "Run", "Reason"} <= set(ours)
    assert "T per $" not in ours
    assert "T per $" in markdown_tables(results_markdown([add_price(a_result(), 2.0)]))[0].names


def test_published_rows_are_written_as_they_were_printed() -> None:
    rows = read_results(DOCUMENT)
    tables = markdown_tables(results_markdown(rows))
    assert {table.heading: len(table.rows) for table in tables} == {
        "H100 80GB BF16": 52,
        "H100 80GB FP8": 7,
        "A100 80GB BF16": 61,
        "A100 40GB BF16": 78,
    }
    printed_rows = [cells for table in markdown_tables(DOCUMENT.read_text(encoding="utf-8")) for _, cells in table.rows]
    ours = [dict(zip(table.names, cells, strict=True)) for table in tables for _, cells in table.rows]
    for cells, own in zip(printed_rows, ours, strict=True):
        assert float(own["MFU"]) == float(cells[4])
        assert float(own["HFU"]) == float(cells[5])
        assert float(own["Model TFLOP"]) == pytest.approx(100 * float(cells[6]), rel=1e-3)
        assert float(own["Throughput (S/s)"].replace(",", "")) == pytest.approx(
            int(cells[11]) / int(cells[1]), rel=1e-3
        )
        for name, cell in zip(("Precision", "MP Mode", "Sharding Strategy"), cells[14:17], strict=True):
            assert own[name] == cell
        assert (own["Activation Checkpointing"], own["Activation CPUOffload"]) == (cells[17], cells[18])
        assert own["NumParams"].replace(",", "") == cells[19]


def test_rows_that_failed_stay_with_their_reason() -> None:
    tables = markdown_tables(results_markdown(mixed()))
    rows = [dict(zip(table.names, cells, strict=True)) for table in tables for _, cells in table.rows]
    assert [row["State"] for row in rows] == ["ok", "ok", "oom", "timeout", "failed", "skipped", "error"]
    assert rows[2]["Reason"] == OOM_REASON
    assert (rows[2]["MFU"], rows[2]["Throughput (T/s)"]) == ("-", "-")


def test_provenance_is_told_once_for_each_environment() -> None:
    rows = [a_result(), a_result(run="0143", started="2026-03-02T08:00:00+01:00"), a_result(driver="590.1")]
    lines = provenance_lines(rows)
    assert len(lines) == 2
    assert lines[0].startswith("2 rows measured: 2026-03-01 to 2026-03-02 · NVIDIA H200 · driver 580.95.05")
    for part in ("power cap 700 W", "flopwise 0.1.0", "commit c0ffee", "torch 2.13.0", "CUDA 13.0", "Python 3.11.9"):
        assert part in lines[0]
    assert "driver 590.1" in lines[1]
    assert provenance_lines(read_results(DOCUMENT)) == [
        "198 rows imported: versions, commit, driver and date are not recorded"
    ]


def test_what_utilisation_divides_by() -> None:
    assert peak_lines([a_result(devices=2, peak_flops=2 * 989.5e12), a_result()]) == [
        "H200 BF16: 989.5 TFLOP/s of bf16 a device; FLOPs counted causal: half the square of attention, "
        "matrix products only"
    ]
    measured_anew = [a_result(peak_flops=peak, hardware="this-cpu", peak_format="fp32") for peak in (0.1e12, 0.101e12)]
    assert "this-cpu BF16: 0.100–0.101 TFLOP/s of fp32 a device; " in peak_lines(measured_anew)[0]
    assert "a peak that is not recorded" in peak_lines([a_result(peak_flops=None)])[0]
    assert "no row has an MFU" in peak_lines([lost("oom", "no")])[0]
    assert len(peak_lines(read_results(DOCUMENT))) == 4


@pytest.mark.parametrize(
    ("precision", "parts"),
    [
        ("amp_bf16 DEFAULT", ("amp_bf16", "DEFAULT")),
        ("bf16-mixed", ("bf16", "mixed")),
        ("bf16,gradients=fp32", ("bf16", "gradients=fp32")),
        ("fp32", ("fp32", "-")),
        (None, ("-", "-")),
    ],
)
def test_a_precision_in_two_columns(precision: str | None, parts: tuple[str, str]) -> None:
    assert precision_parts(precision) == parts


def test_headings() -> None:
    assert heading_of(a_result(hardware="h100_80gb", precision="amp_fp8 DEFAULT")) == "H100 80GB FP8"
    assert heading_of(a_result(hardware="this-cpu", precision="fp32")) == "this-cpu FP32"
    assert heading_of(a_result(hardware="cards/mine1.toml")) == "cards/mine1.toml BF16"
    assert heading_of(a_result(hardware=None, precision=None)) == "unknown hardware"


def test_a_reason_cannot_break_the_table() -> None:
    text = results_markdown([lost("failed", "a|b\n<img src=x>`*", model="x|y")])
    table = markdown_tables(text)[0]
    assert len(table.rows) == 1
    assert re.search(r"<img", text) is None
