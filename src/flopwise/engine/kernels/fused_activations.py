"""Activations of a feed-forward block as kernels of Triton: forward, and backward, which may recompute the result."""

# A kernel's arguments arrive by their places.
# ruff: noqa: PLR0917

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from flopwise.engine.kernels.jit import ARITHMETIC, column_block, kernel

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
"""Those with a fused form."""


@kernel()
def value_and_slope(values: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """What `activations` has in plain form."""
    if kind == "silu":
        share = 1.0 / (1.0 + tl.exp(-values))
        value = values * share
        slope = share * (1.0 + values * (1.0 - share))
    elif kind == "gelu":
        # The normal distribution's tail by Abramowitz and Stegun 7.1.26; the result is off by 4.2e-7 at most,
        # erf's by 4.5e-7; the slope has the power too. 65,536 × 3,072: 274 → 212 µs, back 421 → 394.
        power = tl.exp(-0.5 * values * values)
        near = 1.0 / tl.fma(tl.abs(values), 0.231641888, 1.0)
        tail = tl.fma(tl.fma(near, 0.5307027145, -0.7265760135), near, 0.7107068705)
        tail = tl.fma(tl.fma(tail, near, -0.142248368), near, 0.127414796) * near * power
        share = tl.where(values < 0.0, tail, 1.0 - tail)
        value = values * share
        slope = share + values * power * 0.3989422804014327
    elif kind == "gelu_tanh":
        argument = 0.7978845608028654 * (values + 0.044715 * values * values * values)
        # tanh(x) = 1 − 2 / (e^2x + 1), which an overflow of the power leaves at 1.
        inner = 1.0 - 2.0 / (tl.exp(2.0 * argument) + 1.0)
        value = 0.5 * values * (1.0 + inner)
        steepness = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * values * values)
        slope = 0.5 * (1.0 + inner) + 0.5 * values * (1.0 - inner * inner) * steepness
    elif kind == "clamped_swiglu":
        kept = tl.minimum(values, 7.0)
        share = 1.0 / (1.0 + tl.exp(-1.702 * kept))
        value = kept * share
        slope = tl.where(values > 7.0, 0.0, share * (1.0 + 1.702 * kept * (1.0 - share)))
    else:
        tl.static_assert(kind == "relu")
        value = tl.where(values > 0.0, values, 0.0)
        slope = tl.where(values > 0.0, 1.0, 0.0)
    return value, slope


@kernel()
def gated_value(gates: tl.tensor, ups: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """What an activation makes of gate and up."""
    value, _ = value_and_slope(gates, kind)
    if kind == "clamped_swiglu":
        ups = tl.minimum(tl.maximum(ups, -7.0), 7.0) + 1.0
    return value * ups


@kernel()
def gated_back(above: tl.tensor, gates: tl.tensor, ups: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """The gradients of gate and up, and the activation's result again."""
    value, slope = value_and_slope(gates, kind)
    of_up = above * value
    if kind == "clamped_swiglu":
        of_up = tl.where(tl.abs(ups) > 7.0, 0.0, of_up)
        ups = tl.minimum(tl.maximum(ups, -7.0), 7.0) + 1.0
    return above * ups * slope, of_up, value * ups


@kernel()
def _activation_forward_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    out_stride: tl.tensor,
    kind: tl.constexpr,
    gated: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    result = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if gated:
        gates = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
        result = gated_value(gates, result, kind)
    else:
        result, _ = value_and_slope(result, kind)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


def activation_forward(kind: str, gate: Tensor | None, up: Tensor, *, out: Tensor) -> None:
    """See `dispatch.activation_forward`."""
    rows, width = up.shape
    block = column_block(width, 1024)
    given = up if gate is None else gate
    _activation_forward_kernel[(rows, triton.cdiv(width, block))](
        given,
        up,
        out,
        width,
        given.stride(0),
        up.stride(0),
        out.stride(0),
        kind=kind,
        gated=gate is not None,
        block=block,
        num_warps=4 if gate is not None else 2,
        **ARITHMETIC,
    )


@kernel()
def _activation_backward_kernel(
    gradient: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    gate_out: tl.tensor,
    up_out: tl.tensor,
    width: tl.tensor,
    gradient_stride: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    gate_out_stride: tl.tensor,
    up_out_stride: tl.tensor,
    kind: tl.constexpr,
    gated: tl.constexpr,
    recompute: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """With `recompute` the activation's own result takes the place of its gradient."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    above = tl.load(gradient + row * gradient_stride + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if gated:
        gates = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
        of_gate, of_up, result = gated_back(above, gates, values, kind)
        tl.store(gate_out + row * gate_out_stride + columns, of_gate.to(gate_out.dtype.element_ty), mask=inside)
    else:
        result, slope = value_and_slope(values, kind)
        of_up = above * slope
    if recompute:
        tl.store(gradient + row * gradient_stride + columns, result.to(gradient.dtype.element_ty), mask=inside)
    tl.store(up_out + row * up_out_stride + columns, of_up.to(up_out.dtype.element_ty), mask=inside)


def activation_backward(
    kind: str,
    gradient: Tensor,
    gate: Tensor | None,
    up: Tensor,
    *,
    gate_out: Tensor | None,
    up_out: Tensor,
    recompute: bool = False,
) -> None:
    """See `dispatch.activation_backward`."""
    rows, width = up.shape
    # 32,768 × 3,072 on an H200, four warps for 1,024 numbers → what is chosen: erf beside its result 813 → 211 µs with
    # one warp for 512, others without a gate 192 → 183 with two warps; but tanh beside its result 201, with two 888.
    alone = gate is None and kind == "gelu" and recompute
    block = column_block(width, 512 if alone else 1024)
    warps = 1 if alone else 4 if gate is not None or recompute else 2
    given, of_gate = up if gate is None else gate, up_out if gate_out is None else gate_out
    tensors = (gradient, given, up, of_gate, up_out)
    _activation_backward_kernel[(rows, triton.cdiv(width, block))](
        *tensors,
        width,
        *(each.stride(0) for each in tensors),
        kind=kind,
        gated=gate is not None,
        recompute=recompute,
        block=block,
        num_warps=warps,
        **ARITHMETIC,
    )
