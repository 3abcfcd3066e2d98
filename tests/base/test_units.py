"""Quantities as people write them, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base import units
from flopwise.base.errors import FlopwiseError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GiB", 40 * 2**30),
        ("40 gib", 40 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5e12", 1_500_000_000_000),
        ("1.5GiB", 3 * 2**29),
        ("0", 0),
        ("512 MiB", 2**29),
        ("1_024 KiB", 2**20),
        ("7B", 7),
        ("2TB", 2 * 10**12),
        ("40gb", 40 * 10**9),
        ("1_000_000", 10**6),
        ("1_024.5KiB", 1_049_088),
    ],
)
def test_bytes(text: str, size: int) -> None:
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8k", 8192),
        ("8K", 8192),
        ("2M", 2_097_152),
        ("8192", 8192),
        ("1.5k", 1536),
        ("64k", 65536),
        ("1e3", 1000),
    ],
)
def test_tokens(text: str, count: int) -> None:
    assert units.parse_tokens(text) == count
    assert units.parse_sequences(text) == count


@pytest.mark.parametrize(
    "text",
    ["40G", "40g", "40 Gb/s", "forty", "", "-1GiB", "1e400", "1e30GiB", "GiB", "0x10", "١GiB", "3,5GiB", "1__0", "_1"],
)
def test_bad_bytes_are_answered(text: str) -> None:
    with pytest.raises(FlopwiseError) as caught:
        units.parse_bytes(text)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["64,256", "8,192", "512,1024", "8,5k", "1,2", "1,000_000", ",", "8,192,"])
def test_a_comma_is_never_a_thousand(text: str) -> None:
    for parse in (units.parse_bytes, units.parse_tokens, units.parse_sequences, units.parse_devices):
        with pytest.raises(FlopwiseError, match="a comma separates values") as caught:
            parse(text)
        assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64,256", [64, 256]), ("8,192", [8, 192]), ("1-8*2", [1, 2, 4, 8]), ("1-7+3,2k", [1, 4, 7, 2048]), ("4", [4])],
)
def test_lists_are_lists(text: str, expected: list[int]) -> None:
    assert units.parse_counts(text, units.parse_tokens, "1,2") == expected


@pytest.mark.parametrize("text", ["40Gb", "40Gib", "512 Mb", "1Tb"])
def test_a_capital_prefix_with_a_small_b_is_bits(text: str) -> None:
    with pytest.raises(FlopwiseError, match="bits"):
        units.parse_bytes(text)


def test_a_bare_g_is_ambiguous() -> None:
    with pytest.raises(FlopwiseError, match=r"binary.*decimal"):
        units.parse_bytes("40G")


@pytest.mark.parametrize("text", ["0", "1.3", "8kb", "-8k", "", "k", "8 8", "nan", "inf", "1e99", "9e15G"])
def test_bad_tokens_are_answered(text: str) -> None:
    with pytest.raises(FlopwiseError) as caught:
        units.parse_tokens(text)
    assert caught.value.hint


@given(st.text())
def test_any_text_is_a_quantity_or_a_clear_error(text: str) -> None:
    for parse in (units.parse_bytes, units.parse_tokens, units.parse_sequences):
        try:
            assert parse(text) >= 0
        except FlopwiseError as error:
            assert error.hint


@given(st.integers(1, units.LARGEST_COUNT))
def test_exact_words_are_read_back_equal(number: int) -> None:
    assert units.parse_bytes(f"{number}B") == number
    assert units.parse_tokens(units.exact_tokens(number)) == number


@given(st.floats(1e-9, 1e22))
def test_what_is_shown_has_three_digits_and_is_near(value: float) -> None:
    shown = units.significant(value)
    assert abs(float(shown.replace(",", "")) / value - 1) <= 0.005 + 1e-9
    digits = shown.replace(",", "").replace(".", "").lstrip("0")
    assert len(digits) == 3 or value >= 1000


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.show_bytes(83.14 * 2**30), "83.1 GiB"),
        (units.show_bytes(0), "0 B"),
        (units.show_count(8_030_261_248), "8.03 G"),
        (units.show_count(1.234e15, "FLOP"), "1.23 PFLOP"),
        (units.show_seconds(17.44), "17.4 s"),
        (units.show_seconds(0.00321), "3.21 ms"),
        (units.show_seconds(45e-6), "45.0 µs"),
        (units.show_seconds(0.9e-3), "900 µs"),
        (units.show_seconds(0.11e-3), "110 µs"),
        (units.show_seconds(0.9994e-3), "999 µs"),
        (units.show_seconds(1e-3), "1.00 ms"),
        (units.show_seconds(1e-3), "1.00 ms"),
        (units.show_seconds(7200), "120 min"),
        (units.show_seconds(86_400), "24.0 h"),
        (units.show_seconds(864_000), "10.0 days"),
        (units.show_share(0.5884), "58.8 %"),
        (units.significant(9.996), "10.0"),
        (units.significant(999.6), "1,000"),
        (units.exact_tokens(8192), "8k"),
        (units.exact_tokens(8000), "8000"),
    ],
)
def test_shown(shown: str, expected: str) -> None:
    assert shown == expected
