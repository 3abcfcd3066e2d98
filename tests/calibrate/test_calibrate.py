"""From rows to a hardware file: constants come back from the rows that they made, and every number says its source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kernel_rows import load_gemms
from flopwise.base.errors import FlopwiseError
from flopwise.base.files import to_toml
from flopwise.calibrate.calibrated import calibrate_hardware
from flopwise.calibrate.kernel_fit import (
    attention_seconds,
    by_length,
    fit_attention,
    fit_products,
    fit_streams,
    law_tiles,
    product_seconds,
)
from flopwise.calibrate.report import CalibrationRecord, calibration_document
from flopwise.calibrate.shapes import LENGTHS
from flopwise.catalog.load import load_hardware, load_model
from flopwise.cli.output import schema_json
from flopwise.predict import Setup
from flopwise.predict import step as predict_step
from flopwise.records.calibration import Calibration, ProductRow
from flopwise.setup.efficiency import Efficiency
from flopwise.setup.hardware import Hardware
from flopwise.work.formats import POLICIES
from tests.support.calibrations import known_calibration
from tests.support.printing import shown

H200 = load_hardware("h200")
LLAMA = load_model("llama-3-8b")


def known_efficiency(seed: int) -> Efficiency:
    """Constants by chance, within what cards have."""
    random = np.random.default_rng(seed)
    start = H200.efficiency
    gemm = replace(
        start.gemm,
        sustained=round(random.uniform(0.5, 0.9), 3),
        fill_depth=round(random.uniform(40, 200)),
        quantisation=round(random.uniform(0, 1), 2),
        exposed_output=round(random.uniform(0.1, 0.9), 2),
        tiles=law_tiles(),
        by_format={"fp8": round(random.uniform(0.5, 0.8), 3), "tf32": 0.6, "fp32": 0.75},
    )
    attention = replace(
        start.attention,
        forward=by_length(random.uniform(0.5, 0.8), random.uniform(100, 300), LENGTHS),
        backward=by_length(random.uniform(0.4, 0.7), random.uniform(200, 500), LENGTHS),
        head_dim_64=0.75,
        head_dim_64_backward=0.85,
        tail=round(random.uniform(0.2, 0.8), 2),
    )
    memory = replace(start.memory, dram=round(random.uniform(0.7, 0.95), 3), half_bytes=3e6)
    return replace(start, launch_s=1.3e-6, gemm=gemm, attention=attention, memory=memory)


# -- the fit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_constants_of_products_come_back(seed: int) -> None:
    truth = known_efficiency(seed)
    rows = known_calibration(H200, truth).products
    start = replace(H200.efficiency, launch_s=truth.launch_s, memory=truth.memory)
    found = fit_products(H200.device, start, rows, "bf16")
    assert found.sustained == pytest.approx(truth.gemm.sustained, rel=0.005)
    assert found.fill_depth == pytest.approx(truth.gemm.fill_depth, abs=8)
    assert found.quantisation == pytest.approx(truth.gemm.quantisation, abs=0.05)
    assert found.exposed_output == pytest.approx(truth.gemm.exposed_output, abs=0.05)
    assert found.by_format is not None and truth.gemm.by_format is not None
    assert found.by_format == pytest.approx(truth.gemm.by_format, rel=0.01)


@pytest.mark.parametrize("seed", [1, 2])
def test_curves_of_attention_come_back(seed: int) -> None:
    truth = known_efficiency(seed)
    rows = known_calibration(H200, truth).attentions
    start = replace(H200.efficiency, launch_s=truth.launch_s, memory=truth.memory)
    found = fit_attention(H200.device, start, rows)
    for direction in ("forward", "backward"):
        assert dict(getattr(found, direction)) == pytest.approx(dict(getattr(truth.attention, direction)), rel=0.02)
    assert found.tail == pytest.approx(truth.attention.tail, abs=0.1)
    assert found.head_dim_64 == pytest.approx(0.75, rel=0.02)
    assert found.head_dim_64_backward == pytest.approx(0.85, rel=0.02)
    errors = attention_seconds(H200.device, replace(start, attention=found), rows) / [row.seconds for row in rows] - 1
    assert np.abs(errors).max() < 0.03


def test_rate_and_start_of_streams_come_back() -> None:
    truth = known_efficiency(3)
    start = replace(H200.efficiency, launch_s=truth.launch_s)
    found = fit_streams(H200.device, start, known_calibration(H200, truth).streams)
    assert found.dram == pytest.approx(truth.memory.dram, rel=0.001)
    assert found.half_bytes == pytest.approx(3e6, rel=0.01)


def test_rows_of_an_h200_give_what_its_file_says() -> None:
    """283 products were timed on a card once; its file's note says which share they give: 0.709."""
    (timed,) = (rows for rows in load_gemms() if (rows.source, rows.device) == ("flopwise", "h200"))
    columns = (timed.m, timed.k, timed.n, timed.accumulate, timed.output_bytes, timed.seconds)
    rows = [
        ProductRow(
            number_format="bf16",
            kind="to_matrix" if accumulates else "forward",
            rows=int(m),
            depth=int(k),
            columns=int(n),
            output_bytes=int(width),
            seconds=float(seconds),
        )
        for m, k, n, accumulates, width, seconds in zip(*columns, strict=True)
        if not any(side % 64 for side in (m, k, n))
    ]
    found = fit_products(H200.device, H200.efficiency, rows, "bf16")
    assert found.sustained == pytest.approx(0.709, rel=0.01)
    errors = product_seconds(H200.device, replace(H200.efficiency, gemm=found), rows) / [row.seconds for row in rows]
    assert np.median(np.abs(errors - 1)) < 0.04


