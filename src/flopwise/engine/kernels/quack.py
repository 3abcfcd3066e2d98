"""Matrix products of quack-kernels (`flopwise[hopper]`), where a Hopper GPU and the package are there.

Its kernels are compiled when they are first called, a few seconds each, for all sizes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flopwise.engine.kernels.optional import find_in

LINE_BYTES = 16
"""Rows begin at multiples of this."""


class Calls(NamedTuple):
    """What is called of the package."""

    product: Callable[..., object]
    activated: Callable[..., object]
    activated_backward: Callable[..., object]
    tiles: Callable[..., Any]


class QuackTile(NamedTuple):
    """How a product is cut into what a multiprocessor makes at a time."""

    rows: int
    columns: int
    alternating: bool
    """Two groups of warps, each with a tile of its own: one multiplies while the other writes."""
    shared: Literal["left", "right"]
    """Of what is multiplied, what two neighbouring multiprocessors read together."""


ALTERNATING_WIDE = QuackTile(128, 192, alternating=True, shared="right")
ALTERNATING = QuackTile(128, 160, alternating=True, shared="right")
TOGETHER = QuackTile(256, 128, alternating=False, shared="left")
TILES = (ALTERNATING_WIDE, ALTERNATING, TOGETHER)
"""Chosen among eight for products of Llama-3-8B on an H200, by the rule of `tile_for`: `docs/log.md`."""
SHORT_DEPTH = 6144
"""A sum of up to so many products leaves enough time to write that two tiles should take turns."""
WIDE_COLUMNS = 8192
LEAST_COLUMNS = 2048
"""Of 32,768 rows with fewer cuBLAS is faster, by 4 to 30 % with 768 and 1,024 columns."""
LEAST_FLOPS = 100e9
"""Below that a product takes less time than it takes to call it, and cuBLAS is called sooner."""


@cache
def calls() -> Calls | None:
    """The package's calls; None where it cannot be loaded."""

    def find() -> Calls:
        module = import_module("quack.gemm_interface")
        tiles = import_module("quack.gemm_config").GemmConfig
        return Calls(module.gemm_tuned.fn, module.gemm_act, module.gemm_dact, tiles)

    return find_in("quack", find, name="quack-kernels", without="products are cuBLAS's")


def get_calls() -> Calls:
    """The package's calls, where `fits_device` has found them."""
    found = calls()
    assert found is not None
    return found


@cache
def fits_device(device: torch.device) -> bool:
    """Whether a device is one that these kernels are for, and the package is there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and calls() is not None


@cache
def cut(tile: QuackTile) -> object:
    """A tile in the package's words."""
    down = tile.shared == "right"
    return get_calls().tiles(
        tile_m=tile.rows,
        tile_n=tile.columns,
        pingpong=tile.alternating,
        cluster_m=2 if down else 1,
        cluster_n=1 if down else 2,
        is_dynamic_persistent=False,
    )


def takes(*tensors: Tensor) -> bool:
    """Whether tensors lie as the kernels read and write them."""
    return all(
        tensor.stride(1) == 1
        and tensor.stride(0) * tensor.element_size() % LINE_BYTES == 0
        and tensor.data_ptr() % LINE_BYTES == 0
        for tensor in tensors
    )


def tile_for(right: Tensor) -> QuackTile:
    """How a product with this on its right is cut."""
    wide = right.shape[1] >= WIDE_COLUMNS
    if right.shape[0] <= SHORT_DEPTH:
        return ALTERNATING_WIDE if wide else ALTERNATING
    return ALTERNATING if wide else TOGETHER


def multiply(
    left: Tensor,
    right: Tensor,
    *,
    out: Tensor,
    tile: QuackTile | None = None,
    add: bool = False,
    halves: tuple[str, ...] = (),
) -> None:
    """`out` gets left · right, with `add` added to it.

    `halves` names what lies as two halves of rows (`B`: the right one; `out`), of which the product sees one row of
    each in turn.
    """
    config = cut(tile or tile_for(right))
    get_calls().product(left, right, out, config=config, add_to_output=add, concat_layout=halves or None)
