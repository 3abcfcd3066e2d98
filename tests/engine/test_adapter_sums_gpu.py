"""Triton's kernels for what adapters add, beside plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flopwise.engine.kernels import activations, fused_adapters
from flopwise.engine.kernels.thin import Thin
from tests.support.triton_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS

TYPE = torch.float16 if IS_INTERPRETED else torch.bfloat16
"""The interpreter has no products in bfloat16."""
SIZES = [(1, 8, 1), (33, 72, 16), (70, 200, 5), (64, 384, 64), (129, 136, 33)]
"""Rows, width and depth."""


def drawn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, TYPE)


def thin_of(rows: int, width: int, depth: int, *, seed: int) -> Thin:
    """`low` as columns of something wider, the matrix as it lies in an adapter: transposed."""
    low = drawn(rows, depth + 8, seed=seed)[:, 3 : depth + 3]
    return Thin(low, drawn(width, depth, seed=seed + 1, scale=depth**-0.5).t())


def added(target: Tensor, thin: Thin | None, scale: float) -> Tensor:
    """What both should find, rounded once."""
    if thin is None:
        return target.clone()
    return (target.float() + scale * (thin.low.float() @ thin.matrix.float())).to(target.dtype)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """As near as two orders of summation round."""
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=2**-7 * float(wanted.abs().max()))


@pytest.mark.parametrize("sizes", SIZES)
def test_a_thin_product_is_added(sizes: tuple[int, int, int]) -> None:
    rows, width, _ = sizes
    thin, out = thin_of(*sizes, seed=1), drawn(rows, width + 4, seed=3)[:, :width]
    wanted = added(out, thin, 0.5)
    fused_adapters.add_thin_product(thin, scale=0.5, out=out)
    assert_near(out, wanted)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"])
@pytest.mark.parametrize("which", ["both", "gate", "up", "alone"])
@pytest.mark.parametrize("sizes", SIZES)
def test_an_activation_adds_what_adapters_do(kind: str, which: str, sizes: tuple[int, int, int]) -> None:
    rows, width, _ = sizes
    if which == "alone" and kind == "clamped_swiglu":
        pytest.skip("has a gate always")
    packed = drawn(rows, 2 * width, seed=5, scale=4.0)
    gate, up = None if which == "alone" else packed[:, :width], packed[:, width:]
    of_gate = thin_of(*sizes, seed=7) if which in ("both", "gate") else None
    of_up = thin_of(*sizes, seed=9) if which != "gate" else None
    wanted_gate, wanted_up = None if gate is None else added(gate, of_gate, 2.0), added(up, of_up, 2.0)
    out = torch.full_like(up, torch.nan)
    fused_adapters.activation_sums(kind, gate, up, thin=(of_gate, of_up), scale=2.0, out=out)
    assert_near(up, wanted_up)
    if gate is not None and wanted_gate is not None:
        assert_near(gate, wanted_gate)
    # From the sums as they are kept, so that a forward made again finds the same.
    wanted = torch.empty_like(out)
    activations.activation_forward(kind, gate, up, out=wanted)
    assert_near(out, wanted)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_an_activation_leads_back_from_the_sum(kind: str, *, gated: bool, sizes: tuple[int, int, int]) -> None:
    rows, width, _ = sizes
    if not gated and kind == "clamped_swiglu":
        pytest.skip("has a gate always")
    packed, gradient = drawn(rows, 2 * width, seed=11, scale=4.0), drawn(rows, width, seed=12)
    gate, up = packed[:, :width] if gated else None, packed[:, width:]
    thin = thin_of(*sizes, seed=13)
    above, kept_up = added(gradient, thin, 1.0), up.clone()
    kept_gate = None if gate is None else gate.clone()
    gate_out, up_out = None if gate is None else torch.empty_like(gate), torch.empty_like(up)
    activations.activation_backward(kind, above, kept_gate, kept_up, gate_out=gate_out, up_out=up_out, recompute=True)
    fused_adapters.activation_sums_backward(kind, gradient, gate, up, thin=thin)
    assert_near(gradient, above)
    assert_near(up, up_out)
    if gate is not None and gate_out is not None:
        assert_near(gate, gate_out)
