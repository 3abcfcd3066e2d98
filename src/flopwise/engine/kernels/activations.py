"""The activations of a feed-forward block in plain torch: values and slopes.

Built from functions that torch computes alike wherever a number stands in a tensor (exp, tanh, erf); its own sigmoid,
silu and gelu are not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import compute_type, row_blocks

LEAK = 0.01
"""The slope of `leaky_relu` below zero."""
GELU_ROOT = sqrt(2 / pi)
GELU_CUBE = 0.044715
QUICK = 1.702
"""Of `quick_gelu`, x · sigmoid(1.702 x)."""
QUICK_GELU, CLAMPED = "quick_gelu", "clamped_swiglu"
LIMIT = 7.0
"""Of `clamped_swiglu`: gates above it count as it, and so do the other half's numbers beyond it, either way."""


def activation_forward(kind: str, gate: Tensor | None, up: Tensor, *, out: Tensor) -> None:
    """act(gate) · up, or act(up) without a gate; rounded once. `out` may be `gate` or `up` itself."""
    rows, width = up.shape
    wide = compute_type(up.dtype)
    for block in row_blocks(rows, width * wide.itemsize, 6):
        values = up[block].to(wide)
        if gate is None:
            out[block] = _FUNCTIONS[kind][0](values)
        elif kind == CLAMPED:
            out[block] = _quick_gelu(gate[block].to(wide).clamp(max=LIMIT)) * values.clamp(-LIMIT, LIMIT).add_(1.0)
        else:
            out[block] = _FUNCTIONS[kind][0](gate[block].to(wide)) * values


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
    """The gradients of gate and up. Both may take the place of any of the inputs.

    With `recompute` the activation's own result takes the place of `gradient`.
    """
    rows, width = up.shape
    wide = compute_type(up.dtype)
    value_and_slope = _FUNCTIONS[QUICK_GELU if kind == CLAMPED else kind][1]
    for block in row_blocks(rows, width * wide.itemsize, 11):
        above, values = gradient[block].to(wide), up[block].to(wide)
        if gate is None:
            activated, slope = value_and_slope(values)
            of_up = slope.mul_(above)
            if recompute:
                gradient[block] = activated
            up_out[block] = of_up
            continue
        assert gate_out is not None, "a gate has a gradient"
        if kind == CLAMPED:
            result, of_gate, of_up = _clamped_backward(above, gate[block].to(wide), values)
            if recompute:
                gradient[block] = result
            gate_out[block], up_out[block] = of_gate, of_up
            continue
        activated, slope = value_and_slope(gate[block].to(wide))
        of_up, of_gate = above * activated, slope.mul_(above).mul_(values)
        if recompute:
            torch.mul(activated, values, out=activated)
            gradient[block] = activated
        gate_out[block], up_out[block] = of_gate, of_up


