"""Traces of the PyTorch profiler: a hand-made one with known answers, a real one held against torch's own sums."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware
from flopwise.profile.explain.invariants import broken
from flopwise.profile.read.kineto import looks_like, ranks_together, read_source
from flopwise.profile.read.opening import open_trace
from flopwise.profile.read.operator_work import CAUSAL, work_of
from tests.support.traces import (
    BASE,
    an_event,
    assert_sound,
    gpu_trace,
    memory,
    microseconds,
    only,
    profiles_of,
    ran,
    shapes,
)


def test_a_gpu_trace() -> None:
    found = only(gpu_trace())
    assert_sound(found)
    assert (found.rank, found.world, found.steps, found.precision) == (3, 8, 2, "bf16")
    assert found.device == "NVIDIA H100 80GB HBM3"
    assert found.warnings == ()
    expected = {
        "step_wall_s": 100,
        "device_span_s": 65,
        "device_busy_s": 57.5,
        "idle_s": 7.5,
        "idle_host_s": 3,
        "idle_copy_s": 2.5,
        "idle_communication_s": 2,
        "comm_active_s": 12.5,
        "comm_exposed_s": 10,
        "copy_active_s": 10,
        "copy_exposed_s": 7.5,
        "matrix_active_s": 25,
        "vector_active_s": 15,
    }
    assert {name: microseconds(found, name) for name in expected} == expected
    assert {spent.name: round(spent.seconds * 1e6, 3) for spent in found.classes} == {
        "gemm": 25,
        "norm": 5,
        "pointwise": 5,
        "optimizer": 5,
        "communication": 10,
        "copy": 7.5,
    }
    counts = {"kernel_count": 3, "matrix_count": 1, "comm_count": 0.5, "copy_count": 0.5, "copy_bytes": 2048}
    assert {name: found.get(name) for name in counts} == counts
    assert found.get("comm_bytes") == 1000
    assert found.get("model_flops") is None


def test_kernels_operators_and_their_work() -> None:
    found = only(gpu_trace())
    longest = found.kernels[0]
    assert (longest.name, longest.kind, longest.count) == ("nvjet_tst_128x64", "gemm", 1)
    assert longest.seconds == pytest.approx(25e-6)
    operators = {spent.name: spent for spent in found.operators}
    # The product within the linear layer has the work, and its kernel's time; the layer is not counted again.
    assert set(operators) == {"aten::mm", "aten::addmm"}
    product = 2 * 4 * 8 * 16
    assert operators["aten::mm"].flops == product / 2
    assert operators["aten::mm"].bytes == 2 * (4 * 8 + 8 * 16 + 4 * 16) / 2
    assert operators["aten::mm"].seconds == pytest.approx(10e-6)
    assert operators["aten::addmm"].seconds == pytest.approx(15e-6)
    flops = found.values["hardware_flops"]
    assert (flops.value, flops.source) == (product, "modelled")


def test_flops_are_unknown_when_one_product_has_no_shapes() -> None:
    trace = gpu_trace()
    mm = next(event for event in trace["traceEvents"] if event["name"] == "aten::mm")
    del mm["args"]["Input Dims"]
    found = only(trace)
    assert found.get("hardware_flops") is None
    assert {spent.name: spent.flops is None for spent in found.operators} == {"aten::mm": True, "aten::addmm": False}


def test_peaks_come_from_the_catalogue_and_are_never_guessed() -> None:
    trace = gpu_trace()
    found = only(trace)
    device = load_hardware("h100-sxm").device
    assert found.peaks is not None
    assert (found.peaks.flops, found.peaks.number_format) == (device.peak_flops["bf16"].value, "bf16")
    assert found.memory_capacity_bytes == 85_015_855_104
    trace["deviceProperties"][0]["name"] = "NVIDIA H900"
    unknown = only(trace)
    assert unknown.peaks is None
    assert any("H900 is not in the catalogue" in note for note in unknown.notes)


def test_a_host_that_runs_ahead_has_no_wall_time() -> None:
    trace = gpu_trace()
    for event in trace["traceEvents"]:
        if event["name"] == "ProfilerStep#1":
            event["dur"] = 1
        if event["name"] == "ProfilerStep#2":
            event["ts"], event["dur"] = BASE + 1, 125
        if event["cat"] == "kernel" and event["ts"] == BASE + 130:
            event["dur"] = 300
    found = only(trace)
    assert found.get("step_wall_s") is None
    assert any("before the device was" in note for note in found.notes)
    assert broken(found) == ()


@pytest.mark.parametrize(
    ("name", "number_format"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "bf16"),
        ("nvjet_sm90_tss_64x8", "bf16"),
        ("nvjet_sm90_hsh_128x64", "fp16"),
        ("nvjet_sm90_qqtst_128x64", "fp8"),
        ("nvjet_sm100_ddd_64x64", "fp64"),
    ],
)
def test_the_number_format_in_a_kernels_name(name: str, number_format: str) -> None:
    text = json.dumps(gpu_trace()).replace("nvjet_tst_128x64", name).replace("c10::BFloat16", "Unknown")
    assert only(text.encode()).precision == number_format


def test_products_are_counted_once_with_shapes_or_without() -> None:
    trace = {
        "traceEvents": [
            an_event("cpu_op", "aten::linear", 0, 10, **shapes(1, (4, 8), (16, 8), (16,))),
            an_event("cpu_op", "aten::addmm", 2, 9, **shapes(2, (16,), (4, 8), (8, 16))),
            an_event("cpu_op", "aten::mm", 12, 19, **shapes(3, (4, 8), (8, 16))),
        ]
    }
    assert only(trace).get("matrix_count") == 2
    for event in trace["traceEvents"]:
        del event["args"]["Input Dims"]
    assert only(trace).get("matrix_count") == 2


def test_the_number_format_follows_operators_where_kernels_do_not_tell() -> None:
    text = json.dumps(gpu_trace()).replace("nvjet_tst_128x64", "some_gemm").replace("c10::BFloat16", "c10::Half")
    assert only(text.encode()).precision == "fp16"


def test_memory_over_time() -> None:
    found = only(gpu_trace())
    assert [value for _, value in found.memory_over_time] == [1000, 3000, 2000]
    assert found.memory_over_time[1][0] == pytest.approx(49e-6)
    assert found.memory_total_bytes == 4000
    assert {use.owner: use.bytes for use in found.memory} == {"other": 3000, "fragmentation": 1000}
    trace = gpu_trace()
    trace["traceEvents"] += [memory(100 + n, 10 * n if n != 4321 else 10**9, 2 * 10**9) for n in range(5000)]
    thinned = only(trace).memory_over_time
    assert len(thinned) <= 1000
    assert max(value for _, value in thinned) == 10**9


def test_several_devices_and_ranks() -> None:
    trace = gpu_trace()
    trace["traceEvents"] += ran("nvjet_tst", 10, 20, launch=3, number=50, device=1)
    first, second = profiles_of(trace)
    assert (first.name, second.name) == ("x GPU 0", "x GPU 1")
    assert microseconds(second, "device_busy_s") == 5
    together = ranks_together([first, second])
    assert together.name == "2 ranks"
    assert microseconds(together, "device_busy_s") == (57.5 + 5) / 2
    assert_sound(together)
    assert any(
        note.startswith("device_busy_s from 5e-06 s (x GPU 1) to 5.75e-05 s (x GPU 0)") for note in together.notes
    )
    assert together.memory_total_bytes == 4000
    assert "hardware_flops" not in together.values


def test_without_steps_everything_is_summed_up() -> None:
    trace = gpu_trace()
    trace["traceEvents"] = [event for event in trace["traceEvents"] if not event["name"].startswith("ProfilerStep")]
    found = only(trace)
    assert_sound(found)
    assert found.steps is None
    assert found.get("step_wall_s") is None
    assert microseconds(found, "device_span_s") == 390
    assert any("no steps" in note for note in found.notes)


def test_without_launches_the_steps_on_the_device_count() -> None:
    trace = gpu_trace()
    events = [event for event in trace["traceEvents"] if event["cat"] != "cuda_runtime"]
    events.append(an_event("gpu_user_annotation", "ProfilerStep#1", 10, 130))
    events.append(an_event("gpu_user_annotation", "ProfilerStep#2", 130, 140))
    found = only(trace | {"traceEvents": events})
    assert microseconds(found, "device_busy_s") == 57.5
    assert "idle_host_s" not in found.values


def test_operators_are_joined_through_the_launch_where_kernels_do_not_name_them() -> None:
    trace = gpu_trace()
    for event in trace["traceEvents"]:
        if event["cat"] == "kernel":
            del event["args"]["External id"]
        elif event["cat"] == "cuda_runtime":
            event["args"]["external id"] = event["args"]["correlation"]
    assert only(trace).operators == only(gpu_trace()).operators


def test_categories_of_old_traces() -> None:
    old = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime", "cpu_op": "Operator"}
    trace = gpu_trace()
    for event in trace["traceEvents"]:
        event["cat"] = "Operator" if event["name"].startswith("Profiler") else old.get(event["cat"], event["cat"])
    found, expected = only(trace), only(gpu_trace())
    assert (found.values, found.classes, found.operators) == (expected.values, expected.classes, expected.operators)


def test_other_traces_are_refused_in_words() -> None:
    with pytest.raises(FlopwiseError, match="not one of the PyTorch profiler"):
        profiles_of({"traceEvents": [{"ph": "X", "name": "main", "ts": 1, "dur": 2}]})
    with pytest.raises(FlopwiseError, match="without events"):
        profiles_of({"traceEvents": []})


def test_what_looks_like_a_trace() -> None:
    for head in (b'{"traceEvents": [', b' [ {"ph": "X", ', b'{"schemaVersion": 1, "deviceProperties": ['):
        assert looks_like(head)
    for head in (b"", b"SQLite format 3\0", b'{"summary": [{"total_time": 1}]}', b"\x80\x04", b'{"train_loss": 0.1}'):
        assert not looks_like(head)


@pytest.mark.parametrize(
    ("name", "dims", "flops"),
    [
        ("aten::mm", [[3, 5], [5, 7]], 2 * 3 * 5 * 7),
        ("aten::addmm", [[7], [3, 5], [5, 7]], 2 * 3 * 5 * 7),
        ("aten::bmm", [[2, 3, 5], [2, 5, 7]], 2 * 2 * 3 * 5 * 7),
        ("aten::baddbmm", [[2, 3, 7], [2, 3, 5], [2, 5, 7]], 2 * 2 * 3 * 5 * 7),
        ("aten::linear", [[2, 3, 5], [7, 5], []], 2 * 2 * 3 * 5 * 7),
        ("aten::scaled_dot_product_attention", [[2, 3, 5, 8], [2, 1, 7, 8], [2, 1, 7, 8]], 4 * 2 * 3 * 5 * 7 * 8),
        ("aten::_flash_attention_forward", [[2, 5, 3, 8], [2, 7, 1, 8], [2, 7, 1, 8]], 4 * 2 * 3 * 5 * 7 * 8),
        (
            "aten::_scaled_dot_product_flash_attention_backward",
            [[2, 3, 5, 8], [2, 3, 5, 8], [2, 3, 7, 8], [2, 3, 7, 8]],
            10 * 2 * 3 * 5 * 7 * 8,
        ),
        ("aten::mm", [[3, 5], [4, 7]], None),
        ("aten::mm", [[3, 5]], None),
        ("aten::mm", ["x", 5], None),
        ("aten::mm", [[3, -5], [-5, 7]], None),
        ("aten::conv2d", [[1, 3, 8, 8], [4, 3, 3, 3]], None),
    ],
)
def test_work_from_shapes(name: str, dims: list[object], flops: float | None) -> None:
    found = work_of(name, json.dumps(dims).encode(), json.dumps(["float"] * len(dims)).encode())
    assert (None if found is None else found[0][0]) == flops


@pytest.mark.parametrize(("keys", "value", "share"), [(5, "True", 0.5), (5, "False", 1), (7, "True", 1), (5, [1], 1)])
def test_a_causal_square_counts_half(keys: int, value: object, share: float) -> None:
    dims = [[2, 3, 5, 8], [2, 1, keys, 8], [2, 1, keys, 8]]
    values = ["", "", "", "", "0.", value, ""]
    words = [json.dumps(part).encode() for part in (dims, ["float"] * 3, values)]
    found = work_of("aten::scaled_dot_product_attention", *words)
    assert found is not None and found[0][0] == share * 4 * 2 * 3 * 5 * keys * 8


@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_where_an_attention_says_that_it_is_causal(name: str) -> None:
    """By torch's own schema."""
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    assert arguments[CAUSAL[name]].name in {"is_causal", "custom_mask_type"}


