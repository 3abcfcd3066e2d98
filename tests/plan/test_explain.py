"""Why a plan is as it is, what would help, the least memory; and plans of every kind of model and hardware."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from flopwise.base.units import parse_bytes
from flopwise.catalog.load import ROOT
from flopwise.plan.device.explain import make_plan, what_helps
from flopwise.plan.device.search import fastest_plan
from flopwise.plan.device.smallest import Least, least_device, least_host
from flopwise.records.plan import Planned
from flopwise.setup.setup import CappedSetup
from flopwise.work.formats import parse_formats
from tests.cli.test_cli_device_plan import ran, record, refused
from tests.cli.test_cli_fuzz import answered
from tests.plan.test_device_search import fits, question, questions

GIB, MIB = 2**30, 2**20
DERIVED = {
    *("chunk_tokens", "chunks_per_round", "rounds_per_step", "head_chunk_tokens", "weights", "gradients"),
    *("optimizer_state", "activation_slots", "saves", "update_place", "update_when"),
}
"""What the search decides of every plan; `attention` too where a sequence is several chunks."""
FEW = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# -- reasons and helps -----------------------------------------------------------------------------------------------


QUESTIONS = {
    "roomy": question(),
    "tight": question(layers=4, device_cap_bytes=3 * GIB, host_cap_bytes=32 * GIB),
    "long": question(layers=4, sequence_tokens=50_000, device_cap_bytes=6 * GIB, host_cap_bytes=16 * GIB),
    "clipped": question(layers=4, device_cap_bytes=6 * GIB, batch_sequences=12, clip=True),
    "no host": question(host_cap_bytes=0),
}


@cache
def explained(name: str) -> Planned:
    return make_plan(QUESTIONS[name])


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_derived_value_has_its_reason(name: str) -> None:
    found = explained(name)
    attention = {"attention"} if found.plan.chunks_per_sequence > 1 else set()
    assert set(found.reasons) == DERIVED | attention
    for reason in found.reasons.values():
        assert reason.strip()
        assert not re.search(r"\bnan\b|\binf\b|None|\{|\}", reason)
    if QUESTIONS[name].batch_sequences:
        assert found.reasons["rounds_per_step"] == "the batch of 12 sequences"
    assert ("clipping needs" in found.reasons["update_when"]) == (found.plan.update_when == "end")


@pytest.mark.parametrize("name", QUESTIONS)
def test_more_memory_never_costs_speed(name: str) -> None:
    asked, helps = QUESTIONS[name], explained(name).helps
    assert helps
    for found in helps:
        assert found.speed >= 1
        assert found.device_memory_bytes >= asked.device_cap_bytes
        assert found.host_memory_bytes >= asked.host_cap_bytes
        assert (found.device_memory_bytes, found.host_memory_bytes) != (asked.device_cap_bytes, asked.host_cap_bytes)
        assert found.device_memory_bytes <= asked.hardware.device.dram.size_bytes.value


def test_no_more_device_memory_is_offered_than_there_is() -> None:
    asked = question(device_cap_bytes=int(question().hardware.device.dram.size_bytes.value) - GIB)
    found = fastest_plan(asked)
    assert found is not None
    assert {help_.device_memory_bytes for help_ in what_helps(found, asked)} == {asked.device_cap_bytes}


def test_what_helps_says_it_where_memory_is_short() -> None:
    assert max(found.speed for found in explained("tight").helps) > 1


# -- the least memory ------------------------------------------------------------------------------------------------


def capped(asked: CappedSetup, place: str, size: int) -> CappedSetup:
    return replace(asked, device_cap_bytes=size) if place == "device" else replace(asked, host_cap_bytes=size)


@pytest.mark.parametrize("place", ["device", "host"])
@FEW
@given(asked=questions())
def test_the_least_memory_is_enough_and_little_less_is_not(place: str, asked: CappedSetup) -> None:
    found: Least | None = (least_device if place == "device" else least_host)(asked)
    if found is None:
        assert fastest_plan(asked) is None
        return
    assert sum(found.by_owner.values()) == found.bytes
    # A hint rounds up; what whole chunks lose to rounding is far less than that.
    enough = capped(asked, place, int(1.02 * found.bytes) + 64 * MIB)
    best = fastest_plan(enough)
    assert best is not None
    assert fits(best.plan, enough)
    if found.bytes > MIB:
        assert fastest_plan(capped(asked, place, int(0.9 * found.bytes))) is None


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_the_least_memory_is_enough_where_state_passes_through_activations(precision: str) -> None:
    """Clipped, the state of a whole end passes at the end of a step, where almost all of the activations must be."""
    asked = question(
        layers=3,
        sequence_tokens=50_000,
        clip=True,
        device_cap_bytes=GIB,
        host_cap_bytes=8 * GIB,
        formats=parse_formats(precision),
    )
    found = least_device(asked)
    assert found is not None
    enough = capped(asked, "device", found.bytes)
    best = fastest_plan(enough)
    assert best is not None
    assert fits(best.plan, enough)


CASES = {
    "llama-3-8b": "llama-3-8b --set layers=8 --on h100-sxm --seq 8k --device-mem 3GiB --host-mem 20GiB",
    "no host": "llama-3-8b --set layers=8 --on h100-sxm --seq 8k --device-mem 10GiB --host-mem 0GiB",
    "mixture": "mixtral-8x7b --set layers=8 --on h100-sxm --seq 4k --device-mem 6GiB --host-mem 150GiB",
    "classifier": "bert-base --on a100-80gb --device-mem 60MiB --host-mem 4GiB",
    "short of host": "llama-3-8b --set layers=8 --on h100-sxm --seq 64k --device-mem 13GiB --host-mem 10GiB",
    "clipped, by batch": "gpt2 --on rtx-4090 --device-mem 100MiB --host-mem 2GiB --clip --batch 48",
    "mixed": "llama-3-1b --on h100-sxm --seq 4k --precision bf16-mixed --device-mem 1GiB --host-mem 64GiB",
}


@pytest.mark.parametrize("name", CASES)
def test_every_hint_works_and_little_less_does_not(name: str) -> None:
    line = CASES[name]
    told = refused(f"plan {line}", code=1)
    hints = re.findall(r"(--[a-z-]+) (\w+)", told.split("hint: ")[1])
    assert hints
    for option, value in hints:
        plain = re.sub(rf" {option} \S+", "", line)
        code, _, err = ran(f"plan {plain} {option} {value} -o json")
        assert code == 0, (option, value, err)
    words = re.search(r"the smallest plan needs ([\d.,]+ \w+) of (device|host) memory", told)
    assert words
    needed, option = parse_bytes(words[1]), f"--{words[2]}-mem"
    less = re.sub(rf" {option} \S+", "", line) + f" {option} {int(0.95 * needed)}"
    assert refused(f"plan {less}", code=1)


@pytest.mark.parametrize(
    "words",
    [
        "llama-3-8b --on h100-sxm --seq 1G --host-mem 64GiB",
        "llama-3-8b --on h100-sxm --seq 1 --device-mem 1GiB --host-mem 1GiB",
        "gpt-3-175b --on rtx-4090 --seq 2k --host-mem 64GiB",
        "gpt-3-175b --on h100-sxm --seq 2k --host-mem 0",
        "gpt2 --on h100-sxm --device-mem 1MiB --host-mem 1GiB",
    ],
)
def test_what_fits_nowhere_is_told(words: str) -> None:
    assert "no plan fits" in refused(f"plan {words}", code=1)


def test_host_memory_is_no_hint_where_there_is_no_link() -> None:
    """`--host-mem` is refused there, so it cannot be what helps."""
    assert "--host-mem" not in refused("plan llama-3-8b --on trn1 --seq 4k", code=1)


# -- hardware --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "llama-3-8b --on rtx-4090 --seq 4k --host-mem 110GiB",
        "llama-3-8b --on a100 --seq 4k --host-mem 110GiB",
        "llama-3-8b --on mi300x --seq 4k --host-mem 110GiB",
        "llama-3-1b --on trn1 --seq 4k",
    ],
)
def test_other_hardware(words: str) -> None:
    found = record(words)
    if "trn1" in words:
        assert (found["host_memory_bytes"], found["host_bytes"]) == (0, 0)


def test_without_a_link_nothing_speaks_of_more_host_memory() -> None:
    """`--host-mem` is refused there: neither a note nor a help may name it."""
    found = record("llama-3-1b --on trn1 --seq 4k")
    assert not any("--host-mem" in note for note in found["notes"])
    assert all(more["host_memory_bytes"] == 0 for more in found["helps"])


def test_a_host_that_is_not_described_or_not_measured_is_told(tmp_path: Path) -> None:
    described = (ROOT / "hardware" / "h100-sxm.toml").read_text(encoding="utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(re.sub(r"\[host\]\n(.+\n)+\n", "", described), encoding="utf-8")
    assert any("does not say how much there is" in note for note in record(f"gpt2 --on {file}")["notes"])
    assert any("those of usual machines" in note for note in record("llama-3-1b --on h100-sxm --seq 2k")["notes"])


def test_host_memory_of_the_description_is_the_default() -> None:
    found = record("llama-3-1b --on h200 --seq 2k")
    assert 100 * GIB < found["host_memory_bytes"] < 125 * GIB
    assert not any("host memory" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("llama-3-1b --on h200 --seq 2k --host-mem 125GiB", True),
        ("llama-3-1b --on h200 --seq 2k --host-mem 64GiB", False),
        ("llama-3-1b --on rtx-4090 --seq 2k --host-mem 64GiB", True),
        ("llama-3-1b --on rtx-4090 --seq 2k --host-mem 0", False),
    ],
)
def test_a_host_cap_that_may_be_all_there_is_is_told(words: str, told: bool) -> None:
    assert any("the system, Python and data need some" in note for note in record(words)["notes"]) is told


def test_a_processor_needs_no_link() -> None:
    """Measured where this runs, so only what must hold anywhere."""
    code, _, err = answered(["plan", "gpt2", "--on", "this-cpu", "--seq", "256", "--batch", "4", "-o", "json"])
    assert code in (0, 1), err
    assert "this-cpu has no link" in refused("plan gpt2 --on this-cpu --seq 256 --host-mem 1GiB")


@pytest.mark.parametrize("gone", ["link", "host", "link and host"])
def test_a_description_without_link_or_host(gone: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    assert answered(["show", "h200", "-w", str(file)])[0] == 0
    text = file.read_text()
    for part in gone.split(" and "):
        text = re.sub(rf"^\[{part}[.\]](?:.*\n)(?:(?!\[).*\n)*", "", text, flags=re.MULTILINE)
        text = re.sub(rf"^\[{part}\.(?:.*\n)(?:(?!\[).*\n)*", "", text, flags=re.MULTILINE)
        assert f"[{part}" not in text
    file.write_text(text)
    found = record(f"gpt2 --on {file} --device-mem 4GiB")
    assert found["host_memory_bytes"] == 0
    line = f"gpt2 --on {file} --device-mem 1GiB --host-mem 8GiB"
    if "link" in gone:
        assert "no link" in refused(f"plan {line}")
    else:
        assert record(line)["host_memory_bytes"] == 8 * GIB


# -- formats, optimizers, batches, models ------------------------------------------------------------------------------

TIGHT = "llama-3-1b --on h100-sxm --seq 4k --device-mem 4GiB --host-mem 30GiB"


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp8"])
def test_precisions(precision: str) -> None:
    found = record(f"{TIGHT} --precision {precision}")
    assert found["precision"] == precision
    if precision == "bf16-mixed":
        state = found["host_bytes_by_owner"]["optimizer"] + found["device_bytes_by_owner"]["optimizer"]
        assert state >= 12 * 1.2e9


def test_optimizers_by_their_moments() -> None:
    held = {}
    for optimizer in ("adamw", "lion", "sgd"):
        found = record(f"{TIGHT} --optimizer {optimizer}")
        held[optimizer] = sum(found[f"{place}_bytes_by_owner"].get("optimizer", 0) for place in ("device", "host"))
    assert held["adamw"] > held["lion"] > held["sgd"] == 0


@pytest.mark.parametrize("words", ["--batch 48", "--batch 48 --clip", "--batch 7", "--batch-tokens 192k"])
def test_a_batch_is_kept_exactly(words: str) -> None:
    found = record(f"{TIGHT} {words}")
    wanted = {"48": 48, "7": 7, "192k": 48}[words.split()[1]]
    assert found["tokens_per_step"] == wanted * 4096
    assert found["update_when"] == ("end" if "--clip" in words else "backward")


@pytest.mark.parametrize(
    "words",
    [
        "bert-base --on h100-sxm --device-mem 1GiB --host-mem 4GiB",
        "mixtral-8x7b --on h100-sxm --seq 4k --device-mem 40GiB --host-mem 400GiB",
        "gpt2 --on h100-sxm --device-mem 1GiB --host-mem 4GiB",
        "mistral-7b --on h100-sxm --seq 64k --device-mem 40GiB --host-mem 110GiB",
        "pythia-1b --on h100-sxm --device-mem 4GiB --host-mem 40GiB",
        "llama-3-8b --on h100-sxm --seq 1 --device-mem 40GiB --host-mem 64GiB",
        "qwen3-0.6b --on h100-sxm --seq 5003 --device-mem 4GiB --host-mem 40GiB",
    ],
)
def test_models_of_every_kind(words: str) -> None:
    found = record(words)
    assert set(found["reasons"]) >= DERIVED
    beyond = any("is made for sequences of" in note for note in found["notes"])
    assert beyond == words.startswith("mistral")


def test_the_convention_changes_utilization_and_not_time() -> None:
    causal, palm = record(TIGHT), record(f"{TIGHT} --convention palm")
    assert causal["step_s"] == palm["step_s"]
    assert causal["mfu"] < palm["mfu"]
