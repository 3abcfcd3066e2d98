"""Nsight Systems' SQLite export: databases of the documented tables with an answer that can be worked out by hand."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_hardware
from flopwise.profile.explain.invariants import broken
from flopwise.profile.explain.verdicts import verdicts
from flopwise.profile.read import nsys
from flopwise.profile.read.nsys import MAGIC, looks_like, read_path
from flopwise.records.profile import Profile

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, totalMemory INTEGER, memoryBandwidth INTEGER, smCount INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER, blockX INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL);
"""
NVTX = """
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, textId INTEGER,
    globalTid INTEGER, domainId INTEGER);
"""
METRICS = """
CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INTEGER NOT NULL, metricId INTEGER NOT NULL, metricName TEXT NOT NULL);
CREATE TABLE GPU_METRICS (timestamp INTEGER NOT NULL, typeId INTEGER NOT NULL, metricId INTEGER NOT NULL,
    value INTEGER NOT NULL);
"""
GEMM, ADD, REDUCE = (
    "nvjet_tst_128x256_64x4",
    "void at::native::vectorized_elementwise_kernel<4>",
    "ncclDevKernel_AllReduce",
)
NAMES = {1: GEMM, 2: ADD, 3: REDUCE, 4: "gemm", 5: "step 2"}
PID = 77
PROCESS = PID << 24
THREAD = PROCESS | 5
MS = 1_000_000

KERNELS = [
    # start, end, stream, correlation, name; ends of the span: 0 and 100 ms.
    (0, 20, 7, 1, 1),
    (20, 30, 7, 2, 2),
    (25, 45, 9, 3, 3),  # beside the addition for 5 ms, alone for 15
    (60, 90, 7, 4, 1),
]
COPIES = [(80, 100, 11, 5, 4_000_000, 1)]  # beside the product for 10 ms, alone for 10
LAUNCHES = {1: 0, 2: 1, 3: 2, 4: 55, 5: 56}
# Busy: 0–45 and 60–100, 85 ms. The gap of 15 ms: 10 until the launch at 55, then 5 that a collective was waited for.


def insert(database: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> None:
    marks = ", ".join("?" * len(rows[0]))
    database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)  # noqa: S608


def export(path: Path, *, device: int = 0, pid: int = PID) -> Path:
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA)
        insert(database, "StringIds", list(NAMES.items()))
        insert(database, "META_DATA_EXPORT", [("EXPORT_SCHEMA_VERSION", "3.24.14"), ("EXPORT_PARAM_LAZY", "true")])
        insert(database, "TARGET_INFO_GPU", [(0, "NVIDIA H200", 150_754_820_096, 4_915_200_000_000, 132)])
        add_activity(database, device=device, pid=pid)
    return path


def add_activity(database: sqlite3.Connection, *, device: int, pid: int, moved_ms: int = 0) -> None:
    process = pid << 24
    insert(
        database,
        "CUPTI_ACTIVITY_KIND_KERNEL",
        [
            ((start + moved_ms) * MS, (end + moved_ms) * MS, device, 1, stream, number, process, name, 4, 1, 128)
            for start, end, stream, number, name in KERNELS
        ],
    )
    insert(
        database,
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        [
            ((start + moved_ms) * MS, (end + moved_ms) * MS, device, stream, number, process, size, kind)
            for start, end, stream, number, size, kind in COPIES
        ],
    )
    insert(
        database,
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        [
            ((start + moved_ms) * MS, (start + moved_ms + 1) * MS, process | 5, number, 9)
            for number, start in LAUNCHES.items()
        ],
    )


def changed(path: Path, script: str) -> Path:
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(script)
    return path


def profile_of(path: Path) -> Profile:
    (profile,) = read_path(path, path.name).profiles
    return profile


def milliseconds(profile: Profile, name: str) -> float:
    value = profile.get(name)
    assert value is not None, name
    return value * 1e3


def test_times_of_a_known_recording(tmp_path: Path) -> None:
    path = export(tmp_path / "report.sqlite")
    assert looks_like(path.read_bytes()[:100])
    profile = profile_of(path)
    expected = {
        "device_span_s": 100,
        "device_busy_s": 85,
        "idle_s": 15,
        "idle_host_s": 10,
        "idle_communication_s": 5,
        "idle_copy_s": 0,
        "comm_active_s": 20,
        "comm_exposed_s": 15,
        "copy_active_s": 20,
        "copy_exposed_s": 10,
        "matrix_active_s": 50,
    }
    assert {name: milliseconds(profile, name) for name in expected} == pytest.approx(expected)
    assert profile.get("copy_bytes") == 4_000_000
    assert profile.get("kernel_count") == 4
    assert profile.steps is None
    classes = {spent.kind: spent.seconds * 1e3 for spent in profile.classes}
    assert classes == pytest.approx({"gemm": 50, "pointwise": 10, "communication": 15, "copy": 10})
    assert (profile.kernels[0].name, profile.kernels[0].count) == (GEMM, 2)
    assert {spent.name for spent in profile.kernels} == {GEMM, ADD, REDUCE, "Memcpy HtoD"}
    assert broken(profile) == ()
    assert profile.warnings == ()
    assert profile.system == {"nsys.export_schema_version": "3.24.14"}


