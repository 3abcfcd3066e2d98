"""Text as packed sequences, against a plain reference."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flopwise.engine.batch import Batch
from flopwise.engine.data import LanguageData, open_language_data
from flopwise.engine.data import sources as sources_module
from tests.support.data_files import (
    END,
    LINES,
    byte_pair_tokenizer,
    csv_file,
    json_lines,
    quick_disk,
    request,
    text_file,
    word_tokenizer,
)

__all__ = ["quick_disk"]
pytestmark = pytest.mark.usefixtures("quick_disk")

DOCUMENTS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1, max_size=6)


def stream_of(documents: Sequence[str]) -> list[int]:
    """Bytes of every document that is not blank, with the end behind."""
    return [token for text in documents if text.strip() for token in (*text.encode(), END)]


def windows_of(stream: list[int], length: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and their labels, sequence by sequence."""
    found = []
    first = 0
    while first + length + 1 <= len(stream):
        found.append((stream[first : first + length], stream[first + 1 : first + length + 1]))
        first += length
    return found


def rows(batch: Batch) -> list[tuple[list[int], list[int]]]:
    return [(ids.tolist(), labels.tolist()) for ids, labels in zip(batch.ids, batch.labels, strict=True)]


def everything(data: LanguageData) -> list[tuple[list[int], list[int]]]:
    return [*rows(data.batch(0, data.count)), *(row for batch in data.evaluation(3) for row in rows(batch))]


@given(DOCUMENTS, st.integers(1, 23), st.floats(0, 0.9), st.integers(0, 2**63 - 1))
@settings(max_examples=60)
def test_sequences_and_labels_are_those_of_a_plain_loop(
    documents: list[str], length: int, share: float, seed: int
) -> None:
    expected = windows_of(stream_of(documents), length)
    if not expected:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = json_lines(folder / "text.jsonl", ({"text": text} for text in documents))
        data = open_language_data(request(folder, source, sequence_tokens=length, evaluation_share=share, seed=seed))
        assert sorted(everything(data)) == sorted(expected)
        assert data.count + data.evaluation_count == len(expected)
        assert data.describe()["tokens"] == len(stream_of(documents))


def test_a_batch_has_the_promised_types(tmp_path: Path) -> None:
    data = open_language_data(request(tmp_path, text_file(tmp_path / "a.txt", "some text " * 20)))
    batch = data.batch(0, 3)
    assert batch.ids.dtype == batch.labels.dtype == np.int32
    assert batch.ids.shape == batch.labels.shape == (3, 8)
    assert batch.lengths is None
    assert batch.ids.flags.c_contiguous and batch.labels.flags.c_contiguous


