"""`flopwise profile show`, `compare` and `why` as a user types them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from flopwise.base.errors import FlopwiseError
from flopwise.cli import profile as command
from flopwise.records.profile import Profile
from flopwise.store.runs import VARIABLE, from_text, new_run, to_text, write_record
from tests.report.test_profile_report import a_profile, hostile_profile
from tests.report.test_training_report import a_record

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")

NEURON = Path(__file__).parents[1] / "data" / "neuron"
PADDINGS = str(NEURON / "paddings.md")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """To work in, with a run that was profiled and one that was not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv(VARIABLE, raising=False)
    for number in (1, 2):
        run = new_run(Path("runs"))
        write_record(run, a_record(id=f"000{number}"))
        if number == 1:
            (run / "profile.json").write_text(to_text(a_profile(name="run 0001")))
    Path("other.json").write_text(to_text(a_profile(name="other", batch_sequences=48)))
    Path("hostile.json").write_text(to_text(hostile_profile()))
    return tmp_path


def answered(*words: str) -> tuple[str, str]:
    """What is printed, and said beside it, by a command that works."""
    result = CliRunner().invoke(command.app, list(words))
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0
    return result.stdout, result.stderr


def refused(*words: str) -> FlopwiseError:
    result = CliRunner().invoke(command.app, list(words))
    assert isinstance(result.exception, FlopwiseError), result.exception
    assert result.stdout == ""
    assert result.exception.hint
    return result.exception


@pytest.mark.parametrize("name", ["1", "0001", "runs/0001", "runs/0001/profile.json"])
def test_a_run_is_shown_by_any_of_its_names(name: str) -> None:
    out, _ = answered("show", name)
    assert out.startswith("run 0001 · H200 · flopwise · 3 steps · batch 24")
    assert "1. data-movement-bound" in out


def test_a_run_in_another_store(folder: Path) -> None:
    (folder / "runs").rename(folder / "elsewhere")
    out, _ = answered("show", "1", "--store", "elsewhere")
    assert out.startswith("run 0001")


def test_last_is_the_newest_run_and_may_have_no_profile() -> None:
    error = refused("show", "last")
    assert "0002" in error.what
    assert "no profile" in error.what


@pytest.mark.parametrize("form", ["md", "csv", "json", "html", "table"])
def test_every_form_goes_to_stdout_or_to_a_file(form: str) -> None:
    out, _ = answered("show", "1", "-o", form)
    nothing, said = answered("show", "1", "-o", form, "-w", "page.txt")
    assert nothing == ""
    assert said.splitlines() == [
        "wrote page.txt",
        *(["warning: run 0001: the trace ends within step 3"] if form == "csv" else []),
    ]
    # Between the two a page's own second may pass.
    assert TIME.sub("", Path("page.txt").read_text()) == TIME.sub("", out)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["hostile.json", "other.json", "page.txt", "runs"]


@pytest.mark.parametrize("form", ["table", "md", "csv", "json", "html"])
def test_no_name_acts_on_a_terminal(form: str) -> None:
    for words in (["show", "hostile.json"], ["compare", "hostile.json", "other.json"]):
        out, _ = answered(*words, "-o", form)
        assert not any(sign in out for sign in "\x1b\x9b\u202e")
    out, _ = answered("why", "hostile.json")
    assert not any(sign in out for sign in "\x1b\x9b\u202e")


def test_json_is_read_back() -> None:
    answered("show", "1", "-o", "json", "-w", "again.json")
    assert from_text(Path("again.json").read_text(), Profile).kernels == a_profile().kernels
    answered("show", "1", "other.json", "-o", "json", "-w", "both.json")
    out, _ = answered("show", "both.json", "-o", "csv")
    assert {row["profile"] for row in csv.DictReader(io.StringIO(out))} == {"run 0001", "other"}


