"""Files of measured rows: damaged ones lose nothing and are told in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_record import STOPPED, Row, append_rows, earlier_times, mistakes_told, read_rows
from flopwise.core.errors import FlopwiseError

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
