"""Grids of memory caps: the table, the files and the heatmap hold every cell, whatever their number."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flopwise.cli.output import schema_json
from flopwise.records.plan import CapCell, Forecast, Plan, Planned, Residency
from flopwise.report.cap_grids import best_cell, caps_figure, draw_caps, grid_document, grid_record
from flopwise.report.document import to_csv, to_markdown
from flopwise.work.parameters import ENDS
from tests.support import printing

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"


def planned_at(device_bytes: int, host_bytes: int, tokens_per_s: float) -> Planned:
    plan = Plan(
        hardware="h200",
        device_memory_bytes=device_bytes,
        host_memory_bytes=host_bytes,
        sequence_tokens=8192,
        chunk_tokens=16384,
        chunks_per_round=1,
        rounds_per_step=12,
        head_chunk_tokens=1024,
        attention="sequence",
        weights=Residency(blocks=2, ends=ENDS),
        gradients=Residency(blocks=2, ends=ENDS),
        optimizer_state=Residency(blocks=2, ends=ENDS),
        activation_slots=2,
        saves=("F", "f"),
        precision="bf16",
    )
    forecast = Forecast(
        step_s=196608 / tokens_per_s,
        tokens_per_s=tokens_per_s,
        mfu=min(0.7, tokens_per_s / 20_000),
        hfu=0.7,
        peak_flops=989e12,
        ceiling_share=0.9,
        compute_s=1.0,
        recompute_s=0.0,
        update_s=0.0,
        exposed_copy_s=0.0,
        idle={},
        copy_in_bytes=0,
        copy_out_bytes=0,
        link_share=0.0,
        bound="compute",
        device_bytes={"weights": device_bytes // 2},
        host_bytes={"activations": host_bytes // 2},
        model_flops=1,
        hardware_flops=1,
        convention="causal",
        peak_format="bf16",
    )
    return Planned(model="llama-3-8b", plan=plan, forecast=forecast, reasons={})


def some_cells(columns: int, rows: int) -> list[CapCell]:
    """Speed grows with either cap and levels off; the smallest caps hold nothing."""
    cells = []
    for row in range(rows):
        for column in range(columns):
            device, host = 8 * (column + 1) * GIB, 32 * (row + 1) * GIB
            if columns > 1 and column + row < 2:
                cell = CapCell(
                    device_memory_bytes=device,
                    host_memory_bytes=host,
                    why_not=f"the smallest plan needs {17 - row}.3 GiB of device memory",
                    smallest_device_bytes=int((17.3 - row) * GIB),
                    hints=("--seq 2k",),
                )
            else:
                speed = min(11_300.0, 4_000 + 1_100 * column + 700 * row)
                planned = planned_at(device, host, speed)
                cell = CapCell(device_memory_bytes=device, host_memory_bytes=host, planned=planned)
            cells.append(cell)
    return cells


def shown(cells: list[CapCell], width: int) -> str:
    return printing.shown(grid_document(cells, "llama-3-8b · NVIDIA H200 · sequence 8,192"), width)


def grid_csv(cells: list[CapCell]) -> str:
    return to_csv(grid_document(cells, ""))


def grid_json(cells: list[CapCell]) -> str:
    return schema_json(grid_record(cells), "capped-plan")


def grid_markdown(cells: list[CapCell]) -> str:
    return to_markdown(grid_document(cells, ""))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("shape", [(1, 1), (4, 5), (10, 12)])
def test_a_page_holds_every_cell(shape: tuple[int, int], width: int) -> None:
    cells = some_cells(*shape)
    text = shown(cells, width)
    assert all(len(line) <= width for line in text.splitlines())
    missing = sum(cell.planned is None for cell in cells)
    grid = text[: text.index("tok/s over MFU")]
    assert grid.count("no fit") == missing
    assert grid.count(" %") == len(cells) - missing
    assert grid.count("★") == 1
    assert grid.count("best") == 1
    for device in {cell.device_memory_bytes for cell in cells}:
        assert f"{device // GIB}.0 GiB" in grid or f"{device // GIB}.00 GiB" in grid


def test_a_page_says_why_nothing_fits() -> None:
    text = " ".join(shown(some_cells(4, 5), 80).split())
    assert "✗ no fit: nothing fits these caps (3 of 20)" in text
    assert "✗ the smallest plan needs 17.3 GiB of device memory" in text
    assert "hint: something fits from device 17.3 GiB with host 32.0 GiB, 16.3 GiB with host 64.0 GiB" in text
    assert "★ best: the least device memory that is as fast as any (device 32.0 GiB, host 160 GiB)" in text
    many = [replace(cell, planned=None, why_not=f"reason {index}") for index, cell in enumerate(some_cells(4, 5))]
    text = shown(many, 80)
    assert "✗ and 17 more reasons" in text
    assert "★" not in text


def test_of_equal_ones_the_best_is_the_smallest() -> None:
    cells = [
        CapCell(
            device_memory_bytes=device * GIB,
            host_memory_bytes=host * GIB,
            planned=planned_at(device * GIB, host * GIB, speed),
        )
        for device, host, speed in ((80, 64, 10_001.0), (40, 128, 10_000.0), (40, 64, 10_000.5), (20, 64, 9_000.0))
    ]
    best = best_cell(cells)
    assert best is cells[2]
    assert best_cell([CapCell(device_memory_bytes=1, host_memory_bytes=1)]) is None


def test_csv_parses_back() -> None:
    cells = some_cells(4, 5)
    rows = list(csv.DictReader(io.StringIO(grid_csv(cells))))
    assert len(rows) == 20
    assert sum(row["best"] == "True" for row in rows) == 1
    for row, cell in zip(rows, cells, strict=True):
        assert int(row["device_memory_bytes"]) == cell.device_memory_bytes
        assert (row["fits"] == "True") == (cell.planned is not None)
        if cell.planned is None:
            assert row["tokens_per_s"] == ""
            assert row["why_not"] == cell.why_not
        else:
            assert float(row["tokens_per_s"]) == cell.planned.forecast.tokens_per_s
            assert int(row["device_bytes"]) == cell.planned.forecast.device_total
    nothing = [replace(cell, planned=None) for cell in cells]
    assert grid_csv(nothing).splitlines()[0] == grid_csv(cells).splitlines()[0]


def test_json_has_a_record_a_cell() -> None:
    cells = some_cells(4, 5)
    records = json.loads(grid_json(cells))["rows"]
    assert len(records) == 20
    for record, cell in zip(records, cells, strict=True):
        assert record["host_memory_bytes"] == cell.host_memory_bytes
        assert record["fits"] == (record["plan"] is not None)
        if cell.planned is None:
            assert record["why_not"]
            assert record["hints"] == ["--seq 2k"]
        else:
            assert record["plan"]["mfu"] == cell.planned.forecast.mfu
            assert record["plan"]["host_saved"]["full"] == 1
    assert [record["best"] for record in records].count(True) == 1


def test_markdown_is_a_grid() -> None:
    table, _, plans = grid_markdown(some_cells(4, 5)).partition("\n\n")
    lines = table.splitlines()
    assert len(lines) == 7
    assert len(plans.splitlines()) == 2 + sum(cell.planned is not None for cell in some_cells(4, 5))
    assert lines[0].count("device") == 4
    assert "✗ does not fit" in lines[2]
    assert "**★ best 10,100 tok/s, 50.5 % MFU**" in lines[-1]
    # A pair that was not asked for stays open.
    assert "–" in grid_markdown(some_cells(4, 5)[:-1])


# -- the heatmap ----------------------------------------------------------------------------------------------------


def drawn(cells: list[CapCell], title: str, folder: Path) -> str:
    """The SVG of a grid."""
    draw_caps(cells, title, folder / "caps.svg")
    return (folder / "caps.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("title", ["llama-3-8b", "What does more memory buy? " * 9, 'a<b & c>d \x00 "e" $x^$'])
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (4, 5), (10, 12)])
def test_no_two_labels_overlap(shape: tuple[int, int], title: str) -> None:
    from matplotlib.text import Text

    figure = caps_figure(some_cells(*shape), title)
    figure.draw_without_rendering()
    paper = figure.bbox
    found = [text.get_window_extent() for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert len(found) > shape[0] * shape[1]
    for index, box in enumerate(found):
        assert paper.x0 <= box.x0 and box.x1 <= paper.x1 and paper.y0 <= box.y0 and box.y1 <= paper.y1, box
        assert not any(box.overlaps(other) for other in found[:index]), (box, found)


def test_a_heatmap_needs_nothing_else(tmp_path: Path) -> None:
    svg = drawn(some_cells(4, 5), "llama-3-8b", tmp_path)
    for word in ("<script", "@import", "onload", "nan"):
        assert word not in svg.lower()
    # The colours themselves are within the file; nothing else is referred to but parts of it.
    assert all(target.startswith(("#", "data:image/png;base64")) for target in re.findall(r'href="([^"]{0,30})', svg))
    for words in (
        "device memory (GiB)",
        "host memory (GiB)",
        "does not fit",
        "★ best",
        "10,100",
        "10,100 tok/s",
        "50.5 %",
        "<title>device 32.0 GiB, host 160 GiB: 10,100 tok/s, 50.5 % MFU, step 19.5 s, bound by compute</title>",
    ):
        assert words in svg, words


def test_small_differences_stay_small() -> None:
    cells = [
        CapCell(
            device_memory_bytes=device * GIB,
            host_memory_bytes=0,
            planned=planned_at(device * GIB, 0, 10_000.0 + device),
        )
        for device in (10, 20)
    ]
    (image,) = caps_figure(cells, "nearly the same").axes[0].images
    low, high = image.get_clim()
    assert (low, high) == pytest.approx((0.9 * 10_020, 10_020))


@st.composite
def any_cells(draw: st.DrawFn) -> list[CapCell]:
    pairs = draw(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30))
    scale = draw(st.sampled_from([2**20, 1000**3, GIB, 2**40]))
    cells = []
    for device, host in sorted(pairs):
        caps = (device + 1) * scale, host * scale
        speed = draw(st.none() | st.floats(1e-3, 1e7))
        why_not = "" if speed else draw(st.text(st.characters(exclude_categories=("C", "Z")), max_size=30))
        planned = planned_at(*caps, speed) if speed else None
        cells.append(CapCell(device_memory_bytes=caps[0], host_memory_bytes=caps[1], planned=planned, why_not=why_not))
    return cells


@settings(max_examples=60, deadline=None)
@given(cells=any_cells(), width=st.sampled_from([80, 120]))
def test_any_grid_is_whole(cells: list[CapCell], width: int) -> None:
    plain = [replace(cell, why_not="too large") for cell in cells]
    text = shown(plain, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert text[: text.index("tok/s over MFU")].count(" %") == sum(cell.planned is not None for cell in cells)
    rows = list(csv.DictReader(io.StringIO(grid_csv(cells))))
    assert len(json.loads(grid_json(cells))["rows"]) == len(rows) == len(cells)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=any_cells(), title=st.text(max_size=200).map(lambda text: f"> {text}"))
def test_any_heatmap_is_whole(cells: list[CapCell], title: str, tmp_path: Path) -> None:
    root = ET.fromstring(drawn(cells, title, tmp_path))  # noqa: S314 - written a line ago
    told = [text.text or "" for text in root.iter(f"{SVG}title")]
    assert sum(words.startswith("device ") for words in told) == len(cells)
