"""Texts of which tokens are hidden: which ones, behind what, and when they are drawn anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import NO_LABEL, Batch
from flopwise.engine.data import MaskedData, open_masked_data
from flopwise.engine.data.masked import JUDGED, TRAINED, Hiding, draws_of
from tests.support.data_files import json_lines, quick_disk, request, word_tokenizer
from tests.support.encoder_folders import LETTERS, mask_tokenizer

__all__ = ["quick_disk"]
pytestmark = pytest.mark.usefixtures("quick_disk")

CLS, SEP, MASK, PAD = 2, 3, 4, 0
SPECIAL = (0, 1, 2, 3, 4)


def texts(folder: Path, sizes: tuple[int, ...]) -> Path:
    """A document of so many letters each, all of them other ones."""
    draw = np.random.default_rng(3)
    rows = [{"text": " ".join(draw.choice(LETTERS, size).tolist())} for size in sizes]
    return json_lines(folder / "texts.jsonl", rows)


def opened(folder: Path, sizes: tuple[int, ...] = (3, 40, 9, 1, 17, 30), **changes: Any) -> MaskedData:
    asked = {"tokenizer": str(mask_tokenizer(folder)), "vocab": 40, "sequence_tokens": 16, "evaluation_share": 0.0}
    return open_masked_data(request(folder, texts(folder, sizes), **{**asked, **changes}))


def shown_before(batch: Batch) -> list[list[int]]:
    """The tokens of each sequence with nothing hidden."""
    assert batch.lengths is not None
    whole = np.where(batch.labels == NO_LABEL, batch.ids, batch.labels)
    return [row[:length].tolist() for row, length in zip(whole, batch.lengths.tolist(), strict=True)]


def documents_of(batch: Batch) -> list[list[int]]:
    found = []
    for row, counts in zip(shown_before(batch), batch.documents or (), strict=True):
        ends = np.cumsum(counts).tolist()
        found += [row[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_every_piece_of_every_document_stands_between_its_marks(tmp_path: Path, packed: bool) -> None:
    data = opened(tmp_path)
    data.lay_out(packed=packed)
    batch = data.batch(0, data.count)
    pieces = documents_of(batch) if packed else shown_before(batch)
    assert all(piece[0] == CLS and piece[-1] == SEP and 3 <= len(piece) <= 16 for piece in pieces)
    # 14 letters a piece: 40 are 14, 14 and 12.
    assert sorted(len(piece) - 2 for piece in pieces) == sorted([3, 14, 14, 12, 9, 1, 14, 3, 14, 14, 2])
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    lines = (tmp_path / "texts.jsonl").read_text().splitlines()
    expected = [token for line in lines for token in tokenizer.encode(line[10:-2], add_special_tokens=False).ids]
    assert sorted(token for piece in pieces for token in piece[1:-1]) == sorted(expected)
    assert batch.ids.shape[1] == 16 and (batch.documents is not None) == packed


def test_so_many_are_hidden_and_marks_never_are(tmp_path: Path) -> None:
    data = opened(tmp_path, sizes=(400,) * 30 + (2,) * 9, sequence_tokens=64)
    batch = data.batch(0, 3 * data.count)
    hidden = batch.labels != NO_LABEL
    assert batch.lengths is not None
    for row, length in enumerate(batch.lengths.tolist()):
        own = np.isin(shown_before(batch.part(row, row + 1))[0], SPECIAL, invert=True).sum()
        assert hidden[row].sum() == max(1, round(0.15 * own))
        assert not hidden[row, length:].any() and (batch.ids[row, length:] == PAD).all()
    assert not np.isin(batch.labels[hidden], SPECIAL).any()
    # What is not hidden is as it was, marks among it.
    assert (batch.ids[~hidden] != MASK).all()


def test_eight_of_ten_become_the_mask_one_another_token_and_one_stays() -> None:
    special = np.zeros(1000, dtype=np.bool_)
    special[:5] = True
    hiding = Hiding(0.15, MASK, special, np.arange(5, 1000, dtype=np.int32))
    before = np.random.default_rng(0).integers(5, 1000, 200_000, dtype=np.int32)
    ids, labels = before.copy(), np.full_like(before, NO_LABEL)
    hiding.hide(ids, labels, draws_of(TRAINED, 1, 2))
    hidden = labels != NO_LABEL
    count = hidden.sum()
    assert count == 30_000 and (labels[hidden] == before[hidden]).all() and (ids[~hidden] == before[~hidden]).all()
    masked, same = ids[hidden] == MASK, ids[hidden] == before[hidden]
    others = ids[hidden][~masked & ~same]
    # Five standard deviations of so many draws; the seed is the same every time.
    for share, expected in ((masked.mean(), 0.8), (same.mean(), 0.1), (others.size / count, 0.1)):
        assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / count)
    # Others are any token but marks, each as often.
    assert 5 <= others.min() < 20 and others.max() > 980
    assert abs(others.mean() - 502) < 5 * 995 / np.sqrt(12 * others.size)
    # Where in a sequence does not matter.
    assert abs(np.flatnonzero(hidden).mean() - 1e5) < 5 * 2e5 / np.sqrt(12 * count)


def test_draws_follow_from_the_seed_and_the_place_alone(tmp_path: Path) -> None:
    data = opened(tmp_path, sizes=(300, 50, 9), sequence_tokens=32)
    whole = data.batch(0, 3 * data.count)
    # Whoever asks for which part, and in whatever order: ranks, rounds, a resumed run.
    for first, last in ((5, 6), (0, 3), (2, 9)):
        part = data.batch(first, last - first)
        np.testing.assert_array_equal(part.ids, whole.ids[first:last])
        np.testing.assert_array_equal(part.labels, whole.labels[first:last])
    again = opened(tmp_path, sizes=(300, 50, 9), sequence_tokens=32).batch(0, 3 * data.count)
    np.testing.assert_array_equal(again.ids, whole.ids)
    other = opened(tmp_path, sizes=(300, 50, 9), sequence_tokens=32, seed=1).batch(0, data.count)
    assert not np.array_equal(np.sort(other.labels), np.sort(whole.labels[: data.count]))
    assert (
        data.describe()["fingerprint"] != opened(tmp_path, sizes=(300, 50, 9), mask_share=0.3).describe()["fingerprint"]
    )


def test_each_epoch_hides_others(tmp_path: Path) -> None:
    data = opened(tmp_path, sizes=(300, 50, 9), sequence_tokens=32)
    epochs = [data.batch(epoch * data.count, data.count) for epoch in range(2)]
    by_text = [
        {
            tuple(text): tuple(np.flatnonzero(row != NO_LABEL))
            for text, row in zip(shown_before(batch), batch.labels, strict=True)
        }
        for batch in epochs
    ]
    assert by_text[0].keys() == by_text[1].keys()
    assert sum(by_text[0][text] != by_text[1][text] for text in by_text[0]) >= data.count - 1


def test_an_evaluation_hides_the_same_whatever_the_seed_and_the_batch(tmp_path: Path) -> None:
    found = []
    for seed, sequences in ((0, 2), (5, 3), (0, 100)):
        data = opened(tmp_path, sizes=(300, 500, 90), sequence_tokens=32, seed=seed, evaluation_share=0.2)
        batches = list(data.evaluation(sequences))
        found.append([np.concatenate([getattr(batch, name) for batch in batches]) for name in ("ids", "labels")])
    for ids, labels in found[1:]:
        np.testing.assert_array_equal(ids, found[0][0])
        np.testing.assert_array_equal(labels, found[0][1])
    assert draws_of(JUDGED, 0, 0).random_raw() != draws_of(TRAINED, 0, 0).random_raw()


def test_bytes_have_a_mask_of_their_own(tmp_path: Path) -> None:
    data = opened(tmp_path, tokenizer=None, vocab=258)
    batch = data.batch(0, data.count)
    assert (batch.ids == 257).any() and all(piece[0] == 256 for piece in documents_of(batch))
    with pytest.raises(FlopwiseError, match="does not match the model") as caught:
        opened(tmp_path, tokenizer=None, vocab=257)
    assert "258" in (caught.value.hint or "")


def test_what_cannot_be_hidden_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError, match="has no token for what is hidden") as caught:
        opened(tmp_path, tokenizer=str(word_tokenizer(tmp_path / "words.json")))
    assert "[MASK]" in (caught.value.hint or "")
    with pytest.raises(FlopwiseError, match="no room for a text"):
        opened(tmp_path, sequence_tokens=2)
    for share in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(FlopwiseError, match="cannot be hidden"):
            opened(tmp_path, mask_share=share)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.floats(0.05, 0.9),
    st.integers(0, 2**40),
)
@settings(max_examples=80, deadline=None)
def test_words_are_hidden_whole(tokens: list[int], share: float, seed: int) -> None:
    """0 is a mark, 1 to 4 go on with a word, the others begin one."""
    special, continues = np.arange(10) == 0, (np.arange(10) > 0) & (np.arange(10) < 5)
    hiding = Hiding(share, 9, special, np.arange(1, 10, dtype=np.int32), continues)
    ids = np.array(tokens, dtype=np.int32)
    labels = np.full_like(ids, NO_LABEL)
    hiding.hide(ids, labels, draws_of(TRAINED, seed, 0))
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token and token < 5 and words and words[-1][-1] == place - 1:
            words[-1].append(place)
        elif token:
            words.append([place])
    hidden = [word for word in words if labels[word[0]] != NO_LABEL]
    places = sorted(place for word in hidden for place in word)
    assert places == np.flatnonzero(labels != NO_LABEL).tolist()
    assert [labels[place] for place in places] == [tokens[place] for place in places]
    target = max(1, round(share * sum(token > 0 for token in tokens)))
    assert len(places) <= target or len(hidden) == 1
    assert bool(hidden) == bool(words)


def test_words_of_wordpiece_are_known_and_of_others_refused(tmp_path: Path) -> None:
    import tokenizers

    vocab = {
        name: number
        for number, name in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c", "##d"))
    }
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(tmp_path / "pieces.json"))
    source = json_lines(tmp_path / "rows.jsonl", [{"text": "acd b bc ad"}] * 20)
    asked = request(tmp_path, source, tokenizer=str(tmp_path / "pieces.json"), vocab=9, sequence_tokens=32)
    data = open_masked_data(replace(asked, whole_words=True))
    batch = data.batch(0, data.count)
    hidden = batch.labels != NO_LABEL
    # What goes on with a word is hidden where the word is.
    goes_on = np.isin(np.where(hidden, batch.labels, batch.ids), (7, 8))[:, 1:] & (batch.ids[:, 1:] != PAD)
    assert (hidden[:, 1:] == hidden[:, :-1])[goes_on].all() and hidden.any()
    assert data.describe()["fingerprint"] != open_masked_data(asked).describe()["fingerprint"]
    with pytest.raises(FlopwiseError, match="which tokens are of one word"):
        opened(tmp_path, whole_words=True)


def test_labels_beside_the_texts_are_told_of(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "rows.jsonl", [{"text": "a b c d e", "label": 1}] * 3)
    data = open_masked_data(
        request(tmp_path, source, tokenizer=str(mask_tokenizer(tmp_path)), vocab=40, sequence_tokens=16)
    )
    assert any("labels are not learned" in note and "--task classification" in note for note in data.notes)