# -- the file --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> tuple[Hardware, Calibration, Efficiency, CalibrationRecord]:
    truth = known_efficiency(5)
    calibration = known_calibration(H200, truth, noise=0.01)
    hardware, fitted = calibrate_hardware(H200, calibration, name="h200-measured", date="2026-01-02")
    record = CalibrationRecord(file="card.toml", hardware=hardware, held_out=fitted, calibration=calibration)
    return hardware, calibration, truth, record


Measured = tuple[Hardware, Calibration, Efficiency, CalibrationRecord]


def test_held_out_errors_are_those_of_the_noise(measured: Measured) -> None:
    """With rows that are off by 1 % by chance, a held-out row cannot be foretold better, and not much worse."""
    hardware, _, truth, record = measured
    fitted = record.held_out
    assert fitted.products is not None and fitted.attention is not None and fitted.streams is not None
    assert 0.003 < fitted.products.median < 0.015 < fitted.products.largest < 0.1
    assert 0.003 < fitted.attention.median < 0.03
    assert fitted.streams.median < 0.03
    assert hardware.efficiency.gemm.sustained == pytest.approx(truth.gemm.sustained, rel=0.01)


def test_file_is_read_back_equal(measured: Measured, tmp_path: Path) -> None:
    hardware = measured[0]
    path = tmp_path / "card.toml"
    path.write_text(to_toml(hardware), encoding="utf-8")
    assert load_hardware(path) == hardware
    assert hardware.name == "h200-measured"
    assert hardware.device.peak_flops == H200.device.peak_flops
    assert hardware.networks == H200.networks
    assert hardware.link is not None and hardware.link.bandwidth_bytes_per_s.value == 55.3e9
    assert hardware.link.both_ways_bytes_per_s is not None and hardware.link.both_ways_bytes_per_s.value == 50.4e9


@pytest.mark.parametrize(("products", "activates"), [("quack", True), ("cublas", False)])
def test_quacks_products_have_activations_in_them(
    measured: Measured, tmp_path: Path, products: str, activates: bool
) -> None:
    calibration = measured[1]
    versions = {**calibration.versions, "products": products}
    found, _ = calibrate_hardware(H200, replace(calibration, versions=versions), name="mine", date="2026-11-16")
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(found), encoding="utf-8")
    assert load_hardware(path).efficiency.gemm.activates is activates


