"""Frozen matrices in NF4 and int8: bitsandbytes' published values, and training over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flopwise.engine.kernels.quantised import NF4_VALUES, Quantised
from flopwise.engine.sharded.quantised import dequantise_rows, quantise_rows
from flopwise.work.adapters import Adapters
from flopwise.work.formats import quantised_bytes
from flopwise.work.parameters import parameters_of
from tests.engine.test_adapters import check_gradients, plan_of
from tests.support.adapted_modules import adapt
from tests.support.tiny_models import TINY, TOKENS
from tests.support.training_plans import FP64

THRESHOLDS = (
    # Of `dQuantizeNF4` in bitsandbytes' kernels: what lies above is at least the value of that number.
    *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984),
    *(-0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668),
    *(0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
)


def made(values: Tensor, kind: str) -> Quantised:
    rows, depth = values.numel() // values.shape[-1], values.shape[-1]
    buffer = torch.full((quantised_bytes(rows, depth, kind),), 255, dtype=torch.uint8)
    found = Quantised.within(buffer, tuple(values.shape), kind)
    found.quantise(values)
    return found


def numbers(matrix: Quantised) -> Tensor:
    return matrix.dequantise(out=torch.full(matrix.shape, torch.nan, dtype=torch.float64))


def test_the_sixteen_values_come_out_as_they_went_in() -> None:
    values = 3.0 * torch.tensor(NF4_VALUES).repeat(2, 8)
    found = made(values, "nf4")
    assert torch.equal(numbers(found).float(), values)
    assert found.scales.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    # Two to a byte, the first in the upper half: 0 and 1, 2 and 3.
    assert found.codes[0, :2].tolist() == [0x01, 0x23]


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 4), depth=st.integers(1, 200), seed=st.integers(0, 99))
def test_nf4_is_the_value_of_the_published_thresholds(rows: int, depth: int, seed: int) -> None:
    values = torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed))
    found, expected = made(values, "nf4"), torch.zeros(rows, depth)
    for first in range(0, depth, 64):
        block = values[:, first : first + 64]
        largest = block.abs().amax(1, keepdim=True)
        codes = (block / largest).unsqueeze(-1).gt(torch.tensor(THRESHOLDS)).sum(-1)
        expected[:, first : first + 64] = torch.tensor(NF4_VALUES)[codes] * largest
    assert torch.equal(numbers(found).float(), expected)
    piece = slice(rows // 2, rows)
    assert torch.equal(numbers(found.rows(piece)).float(), expected[piece])


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 4), depth=st.integers(1, 200), seed=st.integers(0, 99))
def test_int8_is_within_half_a_step_of_a_rows_largest(rows: int, depth: int, seed: int) -> None:
    values = torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed))
    found = made(values, "int8")
    largest = values.abs().amax(1, keepdim=True)
    assert torch.equal(found.codes.view(torch.int8), (values / largest * 127).round().to(torch.int8))
    assert (numbers(found) - values).abs().le(largest / 254 * (1 + 1e-5)).all()


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 4), depth=st.integers(1, 200), seed=st.integers(0, 99))
def test_fp8_is_the_nearest_number_of_e4m3(rows: int, depth: int, seed: int) -> None:
    """Of all 253 finite ones, written out by their fields."""
    values = torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed))
    found = made(values, "fp8")
    sizes = [2.0**-9 * f for f in range(8)] + [(8 + f) * 2.0 ** (e - 10) for e in range(1, 16) for f in range(8)][:-1]
    there = torch.tensor([*(-size for size in sizes), *sizes])
    shares = values / values.abs().amax(1, keepdim=True) * 448
    largest = values.abs().amax(1, keepdim=True)
    nearest = (there - shares.unsqueeze(-1)).abs().amin(-1)
    off = (numbers(found) / largest * 448 - shares).abs()
    assert torch.allclose(off.float(), nearest, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_zeros_stay_zeros(kind: str) -> None:
    assert not numbers(made(torch.zeros(3, 70), kind)).any()


@pytest.mark.parametrize("base", ["llama", "llama with magnitudes", "mixtral"])
@pytest.mark.parametrize("cut", ["whole", "chunk", "sequence"])
@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_adapters_over_quantised_weights_have_the_gradients_of_autograd(kind: str, cut: str, base: str) -> None:
    """Of a plain module that has the dequantised numbers."""
    name, _, more = base.partition(" with ")
    model = replace(TINY[name], adapters=Adapters(rank=3, alpha=5.0, magnitudes=bool(more)), layers=3)
    module = adapt(model)
    matrices = {each.name: each for each in parameters_of(model, TOKENS) if each.role == "matrix" and not each.trained}
    with torch.no_grad():
        for name, value in module.named_parameters():
            parameter = matrices.get(name.replace(".base.", "."))
            if parameter is not None and isinstance(parameter.part, int):
                # In fp32, in which it is taken over: so it comes out the same when it is quantised again.
                value.copy_(numbers(made(value.float(), kind)).float())
    for letters in ("f", "iFaC"):
        plan = plan_of(model, cut, letters, precision=f"{FP64},base={kind}")
        check_gradients(model, plan, module, packs=letters == "f")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (64, 4096), (300, 14336), (33, 2049)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_the_gpus_kernel_is_the_plain_form(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    found = made(torch.randn(shape, generator=torch.Generator().manual_seed(1)), kind)
    expected = found.dequantise(out=torch.empty(shape, dtype=dtype))
    there = Quantised(found.codes.cuda(), found.scales.cuda(), found.depth, kind)
    assert torch.equal(there.dequantise(out=torch.empty(shape, dtype=dtype, device="cuda")).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpus_kernel_writes_matrices_of_more_numbers_than_32_bits_count() -> None:
    """Experts' matrices of GLM-4.5: 2.5 · 10⁹ numbers of a block, in half as many bytes. The first program's alone."""
    from flopwise.engine.kernels import fused_quantised
    from flopwise.engine.kernels.quantised import nf4_table

    found = made(torch.randn((1, 2 * fused_quantised.LINE_BYTES), generator=torch.Generator().manual_seed(1)), "nf4")
    out = torch.full(found.shape, torch.nan, device="cuda")
    codes, scales, table = found.codes.cuda(), found.scales.cuda(), nf4_table(out.device)
    for count in (1 << 30, 160 * 3072 * 5120 // 2, 1 << 32):
        fused_quantised._dequantise_lines_kernel[(1,)](codes, scales, table, out, count, fused_quantised.LINE_BYTES)
        assert torch.equal(out.cpu(), found.dequantise(out=torch.empty(found.shape)))
        out.fill_(torch.nan)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("shape", [(3, 130), (1, 130), (0, 130), (4, 3, 65), (0, 3, 65)])
def test_rows_as_bytes_are_dealt_out_as_they_are(kind: str, shape: tuple[int, ...]) -> None:
    """To ranks that have several of them, one, or none; of rows whose bytes are no whole numbers of scales."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    rows = quantise_rows(values, kind)
    assert rows.shape == (*shape[:-1], quantised_bytes(1, shape[-1], kind))
    expected = numbers(made(values.view(-1, shape[-1]), kind)).view(shape) if values.numel() else values.double()
    assert torch.equal(dequantise_rows(rows, shape[-1], kind, torch.float64), expected)
    for place in range(shape[0]):
        assert torch.equal(dequantise_rows(rows[place : place + 1], shape[-1], kind, torch.float64)[0], expected[place])
