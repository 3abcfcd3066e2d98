"""The operators of blocks that carry a state, run: convolution, what carries the state, norm and gate; a gate alone.

They are plain (`engine.kernels.scan`), forward and backward: backward computes once more under autograd what it needs
and asks it for the gradients, piece by piece, so that no more is allocated than the plan leaves beside its slabs. A
piece is some channels, some rows, or some sequences and heads; what pieces have in common gets the sum of their
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flopwise.engine.kernels.blocks import add_rounded, compute_type
from flopwise.engine.kernels.scan import PerHead, convolve, normalise_gated, scan
from flopwise.engine.streaming.values import Gradients, Values
from flopwise.work.held import CARRIED_NUMBERS, carrying_room_bytes, heads_at_once
from flopwise.work.op import Op
from flopwise.work.recurrence import Recurrence
from flopwise.work.transformer import Transformer
from flopwise.work.transformer_ops import CONVOLUTION, DECAY, GATED_NORM, GATING, SCAN, SKIP, STEP_BIAS

CARRYING = (CONVOLUTION, SCAN, GATED_NORM, GATING)
"""Operators that are run here."""

Columns = tuple[slice, ...]
"""Which columns of a tensor a piece reads, one range behind another."""
ALL: Columns = (slice(None),)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an operator that is computed by itself: which sequences, which columns of its inputs and numbers of its
    weights, which columns of its result, and how."""

    sequences: slice
    inputs: tuple[Columns, ...]
    weights: dict[str, slice]
    result: slice
    function: Callable[..., Tensor]


