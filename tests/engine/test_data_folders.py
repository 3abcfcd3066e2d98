"""Folders as data: which files, in which order, and which links."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data import DataRequest, open_classification_data, open_language_data
from flopwise.engine.data.sources import evaluated_on, find_sources, held_out_alone, held_out_of
from flopwise.engine.data.splits import split_of
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


# -- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00002.parquet", "train"),
        ("train_sft.jsonl", "train"),
        ("validation/part.csv", "validation"),
        ("dev.jsonl", "validation"),
        ("wiki.test.txt", "test"),
        ("en/eval-1.jsonl", "test"),
        ("constraint.jsonl", None),
        ("trainer.jsonl", None),
        ("latest.txt", None),
    ],
)
def test_what_a_file_is_for_is_what_datasets_takes_it_for(name: str, split: str | None) -> None:
    assert split_of(name) == split


def test_of_splits_train_is_trained_on_and_another_held_out(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("train-0.jsonl", "train-1.jsonl", "validation.jsonl", "test.jsonl", "extra.jsonl"):
        json_lines(data / name, [{"text": name}])
    text_file(data / "README.md", "# data")
    assert names(data) == ["train-0.jsonl", "train-1.jsonl"]
    _, (note,) = find_sources((str(data),), labelled=False)
    assert "train is trained on, not test, validation, what is of no split" in note
    assert held_out_of((f"{data}:2",), tokens=False) == (str(data / "validation.jsonl"),)
    # Named for an evaluation a folder is what it holds out; a file is what it is.
    assert evaluated_on((str(data),), tokens=False) == (str(data / "validation.jsonl"),)
    assert evaluated_on((str(data / "train-0.jsonl"),), tokens=False) == (str(data / "train-0.jsonl"),)
    (data / "validation.jsonl").unlink()
    assert held_out_of((str(data),), tokens=False) == (str(data / "test.jsonl"),)


def test_tests_of_sources_are_no_split(tmp_path: Path) -> None:
    data = tmp_path / "code"
    for name in ("train.py", "test_train.py", "tests/test_a.py", "pages/test.md"):
        text_file(data / name, "x = 1")
    assert len(names(data)) == 4
    assert held_out_of((str(data),), tokens=False) == ()
    # Nor is what has no part to train on.
    json_lines(data / "test.jsonl", [{"text": "a"}])
    assert len(names(data)) == 5


def test_a_data_set_of_the_hub_is_found_where_it_was_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files there are links to those of all commits, which lie beside the commits' folders."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--them--set"
    commit = "0123456789abcdef"
    blob = json_lines(repository / "blobs" / "aa", [{"text": "kept"}])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for name in ("train.jsonl", "test.jsonl"):
        link = repository / "snapshots" / commit / "data" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    sources, _ = find_sources(("them/set",), labelled=False)
    assert [(source.name, source.path.read_text()) for source in sources] == [("data/train.jsonl", blob.read_text())]
    assert [Path(name).name for name in held_out_of(("them/set",), tokens=False)] == ["test.jsonl"]
    with pytest.raises(FlopwiseError) as caught:
        find_sources(("them/other",), labelled=False)
    assert "hf download them/other --repo-type dataset" in str(caught.value.hint)


# -- tokens ------------------------------------------------------------------------------------------------------------


def megatron(folder: Path, documents: list[list[int]], *, name: str = "a_text_document") -> Path:
    """As Megatron-LM's IndexedDatasetBuilder writes uint16, each document one sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [np.array(each, dtype="<u2") for each in documents]
    lengths = np.array([each.size for each in tokens], dtype="<i4")
    places = np.concatenate([[0], np.cumsum(2 * lengths.astype("<i8"))[:-1]]).astype("<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(tokens), len(tokens) + 1)
    edges = np.arange(len(tokens) + 1, dtype="<i8")
    (folder / f"{name}.bin").write_bytes(b"".join(each.tobytes() for each in tokens))
    (folder / f"{name}.idx").write_bytes(header + lengths.tobytes() + places.tobytes() + edges.tobytes())
    return folder / f"{name}.bin"


def tokens_of(asked: DataRequest) -> list[int]:
    data = open_language_data(asked)
    batch = data.batch(0, data.count)
    order = np.argsort(batch.ids[:, 0])
    return [int(each) for each in batch.ids[order].ravel()]


@pytest.mark.parametrize("named", ["file", "folder"])
def test_megatrons_tokens_are_read_by_their_index(tmp_path: Path, named: str) -> None:
    # The bytes' tokenizer ends a text with 256.
    file = megatron(tmp_path / "data", [[1, 2, 3], [4, 5, 6, 7, 256], [8, 9]])
    asked = request(tmp_path, file if named == "file" else file.parent, sequence_tokens=2, evaluation_share=0.0)
    assert tokens_of(asked) == [1, 2, 3, 256, 4, 5, 6, 7, 256, 8]
    assert open_language_data(asked).describe()["documents"] == 3


def test_an_index_that_does_not_fit_is_told(tmp_path: Path) -> None:
    file = megatron(tmp_path, [[1, 2, 3], [4, 5]])
    index = file.with_suffix(".idx")
    whole = index.read_bytes()
    for wrong in (whole[:40], whole[:17] + b"\xff" + whole[18:], whole[:34] + b"\xff\xff\x00\x00" + whole[38:]):
        index.write_bytes(wrong)
        with pytest.raises(FlopwiseError, match="no index of Megatron's"):
            open_language_data(request(tmp_path, file, sequence_tokens=2))
    index.write_bytes(whole)
    with pytest.raises(FlopwiseError, match="has none"):
        find = (str(file), str(text_file(tmp_path / "a.txt", "text")))
        open_language_data(replace(request(tmp_path, file, sequence_tokens=2), sources=find))


def test_a_folder_of_tokens_has_splits_too(tmp_path: Path) -> None:
    """As nanoGPT writes them."""
    for name, numbers in (("train.bin", [1, 2, 3, 4, 5]), ("val.bin", [6, 7, 8])):
        (tmp_path / name).write_bytes(np.array(numbers, dtype="<u2").tobytes())
    sources, _ = find_sources((str(tmp_path),), labelled=False, tokens=True)
    assert [(source.name, source.form) for source in sources] == [("train.bin", "tokens")]
    assert held_out_of((str(tmp_path),), tokens=True) == (str(tmp_path / "val.bin"),)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (("validation.jsonl",), "validation is trained on"),
        (("data/test-00000.jsonl", "data/validation-00000.jsonl"), "test and validation is trained on"),
        (("train.jsonl", "validation.jsonl"), None),
        (("rows.jsonl", "validation.jsonl"), "validation is trained on"),
        (("rows.jsonl",), None),
        (("test.py", "test.md"), None),
    ],
)
def test_a_folder_without_a_split_to_train_on_is_told(tmp_path: Path, files: tuple[str, ...], told: str | None) -> None:
    for name in files:
        json_lines(tmp_path / "data" / name, [{"text": "a"}])
    found = held_out_alone((f"{tmp_path / 'data'}",), tokens=False)
    assert [told in note for note in found if told] == ([True] if told else [])
    assert bool(found) == bool(told)
    # A file that is named is meant.
    assert held_out_alone((str(tmp_path / "data" / files[0]),), tokens=False) == ()
