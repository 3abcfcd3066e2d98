"""What is wrong with data and tokenizer is told before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.train.data_checks import check_data
from flopwise.train.request import TrainRequest

ROWS = "text,label\na b,0\nc d,1\n"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": ("missing.csv",)}, "there is no file or folder missing.csv"),
        ({"evaluation_data": ("missing.csv",)}, "there is no file or folder missing.csv"),
        ({"text_column": "txt"}, "there is no column 'txt'"),
        ({"label_column": "kind"}, "there is no column 'kind'"),
        ({"tokenizer": "nowhere"}, "there is no tokenizer nowhere"),
    ],
)
def test_mistakes_are_told(rows: Path, changes: dict[str, object], words: str) -> None:
    request = TrainRequest(model="bert-base", data=(str(rows),))
    check_data(request)
    with pytest.raises(FlopwiseError) as error:
        check_data(replace(request, **changes))  # type: ignore[arg-type]
    assert words in str(error.value)


def test_only_classifiers_need_labels(rows: Path) -> None:
    check_data(TrainRequest(model="gpt2", data=(str(rows),), label_column="kind"))
    with pytest.raises(FlopwiseError, match="kind"):
        check_data(TrainRequest(model="gpt2", task="classification", data=(str(rows),), label_column="kind"))


def test_a_long_first_line_is_left_to_those_who_read_it_all(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"text": "' + "a" * 2**24 + '"}\n')
    check_data(TrainRequest(model="gpt2", data=(str(path),)))


def test_a_resumed_run_brings_its_own_data() -> None:
    check_data(TrainRequest(data=("missing.csv",), resume="last"))


def test_no_torch_is_imported() -> None:
    lines = (
        "import sys",
        "from flopwise.cli import main",
        "sys.argv = ['flopwise', 'train', 'bert-base', '--data', 'missing.csv']",
        "try:",
        "    main()",
        "except SystemExit as end:",
        "    print(end.code, 'torch' in sys.modules)",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert ended.stdout.split()[-2:] == ["2", "False"], ended.stderr
