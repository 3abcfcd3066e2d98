"""A pickle as plain data: what the pickle module writes reads back equal; what would run code is refused."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.profile.read.plain_pickle import Limits, plain_data

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.integers(-(2**900), 2**900)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
)
KEYS = st.integers(-(2**63), 2**63) | st.text(max_size=8) | st.tuples(st.integers(0, 9), st.text(max_size=3))


def plain(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.lists(inner, max_size=5).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=5)
        ),
        max_leaves=12,
    )


def read(data: bytes, **limits: int) -> Any:
    return plain_data(io.BytesIO(data), Limits(**limits))


@settings(max_examples=50)
@given(data=plain(SCALARS), protocol=st.integers(0, 5))
def test_plain_data_reads_back_equal(data: Any, protocol: int) -> None:
    assert read(pickle.dumps(data, protocol)) == data


@settings(max_examples=30)
@given(
    data=plain(SCALARS | st.binary(max_size=300) | st.sets(KEYS, max_size=4) | st.frozensets(KEYS, max_size=4)),
    protocol=st.integers(4, 5),
)
def test_bytes_and_sets_read_back_equal(data: Any, protocol: int) -> None:
    assert read(pickle.dumps(data, protocol)) == data


@pytest.mark.parametrize("protocol", range(6))
def test_kinds_are_kept_and_long_lists_come_whole(protocol: int) -> None:
    data = {"numbers": list(range(3000)), "flags": (True, 1, 1.0, None), "text": "a\nb\\é\ud800" + "x" * 300}
    found = read(pickle.dumps(data, protocol))
    assert found == data
    assert [type(value) for value in found["flags"]] == [bool, int, float, type(None)]


def test_what_is_shared_stays_shared() -> None:
    inner = [1, 2]
    found = read(pickle.dumps([inner, inner]))
    assert found[0] is found[1]


def test_only_the_first_pickle_of_a_file_is_read() -> None:
    assert read(pickle.dumps({"a": 1}) + b"rest") == {"a": 1}


class _Runs:
    """Pickles into a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