def test_every_measured_number_says_how(measured: Measured) -> None:
    hardware = measured[0]
    efficiency = hardware.efficiency
    for key in (efficiency.source, efficiency.gemm.source, efficiency.attention.source, efficiency.memory.source):
        source = hardware.sources[key]
        assert source.kind == "measured" and source.note is not None
        for words in ("2026-01-02", "torch 2.11.0", "CUDA 13.0", "driver 580.95.05", "1455 MHz", "684 W", "held out"):
            assert words in source.note
    assert "129 in bf16, 24 in fp8" in str(hardware.sources[efficiency.gemm.source].note)
    assert {key for _, key in hardware.list_sources()} == set(hardware.sources)


def set_up(hardware: Hardware, formats: str) -> Setup:
    return Setup(model=LLAMA, hardware=hardware, sequence_tokens=4096, batch_sequences=4, formats=POLICIES[formats])


def test_a_step_takes_what_the_card_makes_of_it(measured: Measured) -> None:
    """A whole training step, in bf16 and with products in fp8, by the fitted constants and by the true ones."""
    hardware, _, truth, _ = measured
    card = replace(H200, efficiency=truth)
    for formats in ("bf16", "fp8"):
        found, expected = (predict_step(set_up(device, formats)) for device in (hardware, card))
        assert found.step_s == pytest.approx(expected.step_s, rel=0.01)


def test_a_format_may_have_a_share_of_its_own() -> None:
    gemm = replace(H200.efficiency.gemm, by_format={"fp8": H200.efficiency.gemm.sustained / 2})
    slower = replace(H200, efficiency=replace(H200.efficiency, gemm=gemm))
    before, after = (predict_step(set_up(device, "fp8")) for device in (H200, slower))
    assert 1.3 * before.step_s < after.step_s < 2 * before.step_s
    assert predict_step(set_up(H200, "bf16")).step_s == predict_step(set_up(slower, "bf16")).step_s
    with pytest.raises(FlopwiseError, match="no number format"):
        replace(gemm, by_format={"fp7": 0.5})
    with pytest.raises(FlopwiseError, match="share between"):
        replace(gemm, by_format={"fp8": 1.5})


def test_a_borrowed_peak_is_called_so(measured: Measured) -> None:
    calibration = replace(measured[1], device_name="NVIDIA Z9000", units=120, streams=(), attentions=(), copies=())
    calibration = replace(calibration, products=calibration.products[:12])
    base = load_hardware("h100-sxm")
    hardware, fitted = calibrate_hardware(base, calibration, name="nvidia-z9000-measured", date="2026-01-02", like=True)
    assert hardware.title == "NVIDIA Z9000, measured"
    assert hardware.device.units.value == 120
    peak = hardware.device.peak_flops["bf16"]
    assert hardware.sources[peak.source].kind == "estimated"
    assert "borrowed for NVIDIA Z9000" in str(hardware.sources[peak.source].note)
    # What was not timed is the base's, and says so.
    assert hardware.efficiency.attention == base.efficiency.attention
    assert hardware.efficiency.memory == base.efficiency.memory
    assert hardware.link == base.link
    assert fitted.attention is None


def test_page_is_80_columns_wide(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv("COLUMNS", "80")
    text = shown(calibration_document(measured[3]), 80)
    assert max(map(len, text.splitlines())) <= 80
    for words in ("large, to the matrix", "65,536", "host to device, both at once", "1,455 MHz", "684 W of 700 W"):
        assert words in text
    assert text.splitlines()[-1] == "written to card.toml; use it with --on card.toml"
    table = json.loads(schema_json(measured[3], "calibration"))
    assert len(table["calibration"]["products"]) == len(measured[1].products)
