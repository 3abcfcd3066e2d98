"""Pairs of texts: which columns they are in, and their tokens and types as `transformers` has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data import open_classification_data
from flopwise.engine.data.request import text_columns
from flopwise.engine.data.tokenizer import ByteTokenizer, FileTokenizer, byte_tokenizer_files
from tests.support.data_files import json_lines, quick_disk, request, word_tokenizer

__all__ = ["quick_disk"]
pytestmark = pytest.mark.usefixtures("quick_disk")

WORDS = ("a", "b", "c", "d", "e")


def bert_tokenizer(folder: Path) -> Path:
    """Letters as words, marked as BERT marks them."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {word: number for number, word in enumerate(("[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))  # noqa: S106
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def spaced(draw: Any) -> str:
    return " ".join(draw)


TEXT = st.lists(st.sampled_from(WORDS), max_size=9).map(spaced)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5), st.integers(4, 20))
@settings(max_examples=40, deadline=None)
def test_tokens_and_types_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], most: int
) -> None:
    transformers = pytest.importorskip("transformers")
    path = bert_tokenizer(tmp_path_factory.mktemp("bert"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token="[PAD]")  # noqa: S106
    for (tokens, types), pair in zip(FileTokenizer(path).pairs(pairs, most), pairs, strict=True):
        # As a list: of one pair it takes an empty second text for none.
        lists = ([text] for text in pair)
        expected = theirs(*lists, truncation=True, max_length=most, return_token_type_ids=True)
        assert [tokens.tolist()] == expected["input_ids"]
        assert [types.tolist()] == expected["token_type_ids"]


@given(st.lists(st.tuples(st.text(max_size=7), st.text(max_size=7)), min_size=1, max_size=4), st.integers(3, 16))
@settings(max_examples=40, deadline=None)
def test_bytes_are_cut_and_marked_as_their_tokenizer_file_says(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], most: int
) -> None:
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bytes")
    for name, content in byte_tokenizer_files(marked=True).items():
        (folder / name).write_bytes(content)
    found, expected = ByteTokenizer().pairs(pairs, most), FileTokenizer(folder / "tokenizer.json").pairs(pairs, most)
    for (tokens, types), (their_tokens, their_types) in zip(found, expected, strict=True):
        assert tokens.tolist() == their_tokens.tolist()
        assert types.tolist() == their_types.tolist()


ROWS = [
    {"premise": "a b c", "hypothesis": "d", "label": 1},
    {"premise": "a", "hypothesis": "e e", "label": 0},
    {"premise": "b", "hypothesis": "", "label": 1},
    {"premise": " ", "hypothesis": "", "label": 0},
]


@pytest.mark.parametrize("asked", ["text", "premise,hypothesis", "premise, hypothesis"])
def test_a_batch_has_the_types_of_its_pairs(tmp_path: Path, asked: str) -> None:
    source, tokenizer = json_lines(tmp_path / "nli.jsonl", ROWS), str(bert_tokenizer(tmp_path))
    wanted = request(
        tmp_path, source, tokenizer=tokenizer, text_column=asked, token_types=2, vocab=9, evaluation_share=0.0
    )
    data = open_classification_data(wanted)
    assert data.describe()["text_columns"] == ["premise", "hypothesis"]
    assert [note for note in data.notes if "without text" in note], "a pair of two blanks is left out"
    batch = data.batch(0, 3)
    assert batch.types is not None and batch.lengths is not None
    found = {
        (tuple(ids[:length].tolist()), tuple(types[:length].tolist()))
        for ids, types, length in zip(batch.ids, batch.types, batch.lengths, strict=True)
    }
    assert found == {
        ((1, 4, 5, 6, 2, 7, 2), (0, 0, 0, 0, 0, 1, 1)),
        ((1, 4, 2, 8, 8, 2), (0, 0, 0, 1, 1, 1)),
        ((1, 5, 2, 2), (0, 0, 0, 1)),
    }
    assert not batch.types[np.arange(batch.types.shape[1]) >= batch.lengths[:, None]].any()


def test_a_model_without_types_is_told_none(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "nli.jsonl", ROWS)
    for types in (0, 1):
        data = open_classification_data(request(tmp_path, source, token_types=types, evaluation_share=0.0))
        assert data.batch(0, 2).types is None


def test_columns_are_found_by_their_usual_names() -> None:
    assert text_columns("text", ["text", "premise", "hypothesis"]) == ("text",)
    assert text_columns("text", ["idx", "label", "hypothesis", "premise"]) == ("premise", "hypothesis")
    assert text_columns("text", ["question", "sentence", "label"]) == ("question", "sentence")
    assert text_columns("text", ["sentence", "label"]) == ("sentence",)
    assert text_columns("text", ["body", "label"]) == ("text",)
    assert text_columns("a,b", ["a,b"]) == ("a,b",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_column": "premise,premise"}, "names no columns of texts"),
        ({"text_column": "premise,"}, "names no columns of texts"),
        ({"text_column": "a,b,c"}, "names no columns of texts"),
        ({"text_column": "premise,label"}, "cannot both be the column 'label'"),
        ({"text_column": "premise,other"}, "there is no column 'other'"),
        ({"sequence_tokens": 2}, "too short"),
    ],
)
def test_wrong_columns_are_told(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    source = json_lines(tmp_path / "nli.jsonl", ROWS)
    with pytest.raises(FlopwiseError, match=words) as caught:
        open_classification_data(request(tmp_path, source, **changes))
    assert caught.value.hint


def test_a_tokenizer_without_a_mark_between_texts_is_refused(tmp_path: Path) -> None:
    source, tokenizer = json_lines(tmp_path / "nli.jsonl", ROWS), word_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(FlopwiseError, match="puts nothing between the two texts"):
        open_classification_data(request(tmp_path, source, tokenizer=str(tokenizer), vocab=99))


def test_an_evaluation_of_single_texts_beside_pairs_is_refused(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "nli.jsonl", ROWS)
    single = tmp_path / "single.jsonl"
    single.write_text(json.dumps({"text": "a", "label": 1}) + "\n", encoding="utf-8")
    with pytest.raises(FlopwiseError, match="the evaluation's texts are in text"):
        open_classification_data(request(tmp_path, source, evaluation=(str(single),)))
