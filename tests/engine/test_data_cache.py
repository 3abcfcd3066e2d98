"""The token cache: its key, damage to it, a full disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.engine.data import DataRequest, LanguageData, known, open_classification_data, open_language_data
from flopwise.engine.data import tokenizer as tokenizer_module
from flopwise.engine.data.cache import key_of
from tests.support.data_files import LINES, byte_pair_tokenizer, csv_file, json_lines, request, text_file

ROWS = [{"text": line, "label": str(number % 2), "other": line[::-1]} for number, line in enumerate(LINES * 2)]


def cache_name(asked: DataRequest) -> str:
    name = open_language_data(asked).describe()["cache"]
    assert isinstance(name, str)
    return name


def test_the_same_content_at_another_place_is_the_same_cache(tmp_path: Path) -> None:
    first = cache_name(request(tmp_path, json_lines(tmp_path / "here" / "a.jsonl", ROWS)))
    shutil.copytree(tmp_path / "here", tmp_path / "elsewhere")
    assert cache_name(request(tmp_path, tmp_path / "elsewhere" / "a.jsonl")) == first
    # A folder's files are known by their path within it.
    assert cache_name(request(tmp_path, tmp_path / "here")) == cache_name(request(tmp_path, tmp_path / "elsewhere"))
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"text_column": "other"},
        {"label_column": "other"},
    ],
)
def test_the_key_changes_with_what_the_tokens_are_made_by(change: dict[str, Any], tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", ROWS)
    assert cache_name(request(tmp_path, source)) != cache_name(request(tmp_path, source, **change))


@pytest.mark.parametrize("change", [{"seed": 4}, {"evaluation_share": 0.3}, {"vocab": 50_000}, {"sequence_tokens": 9}])
def test_the_key_stays_with_what_only_chooses_among_tokens(change: dict[str, Any], tmp_path: Path) -> None:
    source = json_lines(tmp_path / "a.jsonl", ROWS)
    assert cache_name(request(tmp_path, source)) == cache_name(request(tmp_path, source, **change))


def test_the_key_changes_with_content_name_order_and_kind(tmp_path: Path) -> None:
    first = json_lines(tmp_path / "a.jsonl", ROWS)
    second = json_lines(tmp_path / "b.jsonl", ROWS)
    third = json_lines(tmp_path / "else" / "a.jsonl", [*ROWS[:-1], {**ROWS[-1], "text": ROWS[-1]["text"] + "!"}])
    names = [
        cache_name(request(tmp_path, *sources))
        for sources in ((first,), (second,), (third,), (first, second), (second, first))
    ]
    names.append(open_classification_data(request(tmp_path, first)).describe()["cache"])
    assert len(set(names)) == len(names)
    assert len({name.partition("-")[2] for name in names}) == len(names)


def test_an_edited_file_of_the_same_size_and_time_is_read_anew(tmp_path: Path) -> None:
    source = text_file(tmp_path / "a.txt", "a" * 40)
    before = source.stat()
    assert set(open_language_data(request(tmp_path, source)).batch(0, 1).ids[0]) == {ord("a")}
    text_file(source, "b" * 40)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert set(open_language_data(request(tmp_path, source)).batch(0, 1).ids[0]) == {ord("b")}


def test_the_key_changes_with_the_tokenizer_and_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = json_lines(tmp_path / "a.jsonl", ROWS)
    first = byte_pair_tokenizer(tmp_path / "first.json")
    second = tmp_path / "second.json"
    second.write_text(json.dumps({**json.loads(first.read_text()), "truncation": None}))
    asked = request(tmp_path, source, vocab=300, tokenizer=str(first))
    names = [
        cache_name(request(tmp_path, source, vocab=300)),
        cache_name(asked),
        cache_name(request(tmp_path, source, vocab=300, tokenizer=str(second))),
    ]
    monkeypatch.setattr("tokenizers.__version__", "0.0.0")
    names.append(cache_name(asked))
    assert len(set(names)) == 4
    copied = tmp_path / "copied.json"
    shutil.copy(first, copied)
    assert cache_name(request(tmp_path, source, vocab=300, tokenizer=str(copied))) == names[-1]


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=4))
def test_the_key_does_not_depend_on_the_order_of_the_ingredients(ingredients: dict[str, int]) -> None:
    assert key_of(ingredients) == key_of(dict(reversed(ingredients.items())))
    assert key_of(ingredients) != key_of({**ingredients, "one more": 1})


def test_a_cache_that_is_whole_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(tmp_path, text_file(tmp_path / "a.txt", "some text " * 20))
    first = open_language_data(asked)

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(tokenizer_module.ByteTokenizer, "documents", never)
    second = open_language_data(asked)
    assert second.describe() == first.describe()
    assert (second.batch(4, 9).ids == first.batch(4, 9).ids).all()


def damaged(content: bytes, kind: str) -> bytes:
    middle = len(content) // 3
    return {
        "truncated": content[:-7],
        "cut in half": content[: len(content) // 2],
        "empty": b"",
        "one bit of a token": content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
        "one bit of the description": content[:-200] + bytes([content[-200] ^ 1]) + content[-199:],
        "longer": content + b"\0" * 8,
        "bytes missing in the middle": content[:middle] + content[middle + 16 :],
        "zeros": bytes(len(content)),
        "another file": b"PK\3\4" * 100,
    }[kind]


DAMAGE = [
    "truncated",
    "cut in half",
    "empty",
    "one bit of a token",
    "one bit of the description",
    "longer",
    "bytes missing in the middle",
    "zeros",
    "another file",
]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_built_again_with_a_note(kind: str, tmp_path: Path) -> None:
    asked = request(tmp_path, text_file(tmp_path / "a.txt", "some text of this and that " * 200))
    first = open_language_data(asked)
    expected = first.batch(0, first.count).ids.copy()
    path = tmp_path / "cache" / first.describe()["cache"]
    content = path.read_bytes()
    # A new file: the open one is mapped.
    path.unlink()
    path.write_bytes(damaged(content, kind))
    again = open_language_data(asked)
    assert any("damaged" in note and path.name in note for note in again.notes)
    assert (again.batch(0, again.count).ids == expected).all()
    assert path.read_bytes() == content
    assert open_language_data(asked).notes == ()


def test_a_cache_of_something_else_under_the_name_is_not_believed(tmp_path: Path) -> None:
    first, second = (request(tmp_path, text_file(tmp_path / f"{letter}.txt", letter * 50)) for letter in ("a", "b"))
    folder = tmp_path / "cache"
    shutil.copy(folder / cache_name(first), folder / cache_name(second))
    data = open_language_data(second)
    assert set(data.batch(0, 1).ids[0]) == {ord("b")}
    assert any("made of something else" in note for note in data.notes)


def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(tmp_path, text_file(tmp_path / "a.txt", "some text " * 20_000))
    made = tempfile.mkstemp

    def on_a_full_disk(**options: Any) -> tuple[int, str]:
        handle, name = made(**options)
        os.close(handle)
        return os.open("/dev/full", os.O_WRONLY), name

    monkeypatch.setattr(tempfile, "mkstemp", on_a_full_disk)
    with pytest.raises(FlopwiseError, match="disk is full") as caught:
        open_language_data(asked)
    assert caught.value.hint is not None and "XDG_CACHE_HOME" in caught.value.hint
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.undo()
    assert open_language_data(asked).notes == ()


@pytest.mark.parametrize("kind", ["language", "classification"])
def test_a_disk_that_is_full_at_the_very_end_leaves_nothing_behind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    asked = request(tmp_path, json_lines(tmp_path / "a.jsonl", ROWS))
    with pytest.raises(FlopwiseError, match="disk is full"):
        (open_language_data if kind == "language" else open_classification_data)(asked)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interrupted_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer_module.ByteTokenizer, "documents", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_language_data(request(tmp_path, text_file(tmp_path / "a.txt", "text " * 20)))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_one_is_told(tmp_path: Path) -> None:
    source = text_file(tmp_path / "a.txt", "text " * 20)
    with pytest.raises(FlopwiseError, match=r"cannot be (read|written)") as caught:
        open_language_data(request(tmp_path, source, cache=source / "cache"))
    assert caught.value.hint is not None


def test_a_process_that_built_the_same_meanwhile_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the file system knows no locks."""

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    asked = request(tmp_path, text_file(tmp_path / "a.txt", "some text " * 50))
    plain = tokenizer_module.ByteTokenizer.documents
    others: list[LanguageData | None] = []

    def meanwhile(self: tokenizer_module.ByteTokenizer, texts: list[str]) -> list[tokenizer_module.Tokens]:
        if not others:
            others.append(None)
            others[0] = open_language_data(asked)
        return plain(self, texts)

    monkeypatch.setattr(tokenizer_module.ByteTokenizer, "documents", meanwhile)
    mine = open_language_data(asked)
    other = others[0]
    assert other is not None
    assert (mine.batch(0, 20).ids == other.batch(0, 20).ids).all()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_of_several_that_begin_at_once_one_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(tmp_path, text_file(tmp_path / "a.txt", "some text " * 50))
    plain, built = tokenizer_module.ByteTokenizer.documents, []

    def count(self: tokenizer_module.ByteTokenizer, texts: list[str]) -> list[tokenizer_module.Tokens]:
        built.append(1)
        return plain(self, texts)

    monkeypatch.setattr(tokenizer_module.ByteTokenizer, "documents", count)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: open_language_data(asked), range(4)))
    assert len(built) == 1
    assert all((each.batch(0, 20).ids == found[0].batch(0, 20).ids).all() for each in found)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_large_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "FROM_BYTES", 1)
    source = text_file(tmp_path / "a.txt", "some text " * 50)
    read: list[Path] = []

    def digest(path: Path) -> str:
        def make() -> str:
            read.append(path)
            return hashlib.sha256(path.read_bytes()).hexdigest()

        return known.Known(tmp_path / "cache").digest(path, make)

    # What was changed just now is not remembered: within a tick of the clock it may change again.
    assert digest(source) == digest(source) == hashlib.sha256(source.read_bytes()).hexdigest()
    assert len(read) == 2
    monkeypatch.setattr(known, "SETTLED_NS", -1)
    assert digest(source) == digest(source)
    assert len(read) == 3
    # Another content of the same size, with its times set back.
    before = source.stat()
    source.write_text("same text " * 50)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest(source) == hashlib.sha256(source.read_bytes()).hexdigest()
    (tmp_path / "cache" / known.REMEMBERED).write_text("{damaged")
    assert digest(source) == hashlib.sha256(source.read_bytes()).hexdigest()


