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
from flopwise.work.attention_ops import GATING
from flopwise.work.held import CARRIED_NUMBERS, carrying_room_bytes, heads_at_once
from flopwise.work.op import Op
from flopwise.work.recurrence import Recurrence
from flopwise.work.state_ops import CONVOLUTION, DECAY, GATED_NORM, SCAN, SKIP, STEP_BIAS
from flopwise.work.transformer import Transformer

CARRYING = (CONVOLUTION, SCAN, GATED_NORM, GATING)
"""Operators that are run here."""

Columns = tuple[slice, ...]
"""Which columns of a tensor a piece reads, one range behind another."""
ALL: Columns = (slice(None),)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Of which sequences rows are: all as long as each other, or packed behind each other."""

    sequences: int
    tokens: int
    """Of each; of packed ones the most that one may have."""
    starts: Tensor | None = None
    """Rows at which packed sequences begin, with the end of the last; None: all are equally long."""
    positions: Tensor | None = None
    """Of each row in its sequence, where they are packed."""

    def read(self, rows: Tensor, some: slice) -> Tensor:
        """(sequences, tokens, columns) of some sequences; behind a packed one's end there are zeros."""
        if self.starts is None:
            return torch.unflatten(rows, 0, (self.sequences, -1))[some]
        begins, ends = self.starts[some.start : some.stop, None], self.starts[some.start + 1 : some.stop + 1, None]
        places = begins + torch.arange(self.tokens, device=rows.device)
        found = rows.index_select(0, places.clamp(max=rows.shape[0] - 1).flatten().long())
        return torch.unflatten(found, 0, places.shape).masked_fill((places >= ends)[..., None], 0.0)

    def write(self, made: Tensor, out: Tensor, some: slice) -> None:
        """The rows of some sequences."""
        if self.starts is None:
            torch.unflatten(out, 0, (self.sequences, -1))[some].copy_(made)
            return
        inside, found = self._of_rows(made, some)
        out.copy_(torch.where(inside, found.to(out.dtype), 0.0 if some.start == 0 else out))

    def add(self, made: Tensor, total: Tensor, some: slice) -> None:
        """The same, added to what is there."""
        if self.starts is None:
            add_rounded(torch.unflatten(total, 0, (self.sequences, -1))[some], made)
            return
        inside, found = self._of_rows(made, some)
        add_rounded(total, torch.where(inside, found, 0.0))

    def _of_rows(self, made: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        """Whether each row is of these sequences, and what was made of it if so."""
        assert self.starts is not None and self.positions is not None
        rows = torch.arange(self.positions.shape[0], device=made.device)
        sequence = torch.searchsorted(self.starts[: self.sequences + 1], rows, right=True) - 1 - some.start
        inside = (sequence >= 0) & (sequence < made.shape[0])
        places = sequence.clamp(0, made.shape[0] - 1) * made.shape[1] + self.positions.clamp(max=made.shape[1] - 1)
        return inside[:, None], made.flatten(0, 1).index_select(0, places)


@dataclass(frozen=True, slots=True)
class Portion:
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

    def forward(self, op: Op, values: Values, weights: Mapping[str, object], rows: SequenceRows | None) -> None:
        """Make an operator's result."""
        assert rows is not None, "sequences of such blocks are not cut"
        inputs = [values[name] for name in op.inputs]
        out = values.allocate(op.outputs[0], (inputs[0].shape[0], self._width(op)), inputs[0].dtype)
        with torch.no_grad(), _products(out):
            for piece in self._pieces(op, inputs[0], rows):
                read, own = _read(piece, inputs, rows), _weights(piece, weights, op)
                rows.write(piece.function(*read, **own), out[:, piece.result], piece.sequences)

    def backward(
        self,
        op: Op,
        values: Values,
        gradients: Gradients,
        trained: tuple[Mapping[str, object], Mapping[str, Tensor]],
        rows: SequenceRows | None,
    ) -> None:
        """From the gradient of an operator's result to those of its inputs.

        `trained`: a block's weights, and the sums that the gradients of those that are not frozen are added to.
        """
        assert rows is not None, "sequences of such blocks are not cut"
        weights, sums = trained
        inputs = [values[name] for name in op.inputs]
        above = gradients[op.outputs[0]]
        targets = []
        for name, source in zip(op.inputs, inputs, strict=True):
            # Nobody else reads them.
            target, there = gradients.target(name, tuple(source.shape), source.dtype)
            assert not there
            targets.append(target.zero_())
        with _products(above):
            for piece in self._pieces(op, inputs[0], rows):
                read, own = _read(piece, inputs, rows), _weights(piece, weights, op)
                of_result = rows.read(above[:, piece.result], piece.sequences)
                found, of_weights = _gradients(piece, read, own, of_result)
                for target, columns, gradient in zip(targets, piece.inputs, found, strict=True):
                    _add(target, columns, gradient, rows, piece.sequences)
                for name, gradient in of_weights.items():
                    total = sums.get(NAMES[op.name][name])
                    if total is not None:
                        add_rounded(total[piece.weights.get(name, slice(None))], gradient)
        gradients.drop(op.outputs[0])

    def _width(self, op: Op) -> int:
        if op.name == GATING:
            return self.model.attended_width
        assert self.recurrence is not None
        return self.recurrence.channels if op.name == CONVOLUTION else self.recurrence.width

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _pieces(self, op: Op, source: Tensor, rows: SequenceRows) -> Iterator[Portion]:
        sequences, tokens, width = rows.sequences, rows.tokens, source.shape[1]
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
                yield Portion(slice(0, sequences), ((part,),), {"weight": part, "bias": part}, part, convolve_with)
            return
        function = gate if op.name == GATING else self._norm
        step = max(1, room // each)
        for first in range(0, sequences, step):
            some = slice(first, min(first + step, sequences))
            yield Portion(some, (ALL, ALL), {}, slice(None), function)

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
) -> Iterator[Portion]:
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
            yield Portion(
                slice(first_sequence, min(first_sequence + at_once, sequences)),
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


def _read(piece: Portion, inputs: Sequence[Tensor], rows: SequenceRows) -> list[Tensor]:
    """A piece's inputs, in the type that is computed in."""
    found = []
    for tensor, columns in zip(inputs, piece.inputs, strict=True):
        parts = [rows.read(tensor[:, part], piece.sequences) for part in columns]
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


def _weights(piece: Portion, weights: Mapping[str, object], op: Op) -> dict[str, Tensor]:
    found = {}
    for name, full in NAMES[op.name].items():
        if full in weights:
            tensor = weights[full]
            assert isinstance(tensor, Tensor), "none of these is quantised"
            found[name] = tensor[piece.weights.get(name, slice(None))].to(compute_type(tensor.dtype))
    return found


def _gradients(
    piece: Portion, read: Sequence[Tensor], own: Mapping[str, Tensor], above: Tensor
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Of a piece's inputs and weights, by autograd."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in read]
        named = {name: tensor.detach().requires_grad_() for name, tensor in own.items()}
        result = piece.function(*leaves, **named)
    found = torch.autograd.grad(result, [*leaves, *named.values()], above.to(result.dtype))
    return list(found[: len(leaves)]), dict(zip(named, found[len(leaves) :], strict=True))


def _add(target: Tensor, columns: Columns, gradient: Tensor, rows: SequenceRows, sequences: slice) -> None:
    """A piece's gradient to where it belongs; keys may have got some of other heads already."""
    widths = [target[:, part].shape[-1] for part in columns]
    for part, own in zip(columns, torch.split(gradient, widths, -1), strict=True):
        rows.add(own, target[:, part], sequences)