def test_the_card_is_found_in_the_catalogue(tmp_path: Path) -> None:
    profile = profile_of(export(tmp_path / "report.sqlite"))
    device = load_hardware("h200").device
    assert profile.device == "NVIDIA H200"
    assert profile.memory_capacity_bytes == 150_754_820_096
    assert profile.peaks is not None
    assert profile.precision == profile.peaks.number_format == "bf16"  # the product's name says so
    assert profile.peaks.flops == device.peak_flops["bf16"].value
    assert device.dram.bandwidth_bytes_per_s is not None
    assert profile.peaks.bandwidth == device.dram.bandwidth_bytes_per_s.value


def test_a_card_that_nobody_knows_has_no_peaks(tmp_path: Path) -> None:
    path = changed(export(tmp_path / "report.sqlite"), "UPDATE TARGET_INFO_GPU SET name = 'NVIDIA Q9000';")
    profile = profile_of(path)
    assert profile.peaks is None
    assert any("not in the catalogue" in note for note in profile.notes)


def test_steps_are_ranges_named_like_them(tmp_path: Path) -> None:
    path = changed(export(tmp_path / "report.sqlite"), NVTX)
    with closing(sqlite3.connect(path)) as database, database:
        ranges = [
            (0, 50, 59, "step 1", None, THREAD, 0),
            (50, 100, 59, None, 5, THREAD, 0),  # "step 2", by its number
            (0, 10, 59, "forward", None, THREAD, 0),
            (0, 99, 59, "Optimizer.step#AdamW.step", None, THREAD, 0),
            (10, None, 34, "step 9", None, THREAD, 0),
        ]
        insert(database, "NVTX_EVENTS", [(a * MS, b and b * MS, *rest) for a, b, *rest in ranges])
    profile = profile_of(path)
    assert profile.steps == 2
    assert milliseconds(profile, "step_wall_s") == pytest.approx(50)
    assert milliseconds(profile, "device_span_s") == pytest.approx(50)
    assert milliseconds(profile, "device_busy_s") == pytest.approx(42.5)
    assert sum(spent.seconds for spent in profile.classes) == pytest.approx(0.0425)
    assert profile.get("kernel_count") == 2
    assert broken(profile) == ()


def test_what_is_launched_in_a_step_belongs_to_it_whenever_it_runs(tmp_path: Path) -> None:
    path = changed(export(tmp_path / "report.sqlite"), NVTX)
    with closing(sqlite3.connect(path)) as database, database:
        # Everything is launched within 57 ms; the last product and its copy run until 100.
        insert(database, "NVTX_EVENTS", [(a * MS, b * MS, 59, "step", None, THREAD, 0) for a, b in ((0, 30), (30, 57))])
        insert(database, "CUPTI_ACTIVITY_KIND_KERNEL", [(200 * MS, 300 * MS, 0, 1, 7, 6, PROCESS, 1, 4, 1, 128)])
        insert(database, "CUPTI_ACTIVITY_KIND_RUNTIME", [(150 * MS, 151 * MS, THREAD, 6, 9)])
    profile = profile_of(path)
    assert profile.steps == 2
    assert milliseconds(profile, "device_busy_s") == pytest.approx(42.5)
    assert "step_wall_s" not in profile.values
    assert any("no step's wall time" in note for note in profile.notes)


@pytest.mark.parametrize(
    ("name", "is_step"),
    [
        ("ProfilerStep#3", True),
        ("iteration 12", True),
        ("Iter_4", True),
        ("train_step", True),
        ("step[7]", True),
        ("global_step: 9", True),
        ("STEP", True),
        ("optimizer step", False),
        ("backward", False),
        ("steps away", False),
        ("multistep", False),
        ("", False),
    ],
)
def test_names_of_steps(name: str, is_step: bool, tmp_path: Path) -> None:
    path = changed(export(tmp_path / "report.sqlite"), NVTX)
    with closing(sqlite3.connect(path)) as database, database:
        insert(database, "NVTX_EVENTS", [(a * MS, (a + 40) * MS, 59, name, None, THREAD, 0) for a in (0, 50)])
    assert profile_of(path).steps == (2 if is_step else None)


