"""Files of other tools: packed, cut, damaged, or no files at all."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read import opening
from flopwise.profile.read.opening import TraceFile, open_trace

TEXT = b'{"traceEvents": []}'


def _content(path: Path) -> tuple[bytes, list[str]]:
    with open_trace(path) as source:
        return b"".join(source.blocks()), source.warnings


def _written(folder: Path, content: bytes, name: str = "trace.json") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_gunzips_by_content(tmp_path: Path) -> None:
    assert _content(_written(tmp_path, gzip.compress(TEXT))) == (TEXT, [])


def test_a_name_does_not_make_a_file_gzipped(tmp_path: Path) -> None:
    assert _content(_written(tmp_path, TEXT, "trace.json.gz")) == (TEXT, [])


def test_refuses_what_is_gzipped_twice(tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError, match="gzipped twice"):
        _content(_written(tmp_path, gzip.compress(gzip.compress(TEXT))))


def test_members_one_after_the_other_and_zeros_behind_them(tmp_path: Path) -> None:
    packed = gzip.compress(b"one ") + b"\0" * 512 + gzip.compress(b"two") + b"\0" * 3
    assert _content(_written(tmp_path, packed)) == (b"one two", [])


def test_a_cut_stream_gives_what_is_there(tmp_path: Path) -> None:
    whole = os.urandom(50_000)
    content, warnings = _content(_written(tmp_path, gzip.compress(whole)[:30_000]))
    assert 20_000 < len(content) < len(whole)
    assert whole.startswith(content)
    assert warnings == ["trace.json: its gzip stream is cut off; read up to there"]


def test_a_damaged_stream_gives_what_comes_before(tmp_path: Path) -> None:
    whole = b"".join(b"%d " % number for number in range(200_000))
    packed = bytearray(gzip.compress(whole))
    packed[len(packed) // 2 :] = b"\xff" * (len(packed) // 2)
    content, warnings = _content(_written(tmp_path, bytes(packed)))
    assert content[: len(whole) // 3] == whole[: len(whole) // 3]
    assert len(warnings) == 1


def test_garbage_behind_a_stream_is_told(tmp_path: Path) -> None:
    content, warnings = _content(_written(tmp_path, gzip.compress(TEXT) + b"garbage behind it"))
    assert content == TEXT
    assert "not gzip" in warnings[0]


@pytest.mark.parametrize("packed", [b"\x1f\x8b", b"\x1f\x8b\x08\x00", b"\x1f\x8bnonsense", gzip.compress(b"", mtime=0)])
def test_nothing_to_unpack_is_an_error(tmp_path: Path, packed: bytes) -> None:
    with pytest.raises(FlopwiseError, match="unpacks to nothing"):
        _content(_written(tmp_path, packed))


def test_a_bomb_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "MOST_BYTES", 4 * 2**20)
    path = _written(tmp_path, gzip.compress(bytes(8 * 2**20)))
    read = 0
    with pytest.raises(FlopwiseError, match="unpacks to more than"), open_trace(path) as source:
        for block in source.blocks():
            read += len(block)
    assert read <= 4 * 2**20


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16"])
def test_byte_order_marks_are_decoded(tmp_path: Path, codec: str) -> None:
    text = '{"name": "größer"}'
    assert _content(_written(tmp_path, text.encode(codec))) == (text.encode(), [])


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, message in (
        (pipe, "not a file"),
        (tmp_path, "is a folder"),
        (Path("/dev/null"), "not a file"),
        (tmp_path / "missing", "there is no file"),
        (loop, "cannot be opened"),
        (tmp_path / ("x" * 5000), "cannot be opened"),
        (Path("a\0b"), "cannot be opened"),
        (_written(tmp_path, b"", "empty"), "is empty"),
    ):
        with pytest.raises(FlopwiseError, match=message) as error:
            _content(path)
        assert error.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = _written(tmp_path, TEXT)
    path.chmod(0)
    with pytest.raises(FlopwiseError, match="may not be read"):
        _content(path)


def test_progress_is_told_in_bytes_of_the_file(tmp_path: Path) -> None:
    path = _written(tmp_path, gzip.compress(os.urandom(3 * 2**20)))
    told: list[tuple[str, int, int]] = []
    with open_trace(path, lambda what, done, of: told.append((what, done, of))) as source:
        assert sum(map(len, source.blocks())) == 3 * 2**20
    size = path.stat().st_size
    assert told[-1] == ("reading trace.json", size, size)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(1, 30), max_size=12))
@settings(max_examples=50, deadline=None)
def test_reading_and_peeking_agree_with_the_whole(blocks: list[bytes], sizes: list[int]) -> None:
    whole = b"".join(blocks)
    source = TraceFile("x", iter(blocks))
    for size in sizes:
        assert source.head(size) == whole[:size]
        assert source.read(size) == whole[:size]
        whole = whole[size:]
    assert b"".join(source.blocks()) == whole
