"""Updates that look at whole matrices, in plain torch: Muon and Adafactor. Both are as torch has them.

Both run on a GPU too: their sums and products are torch's own kernels, on blocks of rows that are as large as the room
that is planned for them. Sums over rows are added up block by block, so that they are the same wherever they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from flopwise.engine.kernels.rounding import FIRST, SECOND
from flopwise.engine.kernels.updating import UpdateSettings, store, store_weights, update_type
from flopwise.work.optimizers import MATRIX_BLOCK_NUMBERS, NEWTON_SCHULZ_STEPS

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, of XXᵀX and of (XXᵀ)²X, by Keller Jordan (kellerjordan.github.io/posts/muon)."""
LEAST_NORM = 1e-7
MUON_RATE = 0.2
"""The size of an update in units of AdamW's, so that one learning rate serves both: × √ of the longer side (arXiv
2502.16982, torch's `match_rms_adamw`)."""

LEAST_SIZE = 1e-3
"""Of a matrix' own size, by which Adafactor's rate is multiplied."""


class Room(Protocol):
    """Where temporaries lie."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of that shape with whatever lies there."""

    def give(self, tensor: Tensor) -> None:
        """Take it back."""


class OwnRoom:
    """Memory of the moment, for an update on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def give(self, tensor: Tensor) -> None:
        """It goes by itself."""


@dataclass(frozen=True, slots=True)
class UpdatePiece:
    """A tensor that is updated: flat, with the shapes of the matrices behind each other in it."""

    weights: Tensor
    gradients: Tensor
    master: Tensor | None
    matrices: tuple[tuple[int, int], ...]
    """(rows, columns) of each; a vector has one row."""

    @property
    def wide(self) -> torch.dtype:
        """What its update runs in."""
        return update_type(self.weights, self.master)

    @property
    def start(self) -> Tensor:
        """What is updated: the exact copy, where there is one."""
        return self.weights if self.master is None else self.master

    def each(self) -> Iterator[tuple[int, int, int]]:
        """(place of the first number, rows, columns) of every matrix."""
        first = 0
        for rows, columns in self.matrices:
            yield first, rows, columns
            first += rows * columns


def move(
    piece: UpdatePiece, place: slice, direction: Tensor, step: Tensor | float, *, settings: UpdateSettings, offset: int
) -> None:
    """Some numbers decay and go against a direction, which is used up."""
    updated = piece.start[place].to(piece.wide) * settings.number("kept")
    updated -= (direction * step).reshape(-1)
    store_weights(piece.weights, piece.master, place, updated, settings=settings, offset=offset)


def _blocks(first: int, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Rows of a matrix, a few at a time, and where their numbers lie."""
    step = max(1, MATRIX_BLOCK_NUMBERS // columns)
    for begin in range(0, rows, step):
        end = min(rows, begin + step)
        yield slice(begin, end), slice(first + begin * columns, first + end * columns)


# -- Muon --------------------------------------------------------------------------------------------------------------


def muon(piece: UpdatePiece, first: Tensor, *, settings: UpdateSettings, offset: int, room: Room) -> None:
    """One step of a tensor whose first number is number `offset` of all, matrix by matrix."""
    for begin, rows, columns in piece.each():
        long, short = max(rows, columns), min(rows, columns)
        matrix = room.take((rows, columns), torch.bfloat16)
        for part, place in _blocks(begin, rows, columns):
            gradient = piece.gradients[place].to(piece.wide) * settings.gradient_scale
            mean = first[place].to(piece.wide, copy=True).lerp_(gradient, 1.0 - settings.momentum)
            store(first[place], mean, FIRST, settings, offset + place.start)
            matrix[part] = gradient.lerp_(mean, settings.momentum).view(-1, columns)
        other = room.take((rows, columns), torch.bfloat16)
        squares = room.take((short, short), torch.bfloat16), room.take((short, short), torch.bfloat16)
        direction = _orthogonalise(matrix, other, squares)
        step = settings.number("rate") * (MUON_RATE * sqrt(long))
        for part, place in _blocks(begin, rows, columns):
            move(piece, place, direction[part].to(piece.wide), step, settings=settings, offset=offset)
        for each in (*squares, other, matrix):
            room.give(each)


def _orthogonalise(matrix: Tensor, other: Tensor, squares: tuple[Tensor, Tensor]) -> Tensor:
    """A matrix near the nearest one with equal singular values; in turns in the room of both."""
    rows, columns = matrix.shape
    long, short = max(rows, columns), min(rows, columns)
    here = matrix.T if rows > columns else matrix
    here.div_(here.norm().clamp(min=LEAST_NORM))
    rooms = other.view(short, long), matrix.view(short, long)
    once, cubed, fifth = NEWTON_SCHULZ
    gram, mixed = squares
    for step in range(NEWTON_SCHULZ_STEPS):
        torch.mm(here, here.T, out=gram)
        torch.addmm(gram, gram, gram, beta=cubed, alpha=fifth, out=mixed)
        here = torch.addmm(here, mixed, here, beta=once, out=rooms[step % 2])
    return here.T if rows > columns else here


# -- Adafactor ---------------------------------------------------------------------------------------------------------


def adafactor(piece: UpdatePiece, row: Tensor, column: Tensor, *, settings: UpdateSettings, offset: int) -> None:
    """One step of a tensor of matrices: of the squares of gradients, the means of rows and columns are remembered."""
    row_first = column_first = 0
    for begin, rows, columns in piece.each():
        own = Factors(row[row_first : row_first + rows], column[column_first : column_first + columns])
        _adafactor_matrix(piece, own, (begin, rows, columns), settings=settings, offset=offset)
        row_first, column_first = row_first + rows, column_first + columns


@dataclass(frozen=True, slots=True)
class Factors:
    """What is remembered of a matrix' squared gradients."""

    row: Tensor
    column: Tensor


def _adafactor_matrix(
    piece: UpdatePiece,
    means: Factors,
    where: tuple[int, int, int],
    *,
    settings: UpdateSettings,
    offset: int,
) -> None:
    begin, rows, columns = where
    least = torch.finfo(piece.wide).eps
    squares = means.row.new_empty((min(rows, max(1, MATRIX_BLOCK_NUMBERS // columns)), columns), dtype=piece.wide)
    row_means = torch.empty(rows, dtype=piece.wide, device=means.row.device)
    column_sums = torch.zeros(columns, dtype=piece.wide, device=means.row.device)
    size = torch.zeros((), dtype=piece.wide, device=means.row.device)
    for part, place in _blocks(begin, rows, columns):
        block = _gradient(piece, place, squares, settings).square_()
        torch.mean(block, dim=1, out=row_means[part])
        column_sums += block.sum(0)
        size += block.view(-1).copy_(piece.start[place]).square_().sum()
    mixed_in = settings.number("mixed_in")
    _mix(means.row, row_means, mixed_in)
    _mix(means.column, column_sums / rows, mixed_in)
    middle = means.row.mean().clamp(min=least)

    def direction(part: slice, place: slice) -> Tensor:
        gradient = _gradient(piece, place, squares, settings)
        root = torch.outer(means.row[part].to(piece.wide), means.column.to(piece.wide)).div_(middle)
        return gradient.mul_(root.clamp_(min=least * least).rsqrt_())

    change = torch.zeros_like(size)
    for part, place in _blocks(begin, rows, columns):
        change += direction(part, place).square_().sum()
    step = _relative_step(size, change, rows * columns, settings)
    for part, place in _blocks(begin, rows, columns):
        move(piece, place, direction(part, place), step, settings=settings, offset=offset)


def adafactor_vector(piece: UpdatePiece, second: Tensor, *, settings: UpdateSettings, offset: int) -> None:
    """One step of a vector, of which every squared gradient's mean is remembered."""
    least = torch.finfo(piece.wide).eps
    gradient = piece.gradients.to(piece.wide) * settings.gradient_scale
    mean = second.to(piece.wide, copy=True)
    _mix(mean, gradient.square(), settings.number("mixed_in"))
    store(second, mean, SECOND, settings, offset)
    gradient = gradient.mul_(mean.clamp_(min=least * least).rsqrt_())
    size = piece.start.to(piece.wide).square().sum()
    step = _relative_step(size, gradient.square().sum(), len(gradient), settings)
    move(piece, slice(0, len(gradient)), gradient, step, settings=settings, offset=offset)


def _gradient(piece: UpdatePiece, place: slice, room: Tensor, settings: UpdateSettings) -> Tensor:
    """A block of a gradient, in the room for it."""
    columns = room.shape[1]
    block = room[: (place.stop - place.start) // columns]
    block.view(-1).copy_(piece.gradients[place])
    return block.mul_(settings.gradient_scale)


def _mix(mean: Tensor, new: Tensor, mixed_in: Tensor | float) -> None:
    mean += (new - mean) * mixed_in


def _relative_step(size: Tensor, change: Tensor, numbers: int, settings: UpdateSettings) -> Tensor:
    """What an update is multiplied by: the rate in units of the weights' own size, and none larger than one of 1."""
    own = (size / numbers).sqrt().clamp(min=LEAST_SIZE) * settings.number("relative_rate")
    return own / (change / numbers).sqrt().clamp(min=1.0)