def _clamped_backward(above: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result of `clamped_swiglu` and the gradients of gate and up, none of what was cut off."""
    value, slope = _quick_gelu_and_slope(gate.clamp(max=LIMIT))
    other = up.clamp(-LIMIT, LIMIT).add_(1.0)
    of_gate = (slope.mul_(above).mul_(other)).masked_fill_(gate > LIMIT, 0.0)
    of_up = (above * value).masked_fill_(up.abs() > LIMIT, 0.0)
    return value.mul_(other), of_gate, of_up


def _logistic_sum(values: Tensor) -> Tensor:
    """1 + exp(−x), by which a number is divided for its sigmoid share."""
    return values.neg().exp_().add_(1.0)


def _silu(values: Tensor) -> Tensor:
    return values / _logistic_sum(values)


def _silu_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    divisor = _logistic_sum(values)
    value = values / divisor
    share = divisor.reciprocal_()
    return value, (1.0 - share).mul_(values).add_(1.0).mul_(share)


def _sigmoid(values: Tensor) -> Tensor:
    return _logistic_sum(values).reciprocal_()


def _sigmoid_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    share = _sigmoid(values)
    return share, (1.0 - share).mul_(share)


def _normal_share(values: Tensor) -> Tensor:
    return (values * sqrt(0.5)).erf_().add_(1.0).mul_(0.5)


def _gelu(values: Tensor) -> Tensor:
    return _normal_share(values).mul_(values)


def _gelu_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    share = _normal_share(values)
    density = (values * values).mul_(-0.5).exp_().div_(sqrt(2 * pi))
    slope = density.mul_(values).add_(share)
    return share.mul_(values), slope


def _gelu_tanh_inner(values: Tensor) -> Tensor:
    squares = values * values
    return squares.mul_(GELU_CUBE).add_(1.0).mul_(values).mul_(GELU_ROOT).tanh_()


def _gelu_tanh(values: Tensor) -> Tensor:
    return _gelu_tanh_inner(values).add_(1.0).mul_(values).mul_(0.5)


def _gelu_tanh_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    inner = _gelu_tanh_inner(values)
    steepness = (values * values).mul_(3.0 * GELU_CUBE).add_(1.0).mul_(GELU_ROOT)
    slope = (1.0 - inner * inner).mul_(steepness).mul_(values).add_(inner).add_(1.0).mul_(0.5)
    return inner.add_(1.0).mul_(values).mul_(0.5), slope


def _relu_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(values), (values > 0).to(values.dtype)


def _relu2(values: Tensor) -> Tensor:
    positive = torch.relu(values)
    return positive.mul_(positive)


def _relu2_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    positive = torch.relu(values)
    return positive * positive, positive.mul_(2.0)


def _relu6(values: Tensor) -> Tensor:
    return values.clamp(0.0, 6.0)


def _relu6_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    return _relu6(values), ((values > 0) & (values < 6)).to(values.dtype)


def _leaky_relu(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, LEAK * values)


def _leaky_relu_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    return _leaky_relu(values), torch.where(values > 0, torch.ones_like(values), LEAK)


def _mish_inner(values: Tensor) -> Tensor:
    # tanh(log(1 + e^x)) is n / (n + 2) with n = e^x (e^x + 2); beyond 20 it is 1 in every type.
    power = values.clamp_max(20.0).exp_()
    product = (power + 2.0).mul_(power)
    return product.div_(product + 2.0)


def _mish(values: Tensor) -> Tensor:
    return _mish_inner(values).mul_(values)


def _mish_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    inner = _mish_inner(values)
    slope = (1.0 - inner * inner).mul_(_sigmoid(values)).mul_(values).add_(inner)
    return inner.mul_(values), slope


def _tanh_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    value = torch.tanh(values)
    return value, 1.0 - value * value


def _linear_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.clone(), torch.ones_like(values)


def _quick_gelu(values: Tensor) -> Tensor:
    return _sigmoid(QUICK * values).mul_(values)


def _quick_gelu_and_slope(values: Tensor) -> tuple[Tensor, Tensor]:
    share = _sigmoid(QUICK * values)
    slope = (1.0 - share).mul_(values).mul_(QUICK).add_(1.0).mul_(share)
    return share.mul_(values), slope


_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "silu": (_silu, _silu_and_slope),
    "gelu": (_gelu, _gelu_and_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_and_slope),
    "relu": (torch.relu, _relu_and_slope),
    "relu2": (_relu2, _relu2_and_slope),
    "relu6": (_relu6, _relu6_and_slope),
    "leaky_relu": (_leaky_relu, _leaky_relu_and_slope),
    "mish": (_mish, _mish_and_slope),
    "sigmoid": (_sigmoid, _sigmoid_and_slope),
    "tanh": (torch.tanh, _tanh_and_slope),
    "linear": (lambda values: values, _linear_and_slope),
    "quick_gelu": (_quick_gelu, _quick_gelu_and_slope),
}
"""Value, and value and slope in new tensors, of each of `flopwise.work.activations.ACTIVATIONS` of one number."""
