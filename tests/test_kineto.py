"""Traces of the PyTorch profiler: a hand-made one with known answers, a real one held against torch's own sums."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, schedule

from flopwise.core.catalog import load_hardware
from flopwise.core.errors import FlopwiseError
from flopwise.core.profile import Profile
from flopwise.profile import kineto_columns
from flopwise.profile.invariants import broken
from flopwise.profile.kineto import looks_like, ranks_together, read_source
from flopwise.profile.opening import Source, opened
from flopwise.profile.operator_work import work_of
from flopwise.profile.reading import read_profiles

Json = dict[str, Any]
BASE = 3_913_618_802_000.0
"""Microseconds, as large as in real traces."""


def _x(category: str, name: str, start: float, end: float, **arguments: Any) -> Json:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1,
        "ts": BASE + start, "dur": end - start, "args": arguments,
    }  # fmt: skip


def _ran(name: str, start: float, end: float, *, launch: float, number: int, **arguments: Any) -> list[Json]:
    """Something on the device, and the host's call that launched it."""
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    given = {"device": 0, "stream": 7, "correlation": number, "External id": number} | arguments
    return [
        _x("cuda_runtime", "cudaLaunchKernel", launch, launch + 1, correlation=number),
        _x(category, name, start, end, **given),
    ]


def _shapes(number: int, *dims: Sequence[int], kind: str = "c10::BFloat16") -> Json:
    return {"External id": number, "Input Dims": [list(shape) for shape in dims], "Input type": [kind] * len(dims)}


def _memory(at: float, allocated: int, reserved: int, device: int = 0) -> Json:
    arguments = {"Total Allocated": allocated, "Total Reserved": reserved, "Device Type": 1, "Device Id": device}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": BASE + at, "args": arguments}


def _gpu_trace() -> Json:
    """Two steps of 100 µs.

    device     10 gemm 30 pointwise 40 …      70 norm 80 …       100 gemm 130 adam 140
    beside it        35 all-reduce        60      75 copy     95
    """
    events = [
        _x("user_annotation", "ProfilerStep#1", 0, 100),
        _x("user_annotation", "ProfilerStep#2", 100, 200),
        _x("cpu_op", "aten::mm", 1, 5, **_shapes(1, (4, 8), (8, 16))),
        _x("cpu_op", "aten::linear", 80, 95, **_shapes(60, (4, 8), (16, 8), (16,))),
        _x("cpu_op", "aten::addmm", 82, 93, **_shapes(6, (16,), (4, 8), (8, 16))),
        *_ran("spin_kernel", -90, -80, launch=-95, number=99),
        *_ran("nvjet_tst_128x64", 10, 30, launch=2, number=1),
        *_ran("void vectorized_elementwise_kernel<4>", 30, 40, launch=12, number=2),
        *_ran("ncclDevKernel_AllReduce_Sum_bf16", 35, 60, launch=13, number=3, stream=9, **{
            "Collective name": "allreduce", "In msg nelems": 1000, "dtype": "BFloat16",
        }),
        *_ran("layer_norm_kernel", 70, 80, launch=66, number=4),
        *_ran("Memcpy HtoD (Pinned -> Device)", 75, 95, launch=20, number=5, stream=11, bytes=4096),
        *_ran("nvjet_tst_128x64", 100, 130, launch=90, number=6),
        *_ran("multi_tensor_apply_kernel<FusedAdam>", 130, 140, launch=120, number=7),
        *_ran("spin_kernel", 210, 300, launch=205, number=98),
        _memory(1, 1000, 4000),
        _memory(50, 3000, 4000),
        _memory(60, 2000, 4000),
    ]  # fmt: skip
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_015_855_104}],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "traceEvents": events,
        "traceName": "x.json",
    }


def _profiles(trace: object, name: str = "x") -> tuple[Profile, ...]:
    content = trace if isinstance(trace, bytes) else json.dumps(trace).encode()
    blocks: Iterator[bytes] = iter([content])
    return read_source(Source("x.json", blocks), name).profiles


def _only(trace: object) -> Profile:
    (found,) = _profiles(trace)
    return found


def _us(found: Profile, name: str) -> float:
    value = found.get(name)
    assert value is not None, name
    return round(value * 1e6, 3)


def _assert_sound(found: Profile) -> None:
    span, busy, idle = (found.get(name) for name in ("device_span_s", "device_busy_s", "idle_s"))
    assert span is not None
    assert busy is not None
    assert idle is not None
    assert idle >= -1e-9
    assert busy + idle == pytest.approx(span)
    assert sum(spent.seconds for spent in found.classes) == pytest.approx(busy)


