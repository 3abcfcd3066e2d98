"""The benchmark of one GPU, where there is none: its arithmetic, its budget, its files, and the whole way on a CPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import Answer, Ideal, Job, Progress
from benchmarks.gpu_ceiling import Load, Shape, ceiling_rows, fastest, ideal_seconds, run_ceiling
from benchmarks.gpu_cells import CPU_CELLS, Settings, quantile, saves_text
from benchmarks.gpu_kernels import Event, covered_s, device_events, kernel_rows, shown_kernels, write_kernels
from benchmarks.gpu_record import append_rows, read_rows
from flopwise.core.catalog import load_model
from flopwise.core.describe import describe
from flopwise.core.errors import FlopwiseError
from flopwise.core.op import Attention, Gemm
from flopwise.profile.sampling import Counters

PASSES = ("forward", "to-input", "to-weight")


def settings(folder: Path, **changes: Any) -> Settings:
    quick = {"warm_up_s": 0.02, "measure_s": 0.05, "ceiling_warm_up_s": 0.0, "ceiling_measure_s": 0.05}
    return Settings(device="cpu", output=folder, **{**quick, **changes})


# -- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence_tokens", "attention_tflops", "expected"),
    [
        # The facts of one H200: products at 667 TFLOP/s, FlashAttention-4 forward and backward.
        pytest.param(8192, (606, 538), 12_340, id="8k"),
        pytest.param(65536, (648, 598), 6_030, id="64k"),
    ],
)
def test_ceiling_of_the_published_rates(
    sequence_tokens: int, attention_tflops: tuple[int, int], expected: float
) -> None:
    work = describe(load_model("llama-3-8b"), sequence_tokens)
    chunk = 16384
    call_s: dict[tuple[str, str], float] = {}
    for op in work.ops:
        if isinstance(op, Gemm):
            flops = 2 * chunk * op.depth * op.columns
            call_s |= {(op.name, passed): flops / 667e12 for passed in PASSES}
    forward = 2 * sequence_tokens**2 * 32 * 128
    call_s["attention", "forward"] = forward / (attention_tflops[0] * 1e12)
    call_s["attention", "backward"] = 2.5 * forward / (attention_tflops[1] * 1e12)
    tokens = {op.name: chunk for op in work.ops} | {"attention": sequence_tokens}
    ideal = ideal_seconds(work, call_s, tokens)
    assert sequence_tokens / sum(ideal.values()) == pytest.approx(expected, rel=0.005)
    # 45.0 GFLOP a token.
    assert ideal["products"] / sequence_tokens == pytest.approx(45.0e9 / 667e12, rel=0.001)


def test_ideal_time_is_the_plain_sum_over_layers_and_chunks() -> None:
    work = describe(load_model("llama-3-1b"), 4096)
    model = load_model("llama-3-1b")
    per_call = {"qkv": 1.0, "output": 2.0, "gate_up": 3.0, "down": 4.0, "head": 5.0}
    call_s = {(name, passed): seconds for name, seconds in per_call.items() for passed in PASSES}
    call_s |= {("attention", "forward"): 10.0, ("attention", "backward"): 20.0}
    tokens = {op.name: 1024 for op in work.ops} | {"attention": 8192}
    total = 0.0
    for _ in range(model.layers):
        for _ in range(4):
            total += 3 * (1 + 2 + 3 + 4)
        total += (10 + 20) / 2
    for _ in range(4):
        total += 3 * 5
    assert sum(ideal_seconds(work, call_s, tokens).values()) == pytest.approx(total)


def test_the_fastest_kernel_of_each_pass_counts() -> None:
    times = {
        ("attention", "forward", "one"): [3.0, 1.0, 2.0],
        ("attention", "forward", "other"): [1.5, 1.5, 9.0],
        ("attention", "backward", "one"): [4.0],
        ("attention", "backward", "other"): [5.0],
    }
    assert fastest(times) == {("attention", "forward"): ("other", 1.5), ("attention", "backward"): ("one", 4.0)}


def test_flops_of_calls_are_those_of_the_description(tmp_path: Path) -> None:
    load = Load(Shape(name="tiny-64", model="tiny", sequence_tokens=64, precision="fp32", chunk_tokens=256), "cpu")
    flops, model = load.flops(), load.work
    assert load.shape.attended_tokens == 256 and load.shape.product_tokens == 256
    assert flops["gate_up", "to-weight"] == 2 * 256 * 64 * 320
    assert flops["head", "forward"] == 2 * 256 * 64 * 512
    assert flops["attention", "forward"] == 4 * (2 * 64 * 64 * 4 * 16)
    attention = next(op for op in model.ops if isinstance(op, Attention))
    assert flops["attention", "backward"] * 3 == 4 * attention.backward_flops("flash")
    rows = run_ceiling(load.shape, settings(tmp_path))
    ran = {(row["op"], row["passed"]) for row in rows}
    assert ran == {*flops, ("whole", "")}
    whole = rows[-1]
    plain = sum(
        row["call_s"] / row["call_tokens"] * (1 if row["op"] == "head" else 3) for row in rows if row["counted"]
    )
    assert whole["tokens_per_s"] == pytest.approx(1 / plain)


def test_fp8_is_for_the_products_of_blocks() -> None:
    load = Load(Shape(name="fp8", model="tiny", sequence_tokens=64, precision="fp8", chunk_tokens=64), "cpu")
    kernels = {(op, kernel) for op, _, kernel in load.kept_up(0.0) if op != "attention"}
    eighth = {(op, "fp8 row-wise") for op in ("qkv", "output", "gate_up", "down")}
    assert kernels == {*eighth, ("head", "bfloat16")}


def test_a_long_sequence_is_attended_whole_and_multiplied_in_chunks() -> None:
    load = Load(Shape(name="tiny-256", model="tiny", sequence_tokens=256, precision="fp32", chunk_tokens=64), "cpu")
    times = load.kept_up(0.0)
    assert len(times["qkv", "forward", "float32"]) == 4 * len(times["attention", "forward", "engine cpu-flash"])
    rows = ceiling_rows(load, {key: [1e-3] for key in times}, Counters())
    # 3 layers of 4 chunks in 4 products and the head, 3 passes each, and attention twice in a layer.
    assert rows[-1].tokens_per_s == pytest.approx(256 / (1e-3 * (3 * 4 * 4 * 3 + 4 * 3 + 3 * 2)))


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_kernels_by_class_and_gaps() -> None:
    trace = [
        {"ph": "X", "cat": "kernel", "name": "nvjet_hsh_128x256_64x4", "ts": 0.0, "dur": 40.0},
        {"ph": "X", "cat": "kernel", "name": "nvjet_hsh_128x256_64x4", "ts": 50.0, "dur": 20.0},
        {"ph": "X", "cat": "kernel", "name": "cudnn_fort_native_sdpa_sm90_flash_fprop", "ts": 65.0, "dur": 25.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 0.0, "dur": 100.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 500.0},
        {"ph": "i", "cat": "kernel", "name": "no span", "ts": 0.0},
    ]  # fmt: skip
    rows = kernel_rows("8k", device_events(trace))
    by_level = {(row.level, row.name): row for row in rows}
    assert by_level["span", "from the first to the last"].total_s == pytest.approx(100e-6)
    # 0–40 and 50–90 have a kernel; the copy that went on beside them is none.
    assert next(row for row in rows if row.level == "gaps").total_s == pytest.approx(20e-6)
    assert by_level["class", "gemm"].total_s == pytest.approx(60e-6) and by_level["class", "gemm"].count == 2
    assert by_level["class", "attention"].share_of_span == pytest.approx(0.25)
    assert by_level["class", "copy"].total_s == pytest.approx(100e-6)
    assert by_level["kernel", "nvjet_hsh_128x256_64x4"].mean_us == pytest.approx(30.0)
    assert all(len(line) <= 120 for line in shown_kernels(rows).splitlines())
    assert kernel_rows("8k", []) == []


def test_a_traced_step_is_held_against_the_ceiling(tmp_path: Path) -> None:
    spans = (("nvjet_a", 0.0, 6.0), ("flash_fwd", 6.0, 8.5), ("swiglu_kernel", 9.0, 9.25))
    rows = kernel_rows("8k", [Event(name, "kernel", begin_s, end_s) for name, begin_s, end_s in spans])
    write_kernels(tmp_path, "8k", rows)
    told = gpu.against_ideal("8k", 1000, tmp_path, Ideal(125.0, 5_500.0, 2_500.0))
    assert told == (
        "8k: gemm 6.000 s (ideal 5.500, +0.500), attention 2.500 s (ideal 2.500, +0.000), other kernels 0.250 s, "
        "no kernel 0.500 s"
    )


def test_time_that_events_cover_counts_once() -> None:
    events = [
        Event("a", "kernel", 0, 4),
        Event("b", "kernel", 1, 2),
        Event("c", "kernel", 3, 6),
        Event("d", "kernel", 8, 9),
    ]
    assert covered_s(events) == pytest.approx(7)
    assert covered_s([]) == 0


# -- files ------------------------------------------------------------------------------------------------------------


def test_rows_are_appended_and_new_columns_join_the_old(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cells.csv"
    append_rows(path, [])
    assert read_rows(path) == []
    append_rows(path, [{"cell": "a", "rate": 1.5}])
    append_rows(path, [{"cell": 'b, with "quotes"', "rate": None}])
    append_rows(path, [{"cell": "c", "why": "too\nlarge"}])
    append_rows(path, [{"rate": 2}])
    assert path.read_text(encoding="utf-8").splitlines()[0] == "cell,rate,why"
    assert read_rows(path) == [
        {"cell": "a", "rate": "1.5", "why": ""},
        {"cell": 'b, with "quotes"', "rate": "", "why": ""},
        {"cell": "c", "rate": "", "why": "too\nlarge"},
        {"cell": "", "rate": "2", "why": ""},
    ]


# -- the budget -------------------------------------------------------------------------------------------------------


def answering(clock: list[float], takes: dict[str, float]) -> Callable[[Job, Settings], Answer]:
    """Jobs that take as long as they are told to, on a clock of our own; `bad` fails."""

    def run(job: Job, _settings: Settings) -> Answer:
        clock[0] += takes[job.name]
        if job.name == "bad":
            return Answer([], "failed", "it broke")
        row: dict[str, Any] = {job.kind: job.name, "tokens_per_s": 80.0, "step_s": 2.0, "steps": 3, "warm_up_steps": 1}
        ideal = {"tokens_per_s": 100.0, "products_us_per_token": 8_000.0, "attention_us_per_token": 2_000.0}
        return Answer([{"ceiling": job.name, "op": "whole", **ideal}] if job.kind == "ceiling" else [row])

    return run


def played(jobs: list[Job], folder: Path, takes: dict[str, float], budget_s: float | None) -> Progress:
    clock = [0.0]
    return gpu.run_jobs(jobs, settings(folder), answering(clock, takes), budget_s=budget_s, clock=lambda: clock[0])


def test_what_does_not_fit_the_time_left_is_named_and_what_is_shorter_still_runs(tmp_path: Path) -> None:
    jobs = [Job("cell", "tiny", 50), Job("cell", "tiny-capped", 60), Job("peer", "tiny-eager", 30)]
    progress = played(jobs, tmp_path, {"tiny": 60.0, "tiny-eager": 10.0}, budget_s=100)
    assert [row["cell"] for row in progress.cells] == ["tiny"]
    assert [row["peer"] for row in progress.peers] == ["tiny-eager"]
    assert progress.left_out == ["cell tiny-capped (about 60 s)"]
    assert [row["wall_s"] for row in read_rows(tmp_path / "cells.csv")] == ["60.0"]


def test_shares_are_of_the_ceiling_of_this_run_or_of_the_last_one_in_the_folder(tmp_path: Path) -> None:
    played([Job("cell", "tiny", 1)], tmp_path, {"tiny": 1.0}, None)
    played([Job("ceiling", "tiny-64", 1), Job("cell", "tiny", 1)], tmp_path, {"tiny": 1.0, "tiny-64": 1.0}, None)
    played([Job("cell", "tiny", 1)], tmp_path, {"tiny": 1.0}, None)
    rows = read_rows(tmp_path / "cells.csv")
    assert [(row["ceiling_share"], row["ceiling_of_this_run"]) for row in rows] == [
        ("", "False"), ("0.8", "True"), ("0.8", "False"),
    ]  # fmt: skip
    assert all(row["torch"] and row["date"] and row["card"] == "cpu" for row in rows)


def test_earlier_times_foresee_the_next_ones(tmp_path: Path) -> None:
    asked = settings(tmp_path, warm_up_s=4.0, measure_s=6.0)
    (guess,) = gpu.jobs_of(["tiny"], [], [], asked)
    assert guess.foreseen_s == pytest.approx(CPU_CELLS[0].set_up_s + 4.05 + 6.05)
    played([Job("cell", "tiny", 1)], tmp_path, {"tiny": 30.0}, None)
    # 30 s of which 4 steps of 2 s each.
    (known,) = gpu.jobs_of(["tiny"], [], [], asked)
    assert known.foreseen_s == pytest.approx(22 + 5 + 7)


def test_a_ceiling_runs_before_the_first_cell_that_needs_it(tmp_path: Path) -> None:
    jobs = gpu.jobs_of(["tiny", "tiny-capped"], ["tiny-64"], ["tiny-eager"], settings(tmp_path))
    names = [(job.kind, job.name) for job in jobs]
    assert names == [("ceiling", "tiny-64"), ("cell", "tiny"), ("cell", "tiny-capped"), ("peer", "tiny-eager")]


def test_every_cell_has_a_ceiling_and_whole_sequences() -> None:
    for device in ("cuda", "cpu"):
        for cell in gpu.cells_of(device).values():
            assert cell.ceiling in gpu.ceilings_of(device)
            assert cell.batch_sequences * cell.sequence_tokens == cell.batch_tokens
        for peer in gpu.peers_of(device).values():
            assert peer.batch_tokens % (peer.micro_sequences * peer.sequence_tokens) == 0
    assert list(gpu.ceilings_of("cuda")) == ["8b-8k", "8b-64k", "8b-256k", "1b-8k", "fp8-8b-8k"]


def test_names_are_checked_before_anything_runs() -> None:
    with pytest.raises(FlopwiseError, match="8k-42"):
        gpu.chosen("8k,8k-42", list(gpu.cells_of("cuda")), "cell")
    assert gpu.chosen("none", ["a"], "cell") == [] and gpu.chosen("all", ["a", "b"], "cell") == ["a", "b"]


def test_the_last_table_is_narrow_whatever_it_holds() -> None:
    row = {
        "outcome": "ok", "tokens_per_s": 55_090.4, "tokens_per_s_low": 54_900.0, "tokens_per_s_high": 55_200.0,
        "ceiling_share": 0.953, "mfu": 0.61, "hfu": 0.65, "peak_allocated_bytes": 131 * 2**30, "peak_per_cap": 0.998,
        "predicted_per_measured": 1.023, "waited_s": 12.5, "submit_s": 11.25, "clock_mhz": 1455.2, "power_w": 684.0,
    }  # fmt: skip
    bad = {"outcome": "out of memory", "why": "OutOfMemoryError: " + "x" * 200}
    progress = Progress(
        ceilings={"fp8-8b-256k": Ideal(12_340.0, 67.5, 13.5)},
        cells=[{"cell": "tiny-capped", **row}, {"cell": "8k", **bad}],
        peers=[{"peer": "transformers-ckpt-64k", **row}, {"peer": "compiled-8k", **bad}],
        failed=["ceiling 8b-64k: failed: " + "y" * 200],
    )
    lines = gpu.shown(progress).splitlines()
    assert all(len(line) <= 120 for line in lines), max(lines, key=len)
    assert any(line.startswith("failed: ceiling 8b-64k") for line in lines)


def test_small_words() -> None:
    assert saves_text(["ff", "ff", "fi"]) == "ff×2 fi×1" and saves_text([]) == ""
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0


# -- the whole way ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_whole_way_on_a_cpu(tmp_path: Path) -> None:
    """Ceiling, two cells, one of them capped, one that cannot be, and peers: what fails is told, and others go on."""
    asked = settings(tmp_path, profile=True)
    jobs = gpu.jobs_of([cell.name for cell in CPU_CELLS], ["tiny-64"], list(gpu.peers_of("cpu")), asked)
    progress = gpu.run_jobs(jobs, asked, gpu.run_here, budget_s=1000)
    assert progress.left_out == []
    cells = {row["cell"]: row for row in read_rows(tmp_path / "cells.csv")}
    assert list(cells) == ["tiny", "tiny-capped", "tiny-impossible"]
    assert cells["tiny-impossible"]["outcome"] == "refused" and "no plan fits" in cells["tiny-impossible"]["why"]
    ceiling = gpu.measured_ceilings(tmp_path, "cpu")["tiny-64"].tokens_per_s
    for name in ("tiny", "tiny-capped"):
        row = cells[name]
        assert row["outcome"] == "ok" and row["loss_finite"] == "True"
        # Random tokens of 512 cannot be told.
        assert abs(float(row["last_loss"]) - math.log(512)) < 0.3
        assert float(row["tokens_per_s"]) == pytest.approx(256 / float(row["step_s"]))
        assert float(row["ceiling_share"]) == pytest.approx(float(row["tokens_per_s"]) / ceiling)
        assert float(row["tokens_per_s_low"]) <= float(row["tokens_per_s"]) <= float(row["tokens_per_s_high"])
        kernels = read_rows(tmp_path / f"kernels_{name}.csv")
        assert {"span", "class", "kernel"} <= {one["level"] for one in kernels}
    assert int(cells["tiny-capped"]["planned_bytes"]) <= int(cells["tiny-capped"]["device_cap_bytes"])
    assert float(cells["tiny-capped"]["hfu"]) >= float(cells["tiny-capped"]["mfu"])
    peers = read_rows(tmp_path / "peers.csv")
    assert [row["outcome"] for row in peers] == ["ok"] * 3
    assert all(abs(float(row["first_loss"]) - math.log(512)) < 0.3 for row in peers)
    assert "tiny-capped" in gpu.shown(progress)


@pytest.mark.slow
def test_a_process_of_its_own_for_each_and_a_crash_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(tmp_path)
    good = gpu.run_child(Job("cell", "tiny", 1), asked)
    assert good.outcome == "ok" and good.rows[0]["cell"] == "tiny"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert gpu.run_child(Job("cell", "tiny", 1), asked).outcome == "failed"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(RuntimeError("CUDA error: out of memory"), "out of memory"), (ValueError("odd\nlines"), "failed")],
    ids=["memory", "other"],
)
def test_what_goes_wrong_in_a_cell_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(gpu, "run_cell", fails)
    answer = gpu.run_here(Job("cell", "tiny", 1), settings(tmp_path))
    assert answer.outcome == outcome and answer.rows == [] and "\n" not in answer.why