@contextmanager
def _products(tensor: Tensor) -> Iterator[None]:
    """Products of fp32 by units that round to ten bits, where what they read has eight."""
    if not tensor.is_cuda or tensor.dtype not in (torch.bfloat16, torch.float16):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Carrying:
    """Those operators of one kind of block."""

    def __init__(self, model: Transformer, sequence_tokens: int) -> None:
        self.recurrence, self.epsilon, self.tokens = model.recurrence, model.norm_epsilon, sequence_tokens
        self.model = model

    def forward(self, op: Op, values: Values, weights: Mapping[str, Tensor], sequences: int) -> None:
        """Make an operator's result."""
        inputs = [_by_sequence(values[name], sequences) for name in op.inputs]
        out = values.allocate(
            op.outputs[0], (inputs[0].shape[0] * inputs[0].shape[1], self._width(op)), inputs[0].dtype
        )
        result = _by_sequence(out, sequences)
        with torch.no_grad(), _products(out):
            for piece in self._pieces(op, inputs[0]):
                read, own = _read(piece, inputs), _weights(piece, weights, op)
                result[piece.sequences, :, piece.result].copy_(piece.function(*read, **own))

    def backward(
        self,
        op: Op,
        values: Values,
        gradients: Gradients,
        trained: Mapping[str, tuple[Tensor, Tensor | None]],
        sequences: int,
    ) -> None:
        """From the gradient of an operator's result to those of its inputs.

        `trained`: of each of its weights also the sum that its gradient is added to; None: it is frozen.
        """
        weights = {name: weight for name, (weight, _) in trained.items()}
        inputs = [_by_sequence(values[name], sequences) for name in op.inputs]
        above = _by_sequence(gradients[op.outputs[0]], sequences)
        targets = []
        for name in op.inputs:
            # A gate's and a norm's inputs are read by nobody else; nor are the others.
            target, there = gradients.target(name, tuple(values[name].shape), values[name].dtype)
            assert not there
            targets.append(_by_sequence(target.zero_(), sequences))
        with _products(above):
            for piece in self._pieces(op, inputs[0]):
                read, own = _read(piece, inputs), _weights(piece, weights, op)
                found, of_weights = _gradients(piece, read, own, above[piece.sequences, :, piece.result])
                for target, columns, gradient in zip(targets, piece.inputs, found, strict=True):
                    _add(target[piece.sequences], columns, gradient)
                for name, gradient in of_weights.items():
                    total = trained[NAMES[op.name][name]][1]
                    if total is not None:
                        add_rounded(total[piece.weights.get(name, slice(None))], gradient)
        gradients.drop(op.outputs[0])

    def _width(self, op: Op) -> int:
        if op.name == GATING:
            return self.model.attended_width
        assert self.recurrence is not None
        return self.recurrence.channels if op.name == CONVOLUTION else self.recurrence.width

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _pieces(self, op: Op, source: Tensor) -> Iterator[Piece]:
        sequences, tokens, width = source.shape
        wide = compute_type(source.dtype).itemsize
        room = carrying_room_bytes(self.model, self.tokens, wide)
        if op.name == SCAN:
            assert self.recurrence is not None
            yield from _scan_pieces(self.recurrence, room, sequences=sequences, tokens=tokens, number_bytes=wide)
            return
        each = CARRIED_NUMBERS * wide * tokens * width
        if op.name == CONVOLUTION:
            # Channels know nothing of each other.
            step = max(1, room * width // (each * sequences))
            for first in range(0, width, step):
                part = slice(first, min(first + step, width))
                yield Piece(slice(None), ((part,),), {"weight": part, "bias": part}, part, convolve_with)
            return
        function = gate if op.name == GATING else self._norm
        step = max(1, room // each)
        for first in range(0, sequences, step):
            yield Piece(slice(first, first + step), (ALL, ALL), {}, slice(None), function)

    def _norm(self, value: Tensor, gate_of: Tensor, *, weight: Tensor) -> Tensor:
        assert self.recurrence is not None
        return normalise_gated(self.recurrence, value, gate_of, weight, self.epsilon)


def gate(value: Tensor, scores: Tensor) -> Tensor:
    """As much of each number as its score lets through."""
    return value * scores.sigmoid()


def convolve_with(value: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return convolve(value, weight, bias)


def _scan_pieces(
    recurrence: Recurrence, room: int, *, sequences: int, tokens: int, number_bytes: int
) -> Iterator[Piece]:
    heads, at_once = heads_at_once(recurrence, tokens, room, number_bytes)
    run = recurrence.heads // recurrence.key_heads
    for first_sequence in range(0, sequences, at_once):
        for first in range(0, recurrence.heads, heads):
            keys = slice(first // run, max(first // run + 1, (first + heads) // run))
            part = replace(recurrence, heads=heads, key_heads=keys.stop - keys.start, norm_groups=1)

            def carry(
                mixed: Tensor,
                steps: Tensor,
                *,
                steps_bias: Tensor,
                decay: Tensor,
                skip: Tensor | None = None,
                part: Recurrence = part,
            ) -> Tensor:
                return scan(part, mixed, steps, PerHead(steps_bias, decay, skip))

            own = slice(first, first + heads)
            yield Piece(
                slice(first_sequence, first_sequence + at_once),
                (_mixed_columns(recurrence, own, keys), _step_columns(recurrence, own)),
                dict.fromkeys(("steps_bias", "decay", "skip"), own),
                _times(own, recurrence.head_dim),
                carry,
            )


def _times(heads: slice, channels: int, begin: int = 0) -> slice:
    return slice(begin + heads.start * channels, begin + heads.stop * channels)


def _mixed_columns(recurrence: Recurrence, heads: slice, keys: slice) -> Columns:
    """Of what the convolution made, the columns of some heads and of the keys and queries that serve them."""
    width, key_width, dim = recurrence.width, recurrence.key_width, recurrence.key_dim
    if recurrence.rule == "mamba2":
        value, first = _times(heads, recurrence.head_dim), width
        return value, _times(keys, dim, first), _times(keys, dim, first + key_width)
    value = _times(heads, recurrence.head_dim, 2 * key_width)
    return _times(keys, dim), _times(keys, dim, key_width), value


def _step_columns(recurrence: Recurrence, heads: slice) -> Columns:
    if recurrence.rule == "mamba2":
        return (heads,)
    return heads, slice(recurrence.heads + heads.start, recurrence.heads + heads.stop)


# -- tensors of a piece -----------------------------------------------------------------------------------------------


def _by_sequence(rows: Tensor, sequences: int) -> Tensor:
    """(sequences, tokens, columns) of rows, which may be columns of a wider tensor."""
    return torch.unflatten(rows, 0, (sequences, -1))


def _read(piece: Piece, inputs: Sequence[Tensor]) -> list[Tensor]:
    """A piece's inputs, in the type that is computed in."""
    found = []
    for tensor, columns in zip(inputs, piece.inputs, strict=True):
        parts = [tensor[piece.sequences, :, part] for part in columns]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        found.append(whole.to(compute_type(tensor.dtype)))
    return found


NAMES = {
    SCAN: {"steps_bias": f"{STEP_BIAS}.bias", "decay": f"{DECAY}.weight", "skip": f"{SKIP}.weight"},
    CONVOLUTION: {"weight": f"{CONVOLUTION}.weight", "bias": f"{CONVOLUTION}.bias"},
    GATED_NORM: {"weight": f"{GATED_NORM}.weight"},
    GATING: {},
}
"""Of each operator, what its function calls its weights, and their names among a block's."""


def _weights(piece: Piece, weights: Mapping[str, Tensor], op: Op) -> dict[str, Tensor]:
    found = {name: weights[full] for name, full in NAMES[op.name].items() if full in weights}
    return {
        name: tensor[piece.weights.get(name, slice(None))].to(compute_type(tensor.dtype))
        for name, tensor in found.items()
    }


def _gradients(
    piece: Piece, read: Sequence[Tensor], own: Mapping[str, Tensor], above: Tensor
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Of a piece's inputs and weights, by autograd."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in read]
        named = {name: tensor.detach().requires_grad_() for name, tensor in own.items()}
        result = piece.function(*leaves, **named)
    found = torch.autograd.grad(result, [*leaves, *named.values()], above.to(result.dtype))
    return list(found[: len(leaves)]), dict(zip(named, found[len(leaves) :], strict=True))


def _add(target: Tensor, columns: Columns, gradient: Tensor) -> None:
    """A piece's gradient to where it belongs; keys may have got some of other heads already."""
    widths = [target[..., part].shape[-1] for part in columns]
    for part, own in zip(columns, torch.split(gradient, widths, -1), strict=True):
        add_rounded(target[..., part], own)