@given(st.integers(0, 300), st.integers(1, 60))
@settings(max_examples=30)
def test_batches_are_slices_of_one_order_whatever_their_size(position: int, sequences: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = request(folder, text_file(folder / "a.txt", "".join(map(chr, range(40, 250)))), seed=3)
        data = open_language_data(asked)
        one_by_one = [row for place in range(position, position + sequences) for row in rows(data.batch(place, 1))]
        # A second one, opened from the cache as after a restart.
        assert rows(open_language_data(asked).batch(position, sequences)) == one_by_one


def test_every_epoch_has_every_training_sequence_and_none_that_is_held_out(tmp_path: Path) -> None:
    text = "".join(chr(letter) * 3 for letter in range(33, 127))
    data = open_language_data(request(tmp_path, text_file(tmp_path / "a.txt", text), evaluation_share=0.2))
    held_out = [row for batch in data.evaluation(4) for row in rows(batch)]
    epochs = [rows(data.batch(epoch * data.count, data.count)) for epoch in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(held_out) == data.evaluation_count == 7
    assert not [row for row in held_out if row in epochs[0]]


def test_the_evaluation_comes_in_order_and_its_last_batch_is_smaller(tmp_path: Path) -> None:
    text = "".join(chr(letter) * 3 for letter in range(33, 127))
    asked = request(tmp_path, text_file(tmp_path / "a.txt", text), evaluation_share=0.2)
    data = open_language_data(asked)
    batches = list(data.evaluation(3))
    assert [batch.sequences for batch in batches] == [3, 3, 1]
    expected = windows_of(stream_of([text]), 8)
    places = [expected.index(row) for batch in batches for row in rows(batch)]
    assert places == sorted(places)


def test_held_out_sequences_are_the_same_for_every_seed_but_the_order_is_not(tmp_path: Path) -> None:
    source = text_file(tmp_path / "a.txt", "the quick brown fox jumps over lazy dogs " * 9)
    first, second = (open_language_data(request(tmp_path, source, seed=seed)) for seed in (1, 2))
    assert [rows(batch) for batch in first.evaluation(5)] == [rows(batch) for batch in second.evaluation(5)]
    assert rows(first.batch(0, first.count)) != rows(second.batch(0, second.count))
    assert first.describe()["fingerprint"] == second.describe()["fingerprint"]


def test_named_evaluation_files_leave_the_training_whole(tmp_path: Path) -> None:
    train = text_file(tmp_path / "train.txt", "abcdefghijklmnopqrstuvwxyz")
    other = text_file(tmp_path / "other.txt", "0123456789012345678901234567890")
    data = open_language_data(request(tmp_path, train, evaluation=(str(other),)))
    assert sorted(rows(data.batch(0, data.count))) == sorted(windows_of(stream_of([train.read_text()]), 8))
    held_out = [row for batch in data.evaluation(2) for row in rows(batch)]
    assert held_out == windows_of(stream_of([other.read_text()]), 8)
    assert data.notes == ()
    same = open_language_data(request(tmp_path, train, evaluation=(str(train),)))
    assert any("same text" in note for note in same.notes)


def test_a_single_sequence_is_trained_on_and_a_note_says_so(tmp_path: Path) -> None:
    data = open_language_data(request(tmp_path, text_file(tmp_path / "a.txt", "12345678")))
    assert (data.count, data.evaluation_count, list(data.evaluation(2))) == (1, 0, [])
    assert any("nothing is held out" in note for note in data.notes)
    assert rows(data.batch(5, 2)) == windows_of(stream_of(["12345678"]), 8) * 2


def test_no_share_holds_nothing_out(tmp_path: Path) -> None:
    data = open_language_data(request(tmp_path, text_file(tmp_path / "a.txt", "1234567 " * 9), evaluation_share=0.0))
    assert (data.count, data.evaluation_count, data.notes) == (9, 0, ())


def test_text_of_csv_and_jsonl_is_the_named_column(tmp_path: Path) -> None:
    texts = ['with "quotes", commas', "two\nlines", "é ünï", "  ", "last"]
    rows_of_file = [(number, text) for number, text in enumerate(texts)]
    sources = (
        csv_file(tmp_path / "a.csv", ("number", "body"), rows_of_file),
        json_lines(tmp_path / "b.jsonl", ({"body": text, "number": number} for number, text in rows_of_file)),
    )
    for source in sources:
        asked = request(tmp_path, source, text_column="body", evaluation_share=0.0, sequence_tokens=5)
        data = open_language_data(asked)
        assert sorted(rows(data.batch(0, data.count))) == sorted(windows_of(stream_of(texts), 5))
        assert data.describe()["documents"] == 4


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    plain = open_language_data(request(tmp_path, text_file(tmp_path / "a.txt", "abcdefghijkl")))
    marked = open_language_data(request(tmp_path, text_file(tmp_path / "b.txt", "\ufeffabcdefghijkl")))
    assert rows(plain.batch(0, 1)) == rows(marked.batch(0, 1))
    lines = text_file(tmp_path / "c.jsonl", '\ufeff{"text": "abcdefghijkl"}')
    assert rows(open_language_data(request(tmp_path, lines)).batch(0, 1)) == rows(plain.batch(0, 1))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=30, max_size=300), st.integers(5, 60))