def test_a_gpu_trace() -> None:
    found = _only(_gpu_trace())
    _assert_sound(found)
    assert (found.rank, found.world, found.steps, found.precision) == (3, 8, 2, "bf16")
    assert found.device == "NVIDIA H100 80GB HBM3"
    assert found.warnings == ()
    expected = {
        "step_wall_s": 100, "device_span_s": 65, "device_busy_s": 57.5, "idle_s": 7.5, "idle_host_s": 3,
        "idle_copy_s": 2.5, "idle_communication_s": 2, "comm_active_s": 12.5, "comm_exposed_s": 10,
        "copy_active_s": 10, "copy_exposed_s": 7.5, "matrix_active_s": 25, "vector_active_s": 15,
    }  # fmt: skip
    assert {name: _us(found, name) for name in expected} == expected
    assert {spent.name: round(spent.seconds * 1e6, 3) for spent in found.classes} == {
        "gemm": 25, "norm": 5, "pointwise": 5, "optimizer": 5, "communication": 10, "copy": 7.5,
    }  # fmt: skip
    counts = {"kernel_count": 3, "matrix_count": 1, "comm_count": 0.5, "copy_count": 0.5, "copy_bytes": 2048}
    assert {name: found.get(name) for name in counts} == counts
    assert found.get("comm_bytes") == 1000
    assert found.get("model_flops") is None


def test_kernels_operators_and_their_work() -> None:
    found = _only(_gpu_trace())
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
    trace = _gpu_trace()
    mm = next(event for event in trace["traceEvents"] if event["name"] == "aten::mm")
    del mm["args"]["Input Dims"]
    found = _only(trace)
    assert found.get("hardware_flops") is None
    assert {spent.name: spent.flops is None for spent in found.operators} == {"aten::mm": True, "aten::addmm": False}


def test_peaks_come_from_the_catalogue_and_are_never_guessed() -> None:
    trace = _gpu_trace()
    found = _only(trace)
    device = load_hardware("h100-sxm").device
    assert found.peaks is not None
    assert (found.peaks.flops, found.peaks.number_format) == (device.peak_flops["bf16"].value, "bf16")
    assert found.memory_capacity_bytes == 85_015_855_104
    trace["deviceProperties"][0]["name"] = "NVIDIA H900"
    unknown = _only(trace)
    assert unknown.peaks is None
    assert any("H900 is not in the catalogue" in note for note in unknown.notes)


def test_a_host_that_runs_ahead_has_no_wall_time() -> None:
    trace = _gpu_trace()
    for event in trace["traceEvents"]:
        if event["name"].startswith("ProfilerStep#"):
            event["ts"], event["dur"] = (
                BASE + (0 if event["name"].endswith("1") else 1),
                1 if event["name"].endswith("1") else 125,
            )
        if event["cat"] == "kernel" and event["ts"] == BASE + 130:
            event["dur"] = 300
    found = _only(trace)
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
    text = json.dumps(_gpu_trace()).replace("nvjet_tst_128x64", name).replace("c10::BFloat16", "Unknown")
    assert _only(text.encode()).precision == number_format


def test_products_are_counted_once_with_shapes_or_without() -> None:
    trace = {"traceEvents": [
        _x("cpu_op", "aten::linear", 0, 10, **_shapes(1, (4, 8), (16, 8), (16,))),
        _x("cpu_op", "aten::addmm", 2, 9, **_shapes(2, (16,), (4, 8), (8, 16))),
        _x("cpu_op", "aten::mm", 12, 19, **_shapes(3, (4, 8), (8, 16))),
    ]}  # fmt: skip
    assert _only(trace).get("matrix_count") == 2
    for event in trace["traceEvents"]:
        del event["args"]["Input Dims"]
    assert _only(trace).get("matrix_count") == 2


def test_the_number_format_follows_operators_where_kernels_do_not_tell() -> None:
    text = json.dumps(_gpu_trace()).replace("nvjet_tst_128x64", "some_gemm").replace("c10::BFloat16", "c10::Half")
    assert _only(text.encode()).precision == "fp16"


def test_memory_over_time() -> None:
    found = _only(_gpu_trace())
    assert [value for _, value in found.memory_over_time] == [1000, 3000, 2000]
    assert found.memory_over_time[1][0] == pytest.approx(49e-6)
    assert found.memory_total_bytes == 4000
    assert {use.owner: use.bytes for use in found.memory} == {"other": 3000, "fragmentation": 1000}
    trace = _gpu_trace()
    trace["traceEvents"] += [_memory(100 + n, 10 * n if n != 4321 else 10**9, 2 * 10**9) for n in range(5000)]
    thinned = _only(trace).memory_over_time
    assert len(thinned) <= 1000
    assert max(value for _, value in thinned) == 10**9


