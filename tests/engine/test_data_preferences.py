"""Pairs of answers as TRL's users have them: what is asked, what is compared, how they share a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import NO_LABEL, Batch
from flopwise.engine.data.preferences import PreferenceData, open_preference_data
from tests.engine.test_data_examples import text_of, tokenizer
from tests.support.data_files import json_lines, quick_disk, request
from tests.support.tiny_folders import TEMPLATE, VOCABULARY

__all__ = ["quick_disk"]
pytestmark = pytest.mark.usefixtures("quick_disk")


def opened(folder: Path, rows: list[Any], **more: Any) -> PreferenceData:
    place = tokenizer(folder / "tokenizer", TEMPLATE)
    asked: dict[str, Any] = {"sequence_tokens": 256, "vocab": VOCABULARY, "evaluation_share": 0.0, **more}
    named = json_lines(folder / "rows.jsonl", rows)
    return open_preference_data(request(folder, named, tokenizer=str(place), pairs=True, **asked))


def compared(folder: Path, data: PreferenceData) -> list[list[tuple[str, str]]]:
    """Of each pair, of either answer: all of its text, and what of it is learned."""
    found = []
    for number in range(data.examples):
        both = []
        for ids, foretold in data._pieces.answers(number):
            learned = foretold[foretold != NO_LABEL].tolist()
            both.append((text_of(folder, [*ids.tolist(), learned[-1]]), text_of(folder, learned)))
        found.append(both)
    return found


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, YES, NO = said("user", "is it?"), said("assistant", "yes"), said("assistant", "no")
CHAT = "<|im_start|>user\nis it?<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
ROWS: dict[str, dict[str, Any]] = {
    "a prompt and two texts": {"prompt": "is it? ", "chosen": "yes", "rejected": "no"},
    "a prompt within both": {"chosen": "is it? yes", "rejected": "is it? no"},
    "messages": {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]},
    "messages, the answers alone": {"prompt": [ASKED], "chosen": YES, "rejected": NO},
    "messages within both": {"chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    "conversations, and what was asked once more": {
        "prompt": "is it?",
        "chosen": [ASKED, YES],
        "rejected": [ASKED, NO],
    },
    "ShareGPT's names": {
        "conversations": [{"from": "human", "value": "is it?"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
}


@pytest.mark.parametrize("kind", ROWS)
def test_what_was_asked_is_given_and_both_answers_are_compared(kind: str, tmp_path: Path) -> None:
    data = opened(tmp_path, [ROWS[kind]])
    [[better, worse]] = compared(tmp_path, data)
    if isinstance(ROWS[kind]["chosen"], str):
        # A space before the answer is the answer's, where nobody says where the prompt ends.
        space = " " * ("prompt" not in ROWS[kind])
        assert better == ("<s>is it? yes<|im_end|>", f"{space}yes<|im_end|>")
        assert worse == ("<s>is it? no<|im_end|>", f"{space}no<|im_end|>")
    else:
        assert [learned for _, learned in (better, worse)] == ["yes<|im_end|>", "no<|im_end|>"]
        assert CHAT.format("yes") in better[0]
        assert CHAT.format("no") in worse[0]


def test_pairs_share_sequences_as_documents_side_by_side(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p" * (number % 7), "chosen": "b" * (1 + number), "rejected": "w" * (2 + number)}
        for number in range(20)
    ]
    data = opened(tmp_path, rows, sequence_tokens=64)
    batch = data.batch(0, data.count)
    assert batch.documents is not None
    assert batch.references is not None
    assert data.count < data.examples == batch.with_loss == 20
    for row, counts in zip(batch.ids, batch.documents, strict=True):
        ends = np.cumsum(counts)
        assert counts.size % 2 == 0
        assert ends[-1] <= 64
        for first in range(0, counts.size, 2):
            texts = [
                text_of(tmp_path, row[end - count : end].tolist())
                for end, count in zip(ends[first : first + 2], counts[first : first + 2], strict=True)
            ]
            assert texts[0].count("b") + 1 == texts[1].count("w")
    data.lay_out(packed=False)
    alone = data.batch(0, data.count)
    assert alone.documents is not None
    assert [each.size for each in alone.documents] == [2] * 20


def test_long_pairs_are_cut_and_what_cannot_be_compared_is_left_out_and_told(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": "b" * 100, "rejected": "c" * 10},
        {"prompt": "a", "chosen": "b" * 100, "rejected": "c" * 100},
        {"prompt": "a" * 90, "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "same", "rejected": "same"},
        {"prompt": "a", "chosen": "b", "rejected": ""},
    ]
    data = opened(tmp_path, rows, sequence_tokens=64)
    assert data._pieces.reads.tolist() == [64, 64]
    assert [ids.size for ids, _ in data._pieces.answers(0)] == [52, 12]
    assert [ids.size for ids, _ in data._pieces.answers(1)] == [32, 32]
    told = " ".join(data.notes)
    assert "3 of 3 pairs have over 64 tokens" in told
    assert "1 pairs do not differ within 64 tokens" in told
    assert "nothing to compare were left out (2)" in told
    with pytest.raises(FlopwiseError, match="nothing to compare"):
        opened(tmp_path, rows[2:], sequence_tokens=64)


def test_the_reference_scores_what_is_seen_once_and_is_kept(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "b" * (1 + number), "rejected": "w" * (2 + number)} for number in range(12)]
    scored: list[int] = []

    def score(batches: Iterable[Batch]) -> Iterator[tuple[Any, ...]]:
        for batch in batches:
            assert batch.documents is not None
            scored.append(batch.with_loss)
            yield tuple(-1.0 * counts for counts in batch.documents)

    data = opened(tmp_path, rows, sequence_tokens=40)
    assert "12 pairs" in data.refer(score, {"weights": 1}, sequences=2, seen=100)
    assert sum(scored) == 12
    batch = data.batch(0, data.count)
    assert batch.references is not None
    assert batch.documents is not None
    for told, counts in zip(batch.references, batch.documents, strict=True):
        assert told.tolist() == (-1.0 * counts).tolist()
    again = opened(tmp_path, rows, sequence_tokens=40)
    assert "were there" in again.refer(score, {"weights": 1}, sequences=2, seen=100)
    assert sum(scored) == 12
    # Other weights are another reference; fewer sequences are fewer pairs.
    again.refer(score, {"weights": 2}, sequences=2, seen=1)
    assert 12 < sum(scored) < 24
