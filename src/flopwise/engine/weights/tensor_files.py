"""The bytes of safetensors files, and opening them wherever they lie.

Tensors are written here and not by safetensors' `save_file`, which would first copy every tensor of a device to the
host and leave the checksum to a second reading. They are read by safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from flopwise.engine.weights.finite import are_finite, extremes

PIECE_BYTES = 64 * 2**20
"""Of a tensor, what is copied from a device and written at once."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors' headers call them."""


def open_tensors(path: Path) -> Any:  # noqa: ANN401 - its methods have no types
    """What safetensors opens, under any name: it takes only names in UTF-8, and a folder of ours may have another.

    Raises OSError and SafetensorError.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # It is mapped at once, and needs the number no longer.
            return cast(Any, safe_open(f"/dev/fd/{handle}", framework="pt"))
        finally:
            os.close(handle)
    return cast(Any, safe_open(path, framework="pt"))


def tensor_file(tensors: Mapping[str, Tensor], bad: list[str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: the header's length, the header, the tensors without gaps.

    On the way the names of tensors that are not finite are added to `bad`.
    """
    # Larger numbers come first, so that each tensor begins at a multiple of what its numbers take.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        assert name not in header and tensor.dtype in DTYPES, f"{name} of {tensor.dtype}"
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        finite = True
        for piece, is_finite in _pieces(tensors[name].detach()):
            finite &= is_finite
            yield piece
        if not finite:
            bad.append(name)


def _pieces(tensor: Tensor) -> Iterator[tuple[memoryview, bool]]:
    """A tensor's bytes in order, and of each piece whether its numbers are finite.

    What lies on the host in order is not copied, what lies on a device is in pieces.
    """
    numbers = tensor.reshape(-1)
    count = max(1, PIECE_BYTES // numbers.element_size())
    for first in range(0, numbers.numel(), count):
        piece = numbers[first : first + count]
        # Asked for before the copy, which waits for the device: the answer then takes no waiting of its own.
        asked = extremes(piece).to("cpu", non_blocking=True) if piece.is_floating_point() else None
        content = piece.view(torch.uint8).cpu().numpy().data
        yield content, asked is None or are_finite(asked)
