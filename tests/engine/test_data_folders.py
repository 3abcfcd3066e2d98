"""Folders as data: which files, in which order, and which links."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data import open_classification_data, open_language_data
from flopwise.engine.data.sources import find_sources
from tests.support.data_files import csv_file, json_lines, request, text_file


def names(folder: Path, *, labelled: bool = False) -> list[str]:
    return [source.name for source in find_sources((str(folder),), labelled=labelled)[0]]


def test_a_folder_is_its_text_files_by_their_path(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("b.txt", "a/z.md", "a/b/c.py", "A.TXT", "a.jsonl", "a/x.csv", "a/b.pyc", "x.bin", "no_ending"):
        text_file(data / name, "x" * (9 if name.endswith((".jsonl", ".csv")) else 1))
    text_file(data / ".git" / "a.txt", "hidden")
    text_file(data / "a" / ".b" / "a.txt", "hidden")
    text_file(data / ".a.txt", "hidden")
    (data / "folder.txt").mkdir()
    assert names(data) == ["A.TXT", "a.jsonl", "a/b/c.py", "a/x.csv", "a/z.md", "b.txt"]
    assert names(data, labelled=True) == ["a.jsonl", "a/x.csv"]
    # Also when the folder itself is in a hidden one, or named with a slash behind it.
    assert names(data / ".git") == ["a.txt"]
    assert names(Path(f"{data}/")) == names(data)


def test_documents_come_in_the_order_of_their_files(tmp_path: Path) -> None:
    data = tmp_path / "data"
    text_file(data / "b.txt", "BBBB")
    json_lines(data / "a.jsonl", [{"text": "AA"}, {"text": "aa"}])
    csv_file(data / "c.csv", ("text",), [("CC",)])
    found = open_language_data(request(tmp_path, data, sequence_tokens=13, evaluation_share=0.0)).batch(0, 1)
    assert bytes(token if token < 256 else ord("|") for token in found.ids[0]) == b"AA|aa|BBBB|CC"


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    outside = text_file(tmp_path / "outside" / "secret.txt", "secret").parent
    text_file(data / "a.txt", "inside " * 10)
    (data / "link.txt").symlink_to(outside / "secret.txt")
    (data / "linked").symlink_to(outside)
    (data / "broken.txt").symlink_to(data / "nowhere.txt")
    (data / "loop").symlink_to(data)
    assert names(data) == ["a.txt"]
    notes = open_language_data(request(tmp_path, data)).notes
    assert len(notes) == 1 and "lead out of the folder were left out (2)" in notes[0]
    # One that is named is meant.
    assert names(data / "linked") == ["secret.txt"]
    assert names(data / "link.txt") == ["link.txt"]


def test_links_within_the_folder_repeat_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    text_file(data / "a.txt", "inside")
    text_file(data / "blob", "only by its link")
    (data / "again.txt").symlink_to(data / "a.txt")
    (data / "named.txt").symlink_to(data / "blob")
    assert names(data) == ["a.txt", "named.txt"]


def test_a_folder_of_links_that_lead_out_says_why_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").symlink_to(text_file(tmp_path / "b.txt", "text"))
    with pytest.raises(FlopwiseError, match="nothing to read") as caught:
        names(tmp_path / "data")
    assert "not followed (1)" in str(caught.value.why)


def test_a_file_that_is_read_twice_is_noted(tmp_path: Path) -> None:
    source = text_file(tmp_path / "data" / "a.txt", "text " * 9)
    notes = open_language_data(request(tmp_path, source, tmp_path / "data")).notes
    assert notes == ("1 of 2 files are read more than once",)


def test_a_file_of_any_other_name_is_text(tmp_path: Path) -> None:
    data = open_language_data(request(tmp_path, text_file(tmp_path / "corpus", '{"text": "abc"}')))
    assert data.describe()["documents"] == 1
    assert bytes(data.batch(0, 1).ids[0].astype("uint8")) == b'{"text":'
    assert not [note for note in data.notes if "plain text" in note]
    data = open_language_data(request(tmp_path, text_file(tmp_path / "lines.tsv", "text\nabcdefghijkl")))
    assert [note for note in data.notes if "read as plain text" in note]


def test_a_folder_of_samples_is_one_set(tmp_path: Path) -> None:
    data = tmp_path / "data"
    json_lines(data / "a.jsonl", [{"text": "one", "label": "x"}])
    csv_file(data / "b.csv", ("label", "text"), [("y", "two"), ("x", "three")])
    found = open_classification_data(request(tmp_path, data, evaluation_share=0.0))
    assert (found.labels, found.count) == (("x", "y"), 3)
