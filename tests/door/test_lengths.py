"""How long sequences are, from files and words, and how `predict` and `plan` take it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model
from flopwise.door.lengths import lengths_of
from flopwise.work.lengths import Lengths, count_lengths
from tests.support.data_files import word_tokenizer

BERT, LLAMA = load_model("bert-base"), load_model("llama-3-8b")


def read(given: object, **more: object) -> Lengths:
    return lengths_of(given, BERT, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("5,17,128", [5, 17, 128]),
        ("5, 17x3 ,128", [5, 17, 17, 17, 128]),
        ("17x2", [17]),
        ("mean=24", [24]),
        ("mean=23.5", [23, 24]),
        ("1k", [512]),
    ],
)
def test_words(words: str, expected: list[int]) -> None:
    assert read(words) == count_lengths(expected)


def test_quantiles_are_met() -> None:
    found = read("min=2,p50=17,p90=40,max=66")
    lengths = np.repeat(*(np.array(each) for each in zip(*found.counted, strict=True)))
    assert (lengths.min(), np.quantile(lengths, 0.5), np.quantile(lengths, 0.9), lengths.max()) == (2, 17, 40, 66)


def test_lengths_one_by_one() -> None:
    assert read([3, 5, 5]) == count_lengths([3, 5, 5])
    assert read(np.array([3, 5, 5])) == count_lengths([3, 5, 5])
    assert read(count_lengths([3, 600])) == count_lengths([3, 512])
    assert "longer than 512" in read([3, 600]).note
    assert read([3, 600], sequence=1024) == count_lengths([3, 600])


def test_files_of_numbers(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("5\n17\n\n17\n")
    (tmp_path / "some.csv").write_text("id,length\n1,5\n2,17\n3,17\n")
    (tmp_path / "some.jsonl").write_text(
        "".join(json.dumps({"input_ids": [1] * count}) + "\n" for count in (5, 17, 17))
    )
    (tmp_path / "one.csv").write_text("whatever\n5\n17\n17\n")
    for name in ("some.txt", "some.csv", "some.jsonl", "some.csv:length", "one.csv"):
        assert read(str(tmp_path / name)) == count_lengths([5, 17, 17])
        assert not read(tmp_path / name).note
    assert read(str(tmp_path / "some.csv:id")) == count_lengths([1, 2, 3])


def test_files_of_texts(tmp_path: Path) -> None:
    texts = ["one two three", "", "four", "one " * 700]
    (tmp_path / "data.csv").write_text("text,label\n" + "".join(f'"{text}",{row}\n' for row, text in enumerate(texts)))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    guessed = read(tmp_path / "data.csv")
    assert guessed == read(tmp_path / "data.jsonl") == count_lengths([3, 1, 512])
    assert "4 characters each" in guessed.note
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json")
    exact = read(tmp_path / "data.csv", tokenizer=tokenizer)
    assert "characters" not in exact.note
    # With the tokens that mark a sample.
    added = exact.counted[0][0] - 1
    assert exact == count_lengths([3 + added, 1 + added, 512])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("0", "at least 1"),
        ("mean=0", "at least 1"),
        ("5,,7", "missing"),
        ("5,x", "cannot read"),
        ("5,7x0", "cannot read"),
        ("mean=5,max=7", "beside quantiles"),
        ("p50=5", "max"),
        ("p50=9,max=5", "rise"),
        ("mean=5,mean=6", "once each"),
        ("nothere", "no such file"),
        ("nothere.csv", "no file or folder"),
        ("", "empty"),
    ],
)
def test_words_that_say_nothing_are_refused(words: str, said: str) -> None:
    with pytest.raises(FlopwiseError, match=said):
        read(words)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "", "empty"),
        ("a.csv", "id,label\n1,2\n", "no column"),
        ("a.csv", "length\n", "no row"),
        ("a.csv", "length\n5\n-3\n", "no length"),
        ("a.csv", "length\n5\n2.5\n", "no length"),
        ("a.csv", "text,label\n ,1\n", "blank"),
        ("a.txt", "five\n", "no length"),
        ("a.jsonl", '{"length": 5}\n{"length": true}\n', "no length"),
        ("a.jsonl", '{"text": 5}\n{"text": "five"}\n', "no length"),
        ("a.jsonl", "[1]\n", "not an object"),
        ("a.csv", "length\n5\n\xff\n", "UTF-8"),
    ],
)
def test_files_that_say_nothing_are_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_bytes(content.encode("latin1"))
    with pytest.raises(FlopwiseError, match=said):
        read(tmp_path / name)


def test_predict_and_plan_take_them() -> None:
    step = fw.predict("bert-base", on="h200", seq=128, batch=2, lengths=[24, 40])
    assert (step.lengths, step.batch_tokens, step.sequence_tokens) == ("packed:24,40", 64, 128)
    assert fw.predict("bert-base", on="h200", batch=2, lengths=[24, 40]).sequence_tokens == 40
    packed, padded = (
        fw.predict("bert-base", on="h200", seq=128, batch=512, lengths=[24, 40], layout=layout)
        for layout in ("packed", "padded")
    )
    assert padded.step_s > packed.step_s
    spread = fw.predict("bert-base", on="h200", seq=128, batch=8, lengths="mean=24", devices=2)
    assert spread.lengths == "padded:24"
    plan = fw.plan("bert-base", on="h200", seq=128, batch=2, lengths=[24, 40])
    assert plan.plan.lengths == "packed:24,40"
    with pytest.raises(FlopwiseError, match="without lengths"):
        fw.predict("bert-base", on="h200", layout="padded")
    with pytest.raises(FlopwiseError, match="layout"):
        fw.predict("bert-base", on="h200", lengths="mean=5", layout="heaped")  # type: ignore[arg-type]


def test_a_table_of_many_rows_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"{'word ' * (1 + row % 60)},{row % 6}\n" for row in range(20_000)))
    script = (
        "import sys, flopwise as fw\n"
        f"fw.predict('bert-base', on='h200', seq=128, batch=32, lengths={str(path)!r})\n"
        f"fw.plan('bert-base', on='h200', seq=128, batch=32, lengths={str(path)!r})\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
