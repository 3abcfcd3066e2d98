"""The benchmark of one GPU, where there is none: its arithmetic, its budget, its files, and the whole way on a CPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Answer, Ideal, Job, Progress
from benchmarks.gpu_ceiling import Load, Shape, ceiling_rows, fastest, ideal_seconds, run_ceiling
from benchmarks.gpu_cells import CPU_CELLS, Settings, hardware_of, quantile, saves_text
from benchmarks.gpu_kernels import Event, covered_s, device_events, kernel_rows, shown_kernels, write_kernels
from benchmarks.gpu_record import append_rows, read_rows
from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware, load_model
from flopwise.profile.measure import this_machine
from flopwise.profile.measure.sampling import Counters
from flopwise.work.describe import describe
from flopwise.work.op import Attention, Gemm

PASSES = ("forward", "to-input", "to-weight")


def settings(folder: Path, **changes: Any) -> Settings:
    quick = {"warm_up_s": 0.02, "measure_s": 0.05, "ceiling_warm_up_s": 0.0, "ceiling_measure_s": 0.05}
    return Settings(**{"device": "cpu", "output": folder, **quick, **changes})


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
    # Four chunks, and two of these sequences in one call of attention.
    total = model.layers * (4 * 3 * (1 + 2 + 3 + 4) + (10 + 20) / 2) + 4 * 3 * 5
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
    ]
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
    spans = ((0, 4), (1, 2), (3, 6), (8, 9))
    assert covered_s([Event("a", "kernel", begin_s, end_s) for begin_s, end_s in spans]) == pytest.approx(7)
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


def answering(clock: list[float], takes: dict[str, float], bad: Sequence[str] = ()) -> gpu.Runner:
    """Jobs that take as long as they are told to, on a clock of our own; those of `bad` fail."""

    def answer(job: Job) -> Answer:
        clock[0] += takes[job.name]
        if job.name in bad:
            return Answer([], "failed", "it broke")
        row: dict[str, Any] = {job.kind: job.name, "tokens_per_s": 80.0, "step_s": 2.0, "steps": 3, "warm_up_steps": 1}
        ideal = {"tokens_per_s": 100.0, "products_us_per_token": 8_000.0, "attention_us_per_token": 2_000.0}
        return Answer([{"ceiling": job.name, "op": "whole", **ideal}] if job.kind == "ceiling" else [row])

    return lambda jobs, _settings: map(answer, jobs)


def played(
    jobs: list[Job], folder: Path, takes: dict[str, float], budget_s: float | None, bad: Sequence[str] = ()
) -> Progress:
    now = [0.0]
    return gpu.run_jobs(jobs, settings(folder), answering(now, takes, bad), budget_s=budget_s, clock=lambda: now[0])


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
    shares = [(row["ceiling_share"], row["ceiling_of_this_run"]) for row in rows]
    assert shares == [("", "False"), ("0.8", "True"), ("0.8", "False")]
    assert all(row["torch"] and row["date"] and row["card"] == "cpu" for row in rows)


def test_earlier_times_foresee_the_next_ones(tmp_path: Path) -> None:
    asked = settings(tmp_path, warm_up_s=4.0, measure_s=6.0)
    (guess,) = gpu.jobs_of(["tiny"], [], [], asked)
    assert guess.foreseen_s == pytest.approx(CPU_CELLS[0].set_up_s + 4.05 + 6.05)
    played([Job("cell", "tiny", 1)], tmp_path, {"tiny": 30.0}, None)
    # 30 s of which 4 steps of 2 s each.
    (known,) = gpu.jobs_of(["tiny"], [], [], asked)
    assert known.foreseen_s == pytest.approx(22 + 5 + 7)


def test_forward_passes_in_place_of_warm_up_steps_are_foreseen_as_thirds_of_a_step(tmp_path: Path) -> None:
    asked = settings(tmp_path, device="cuda", warm_up_s=20.0, measure_s=30.0)
    (guess,) = gpu.jobs_of(["256k"], [], [], asked)
    assert guess.foreseen_s == pytest.approx(55 + 124 / 3 + 124)
    # 250 s, of which a step of 120 s and two passes.
    row = {"outcome": "ok", "step_s": 120, "steps": 1, "warm_up_steps": 0, "warm_up_passes": 2, "wall_s": 250}
    append_rows(tmp_path / "cells.csv", [{"cell": "256k", **row}])
    assert gpu.jobs_of(["256k"], [], [], asked)[0].foreseen_s == pytest.approx(50 + 40 + 120)


def test_a_ceiling_runs_before_the_first_cell_that_needs_it(tmp_path: Path) -> None:
    jobs = gpu.jobs_of(["tiny", "tiny-capped"], ["tiny-64"], ["tiny-eager"], settings(tmp_path))
    names = [(job.kind, job.name) for job in jobs]
    assert names == [("ceiling", "tiny-64"), ("cell", "tiny"), ("cell", "tiny-capped"), ("peer", "tiny-eager")]


PAIR, CAPPED = [Job("ceiling", "tiny-64", 25), Job("cell", "tiny", 10)], Job("cell", "tiny-capped", 10)


@pytest.mark.parametrize(
    ("waiting", "left_s", "names"),
    [
        pytest.param(PAIR, 32.0, ["tiny-64", "tiny"], id="both"),
        pytest.param(PAIR, 31.0, ["tiny-64"], id="time-for-the-ceiling"),
        pytest.param(PAIR, 24.0, [], id="no-time"),
        pytest.param(PAIR[1:], 10.0, ["tiny"], id="cell-alone"),
        pytest.param([Job("ceiling", "other", 5), PAIR[1]], 99.0, ["other"], id="ceiling-of-another"),
        pytest.param([*PAIR, CAPPED, Job("peer", "tiny-eager", 5)], 99.0, ["tiny-64", "tiny", "tiny-capped"], id="all"),
    ],
)
def test_cells_share_the_process_of_their_ceiling(
    waiting: list[Job], left_s: float, names: list[str], tmp_path: Path
) -> None:
    assert [job.name for job in gpu.next_group(waiting, settings(tmp_path), left_s)] == names


def test_what_a_shared_start_spared_is_not_missed_by_the_next_guess(tmp_path: Path) -> None:
    asked = settings(tmp_path, warm_up_s=4.0, measure_s=6.0)
    played(PAIR, tmp_path, {"tiny-64": 20.0, "tiny": 27.0}, None)
    (row,) = read_rows(tmp_path / "cells.csv")
    assert (row["wall_s"], row["spared_s"]) == ("27.0", "3.0")
    # As long as in a process of its own: 27 s and the start, of which 4 steps of 2 s each.
    assert gpu.jobs_of(["tiny"], [], [], asked)[0].foreseen_s == pytest.approx(22 + 5 + 7)


def test_a_ceiling_that_fails_does_not_keep_its_cell_from_running(tmp_path: Path) -> None:
    progress = played(PAIR, tmp_path, {"tiny-64": 1.0, "tiny": 2.0}, None, bad=["tiny-64"])
    assert progress.failed == ["ceiling tiny-64: failed: it broke"]
    (row,) = progress.cells
    assert (row["outcome"], row["spared_s"], row["ceiling_share"]) == ("ok", 0.0, None)
    (failed,) = read_rows(tmp_path / "ceilings.csv")
    assert (failed["ceiling"], failed["outcome"], failed["why"]) == ("tiny-64", "failed", "it broke")


def test_a_process_begins_nothing_behind_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {"ceiling": Answer([{"a": 1}]), "cell": Answer([], "out of memory", "too large"), "peer": Answer([])}
    monkeypatch.setattr(gpu, "run_here", lambda job, _settings: outcomes[job.kind])
    gpu.run_as_child([Job(kind, "x", 1) for kind in outcomes], settings(tmp_path), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ceiling-x.json", "cell-x.json"]


def test_memory_is_given_back_between_two_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for place, name in (
        (torch._C, "_cuda_clearCublasWorkspaces"),
        (torch._C, "_host_emptyCache"),
        (torch.cuda, "empty_cache"),
        (torch.cuda, "reset_peak_memory_stats"),
    ):
        monkeypatch.setattr(place, name, lambda name=name: called.append(name), raising=False)
    gpu._free("cpu")
    assert called == []
    gpu._free("cuda")
    assert called == ["_cuda_clearCublasWorkspaces", "_host_emptyCache", "empty_cache", "reset_peak_memory_stats"]


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param("--cell nope", "no cell is called 'nope'", id="cell"),
        pytest.param("--cells tiny,tinny", "did you mean tiny", id="cells"),
        pytest.param("--peer nope", "no peer is called 'nope'", id="peer"),
        pytest.param("--ceiling nope", "no ceiling is called 'nope'", id="ceiling"),
        pytest.param("--hardware nope", "no hardware is called 'nope'", id="hardware"),
        pytest.param("--hardware {broken}", "is not valid TOML", id="hardware-file"),
        pytest.param("--device cuda", "there is no GPU", id="no-gpu"),
        pytest.param("--budget-s nan", "--budget-s cannot be nan", id="budget"),
        pytest.param("--measure-s -1", "--measure-s cannot be -1", id="negative"),
        pytest.param("--ceiling-warm-up-s inf", "--ceiling-warm-up-s cannot be inf", id="infinite"),
        pytest.param("--cells none --ceilings none --peers none", "nothing to measure", id="nothing"),
        pytest.param("--output {broken}", "it is a file, not a folder", id="output-a-file"),
        pytest.param("--output /proc/x", "cannot write into /proc/x", id="output-nowhere"),
    ],
)
def test_a_mistake_is_told_before_any_process_and_makes_no_folder(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "run_child", lambda *_: pytest.fail("a process was begun"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    broken, output = tmp_path / "broken.toml", tmp_path / "output"
    broken.write_text("x = [")
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--output", str(output), "--device", "cpu", *words.format(broken=broken).split()])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert told in said.err and "hint: " in said.err and "None" not in said.err
    assert not output.exists()


def test_it_is_planned_for_the_card_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h200, asked = load_hardware("h200"), settings(tmp_path, device="cuda")
    monkeypatch.setattr(this_machine, "this_cpu", lambda: replace(h200, device=replace(h200.device, kind="cpu")))
    for card, name in (("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-sxm")):
        monkeypatch.setattr(this_machine, "gpu_name", lambda card=card: card)
        assert hardware_of(asked) == load_hardware(name) and hardware_of(replace(asked, device="cpu")) == h200
        assert hardware_of(replace(asked, hardware="b200")).name == "b200"
    for unknown, told in (("NVIDIA Z9000", "'NVIDIA Z9000', is not in the"), (None, "nothing says which card")):
        monkeypatch.setattr(this_machine, "gpu_name", lambda unknown=unknown: unknown)
        with pytest.raises(FlopwiseError, match=rf"{told}[\s\S]*hint: --hardware "):
            hardware_of(asked)


@pytest.mark.parametrize("bad", [(), ("tiny",)], ids=["all-well", "one-failed"])
def test_a_run_in_which_something_failed_exits_with_1_after_the_table(
    bad: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "run_child", answering([0.0], {"tiny": 1.0, "tiny-64": 1.0}, bad))
    monkeypatch.setattr(gpu, "shown", lambda _progress: "the table")
    words = ["--output", str(tmp_path), "--device", "cpu", "--cell", "tiny"]
    if bad:
        with pytest.raises(SystemExit) as ended:
            gpu.main(words)
        assert ended.value.code == 1
    else:
        gpu.main(words)
    said = capsys.readouterr()
    assert said.out == "the table\n"
    assert ("1 of 2 failed: cell tiny" in said.err) == bool(bad)


def test_every_cell_has_a_ceiling_and_whole_sequences() -> None:
    for device in ("cuda", "cpu"):
        for cell in gpu.cells_of(device).values():
            # Adapters leave out products: they have no share of a ceiling.
            assert (cell.ceiling in gpu.ceilings_of(device)) == (not cell.lora)
            assert cell.batch_sequences * cell.sequence_tokens == cell.batch_tokens
        for peer in gpu.peers_of(device).values():
            assert peer.batch_tokens % (peer.micro_sequences * peer.sequence_tokens) == 0
    mixtures = ["olmoe-1b-7b-4k", "qwen3-30b-a3b-4k", "gpt-oss-20b-4k"]
    assert list(gpu.ceilings_of("cuda")) == ["8b-8k", "8b-64k", "8b-256k", "1b-8k", *mixtures, "fp8-8b-8k"]


def test_small_words_and_names() -> None:
    assert saves_text(["ff", "ff", "fi"]) == "ff×2 fi×1" and saves_text([]) == ""
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    with pytest.raises(FlopwiseError, match="8k-42"):
        gpu.chosen("8k,8k-42", list(gpu.cells_of("cuda")), "cell")
    assert gpu.chosen("none", ["a"], "cell") == [] and gpu.chosen("all", ["a", "b"], "cell") == ["a", "b"]


def test_the_last_table_is_narrow_whatever_it_holds() -> None:
    row = {
        "outcome": "ok",
        "tokens_per_s": 55_090.4,
        "tokens_per_s_low": 54_900.0,
        "tokens_per_s_high": 55_200.0,
        "ceiling_share": 0.953,
        "mfu": 0.61,
        "hfu": 0.65,
        "peak_allocated_bytes": 131 * 2**30,
        "peak_per_cap": 0.998,
        "predicted_per_measured": 1.023,
        "waited_s": 12.5,
        "submit_s": 11.25,
        "clock_mhz": 1455.2,
        "power_w": 684.0,
    }
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


# -- the whole way ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_whole_way_on_a_cpu(tmp_path: Path) -> None:
    """Ceiling, cells (one capped, one warmed by evaluation, one impossible), peers: a failure is told, others go on."""
    asked = settings(tmp_path, profile=True)
    jobs = gpu.jobs_of([cell.name for cell in CPU_CELLS], ["tiny-64"], list(gpu.peers_of("cpu")), asked)

    def here(group: Sequence[Job], _settings: Settings) -> Iterator[Answer]:
        return (gpu.run_here(job, asked) for job in group)

    progress = gpu.run_jobs(jobs, asked, here, budget_s=1000)
    assert progress.left_out == []
    cells = {row["cell"]: row for row in read_rows(tmp_path / "cells.csv")}
    mixtures = ["tiny-mixture", "tiny-mixture-lora"]
    assert list(cells) == ["tiny", "tiny-capped", "tiny-evaluated", *mixtures, "tiny-impossible"]
    assert cells["tiny-impossible"]["outcome"] == "refused" and "no plan fits" in cells["tiny-impossible"]["why"]
    ceiling = gpu.measured_ceilings(tmp_path, "cpu")["tiny-64"].tokens_per_s
    for name in ("tiny", "tiny-capped", "tiny-evaluated", *mixtures):
        row = cells[name]
        assert row["outcome"] == "ok" and row["loss_finite"] == "True"
        # Random tokens of 512 cannot be told.
        assert abs(float(row["last_loss"]) - math.log(512)) < 0.3
        assert float(row["tokens_per_s"]) == pytest.approx(256 / float(row["step_s"]))
        share = "" if name in mixtures else pytest.approx(float(row["tokens_per_s"]) / ceiling)
        assert (row["ceiling_share"] and float(row["ceiling_share"])) == share
        assert (row["warm_up_steps"] == "0") == (row["warm_up_passes"] != "0") == (name == "tiny-evaluated")
        assert int(row["steps"]) >= 1 and math.isfinite(float(row["tokens_per_s"]) + float(row["submit_s"]))
        assert float(row["tokens_per_s_low"]) <= float(row["tokens_per_s"]) <= float(row["tokens_per_s_high"])
        kernels = read_rows(tmp_path / f"kernels_{name}.csv")
        assert {"span", "class", "kernel"} <= {one["level"] for one in kernels}
    assert int(cells["tiny-capped"]["planned_bytes"]) <= int(cells["tiny-capped"]["device_cap_bytes"])
    # A CPU is not held against the H200 that it was planned as.
    compared = ("mfu", "hfu", "peak_flops", "predicted_tokens_per_s", "predicted_per_measured")
    assert [cells["tiny-capped"][column] for column in compared] == [""] * 5
    peers = read_rows(tmp_path / "peers.csv")
    assert [(row["outcome"], row["mfu"]) for row in peers] == [("ok", "")] * 3
    assert all(abs(float(row["first_loss"]) - math.log(512)) < 0.3 for row in peers)
    assert "tiny-capped" in gpu.shown(progress)


@pytest.mark.slow
def test_a_process_of_its_own_for_each_and_a_crash_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(tmp_path)
    begun, words = [], gpu._words

    def counted(jobs: Sequence[Job], asked: Settings, folder: str) -> list[str]:
        begun.append(folder)
        return words(jobs, asked, folder)

    monkeypatch.setattr(gpu, "_words", counted)
    ceiling, cell = gpu.run_child(PAIR, asked)
    assert ceiling.outcome == cell.outcome == "ok" and len(begun) == 1
    assert ceiling.rows[0]["ceiling"] == "tiny-64" and cell.rows[0]["cell"] == "tiny"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert [answer.why for answer in gpu.run_child(PAIR, asked)] == ["the process ended with 1"] * 2


def test_a_process_that_hangs_is_ended_and_the_next_job_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    monkeypatch.setattr(gpu, "_words", lambda *_: ["/bin/sh", "-c", f"echo x >> {begun}; exec sleep 60"])
    monkeypatch.setattr(gpu, "LIMIT_S", 0.3)
    answers = list(gpu.run_child(PAIR, settings(tmp_path)))
    assert [(answer.outcome, answer.why) for answer in answers] == [("failed", "ended after 0 s")] * 2
    assert begun.read_text() == "x\nx\n"


@pytest.mark.parametrize(
    ("error", "outcome", "why"),
    [
        (RuntimeError("CUDA: out of memory"), "out of memory", "RuntimeError: CUDA: out of memory"),
        (ValueError("odd\nlines"), "failed", "ValueError: odd"),
        (FlopwiseError("no such thing"), "refused", "no such thing"),
    ],
    ids=["memory", "other", "refused"],
)
def test_what_goes_wrong_in_a_cell_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: str, why: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(gpu, "run_cell", fails)
    assert gpu.run_here(Job("cell", "tiny", 1), settings(tmp_path)) == Answer([], outcome, why)