def test_several_devices_and_ranks() -> None:
    trace = _gpu_trace()
    trace["traceEvents"] += _ran("nvjet_tst", 10, 20, launch=3, number=50, device=1)
    first, second = _profiles(trace)
    assert (first.name, second.name) == ("x GPU 0", "x GPU 1")
    assert _us(second, "device_busy_s") == 5
    together = ranks_together([first, second])
    assert together.name == "2 ranks"
    assert _us(together, "device_busy_s") == (57.5 + 5) / 2
    _assert_sound(together)
    assert any(
        note.startswith("device_busy_s from 5e-06 s (x GPU 1) to 5.75e-05 s (x GPU 0)") for note in together.notes
    )
    assert together.memory_total_bytes == 4000
    assert "hardware_flops" not in together.values


def test_without_steps_everything_is_summed_up() -> None:
    trace = _gpu_trace()
    trace["traceEvents"] = [event for event in trace["traceEvents"] if not event["name"].startswith("ProfilerStep")]
    found = _only(trace)
    _assert_sound(found)
    assert found.steps is None
    assert found.get("step_wall_s") is None
    assert _us(found, "device_span_s") == 390
    assert any("no steps" in note for note in found.notes)


def test_without_launches_the_steps_on_the_device_count() -> None:
    trace = _gpu_trace()
    events = [event for event in trace["traceEvents"] if event["cat"] != "cuda_runtime"]
    events.append(_x("gpu_user_annotation", "ProfilerStep#1", 10, 130))
    events.append(_x("gpu_user_annotation", "ProfilerStep#2", 130, 140))
    found = _only(trace | {"traceEvents": events})
    assert _us(found, "device_busy_s") == 57.5
    assert "idle_host_s" not in found.values


def test_operators_are_joined_through_the_launch_where_kernels_do_not_name_them() -> None:
    trace = _gpu_trace()
    for event in trace["traceEvents"]:
        if event["cat"] == "kernel":
            del event["args"]["External id"]
        elif event["cat"] == "cuda_runtime":
            event["args"]["external id"] = event["args"]["correlation"]
    assert _only(trace).operators == _only(_gpu_trace()).operators


def test_categories_of_old_traces() -> None:
    old = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime", "cpu_op": "Operator"}
    trace = _gpu_trace()
    for event in trace["traceEvents"]:
        event["cat"] = "Operator" if event["name"].startswith("Profiler") else old.get(event["cat"], event["cat"])
    found, expected = _only(trace), _only(_gpu_trace())
    assert (found.values, found.classes, found.operators) == (expected.values, expected.classes, expected.operators)


def test_a_cut_trace_says_so() -> None:
    content = json.dumps(_gpu_trace()).encode()
    found = _only(content[: content.index(b"multi_tensor")])
    _assert_sound(found)
    assert any("cut off" in warning for warning in found.warnings)
    assert _us(found, "device_busy_s") == 52.5


@pytest.mark.parametrize("time", ['"soon"', "null", "true", "[1]"])
@pytest.mark.parametrize("place", [0, -1])
def test_an_event_of_a_wrong_kind_hides_nothing_else(time: str, place: int) -> None:
    """Not even as the last of the list, where what stands behind the list follows it."""
    trace = _gpu_trace()
    sound = _only(trace)
    trace["traceEvents"].insert(len(trace["traceEvents"]) if place else 0, {"ph": "X", "cat": "kernel", "ts": "@"})
    found = _only(json.dumps(trace).replace('"@"', time).encode())
    assert (found.values, found.device, found.rank) == (sound.values, sound.device, sound.rank)
    assert found.warnings == ("x.json: 1 events have fields of a wrong kind, left out",)


def test_impossible_times_are_left_out_and_told() -> None:
    trace = _gpu_trace()
    bad = [_x("kernel", "gemm", 20, 10, device=0), _x("kernel", "gemm", 0, 1e300, device=0)]
    missing = _x("kernel", "gemm", 0, 10, device=0)
    del missing["ts"]
    trace["traceEvents"] += [*bad, missing]
    found = _only(trace)
    assert _us(found, "device_busy_s") == 57.5
    assert found.warnings == (
        "x.json: 1 events have a negative duration, left out",
        "x.json: 2 events have no time or no duration, or an impossible one, left out",
    )


