"""Adapters beside the products of plain modules, with parameters of their own: y = W·x + scale · B·(A·x)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from flopwise.work.adapters import DOWN, MAGNITUDE
from flopwise.work.describe import describe
from flopwise.work.op import Gemm, Op, is_beside
from flopwise.work.parameters import op_groups
from flopwise.work.transformer import Transformer


class Matrix(nn.Module):
    """A matrix, or one for each expert; or a vector."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, expert: int | None) -> Tensor:
        """That of an expert, where there are several."""
        return self.weight if expert is None or self.weight.ndim < 3 else self.weight[expert]


@dataclass(frozen=True, slots=True)
class _Result:
    """One of a product's results: how wide it is, and what is beside it."""

    width: int
    up: str = ""
    magnitude: str = ""
    low: slice | None = None
    """Of what the first matrices have made."""


class Adapted:
    """What lies beside the products of one kind of block, by the description; the block holds the parameters."""

    def __init__(self, model: Transformer) -> None:
        assert model.adapters is not None
        self.scale = model.adapters.scale
        ops = op_groups(describe(model, 1))[1]
        self.shapes = {weight.module: weight.shape for op in ops if is_beside(op) for weight in op.weights}
        """Of its parameters, by the names that they have in a block."""
        self._results = {op.name: _results_of(op, ops) for op in ops if isinstance(op, Gemm) and not is_beside(op)}

    def add(self, block: nn.Module, product: str, value: Tensor, made: Tensor, expert: int | None) -> Tensor:
        """What a product has made of `value`, with what is beside it."""
        results = self._results[product]
        if not any(result.up for result in results):
            return made
        low, parts = functional.linear(value, _of(block, f"{product}_{DOWN}", expert)), list[Tensor]()
        widths, base = [result.width for result in results], block.get_submodule(product)
        bias = getattr(base, "bias", None)
        matrices = torch.split(_matrix(base, value), widths, -2) if any(each.magnitude for each in results) else ()
        for place, (result, part) in enumerate(zip(results, torch.split(made, widths, -1), strict=True)):
            if not result.up:
                parts.append(part)
                continue
            up = _of(block, result.up, expert)
            whole = part + self.scale * functional.linear(low[..., result.low or slice(None)], up)
            if result.magnitude:
                down = _of(block, f"{product}_{DOWN}", expert)[result.low or slice(None)]
                lengths = _of(block, result.magnitude, expert)
                wide = torch.promote_types(lengths.dtype, value.dtype)
                summed = matrices[place].to(wide) + self.scale * up.to(wide) @ down.to(wide)
                norms = torch.linalg.vector_norm(summed.detach(), dim=1)
                shift = 0.0 if bias is None else torch.split(bias, widths)[place]
                whole = ((whole - shift) * (lengths / norms) + shift).to(value.dtype)
            parts.append(whole)
        return torch.cat(parts, -1)


def _matrix(base: nn.Module, value: Tensor) -> Tensor:
    """A product's matrix, which may be kept in few bits."""
    made = getattr(base, "matrix", None)
    return base.get_parameter("weight") if made is None else cast("Tensor", made(value.dtype))


def _of(block: nn.Module, name: str, expert: int | None) -> Tensor:
    found = block.get_submodule(name)
    assert isinstance(found, Matrix)
    given: Tensor = found(expert)
    return given


def _results_of(product: Gemm, ops: tuple[Op, ...]) -> tuple[_Result, ...]:
    """A product's results in the order of its rows."""
    lower = next((op for op in ops if op.name == f"{product.name}_{DOWN}"), None)
    scaled = next((op for op in ops if op.name == f"{product.name}_{MAGNITUDE}"), None)
    parts = product.weights[0].parts or (product.columns,)
    found = []
    for name, width in zip(product.outputs, parts, strict=True):
        upper = next((op for op in ops if isinstance(op, Gemm) and op.adds and op.outputs == (name,)), None)
        if upper is None:
            found.append(_Result(width))
            continue
        assert isinstance(lower, Gemm)
        rank = lower.columns // len(lower.outputs)
        first = lower.outputs.index(upper.inputs[0]) * rank
        lengths = "" if scaled is None else scaled.weights[scaled.inputs.index(name)].module
        found.append(_Result(width, upper.name, lengths, slice(first, first + rank)))
    return tuple(found)
