"""`flopwise validate`: every table, files of one's own, the words that go with the figures, and the figures to hold."""

from __future__ import annotations

import csv
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import ROOT
from flopwise.cli import app
from flopwise.references.published import TABLES, megatron, mpt, nanotron

TABLE_FILES = ROOT / "tables"
KEYS = {
    *("table", "n", "median_error", "mean_error", "p90_error", "max_error", "rank_correlation"),
    *("schema", "protocol", "rows", "skipped", "inside", "inside_without", "peers", "anchored"),
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["validate", *arguments])


@cache
def record(*arguments: str) -> dict[str, Any]:
    """What `-o json` prints; no test changes a file between two of its runs."""
    found = run(*arguments, "-o", "json")
    assert found.exit_code == 0, found.output
    read = json.loads(found.stdout)
    assert isinstance(read, dict)
    return read


def refused(*arguments: str) -> FlopwiseError:
    found = run(*arguments)
    assert isinstance(found.exception, FlopwiseError), found.output
    assert found.exception.exit_code == 2
    assert found.exception.hint
    return found.exception


def rows_of(file: str) -> list[dict[str, str]]:
    with (TABLE_FILES / file).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def write(path: Path, rows: list[dict[str, str]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


# -- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "rows", "counted"),
    [("mpt", 198, 191), ("nanotron", 830, 130), ("vtrain", 1440, 1440), ("megatron", 10, 10), ("megatron-2", 12, 6)],
)
def test_every_table_in_sample(table: str, rows: int, counted: int) -> None:
    found = record(table)
    assert set(found) - {"oom_accuracy"} == KEYS
    assert ("oom_accuracy" in found) == (table != "vtrain")
    assert (found["table"], found["n"], len(found["rows"])) == (table, counted, rows)
    if table != "megatron-2":
        assert found["protocol"].startswith("in sample, not held out: ")
        assert not any(row["held_out"] for row in found["rows"])
        assert found["median_error"] < 0.06


def test_conformance_to_the_reference() -> None:
    found = record("deepflow")
    assert set(found) == KEYS
    assert found["n"] == 256
    assert found["max_error"] < 1e-9
    assert "predictions and not measurements" in found["protocol"]
    assert record("deepflow", "--leave-out", "model") == found


def test_the_second_table_is_predicted_and_its_misses_are_told() -> None:
    found = record("megatron-2", "--leave-out", "model")
    pipelines = [row["error"] for row in found["rows"] if "zero3" not in row["label"]]
    sharded = [row["error"] for row in found["rows"] if "zero3" in row["label"]]
    assert max(pipelines) < 0.1
    # DeepSpeed's ZeRO-3 of 2021 ran up to four times slower than Megatron's kernels tell: its rows are told aside.
    assert max(sharded) > 1
    assert [row["counted"] for row in found["rows"]] == ["zero3" not in row["label"] for row in found["rows"]]
    assert "ZeRO-3" in found["protocol"]
    by_file = record("megatron", str(TABLE_FILES / megatron.FILES[1]))
    assert (by_file["table"], by_file["n"]) == ("megatron-2", 6)


def test_fp8_rows_are_aside() -> None:
    found = record("mpt")
    aside = [row for row in found["rows"] if not row["counted"]]
    assert len(aside) == 7
    assert all("fp8" in row["label"] and row["error"] is not None for row in aside)
    assert "fp8 rows are predicted with the same constants and listed aside" in found["protocol"]
    assert "7 rows not in these figures" in run("mpt").stdout


def test_rows_of_the_faulty_node_are_counted() -> None:
    found = record("nanotron")
    faulty = [row for row in found["rows"] if row["row"] in (200, 201, 209, 219, 220)]
    assert all(row["error"] > 1 and row["counted"] for row in faulty)
    assert "5 rows of a node whose links" in found["protocol"]


# -- the targets: rows that nothing was fitted to -------------------------------------------------------------


# -- forms -----------------------------------------------------------------------------------------------------------


def test_forms_and_rows() -> None:
    assert "the 10 farthest off" in run("megatron").stdout
    assert "all 12 rows" in run("megatron-2", "--all-rows").stdout
    lines = list(csv.DictReader(io.StringIO(run("megatron", "-o", "csv").stdout)))
    assert [int(line["row"]) for line in lines] == list(range(1, 11))
    assert run("megatron", "-o", "md").stdout.startswith("| figure")


def test_nothing_but_data_on_stdout_and_no_bar_without_a_terminal(tmp_path: Path) -> None:
    own = write(tmp_path / "own.csv", rows_of(megatron.FILES[0])[:3])
    found = run("megatron", own, "--leave-out", "model", "-o", "json")
    assert found.stderr == ""
    json.loads(found.stdout)


# -- files of one's own ----------------------------------------------------------------------------------------------


def test_a_copy_of_the_shipped_table_is_in_sample_and_says_so(tmp_path: Path) -> None:
    copy = write(tmp_path / "copy.csv", rows_of(megatron.FILES[0]))
    found, shipped = record("megatron", copy), record("megatron")
    assert found["rows"] == shipped["rows"]
    assert "in sample, not held out" in found["protocol"]


def test_nothing_is_fitted_to_a_file_unless_asked(tmp_path: Path) -> None:
    rows = rows_of(mpt.FILE)[:12]
    slower = [{**row, "tokens_per_s": str(0.5 * float(row["tokens_per_s"]))} for row in rows]
    own, shipped = record("mpt", write(tmp_path / "own.csv", slower)), record("mpt")
    assert [row["predicted_s"] for row in own["rows"]] == [row["predicted_s"] for row in shipped["rows"][:12]]
    assert "nothing was fitted to this file" in own["protocol"]
    assert own["median_error"] > 0.4
    mixed = record("mpt", write(tmp_path / "mixed.csv", rows[:4] + slower[4:]))
    assert "4 of its 12 rows are in the shipped table" in mixed["protocol"]


def test_rows_of_a_new_size_are_held_out(tmp_path: Path) -> None:
    rows = [{**row, "num_params": "1.5"} for row in rows_of(nanotron.FILE)[:3]]
    found = record("nanotron", write(tmp_path / "own.csv", rows))
    assert all(row["held_out"] for row in found["rows"])


def test_a_file_too_small_to_hold_a_size_out(tmp_path: Path) -> None:
    own = write(tmp_path / "own.csv", rows_of(megatron.FILES[0])[:1])
    assert "no row is left to fit" in refused("megatron", own, "--leave-out", "model").what
    two = write(tmp_path / "two.csv", rows_of(megatron.FILES[0])[:2])
    found = record("megatron", two, "--leave-out", "model")
    assert found["n"] == 2
    assert "the file's rows of all other sizes" in found["protocol"]
    assert all(row["held_out"] for row in found["rows"])


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_wrong_words() -> None:
    assert "cannot be 'mtp'" in refused("mtp").what
    assert "--leave-out cannot be 'size'" in refused("mpt", "--leave-out", "size").what
    assert "--output cannot be 'html'" in refused("mpt", "-o", "html").what


@pytest.mark.parametrize("table", [*TABLES, "deepflow"])
def test_files_that_are_no_such_table(table: str, tmp_path: Path) -> None:
    assert "there is no file" in refused(table, str(tmp_path / "none.csv")).what
    assert "is a folder" in refused(table, str(tmp_path)).what
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    assert "lacks the column" in refused(table, str(tmp_path / "other.csv")).what
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    assert "is empty" in refused(table, str(tmp_path / "empty.csv")).what


@pytest.mark.parametrize(
    ("table", "file", "changes", "expected"),
    [
        ("mpt", mpt.FILE, {"gpu": "rtx-4090"}, "rtx-4090 cannot join 64 devices"),
        ("mpt", mpt.FILE, {"gpu": "a100-80gb", "precision": "amp_fp8"}, "a100-80gb has no peak for fp8"),
        ("nanotron", nanotron.FILE, {"tp": "7"}, "row 1: line 2: llama-1.34b cannot be split that way: 7 tensor ranks"),
        ("deepflow", "deepflow_lstm.csv", {"core": "x"}, "line 2: core: cannot read 'x'"),
        ("deepflow", "deepflow_lstm.csv", {"time_s": "0"}, "line 2: time_s = '0' is out of range"),
        ("deepflow", "deepflow_lstm.csv", {"extra": "1"}, "line 2: there is no setting 'extra'"),
    ],
)
def test_rows_that_cannot_be_predicted(
    table: str, file: str, changes: dict[str, str], expected: str, tmp_path: Path
) -> None:
    assert expected in str(refused(table, write(tmp_path / "own.csv", [{**rows_of(file)[0], **changes}])))