def test_ranges_within_each_other_or_far_from_the_gpu_are_no_steps(tmp_path: Path) -> None:
    for number, ranges in enumerate([[(0, 100), (10, 50)], [(500, 600), (600, 700)], [(0, 100)]]):
        path = changed(export(tmp_path / f"report{number}.sqlite"), NVTX)
        with closing(sqlite3.connect(path)) as database, database:
            insert(database, "NVTX_EVENTS", [(a * MS, b * MS, 59, "step", None, THREAD, 0) for a, b in ranges])
        assert profile_of(path).steps is None


def test_more_than_the_whole_bandwidth_is_not_hidden(tmp_path: Path) -> None:
    path = changed(export(tmp_path / "report.sqlite"), METRICS)
    kind, names = 0x0101_0000_0000_0000, ["DRAM Read Bandwidth [Throughput %]", "DRAM Write Bandwidth [Throughput %]"]
    with closing(sqlite3.connect(path)) as database, database:
        insert(database, "TARGET_INFO_GPU_METRICS", [(kind, number, name) for number, name in enumerate(names)])
        insert(database, "GPU_METRICS", [(50 * MS, kind, number, 70) for number in range(2)])
    profile = profile_of(path)
    assert profile.get("mbu") == pytest.approx(1.4)
    assert any(verdict.kind == "invalid" for verdict in verdicts(profile))


def test_sampled_counters(tmp_path: Path) -> None:
    path = changed(export(tmp_path / "report.sqlite"), METRICS)
    kind = 0x0101_0000_0000_0000  # its lowest byte is the GPU's number
    names = [
        "Tensor Active [Throughput %]",
        "DRAM Read Bandwidth [Throughput %]",
        "DRAM Write Bandwidth [Throughput %]",
        "SMs Active [Throughput %]",
        "GPC Clock Frequency [MHz]",
        "Tensor Active / FP16 Active [Throughput %]",
    ]
    with closing(sqlite3.connect(path)) as database, database:
        insert(database, "TARGET_INFO_GPU_METRICS", [(kind, number, name) for number, name in enumerate(names)])
        # The same numbers mean something else for another type, here another GPU.
        insert(database, "TARGET_INFO_GPU_METRICS", [(kind + 1, 3, "Tensor Active [Throughput %]")])
        samples = [(at * MS, (20 if at < 50 else 40, 30, 10, 80, 1500, 99)) for at in range(5, 100, 10)]
        samples.append((500 * MS, (100, 100, 100, 100, 9999, 100)))  # after the end
        insert(
            database,
            "GPU_METRICS",
            [(at, kind, number, value) for at, values in samples for number, value in enumerate(values)],
        )
        insert(database, "GPU_METRICS", [(50 * MS, kind + 1, 3, 100)])
    profile = profile_of(path)
    assert milliseconds(profile, "matrix_active_s") == pytest.approx(30)
    assert profile.get("mbu") == pytest.approx(0.4)
    assert profile.get("unit_share") == pytest.approx(0.8)
    assert profile.get("clock_mean_hz") == pytest.approx(1.5e9)
    assert profile.peaks is not None
    assert profile.peaks.bandwidth is not None
    assert profile.get("hbm_read_bytes") == pytest.approx(0.3 * 0.1 * profile.peaks.bandwidth)
    assert profile.get("hbm_write_bytes") == pytest.approx(0.1 * 0.1 * profile.peaks.bandwidth)
    assert profile.values["hbm_read_bytes"].source == "modelled"
    assert broken(profile) == ()


def test_every_gpu_has_its_own_profile_whatever_its_process_calls_it(tmp_path: Path) -> None:
    path = export(tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER)")
        insert(database, "TARGET_INFO_CUDA_DEVICE", [(0, 0, PID), (3, 0, PID + 1)])
        add_activity(database, device=0, pid=PID + 1, moved_ms=40)
    profiles = read_path(path, "report").profiles
    assert [profile.name for profile in profiles] == ["report GPU 0", "report GPU 3"]
    assert profiles[0].device == "NVIDIA H200"
    assert profiles[1].device is None
    for name in ("device_span_s", "device_busy_s", "idle_host_s", "copy_exposed_s"):
        assert profiles[0].get(name) == pytest.approx(profiles[1].get(name))


def test_older_exports_lack_columns_and_tables(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    changed(
        path,
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, shortName INTEGER);"
        "CREATE TABLE StringIds (id INTEGER, value TEXT); INSERT INTO StringIds VALUES (1, 'gemm');"
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 5000000, 1), (6000000, 10000000, 2);",
    )
    profile = profile_of(path)
    assert milliseconds(profile, "device_busy_s") == pytest.approx(9)
    assert "idle_host_s" not in profile.values
    assert {spent.name for spent in profile.kernels} == {"gemm", "(kernel without a name)"}


