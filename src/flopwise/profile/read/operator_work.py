"""FLOPs and least bytes of an operator call, from the shapes and types that the PyTorch profiler notes of its inputs.

A multiplication and an addition count 2. Attention over a square counts half of it where the call says that its mask is
causal, as everywhere in flopwise; a mask that is handed over as a tensor leaves nothing out. Bytes are every operand
read once and the result written once. What has no formula here gives None.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from flopwise.base.files import read_table
from flopwise.work.op import ATTENTION_PRODUCTS, product_flops

_TABLE = read_table(Path(__file__).with_name("operator_work.toml"))
TYPE_BYTES: dict[str, int] = _TABLE["bytes"]
FORMATS: dict[str, str] = _TABLE["formats"]
CAUSAL: dict[str, int] = _TABLE["causal"]

_LARGEST_DIMENSION = 2**48
_PRODUCTS = dict.fromkeys(("aten::mm", "aten::_scaled_mm", "aten::bmm"), 0) | dict.fromkeys(
    ("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_", "aten::_addmm_activation"), 1
)
"""Products of two matrices, or of two batches of them, and the number of the first."""
_ATTENTION = re.compile(
    r"aten::(?:_scaled_dot_product_(?:flash|efficient|cudnn|fused|flash_attention_for_cpu)\w*|"
    r"scaled_dot_product_attention|_cudnn_attention_(?:forward|backward)|"
    r"(?P<tokens_first>_(?:flash|efficient)_attention_(?:forward|backward)))$"
)
_IS_CAUSAL = frozenset({"True", "1", "2"})
"""Of an efficient attention's kinds of mask, 1 and 2 are causal, from either corner."""

Work = tuple[float, float]
Shape = tuple[int, ...]


def type_name(text: object) -> str:
    """`c10::BFloat16` → `bfloat16`."""
    return text.lower().removeprefix("c10::") if isinstance(text, str) else ""


@lru_cache(maxsize=4096)
def has_formula(name: str) -> bool:
    """Whether calls of that operator can be costed at all."""
    return name in _PRODUCTS or name == "aten::linear" or _ATTENTION.match(name) is not None


@lru_cache(maxsize=65536)
def work_of(name: str, dims: bytes, types: bytes, values: bytes = b"") -> tuple[Work, str] | None:
    """(FLOPs, least bytes) and the number format of a call; `dims`, `types` and `values` are the trace's JSON."""
    try:
        shapes = [_shape(entry) for entry in msgspec.json.decode(dims, type=list[Any])]
        sizes = [TYPE_BYTES.get(type_name(entry)) for entry in msgspec.json.decode(types, type=list[Any])]
        first = _first_operand(name)
        work = _work(name, shapes, sizes, first)
        if _is_causal(name, values):
            work = _halve(work, shapes[first], shapes[first + 1], tokens_first=_tokens_first(name))
        number_format = FORMATS.get(type_name(msgspec.json.decode(types)[first]), "")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, IndexError, _UnknownError):
        return None
    return work, number_format


class _UnknownError(Exception):
    """The inputs are not what the operator takes."""


def _first_operand(name: str) -> int:
    return 1 if name.endswith("_backward") else _PRODUCTS.get(name, 0)


def _work(name: str, shapes: list[Shape], sizes: list[int | None], first: int) -> Work:
    if name == "aten::linear":
        return _linear(shapes, sizes)
    if name in _PRODUCTS:
        return _product(shapes, sizes, first)
    if _ATTENTION.match(name) is None:
        raise _UnknownError
    return _attention(shapes, sizes, first, tokens_first=_tokens_first(name))


def _tokens_first(name: str) -> bool:
    """Whether tokens come before heads in its operands."""
    found = _ATTENTION.match(name)
    return found is not None and found["tokens_first"] is not None


def _is_causal(name: str, values: bytes) -> bool:
    place = CAUSAL.get(name.removeprefix("aten::"))
    if place is None or not values:
        return False
    found = msgspec.json.decode(values, type=list[Any])
    return place < len(found) and str(found[place]) in _IS_CAUSAL


def _halve(work: Work, query: Shape, key: Shape, *, tokens_first: bool) -> Work:
    """Half the products of a square; for others it depends on the corner that the mask begins at, so that all count."""
    tokens = 1 if tokens_first else 2
    return (work[0] / 2, work[1]) if query[tokens] == key[tokens] else work


def _shape(entry: object) -> Shape:
    if not isinstance(entry, list):
        return ()
    if not all(isinstance(size, int) and 0 <= size < _LARGEST_DIMENSION for size in entry):
        return ()
    return tuple(entry)


def _size(sizes: list[int | None], number: int) -> int:
    size = sizes[number]
    if size is None:
        raise _UnknownError
    return size


def _product(shapes: list[Shape], sizes: list[int | None], first: int) -> Work:
    left, right = shapes[first], shapes[first + 1]
    if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2] or left[:-2] != right[:-2]:
        raise _UnknownError
    result = (*left[:-1], right[-1])
    one = _size(sizes, first)
    moved = one * (prod(left) + prod(right) + prod(result))
    if first:
        moved += _size(sizes, 0) * prod(shapes[0])
    return float(product_flops(prod(result[:-1]), left[-1], result[-1])), float(moved)


def _linear(shapes: list[Shape], sizes: list[int | None]) -> Work:
    inputs, weights = shapes[0], shapes[1]
    if not inputs or len(weights) != 2 or inputs[-1] != weights[1]:
        raise _UnknownError
    rows, (columns, depth) = prod(inputs[:-1]), weights
    bias = prod(shapes[2]) if len(shapes) > 2 and shapes[2] else 0
    moved = _size(sizes, 0) * (prod(inputs) + prod(weights) + rows * columns + bias)
    return float(product_flops(rows, depth, columns)), float(moved)


def _attention(shapes: list[Shape], sizes: list[int | None], first: int, *, tokens_first: bool) -> Work:
    query, key, value = shapes[first : first + 3]
    if len(query) != 4 or len(key) != 4 or len(value) != 4:
        raise _UnknownError
    tokens, heads = (1, 2) if tokens_first else (2, 1)
    if query[3] != key[3] or key[tokens] != value[tokens]:
        raise _UnknownError
    rows = query[0] * query[heads] * query[tokens]
    result = rows * value[3]
    flops = float(product_flops(rows, query[3] + value[3], key[tokens]))
    moved = _size(sizes, first) * (prod(query) + prod(key) + prod(value) + result)
    if first:
        # The gradients of the result, of query, key and value come on top.
        return flops * ATTENTION_PRODUCTS["backward"] / ATTENTION_PRODUCTS["forward"], 2.0 * moved
    return flops, float(moved)
