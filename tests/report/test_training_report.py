"""A training in words: rows of steps, the block of metrics, memory, listings and pages of runs, at every width."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from flopwise.catalog.load import load_model, model_table
from flopwise.records.measurement import Measurement, MemoryRow, RunRecord, StepRecord
from flopwise.report import runs
from flopwise.report.document import Table, facts
from flopwise.report.runs import curve, data_parts, plan_parts, run_document, runs_document, training_parts
from flopwise.report.tables import wrap_parts
from flopwise.report.training import (
    end_document,
    evaluation_words,
    measured_parts,
    memory_table,
    metric_words,
    metrics_block,
    step_table,
)
from flopwise.report.words import clock_words, loss_words, seconds_words
from flopwise.setup.training import Training
from flopwise.store.results import Result
from flopwise.store.rows import UNREADABLE, RunRow, row_of
from tests.support.listing import Listed
from tests.support.printing import printed

GIB = 2**30
NAN = float("nan")
WIDTHS = (80, 120)


def a_step(step: int = 1, **changes: Any) -> StepRecord:
    """A step of an offloaded 8B model on one device."""
    plain = StepRecord(
        step=step,
        loss=2.913,
        learning_rate=3e-4,
        step_s=17.52,
        tokens=196_608,
        samples=24,
        tokens_per_s=11_222.0,
        mfu=0.584,
        predicted_s=17.4,
        exposed_copy_s=0.12,
    )
    return replace(plain, **changes)


def a_measurement(**changes: Any) -> Measurement:
    """As planned within a few parts in a thousand."""
    owners = {
        "weights": (8.4, 8.4, 6.1, 6.1),
        "gradients": (8.1, 8.1, 6.3, 6.3),
        "optimizer": (0, 0, 29.9, 29.9),
        "activations": (13.9, 13.9, 21.4, 21.5),
        "head": (1.1, 1.1, 0, 0),
        "workspace": (1.6, 1.5, 0, 0),
        "unaccounted": (0, 0.2, 0, 0),
    }
    memory = [
        row
        for owner, sizes in owners.items()
        for row in (
            MemoryRow(
                place="device", owner=owner, planned_bytes=int(sizes[0] * GIB), measured_bytes=int(sizes[1] * GIB)
            ),
            MemoryRow(place="host", owner=owner, planned_bytes=int(sizes[2] * GIB), measured_bytes=int(sizes[3] * GIB)),
        )
    ]
    plain = Measurement(
        model="llama-3-8b",
        hardware="h200",
        devices=1,
        sequence_tokens=8192,
        batch_sequences=24,
        micro_batch_sequences=2,
        batch_tokens=196_608,
        precision="bf16",
        optimizer="adamw",
        n_params=8_030_261_248,
        steps=18,
        step_s=17.52,
        step_s_p20=17.46,
        step_s_p80=17.57,
        tokens_per_s=11_230.0,
        tokens_per_s_p20=11_190.0,
        tokens_per_s_p80=11_260.0,
        model_flops=10**16,
        hardware_flops=10**16 + 1,
        convention="causal",
        mfu=0.584,
        hfu=0.609,
        peak_flops=989e12,
        peak_format="bf16",
        first_loss=10.53,
        last_loss=2.913,
        memory=tuple(memory),
        predicted_step_s=17.4,
        predicted_tokens_per_s=11_300.0,
    )
    return replace(plain, **changes)


METRICS: dict[str, float | str] = {
    "train_loss": 0.31304,
    "epoch": 3.0,
    "eval_accuracy": 0.943,
    "eval_loss": 0.1337,
    "eval_runtime": 2.947,
    "eval_samples": 2000.0,
    "eval_samples_per_second": 679.0834,
    "eval_steps_per_second": 42.4432,
    "total_flos": 1470300.0 * 2**30 + 5,
    "train_runtime": 254.329,
    "train_samples": 24000.0,
    "train_samples_per_second": 94.3689,
    "train_steps_per_second": 4.2999,
}
BLOCK = """\
***** train metrics *****
  epoch                    =        3.0
  eval_accuracy            =     94.30%
  eval_loss                =     0.1337
  eval_runtime             = 0:00:02.94
  eval_samples             =       2000
  eval_samples_per_second  =    679.083
  eval_steps_per_second    =     42.443
  total_flos               =  1470300GF
  train_loss               =      0.313
  train_runtime            = 0:04:14.32
  train_samples            =      24000
  train_samples_per_second =     94.369
  train_steps_per_second   =        4.3"""
"""As recorded logs of the trainer have it, the accuracy and the counts added."""


def a_record(**changes: Any) -> RunRecord:
    plain = RunRecord(
        id="0142",
        state="done",
        started="2026-03-01T12:00:00+01:00",
        ended="2026-03-01T12:06:10+01:00",
        model=model_table(load_model("llama-3-8b")),
        task="language",
        training=Training(steps=20, warmup_steps=2, clip_norm=1.0, seed=7),
        plan={"hardware": "h200", "device_memory_bytes": 40 * GIB, "host_memory_bytes": 110 * GIB},
        data={
            "sources": ["corpus/a", "corpus/b"],
            "tokenizer": "llama",
            "tokens": 12_345_678,
            "sequences": 1507,
            "evaluation_sequences": 15,
            "fingerprint": "0123456789abcdef",
        },
        environment={
            "python": "3.11.9",
            "torch": "2.13.0",
            "gpu": "NVIDIA H200",
            "commit": "0" * 40,
            "memory_bytes": str(GIB),
            "executable": "python",
        },
        steps_done=20,
        checkpoint="checkpoints/000020",
        measurement=a_measurement(),
        metrics=METRICS,
    )
    return replace(plain, **changes)


def keeps_to(lines: list[str], width: int) -> None:
    assert max(map(cell_len, lines)) <= width, max(lines, key=cell_len)


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_losses_and_times_of_any_size() -> None:
    assert [loss_words(loss) for loss in (10.5312, 2.91349, 0.0123456, 0.0, 1e-5, 12_345.6, 3e9, NAN, None)] == [
        *("10.53", "2.913", "0.01235", "0", "1.00e-05", "12,346", "3.00e+09", "nan", "-")
    ]
    assert [seconds_words(seconds) for seconds in (17.52, 3.21e-3, 0.0, NAN, None)] == [
        *("17.5 s", "3.21 ms", "0 s", "nan s", "-")
    ]
    assert [clock_words(seconds) for seconds in (0, 53.9, 60, 7384)] == ["0:00", "0:53", "1:00", "2:03:04"]


# -- rows of steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_steps_stand_below_their_header(width: int) -> None:
    table = step_table(a_step(), steps=20_000, width=width, device_bytes=33 * GIB, host_bytes=64 * GIB)
    steps = [a_step(), a_step(17, loss=NAN, mfu=None), a_step(19_999, loss=0.00012, step_s=0.0034, tokens_per_s=9e6)]
    lines = [table.header(), *map(table.row, steps)]
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= width
    # Right-aligned: every column's cells end where its name ends.
    for match in re.finditer(r"\S+", lines[0]):
        for line in lines[1:]:
            assert line[match.end() - 1] != " "
            assert line[match.end() : match.end() + 1] in ("", " ")
    assert lines[1].split("  ")[-1].strip() == "120 ms"
    assert ("host" in lines[0]) == (width == 120)
    assert "nan" in lines[2]


def test_what_is_not_known_has_no_column() -> None:
    bare = a_step(mfu=None, predicted_s=None, exposed_copy_s=None)
    table = step_table(bare, steps=10, width=120, device_bytes=None, host_bytes=0)
    assert table.columns == ("step", "loss", "time", "tok/s")
    assert table.row(bare).split() == ["1", "2.913", "17.5", "s", "11,222"]
    # In a later row a figure may be missing all the same.
    full = step_table(a_step(), steps=10, width=120, device_bytes=GIB, host_bytes=GIB)
    assert full.row(a_step(predicted_s=None)).split()[4] == "-"


def test_the_narrowest_terminal_still_has_a_table() -> None:
    table = step_table(a_step(), steps=10, width=20, device_bytes=GIB, host_bytes=GIB)
    assert table.columns == ("step", "loss", "time", "tok/s", "MFU")


def test_an_evaluation_on_a_line() -> None:
    found = {"eval_loss": 0.13374, "eval_accuracy": 0.943, "eval_runtime": 2.9, "eval_samples": 9.0}
    rates = {"eval_samples_per_second": 1.0, "eval_steps_per_second": NAN}
    words = evaluation_words(1500, {**found, **rates})
    assert words == "evaluated after step 1,500: eval_loss 0.1337 · eval_accuracy 94.30%"


# -- the block of metrics --------------------------------------------------------------------------------------------


def test_the_block_looks_as_the_trainer_prints_it() -> None:
    assert metrics_block(METRICS) == BLOCK.splitlines()
    assert metrics_block({}) == []


def test_odd_metrics_are_shown_all_the_same() -> None:
    assert metric_words("train_loss", NAN) == "nan"
    assert metric_words("eval_accuracy", float("inf")) == "inf"
    assert metric_words("total_flos", NAN) == "nan"
    assert metric_words("train_runtime", NAN) == "nan"
    assert metric_words("train_runtime", 1e300) == "1e+300 s"
    assert metric_words("train_runtime", 90_061.5) == "1 day, 1:01:01.50"
    assert metric_words("train_samples", 2.5) == "2.5"
    assert metric_words("note", "words") == "words"
    assert metric_words("epoch", 1) == "1.0"


@given(st.dictionaries(st.sampled_from([*METRICS, "other"]), st.floats() | st.text("ab", max_size=30), min_size=1))
def test_any_block_is_aligned(metrics: dict[str, float | str]) -> None:
    lines = metrics_block(metrics)[1:]
    assert len(lines) == len(metrics)
    assert len({len(line) for line in lines}) == 1
    assert len({line.index(" = ") for line in lines}) == 1


# -- measured beside predicted ---------------------------------------------------------------------------------------


def test_measured_beside_predicted() -> None:
    words = " · ".join(measured_parts(a_measurement()))
    assert words == (
        "measured 11,230 tok/s (p20–p80 11,190–11,260) · predicted 11,300 (+0.6 %)"
        " · peak 33.2 GiB (planned 33.1) · host 63.8 GiB (planned 63.7) · 58.4 % MFU"
    )


def test_without_a_prediction_or_a_peak() -> None:
    bare = a_measurement(predicted_tokens_per_s=None, mfu=None, memory=())
    assert measured_parts(bare) == ["measured 11,230 tok/s (p20–p80 11,190–11,260)"]
    slower = measured_parts(a_measurement(predicted_tokens_per_s=5615.0))
    assert "predicted 5,615 (−50.0 %)" in slower
    assert "predicted 5,615" in measured_parts(a_measurement(tokens_per_s=0.0, predicted_tokens_per_s=5615.0))


def test_a_small_model_is_shown_in_small_units() -> None:
    rows = (MemoryRow(place="device", owner="weights", planned_bytes=3 * 2**20, measured_bytes=900 * 2**10),)
    assert "peak 900 KiB (planned 3.00 MiB)" in measured_parts(a_measurement(memory=rows))
    record = a_record(measurement=a_measurement(memory=rows, step_s=0.00321))
    page = "\n".join(printed(run_document(record, []), 120))
    assert "3.21 ms" in page
    assert "host planned" not in page


@pytest.mark.parametrize("width", WIDTHS)
def test_memory_by_owner_adds_up(width: int) -> None:
    table = memory_table(a_measurement().memory)
    assert table is not None
    lines = printed(table, width)
    keeps_to(lines, width)
    names = [line.split()[0] for line in lines]
    assert names[0] == "memory"
    assert names[-2:] == ["unaccounted", "total"]
    assert lines[-2].split()[1:] == ["-", "205", "MiB", "-", "-"]
    assert lines[-1].split()[1:] == ["33.1", "GiB", "33.2", "GiB", "63.7", "GiB", "63.8", "GiB"]
    assert len({len(line) for line in lines}) == 1
    assert memory_table(()) is None


def test_an_owner_that_took_less_than_planned() -> None:
    rows = (
        MemoryRow(place="device", owner="weights", planned_bytes=GIB, measured_bytes=GIB),
        MemoryRow(place="device", owner="unaccounted", planned_bytes=0, measured_bytes=-GIB // 4),
        MemoryRow(place="device", owner="else", planned_bytes=1, measured_bytes=0),
    )
    table = memory_table(rows)
    assert table is not None
    lines = printed(table, 80)
    assert [line.split()[0] for line in lines] == ["memory", "weights", "else", "unaccounted", "total"]
    assert lines[3].split()[1:] == ["-", "-256", "MiB"]


# -- the end of a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_the_end_of_a_run(width: int) -> None:
    lines = printed(end_document(a_record(), None), width)
    keeps_to(lines, width)
    assert "\n".join(lines).startswith(BLOCK)
    assert lines[-1] == "saved run 0142   next: flopwise show 0142"
    assert "predicted 11,300 (+0.6 %)" in "\n".join(lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_end_of_an_interrupted_run(width: int) -> None:
    record = a_record(state="interrupted", steps_done=12, reason="SIGINT", measurement=None, metrics={})
    lines = printed(end_document(record, "my runs"), width)
    keeps_to(lines, width)
    assert lines[0].startswith("interrupted: 12 of 20 steps · SIGINT · checkpoint checkpoints/000020")
    assert "flopwise train --resume 0142 --store 'my runs'" in " ".join(lines)


def test_one_step_is_too_few_to_measure() -> None:
    lines = printed(end_document(a_record(measurement=None, metrics={}), None), 80)
    assert lines[0] == "too few steps to measure a speed"


# -- folding ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.text("ab c×", min_size=1, max_size=60), max_size=6), st.integers(20, 90), st.integers(0, 9))
def test_lines_are_never_too_long_and_lose_nothing(parts: list[str], width: int, indent: int) -> None:
    lines = wrap_parts(parts, width, indent=indent)
    assert all(cell_len(line) <= width for line in lines)
    whole = re.sub(r"[\s·]", "", "".join(lines))
    assert whole == re.sub(r"[\s·]", "", "".join(parts))


def test_labels_stand_in_a_column() -> None:
    lines = printed(facts([("model", "gpt2 · 124 M parameters"), ("none", ""), ("longer label", "x" * 30)]), 40)
    assert lines == ["model         gpt2 · 124 M parameters", "longer label  " + "x" * 26, " " * 14 + "x" * 4]


# -- runs ------------------------------------------------------------------------------------------------------------


def run_entry(listed: Listed, last: StepRecord | None) -> dict[str, Any]:
    name, record = listed.folder.name, listed.record
    if record is None:
        lost = Result(cell=None, run=name, state=UNREADABLE, reason=listed.problem)
        return runs.run_entry(RunRow(result=lost, state=UNREADABLE), listed.folder, last)
    return runs.run_entry(row_of(replace(record, id=name)), listed.folder, last)


def entries() -> list[dict[str, Any]]:
    folder = Path("runs")
    running = a_record(state="running", measurement=None, steps_done=0, ended=None, metrics={})
    named = a_record(model={"name": "a-name-that-is-longer-than-any-column\n\x1b[31m"}, task="classification")
    bare = a_record(measurement=a_measurement(mfu=None, predicted_tokens_per_s=None, last_loss=NAN))
    return [
        run_entry(Listed(folder / "0001", a_record()), None),
        run_entry(Listed(folder / "0002", running), a_step(7, loss=3.5)),
        run_entry(Listed(folder / "0003", running), None),
        run_entry(Listed(folder / "0004", None, "record.json is damaged"), None),
        run_entry(Listed(folder / "0005", named), None),
        run_entry(Listed(folder / "0006", bare), None),
    ]


def test_every_run_has_a_row() -> None:
    (table,) = runs_document(entries(), Path("runs")).blocks
    assert isinstance(table, Table)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert rows[0] == {
        "run": "0001",
        "state": "done",
        "model": "llama-3-8b",
        "task": "language",
        "steps": "20/20",
        "loss": "2.913",
        "tok/s": "11,230",
        "MFU": "58.4 %",
        "error": "+0.6 %",
        "started": "2026-03-01 12:00",
    }
    assert (rows[1]["state"], rows[1]["steps"], rows[1]["loss"], rows[1]["tok/s"]) == (
        *("running", "7/20", "3.500", "11,222"),
    )
    assert (rows[2]["steps"], rows[2]["loss"], rows[2]["error"]) == ("0/20", "-", "-")
    assert (rows[3]["run"], rows[3]["state"], rows[3]["model"]) == ("0004", "unreadable", "-")
    assert rows[4]["model"] == "a-name-that-is-longer-than-…"
    assert (rows[5]["loss"], rows[5]["MFU"], rows[5]["error"]) == ("nan", "-", "-")


def test_entries_have_the_same_fields() -> None:
    assert {tuple(entry) for entry in entries()} == {runs.FIELDS}
    assert entries()[0]["prediction_error"] == pytest.approx(11_300 / 11_230 - 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_listing_keeps_to_the_terminal(width: int) -> None:
    lines = printed(runs_document(entries(), Path("runs")), width)
    keeps_to(lines, width)
    assert {"run", "state", "model", "steps", "loss", "tok/s"} <= set(lines[0].split())
    assert ("task" in lines[0]) == (width == 120)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_run(width: int) -> None:
    steps = [a_step(number, loss=10.5 / number) for number in range(1, 21)]
    lines = printed(run_document(a_record(), steps), width)
    keeps_to(lines, width)
    page = "\n".join(lines)
    assert page.startswith("run 0142 · language · 2026-03-01 12:00 to 2026-03-01 12:06")
    assert page.endswith(BLOCK)
    for words in (
        *("llama-3-8b · 8.03 G parameters · 32 layers", "1 × h200 · sequence 8,192", "batch 24 = 196,608 tokens"),
        *("micro-batch 2", "precision bf16", "AdamW", "device cap 40.0 GiB", "host cap 110 GiB"),
        *("corpus/a, corpus/b", "12,345,678 tokens", "15 held out", "learning rate 0.0003, cosine"),
        *("clipped to 1", "seed 7", "done: 20 of 20 steps", "checkpoint checkpoints/000020", "10.50 → 0.5250"),
        *("measured 11,230 tok/s", "17.5 s (p20–p80 17.5 s–17.6 s, over 18 steps)", "unaccounted", "60.9 % HFU"),
        *("fingerprint 0123456789ab\n", "commit 000000000000", "memory 1.00 GiB\n"),
    ):
        assert words in page, words


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_run_of_which_little_is_known(width: int) -> None:
    record = a_record(
        state="failed",
        reason="the loss of step 3 is nan\nand \x1b[31mmore",
        measurement=None,
        metrics={},
        model={"name": "m"},
        data={},
        plan={"sequence_tokens": 512, "precision": "x" * 200},
        environment={},
        ended=None,
        checkpoint=None,
        resumed_from="checkpoints/000002",
    )
    lines = printed(run_document(record, [a_step(1, loss=NAN)]), width)
    keeps_to(lines, width)
    page = "\n".join(lines)
    assert "\x1b" not in page
    assert "failed: 20 of 20 steps" in page
    assert re.search(r"^loss +nan$", page, re.M)
    assert "sequence 512" in page
    assert "memory" not in page


def test_parts_of_free_tables() -> None:
    assert data_parts({"sources": [f"file{number}" for number in range(6)], "labels": ["a", "b"], "files": 6}) == [
        "file0, file1, file2, file3, … (6)",
        "6 files",
        "labels a, b",
    ]
    assert data_parts({}) == []
    assert plan_parts(a_record(measurement=None, plan={})) == []
    assert "stochastic rounding" in training_parts(Training(steps=1, stochastic_rounding=True))


def test_the_curve_of_a_loss() -> None:
    assert curve([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == "█▇▆▅▄▃▂▁"
    assert curve([2.0, 2.0]) == "▁▁"
    assert curve([1.0, NAN, 3.0]) == "▁×█"
    assert curve([NAN, NAN]) == "××"
    assert curve([-1.7e308, 1.7e308]) == ""
    assert len(curve([float(number) for number in range(1001)])) <= 40


@given(st.lists(st.floats(), min_size=1, max_size=200))
def test_a_curve_of_anything(values: list[float]) -> None:
    assert len(curve(values)) <= 40
