"""Pictures of results: what stands in them, that they are the same every time, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.references.published.results import read_results
from flopwise.report.plots import AXES, VALUES, Kind, plot, points
from flopwise.store.results import Result
from tests.support.result_rows import GIB, a_result, lost

DOCUMENT = Path(__file__).parents[1] / "data" / "mpt_tables.md"


def caps() -> list[Result]:
    """Two models under nine pairs of caps each; the smallest pair does not fit."""
    rows = []
    for model, factor in (("llama-3-8b", 1.0), ("mpt-7b", 0.5)):
        for device in (16, 24, 40):
            for host in (64, 96, 128):
                place = {"device_cap_bytes": device * GIB, "host_cap_bytes": host * GIB, "model": model}
                name = {**place, "cell": f"{model}{device}{host}"}
                fits = device + host > 80
                speed = factor * (9000 + 10 * device + host)
                rows.append(a_result(**name, tokens_per_s=speed) if fits else lost("oom", "too small", **name))
    return rows


def text_of(rows: Sequence[Result], kind: Kind, folder: Path, **axes: str) -> str:
    path = folder / "picture.svg"
    plot(rows, kind, path, **axes)
    return path.read_text(encoding="utf-8")


def test_a_heatmap_writes_every_value_and_what_did_not_fit(tmp_path: Path) -> None:
    text = text_of(caps(), "heatmap", tmp_path, x="device-cap", y="host-cap")
    assert text.count(">OOM<") == 2
    for words in ("16 GiB", "40 GiB", "64 GiB", "128 GiB", "device memory cap", "host memory cap", "tokens/s"):
        assert f">{words}<" in text, words
    # 9000 + 10 · 40 + 128, and half of it.
    assert ">9,528<" in text
    assert ">4,764<" in text
    assert ">llama-3-8b<" in text
    assert ">h200 · bf16<" in text


def test_lines_for_each_model_of_the_published_rows(tmp_path: Path) -> None:
    rows = [row for row in read_results(DOCUMENT) if row.hardware == "a100_40gb" and row.sequence_tokens == 2048]
    text = text_of(rows, "scaling", tmp_path, x="devices", value="mfu")
    for words in ("mpt-70b", "mpt-125m", "8", "128", "devices", "MFU", "a100_40gb · bf16 PURE", "0.0 %"):
        assert f">{words}<" in text, words


def test_what_was_lost_on_a_line_is_told(tmp_path: Path) -> None:
    rows = [a_result(sequence_tokens=2048), a_result(), lost("oom", "no", sequence_tokens=65_536)]
    text = text_of(rows, "scaling", tmp_path)
    assert ">× OOM<" in text
    assert ">64k<" in text


def test_the_spread_is_a_band(tmp_path: Path) -> None:
    spread = [a_result(sequence_tokens=tokens) for tokens in (2048, 8192)]
    exact = [a_result(sequence_tokens=tokens, tokens_per_s_p20=None) for tokens in (2048, 8192)]
    assert "FillBetweenPolyCollection" in text_of(spread, "scaling", tmp_path)
    assert "FillBetweenPolyCollection" not in text_of(exact, "scaling", tmp_path)


def test_repeats_of_a_cell_are_their_median_and_the_best_cell_counts() -> None:
    def found(rows: list[Result], value: str = "tokens_per_s") -> tuple[float | None, ...]:
        (point,) = points(rows, lambda row: row.sequence_tokens, VALUES[value]).values()
        return point.value, point.low, point.high

    def a_row(cell: str, speed: float) -> Result:
        return a_result(cell=cell, tokens_per_s=speed, tokens_per_s_p20=speed - 5, tokens_per_s_p80=speed + 5)

    repeats = [a_row("a", 100.0), a_row("a", 110.0), a_row("a", 150.0)]
    assert found(repeats) == (110.0, 95.0, 155.0)
    assert found([*repeats, a_row("b", 120.0), lost("oom", "no", cell="c")]) == (120.0, 115.0, 125.0)
    # An MFU has the relative spread of the speed that it comes from.
    value, low, high = found(
        [a_result(mfu=0.5, tokens_per_s=100.0, tokens_per_s_p20=90.0, tokens_per_s_p80=120.0)], "mfu"
    )
    assert value == 0.5
    assert low == pytest.approx(0.45)
    assert high == pytest.approx(0.6)


def test_a_utilisation_beyond_the_peak_is_not_drawn(tmp_path: Path) -> None:
    rows = [a_result(cell="a"), a_result(cell="b", batch_sequences=48, mfu=1.33)]
    text = text_of(rows, "heatmap", tmp_path, value="mfu")
    assert ">error<" in text
    assert "133" not in text


@pytest.mark.parametrize("kind", ["heatmap", "scaling"])
def test_the_same_rows_give_the_same_bytes(kind: Kind, tmp_path: Path) -> None:
    axes = {"x": "device-cap", "y": "host-cap"}
    for suffix in (".svg", ".png"):
        one, two = tmp_path / f"one{suffix}", tmp_path / f"two{suffix}"
        plot(caps(), kind, one, **axes)
        plot(caps(), kind, two, **axes)
        assert one.read_bytes() == two.read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "<dc:date>" not in (tmp_path / "one.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "one.svg", "two.png", "two.svg"]


@pytest.mark.parametrize("name", ["$x$ \\frac{", "日本語", "<b>&", "a" * 200, "\n\x1b"])
def test_any_name_can_be_drawn(name: str, tmp_path: Path) -> None:
    rows = [a_result(model=name, sequence_tokens=tokens) for tokens in (1024, 4096)] + [a_result()]
    assert "<svg" in text_of(rows, "scaling", tmp_path)
    assert "<svg" in text_of(rows, "heatmap", tmp_path)


@pytest.mark.parametrize(
    ("kind", "file", "axes", "what"),
    [
        ("heatmap", "a.svg", {"x": "sequense"}, "there is no axis for --x called 'sequense'"),
        ("scaling", "a.svg", {"value": "loss"}, "there is no value to draw called 'loss'"),
        ("heatmap", "a.svg", {"x": "batch", "y": "batch"}, "both axes are 'batch'"),
        ("pie", "a.svg", {}, "there is no kind of picture 'pie'"),
        ("scaling", "a.pdf", {}, "a picture cannot be written to"),
        ("scaling", "nowhere/a.svg", {}, "cannot write"),
        ("scaling", "nowhere/a.png", {}, "cannot write"),
    ],
    ids=["axis", "value", "twice", "kind", "suffix", "svg-folder", "png-folder"],
)
def test_mistakes_are_told(kind: Kind, file: str, axes: dict[str, str], what: str, tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError) as caught:
        plot([a_result()], kind, tmp_path / file, **axes)
    assert what in caught.value.what
    assert caught.value.hint


def test_nothing_to_draw_and_too_much(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    for rows, kind, what in (
        ([], "scaling", "there is nothing to draw of tokens/s"),
        ([lost("oom", "no")], "scaling", "there is nothing to draw"),
        ([a_result(model=f"m{number}") for number in range(11)], "scaling", "11 lines are too many"),
        ([a_result(model=f"m{number}") for number in range(7)], "heatmap", "7 heatmaps are too many"),
        ([a_result(batch_sequences=number) for number in range(1, 26)], "heatmap", "1 × 25 places"),
    ):
        with pytest.raises(FlopwiseError, match=what):
            plot(rows, kind, path)  # type: ignore[arg-type]
    assert not path.exists()


def test_every_axis_can_be_drawn(tmp_path: Path) -> None:
    for name, axis in AXES.items():
        rows = [a_result(**{axis.field: count}) for count in (1, 2, 4096)]
        assert f">{axis.title}<" in text_of(rows, "scaling", tmp_path, x=name)
        assert f">{axis.title}<" in text_of(rows, "scaling", tmp_path, x=axis.field)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FlopwiseError, match="matplotlib") as caught:
        plot([a_result()], "scaling", tmp_path / "a.svg")
    assert caught.value.hint == "pip install 'flopwise[plots]'"


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = (
        "import sys, flopwise.report.plots, flopwise.cli.report, flopwise.report.results\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_no_state_of_pyplot_is_touched(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from flopwise.report.plots import plot\n"
        "from tests.support.result_rows import a_result\n"
        f"plot([a_result()], 'scaling', Path({str(tmp_path / 'a.png')!r}))\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=Path(__file__).parents[2])


def test_what_nobody_has_run_is_drawn_as_predicted(tmp_path: Path) -> None:
    planned = [
        Result(
            cell=f"{place:012d}",
            state="planned",
            source="predicted",
            model="mpt-1b",
            hardware="h200",
            sequence_tokens=1024 * 2**place,
            predicted_fits=place < 3,
            predicted_tokens_per_s=1000.0 * (4 - place),
        )
        for place in range(4)
    ]
    plot(planned, "scaling", tmp_path / "lines.svg")
    assert "predicted" in (tmp_path / "lines.svg").read_text(encoding="utf-8")
    # Beside one that ran only that one is drawn: predictions are not ranked with it.
    ran = replace(planned[0], state="ok", source="measured", tokens_per_s=500.0)
    plot([ran, *planned[1:]], "scaling", tmp_path / "ran.svg")
    assert "predicted" not in (tmp_path / "ran.svg").read_text(encoding="utf-8")
