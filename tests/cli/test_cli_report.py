"""`flopwise report` and `flopwise collect` as a user types them, over stores and files."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model, model_table
from flopwise.cli.report import collect, gather_rows
from flopwise.references.published.benchmark_tables import markdown_tables
from flopwise.references.published.results import read_results
from flopwise.report.results_files import read_results_csv, results_csv
from flopwise.setup.written import CellSetup, cell_id
from flopwise.store.cells import Attempt, Cell, SweepRecord
from flopwise.store.results import FIELDS, fastest
from flopwise.store.runs import VARIABLE, new_run, write_record
from flopwise.store.sweeps import new_attempt, write_cell, write_sweep
from tests.cli.test_cli_fuzz import answered
from tests.report.test_training_report import a_measurement, a_record
from tests.support.result_rows import OOM_REASON, a_result, lost, mixed

DOCUMENT = str(Path(__file__).parents[1] / "data" / "mpt_tables.md")
OOM = CellSetup(
    model=model_table(load_model("gpt2")),
    hardware="h200",
    devices=1,
    sequence_tokens=65_536,
    batch_sequences=16,
    micro_batch_sequences=16,
    precision="bf16",
)


@pytest.fixture
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To work in, on a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def store(empty_folder: None) -> Path:
    """Two runs, the second faster; a damaged one; a sweep whose one cell ran out of memory."""
    del empty_folder
    folder = Path("runs")
    one, two, damaged = (new_run(folder) for _ in range(3))
    write_record(one, a_record(id="0001"))
    faster = a_measurement(tokens_per_s=20_000.0, sequence_tokens=4096)
    write_record(two, a_record(id="0002", measurement=faster, started="2026-03-02T12:00:00+01:00"))
    (damaged / "record.json").write_text('{"id": "0003", "sta')
    write_cell(folder, Cell(id=cell_id(OOM), settings=OOM))
    began = "2026-03-01T12:00:00+01:00"
    attempt = Attempt(number=0, cell=cell_id(OOM), repeat=1, state="oom", started=began, steps=5, reason=OOM_REASON)
    new_attempt(folder, attempt)
    write_sweep(folder, SweepRecord(name="grid", created=began, cells=(cell_id(OOM),), steps=5))
    return folder


def said(words: list[str]) -> str:
    code, out, err = answered(["report", *words])
    assert code == 0, err
    return out


def refused(words: list[str]) -> str:
    code, out, err = answered(["report", *words])
    assert (code, out) == (2, "")
    assert "hint: " in err
    return err


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


# -- what is named ---------------------------------------------------------------------------------------------------


def test_everything_of_a_store(store: Path) -> None:
    del store
    code, out, err = answered(["report"])
    assert code == 0
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("run "))
    assert [line.split()[1] for line in lines[start + 1 : start + 5]] == ["ok", "ok", "unreadable", "oom"]
    assert "note: runs/0003: " in err
    assert OOM_REASON in " ".join(out.split())


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        (["1"], ["0001"]),
        (["0002", "1"], ["0002", "0001"]),
        (["1-2"], ["0001", "0002"]),
        (["runs/0002"], ["0002"]),
        (["grid"], [""]),
        (["grid", "2"], ["", "0002"]),
    ],
    ids=["number", "two", "range", "path", "sweep", "both"],
)
def test_runs_and_sweeps_by_name(store: Path, names: list[str], runs: list[str]) -> None:
    del store
    assert [row["run"] for row in rows_of(said([*names, "-o", "csv"]))] == runs


def test_files_beside_runs(store: Path) -> None:
    del store
    Path("mine.csv").write_bytes(results_csv([a_result(run="0900")]).encode())
    assert [row["run"] for row in rows_of(said(["mine.csv", "1", "-o", "csv"]))] == ["0900", "0001"]
    assert len(rows_of(said([DOCUMENT, "-o", "csv"]))) == 198


def test_an_empty_store_is_told_with_a_way_out(empty_folder: None) -> None:
    del empty_folder
    error = refused([])
    assert "there are no results in runs" in error
    assert "--store FOLDER" in error
    assert "there is no file 'nothing.csv'" in refused(["nothing.csv"])
    assert "no run, sweep or cell is called" in refused(["nothing"])


# -- forms -----------------------------------------------------------------------------------------------------------


def test_every_form_holds_every_row(store: Path) -> None:
    del store
    rows = gather_rows((), "")
    assert read_results_csv(said(["-o", "csv"])) == rows
    found = json.loads(said(["-o", "json"]))["rows"]
    assert [item["state"] for item in found] == ["ok", "ok", "unreadable", "oom"]
    assert list(found[0]) == list(FIELDS)
    tables = markdown_tables(said(["-o", "md"]))
    assert sum(len(table.rows) for table in tables) == 4


def test_forms_go_to_files(store: Path) -> None:
    del store
    for form in ("table", "md", "csv", "json"):
        code, out, err = answered(["report", "-o", form, "-w", f"out.{form}"])
        assert (code, out) == (0, "")
        assert f"wrote out.{form}" in err
    assert read_results(Path("out.csv")) == read_results(Path("out.json")) == gather_rows((), "")
    assert "\x1b" not in Path("out.table").read_text()


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_table_keeps_to_the_terminal(store: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    del store
    monkeypatch.setenv("COLUMNS", str(width))
    for words in ([], [DOCUMENT], ["--price", "2.5"]):
        assert max(map(cell_len, said(words).splitlines())) <= width


def test_a_page_goes_to_a_file_whose_path_is_printed(store: Path) -> None:
    del store
    assert said(["-o", "html"]).splitlines() == ["report.html"]
    assert Path("report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    assert said(["1", "-o", "html", "-w", "one.html"]).splitlines() == ["one.html"]
    # The details of the run are in it, not only its row.
    assert '"details":{"0001":{"run":"0001"' in Path("one.html").read_text(encoding="utf-8")
    # Runs of a file are not at hand.
    said(["-o", "csv", "-w", "elsewhere.csv"])
    said(["elsewhere.csv", "--store", "nowhere", "-o", "html"])
    assert '"details":{}' in Path("report.html").read_text(encoding="utf-8")


# -- options ---------------------------------------------------------------------------------------------------------


def test_filters(empty_folder: None) -> None:
    del empty_folder
    Path("r.csv").write_bytes(results_csv(mixed()).encode())

    def states(*words: str) -> list[str]:
        return [row["state"] for row in rows_of(said(["r.csv", "-o", "csv", *words]))]

    assert states("--state", "oom,timeout") == ["oom", "timeout"]
    assert states("--state", "error") == ["error"]
    assert states("--model", "mpt-7b") == ["timeout", "failed"]
    assert states("--model", "MPT-*") == ["timeout", "failed", "skipped"]
    assert states("--best") == ["ok", "ok"]
    assert "--state cannot be 'omo'" in refused(["r.csv", "--state", "omo"])
    assert "did you mean mpt-7b" in refused(["r.csv", "--model", "mpt-8b"])
    assert "none of 7 rows is left" in refused(["r.csv", "--state", "planned"])


def test_the_fastest_of_each_place() -> None:
    slow, fast = a_result(run="1", tokens_per_s=1.0), a_result(run="2", tokens_per_s=2.0, batch_sequences=48)
    other = a_result(run="3", sequence_tokens=4096, tokens_per_s=0.5)
    assert fastest([slow, fast, other, lost("oom", "no"), replace(fast, run="4", state="error")]) == [fast, other]


def test_order(empty_folder: None) -> None:
    del empty_folder
    rows = [a_result(run=str(number), mfu=share) for number, share in enumerate((0.2, None, 0.5, 0.1))]
    Path("r.csv").write_bytes(results_csv(rows).encode())

    def order(sort: str) -> list[str]:
        return [row["run"] for row in rows_of(said(["r.csv", "-o", "csv", "--sort", sort]))]

    assert order("mfu") == ["2", "0", "3", "1"]
    assert order("+mfu") == ["3", "0", "2", "1"]
    assert order("run") == ["0", "1", "2", "3"]
    assert order("+run") == ["3", "2", "1", "0"]
    assert "did you mean mfu" in refused(["r.csv", "--sort", "mfuu"])


def test_columns(store: Path) -> None:
    del store
    assert said(["1", "--columns", "run,state,tokens_per_s", "-o", "csv"]) == (
        f"run,state,tokens_per_s\r\n0001,ok,{a_measurement().tokens_per_s!r}\r\n"
    )
    assert json.loads(said(["1", "--columns", "run", "-o", "json"]))["rows"] == [{"run": "0001"}]
    assert said(["1", "--columns", "run,mfu"]).splitlines() == ["run      mfu", "0001  58.4 %"]
    assert markdown_tables(said(["1", "--columns", "run,mfu", "-o", "md"]))[0].names == ("run", "mfu")
    assert "did you mean tokens_per_s" in refused(["1", "--columns", "run,tokens_per_sec"])
    assert "stands twice" in refused(["1", "--columns", "run,run"])
    assert "--columns beside -o html" in refused(["1", "--columns", "run", "-o", "html"])


def test_prices(store: Path) -> None:
    del store
    row = rows_of(said(["1", "-o", "csv", "--price", "2.5"]))[0]
    assert float(row["tokens_per_dollar"]) == pytest.approx(a_measurement().tokens_per_s * 3600 / 2.5)
    for price in ("free", "0", "-1", "nan", "inf"):
        assert "--price cannot be" in refused(["1", "--price", price])


def test_pictures(empty_folder: None) -> None:
    del empty_folder
    words = [DOCUMENT, "--model", "mpt-7b", "--best"]
    code, _, err = answered(["report", *words, "--plot", "lines.svg"])
    assert (code, "wrote lines.svg" in err) == (0, True)
    assert ">sequence, tokens<" in Path("lines.svg").read_text()
    said([*words, "--plot", "map.svg", "--x", "sequence", "--y", "devices", "--value", "mfu"])
    assert ">devices<" in Path("map.svg").read_text()
    assert "--plot results.svg" in refused([*words, "--x", "batch"])
    assert "a picture cannot be written" in refused([*words, "--plot", "a.gif"])


def test_what_is_read_is_not_written_over(empty_folder: None) -> None:
    del empty_folder
    text = results_csv(mixed()).encode()
    Path("results.csv").write_bytes(text)
    for words in (["-o", "md", "-w", "./results.csv"], ["--plot", "results.csv"]):
        assert "is one of the files to read" in refused(["results.csv", *words])
    with pytest.raises(FlopwiseError, match="is one of the files to read"):
        collect(["results.csv"], into=".")
    assert Path("results.csv").read_bytes() == text


# -- collect ---------------------------------------------------------------------------------------------------------


def test_collect_writes_both_files_whole(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collect(into="out/deep", price="2", store=str(store))
    assert capsys.readouterr().out.splitlines() == ["out/deep/results.csv", "out/deep/results.md"]
    assert sorted(path.name for path in Path("out/deep").iterdir()) == ["results.csv", "results.md"]
    rows = read_results(Path("out/deep/results.csv"))
    assert rows == gather_rows((), str(store), "2")
    assert sum(len(table.rows) for table in markdown_tables(Path("out/deep/results.md").read_text())) == len(rows)
    with pytest.raises(FlopwiseError, match="cannot write to"):
        collect(into="out/deep/results.csv/x", store=str(store))
    with pytest.raises(FlopwiseError, match="there are no results"):
        collect(into="out", store="empty")


def test_collect_is_a_command(store: Path) -> None:
    app = typer.Typer()
    app.command()(collect)
    app(["1", "--into", "there", "--store", str(store)], standalone_mode=False)
    assert [row.run for row in read_results(Path("there/results.csv"))] == ["0001"]


# -- whatever is typed -----------------------------------------------------------------------------------------------

OPTIONS = ("--state", "--model", "--columns", "--sort", "--price", "-o", "--x", "--y", "--value", "--store")
WORDS = st.sampled_from(["ok", "mfu", "2", "table", "csv", "sequence", "", ",", "*", "../x", "last", "1-2", "\x00"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(WORDS | st.text(st.characters(codec="utf-8"), max_size=5), max_size=2),
    options=st.lists(st.tuples(st.sampled_from(OPTIONS), WORDS), max_size=3),
)
def test_every_command_line_is_answered(store: Path, names: list[str], options: list[tuple[str, str]]) -> None:
    del store
    words = [word for option, value in options for word in (option, value)]
    code, _, err = answered(["report", *words, "--", *names])
    assert code in (0, 2), err
    assert code == 0 or "hint: " in err or "Usage: " in err
