"""What cells will take: the plan that would run, or what `flopwise predict` says, thousands of them in seconds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import AUTO, show_bytes
from flopwise.catalog.load import load_evidence, load_hardware, load_model, model_table
from flopwise.predict import Setup, step
from flopwise.predict.expected import expect
from flopwise.records.plan import Plan
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import shard_all
from flopwise.setup.written import CellSetup, cell_id
from flopwise.store.cells import Cell, CellOutcome
from flopwise.sweep.auto_batch import most_sequences
from flopwise.sweep.grid import expand, read_axes
from flopwise.sweep.predicting import START_S, START_S_PER_PARAMETER, foresee_all, sweep_seconds
from flopwise.train.planning import find_plan
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats
from flopwise.work.transformer import Transformer

H200 = load_hardware("h200")
NAMED = {"h200": H200, "a100-40gb": load_hardware("a100-40gb"), "rtx-4090": load_hardware("rtx-4090")}
GIB = 2**30


def foresee(settings: CellSetup, hardware: Hardware, *, steps: int, to_run: bool) -> CellOutcome:
    """What one cell will take."""
    return foresee_all([settings], {settings.hardware: hardware}, steps=steps, to_run=to_run)[0]


def cells(**words: Any) -> tuple[CellSetup, ...]:
    return expand(read_axes({"model": "mpt-125m", "on": "h200", **words}), NAMED).settings


def foreseen(*, to_run: bool, steps: int = 20, **words: Any) -> list[CellOutcome]:
    return foresee_all(cells(**words), NAMED, steps=steps, to_run=to_run)


# -- predictions -----------------------------------------------------------------------------------------------------


def predicted_alike(cell: CellSetup, found: CellOutcome, hardware: Hardware) -> None:
    """As `flopwise predict` has it for the same words."""
    name = cell.model_name
    auto_batch, auto_micro = cell.batch_sequences == AUTO, cell.micro_batch_sequences == AUTO
    setup = Setup(
        model=load_model(name),
        hardware=hardware,
        sequence_tokens=cell.sequence_tokens,
        batch_sequences=found.batch_sequences if auto_batch else int(cell.batch_sequences),
        micro_batch_sequences=found.micro_batch_sequences
        if auto_batch
        else None
        if auto_micro
        else int(cell.micro_batch_sequences),
        formats=parse_formats(cell.precision),
        device_cap_bytes=cell.device_memory_bytes,
        parallel=shard_all(cell.devices),
    )
    plain = expect(step(setup), setup, load_evidence(), stack="kernels")
    assert found.fits == plain.fits
    assert found.method == "predict"
    assert found.device_bytes == pytest.approx(plain.device_bytes.total, abs=8)
    assert found.micro_batch_sequences == plain.micro_batch_sequences
    if plain.fits:
        assert (found.recompute, found.bound) == (plain.recompute, plain.bound)
        for figure in ("step_s", "tokens_per_s", "mfu", "hfu"):
            assert getattr(found, figure) == pytest.approx(getattr(plain, figure), rel=1e-12)
    else:
        assert found.step_s is None
        assert found.attempt_s is None
        assert show_bytes(plain.device_bytes.total) in (found.reason or "")


@pytest.mark.parametrize("gpus", ["1", "8"])
@pytest.mark.parametrize("model", ["mpt-125m", "mpt-7b", "mixtral-8x7b", "lstm-lm", "bert-base"])
def test_predictions_are_those_of_predict(model: str, gpus: str) -> None:
    words = {"model": model, "seq": "512,8k" if model != "bert-base" else "128,512", "batch": "8,100", "gpus": gpus}
    many = cells(**words, precision="bf16,bf16-amp", device_mem="auto,20GiB", on="h200")
    for cell, found in zip(many, foresee_all(many, NAMED, steps=20, to_run=False), strict=True):
        predicted_alike(cell, found, H200)


@pytest.mark.parametrize("words", [{"batch": "48", "micro": "11"}, {"batch": "100", "micro": "3", "gpus": "8"}])
def test_micro_batches_that_do_not_divide_the_batch(words: dict[str, str]) -> None:
    (cell,) = cells(seq="2k", **words)
    predicted_alike(cell, foresee(cell, H200, steps=1, to_run=False), H200)


@given(st.integers(1, 40_000), st.integers(1, 300), st.sampled_from([1, 2, 8]), st.sampled_from(["mpt-125m", "mpt-3b"]))
@settings(max_examples=25)
def test_predictions_of_any_size_are_those_of_predict(seq: int, batch: int, gpus: int, model: str) -> None:
    (cell,) = cells(seq=str(seq), batch=str(batch * gpus), gpus=str(gpus), model=model)
    predicted_alike(cell, foresee(cell, H200, steps=1, to_run=False), H200)


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize(("model", "seq"), [("mpt-125m", 2048), ("mpt-3b", 2048), ("mpt-13b", 8192)])
def test_the_largest_batch_is_that_of_a_plain_loop(model: str, seq: int, gpus: int) -> None:
    (cell,) = cells(model=model, seq=str(seq), gpus=str(gpus), on="a100-40gb")
    hardware = NAMED["a100-40gb"]
    plain = 0
    for count in range(1, most_sequences(seq) + 1):
        setup = Setup(
            model=load_model(model),
            hardware=hardware,
            sequence_tokens=seq,
            batch_sequences=count * gpus,
            micro_batch_sequences=count,
            formats=parse_formats("bf16"),
            parallel=shard_all(gpus),
            recompute="input",
        )
        if not step(setup).fits:
            break
        plain = count
    found = foresee(cell, hardware, steps=20, to_run=False)
    assert found.fits == (plain > 0)
    assert found.micro_batch_sequences == (plain or None)
    assert found.batch_sequences == (plain * gpus or None)
    if plain:
        predicted_alike(cell, found, hardware)
    else:
        assert found.device_bytes is not None
        assert found.device_bytes > hardware.device.dram.size_bytes.value * 0.9


def test_two_thousand_cells_at_once() -> None:
    many = cells(
        model="mpt-125m,mpt-350m,mpt-760m,mpt-1b,mpt-3b,mpt-7b,mpt-13b,mpt-30b",
        seq="512-32k*2",
        batch="8-160+17",
        gpus="1,8",
        precision="bf16,bf16-amp",
    )
    assert len(many) == 2016
    found = foresee_all(many, NAMED, steps=20, to_run=False)
    assert len(found) == 2016


def test_progress_is_told() -> None:
    heard: list[tuple[str, int, int]] = []
    foresee_all(
        cells(on="h200,a100-40gb", seq="512,1k"), NAMED, steps=1, to_run=False, tell=lambda *words: heard.append(words)
    )
    assert heard == [("predicting", 2, 4), ("predicting", 4, 4)]


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        {"model": "mpt-125m", "seq": "2k", "batch": "64"},
        {"model": "mpt-1b", "seq": "2k", "batch": "48", "micro": "11"},
        {"model": "mpt-7b", "seq": "4k", "batch": "4", "device_mem": "40GiB", "host_mem": "60GiB"},
        {"model": "mpt-125m", "seq": "512", "batch": "8", "precision": "bf16-mixed"},
    ],
    ids=lambda words: words["model"] + words.get("micro", "") + words.get("precision", ""),
)
def test_a_cell_to_run_is_planned_as_training_plans_it(words: dict[str, str]) -> None:
    (cell,) = cells(**words)
    model = load_model(words["model"])
    assert isinstance(model, Transformer)
    plan, expected = find_plan(
        Setup(
            model=model,
            hardware=H200,
            hardware_name="this-machine",
            sequence_tokens=cell.sequence_tokens,
            batch_sequences=int(cell.batch_sequences),
            micro_batch_sequences=int(words["micro"]) if "micro" in words else None,
            formats=parse_formats(cell.precision),
            device_cap_bytes=cell.device_memory_bytes,
            host_cap_bytes=cell.host_memory_bytes,
        )
    )
    found = foresee(cell, H200, steps=10, to_run=True)
    assert isinstance(plan, Plan)
    assert found.fits
    assert found.method == "plan"
    assert (found.step_s, found.tokens_per_s) == (expected.step_s, expected.tokens_per_s)
    assert (found.device_bytes, found.host_bytes) == (expected.device_total, expected.host_total)
    assert found.micro_batch_sequences == plan.sequences_per_round
    assert found.batch_sequences == int(cell.batch_sequences)
    assert plan.expected is not None
    assert found.mfu == pytest.approx(plan.expected.mfu, rel=1e-9)
    assert found.hfu == pytest.approx(plan.expected.hfu, rel=1e-3)
    assert found.bound
    assert expected.step_s is not None
    start_s = START_S["gpu"] + START_S_PER_PARAMETER * describe(model, cell.sequence_tokens).parameters
    assert found.attempt_s == pytest.approx(start_s + 10 * expected.step_s)


def test_what_no_plan_fits_says_how_much_it_needs() -> None:
    (cell,) = cells(model="mpt-30b", seq="8k", batch="8", host_mem="none")
    found = foresee(cell, H200, steps=10, to_run=True)
    assert not found.fits
    assert found.step_s is None
    assert found.device_bytes is not None
    assert f"needs {show_bytes(found.device_bytes)} of device memory" in (found.reason or "")
    assert "no plan fits mpt-30b" in (found.reason or "")


def test_a_host_cap_is_planned_with_even_where_nothing_runs() -> None:
    without, with_host = foreseen(to_run=False, model="mpt-30b", seq="8k", batch="8", host_mem="none,100GiB")
    assert (without.fits, with_host.fits) == (False, True)
    assert with_host.method == "plan"
    assert with_host.host_bytes
    assert 0 < with_host.host_bytes <= 100 * GIB


def test_the_largest_micro_batch_of_a_plan() -> None:
    """A small cap without a host: what fits is found, and the next one does not fit."""
    (cell,) = cells(model="mpt-125m", seq="16k", device_mem="4GiB", host_mem="none")
    found = foresee(cell, H200, steps=1, to_run=True)
    count = found.micro_batch_sequences
    assert found.fits
    assert count is not None
    assert 1 <= count < most_sequences(16384)
    assert found.batch_sequences == count
    for size, fits in ((count, True), (count + 1, False)):
        sized = replace(cell, batch_sequences=size, micro_batch_sequences=size)
        assert foresee(sized, H200, steps=1, to_run=True).fits is fits


def test_no_micro_batch_at_all() -> None:
    (cell,) = cells(model="mpt-7b", seq="2k", device_mem="4GiB", host_mem="none")
    found = foresee(cell, H200, steps=1, to_run=True)
    assert (found.fits, found.batch_sequences, found.micro_batch_sequences) == (False, None, None)
    assert found.device_bytes is not None
    assert found.device_bytes > 4 * GIB


def test_several_devices_are_sharded_as_training_does_it() -> None:
    many = cells(model="mpt-13b,mpt-30b", on="h200,a100-40gb", seq="8k", batch="8", gpus="8")
    fits, _, _, too_large = foresee_all(many, NAMED, steps=20, to_run=True)
    assert fits.fits
    assert (fits.method, fits.micro_batch_sequences) == ("plan", 1)
    assert fits.recompute == "none"
    assert fits.bound
    assert not too_large.fits
    assert too_large.reason


def test_a_format_without_a_rate_has_a_plan_and_no_speed() -> None:
    """As bf16 on a CPU, whose peak in it nobody has measured."""
    device = replace(H200.device, kind="cpu", peak_flops={"fp32": H200.device.peak_flops["bf16"]})
    cpu = replace(H200, name="this-cpu", device=device, link=None)
    grid = expand(
        read_axes({"model": "mpt-125m", "on": "this-cpu", "seq": "256", "batch": "8", "precision": "bf16"}),
        {"this-cpu": cpu},
    )
    found = foresee(grid.settings[0], cpu, steps=5, to_run=True)
    assert found.fits
    assert found.device_bytes
    assert (found.step_s, found.mfu, found.attempt_s, found.bound) == (None, None, None, None)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"model": "lstm-lm"}, "cannot be trained yet"),
        ({"model": "bert-base", "set": "head=language"}, "cannot learn to foretell"),
        ({"device_mem": "200GiB", "batch": "8"}, "a cap of 200.0 GiB is more than h200 has"),
    ],
    ids=["lstm", "encoder", "cap"],
)
def test_what_cannot_be_trained_is_told(words: dict[str, Any], what: str) -> None:
    with pytest.raises(FlopwiseError, match=what):
        foreseen(to_run=True, **words)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_on_a_cpu_share_its_memory(precision: str) -> None:
    from flopwise.profile.measure.this_machine import this_cpu

    machine = this_cpu()
    size = replace(machine.device.dram.size_bytes, value=float(24 * GIB))
    levels = (*machine.device.memory[:-1], replace(machine.device.memory[-1], size_bytes=size))
    small = replace(machine, device=replace(machine.device, memory=levels))
    words = {"on": "this-cpu", "gpus": "8", "batch": "8", "seq": "256", "precision": precision}

    def found(model: str) -> CellOutcome:
        (cell,) = expand(read_axes({"model": model, **words}), {"this-cpu": small}).settings
        return foresee(cell, small, steps=3, to_run=True)

    large, little = found("mpt-30b"), found("mpt-125m")
    # Weights, gradients and two moments of 30 billion parameters in fp32, over eight ranks.
    assert not large.fits and large.device_bytes is not None and large.device_bytes > 16 * 29e9 / 8
    assert large.reason is not None and "are needed, and there are 1.80 GiB" in large.reason
    assert little.fits and little.device_bytes is not None and 16 * 124e6 / 8 < little.device_bytes < 1.8 * GIB


def test_where_memory_cannot_be_told_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from flopwise.profile.measure.this_machine import this_cpu

    monkeypatch.setattr("flopwise.train.planning._bytes_of_each", lambda *_: None)
    machine = this_cpu()
    axes = read_axes({"model": "mpt-125m", "on": "this-cpu", "gpus": "2", "batch": "8", "seq": "256"})
    (cell,) = expand(axes, {"this-cpu": machine}).settings
    found = foresee(cell, machine, steps=3, to_run=True)
    assert found.device_bytes is None and "not known" in (found.reason or "")


def test_a_mistake_names_its_cell() -> None:
    with pytest.raises(FlopwiseError, match=r"mpt-125m · sequence 1,024 · batch 8 .*200 GiB: a cap"):
        foreseen(to_run=False, seq="1k", batch="8", device_mem="40,200GiB")
    with pytest.raises(FlopwiseError, match=r"mpt-125m .* 1 × a100-40gb · fp8: .*no peak for fp8"):
        foreseen(to_run=False, seq="1k", batch="8", on="a100-40gb", precision="fp8")


def test_fp8_on_several_devices_is_refused_before_anything_runs() -> None:
    words: dict[str, Any] = {"seq": "1k", "batch": "8", "gpus": "1,2", "precision": "fp8"}
    with pytest.raises(FlopwiseError, match=r"2 × h200 · fp8: fp8 cannot be trained in on several devices") as caught:
        foreseen(to_run=True, **words)
    assert caught.value.hint and "--gpus 1" in caught.value.hint and "[[skip]]" in caught.value.hint
    assert all(found.fits for found in foreseen(to_run=False, **words))


def test_time_of_a_sweep() -> None:
    plain = CellOutcome(fits=True, method="plan", step_s=2.0, attempt_s=15.0 + 20 * 2.0)
    short = CellOutcome(fits=False, method="plan")
    given, auto = cells(batch="8,auto")
    made = [Cell(id=cell_id(cell), settings=cell, foreseen=plain) for cell in (given, auto)]
    made.append(Cell(id="0" * 12, settings=given, foreseen=short))
    made.append(Cell(id="1" * 12, settings=given))
    # Twice 55 s for each, and three short ones of 15 s and two steps where the largest is looked for.
    assert sweep_seconds(made, steps=20, repeats=2) == pytest.approx(4 * 55.0 + 3 * 19.0)


# -- beside training -------------------------------------------------------------------------------------------------


def test_predicting_imports_no_torch() -> None:
    code = (
        "import sys; from flopwise.catalog.load import load_hardware\n"
        "from flopwise.sweep.grid import expand, read_axes\n"
        "from flopwise.sweep.predicting import foresee_all\n"
        "named = {'h200': load_hardware('h200')}\n"
        "cells = expand(read_axes({'model': 'mpt-125m', 'on': 'h200', 'seq': '512', 'gpus': '1,2'}), named).settings\n"
        "for to_run in (False, True):\n"
        "    assert all(one.fits for one in foresee_all(cells, named, steps=1, to_run=to_run))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.slow
def test_a_run_is_the_cell_that_it_was_asked_for(tmp_path: Path) -> None:
    """What `flopwise train` writes leads back to the settings of the grid, and so to the same id."""
    from flopwise.profile.measure.this_machine import this_cpu
    from flopwise.train import run as train_run

    model = tmp_path / "model.toml"
    model.write_text(
        'architecture = "transformer"\nname = "small"\ntitle = "small"\nsource = "test"\nlayers = 2\nhidden = 32\n'
        "heads = 2\nffn = 64\nvocab = 264\ncontext = 64\n"
    )
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    words = {"model": str(model), "on": "this-cpu", "seq": "32", "batch": "4", "micro": "auto,3", "host_mem": "none"}
    grid = expand(read_axes(words), {"this-cpu": this_cpu()})
    for cell in grid.settings:
        micro = cell.micro_batch_sequences
        record = train_run(
            model=str(model),
            data=(str(data),),
            sequence_tokens=32,
            batch_sequences=4,
            device="cpu",
            steps=2,
            micro_batch_sequences=None if micro == AUTO else micro,
            host_memory_bytes=0,
            precision=cell.precision,
            checkpoint=False,
            store=str(tmp_path / "runs"),
        )
        assert (record.cell, record.attempt) == (cell_id(cell), None)
        assert record.model == model_table(load_model(str(model)))