@cache
def _recorded() -> tuple[bytes, dict[str, tuple[float, int]]]:
    """A tiny training on the CPU as torch writes it, and torch's own microseconds and calls by operator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    written: list[bytes] = []
    sums: dict[str, tuple[float, int]] = {}

    def take(done: Any) -> None:
        path = Path(folder) / "trace.json"
        done.export_chrome_trace(str(path))
        written.append(path.read_bytes())
        sums.update({row.key: (row.self_cpu_time_total, row.count) for row in done.key_averages()})

    with (
        tempfile.TemporaryDirectory() as folder,
        profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=2),
            on_trace_ready=take,
            record_shapes=True,
            profile_memory=True,
        ) as profiler,
    ):
        for _ in range(4):
            model(torch.randn(8, 16)).square().mean().backward()
            query = torch.randn(1, 2, 8, 4)
            torch.nn.functional.scaled_dot_product_attention(query, query, query)
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    torch.set_num_threads(threads)
    return written[0], sums


def test_a_real_trace_of_the_cpu(tmp_path: Path) -> None:
    content, sums = _recorded()
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    assert looks_like(content[:4096])
    with open_trace(path) as source:
        (found,) = read_source(source, "tiny").profiles
    assert_sound(found)
    assert (found.steps, found.precision, found.warnings, found.device) == (2, "fp32", (), None)
    forward = 2 * 8 * 16 * 32 + 2 * 8 * 32 * 4
    backward = forward + 2 * 8 * 32 * 4
    attention = 4 * 2 * 8 * 8 * 4
    assert found.get("hardware_flops") == forward + backward + attention
    operators = {spent.name: spent for spent in found.operators}
    for name in ("aten::addmm", "aten::mm", "aten::native_layer_norm"):
        self_us, calls = sums[name]
        assert operators[name].count == calls / 2
        assert operators[name].seconds * 1e6 == pytest.approx(self_us / 2, rel=1e-3, abs=0.1)
    # On one thread, what operators spent by themselves is all of the busy time.
    busy = found.get("device_busy_s")
    assert sum(spent.seconds for spent in found.operators) == pytest.approx(busy)
    assert {"gemm", "attention", "norm", "pointwise"} <= {spent.kind for spent in found.classes}
    wall, span = found.get("step_wall_s"), found.get("device_span_s")
    assert wall is not None
    assert span is not None
    assert 0 < wall <= span
    assert found.memory_over_time
