"""Products in fp8 on a GPU: the fused forms have the bits of the plain ones, and matrix units multiply as they should.

With TRITON_INTERPRET=1 and Triton at hand the fused forms run, slowly, on the processor, up to the rounding to fp8,
which its interpreter does otherwise than a GPU.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from flopwise.engine.kernels import fp8, fused_fp8
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.engine.streaming.fp8_products import LEAST_CAPABILITY, Fp8Products
from flopwise.engine.streaming.products import Products
from flopwise.plan import compile_plan
from flopwise.setup.training import Training
from tests.engine.test_fp8 import case, run, spread
from tests.engine.test_fp8_training import sixteens, weights_of
from tests.support.training_plans import cut_plan, random_batch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not IS_INTERPRETED and (not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY):
    pytest.skip("no CUDA device with fp8", allow_module_level=True)

# The interpreter is numpy, which warns where an infinity times zero is the NaN that is meant, and of its own use of it.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
needs_gpu = pytest.mark.skipif(IS_INTERPRETED, reason="matrix units")
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
HALF, SINGLE = torch.bfloat16, torch.float32
SHAPES = ((1, 1), (5, 7), (33, 257), (130, 100), (3, 28672), (2, 32769), (1030, 48))


def both(source: Tensor, along: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Numbers and scales by the plain and by the fused form."""
    rows, width = source.shape
    shape = (rows, width) if along == "rows" else (width, rows)
    found = []
    for form in ("plain", "fused"):
        is_exact = IS_INTERPRETED and form == "fused"
        out = torch.zeros(shape, dtype=SINGLE if is_exact else fp8.FLOAT8, device=DEVICE)
        scales = torch.empty(shape[0], device=DEVICE)
        call = getattr(fp8, f"plain_quantise_{along}") if form == "plain" else getattr(fused_fp8, f"quantise_{along}")
        call(source, out=out, scales=scales)
        found.append((out.to(fp8.FLOAT8), scales))
    return found[0], found[1]


def assert_same(source: Tensor, along: str) -> None:
    (plain, plain_scales), (fused, fused_scales) = both(source, along)
    assert torch.equal(plain_scales.nan_to_num(-1.0), fused_scales.nan_to_num(-1.0))
    assert torch.equal(plain.float().nan_to_num(1e9), fused.float().nan_to_num(1e9))


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_fused_forms_have_the_bits_of_the_plain(rows: int, width: int, along: str, dtype: torch.dtype) -> None:
    assert_same(spread(rows, width + 3, dtype=dtype).to(DEVICE)[:, 1 : width + 1], along)


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_zeros_extremes_and_what_is_not_finite(along: str) -> None:
    source = spread(40, 72)
    source[3], source[:, 5] = 0, 0
    source[7] *= 1e-37
    source[8] *= 1e35
    source[9, 1], source[10, 2], source[11, 3] = float("inf"), float("nan"), float("-inf")
    assert_same(source.to(DEVICE), along)
    assert_same(torch.zeros(16, 16, dtype=HALF, device=DEVICE), along)


@needs_gpu
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_places_beyond_32_bits(along: str) -> None:
    rows, width = 2**17 + 16, 2**14 + 16
    source = torch.zeros(rows, width, dtype=HALF, device=DEVICE)
    source[-1, -1], source[-2, -1], source[0, 0] = 448.0, 3.0, 1.0
    shape = (rows, width) if along == "rows" else (width, rows)
    out, scales = torch.empty(shape, dtype=fp8.FLOAT8, device=DEVICE), torch.empty(shape[0], device=DEVICE)
    getattr(fused_fp8, f"quantise_{along}")(source, out=out, scales=scales)
    assert float(out[-1, -1].float()) == 448.0 and float(out[0, 0].float()) == 448.0
    neighbour = out[-2, -1] if along == "rows" else out[-1, -2]
    assert float(neighbour.float()) == (448.0 if along == "rows" else 3.0)
    assert int(out.view(torch.uint8).count_nonzero()) == 3


def arena(size: int = 1 << 28) -> Arena:
    return Arena(torch.empty(size, dtype=torch.uint8, device=DEVICE))


@needs_gpu
@pytest.mark.parametrize("fast_sums", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(16, 16, 16), (48, 592, 1040), (4112, 1024, 2064)])
def test_matrix_units_make_the_plain_product(
    rows: int, inner: int, columns: int, biased: bool, fast_sums: bool
) -> None:
    operands = []
    for count, seed in ((rows, 0), (columns, 1)):
        values = torch.empty(count, inner, dtype=fp8.FLOAT8, device=DEVICE)
        scales = torch.empty(count, device=DEVICE)
        fp8.quantise_rows(spread(count, inner, seed=seed).to(DEVICE), out=values, scales=scales)
        operands += [values, scales]
    bias = spread(columns, seed=2).to(DEVICE) if biased else None
    wide = torch.zeros(2, rows, columns + 16, dtype=HALF, device=DEVICE)
    fp8.multiply(*operands, bias=bias, out=wide[0, :, 16:], fast_sums=fast_sums)
    fp8.plain_multiply(*operands, bias=bias, out=wide[1, :, 16:])
    assert (wide[:, :, :16] == 0).all()
    sizes = (operands[0].float().abs() * operands[1][:, None]) @ (operands[2].float().abs() * operands[3][:, None]).t()
    off = (wide[0] - wide[1])[:, 16:].float().abs()
    # Hopper's units keep some 13 bits below the largest of the products that they add at once.
    assert (off <= wide[1, :, 16:].float().abs() / 100 + sizes * (2e-3 if fast_sums else 1e-3)).all()


@needs_gpu
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("way", ["forward", "dgrad", "wgrad"])
def test_products_are_nearly_those_of_bf16(way: str, add: bool) -> None:
    given, room = {name: each.to(DEVICE) for name, each in case(512, 768, 256).items()}, arena()
    found, wanted = (
        on_device(products, given, way, add=add).double() for products in (Fp8Products(room), Products(room))
    )
    assert 1e-3 < float((found - wanted).norm() / wanted.norm()) < 0.06
    assert room.empty and room.peak_beside_bytes == 0


def on_device(products: Products, given: dict[str, Tensor], way: str, *, add: bool) -> Tensor:
    with torch.device(DEVICE):
        return run(products, given, way, add=add)


@needs_gpu
def test_a_step_on_a_gpu_is_that_on_a_cpu() -> None:
    model = sixteens("llama")
    plan = cut_plan(model, sequence=256, chunk=64, letters="iFac", attention="chunk", precision="fp8")
    batch, first, losses = random_batch(model, 1, 256, 0), weights_of(model), []
    for device in (torch.device("cpu"), DEVICE):
        executor = StreamingExecutor(plan, compile_plan(plan, model), model, Training(steps=5), device=device)
        executor.clear_moments()
        executor.set_weights(first)
        losses.append([executor.step(batch, step).loss for step in range(5)])
        assert executor.player.arena.peak_beside_bytes == 0
        executor.close()
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
