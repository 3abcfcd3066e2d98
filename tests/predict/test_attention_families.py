"""Which family of kernels attention is costed by, and that each call gets the first that takes it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flopwise as fw
from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import hardware_names, load_hardware, load_model, load_stack, stack_names
from flopwise.predict.kernels.attention import Direction, attention_times, kernels_for
from flopwise.predict.kernels.calls import Phase, step_calls
from flopwise.predict.kernels.costs import attention_costs
from flopwise.setup.efficiency import FLASH_KERNELS
from flopwise.work.describe import describe
from flopwise.work.formats import parse_formats

WAYS: tuple[Direction, ...] = ("forward", "backward")


@pytest.mark.parametrize("name", hardware_names())
def test_every_device_says_whose_rates_it_has(name: str) -> None:
    hardware = load_hardware(name)
    attention = hardware.efficiency.attention
    assert attention.families
    assert set(attention.families) <= set(FLASH_KERNELS)
    for family in attention.families:
        first = attention.preferring((family,))
        assert first.kernel == family
        assert set(first.families) == set(attention.families)
        assert first.source in hardware.sources
        assert first.preferring(attention.families) == replace(
            attention.preferring(attention.families), others=first.preferring(attention.families).others
        )


def test_the_order_of_preference_skips_what_a_device_does_not_have() -> None:
    attention = load_hardware("a100-80gb").efficiency.attention
    assert attention.preferring(("flash-4", "flash-3", "cudnn")).kernel == "cudnn"
    assert attention.preferring(("flash-4",)) is attention
    assert attention.preferring(()) is attention


@pytest.mark.parametrize(
    ("call", "family"),
    [
        ({"head_dim": 128, "area": 0.5}, "triton"),
        ({"head_dim": 256, "area": 0.5}, "flash-3"),
        ({"head_dim": 128, "area": 0.1}, "flash-3"),
        ({"head_dim": 128, "area": 0.1, "packed": True}, "flash-2"),
        ({"head_dim": 512, "area": 0.5}, "triton"),
    ],
)
def test_a_family_that_cannot_take_a_call_is_not_assumed(call: dict[str, float], family: str) -> None:
    """Triton's of 2022: heads up to 128, no windows, even lengths. None here takes heads of 512: the first is kept."""
    attention = load_hardware("h100-sxm").efficiency.attention.preferring(("triton",))
    packed = bool(call.pop("packed", False))
    assert kernels_for(attention, **call, packed=packed).kernel == family


def test_calls_of_several_families_at_once_are_those_of_each_alone() -> None:
    hardware = load_hardware("h100-sxm")
    efficiency = replace(
        hardware.efficiency, attention=hardware.efficiency.attention.preferring(("triton", "cudnn", "flash-2"))
    )
    rng = np.random.default_rng(7)
    heads = rng.choice([64, 96, 128, 192, 256, 320], 60)
    packed, area = rng.random(60) < 0.3, rng.choice([0.05, 0.3, 0.5, 1.0], 60)
    tokens, flops = rng.integers(100, 70_000, 60), rng.uniform(1e9, 1e13, 60)

    def times(way: Direction, mine: slice | int) -> np.ndarray:
        return attention_times(
            hardware.device,
            efficiency,
            way,
            flops=flops[mine],
            moved_bytes=1e6,
            heads=32,
            tokens=tokens[mine],
            head_dim=heads[mine],
            peak_flops=989.5e12,
            area_share=area[mine],
            packed=packed[mine],
        ).seconds

    for way in WAYS:
        together = times(way, slice(None))
        assert together.shape == (60,)
        np.testing.assert_allclose(together, [float(times(way, index)) for index in range(60)], rtol=1e-12)


