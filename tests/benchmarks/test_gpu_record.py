"""Files of measured rows: damaged ones lose nothing and are told in words."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.gpu import measured_ceilings
from benchmarks.gpu_ceiling import WHOLE
from benchmarks.gpu_record import STOPPED, Row, append_rows, earlier_times, mistakes_told, read_rows
from flopwise.base.errors import FlopwiseError

ROW: Row = {"outcome": "ok", "cell": "8k", "step_s": 2.0, "steps": 3, "warm_up_steps": 1, "wall_s": 20.0}


def test_a_file_that_was_cut_off_does_not_swallow_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    append_rows(path, [ROW, {**ROW, "cell": "cut"}])
    path.write_bytes(path.read_bytes()[:-3])
    append_rows(path, [{**ROW, "cell": "new"}])
    assert [row["cell"] for row in read_rows(path)] == ["8k", "cut", "new"]
    assert read_rows(path)[-1]["wall_s"] == "20.0"


@pytest.mark.parametrize("damage", ["folder", "bytes"])
def test_what_is_no_table_is_told_in_words(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"cell,step_s\n\xff\xfe\n")
    for call in (lambda: read_rows(path), lambda: append_rows(path, [ROW])):
        with pytest.raises(FlopwiseError) as caught:
            call()
        assert "--output" in str(caught.value.hint)


def test_rows_that_say_nonsense_foretell_nothing(tmp_path: Path) -> None:
    rows: list[Row] = [
        {**ROW, "step_s": "banana"},
        {**ROW, "cell": "good"},
        {"outcome": "ok"},
        {**ROW, "outcome": "failed"},
    ]
    append_rows(tmp_path / "cells.csv", rows)
    assert earlier_times(tmp_path) == {("cell", "good"): (12.0, 2.0)}


def test_an_interrupt_is_told_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, mistakes_told():
        raise KeyboardInterrupt
    assert caught.value.code == STOPPED
    assert "kept" in capsys.readouterr().err


def test_to_be_told_to_end_is_to_be_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, mistakes_told():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert caught.value.code == STOPPED
    assert "kept" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_rows_that_cannot_be_written_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(FlopwiseError, match="cannot write to") as caught:
        append_rows(tmp_path / "file" / "cells.csv", [ROW])
    assert "printed" in str(caught.value.why)
    assert capsys.readouterr().out == "outcome,cell,step_s,steps,warm_up_steps,wall_s\nok,8k,2.0,3,1,20.0\n\n"


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "banana", ""])
def test_a_ceiling_that_is_no_rate_is_none(rate: str, tmp_path: Path) -> None:
    good: Row = {
        "ceiling": "8b-8k",
        "op": WHOLE,
        "card": "mine",
        "tokens_per_s": 12_000.0,
        "products_us_per_token": 65.0,
        "attention_us_per_token": 15.0,
    }
    append_rows(tmp_path / "ceilings.csv", [good, {**good, "tokens_per_s": rate}])
    assert measured_ceilings(tmp_path, "mine")["8b-8k"].tokens_per_s == 12_000.0
