"""AdamW against torch's own, and rounding by chance against numpy: unbiased, and the same however it is cut."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flopwise.engine.kernels import blocks
from flopwise.engine.kernels.dispatch import Seed, UpdateSettings, adamw
from flopwise.engine.kernels.rounding import WEIGHTS, random_bits, round_by_chance
from tests.support.engine_memory import peak_bytes

SINGLE, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16
SETTINGS = UpdateSettings(rate=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, step=1)
FAR = 5 * 2**32 - 3
"""A place whose upper half is in use, and changes soon."""


def numpy_bits(seed: int, step: int, tensor: int, places: np.ndarray) -> np.ndarray:
    """The documented hash in unsigned numpy arithmetic."""

    def mixed(values: np.ndarray) -> np.ndarray:
        values = values ^ (values >> np.uint32(16))
        values = values * np.uint32(0x85EBCA6B)
        values = values ^ (values >> np.uint32(13))
        values = values * np.uint32(0xC2B2AE35)
        last: np.ndarray = values ^ (values >> np.uint32(16))
        return last

    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, step, tensor):
        key = (key ^ np.uint64(part)) + np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key = key ^ (key >> np.uint64(31))
    low, high = places.astype(np.uint32), (places >> np.uint64(32)).astype(np.uint32)
    inner = mixed(low ^ key.astype(np.uint32)) ^ (high * np.uint32(0x9E3779B1))
    bits: np.ndarray = mixed(inner ^ (key >> np.uint64(32)).astype(np.uint32)) >> np.uint32(16)
    return bits


def numpy_rounded(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """The upper sixteen bits of each number after its random bits are added."""
    rounded: np.ndarray = (values.view(np.uint32) + bits) >> np.uint32(16)
    return rounded


@given(st.integers(0, 2**63 - 1), st.integers(1, 2**31), st.integers(0, 2), st.integers(0, 2**40), st.integers(1, 300))
def test_random_bits_are_the_documented_hash(seed: int, step: int, tensor: int, first: int, count: int) -> None:
    found = random_bits(Seed(seed).keys(step, tensor), first, count, torch.device("cpu"))
    places = np.arange(first, first + count, dtype=np.uint64)
    assert np.array_equal(found.numpy(), numpy_bits(seed, step, tensor, places))


def test_random_bits_are_even_and_unrelated() -> None:
    count = 1 << 18
    streams = [
        random_bits(Seed(seed).keys(step, tensor), first, count, torch.device("cpu")).double()
        for seed, step, tensor, first in [(1, 1, 0, 0), (2, 1, 0, 0), (1, 2, 0, 0), (1, 1, 1, 0), (1, 1, 0, 2**32)]
    ]
    for stream in streams:
        # Sixty-four drawers of 4,096 on average: chi-square of 63 degrees stays below 63 + 6 · sqrt(126).
        drawers = torch.histc(stream, 64, 0, 65536)
        assert float(((drawers - 4096) ** 2 / 4096).sum()) < 63 + 6 * sqrt(126)
    neighbours = [stream[1:] for stream in streams[:1]]
    together = torch.stack([stream[:-1] for stream in streams] + neighbours)
    off = torch.corrcoef(together) - torch.eye(6, dtype=DOUBLE)
    assert float(off.abs().max()) < 6 / sqrt(count)


@pytest.mark.parametrize("value", [1.0 + 2**-10, -3.3, 1e-30, 1e-40, 0.1, -(2.0**-126), 3e38])
def test_rounding_by_chance_is_unbiased(value: float) -> None:
    count = 1 << 18
    values = torch.full((count,), value, dtype=SINGLE)
    rounded = round_by_chance(values, random_bits(Seed(3).keys(7, WEIGHTS), 0, count, torch.device("cpu")))
    found = np.unique(rounded.double().numpy())
    exact = float(values[0])
    below, above = float(found.min()), float(found.max())
    assert len(found) <= 2 and below <= exact <= above
    deviation = sqrt((above - exact) * (exact - below) / count) if above > below else 0.0
    assert abs(float(rounded.double().mean()) - exact) <= 5 * deviation + 1e-12 * abs(exact)


def test_what_needs_no_rounding_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, torch.nan]).repeat(500)
    rounded = round_by_chance(values, random_bits(Seed(0).keys(1, 0), 0, len(values), torch.device("cpu")))
    numbers = ~values.isnan()
    assert torch.equal(rounded.float()[numbers].view(torch.int32), values[numbers].view(torch.int32))
    assert rounded[~numbers].isnan().all()


@given(st.integers(1, 200), st.booleans(), st.floats(0.1, 2.0))
def test_adamw_is_torchs(count: int, as_tensor: bool, scale: float) -> None:
    torch.manual_seed(count)
    weights = torch.randn(count, dtype=DOUBLE)
    expected = weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([expected], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    for step in range(1, 5):
        gradients = torch.randn(count, dtype=DOUBLE)
        expected.grad = gradients * scale
        optimizer.step()
        factor = torch.tensor(scale, dtype=DOUBLE) if as_tensor else scale
        settings = replace(SETTINGS, step=step, gradient_scale=factor)
        adamw(weights, gradients, first, second, None, settings=settings, offset=0)
    torch.testing.assert_close(weights, expected.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("moments", [SINGLE, HALF])
@pytest.mark.parametrize("gradient_type", [SINGLE, HALF])
def test_a_master_is_updated_and_the_weights_are_its_rounding(moments: torch.dtype, gradient_type: torch.dtype) -> None:
    torch.manual_seed(1)
    master = torch.randn(1001)
    weights = master.to(HALF)
    gradients, first = torch.randn(1001).to(gradient_type), torch.randn(1001).to(moments)
    second = torch.rand(1001).to(moments)
    inputs = [each.double() for each in (master, gradients, first, second)]
    adamw(weights, gradients, first, second, master, settings=replace(SETTINGS, step=9), offset=0)
    adamw(inputs[0], inputs[1], inputs[2], inputs[3], None, settings=replace(SETTINGS, step=9), offset=0)
    torch.testing.assert_close(master.double(), inputs[0], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(first.double(), inputs[2], rtol=2e-6 if moments == SINGLE else 2**-8, atol=1e-7)
    torch.testing.assert_close(second.double(), inputs[3], rtol=2e-6 if moments == SINGLE else 2**-8, atol=1e-7)
    assert torch.equal(weights, master.to(HALF))


def state(count: int) -> list[Tensor]:
    """Weights, gradients and both moments in bf16."""
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(count, generator=generator) for _ in range(4)]
    return [each.to(HALF) for each in (*values[:3], values[3].abs())]


def test_weights_and_moments_are_rounded_by_chance() -> None:
    count = 5000
    weights, gradients, first, second = state(count)
    # The same update kept in float32 is what is rounded.
    exact = [each.float() for each in (weights, first, second)]
    settings = replace(SETTINGS, step=3, rounding=Seed(11))
    adamw(exact[0], gradients, exact[1], exact[2], None, settings=settings, offset=FAR)
    adamw(weights, gradients, first, second, None, settings=settings, offset=FAR)
    places = np.arange(FAR, FAR + count, dtype=np.uint64)
    for tensor, (values, found) in enumerate(zip(exact, (weights, first, second), strict=True)):
        rounded = numpy_rounded(values.numpy(), numpy_bits(11, 3, tensor, places))
        assert np.array_equal(found.view(torch.int16).numpy().view(np.uint16), rounded.astype(np.uint16))


@pytest.mark.parametrize("rounding", [None, Seed(4)])
def test_the_cut_changes_nothing(rounding: Seed | None, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, step=2, rounding=rounding)
    whole = state(4099)
    adamw(whole[0], whole[1], whole[2], whole[3], None, settings=settings, offset=FAR)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 40 * 77)
    for cut in (1000, 4098):
        pieces = state(4099)
        for part in (slice(0, cut), slice(cut, 4099)):
            weights, gradients, first, second = (each[part] for each in pieces)
            adamw(weights, gradients, first, second, None, settings=settings, offset=FAR + part.start)
        assert all(torch.equal(one, two) for one, two in zip(whole, pieces, strict=True))


def test_small_steps_are_not_lost() -> None:
    # A step of 1/64 of the distance between neighbours never shows when rounded to the nearest.
    settings = replace(SETTINGS, rate=2.0**-14, weight_decay=0.0)
    ends = {}
    for name, rounding in (("nearest", None), ("chance", Seed(9))):
        weights = torch.ones(20_000, dtype=HALF)
        first, second = torch.zeros(20_000), torch.zeros(20_000)
        for step in range(1, 33):
            now = replace(settings, step=step, rounding=rounding)
            adamw(weights, torch.full_like(weights, -1.0), first, second, None, settings=now, offset=0)
        ends[name] = float(weights.double().mean())
    assert ends["nearest"] == 1.0
    assert ends["chance"] == pytest.approx(1 + 32 * 2.0**-14, abs=5 * 2**-7 / sqrt(20_000))


def test_temporaries_are_bounded() -> None:
    weights, gradients, first, second = state(1 << 21)
    settings = replace(SETTINGS, step=2, rounding=Seed(1))
    peak = peak_bytes(lambda: adamw(weights, gradients, first, second, None, settings=settings, offset=0))
    assert 1 << 20 < peak <= 1.25 * blocks.BLOCK_BYTES
