"""The numbers that training begins with: the same ones for every executor and every number of devices."""

from __future__ import annotations

import hashlib
from math import sqrt

import torch
from torch import Tensor, nn

from flopwise.core.parameters import Parameter, parameters_of
from flopwise.core.transformer import Transformer

LEAST_DEVIATION = 0.02
"""Of the first numbers of wide models; narrow ones need larger ones for their inputs to tell: √(2 ÷ 5·width), by Nguyen
and Salazar (arXiv 1910.05895), which is 0.02 at a width of 1,000."""
INTO_THE_STREAM = ("output.weight", "down.weight")
"""Matrices whose products are added to the residual stream, 2 in a layer."""


def initial_values(parameter: Parameter, seed: int, layers: int) -> Tensor:
    """A parameter's first numbers, in fp32 on the CPU; they depend on the seed and its name alone.

    Normal for matrices and tables, smaller where a product is added to the stream, so that the stream's variance does
    not grow with the number of layers. Norms begin as 1, biases as 0.
    """
    if parameter.role == "norm":
        return torch.ones(parameter.shape)
    if parameter.role == "bias":
        return torch.zeros(parameter.shape)
    digest = hashlib.sha256(f"{seed} {parameter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    deviation = max(LEAST_DEVIATION, sqrt(2 / (5 * parameter.shape[-1])))
    if isinstance(parameter.part, int) and parameter.local in INTO_THE_STREAM:
        deviation /= sqrt(2 * layers)
    return torch.randn(parameter.shape, generator=generator).mul_(deviation)


@torch.no_grad()
def fill(module: nn.Module, model: Transformer, sequence_tokens: int, seed: int) -> None:
    """Set every parameter of a module to its first numbers, in the type that it has."""
    places = dict(module.named_parameters())
    for parameter in parameters_of(model, sequence_tokens):
        places[parameter.name].copy_(initial_values(parameter, seed, model.layers))
