"""Lists and ranges of sizes, and what `--device-mem` and `--host-mem` make of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.base.units import BINARY_UNITS, DECIMAL_UNITS, LONGEST_LIST, parse_byte_list
from tests.cli.test_cli_device_plan import refused
from tests.cli.test_cli_streams import shell

GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("40GiB", [40 * GIB]),
        ("16,24,40GiB", [16 * GIB, 24 * GIB, 40 * GIB]),
        ("16GiB, 24 GiB", [16 * GIB, 24 * GIB]),
        ("512MiB,1GiB", [512 * MIB, GIB]),
        ("16GB,24GiB", [16 * 10**9, 24 * GIB]),
        ("0.5,1.5GiB", [GIB // 2, 3 * GIB // 2]),
        ("64-192+32GiB", [64 * GIB, 96 * GIB, 128 * GIB, 160 * GIB, 192 * GIB]),
        ("64-100+32GiB", [64 * GIB, 96 * GIB]),
        ("16-128*2GiB", [16 * GIB, 32 * GIB, 64 * GIB, 128 * GIB]),
        ("512MiB-2GiB*2", [512 * MIB, GIB, 2 * GIB]),
        ("512MiB-1GiB+256MiB", [512 * MIB, 768 * MIB, GIB]),
        ("8,16-32+16GiB", [8 * GIB, 16 * GIB, 32 * GIB]),
        ("32,16GiB", [32 * GIB, 16 * GIB]),
        ("16,16,16GiB", [16 * GIB]),
        ("16-16+8GiB", [16 * GIB]),
        ("0,64GiB", [0, 64 * GIB]),
        ("0-64+32GiB", [0, 32 * GIB, 64 * GIB]),
        ("1048576", [MIB]),
        ("16,24gib", [16 * GIB, 24 * GIB]),
    ],
)
def test_lists(text: str, sizes: list[int]) -> None:
    assert parse_byte_list(text) == sizes


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ",", "GiB", "-", "16,,24GiB", "16,24,GiB", ",16GiB", "16GiB,", "-4GiB", "16,-4GiB"),
        *("64-32+8GiB", "16-128*1GiB", "16-128*0.5GiB", "16-128+0GiB", "0-64*2GiB", "16-128*-2GiB", "16-128*xGiB"),
        *("1-999999+1GiB", "1-1e6*1.0000001GiB", "1-2+1e-9GiB", "16-128GiB", "16-128+GiB", "-128+16GiB", "16-+16GiB"),
        *("16,24Gb", "16,24G", "16,24XiB", "nanGiB", "infGiB", "1e999GiB", "9PiB", "16;24GiB", "16 24GiB", "١٦GiB"),
        *("16-9PiB*2", ",".join(map(str, range(1, LONGEST_LIST + 2))) + "GiB"),
    ],
)
def test_nonsense_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(FlopwiseError) as told:
        parse_byte_list(text)
    assert told.value.hint
    assert told.value.exit_code == 2
    assert len(str(told.value)) < 600


def test_a_range_times_a_factor_that_has_the_unit_too() -> None:
    assert parse_byte_list("16GiB-64GiB*2") == parse_byte_list("16-64*2GiB")


def test_as_many_as_may_be() -> None:
    assert len(parse_byte_list(f"1-{LONGEST_LIST}+1GiB")) == LONGEST_LIST
    with pytest.raises(FlopwiseError, match="more than 64 sizes"):
        parse_byte_list(f"1-{LONGEST_LIST + 1}+1GiB")
    with pytest.raises(FlopwiseError, match="more than 64 sizes"):
        parse_byte_list(f"1-{LONGEST_LIST}+1,{LONGEST_LIST + 1}GiB")


@given(st.lists(st.integers(0, 2**52), min_size=1, max_size=8, unique=True))
def test_exact_sizes_come_back(sizes: list[int]) -> None:
    assert parse_byte_list(",".join(f"{size}B" for size in sizes)) == sizes


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True),
    st.sampled_from(sorted({*BINARY_UNITS, *DECIMAL_UNITS} - {"PiB", "PB"})),
)
def test_a_unit_at_the_end_stands_for_all(numbers: list[int], unit: str) -> None:
    shared = parse_byte_list(",".join(map(str, numbers)) + unit)
    assert shared == parse_byte_list(",".join(f"{number}{unit}" for number in numbers))


@given(st.integers(1, 500), st.integers(0, 500), st.integers(8, 100))
def test_a_range_stays_within_its_bounds(first: int, span: int, step: int) -> None:
    found = parse_byte_list(f"{first}-{first + span}+{step}GiB")
    assert found[0] == first * GIB
    assert found == [first * GIB + index * step * GIB for index in range(len(found))]
    assert (first + span - step) * GIB < found[-1] <= (first + span) * GIB


@given(st.text(alphabet="0123456789,.-+*eEGiBM ", max_size=16) | st.text(max_size=12))
def test_whatever_is_typed_is_answered(text: str) -> None:
    try:
        found = parse_byte_list(text)
    except FlopwiseError as error:
        assert error.hint
    else:
        assert 1 <= len(found) <= LONGEST_LIST
        assert min(found) >= 0


# -- as options of `flopwise plan` ------------------------------------------------------------------------------------

PLAN = "plan llama-3-8b --on h100-sxm --seq 8k"


@pytest.mark.parametrize(
    ("caps", "said"),
    [
        ("--device-mem 40", "without a unit"),
        ("--device-mem 16,24", "without a unit"),
        ("--device-mem 16GiB,24", "without a unit"),
        ("--device-mem 0", "no device's memory"),
        ("--device-mem 0GiB", "no device's memory"),
        ("--device-mem=-4GiB", "cannot be negative"),
        ("--device-mem 90GiB", "more than h100-sxm has"),
        ("--device-mem 16-96*2GiB,200GiB", "more than h100-sxm has"),
        ("--device-mem 40G", "GiB"),
        ("--device-mem 16,,24GiB", "--device-mem"),
        ("--device-mem 64-32+8GiB", "never reaches its end"),
        ("--device-mem 1-999999+1GiB", "more than 64 sizes"),
        ("--device-mem 16-128*1GiB", "never reaches its end"),
        ("--device-mem lots", "--device-mem"),
        ("--host-mem=-4GiB", "--host-mem: a size in bytes cannot be negative"),
        ("--host-mem 64,,128GiB", "--host-mem"),
        ("--host-mem 9PiB", "more than any machine holds"),
        ("--host-mem 64-32+8GiB", "--host-mem"),
        ("--host-mem 110", "without a unit"),
    ],
)
def test_caps_that_cannot_be(caps: str, said: str) -> None:
    assert said in refused(f"{PLAN} {caps}")


def test_a_cap_of_zero_with_a_unit_is_not_told_that_it_has_none() -> None:
    assert "without a unit" not in refused(f"{PLAN} --device-mem 0GiB")


@pytest.mark.parametrize(
    "words",
    [
        *("--micro 1", "--recompute full", "--attention eager", "--fusion eager", "--stack torchtitan", "--offload"),
        *("--gpus 8", "--gpus 8 --offload"),
    ],
)
@pytest.mark.parametrize(
    "own", ["--host-mem 64GiB", "--clip", "--rule dataflow", "--trace x.json", "--device-mem 16,24GiB"]
)
def test_options_of_one_device_beside_those_of_frameworks(words: str, own: str) -> None:
    assert own.split(maxsplit=1)[0] in refused(f"{PLAN} {own} {words}")


def test_several_caps_beside_other_devices_are_not_called_unsupported() -> None:
    """They are supported for one device; the error should name the option that is in the way."""
    assert "not supported here yet" not in refused(f"{PLAN} --device-mem 16,24GiB --micro 1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lstm-lm --on h100-sxm --host-mem 64GiB", "cannot be planned in chunks"),
        ("llama-3-8b --on trn1 --seq 4k --host-mem 110GiB", "trn1 has no link to host memory"),
        ("llama-3-8b --on h100-sxm --seq 2G --host-mem 64GiB", "more than can be planned"),
        ("llama-3-8b --on h100-sxm --seq 0 --host-mem 64GiB", "--seq"),
        ("gpt2 --on h100-sxm --seq 8k --host-mem 64GiB", "learned positions for 1,024 tokens"),
        ("bert-base --on h100-sxm --seq 8k --host-mem 64GiB", "learned positions for 512 tokens"),
        ("llama-3-1b --on a100-80gb --host-mem 64GiB --precision fp8", "no peak for fp8"),
        ("gpt2 --on h100-sxm --host-mem 64GiB --batch 7 --batch-tokens 7k", "--batch"),
        ("gpt2 --on h100-sxm --host-mem 64GiB --batch-tokens 1000", "--batch-tokens"),
        ("gpt2 --on h100-sxm --host-mem 64GiB --batch 0", "--batch"),
    ],
)
def test_questions_that_cannot_be_asked(words: str, said: str) -> None:
    assert said in refused(f"plan {words}")


def test_a_model_of_a_million_layers_is_refused_at_once() -> None:
    """`predict` refuses it for several devices ("layer by layer"); here every layer is in several arrays."""
    words = "llama-3-8b --on h100-sxm --seq 1k --device-mem 40GiB --host-mem 4TiB --set layers=1000000"
    assert shell(f"timeout 120 $FLOPWISE plan {words}").returncode in (1, 2)
