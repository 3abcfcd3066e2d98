"""Nsight Compute's CSV: FLOPs and bytes of kernels, in both of its shapes."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware
from flopwise.profile.read.ncu import REPLAY_NOTE, looks_like, number_in, read_source, scalar_flops, tensor_flops
from flopwise.profile.read.opening import TraceFile
from flopwise.records.profile import Profile

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"
ADD = 'void at::native::vectorized_elementwise_kernel<4, "add", std::array<char*, 3>>(int)'
TENSOR = "sm__ops_path_tensor_src_bf16_dst_fp32"
SCALAR = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"
ACTIVE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"

# A product of 1024³ twice and an addition of 10⁶ numbers, with the figures that their sizes give.
LAUNCHES: list[tuple[str, dict[str, tuple[str, str]]]] = [
    *[
        (
            GEMM,
            {
                "gpu__time_duration.sum": ("usecond", microseconds),
                f"{TENSOR}.sum": ("", "2,147,483,648"),
                f"{TENSOR}_sparsity_off.sum": ("", "2,147,483,648"),
                f"{TENSOR}_sparsity_on.sum": ("", "0"),
                "sm__ops_path_tensor_src_int8.sum": ("", "77"),
                "dram__bytes_read.sum": ("Mbyte", "4.194304"),
                "dram__bytes_write.sum": ("Kbyte", "2,097.152"),
                ACTIVE: ("%", share),
            },
        )
        for microseconds, share in (("10.00", "50"), ("30.00", "90"))
    ],
    (
        ADD,
        {
            "gpu__time_duration.sum": ("nsecond", "5,000"),
            SCALAR.format("fadd"): ("inst", "1,000,000"),
            SCALAR.format("ffma"): ("inst", "250"),
            "dram__bytes_read.sum": ("Mbyte", "8"),
            "dram__bytes_write.sum": ("byte", "4,000,000"),
            ACTIVE: ("%", "0"),
        },
    ),
]
LEAD = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size"]


def lead(number: int, kernel: str, device: int = 0) -> dict[str, Any]:
    values = (number, 4242, "python", "127.0.0.1", kernel, 1, 7, "(128, 1, 1)", "(8, 8, 1)")
    return {**dict(zip(LEAD, values, strict=True)), "Device": device, "CC": "9.0"}


def written(header: list[str], rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, header, quoting=csv.QUOTE_ALL, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def long_form(launches: list[tuple[str, dict[str, tuple[str, str]]]]) -> str:
    header = [*LEAD, "Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
    rows = [
        {
            **lead(number, kernel),
            "Section Name": "Command line profiler metrics",
            "Metric Name": metric,
            "Metric Unit": unit,
            "Metric Value": value,
        }
        for number, (kernel, metrics) in enumerate(launches)
        for metric, (unit, value) in metrics.items()
    ]
    return written(header, rows)


def wide_form(launches: list[tuple[str, dict[str, tuple[str, str]]]]) -> str:
    """Units are of a column, so figures are brought to bytes and nanoseconds."""
    units = {"usecond": ("nsecond", 1e3), "Mbyte": ("byte", 1e6), "Kbyte": ("byte", 1e3)}
    header = [*LEAD, "Device", "CC", "device__attribute_display_name"]
    header += list(dict.fromkeys(metric for _, metrics in launches for metric in metrics))
    second, rows = {}, []
    for number, (kernel, metrics) in enumerate(launches):
        row = {**lead(number, kernel), "device__attribute_display_name": "NVIDIA H200"}
        for metric, (unit, value) in metrics.items():
            name, scale = units.get(unit, (unit, 1.0))
            second[metric] = name
            row[metric] = f"{float(value.replace(',', '')) * scale:,.1f}"
        rows.append(row)
    return written(header, [second, *rows])


def profile_of(text: str | bytes) -> Profile:
    data = text if isinstance(text, bytes) else text.encode()
    assert looks_like(data[: 2**16])
    (profile,) = read_source(TraceFile("profile.csv", iter([data])), "run").profiles
    return profile


@pytest.mark.parametrize("form", [long_form, wide_form])
def test_flops_and_bytes_of_kernels(form: Any) -> None:
    profile = profile_of(form(LAUNCHES))
    assert profile.format == "ncu"
    assert profile.get("hardware_flops") == 2 * 2 * 1024**3
    assert profile.get("hbm_read_bytes") == pytest.approx(2 * 4 * 2**20 + 8e6)
    assert profile.get("hbm_write_bytes") == pytest.approx(2 * 2 * 2**20 + 4e6)
    assert profile.get("kernel_count") == 3
    assert profile.get("matrix_active_s") == pytest.approx(10e-6 * 0.5 + 30e-6 * 0.9)
    gemm, add = profile.kernels
    assert (gemm.name, gemm.kind, gemm.count, gemm.flops) == (GEMM, "gemm", 2, 2 * 2 * 1024**3)
    assert gemm.seconds == pytest.approx(40e-6)
    assert gemm.bytes == pytest.approx(2 * 6 * 2**20)
    assert (add.name, add.kind, add.count, add.flops) == (ADD, "pointwise", 1, 1_000_500)
    assert add.bytes == pytest.approx(12e6)
    assert sum(spent.seconds for spent in profile.classes) == pytest.approx(45e-6)
    assert REPLAY_NOTE in profile.notes
    assert "device_span_s" not in profile.values
    assert profile.precision == "bf16"
    if form is wide_form:
        assert profile.device == "NVIDIA H200"
        assert profile.peaks is not None
        assert profile.peaks.flops == load_hardware("h200").device.peak_flops["bf16"].value
    else:
        assert (profile.device, profile.peaks) == (None, None)


@pytest.mark.parametrize("form", [long_form, wide_form])
def test_what_is_missing_in_some_kernels_is_told(form: Any) -> None:
    launches = [*LAUNCHES, (ADD, {"gpu__time_duration.sum": ("nsecond", "1")})]
    profile = profile_of(form(launches))
    assert profile.get("kernel_count") == 4
    assert "dram__bytes_read.sum is given for 3 of 4 kernels only" in profile.warnings


def test_messages_of_the_tool_and_of_the_program_are_passed_over() -> None:
    before = '==PROF== Connected to process 4242\nloss, 3.2, "half\n==PROF== Profiling "gemm": 0%....100% - 8 passes\n'
    text = long_form(LAUNCHES)
    middle = text.index("\n", len(text) // 2) + 1
    noisy = before.replace('"half', "half") + text[:middle] + "==PROF== 50%\n\n" + text[middle:] + "==WARNING== late\n"
    assert profile_of(noisy).values == profile_of(text).values
    assert profile_of(noisy).warnings == ()


def test_a_header_that_comes_again_is_no_kernel() -> None:
    assert profile_of(long_form(LAUNCHES) + wide_form(LAUNCHES)).get("kernel_count") == 6


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_wrong_encodings_are_survived(encoding: str) -> None:
    named = [("vectorized_elementwise_kernel_é", metrics) for _, metrics in LAUNCHES]
    assert profile_of(long_form(named).encode(encoding)).get("kernel_count") == 3


def test_local_memory_is_told_and_not_taken_for_device_memory() -> None:
    spilled = {
        "dram__bytes_read.sum": ("byte", "1,000"),
        "dram__bytes_write.sum": ("byte", "100"),
        "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": ("Kbyte", "1.5"),
        "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": ("byte", "60"),
    }
    profile = profile_of(long_form([(ADD, spilled)]))
    assert "spill_read_bytes" not in profile.values
    assert any("1.46 KiB in l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum" in note for note in profile.notes)


def test_without_times_no_kernels_are_listed() -> None:
    profile = profile_of(long_form([(ADD, {"dram__bytes_read.sum": ("byte", "1")})]))
    assert profile.kernels == ()
    assert profile.get("hbm_read_bytes") == 1
    assert "hbm_write_bytes" not in profile.values
    assert any("gpu__time_duration.sum" in warning for warning in profile.warnings)


def test_devices_have_their_own_profiles() -> None:
    text = long_form(LAUNCHES)
    other = text.replace('"(8, 8, 1)","0"', '"(8, 8, 1)","1"').split("\n", 1)[1]
    profiles = read_source(TraceFile("profile.csv", iter([(text + other).encode()])), "run").profiles
    assert [profile.name for profile in profiles] == ["run device 0", "run device 1"]
    assert profiles[0].values == profiles[1].values


def test_counters_that_were_not_measured_are_told() -> None:
    launch = {"dram__bytes_read.sum": ("byte", "n/a"), "dram__bytes_write.sum": ("furlong", "1")}
    profile = profile_of(long_form([(ADD, launch)]))
    assert "hbm_read_bytes" not in profile.values
    assert "hbm_write_bytes" not in profile.values
    assert sum("without a number" in warning for warning in profile.warnings) == 2


def test_parts_of_a_counter_count_where_the_whole_is_not_given() -> None:
    parts = {f"{TENSOR}_sparsity_off.sum": 10.0, f"{TENSOR}_sparsity_on.sum": 3.0}
    assert tensor_flops(parts) == 13
    assert tensor_flops(parts | {f"{TENSOR}.sum": 13.0, "sm__ops_path_tensor_src_fp8.sum": 5.0}) == 18
    assert tensor_flops({"sm__ops_path_tensor_src_int8.sum": 5.0}) is None
    assert scalar_flops({SCALAR.format("hfma"): 3.0, SCALAR.format("dmul"): 1.0, SCALAR.format("iadd"): 9.0}) == 7
    assert scalar_flops({}) is None


@pytest.mark.parametrize("reverse", [False, True])
def test_an_instruction_counted_twice_counts_once(reverse: bool) -> None:
    by_processor = SCALAR.replace("smsp", "sm")
    counted = {SCALAR.format("ffma"): 3.0, by_processor.format("ffma"): 4.0, by_processor.format("fadd"): 5.0}
    given = dict(sorted(counted.items(), reverse=reverse))
    assert scalar_flops(given) == 2 * 3 + 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234,567", 1234567),
        ("1,234.5", 1234.5),
        ("1.5", 1.5),
        ("9,00", 9),
        ("1.234,5", 1234.5),
        ("1.234.567", 1234567),
        ("1\u202f234,5", 1234.5),
        ("12 (3; 4; 5)", 12),
        ("0", 0),
        ("", None),
        ("n/a", None),
        ("nan", None),
        ("inf", None),
        ("-1", None),
        ("1e400", None),
        ("9" * 100, None),
    ],
)
def test_numbers_as_they_are_printed(text: str, value: float | None) -> None:
    assert number_in(text) == value


@pytest.mark.parametrize("text", ["==PROF== nothing\n", "", "a,b\n1,2\n", '"Kernel Name","Metric Name"\n', "x" * 2**21])
def test_files_without_kernels_are_an_error_in_words(text: str) -> None:
    with pytest.raises(FlopwiseError):
        read_source(TraceFile("profile.csv", iter([text.encode()])), "run")


def test_a_column_that_comes_twice_is_one() -> None:
    twice = "ID,Kernel Name,dram__bytes_read.sum,dram__bytes_read.sum\n,,byte,byte\n0,gemm,5,5\n1,gemm,5\n"
    profile = profile_of(twice)
    assert profile.get("hbm_read_bytes") == 5
    assert any("1 rows" in warning for warning in profile.warnings)


def test_a_cut_file_gives_what_is_there() -> None:
    text = long_form(LAUNCHES)
    profile = profile_of(text[: text.rindex(',"')])
    assert any("cut off" in warning for warning in profile.warnings)
    assert profile.get("hardware_flops") == 2 * 2 * 1024**3


@settings(max_examples=50)
@given(data=st.data(), wide=st.booleans())
def test_damage_raises_nothing_but_our_error(data: st.DataObject, wide: bool) -> None:
    whole = bytearray((wide_form if wide else long_form)(LAUNCHES).encode())
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255) | st.sampled_from(b'",\n\r\0'))
    cut = data.draw(st.integers(0, len(whole)) | st.just(len(whole)))
    try:
        (profile, *_) = read_source(TraceFile("profile.csv", iter([bytes(whole[:cut])])), "run").profiles
    except FlopwiseError:
        return
    assert all(value.value >= 0 for value in profile.values.values())