def test_several_are_a_table_and_one_is_picked_by_name() -> None:
    out, said = answered("show", "1", "other.json")
    assert [line.split("  ")[0] for line in out.splitlines()[:3]] == ["profile", "run 0001", "other"]
    assert "--section" in said
    out, said = answered("show", "1", "other.json", "--section", "OTHER")
    assert out.startswith("other · H200")
    assert said == ""
    error = refused("show", "1", "other.json", "--section", "otter")
    assert error.why == "did you mean other?"


def test_thresholds_move_verdicts() -> None:
    out, _ = answered("show", "1", "--threshold", "copy_exposed_share=0.5")
    assert "data-movement-bound" not in out
    assert "host_device_share" in (refused("show", "1", "--threshold", "host_devise_share=0.5").why or "")
    for word in ("copy_exposed_share", "copy_exposed_share=much", "copy_exposed_share=7", "copy_exposed_share=nan"):
        refused("show", "1", "--threshold", word)


def test_a_trace_is_written_of_one_profile_with_tasks() -> None:
    answered("show", "1", "--trace", "step.json")
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {1, 2}
    assert "2 profiles" in refused("show", "1", "other.json", "--trace", "x.json").what
    Path("bare.json").write_text(to_text(a_profile(tasks=())))
    assert "no tasks" in refused("show", "bare.json", "--trace", "x.json").what
    assert not Path("x.json").exists()


def test_native_is_the_document() -> None:
    out, _ = answered("show", PADDINGS, "-o", "native")
    assert "## Padding 16" in out
    assert "| **dma_active_time_percent** " in out
    hostile = Path(PADDINGS).read_text().replace("Accuracy:", "Accuracy:\x1b[31m\x9b")
    Path("hostile.md").write_text(hostile)
    out, _ = answered("show", "hostile.md", "-o", "native")
    assert not any(sign in out for sign in "\x1b\x9b")
    refused("show", PADDINGS, "-o", "native", "--section", "Padding 16")


def test_sections_of_a_document_are_compared_and_explained() -> None:
    out, _ = answered("compare", PADDINGS, "--baseline", "Padding 128")
    assert "by sequence length" in out
    out, _ = answered("why", PADDINGS, "--section", "padding 32")
    assert "Most of all it is host-bound: the device is busy 33 % of the step's wall time, under 70 %." in " ".join(
        out.split()
    )


def test_native_is_only_for_documents_that_are_kept() -> None:
    assert "no layout of its own" in refused("show", "1", "-o", "native").what
    refused("show", "1", "-o", "pdf")


def test_compare() -> None:
    out, _ = answered("compare", "1", "other.json")
    assert out.rstrip().endswith("Changes are relative to run 0001.")
    out, _ = answered("compare", "1", "other.json", "--baseline", "other", "-o", "json")
    assert json.loads(out)["baseline"] == 1
    assert "cannot be compared" in refused("compare", "1").what
    assert refused("compare", "1", "other.json", "--baseline", "othr").why == "did you mean other?"
    assert "cannot be 'native'" in refused("compare", "1", "other.json", "-o", "native").what


@pytest.mark.parametrize("columns", [80, 120])
def test_pages_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines: list[str] = []
    commands: Sequence[Sequence[str]] = (["show", "1"], ["show", "1", "other.json"], ["compare", "1", "other.json"])
    for words in (*commands, ["why", "1"]):
        lines += answered(*words)[0].splitlines()
    assert max(cell_len(line) for line in lines) <= columns


def test_why_is_a_paragraph() -> None:
    out, _ = answered("why", "1")
    assert out.startswith("run 0001 ran on H200 with 24 sequences of 8,192 tokens a step in bf16.")
    assert not any(line.split()[0] in ("%", "ms", "s") for line in out.splitlines())
    assert 60 <= len(out.split()) <= 140
    assert "\n\n" not in out


def test_a_file_that_is_not_there_or_not_a_profile() -> None:
    error = refused("why", "othre.json")
    assert (error.why or "").startswith("did you mean other.json")
    Path("text.txt").write_text("nothing of the kind")
    refused("show", "text.txt")
    refused("show", "\x00")
    refused("show", "7")
    Path("half.json").write_text(Path("other.json").read_text()[:-40])
    refused("show", "half.json")