class _Built:
    """Pickles into NEWOBJ and BUILD."""

    def __init__(self) -> None:
        self.field = 1


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_a_command_is_refused_and_runs_nothing(protocol: int, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    evil = pickle.dumps({"segments": [_Runs(f"touch {witness}")]}, protocol)
    with pytest.raises(FlopwiseError, match="not plain data") as caught:
        read(evil)
    assert "system, which is refused" in str(caught.value)
    assert not witness.exists()
    pickle.loads(evil)  # noqa: S301 - our own bytes: they do run where nothing stops them
    assert witness.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_objects_are_refused(protocol: int) -> None:
    for value in (_Built(), OrderedDict(a=1), 1j, range(3)):
        with pytest.raises(FlopwiseError, match="not plain data"):
            read(pickle.dumps(value, protocol))


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"(S'touch %b'\nios\nsystem\n.",
        b"(ios\nsystem\n.",
        b"(No.",
        b")N\x81.",
        b")NN\x92.",
        b"N)R.",
        b"]}X\x01\x00\x00\x00aNsb.",
        b"Pone\n.",
        b"NQ.",
        b"\x82\x01.",
        b"\x83\x01\x00.",
        b"\x84\x01\x00\x00\x00.",
        b"\x97.",
    ],
    ids=[
        *("GLOBAL", "STACK_GLOBAL", "STRING and INST", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD"),
        *("PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER"),
    ],
)
def test_every_opcode_that_could_build_something_is_refused(code: bytes, tmp_path: Path) -> None:
    with pytest.raises(FlopwiseError):
        read(code.replace(b"%b", bytes(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


def test_what_contains_itself_is_refused() -> None:
    itself: list[Any] = [1]
    itself.append({"again": (itself,)})
    with pytest.raises(FlopwiseError, match="not plain data") as caught:
        read(pickle.dumps(itself))
    assert "contains itself" in str(caught.value)


@pytest.mark.parametrize("code", [b"]" * 5000 + b"a" * 4999 + b".", b"N" + b"\x85" * 50_000 + b"."])
def test_deep_nesting_is_refused(code: bytes) -> None:
    with pytest.raises(FlopwiseError, match="not plain data") as caught:
        read(code)
    assert "nested" in str(caught.value)


def test_nesting_up_to_the_limit_is_read() -> None:
    data: list[Any] = []
    for _ in range(9):
        data = [data]
    assert read(pickle.dumps(data), nesting=10) == data
    with pytest.raises(FlopwiseError):
        read(pickle.dumps([data]), nesting=10)
    # Two shallow ways to one thing, the second of them deep in all.
    with pytest.raises(FlopwiseError):
        read(pickle.dumps([data[0][0][0], [[[[[data[0][0][0]]]]]]]), nesting=10)


def test_doubling_by_reference_costs_no_time() -> None:
    # Sixty lists, each twice in the next: 2**60 leaves for whoever would copy them.
    chained = b"]q\x00" + b"".join(b"0]q%c(h%ch%ce" % (i + 1, i, i) for i in range(60)) + b"."
    found = read(chained)
    assert len(found) == 2
    assert found[0] is found[1]


@pytest.mark.parametrize(
    "code",
    [
        b"\x8b\xff\xff\xff\x7f",  # an integer of 2 GiB
        b"\x8b\xff\xff\xff\xff",  # of a negative size
        b"X\xff\xff\xff\xff",  # a text of 4 GiB
        b"\x8e" + b"\xff" * 8,  # bytes without end
        b"I" + b"9" * 100_000 + b"\n.",
        b"}N" + b"\x85" * 50_000 + b"Ns.",  # a deep tuple as a key
        b"}\x8f(K\x01\x90Ns.",  # a set as a key
        b"}]Ns.",  # a list as a key
        b"(Kad.",  # a key without a value
        b"(t(",
        b"g1\n.",
        b"gx\n.",
        b"h\x01.",
        b"N",
        b"",
        b".",
        b"\x80\x06N.",
        b"\xff",
    ],
)
def test_bad_bytes_are_an_error_in_words(code: bytes) -> None:
    with pytest.raises(FlopwiseError):
        read(code)


def test_memory_is_bounded() -> None:
    with pytest.raises(FlopwiseError, match="it would take more than"):
        read(pickle.dumps(list(range(1_000_000))), memory_bytes=2**20)
    with pytest.raises(FlopwiseError, match="it would take more than"):
        read(pickle.dumps("x" * 2**24), memory_bytes=2**20)
    with pytest.raises(FlopwiseError, match="it has more than"):
        read(pickle.dumps("x" * 1000), file_bytes=999)


@pytest.mark.parametrize(
    "code",
    [
        b"]r\xff\xff\xff\x7f.",  # the memo would take 32 GiB
        b"]p4000000000\n.",
    ],
)
def test_an_index_of_the_memo_takes_no_more_than_is_allowed(code: bytes) -> None:
    with pytest.raises(FlopwiseError, match="it would take more than"):
        read(code)


def test_a_hash_that_takes_for_ever_is_ended() -> None:
    """Sixty tuples, each twice in the next, as the key of a dict: 2**60 hashes."""
    chained = b"}N\x85\x94" + b"".join(b"0h%ch%c\x86\x94" % (i, i) for i in range(60)) + b"Ns."
    with pytest.raises(FlopwiseError, match="was ended by signal"):
        read(chained, small_s=1)


def test_tuples_of_numbers_are_shared() -> None:
    pool = (0, 1)
    found = read(pickle.dumps([{"segment_pool_id": pool}, {"segment_pool_id": pool}]))
    assert found[0]["segment_pool_id"] is found[1]["segment_pool_id"]


def test_keys_that_collide_take_no_longer_than_is_allowed() -> None:
    """Multiples of the prime that hashes are taken by: each is looked for behind all the others."""
    data = {n * (2**61 - 1) << 40: None for n in range(1, 12)}
    assert read(pickle.dumps(data)) == data
    keys = (n * (2**61 - 1) << 40 for n in range(1, 60_000))
    many = b"}(" + b"".join(b"\x8a\x12%bN" % key.to_bytes(18, "little", signed=True) for key in keys) + b"u."
    with pytest.raises(FlopwiseError, match="was ended by signal"):
        read(many, small_s=1)


def test_opcodes_are_found_across_blocks() -> None:
    """Arguments and texts of every length lie across the borders of what is looked at together."""
    for length in (100, 255, 256, 16_380, 16_384, 40_000):
        data = [("x" * length, 2**40 + n, (n, n)) for n in range(3 + 40_000 // length)]
        for protocol in (0, 2, 4):
            assert read(pickle.dumps(data, protocol)) == data


@settings(max_examples=50)
@given(data=st.data(), protocol=st.integers(0, 5))
def test_damage_raises_nothing_but_our_error(data: st.DataObject, protocol: int) -> None:
    whole = bytearray(pickle.dumps({"a": [1, 2.5, "text", None, (1, 2)], "b": {"c": [[], {}], 7: 2**80}}, protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for code in (bytes(whole), bytes(whole[:cut])):
        try:
            read(code, memory_bytes=2**20)
        except FlopwiseError:
            continue


@settings(max_examples=50)
@given(st.binary(max_size=60))
def test_random_bytes_raise_nothing_but_our_error(code: bytes) -> None:
    try:
        read(code, memory_bytes=2**20)
    except FlopwiseError:
        return
