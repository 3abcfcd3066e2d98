"""Norms of queries' or keys' heads together with their rotation: in one kernel where there is one.

What they write is what the norm and the rotation, each alone, would.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flopwise.engine.kernels import dispatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """How heads turn: see `dispatch.rotate`."""

    positions: Tensor
    frequencies: Tensor
    scale: float = 1.0
    neighbours: bool = False


def is_one_kernel(source: Tensor, turn: Turn) -> bool:
    """Whether heads (tokens, heads, channels) are normed and turned in one pass: all of their channels turn."""
    return dispatch.is_fused(source) and 2 * len(turn.frequencies) == source.shape[2]


def norm_and_turn(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    turn: Turn,
    *,
    epsilon: float,
    rms: bool,
    out: Tensor,
    statistics: Tensor,
) -> None:
    """Normalises each head of (tokens, heads, channels), turns it and writes it to `out`.

    `statistics`: as of `dispatch.norm_forward`, a row for each token and head.
    """
    if is_one_kernel(source, turn):
        from flopwise.engine.kernels import fused_heads

        fused_heads.forward(source, weight, bias, turn, epsilon=epsilon, rms=rms, out=out, statistics=statistics)
        return
    forward_in_two(source, weight, bias, turn, epsilon=epsilon, rms=rms, out=out, statistics=statistics)


def norm_and_turn_backward(
    gradient: Tensor,
    source: Tensor,
    weight: Tensor,
    statistics: Tensor,
    turn: Turn,
    *,
    rms: bool,
    out: Tensor,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None,
) -> None:
    """`out`, which may be `gradient`, gets the gradient of `source`; what is trained has its own added."""
    if is_one_kernel(source, turn):
        from flopwise.engine.kernels import fused_heads

        fused_heads.backward(
            gradient,
            source,
            weight,
            statistics,
            turn,
            rms=rms,
            out=out,
            weight_gradient=weight_gradient,
            bias_gradient=bias_gradient,
        )
        return
    backward_in_two(
        gradient,
        source,
        weight,
        statistics,
        turn,
        rms=rms,
        out=out,
        weight_gradient=weight_gradient,
        bias_gradient=bias_gradient,
    )


def forward_in_two(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    turn: Turn,
    *,
    epsilon: float,
    rms: bool,
    out: Tensor,
    statistics: Tensor,
) -> None:
    """See `norm_and_turn`: the norm, then the rotation in its place."""
    rows = out.reshape(-1, out.shape[2])
    dispatch.norm_forward(
        source.reshape(rows.shape), weight, bias, epsilon=epsilon, rms=rms, out=rows, statistics=statistics
    )
    _turn(rows.view(out.shape), turn, out=out, inverse=False)


def backward_in_two(
    gradient: Tensor,
    source: Tensor,
    weight: Tensor,
    statistics: Tensor,
    turn: Turn,
    *,
    rms: bool,
    out: Tensor,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None,
) -> None:
    """See `norm_and_turn_backward`: the rotation back in the place of the gradient, then the norm."""
    _turn(gradient, turn, out=out, inverse=True)
    rows = out.reshape(-1, out.shape[2])
    dispatch.norm_backward(
        rows,
        source.reshape(rows.shape),
        weight,
        statistics,
        rms=rms,
        out=rows,
        weight_gradient=weight_gradient,
        bias_gradient=bias_gradient,
        accumulate=False,
    )
    if rows.data_ptr() != out.data_ptr():
        out.copy_(rows.view(out.shape))


def _turn(source: Tensor, turn: Turn, *, out: Tensor, inverse: bool) -> None:
    """The channels that turn, over themselves; those behind them are there."""
    turned = 2 * len(turn.frequencies)
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)
    dispatch.rotate(
        out[..., :turned],
        turn.positions,
        turn.frequencies,
        out=out[..., :turned],
        inverse=inverse,
        scale=turn.scale,
        neighbours=turn.neighbours,
    )
