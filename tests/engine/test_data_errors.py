"""Whatever is wrong with data is told before any training: what, where, and what to do."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data import DataRequest, open_classification_data, open_language_data
from flopwise.engine.data import sources as sources_module
from tests.support.data_files import (
    LINES,
    byte_pair_tokenizer,
    csv_file,
    json_lines,
    request,
    text_file,
    word_tokenizer,
)


def refused(asked: DataRequest, *, labelled: bool = False) -> FlopwiseError:
    """The error of data that cannot be opened; no cache is left half-written."""
    with pytest.raises(FlopwiseError) as caught:
        (open_classification_data if labelled else open_language_data)(asked)
    assert caught.value.hint
    folder = asked.cache_folder()
    assert not folder.exists() or not [path for path in folder.iterdir() if path.name.startswith(".")]
    return caught.value


def test_missing_data_is_told(tmp_path: Path) -> None:
    assert "there is no file or folder" in refused(request(tmp_path, tmp_path / "nothing.txt")).what
    assert "nothing.txt" in refused(request(tmp_path, tmp_path / "nothing.txt")).what
    assert "nothing.csv" in refused(request(tmp_path, tmp_path / "nothing.csv"), labelled=True).what
    assert "there is no file or folder" in refused(request(tmp_path, tmp_path / "a\0b")).what


def test_empty_data_is_told(tmp_path: Path) -> None:
    assert "empty" in refused(request(tmp_path, text_file(tmp_path / "a.txt", ""))).what
    assert "no text" in refused(request(tmp_path, text_file(tmp_path / "b.txt", " \n\n"))).what
    assert "no text" in refused(request(tmp_path, text_file(tmp_path / "c.jsonl", "\n\n"))).what
    header = csv_file(tmp_path / "d.csv", ("text", "label"), [])
    assert "no text" in refused(request(tmp_path, header)).what
    assert "no text" in refused(request(tmp_path, header), labelled=True).what


def test_a_folder_without_anything_to_read_is_told(tmp_path: Path) -> None:
    text_file(tmp_path / "data" / "picture.png", "x")
    text_file(tmp_path / "data" / ".hidden" / "a.txt", "hidden")
    error = refused(request(tmp_path, tmp_path / "data"))
    assert "nothing to read" in error.what and ".jsonl" in str(error.hint)
    text_file(tmp_path / "data" / "a.txt", "no labels here")
    error = refused(request(tmp_path, tmp_path / "data"), labelled=True)
    assert "nothing to read" in error.what and ".txt" not in str(error.hint)


def test_a_pipe_is_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert "cannot be read" in refused(request(tmp_path, tmp_path / "pipe.txt")).what


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is readable for this user")
def test_a_file_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    source = text_file(tmp_path / "a.txt", "secret")
    source.chmod(0)
    assert "cannot be read" in refused(request(tmp_path, source)).what


def test_a_file_that_fails_while_it_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text_file(tmp_path / "a.txt", "secret")
    plain = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == source:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    error = refused(request(tmp_path, source))
    assert str(source) in error.what and error.why == "Permission denied"


@pytest.mark.parametrize("piece_bytes", [16, 2**20])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_bytes_that_are_no_text_are_told_with_their_place(
    name: str, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "PIECE_BYTES", piece_bytes)
    path = tmp_path / name
    before = {"a.txt": "é" * 40 + "\n", "a.jsonl": '{"text": "good"}\n', "a.csv": "text,label\nx,y\n"}[name].encode()
    path.write_bytes(b"\xef\xbb\xbf" + before + b"abc\xe9def\n")
    error = refused(request(tmp_path, path))
    assert str(path) in error.what and "UTF-8" in error.what
    assert error.why is not None and f"byte {3 + len(before) + 3:,} is 0xe9" in error.why
    assert error.hint is not None and "iconv" in error.hint


def test_too_little_text_is_told_with_what_would_do(tmp_path: Path) -> None:
    source = text_file(tmp_path / "a.txt", "abcdef")
    error = refused(request(tmp_path, source))
    assert "too little text" in error.what and "7 tokens" in str(error.why)
    assert "at most 6 tokens" in str(error.hint)
    assert open_language_data(request(tmp_path, source, sequence_tokens=6)).count == 1
    enough = text_file(tmp_path / "b.txt", "abcdef" * 20)
    assert "too little text" in refused(request(tmp_path, enough, evaluation=(str(source),))).what


@pytest.mark.parametrize(
    ("content", "line", "why"),
    [
        ('{"text": "good"}\n\n{"text": "cut', 3, ""),
        ('{"text": "good"}\n["text"]\n', 2, "a list of 1"),
        ('{"text": "good"}\n"text"\n', 2, "text"),
        ('{"text": "good"}\n{"body": "x", "title": "y"}\n', 2, "there are: 'body', 'title'"),
        ('{"text": "good"}\n{}\n', 2, "none at all"),
        ('{"text": "good"}\n{"text": 5}\n', 2, "it is 5"),
        ('{"text": "good"}\n{"text": null}\n', 2, "it is null"),
        ('{"text": "good"}\n{"text": "\\ud800"}\n', 2, ""),
        ("[" * 100_000, 1, ""),
    ],
)
def test_malformed_json_lines_are_told_with_their_line(content: str, line: int, why: str, tmp_path: Path) -> None:
    path = text_file(tmp_path / "a.jsonl", content)
    error = refused(request(tmp_path, path))
    assert f"{path}, line {line}" in error.what
    assert why in str(error.why)


@pytest.mark.parametrize(
    ("content", "line", "why"),
    [
        ("text,label\ngood,a\none,two,three\n", 3, "the header has 2"),
        ("text,label\n\ngood,a\nalone\n", 4, "the header has 2"),
        ('text,label\n"two\nlines",a\n"never closed,b\nmore,c\n', 4, ""),
        ('text,label\n"closed"early,b\n', 2, ""),
        ("body,label\ngood,a\n", 2, "there are: 'body', 'label'"),
    ],
)
def test_malformed_csv_rows_are_told_with_their_line(content: str, line: int, why: str, tmp_path: Path) -> None:
    path = text_file(tmp_path / "a.csv", content)
    error = refused(request(tmp_path, path), labelled=True)
    assert f"{path}, line {line}" in error.what
    assert why in str(error.why)


def test_a_line_number_counts_across_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "PIECE_BYTES", 32)
    path = text_file(tmp_path / "a.jsonl", '{"text": "good"}\n' * 50 + "bad\n")
    assert f"{path}, line 51" in refused(request(tmp_path, path)).what
    path = text_file(tmp_path / "a.csv", "text\r\n" + '"a\nb"\r\n' * 50 + "bad,row\r\n")
    assert f"{path}, line 102" in refused(request(tmp_path, path)).what


def test_a_missing_column_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    for source in (
        csv_file(tmp_path / "a.csv", ("text", "mood"), [("x", "y")]),
        json_lines(tmp_path / "a.jsonl", [{"text": "x", "mood": "y"}]),
    ):
        error = refused(request(tmp_path, source), labelled=True)
        assert "no column 'label'" in error.what and "'mood'" in str(error.why)
        assert "only one label" in refused(request(tmp_path, source, label_column="mood"), labelled=True).what


@pytest.mark.parametrize("label", [None, 1.5, "", " ", ["a"]])
def test_what_is_no_label_is_told_with_its_line(label: object, tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"text": "x", "label": "a"}, {"text": "y", "label": label}])
    assert f"{path}, line 2: label is no label" in refused(request(tmp_path, path), labelled=True).what


def test_text_without_labels_is_no_classification_set(tmp_path: Path) -> None:
    assert "no labels" in refused(request(tmp_path, text_file(tmp_path / "a.txt", "text")), labelled=True).what


def test_a_label_that_the_training_never_saw_is_told(tmp_path: Path) -> None:
    train = csv_file(tmp_path / "a.csv", ("text", "label"), [("one", "a"), ("two", "b")])
    other = csv_file(tmp_path / "b.csv", ("text", "label"), [("one", "a"), ("two", "c"), ("three", "d")])
    error = refused(request(tmp_path, train, evaluation=(str(other),)), labelled=True)
    assert "'c' and 1 more" in error.what and "never saw" in error.what
    assert "b.csv:3" in str(error.why) and "'a', 'b'" in str(error.why)


def test_bytes_need_a_vocabulary_of_257(tmp_path: Path) -> None:
    source = text_file(tmp_path / "a.txt", "text " * 20)
    error = refused(request(tmp_path, source, vocab=256))
    assert "does not match the model" in error.what and "257" in str(error.hint)
    assert open_language_data(request(tmp_path, source, vocab=257)).count > 0


def test_a_tokenizer_beyond_the_models_vocabulary_is_told(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", ({"text": line} for line in LINES))
    path = byte_pair_tokenizer(tmp_path / "tokenizer.json")
    size = Tokenizer.from_file(str(path)).get_vocab_size()
    error = refused(request(tmp_path, source, tokenizer=str(path), vocab=size - 1))
    assert str(path) in error.what and "does not match the model" in error.what
    assert open_language_data(request(tmp_path, source, tokenizer=str(path), vocab=size)).count > 0


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "WordLevel", "vocab": {}}}', "\xff"])
def test_what_is_no_tokenizer_is_told(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("latin1"))
    source = text_file(tmp_path / "a.txt", "text " * 20)
    assert str(path) in refused(request(tmp_path, source, tokenizer=str(path))).what


def test_a_missing_tokenizer_is_told(tmp_path: Path) -> None:
    source = text_file(tmp_path / "a.txt", "text " * 20)
    assert "there is no tokenizer" in refused(request(tmp_path, source, tokenizer=str(tmp_path / "x.json"))).what
    assert "tokenizer.json" in refused(request(tmp_path, source, tokenizer=str(tmp_path))).what


def test_a_text_that_the_tokenizer_cannot_tokenize_is_told(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", ({"text": "zebra"} for _ in LINES))
    path = word_tokenizer(tmp_path / "tokenizer.json")
    described = json.loads(path.read_text())
    described["model"].update({"unk_token": "absent"})
    path.write_text(json.dumps(described))
    assert "cannot tokenize" in refused(request(tmp_path, source, tokenizer=str(path), vocab=99)).what


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
    ids=["loading", "tokenizing"],
)
def test_a_tokenizer_that_makes_the_library_panic_is_told(changed: dict[str, Any], tmp_path: Path) -> None:
    """A panic of its Rust code is no Exception of Python."""
    source = text_file(tmp_path / "x.txt", "\n".join(LINES))
    path = word_tokenizer(tmp_path / "tokenizer.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    error = refused(request(tmp_path, source, tokenizer=str(path), vocab=99))
    assert str(path) in error.what
    assert error.why


def test_a_pipe_is_no_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    source = text_file(tmp_path / "x.txt", "\n".join(LINES))
    assert "not a file" in refused(request(tmp_path, source, tokenizer=str(tmp_path / "tokenizer.json"))).what


def test_a_tokenizer_that_adds_what_it_does_not_know_is_told(tmp_path: Path) -> None:
    source = csv_file(tmp_path / "a.csv", ("text", "label"), [("a", "x"), ("year", "y")])
    path = word_tokenizer(tmp_path / "tokenizer.json")
    described = json.loads(path.read_text())
    described["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [70_000]
    path.write_text(json.dumps(described))
    asked = request(tmp_path, source, tokenizer=str(path), vocab=99)
    assert "does not know its own token 70,000" in refused(asked, labelled=True).what


def test_without_the_tokenizers_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text_file(tmp_path / "a.txt", "text " * 20)
    path = byte_pair_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "flopwise[train]" in str(refused(request(tmp_path, source, tokenizer=str(path))).hint)
    assert open_language_data(request(tmp_path, source)).count > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequence_tokens": 0},
        {"vocab": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"padding": "shortest"},
        {"evaluation_share": 1.0},
        {"evaluation_share": float("nan")},
        {"text_column": "label"},
    ],
)
def test_a_request_checks_itself(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError) as caught:
        request(tmp_path, **wrong)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text;label\na;x\n", "semicolons between its columns"),
        ("text\tlabel\na\tx\n", "tabs between its columns"),
        # Also where a text's comma makes two fields of a line.
        ("text;label\na, b;x\n", "semicolons between its columns"),
        ("Text,Label\na,x\n", "there is no column 'text'"),
    ],
)
def test_other_separators_and_letters_of_a_header_are_told(content: str, words: str, tmp_path: Path) -> None:
    error = refused(request(tmp_path, text_file(tmp_path / "a.csv", content)), labelled=True)
    assert words in error.what and error.hint
    assert "Text" not in content or "'Text' is there and 'Label' is there" in (error.why or "")