@pytest.mark.parametrize(
    ("limit", "what", "category"),
    [
        ("MOST_OPERATORS", "operators", "cpu_op"),
        ("MOST_DEVICE_ROWS", "activities on devices", "kernel"),
        ("MOST_LAUNCHES", "launches", "cuda_runtime"),
        ("MOST_STEPS", "steps", "user_annotation"),
        ("MOST_STEPS", "steps of optimizers", "user_annotation"),
        ("MOST_THREADS", "threads", "cpu_op"),
        ("_MOST_DEVICES", "devices", "kernel"),
        ("MOST_MEMORY_ROWS", "changes of memory", "cpu_instant_event"),
    ],
)
def test_more_than_the_most_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, limit: str, what: str, category: str
) -> None:
    names = {"steps": "ProfilerStep#{}", "steps of optimizers": "Optimizer.step#AdamW.step"}
    more = [
        _x(category, names.get(what, "some").format(n), 50 + n, 51 + n, device=n % 8, correlation=100 + n) | {"tid": n}
        for n in range(10, 30)
    ]
    if what == "changes of memory":
        more = [_memory(n, n, n) for n in range(10, 30)]
    content = _gpu_trace()
    content["traceEvents"] += more
    assert _profiles(content)[0].warnings == ()
    monkeypatch.setattr(kineto_columns, limit, 20 if limit == "MOST_DEVICE_ROWS" else 5)
    found = _profiles(content)
    assert found[0].warnings == (
        f"x.json: only the first {20 if limit == 'MOST_DEVICE_ROWS' else 5} {what} are summed up",
    )
    for each in found:
        _assert_sound(each)
    if what == "devices":
        assert len(found) == 5


def test_names_are_kept_once_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = {"traceEvents": [_x("kernel", f"{n}" * 100, 10 * n, 10 * n + 10 - n, device=0) for n in range(9)]}
    monkeypatch.setattr(kineto_columns, "_MOST_NAME_BYTES", 700)
    found = _only(trace)
    assert {spent.name: spent.count for spent in found.kernels} == {
        **{f"{n}" * 100: 1 for n in range(5)}, kineto_columns.OTHER_NAMES: 4,
    }  # fmt: skip


def test_an_optimizer_that_took_no_time_is_none() -> None:
    events = [_x("cpu_op", "aten::add", 1, 5), _x("user_annotation", "Optimizer.step#AdamW.step", 2, 2)]
    assert [spent.kind for spent in _only({"traceEvents": events}).classes] == ["pointwise"]


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(FlopwiseError, match="cannot be looked into") as error:
        read_profiles([tmp_path])
    assert error.value.why == "Permission denied"
    assert error.value.hint


def test_other_traces_are_refused_in_words() -> None:
    with pytest.raises(FlopwiseError, match="not one of the PyTorch profiler"):
        _profiles({"traceEvents": [{"ph": "X", "name": "main", "ts": 1, "dur": 2}]})
    with pytest.raises(FlopwiseError, match="without events"):
        _profiles({"traceEvents": []})


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

    with tempfile.TemporaryDirectory() as folder, profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2), on_trace_ready=take,
        record_shapes=True, profile_memory=True,
    ) as profiler:  # fmt: skip
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
    with opened(path) as source:
        (found,) = read_source(source, "tiny").profiles
    _assert_sound(found)
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


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_damage_gives_a_sound_profile_or_an_error_in_words(data: st.DataObject) -> None:
    content = bytearray(json.dumps(_gpu_trace()).encode())
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(content)))
        change = data.draw(
            st.binary(max_size=12)
            | st.sampled_from(
                [b"1e400", b"-1", b"9" * 400, b"NaN", b"null", b'"x"', b"[]", b"{}", b"},{", b"]", b"e300"]
            )
        )
        content[place : place + data.draw(st.integers(0, 30))] = change
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    try:
        profiles = _profiles(bytes(content))
    except FlopwiseError as error:
        assert error.hint
        return
    for found in profiles:
        _assert_sound(found)


WORDS = st.sampled_from(
    ["kernel", "gpu_memcpy", "cpu_op", "cuda_runtime", "user_annotation", "ProfilerStep#1", "aten::mm"]
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["device", "stream", "correlation", "External id", "bytes", "Input Dims", "Input type", "dtype"]),
    ANY,
)
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "i", "M", 5]), "cat": WORDS | ANY, "name": WORDS | ANY},
    optional={"ts": st.floats() | ANY, "dur": st.floats() | ANY, "pid": ANY, "tid": ANY, "args": ARGUMENTS | ANY},
)


@given(st.lists(EVENTS, max_size=6), ANY, ANY)
@settings(max_examples=40, deadline=None)
def test_fields_of_any_kind(events: list[Json], properties: object, spread: object) -> None:
    trace = {"deviceProperties": properties, "distributedInfo": spread, "traceEvents": events}
    try:
        profiles = _profiles(trace)
    except FlopwiseError as error:
        assert error.hint
        return
    for found in profiles:
        _assert_sound(found)
