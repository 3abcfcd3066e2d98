"""Other forms of the experts' kernels than those that training takes, as candidates of `benchmarks.gpu_experts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flopwise.engine.kernels import plain_experts

if TYPE_CHECKING:
    from benchmarks.gpu_experts import Inputs
    from flopwise.engine.kernels.expert_tiles import ExpertTile

KIND = "silu"
BESIDE = {
    "SwiGLU back alone": 0,
    "tokens laid out": 0,
    "down, matrices, rows": 1,
    "gate+up, matrices, rows": 2,
    "gate+up, biases": 0,
    "down, biases": 0,
}
"""Parts of the products, and products of rows that were laid out, each with the matrices that it multiplies with."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one product is: its call by a module of kernels with arguments of a form, and its results."""

    call: Callable[..., object]
    result: Callable[[], Sequence[Tensor]]


def parts_of(it: Inputs) -> dict[str, Part]:
    """Everything that has other forms."""
    routed, (gate, up) = it.routed, it.halves
    laid = it.gradient.index_select(0, routed.tokens)
    biases = torch.zeros_like(it.first[:, :, 0]), torch.zeros_like(it.second[:, :, 0])

    def gated(kernels: ModuleType, **how: object) -> None:
        kernels.gated_product(
            it.source, it.first, None, routed, kind=KIND, gate=gate, up=up, activated=it.activated, **how
        )

    def back_to_inner(kernels: ModuleType, **how: object) -> None:
        kernels.product(it.gradient, it.second, None, routed, out=it.activated, gathers=True, back=True, **how)
        kernels.weigh_backward(KIND, it.activated, gate, up, it.of_rows)

    def weigh(kernels: ModuleType, **how: object) -> None:
        kernels.weigh_backward(KIND, it.activated, gate, up, it.of_rows, **how)

    def matrices(left: Tensor, right: Tensor, total: Tensor, gathers: str) -> Callable[..., object]:
        def call(kernels: ModuleType, **how: object) -> None:
            kernels.wgrad(left, right, routed, total=total, gathers=gathers, **how)

        return call

    def summed(gradient: Tensor, weights: Tensor | None, total: Tensor) -> Callable[..., object]:
        def call(kernels: ModuleType, **how: object) -> None:
            total.zero_()
            kernels.bias_gradient(gradient, routed, weights=weights, total=total, **how)

        return call

    def of_first() -> Sequence[Tensor]:
        return (it.total_first,)

    def of_second() -> Sequence[Tensor]:
        return (it.total_second,)

    def inner() -> Sequence[Tensor]:
        return it.both, it.activated

    def wide() -> Sequence[Tensor]:
        return (it.wide,)

    return {
        "gate+up, SwiGLU": Part(gated, inner),
        "down": Part(
            lambda kernels, **how: kernels.product(it.activated, it.second, None, routed, out=it.wide, **how), wide
        ),
        "down back, SwiGLU back": Part(back_to_inner, inner),
        "SwiGLU back alone": Part(weigh, inner),
        "down, matrices": Part(matrices(it.gradient, it.activated, it.total_second, "gradient"), of_second),
        "down, matrices, rows": Part(matrices(laid, it.activated, it.total_second, ""), of_second),
        "gate+up back": Part(
            lambda kernels, **how: kernels.product(it.both, it.first, None, routed, out=it.wide, back=True, **how), wide
        ),
        "tokens laid out": Part(lambda kernels, **how: kernels.lay_out(it.gradient, routed, out=it.wide, **how), wide),
        "gate+up, matrices": Part(matrices(it.both, it.source, it.total_first, "source"), of_first),
        "gate+up, matrices, rows": Part(matrices(it.both, it.wide, it.total_first, ""), of_first),
        "gate+up, biases": Part(summed(it.both, None, biases[0]), lambda: biases[:1]),
        "down, biases": Part(summed(it.gradient, it.of_rows, biases[1]), lambda: biases[1:]),
    }  # fmt: skip


def named(tiles: Sequence[ExpertTile]) -> dict[str, ExpertTile]:
    """Tiles by their numbers."""
    return {"×".join(map(str, tile)): tile for tile in tiles}


def forms_of() -> dict[str, dict[str, dict[str, Any]]]:
    """The forms of each product that are tried, by a name."""
    from flopwise.engine.kernels.expert_tiles import AFTERWARDS, BEFORE, BOUNDED, GATED_TILE, PRODUCT_TILE
    from flopwise.engine.kernels.expert_tiles import ExpertTile as Tile

    def of_stages(how: str, tile: ExpertTile) -> dict[str, dict[str, Any]]:
        cut = {stages: tile._replace(stages=stages) for stages in (3, 4)}
        return {f"{how}, {stages} stages": {how: True, "tile": tile} for stages, tile in cut.items()}

    one_side = named([
        Tile(128, 256, 64, 8, 5), Tile(128, 256, 64, 8, 7), Tile(256, 128, 64, 8, 5), Tile(256, 128, 64, 8, 7),
        Tile(128, 128, 64, 4, 5),
    ])  # fmt: skip
    both_sides = named([
        Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(256, 128, 64, 8, 3), Tile(256, 128, 64, 8, 4),
        Tile(128, 128, 64, 4, 3),
    ])  # fmt: skip
    biases = named([
        Tile(32, 64, 0, 4, 4), Tile(64, 64, 0, 4, 3), Tile(64, 64, 0, 4, 4), Tile(128, 64, 0, 4, 3),
        Tile(64, 128, 0, 4, 3), Tile(128, 64, 0, 8, 4),
    ])  # fmt: skip
    gathered: dict[str, dict[str, Any]] = {
        f"one side by descriptor {name}": {"form": BEFORE, "tile": tile} for name, tile in one_side.items()
    }
    rows: dict[str, dict[str, Any]] = {
        f"{form} {name}": {"form": form, "tile": tile}
        for form in (AFTERWARDS, BEFORE, BOUNDED)
        for name, tile in both_sides.items()
    }
    sums: dict[str, dict[str, Any]] = {f"read ahead {name}": {"tile": tile} for name, tile in biases.items()}
    weighed: dict[str, dict[str, Any]] = {
        f"{block} columns, {warps} warps": {"block": block, "warps": warps}
        for block, warps in ((256, 1), (512, 2), (1024, 2), (1024, 8), (4096, 8))
    }
    products = of_stages("flat", PRODUCT_TILE)
    others = {
        "gate+up, SwiGLU": of_stages("joined", GATED_TILE) | of_stages("flat", GATED_TILE),
        "down": products,
        "down back, SwiGLU back": products,
        "SwiGLU back alone": weighed,
        "down, matrices": gathered,
        "down, matrices, rows": rows,
        "gate+up back": products,
        "tokens laid out": {},
        "gate+up, matrices": gathered,
        "gate+up, matrices, rows": rows,
        "gate+up, biases": sums,
        "down, biases": sums,
    }
    return {product: {"shipped": {}, **forms} for product, forms in others.items()}


def variants(it: Inputs) -> Iterator[tuple[str, str, Callable[[], object], Callable[[], Sequence[Tensor]]]]:
    """Product, form, call and results: of each product the plain form, the shipped one, then the others."""
    from flopwise.engine.kernels import fused_experts

    parts = parts_of(it)
    for product, forms in forms_of().items():
        part = parts[product]
        yield product, "plain", partial(part.call, plain_experts), part.result
        for name, how in forms.items():
            yield product, f"triton {name}", partial(part.call, fused_experts, **how), part.result
