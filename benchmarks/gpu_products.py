"""A model's matrix products on random numbers, with every kernel that is installed: torch's own, quack-kernels.

Each goes forward, to its input's gradient and to its weight's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flopwise.engine.kernels import quack
from flopwise.engine.kernels.dispatch import sort_by_expert
from flopwise.engine.streaming.arena import Arena
from flopwise.engine.streaming.mixture import expert_kernels
from flopwise.engine.streaming.products import Products
from flopwise.engine.streaming.quack_products import QuackProducts, are_right
from flopwise.work.op import Attention, Gemm
from flopwise.work.work import Work


@dataclass(frozen=True, slots=True)
class Kernel:
    """What multiplies, ready to be called on a product's tensors."""

    name: str
    forward: Callable[[], object]
    to_input: Callable[[], object]
    to_weight: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Part:
    """A product of the model and its kernels, all on the same tensors."""

    name: str
    in_block: bool
    after_attention: bool
    kernels: Sequence[Kernel]

    def at(self, turn: int) -> Sequence[Kernel]:
        """The kernel whose turn it is; of a product outside of the blocks, which comes seldom, every one."""
        return [self.kernels[turn % len(self.kernels)]] if self.in_block else self.kernels


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
        assert op.rows % work.sequence_tokens == 0, f"{op.name} is no product over all tokens"
        make = _eighth if matrix == "fp8" and op.in_block else _plain
        rows = tokens * (op.rows // work.sequence_tokens)
        kernels = make(op, rows, dtype, generator) if op.groups == 1 else _grouped(op, tokens, rows, dtype, generator)
        parts.append(Part(op.name, op.in_block, seen and op.in_block, kernels))
    return parts


def _drawn(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype).mul_(scale)


def _plain(op: Gemm, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> list[Kernel]:
    """In the format of the activations; the weight's gradient is added to a sum in place, as training does."""
    source = _drawn((tokens, op.depth), dtype, generator)
    weight = _drawn((op.columns, op.depth), dtype, generator, 0.02)
    gradient = _drawn((tokens, op.columns), dtype, generator, 1e-3)
    total = torch.zeros_like(weight)
    result, dgrad = torch.empty_like(gradient), torch.empty_like(source)
    # Nothing is taken from it: sums are in the format of what is added.
    arena = Arena(torch.empty(0, dtype=torch.uint8, device=source.device))

    def kernel(name: str, products: Products) -> Kernel:
        return Kernel(
            name,
            partial(products.forward, source, weight, None, out=result),
            partial(products.dgrad, gradient, weight, out=dgrad, add=False),
            partial(products.wgrad, gradient, source, total=total),
        )

    own = kernel(str(dtype).removeprefix("torch."), Products(arena))
    other = kernel("quack", QuackProducts(arena, always=True))
    # What lies otherwise would be torch's own under another name.
    fits = are_right(source.device, dtype, dtype) and quack.takes(source, weight, gradient)
    return [own, other] if fits and _works(op, other) else [own]


def _grouped(op: Gemm, tokens: int, rows: int, dtype: torch.dtype, generator: torch.Generator) -> list[Kernel]:
    """Of a mixture's experts, each token at as many as the description says, drawn at random, its rows lying ready."""
    device, choices = generator.device, rows // tokens
    index = torch.rand(tokens, op.groups, generator=generator, device=device).topk(choices, -1)[1].int()
    routed = sort_by_expert(index, op.groups)
    source, gradient = _drawn((rows, op.depth), dtype, generator), _drawn((rows, op.columns), dtype, generator, 1e-3)
    weight = _drawn((op.groups * op.columns, op.depth), dtype, generator, 0.02).view(op.groups, op.columns, op.depth)
    result, dgrad, total = torch.empty_like(gradient), torch.empty_like(source), torch.zeros_like(weight)
    own, ends = expert_kernels(device, dtype), routed.starts[1:]
    kernels = [
        Kernel(
            "flopwise",
            partial(own.product, source, weight, None, routed, out=result),
            partial(own.product, gradient, weight, None, routed, out=dgrad, back=True),
            partial(own.wgrad, gradient, source, routed, total=total, gathers=""),
        )
    ]
    # torch's own gives new tensors, and adds nothing to a sum.
    library = Kernel(
        "torch._grouped_mm",
        lambda: torch._grouped_mm(source, weight.mT, offs=ends),
        lambda: torch._grouped_mm(gradient, weight, offs=ends),
        lambda: torch._grouped_mm(gradient.t(), source, offs=ends),
    )
    return [*kernels, library] if device.type == "cuda" and _works(op, library) else kernels


def _works(op: Gemm, kernel: Kernel) -> bool:
    """Call a kernel once, so that nothing has to be compiled later; whether it can be."""
    try:
        kernel.forward()
        kernel.to_input()
        kernel.to_weight()
    except Exception as error:
        # A kernel that is not for this card or shape is no reason to measure none.
        print(f"  {op.name} by {kernel.name}: {type(error).__name__}: {str(error)[:160]}", file=sys.stderr)
        return False
    return True


def _eighth(op: Gemm, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> list[Kernel]:
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

    calls = product(source, weight), product(gradient, weight_turned), product(gradient_turned, source_turned)
    return [Kernel("fp8 row-wise", *calls)]
