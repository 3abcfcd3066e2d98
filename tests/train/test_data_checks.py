"""What is wrong with data and tokenizer is told before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.train.data_checks import check_data
from flopwise.train.request import TrainRequest
from flopwise.train.trained_model import check_model

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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "the data is empty"),
        ("text,label\n", "there is no text"),
        ("\n\n", "there is no text"),
        ("text,label\n ,0\n,1\n", "there is no text"),
        ("text,label\na,0\nb,0\n ,1\n", "only one label, '0'"),
        # Longer than what is looked at first.
        ("text,label\n" + "some words that are trained on,7\n" * 40_000, "only one label, '7'"),
    ],
)
def test_rows_that_teach_nothing_are_told(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    for model in ("bert-base", str(_plan_file(tmp_path))):
        with pytest.raises(FlopwiseError) as error:
            check_data(TrainRequest(model=model, data=(str(path),)))
        assert words in str(error.value)


def _plan_file(folder: Path) -> Path:
    path = folder / "plan.toml"
    fw.plan("bert-base", on="h200", seq=64, batch=4, write=path)
    return path


def test_a_second_label_far_behind_is_found(tmp_path: Path) -> None:
    path = tmp_path / "sorted.csv"
    path.write_text("text,label\n" + "some words that are trained on,7\n" * 40_000 + "others,8\n")
    check_data(TrainRequest(model="bert-base", data=(str(path),)))


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


@pytest.mark.parametrize(
    "words",
    [
        "train bert-base --data missing.csv",
        "train bert-base --data one.csv",
        "train bert-base --data header.csv",
        "train bert-base --data ok.csv --label-column kind",
        "train bert-base --data ok.csv --tokenizer nowhere",
        "train bert-base --data empty",
        "train plan.toml --data one.csv --anywhere",
        "sweep --model bert-base --batch 4 --data missing.csv",
        "sweep --model bert-base --batch 4 --data one.csv",
        "sweep --model bert-base --batch 4 --data ok.csv --tokenizer nowhere",
    ],
)
def test_no_torch_is_imported(tmp_path: Path, words: str) -> None:
    (tmp_path / "ok.csv").write_text(ROWS)
    (tmp_path / "one.csv").write_text("text,label\na,0\nb,0\n")
    (tmp_path / "header.csv").write_text("text,label\n")
    (tmp_path / "empty").mkdir()
    _plan_file(tmp_path)
    lines = (
        "import sys",
        "from flopwise.cli import main",
        f"sys.argv = ['flopwise', *{words.split()!r}]",
        "try:",
        "    main()",
        "except SystemExit as end:",
        "    print(end.code, 'torch' in sys.modules)",
    )
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.stdout.split()[-2:] == ["2", "False"], ended.stderr


@pytest.mark.parametrize("given", [{"data": "missing.csv"}, {"data": "one.csv"}, {"data": "ok.csv", "tokenizer": "no"}])
def test_none_is_from_python(tmp_path: Path, given: dict[str, str]) -> None:
    (tmp_path / "ok.csv").write_text(ROWS)
    (tmp_path / "one.csv").write_text("text,label\na,0\nb,0\n")
    lines = (
        "import sys, flopwise as fw",
        "try:",
        f"    fw.train('bert-base', **{given!r})",
        "except Exception as error:",
        "    print(type(error).__name__, 'torch' in sys.modules)",
    )
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.stdout.split() == ["FlopwiseError", "False"], ended.stderr


def test_labels_for_a_masked_model_want_a_word_of_the_task(rows: Path) -> None:
    request = TrainRequest(model="roberta-base", data=(str(rows),))
    with pytest.raises(FlopwiseError, match="has labels, and the model foretells hidden tokens") as caught:
        check_data(request)
    assert caught.value.hint == "--task classification, or --task masked"
    for task in ("classification", "masked"):
        check_data(replace(request, task=task))
    check_data(replace(request, label_column="kind"))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"model": "llama-3-8b", "lora": 8, "adapters": "nowhere"}, "--adapters beside --lora"),
        ({"model": "llama-3-8b", "task": "masked"}, "reads from left to right"),
        ({"model": "gpt2", "changes": {"layerz": 3}}, "no field 'layerz'"),
        ({"model": "missing.toml"}, "there is no file missing.toml"),
        ({"model": "gpt2", "sequence_tokens": 4096}, "learned positions for 1,024"),
        ({"model": "gpt2", "merge": True}, "--merge without --lora"),
        ({"model": "lstm-lm"}, "cannot be trained yet"),
        ({"adapters": "nowhere"}, "adapter_config.json"),
    ],
)
def test_what_is_wrong_with_a_model_needs_neither_torch_nor_a_device(asked: dict[str, object], told: str) -> None:
    """No device is asked what it is: `check_model` has nothing of the kind."""
    with pytest.raises(FlopwiseError, match=told):
        check_model(TrainRequest(**asked))  # type: ignore[arg-type]
    check_model(TrainRequest(resume="last"))