def test_published_rates_are_met() -> None:
    """torch's FlashAttention-2 on an H200, causal, 32 heads of 128: TFLOP/s as timed there, 1 × 64k and 2 × 8k."""
    hardware = load_hardware("h200")
    efficiency = replace(hardware.efficiency, attention=hardware.efficiency.attention.preferring(("flash-2",)))
    for tokens, sequences, rates in ((8192, 2, (323, 286)), (65536, 1, (341, 324))):
        for way, rate in zip(WAYS, rates, strict=True):
            flops = sequences * tokens**2 * 32 * 128 * 2 * (2.5 if way == "backward" else 1.0)
            seconds = attention_times(
                hardware.device,
                efficiency,
                way,
                flops=flops,
                moved_bytes=sequences * tokens * 4096 * 8,
                heads=32 * sequences,
                tokens=tokens,
                head_dim=128,
                peak_flops=989.5e12,
            ).seconds
            assert flops / float(seconds) / 1e12 == pytest.approx(rate, rel=0.03)


# -- as it is asked for -----------------------------------------------------------------------------------------------


def test_a_word_chooses_the_kernels_and_a_stack_names_its_own() -> None:
    plain = fw.predict("llama-3-8b", on="h100-sxm", seq="32k", micro=1)
    assert plain.attention_kernel == "flash-3"
    assert plain.chosen["attention"] == "assumed without a stack"
    slower = fw.predict("llama-3-8b", on="h100-sxm", seq="32k", micro=1, attention="flash-2")
    assert (slower.attention, slower.attention_kernel) == ("flash", "flash-2")
    assert "attention" not in slower.chosen
    assert slower.step_s > 1.2 * plain.step_s
    titan = fw.predict("llama-3-8b", on="h100-sxm", seq="8k", devices=8, stack="torchtitan")
    assert (titan.attention_kernel, titan.chosen["attention"]) == ("flash-2", "torchtitan's")
    blackwell = fw.predict("llama-3-8b", on="b200", seq="8k", devices=8, stack="torchtitan")
    assert blackwell.attention_kernel == "cudnn"
    eager = fw.predict("llama-3-8b", on="h100-sxm", seq="2k", attention="eager")
    assert eager.attention_kernel is None


def test_packed_and_even_attention_are_two_families_on_hopper() -> None:
    even = fw.predict("bert-base", on="h200", seq=512)
    packed = fw.predict("bert-base", on="h200", seq=512, lengths="mean=128")
    assert (even.attention_kernel, packed.attention_kernel) == ("cudnn", "flash-2")


def test_kernels_that_nobody_timed_there_are_refused_by_name() -> None:
    with pytest.raises(FlopwiseError, match="no rates of flash-4 attention on a100-80gb") as caught:
        fw.predict("llama-3-8b", on="a100-80gb", attention="flash-4")
    assert "flash-2" in str(caught.value.why)
    with pytest.raises(FlopwiseError, match="flash-9"):
        fw.predict("llama-3-8b", on="a100-80gb", attention="flash-9")


def test_families_of_stacks_are_known_ones() -> None:
    assert {name for name in stack_names() if load_stack(name).flash_kernels} >= {"torchtitan", "nanotron"}
    with pytest.raises(FlopwiseError, match="flash-9"):
        replace(load_stack("nanotron"), flash_kernels={"any": ("flash-9",)})


@pytest.mark.parametrize(("family", "forward", "backward"), [("flash-3", 320, 832), ("flash-2", 384, 960)])
def test_narrow_values_are_widened_for_kernels_that_need_it(family: str, forward: int, backward: int) -> None:
    """Keys of 192 and values of 128: a pair is 192 + 128 channels forward, and 3 × 192 + 2 × 128 backward."""
    hardware, work = load_hardware("h100-sxm"), describe(load_model("deepseek-v2-lite"), 4096)
    calls = step_calls(work, parse_formats("bf16"), "none", "fused", "adamw")
    model = replace(load_hardware("h100-sxm").efficiency.attention.preferring((family,)), others=None)
    alone = replace(hardware, efficiency=replace(hardware.efficiency, attention=model))
    costs = attention_costs(calls.attentions, alone, np.array([1.0]))
    wide = attention_costs([replace(call, value_share=1.0) for call in calls.attentions], alone, np.array([1.0]))
    kernels = np.array([[call.count * (3 if call.phase == Phase.BACKWARD else 1)] for call in calls.attentions])
    launches = kernels * alone.efficiency.launch_s
    shares = (costs.seconds - launches) / (wide.seconds - launches)
    assert shares[:, 0].tolist() == pytest.approx([forward / 384, backward / 960])