def test_graphs_and_messages(tmp_path: Path) -> None:
    path = changed(
        export(tmp_path / "report.sqlite"),
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER);"
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (46000000, 50000000, 0, 7);"
        "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT);"
        "INSERT INTO DIAGNOSTIC_EVENT VALUES (0, 1, 'hello'), (0, 2, 'Not all events\nwere collected.');"
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 1, 0, 1, 7, 1, 1, 1, 1, 1, 1);"
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('a', 1, 0, 1, 7, 1, 1, 1, 1, 1, 1);",
    )
    profile = profile_of(path)
    assert milliseconds(profile, "device_busy_s") == pytest.approx(89)
    assert any("CUDA graphs" in note for note in profile.notes)
    assert profile.warnings == (
        "2 rows of CUPTI_ACTIVITY_KIND_KERNEL make no sense and are left out",
        "nsys: Not all events were collected.",
    )


@pytest.mark.parametrize(
    "script",
    [
        "CREATE VIEW {table} AS SELECT 0 AS start, 5 AS end;",
        "CREATE VIRTUAL TABLE {table} USING rtree(id, start, end); INSERT INTO {table} VALUES (1, 0, 5);",
        "CREATE TABLE other (start INTEGER);",
        "",
    ],
)
def test_views_and_virtual_tables_are_not_looked_at(script: str, tmp_path: Path) -> None:
    path = changed(tmp_path / "report.sqlite", "CREATE TABLE t (x);" + script.format(table=nsys.KERNELS))
    with pytest.raises(FlopwiseError, match="no activity"):
        read_path(path, "report")


def test_columns_that_compute_are_not_run(tmp_path: Path) -> None:
    path = changed(
        tmp_path / "report.sqlite",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER GENERATED ALWAYS AS (length(hex(start))));"
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1);",
    )
    with pytest.raises(FlopwiseError, match="no activity"):
        read_path(path, "report")


@pytest.mark.parametrize(
    "statement", ["SELECT hex(1)", "ATTACH ':memory:' AS other", "PRAGMA writable_schema=ON", "CREATE TEMP TABLE t (x)"]
)
def test_no_statements_but_plain_selections_are_allowed(statement: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(export(tmp_path / "report.sqlite"))) as connection:
        connection.execute(statement)
        nsys._Database(connection, "report")
        with pytest.raises(sqlite3.DatabaseError, match=r"not authorized|too many"):
            connection.execute(statement)


def test_the_file_is_left_alone_and_its_name_is_only_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "odd?mode=rwc&x=%41#é"
    folder.mkdir()
    path = export(folder / "a b.sqlite")
    before = path.read_bytes()
    path.chmod(0o400)
    assert profile_of(path).get("kernel_count") == 4
    assert path.read_bytes() == before
    assert [entry.name for entry in folder.iterdir()] == ["a b.sqlite"]
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("data", [b"", MAGIC, MAGIC + b"\xff" * 4096, b"\x1f\x8b123", b"x" * 8192])
def test_what_is_no_database_is_an_error_in_words(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    path.write_bytes(data)
    with pytest.raises(FlopwiseError):
        read_path(path, "report")
    with pytest.raises(FlopwiseError):
        read_path(tmp_path / "nothing", "report")


def test_progress_is_told(tmp_path: Path) -> None:
    path = export(tmp_path / "report.sqlite")
    told: list[tuple[str, int, int]] = []
    read_path(path, "report", lambda *what: told.append(what))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1] == ("reading report", path.stat().st_size, path.stat().st_size)


def test_a_cut_recording_gives_what_is_there(tmp_path: Path) -> None:
    path = export(tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        rows = [(i * MS, i * MS + MS // 2, 0, 1, 7, i, PROCESS, 1, 4, 1, 128) for i in range(200, 5200)]
        insert(database, "CUPTI_ACTIVITY_KIND_KERNEL", rows)
    data = path.read_bytes()
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(data[: len(data) * 3 // 5 // 4096 * 4096])
    profile = profile_of(cut)
    count = profile.get("kernel_count")
    assert count is not None
    assert 0 < count < 5004
    assert any("in part only" in warning for warning in profile.warnings)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_raises_nothing_but_our_error(data: st.DataObject, tmp_path: Path) -> None:
    good = tmp_path / "good.sqlite"
    if not good.exists():
        changed(export(good), NVTX + METRICS)
    whole = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(0, 12))):
        page = data.draw(st.integers(0, len(whole) // 4096 - 1))
        # Headers and cell pointers are at a page's beginning, rows at its end.
        within = data.draw(st.integers(0, 120) | st.integers(3700, 4095))
        whole[page * 4096 + within] = data.draw(st.integers(0, 255))
    cut = data.draw(st.just(len(whole)) | st.integers(0, len(whole)))
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(whole[:cut])
    try:
        read_path(bad, "report")
    except FlopwiseError:
        return
