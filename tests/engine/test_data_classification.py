"""Labelled samples: padding, truncation, classes, what is held out."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import Batch
from flopwise.engine.data import ClassificationData, DataRequest, open_classification_data
from tests.support.data_files import END, LINES, csv_file, json_lines, quick_disk, request, word_tokenizer

__all__ = ["quick_disk"]
pytestmark = pytest.mark.usefixtures("quick_disk")

Row = tuple[tuple[int, ...], int]


def rows(batch: Batch) -> list[Row]:
    """Real tokens and class of every sample."""
    assert batch.lengths is not None
    return [
        (tuple(ids[:length].tolist()), int(label))
        for ids, length, label in zip(batch.ids, batch.lengths, batch.labels, strict=True)
    ]


def held_out(data: ClassificationData, sequences: int = 3) -> list[Row]:
    return [row for batch in data.evaluation(sequences) for row in rows(batch)]


def byte_row(text: str, length: int) -> tuple[int, ...]:
    return (END, *text.encode())[:length]


SAMPLES = st.lists(
    st.tuples(st.text(st.characters(codec="utf-8"), max_size=12), st.sampled_from(["cold", "hot", "7"])),
    min_size=2,
    max_size=40,
).filter(lambda samples: len({label for text, label in samples if text.strip()}) > 1)


@given(SAMPLES, st.integers(1, 17), st.floats(0, 0.6), st.integers(0, 2**63 - 1))
@settings(max_examples=60)
def test_training_and_held_out_samples_are_all_there_once(
    samples: list[tuple[str, str]], length: int, share: float, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = json_lines(folder / "a.jsonl", ({"text": text, "label": label} for text, label in samples))
        data = open_classification_data(
            request(folder, source, sequence_tokens=length, evaluation_share=share, seed=seed)
        )
        used = [(text, label) for text, label in samples if text.strip()]
        labels = sorted({label for _, label in used})
        assert data.labels == tuple(labels)
        trained, held = rows(data.batch(0, data.count)), held_out(data)
        expected = [(byte_row(text, length), labels.index(label)) for text, label in used]
        assert sorted([*trained, *held]) == sorted(expected)
        assert not {tokens for tokens, _ in trained} & {tokens for tokens, _ in held}
        assert {label for _, label in trained} == set(range(len(labels)))
        assert (data.count, data.evaluation_count) == (len(trained), len(held))
        assert bool(len(used) < len(samples)) == any("without text" in note for note in data.notes)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=5), st.integers(0, 99), st.sampled_from([0.01, 0.05, 0.3]))
@settings(max_examples=40)
def test_every_label_with_two_samples_is_held_out_from(counts: list[int], seed: int, share: float) -> None:
    samples = [(f"{label} {number}", label) for label, count in enumerate(counts) for number in range(count)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = csv_file(folder / "a.csv", ("text", "label"), samples)
        data = open_classification_data(request(folder, source, evaluation_share=share, seed=seed))
        held = Counter(label for _, label in held_out(data))
        for label, count in enumerate(counts):
            assert held[label] == (max(1, round(count * share)) if count > 1 else 0)
        assert any("too few different samples" in note for note in data.notes) == (1 in counts)


def test_what_is_held_out_follows_from_content_and_seed_alone(tmp_path: Path) -> None:
    samples = [(f"text {number}", str(number % 3)) for number in range(60)]
    straight = csv_file(tmp_path / "a.csv", ("text", "label"), samples)
    turned = csv_file(tmp_path / "b.csv", ("text", "label"), samples[::-1])
    first, second = (open_classification_data(request(tmp_path, source)) for source in (straight, turned))
    assert sorted(held_out(first)) == sorted(held_out(second))
    other = open_classification_data(request(tmp_path, straight, seed=1))
    assert sorted(held_out(first)) != sorted(held_out(other))


@pytest.mark.parametrize("padding", ["length", "longest"])
def test_samples_are_filled_up_behind(padding: str, tmp_path: Path) -> None:
    samples = [("ab", "x"), ("abcdefghijkl", "y"), ("a", "x"), ("abcd", "y")]
    source = csv_file(tmp_path / "a.csv", ("text", "label"), samples)
    data = open_classification_data(request(tmp_path, source, padding=padding, evaluation_share=0.0))
    for position in range(9):
        for sequences in (1, 2, 3):
            batch = data.batch(position, sequences)
            assert batch.lengths is not None
            width = 8 if padding == "length" else max(batch.lengths)
            assert batch.ids.shape == (sequences, width)
            assert batch.labels.shape == batch.lengths.shape == (sequences,)
            assert batch.ids.dtype == batch.labels.dtype == batch.lengths.dtype == np.int32
            for ids, length in zip(batch.ids, batch.lengths, strict=True):
                assert (ids[length:] == 0).all()
    everything = rows(data.batch(0, 4))
    assert sorted(everything) == sorted((byte_row(text, 8), "xy".index(label)) for text, label in samples)


@pytest.mark.parametrize("padding", ["length", "longest"])
def test_a_tokenizer_file_marks_cuts_and_fills_up_by_its_own_tokens(padding: str, tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json")
    known = json.loads(path.read_text())["model"]["vocab"]
    samples = [(line, str(number % 2)) for number, line in enumerate([*LINES, "a year", "an unknown year"])]
    source = csv_file(tmp_path / "a.csv", ("text", "label"), samples)
    data = open_classification_data(
        request(tmp_path, source, tokenizer=str(path), vocab=40, padding=padding, evaluation_share=0.0)
    )
    expected = [((1, *[known.get(word, 0) for word in text.split()][:6], 2), int(label)) for text, label in samples]
    batch = data.batch(0, 6)
    assert sorted(rows(batch)) == sorted(expected)
    assert batch.lengths is not None
    for ids, length in zip(batch.ids, batch.lengths, strict=True):
        assert (ids[length:] == known["[PAD]"]).all()


def test_sequences_that_hold_only_the_marks_are_refused(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json")
    source = csv_file(tmp_path / "a.csv", ("text", "label"), [("a", "x"), ("year", "y")])
    with pytest.raises(FlopwiseError, match="too short") as caught:
        open_classification_data(request(tmp_path, source, tokenizer=str(path), vocab=40, sequence_tokens=2))
    assert caught.value.hint == "sequences of at least 3 tokens"


def test_named_evaluation_files_go_by_the_classes_of_the_training(tmp_path: Path) -> None:
    train = csv_file(tmp_path / "a.csv", ("text", "label"), [("one", "a"), ("two", "b"), ("three", "c")])
    other = csv_file(tmp_path / "b.csv", ("text", "label"), [("six", "c"), ("five", "b"), ("two", "c")])
    data = open_classification_data(request(tmp_path, train, evaluation=(str(other),)))
    assert held_out(data, 2) == [(byte_row("six", 8), 2), (byte_row("five", 8), 1), (byte_row("two", 8), 2)]
    assert [batch.sequences for batch in data.evaluation(2)] == [2, 1]
    assert sorted(label for _, label in rows(data.batch(0, 3))) == [0, 1, 2]
    assert any("1 samples of the evaluation are in the training" in note for note in data.notes)


def test_labels_may_be_numbers_and_truths(tmp_path: Path) -> None:
    values = [1, 0, True, "1", "x y"]
    source = json_lines(
        tmp_path / "a.jsonl", ({"text": f"t{place}", "label": value} for place, value in enumerate(values))
    )
    data = open_classification_data(request(tmp_path, source, evaluation_share=0.0))
    assert data.labels == ("0", "1", "true", "x y")
    assert data.describe()["samples_per_label"] == [1, 2, 1, 1]


def test_batches_are_slices_of_one_order_whatever_their_size(tmp_path: Path) -> None:
    samples = [(f"text {number}", str(number % 3)) for number in range(23)]
    asked = request(tmp_path, csv_file(tmp_path / "a.csv", ("text", "label"), samples), seed=9)
    data = open_classification_data(asked)
    endless = [row for place in range(70) for row in rows(data.batch(place, 1))]
    for position in (0, 1, 19, 20, 41):
        for sequences in (1, 5, 25):
            assert (
                rows(open_classification_data(asked).batch(position, sequences))
                == endless[position : position + sequences]
            )


def test_a_damaged_cache_is_built_again_with_a_note(tmp_path: Path) -> None:
    samples = [(f"text {number}", str(number % 3)) for number in range(23)]
    asked = request(tmp_path, csv_file(tmp_path / "a.csv", ("text", "label"), samples))
    first = open_classification_data(asked)
    expected = rows(first.batch(0, first.count))
    path = tmp_path / "cache" / first.describe()["cache"]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1])
    again = open_classification_data(asked)
    assert any("damaged" in note for note in again.notes)
    assert rows(again.batch(0, again.count)) == expected


def test_the_description_is_plain_json(tmp_path: Path) -> None:
    samples = [(f"text {number}", str(number % 3)) for number in range(23)]
    data = open_classification_data(request(tmp_path, csv_file(tmp_path / "a.csv", ("text", "label"), samples)))
    described = data.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["labels"] == ["0", "1", "2"]
    assert described["samples"] == 23 == described["sequences"] + described["evaluation_sequences"]


def test_the_mean_of_training_samples_leaves_padding_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"{'a' * (2 + 3 * (row % 4))},{row % 2}\n" for row in range(40)))
    data = open_classification_data(
        DataRequest(sources=(str(path),), sequence_tokens=64, vocab=300, cache=tmp_path / "cache", evaluation_share=0.0)
    )
    batch = data.batch(0, 40)
    assert batch.lengths is not None
    assert data.lengths is not None
    assert sum(tokens * count for tokens, count in batch.lengths_counted()) == batch.tokens
