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


def activation_forward(kind: str, gate: Tensor | None, up: Tensor, *, out: Tensor) -> None:
    """act(gate) · up, or act(up) without a gate; rounded once. `out` may be `gate` or `up` itself."""
    rows, width = up.shape
    wide = compute_type(up.dtype)
    for block in row_blocks(rows, width * wide.itemsize, 6):
        values = up[block].to(wide)
        if gate is None:
            out[block] = _FUNCTIONS[kind][0](values)
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
    value, slope = _FUNCTIONS[kind]
    for block in row_blocks(rows, width * wide.itemsize, 11):
        above, values = gradient[block].to(wide), up[block].to(wide)
        if gate is None:
            of_up = above * slope(values)
            if recompute:
                gradient[block] = value(values)
            up_out[block] = of_up
            continue
        assert gate_out is not None, "a gate has a gradient"
        gates = gate[block].to(wide)
        activated = value(gates)
        of_up, result = above * activated, activated * values
        gate_out[block] = above * values * slope(gates)
        up_out[block] = of_up
        if recompute:
            gradient[block] = result


def _sigmoid(values: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-values))


def _silu(values: Tensor) -> Tensor:
    return values / (1.0 + torch.exp(-values))


def _silu_slope(values: Tensor) -> Tensor:
    share = _sigmoid(values)
    return share * (1.0 + values * (1.0 - share))


def _normal_share(values: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf(values * sqrt(0.5)))


def _gelu(values: Tensor) -> Tensor:
    return values * _normal_share(values)


def _gelu_slope(values: Tensor) -> Tensor:
    return _normal_share(values) + values * (torch.exp(-0.5 * values * values) / sqrt(2 * pi))


def _gelu_tanh_inner(values: Tensor) -> Tensor:
    return torch.tanh(GELU_ROOT * (values + GELU_CUBE * values * values * values))


def _gelu_tanh(values: Tensor) -> Tensor:
    return 0.5 * values * (1.0 + _gelu_tanh_inner(values))


def _gelu_tanh_slope(values: Tensor) -> Tensor:
    inner = _gelu_tanh_inner(values)
    steepness = GELU_ROOT * (1.0 + 3.0 * GELU_CUBE * values * values)
    return 0.5 * (1.0 + inner) + 0.5 * values * (1.0 - inner * inner) * steepness


def _relu_slope(values: Tensor) -> Tensor:
    return (values > 0).to(values.dtype)


def _relu2(values: Tensor) -> Tensor:
    positive = torch.relu(values)
    return positive * positive


def _relu6_slope(values: Tensor) -> Tensor:
    return ((values > 0) & (values < 6)).to(values.dtype)


def _leaky_relu(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, LEAK * values)


def _leaky_relu_slope(values: Tensor) -> Tensor:
    return torch.where(values > 0, torch.ones_like(values), LEAK)


def _mish_inner(values: Tensor) -> Tensor:
    # tanh(log(1 + e^x)) is n / (n + 2) with n = e^x (e^x + 2); beyond 20 it is 1 in every type.
    power = torch.exp(values.clamp_max(20.0))
    product = power * (power + 2.0)
    return product / (product + 2.0)


def _mish(values: Tensor) -> Tensor:
    return values * _mish_inner(values)


def _mish_slope(values: Tensor) -> Tensor:
    inner = _mish_inner(values)
    return inner + values * (1.0 - inner * inner) * _sigmoid(values)


def _sigmoid_slope(values: Tensor) -> Tensor:
    share = _sigmoid(values)
    return share * (1.0 - share)


def _tanh_slope(values: Tensor) -> Tensor:
    inner = torch.tanh(values)
    return 1.0 - inner * inner


def _quick_gelu_slope(values: Tensor) -> Tensor:
    share = _sigmoid(QUICK * values)
    return share * (1.0 + QUICK * values * (1.0 - share))


_Function = Callable[[Tensor], Tensor]

_FUNCTIONS: dict[str, tuple[_Function, _Function]] = {
    "silu": (_silu, _silu_slope),
    "gelu": (_gelu, _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "relu": (torch.relu, _relu_slope),
    "relu2": (_relu2, lambda values: 2.0 * torch.relu(values)),
    "relu6": (lambda values: values.clamp(0.0, 6.0), _relu6_slope),
    "leaky_relu": (_leaky_relu, _leaky_relu_slope),
    "mish": (_mish, _mish_slope),
    "sigmoid": (_sigmoid, _sigmoid_slope),
    "tanh": (torch.tanh, _tanh_slope),
    "linear": (lambda values: values, torch.ones_like),
    "quick_gelu": (lambda values: values * _sigmoid(QUICK * values), _quick_gelu_slope),
}
"""Value and slope of each of `flopwise.work.transformer.ACTIVATIONS`."""