@settings(max_examples=40)
def test_pieces_of_a_long_text_are_the_text(text: str, piece_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources_module, "PIECE_BYTES", piece_bytes)
        folder = Path(name)
        text = text.lstrip("\ufeff") + "x"
        whole = text_file(folder / "a.txt", text)
        lines = json_lines(folder / "b.jsonl", [{"text": text}, {"text": "second"}])
        for source, documents in ((whole, [text]), (lines, [text, "second"])):
            data = open_language_data(request(folder, source, sequence_tokens=3, evaluation_share=0.0))
            assert sorted(rows(data.batch(0, data.count))) == sorted(windows_of(stream_of(documents), 3))
            assert data.describe()["documents"] == len(documents)


def test_a_tokenizer_file_gives_the_text_back(tmp_path: Path) -> None:
    path = byte_pair_tokenizer(tmp_path / "tokenizer.json")
    texts = [*LINES, "words it never saw: zebra — Ωmega"]
    source = json_lines(tmp_path / "a.jsonl", ({"text": text} for text in texts))
    # The folder will do, too.
    for named in (path, tmp_path):
        data = open_language_data(
            request(tmp_path, source, tokenizer=str(named), vocab=300, sequence_tokens=1, evaluation_share=0.0)
        )
        batch = data.batch(0, data.count)
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        expected = [token for text in texts for token in (*tokenizer.encode(text).ids, 0)]
        assert tokenizer.token_to_id("<|endoftext|>") == 0
        assert data.describe()["tokens"] == len(expected)
        assert sorted(rows(batch)) == sorted(windows_of(expected, 1))
        assert tokenizer.decode([token for token in expected if token]) == "".join(texts)
        assert batch.ids.max() < 300


def test_a_document_begins_as_the_tokenizer_begins_texts(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json")
    source = json_lines(tmp_path / "a.jsonl", ({"text": line} for line in LINES[:2]))
    data = open_language_data(
        request(tmp_path, source, tokenizer=str(path), vocab=40, sequence_tokens=1, evaluation_share=0.0)
    )
    found = [ids for (ids,), _ in rows(data.batch(0, data.count))]
    # [SEP] stands behind each document, the last of which only is a label; [CLS] before each.
    assert (found.count(1), found.count(2)) == (2, 1)


def test_a_tokenizer_that_leaves_merges_out_at_random_does_not(tmp_path: Path) -> None:
    path = byte_pair_tokenizer(tmp_path / "tokenizer.json")
    source = json_lines(tmp_path / "a.jsonl", ({"text": line * 9} for line in LINES))
    described = json.loads(path.read_text())
    described["model"]["dropout"] = 0.5
    random = text_file(tmp_path / "random.json", json.dumps(described))
    counts = [
        open_language_data(request(tmp_path, source, tokenizer=str(named), vocab=300)).describe()["tokens"]
        for named in (path, random)
    ]
    assert counts[0] == counts[1]


def test_documents_without_an_end_token_follow_each_other_and_a_note_says_so(tmp_path: Path) -> None:
    path = byte_pair_tokenizer(tmp_path / "tokenizer.json", end="<unusual>")
    source = json_lines(tmp_path / "a.jsonl", ({"text": line} for line in LINES))
    data = open_language_data(request(tmp_path, source, tokenizer=str(path), vocab=300, sequence_tokens=2))
    assert any("no token for the end" in note for note in data.notes)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert data.describe()["tokens"] == sum(len(tokenizer.encode(line).ids) for line in LINES)


def test_the_description_is_plain_json(tmp_path: Path) -> None:
    data = open_language_data(request(tmp_path, text_file(tmp_path / "a.txt", "abcabc" * 9)))
    described = data.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["vocabulary_used"] == 4  # three letters and the end
    assert described["tokenizer"] == "bytes"
    assert described["sequences"] == data.count
    assert (tmp_path / "cache" / described["cache"]).is_file()


def test_progress_is_told_up_to_the_end(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    source = text_file(tmp_path / "a.txt", "text " * 100)
    open_language_data(request(tmp_path, source), tell=lambda what, done, of: told.append((what, done, of)))
    assert told == [("read", 500, 500), ("tokenize", 500, 500)]
