"""A model's matrix products on random numbers: each forward, to its input's gradient and to its weight's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flopwise.core.op import Attention, Gemm
from flopwise.core.work import Work


@dataclass(frozen=True, slots=True)
class Part:
    """A product of the model, ready to be called on its own tensors."""

    name: str
    kernel: str
    in_block: bool
    after_attention: bool
    forward: Callable[[], object]
    to_input: Callable[[], object]
    to_weight: Callable[[], object]


def parts_of(
    work: Work, tokens: int, dtype: torch.dtype, matrix: str, generator: torch.Generator
) -> list[Part]:  # fmt: skip
    """The products that the description names, in its order; those of the blocks in fp8 where `matrix` says so."""
    parts: list[Part] = []
    seen = False
    for op in work.ops:
        seen = seen or isinstance(op, Attention)
        if not isinstance(op, Gemm):
            continue
        assert op.groups == 1 and op.rows == work.sequence_tokens, f"{op.name} is no product over all tokens"
        make = _eighth if matrix == "fp8" and op.in_block else _plain
        kernel, calls = make(op, tokens, dtype, generator)
        parts.append(Part(op.name, kernel, op.in_block, seen and op.in_block, *calls))
    return parts


Calls = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]


def _drawn(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype).mul_(scale)


def _plain(op: Gemm, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[str, Calls]:
    """In the format of the activations; the weight's gradient is added to a sum in place, as training does."""
    source = _drawn((tokens, op.depth), dtype, generator)
    weight = _drawn((op.columns, op.depth), dtype, generator, 0.02)
    gradient = _drawn((tokens, op.columns), dtype, generator, 1e-3)
    total = torch.zeros_like(weight)
    result, to_source = torch.empty_like(gradient), torch.empty_like(source)
    return str(dtype).removeprefix("torch."), (
        lambda: torch.mm(source, weight.t(), out=result),
        lambda: torch.mm(gradient, weight, out=to_source),
        lambda: total.addmm_(gradient.t(), source),
    )


def _eighth(op: Gemm, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[str, Calls]:
    """In fp8 with a scale for each row and column and fast accumulation: the products alone, all operands quantised."""

    def quantised(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        drawn = _drawn((rows, columns), dtype, generator)
        scale = drawn.abs().amax(1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
        return (drawn / scale.to(dtype)).to(torch.float8_e4m3fn), scale

    source, gradient, weight = (
        quantised(tokens, op.depth),
        quantised(tokens, op.columns),
        quantised(op.columns, op.depth),
    )
    # A product reads rows of both operands as they lie in memory: backward needs each the other way round as well.
    weight_turned, source_turned, gradient_turned = (
        quantised(op.depth, op.columns),
        quantised(op.depth, tokens),
        quantised(op.columns, tokens),
    )

    def product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Callable[[], object]:
        return lambda: torch._scaled_mm(
            left[0], right[0].t(), scale_a=left[1], scale_b=right[1].t(), out_dtype=dtype, use_fast_accum=True
        )

    return "fp8 row-wise", (
        product(source, weight),
        product(gradient, weight_turned),
        product(gradient_turned, source_turned),
    )
