"""The offload trainer on an A100 and an RTX 3090: read whole, and repeated by the simulator with its own kernels."""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

from flopwise.catalog.load import load_hardware, load_model
from flopwise.references.dataflow.recorded import repeat_steps, validate_recorded, with_kernels
from flopwise.references.published.offload import read_offload
from flopwise.work.transformer import Transformer

CARDS = ("a100-pcie-80gb", "rtx-3090")


def test_the_table_is_read_whole_and_names_its_cards() -> None:
    runs = read_offload(table="offload-ampere")
    counted = Counter((run.hardware, run.succeeded) for run in runs)
    assert counted == {(CARDS[0], True): 279, (CARDS[0], False): 85, (CARDS[1], True): 122, (CARDS[1], False): 28}
    assert {run.model for run in runs} == {"llama-3-8b"}


@pytest.mark.parametrize("card", CARDS)
def test_its_attention_is_the_librarys_for_ampere(card: str) -> None:
    hardware = load_hardware(card)
    assert hardware.efficiency.attention.kernel == "flash-2"
    assert with_kernels(hardware).efficiency.attention.kernel == "flash-3"


@pytest.mark.parametrize("card", CARDS)
def test_steps_of_every_length_are_met(card: str) -> None:
    runs = [run for run in read_offload(table="offload-ampere") if run.succeeded and run.hardware == card][::13]
    model = load_model("llama-3-8b")
    assert isinstance(model, Transformer)
    steps = repeat_steps(runs, {"llama-3-8b": model}, {card: load_hardware(card)})
    off = [abs((seconds or 0.0) / run.step_s - 1.0) for run, (seconds, _) in zip(runs, steps, strict=True)]
    assert len({run.sequence_tokens for run in runs}) >= 6
    assert median(off) < 0.02
    assert max(off) < 0.1
    found = validate_recorded(
        runs[:3], {"llama-3-8b": model}, {card: load_hardware(card)}, table="offload-ampere", protocol="p"
    )
    assert found.n == 3