def test_a_file_changed_just_before_it_was_read_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long reading takes: meanwhile it may have changed again, within the same tick of the clock."""
    monkeypatch.setattr(known, "FROM_BYTES", 1)
    source = text_file(tmp_path / "a.txt", "some text")
    now = [source.stat().st_ctime_ns]
    monkeypatch.setattr("time.time_ns", lambda: now[0])

    def make() -> str:
        now[0] += 10 * known.SETTLED_NS
        return "digest"

    assert known.Known(tmp_path / "cache").digest(source, make) == "digest"
    assert not (tmp_path / "cache" / known.REMEMBERED).exists()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = text_file(tmp_path / "a.txt", "some text " * 50)

    def change(what: str, *_: int) -> None:
        if what == "read":
            text_file(source, "other text" * 50)

    with pytest.raises(FlopwiseError, match="changed while it was read"):
        open_language_data(request(tmp_path, source), tell=change)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_folder_the_users_own_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    asked = request(tmp_path, text_file(tmp_path / "a.txt", "text " * 20), cache=None)
    assert (tmp_path / "mine" / "flopwise" / "tokens" / cache_name(asked)).is_file()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert asked.cache_folder() == tmp_path / "home" / ".cache" / "flopwise" / "tokens"


def test_identifiers_beyond_sixteen_bits_survive(tmp_path: Path) -> None:
    vocabulary = {f"w{number}": number for number in range(70_000)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    path = text_file(tmp_path / "tokenizer.json", json.dumps(tokenizer))
    source = csv_file(tmp_path / "a.csv", ("text",), [("w69999 w65536 w65535 w1 w2",)])
    asked = request(tmp_path, source, tokenizer=str(path), vocab=70_000, sequence_tokens=4)
    batch = open_language_data(asked).batch(0, 1)
    assert batch.ids.tolist() == [[69_999, 65_536, 65_535, 1]]
    assert batch.labels.tolist() == [[65_536, 65_535, 1, 2]]
