"""Text that is trained on while it is still tokenized: nothing lost or seen twice, and an order without chance."""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data import DataRequest, StreamedData, is_streamed, open_streamed_data, streamed
from flopwise.engine.data.known import Known
from flopwise.engine.data.sources import find_sources
from flopwise.engine.data.spans import ByteRange, digest_of, hold_out, passages_of, pieces_of, spans_of
from tests.support.data_files import json_lines, quick_disk, request, text_file

__all__ = ["quick_disk"]
pytestmark = pytest.mark.usefixtures("quick_disk")

PIECE = 600
"""Bytes, in these tests."""
SEQUENCE = 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(streamed, "PART_BYTES", 3 * PIECE)
    monkeypatch.setattr(streamed, "AHEAD_PARTS", 2)


def sources_of(*paths: Path) -> Any:
    return find_sources([str(path) for path in paths], labelled=False)[0]


def texts_of(spans: list[ByteRange], known: Known) -> list[str]:
    """Documents of the spans, pieces of one put together again."""
    found, before = [], ""
    for span in spans:
        for passage in passages_of(span, digest_of(span, known), "text", None):
            before += passage.text
            if passage.last:
                found.append(before)
                before = ""
    assert not before
    return found


@given(
    st.lists(st.text("ab\né", max_size=30), min_size=1, max_size=20),
    st.integers(1, 90),
    st.floats(0, 0.9),
    st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_every_document_is_in_one_span(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, share: float, each: int
) -> None:
    folder = tmp_path_factory.mktemp("spans")
    # Every other time the last line has no end.
    rows = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + "\n" * (each % 2)
    path = text_file(folder / "a.jsonl", rows)
    trained, held = hold_out(spans_of(sources_of(path), size), share, 5, each)
    assert all(0 < span.size_bytes <= size for span in (*trained, *held)) and len(held) <= 5
    assert sum(span.size_bytes for span in (*trained, *held)) == len(rows.encode())
    spans = sorted((*trained, *held), key=lambda span: span.first)
    assert texts_of(spans, Known(folder)) == [text for text in texts if text.strip()]
    assert [span for piece in pieces_of(trained, 40) for span in piece] == trained


@given(st.lists(st.text("ab é", max_size=40), max_size=20), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_a_text_file_is_read_whole_line_by_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int
) -> None:
    folder = tmp_path_factory.mktemp("spans")
    text = "".join(f"{line}\n" for line in lines) + "end"
    spans = spans_of(sources_of(text_file(folder / "a.txt", text)), size)
    found = texts_of(spans, Known(folder))
    assert "".join(found).split() == text.split()


def corpus(folder: Path, *, rows: int = 120) -> list[Path]:
    """Two files of rows, each of which says its number, and one of text."""
    found = []
    for name, first in (("a", 0), ("b", rows)):
        texts = [{"text": f"<{number:04}>" + "x" * (number * 7 % 60)} for number in range(first, first + rows)]
        found.append(json_lines(folder / "data" / f"{name}.jsonl", texts))
    return [*found, text_file(folder / "data" / "c.txt", "".join(f"<{number:04}>\n" for number in range(5000, 5099)))]


def opened(folder: Path, cache: str = "cache", **changes: Any) -> StreamedData:
    asked: dict[str, Any] = {"sequence_tokens": SEQUENCE, "evaluation_share": 0.1, **changes}
    if not (folder / "data").exists():
        corpus(folder)
    return open_streamed_data(DataRequest(sources=(str(folder / "data"),), cache=folder / cache, vocab=257, **asked))


def numbers_in(rows: np.ndarray[Any, Any]) -> list[str]:
    """The numbers of documents that windows of one text hold whole."""
    import re

    text = "".join(chr(token) if token < 256 else "|" for token in rows.ravel().tolist())
    return re.findall(r"<(\d{4})>", text)


def test_an_epoch_sees_what_is_not_held_out_once(tmp_path: Path) -> None:
    data = opened(tmp_path)
    parts = 1
    while data._numbers_of(parts - 1) and data._starts[parts] < len(data._pieces):
        parts += 1
    assert parts > 5
    while len(data._ends) < parts:
        data._part_with(data._ends[-1])
    tokens = np.concatenate([data._part(part)[0] for part in range(parts)])
    seen = Counter(numbers_in(tokens))
    held = Counter(numbers_in(np.asarray(data._opened(data._judged).arrays["tokens"])))
    every = {f"{number:04}" for number in (*range(240), *range(5000, 5099))}
    assert set(seen) | set(held) == every and not set(seen) & set(held) and held
    # The last part is filled up with the next epoch's first pieces.
    more = data._starts[parts] - len(data._pieces)
    assert sum(count > 1 for count in seen.values()) <= 40 * more
    # Sequences are those of the part, each once.
    order = data._part(0)[1]
    assert sorted(order.tolist()) == list(range(data._ends[0]))
    data.close()


def test_the_order_is_the_same_whatever_is_there(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path, "elsewhere")
    whole = one.batch(0, 200)
    # From far on at first, backwards, in other pieces, and with a cache of everything.
    np.testing.assert_array_equal(other.batch(150, 7).ids, whole.ids[150:157])
    for first in (90, 3, 60):
        np.testing.assert_array_equal(other.batch(first, 40).labels, whole.labels[first : first + 40])
    again = opened(tmp_path)
    np.testing.assert_array_equal(again.batch(0, 200).ids, whole.ids)
    assert again.describe() == one.describe() == {**other.describe()}
    np.testing.assert_array_equal(whole.ids[:, 1:], whole.labels[:, :-1])
    different = opened(tmp_path, seed=1)
    assert not np.array_equal(different.batch(0, 200).ids, whole.ids)
    for ours, theirs in zip(one.evaluation(3), different.evaluation(3), strict=True):
        np.testing.assert_array_equal(ours.ids, theirs.ids)
    for data in (one, other, again, different):
        data.close()


def caches(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").glob("pieces-*.tokens")}


def test_a_training_begins_with_its_first_part_and_goes_no_further_than_it_must(tmp_path: Path) -> None:
    data = opened(tmp_path)
    sizes = [len(data._numbers_of(part)) for part in range(4)]
    # Together with what is held out.
    ends = (1 + np.cumsum(sizes)).tolist()
    assert len(caches(tmp_path)) == ends[0]
    # With the first step the next two parts are made.
    data.batch(0, 2)
    until(lambda: len(caches(tmp_path)) == ends[2])
    # In the second part, one more.
    data.batch(data._ends[0], 1)
    until(lambda: len(caches(tmp_path)) == ends[3])
    data.close()
    assert len(caches(tmp_path)) == ends[3] < len(data._pieces)


def until(done: Callable[[], bool]) -> None:
    """Wait for a thread, however busy the machine is."""
    waiting = threading.Event()
    for _ in range(6000):
        if done():
            return
        waiting.wait(0.01)
    raise AssertionError("it has not happened within a minute")


def test_who_closes_it_leaves_whole_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(tmp_path)
    begun, go = threading.Event(), threading.Event()
    documents = data._tokenizer.documents

    def slow(texts: Any) -> Any:
        if threading.current_thread().name == "tokenize":
            begun.set()
            go.wait(60)
        return documents(texts)

    monkeypatch.setattr(data._tokenizer, "documents", slow)
    monkeypatch.setattr("flopwise.engine.data.corpus.GROUP_TEXTS", 1)
    ended: list[str] = []

    def wait() -> None:
        try:
            data.batch(data._ends[0], 1)
        except RuntimeError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    begun.wait(60)
    # The thread is within a piece: it leaves it, and nothing of it is left.
    closing = threading.Thread(target=data.close)
    closing.start()
    until(lambda: data._ahead._closed)
    go.set()
    closing.join(60)
    assert not closing.is_alive()
    waiting.join(60)
    assert ended == ["tokens of data that is closed"]
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    # One that was at its last document may be done.
    assert left == caches(tmp_path) and len(left) - len(data._numbers_of(0)) in (1, 2)


def test_what_is_wrong_further_on_is_told_when_it_is_reached(tmp_path: Path) -> None:
    corpus(tmp_path)
    with (tmp_path / "data" / "b.jsonl").open("a") as stream:
        stream.write('{"text": 3}\n')
    # With this seed the first part has none of it.
    data = opened(tmp_path, seed=1, evaluation_share=0.0)
    with pytest.raises(FlopwiseError, match=r"from byte .* on: .*text is no text"):
        data.batch(0, 10_000)
    data.close()


def test_changed_files_have_another_fingerprint(tmp_path: Path) -> None:
    before = opened(tmp_path)
    path = tmp_path / "data" / "a.jsonl"
    path.write_text(path.read_text().replace("<0007>", "<0008>"))
    after = opened(tmp_path)
    assert before.describe()["fingerprint"] != after.describe()["fingerprint"]
    assert opened(tmp_path, sequence_tokens=17).describe()["fingerprint"] != after.describe()["fingerprint"]


def test_compressed_files_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "PART_BYTES", 300)
    monkeypatch.setattr(streamed, "PIECE_BYTES", 300)
    for path in corpus(tmp_path)[:2]:
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    (tmp_path / "data" / "c.txt").unlink()
    data = opened(tmp_path)
    assert [len(piece) for piece in data._pieces] == [1, 1] and not data._judged
    assert any("nothing is held out" in note and "not read from the middle" in note for note in data.notes)
    # Each is as much as a part.
    data._part_with(data._ends[0])
    numbers = [number for part in (0, 1) for number in numbers_in(data._part(part)[0])]
    assert sorted(numbers) == [f"{number:04}" for number in range(240)] and list(data.evaluation(2)) == []
    data.close()


def test_long_texts_are_told_to_be_cut(tmp_path: Path) -> None:
    corpus(tmp_path)
    (told,) = [note for note in opened(tmp_path).notes if "longer than" in note]
    assert told.startswith("1 text is longer than 600 B"), "rows are documents of their own, whatever is cut"
    (tmp_path / "data" / "c.txt").write_text("short")
    assert not [note for note in opened(tmp_path).notes if "longer than" in note]


def test_an_evaluation_of_its_own_is_read_whole(tmp_path: Path) -> None:
    corpus(tmp_path)
    other = text_file(tmp_path / "other.txt", "y" * 100)
    data = opened(tmp_path, evaluation=(str(other),))
    assert data.evaluation_count == 6 and sum(batch.sequences for batch in data.evaluation(4)) == 6
    assert not data._judged


def test_large_texts_are_streamed_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = corpus(tmp_path)
    monkeypatch.setattr(streamed, "STREAMED_FROM_BYTES", sum(path.stat().st_size for path in paths))
    assert is_streamed(request(tmp_path, *paths)) and not is_streamed(request(tmp_path, *paths[1:]))
    weighted = DataRequest(sources=(f"{paths[0]}:2", *map(str, paths)), sequence_tokens=8, vocab=257)
    assert not is_streamed(weighted) and not is_streamed(request(tmp_path))
    with pytest.raises(FlopwiseError, match="read once an epoch"):
        open_streamed_data(weighted)
    with pytest.raises(FlopwiseError, match="too little text"):
        opened(tmp_path, sequence_tokens=100_000)
