"""AdamW with moments in codes of 8 bits as a kernel of Triton: the codes and scales of the plain form, bit for bit.

They need a GPU; with TRITON_INTERPRET=1 and Triton at hand (3.9: an older one's interpreter rounds twice where a GPU
multiplies and adds at once) they run, slowly, on the processor.
"""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels import adamw_8bit as plain
from flopwise.engine.kernels import fused_update
from flopwise.engine.kernels.adamw_8bit import Codes, borders, quantise, table
from flopwise.engine.kernels.jit import ARITHMETIC, kernel
from flopwise.engine.kernels.rounding import Seed
from flopwise.engine.kernels.updating import UpdateSettings
from tests.support.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:((overflow|invalid value|underflow) encountered|All-NaN):RuntimeWarning"),
]
CPU = torch.device("cpu")
SINGLE, HALF = torch.float32, torch.bfloat16
LEAST, LARGEST = 2.0**-149, torch.finfo(SINGLE).max


@kernel()
def _codes_kernel(
    values: tl.tensor,
    codes: tl.tensor,
    tables: tl.tensor,
    signed: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row, column = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, width)
    place = row[:, None] * width + column[None, :]
    given = tl.load(values + place)
    shares = fused_update._shares(given, tl.max(tl.abs(given), 1))
    found = fused_update._nearest(shares, tl.load(tables + column), signed, rows, width)
    tl.store(codes + place, found.to(tl.uint8))


def codes_of(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """By the kernel and by the plain form."""
    count = len(values) // 256
    expected, scales = torch.empty(len(values), dtype=torch.uint8), torch.empty(count)
    quantise(values, expected, scales, signed=signed)
    found = torch.zeros(-(-count // 4) * 1024, dtype=torch.uint8, device=DEVICE)
    padded = torch.zeros(len(found)).index_copy_(0, torch.arange(len(values)), values).to(DEVICE)
    tables = fused_update._tables(DEVICE)[1 if signed else 3]
    _codes_kernel[(len(found) // 1024,)](padded, found, tables, signed=signed, rows=4, width=256, **ARITHMETIC)
    return found[: len(values)].cpu(), expected


def in_blocks(numbers: Tensor, scale: float) -> Tensor:
    """Whole blocks, whose largest is the scale."""
    numbers = numbers[numbers.abs() <= scale]
    blocks = torch.zeros(-(-len(numbers) // 255), 256)
    blocks[:, 0] = scale
    filled = torch.zeros(blocks.shape[0] * 255)
    filled[: len(numbers)] = numbers
    blocks[:, 1:] = filled.view(-1, 255)
    return blocks.flatten()


def around(numbers: Tensor, steps: int) -> Tensor:
    """Each number and its neighbours."""
    found = [numbers]
    for end in (torch.inf, -torch.inf):
        next_one = numbers
        for _ in range(steps):
            next_one = torch.nextafter(next_one, torch.tensor(end))
            found.append(next_one)
    return torch.cat(found)


SCALES = (1.0, 0.75, 3.0, 0.1, 1.9999999, 1e-7, 3.3e-12, 1e-19, 1.2e-38, 1e-40, 6e-45, LEAST, 1e19, 1.7e38, LARGEST)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("signed", [True, False])
def test_values_borders_and_their_neighbours(signed: bool, scale: float) -> None:
    numbers = torch.cat([table(CPU, signed=signed), borders(CPU, signed=signed)])
    wide = (numbers.double() * float(torch.tensor(scale))).float()
    given = torch.cat([around(wide, 3), torch.tensor([0.0, -0.0, LEAST, scale])])
    given = given if signed else given.clamp_min(0.0)
    found, expected = codes_of(in_blocks(given, float(torch.tensor(scale))), signed=signed)
    assert torch.equal(found, expected)
    # A largest number of −1 is as far as the table goes, not further.
    if signed:
        found, expected = codes_of(-in_blocks(given, float(torch.tensor(scale))), signed=signed)
        assert torch.equal(found, expected)
        assert int(found[0]) == 0


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("spread", [0.5, 4.0, 30.0])
def test_random_numbers(signed: bool, spread: float) -> None:
    """Of a few, of many and of all magnitudes that there are."""
    count = 64 if IS_INTERPRETED else 16384
    generator = torch.Generator().manual_seed(int(spread))
    values = torch.randn(count, 256, generator=generator)
    values *= torch.exp(spread * torch.randn(count, 256, generator=generator))
    values *= torch.exp(spread * torch.randn(count, 1, generator=generator))
    values = values.nan_to_num(posinf=LARGEST, neginf=-LARGEST)
    values[3] = 0.0
    found, expected = codes_of((values if signed else values.abs()).flatten(), signed=signed)
    assert torch.equal(found, expected)
    assert int((torch.bincount(expected.int()) > 0).sum()) > 200 or spread == 30.0


def test_what_is_no_number_has_a_code() -> None:
    """One of the table's, so that nothing is read beside it, now or at the next step."""
    values = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    values[0], values[1, 5], values[2, 7], values[3] = torch.nan, torch.nan, torch.inf, torch.inf
    values[4], values[5, :9] = -torch.inf, -torch.inf
    for signed in (True, False):
        found, expected = codes_of((values if signed else values.abs()).flatten(), signed=signed)
        assert torch.equal(found.view(8, 256)[6:], expected.view(8, 256)[6:])


KEPT = [(SINGLE, False), (HALF, False), (HALF, True)]


@pytest.mark.parametrize(("weight_type", "has_master"), KEPT[:1] if IS_INTERPRETED else KEPT)
@pytest.mark.parametrize("rounding", [None, Seed(17)])
@pytest.mark.parametrize("count", [1, 255, 256, 1024, 2049, 40_003])
def test_steps_have_the_bits_of_the_plain_form(
    weight_type: torch.dtype, has_master: bool, rounding: Seed | None, count: int
) -> None:
    generator = torch.Generator().manual_seed(count)
    settings = UpdateSettings(
        rate=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, step=1, rounding=rounding
    )
    master = torch.randn(count, generator=generator)
    blocks = -(-count // 256)
    states = []
    for device in (CPU, DEVICE):
        codes = Codes(*(
            each.clone().to(device)
            for each in (
                torch.full((count,), 127, dtype=torch.uint8),
                torch.zeros(blocks),
                torch.zeros(count, dtype=torch.uint8),
                torch.zeros(blocks),
            )
        ))  # fmt: skip
        states.append((master.to(weight_type).to(device), codes, master.clone().to(device) if has_master else None))
    for step in range(1, 4):
        gradients = torch.randn(count, generator=generator) * torch.exp(3 * torch.randn(count, generator=generator))
        gradients = gradients.to(weight_type)
        # Places whose upper half changes within the piece.
        given = {"settings": replace(settings, step=step, gradient_scale=0.37), "offset": 3 * 2**32 - 700}
        for form, (weights, codes, wide) in zip((plain, fused_update), states, strict=True):
            form.adamw_8bit(weights, gradients.to(weights.device), codes, wide, **given)
        (expected, slow, _), (found, fast, _) = states
        for name in ("first", "first_scale", "second", "second_scale"):
            assert torch.equal(getattr(fast, name).cpu(), getattr(slow, name)), name
        # Behind them is a root, which torch need not round as exactly.
        close = 2e-6 if weight_type == SINGLE else 2**-7
        torch.testing.assert_close(found.cpu(), expected, rtol=close, atol=close)
        assert int((found.cpu() != expected).sum()) <= 1 + count // 100
