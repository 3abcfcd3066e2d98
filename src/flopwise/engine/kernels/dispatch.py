"""What the executors call: the fused form of an operator on a GPU that has one, else the plain form.

Everything is written into tensors that are given. Rows are tokens; the last dimension is contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.profiler import record_function

from flopwise.engine.kernels import activations, experts, matrix_updates, plain, simple_updates, sinks
from flopwise.engine.kernels import adamw as plain_adamw
from flopwise.engine.kernels import adamw_8bit as plain_adamw_8bit
from flopwise.engine.kernels import dropout as plain_dropout
from flopwise.engine.kernels.adamw_8bit import Codes
from flopwise.engine.kernels.blocks import has_triton
from flopwise.engine.kernels.dropout import DropMask
from flopwise.engine.kernels.experts import Routed
from flopwise.engine.kernels.matrix_updates import Room, UpdatePiece
from flopwise.engine.kernels.plain import NO_TERMS, LossTerms
from flopwise.engine.kernels.rounding import Seed
from flopwise.engine.kernels.updating import UpdateSettings
from flopwise.work.routing import Routing

__all__ = [
    "NO_TERMS",
    "Codes",
    "DropMask",
    "LossTerms",
    "Room",
    "Seed",
    "UpdatePiece",
    "UpdateSettings",
    "activation_backward",
    "activation_forward",
    "adafactor",
    "adafactor_vector",
    "adamw",
    "adamw_8bit",
    "add_column_sums",
    "add_sinks",
    "copy_heads",
    "copy_rows",
    "cross_entropy",
    "dropout",
    "embedding_add",
    "embedding_backward",
    "embedding_forward",
    "is_fused",
    "lion",
    "merge_attention",
    "muon",
    "norm_backward",
    "norm_forward",
    "rotate",
    "route",
    "route_backward",
    "sgd",
    "sinks_backward",
    "sort_by_expert",
    "sum_of_squares",
    "token_losses",
]

FUSED_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_fused(*tensors: Tensor | None) -> bool:
    """Whether all are on a GPU and of a type that the fused forms compute."""
    given = [each for each in tensors if each is not None]
    return all(each.is_cuda and each.dtype in FUSED_TYPES for each in given) and has_triton()


def norm_forward(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    epsilon: float,
    rms: bool,
    out: Tensor,
    statistics: Tensor,
    other: Tensor | None = None,
    total: Tensor | None = None,
    drop_other: DropMask | None = None,
    drop_out: DropMask | None = None,
) -> None:
    """Normalises the rows of `source`, or of its sum with `other`; `total`, which a sum needs, gets what is normalised.

    Of `other` goes into the sum what `drop_other` keeps of it, of the result to `out` what `drop_out` keeps.

    With a `total`, `out` may be `source` or `other` itself. `statistics`, in float32 (float64 for float64), gets each
    row's reciprocal root (rms: (rows,)), or its mean and reciprocal deviation ((rows, 2)). With rms the normal rows are
    rounded to their type before the weight, as Llama's.
    """
    if is_fused(source, weight, bias):
        from flopwise.engine.kernels import fused

        forward = fused.norm_forward
    else:
        forward = plain.norm_forward
    assert other is None or total is not None
    assert drop_other is None or (other is not None and drop_out is None)
    forward(
        source,
        weight,
        bias,
        epsilon=epsilon,
        rms=rms,
        out=out,
        statistics=statistics,
        other=other,
        total=total,
        drop_other=drop_other,
        drop_out=drop_out,
    )


def norm_backward(
    gradient: Tensor,
    source: Tensor,
    weight: Tensor,
    statistics: Tensor,
    *,
    rms: bool,
    out: Tensor,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None,
    accumulate: bool,
    recompute: bool = False,
    bias: Tensor | None = None,
    drop: DropMask | None = None,
    dropped: Tensor | None = None,
) -> None:
    """`out` gets the gradient of `source`, added to it with `accumulate`; what is trained has its own added.

    Without `accumulate`, `out` may be `gradient` itself. With `recompute` (and the norm's `bias`) the norm's own result
    is recomputed and takes the place of `gradient`. With `drop`, `dropped` gets what it keeps of `out`: the gradient of
    what was dropped before it was added to the other summand.
    """
    assert not recompute or out.data_ptr() != gradient.data_ptr()
    assert (drop is None) == (dropped is None)
    if is_fused(gradient, source, weight, weight_gradient, bias_gradient):
        from flopwise.engine.kernels import fused

        backward = fused.norm_backward
    else:
        backward = plain.norm_backward
    backward(
        gradient,
        source,
        weight,
        statistics,
        rms=rms,
        out=out,
        weight_gradient=weight_gradient,
        bias_gradient=bias_gradient,
        accumulate=accumulate,
        recompute=recompute,
        bias=bias,
        drop=drop,
        dropped=dropped,
    )


def dropout(source: Tensor, mask: DropMask, *, out: Tensor, other: Tensor | None = None) -> None:
    """`out`, which may be `source` or `other`, gets what is kept of `source`, added to `other` where there is one."""
    if is_fused(source, out, other):
        from flopwise.engine.kernels import fused_dropout

        fused_dropout.dropout(source, mask, out=out, other=other)
    else:
        plain_dropout.dropout(source, mask, out=out, other=other)


def rotate(
    source: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    *,
    out: Tensor,
    inverse: bool,
    scale: float = 1.0,
    neighbours: bool = False,
) -> None:
    """Turns each head (tokens, heads, channels) by its token's angles, or back with `inverse`, and scales it.

    An angle is the token's position times the frequency of the pair (channels / 2), in fp32. Channel i turns with
    channel i + channels / 2, or with `neighbours` channel 2 i with 2 i + 1. `out` may be `source` itself.
    """
    if is_fused(source, out):
        from flopwise.engine.kernels import fused

        turn = fused.rotate
    else:
        turn = plain.rotate
    turn(source, positions, frequencies, out=out, inverse=inverse, scale=scale, neighbours=neighbours)


def activation_forward(kind: str, gate: Tensor | None, up: Tensor, *, out: Tensor) -> None:
    """act(gate) · up, or act(up) without a gate; `kind` is one of `flopwise.work.activations.ACTIVATIONS`."""
    if is_fused(gate, up, out):
        from flopwise.engine.kernels import fused_activations as fused

        if kind in fused.ACTIVATIONS:
            fused.activation_forward(kind, gate, up, out=out)
            return
    activations.activation_forward(kind, gate, up, out=out)


def activation_backward(
    kind: str,
    gradient: Tensor,
    gate: Tensor | None,
    up: Tensor,
    *,
    gate_out: Tensor | None,
    up_out: Tensor,
    recompute: bool = False,
) -> None:
    """The gradients of gate (None where there is none) and up. Either may take the place of an input.

    With `recompute` the activation's own result is recomputed and takes the place of `gradient`.
    """
    if is_fused(gradient, gate, up, gate_out, up_out):
        from flopwise.engine.kernels import fused_activations as fused

        if kind in fused.ACTIVATIONS:
            fused.activation_backward(kind, gradient, gate, up, gate_out=gate_out, up_out=up_out, recompute=recompute)
            return
    activations.activation_backward(kind, gradient, gate, up, gate_out=gate_out, up_out=up_out, recompute=recompute)


def merge_attention(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], *, out: Tensor, logsumexp: Tensor
) -> None:
    """Attention over the keys of both from (output, logsumexp) over those of each.

    Outputs are (sequences, queries, heads, channels), logsumexp (sequences, heads, queries) and finite.
    """
    if is_fused(one[0], other[0], out):
        from flopwise.engine.kernels import fused

        fused.merge_attention(one, other, out=out, logsumexp=logsumexp)
    else:
        plain.merge_attention(one, other, out=out, logsumexp=logsumexp)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    scale: Tensor | float,
    loss: Tensor,
    cap: float | None = None,
    terms: LossTerms = NO_TERMS,
) -> None:
    """Logits become the gradient of scale · Σ (cross-entropy and its terms); `loss` gets the unscaled sum added.

    Rows with a negative label count for nothing, and their gradient is zero. With a `cap` the loss is that of
    cap · tanh(logits / cap). `scale` is a tensor of no dimensions where it changes from one replay of a captured step
    to the next, and one of a number for each row where they differ. Room behind a row may be overwritten with zeros, up
    to the next 16 bytes.
    """
    if is_fused(logits):
        from flopwise.engine.kernels import fused

        fused.cross_entropy(logits, labels, scale=scale, loss=loss, cap=cap, terms=terms)
    else:
        plain.cross_entropy(logits, labels, scale=scale, loss=loss, cap=cap, terms=terms)


def token_losses(logits: Tensor, labels: Tensor, *, out: Tensor, cap: float | None = None) -> None:
    """`out` gets the cross-entropy of each row, 0 where its label is negative."""
    if is_fused(logits):
        from flopwise.engine.kernels import fused

        fused.token_losses(logits, labels, out=out, cap=cap)
    else:
        plain.token_losses(logits, labels, out=out, cap=cap)


def route(scores: Tensor, routing: Routing, *, correction: Tensor | None, weights: Tensor, index: Tensor) -> None:
    """The experts of each token and their weights, from the router's scores. `correction`: or its terms.

    Of experts with equal shares which one is chosen is not specified: on a GPU the first.
    """
    if is_fused(scores, weights):
        from flopwise.engine.kernels import fused_routing

        fused_routing.route(scores, routing, correction=correction, weights=weights, index=index)
    else:
        experts.route(scores, routing, correction=correction, weights=weights, index=index)


def route_backward(gradient: Tensor, scores: Tensor, index: Tensor, routing: Routing, *, out: Tensor) -> None:
    """`out` gets the gradient of the scores from that of the chosen experts' weights."""
    if is_fused(gradient, scores, out):
        from flopwise.engine.kernels import fused_routing

        fused_routing.route_backward(gradient, scores, index, routing, out=out)
    else:
        experts.route_backward(gradient, scores, index, routing, out=out)


def sort_by_expert(index: Tensor, count: int) -> Routed:
    """The rows of so many experts that tokens chose, (tokens, choices), in the order of a stable sort."""
    if index.is_cuda and has_triton():
        from flopwise.engine.kernels import fused_routing

        return fused_routing.sort_by_expert(index, count)
    return experts.sort_by_expert(index, count)


def add_sinks(scores: Tensor, *, out: Tensor, logsumexp: Tensor) -> None:
    """See `sinks.add_sinks`."""
    if is_fused(out, logsumexp, scores):
        from flopwise.engine.kernels import fused_sinks

        fused_sinks.add_sinks(scores, out=out, logsumexp=logsumexp)
    else:
        sinks.add_sinks(scores, out=out, logsumexp=logsumexp)


def sinks_backward(gradient: Tensor, scores: Tensor, *, out: Tensor, logsumexp: Tensor, total: Tensor) -> None:
    """See `sinks.sinks_backward`."""
    if is_fused(gradient, out, logsumexp, scores, total):
        from flopwise.engine.kernels import fused_sinks

        fused_sinks.sinks_backward(gradient, scores, out=out, logsumexp=logsumexp, total=total)
    else:
        sinks.sinks_backward(gradient, scores, out=out, logsumexp=logsumexp, total=total)


def copy_rows(source: Tensor, *, out: Tensor) -> None:
    """`out` gets the rows of `source`, which are columns of wider ones: torch's own copy of such is a slow one."""
    if is_fused(source, out):
        from flopwise.engine.kernels import fused

        fused.copy_rows(source, out=out)
    else:
        out.copy_(source)


def copy_heads(source: Tensor, *, out: Tensor, add: bool) -> None:
    """`out` gets (sequences, tokens, heads, channels), or has them added, whichever of heads and tokens lie outer.

    torch's own copy between the two orders reaches a third of the memory's rate.
    """
    if is_fused(source, out):
        from flopwise.engine.kernels import fused

        fused.copy_heads(source, out=out, add=add)
    elif add:
        # The sum is made in the wider of the two types and rounded once, without a copy of either.
        out.add_(source)
    else:
        out.copy_(source)


def embedding_forward(ids: Tensor, table: Tensor, *, out: Tensor) -> None:
    """The table's row of each id."""
    if is_fused(table, out):
        from flopwise.engine.kernels import fused

        fused.embedding(ids, table, out=out, add=False)
    else:
        plain.embedding_forward(ids, table, out=out)


def embedding_add(ids: Tensor, table: Tensor, *, out: Tensor) -> None:
    """`out` gets the table's row of each id added."""
    if is_fused(table, out):
        from flopwise.engine.kernels import fused

        fused.embedding(ids, table, out=out, add=True)
    else:
        plain.embedding_add(ids, table, out=out)


def embedding_backward(ids: Tensor, gradient: Tensor, *, table_gradient: Tensor) -> None:
    """Each id's row of the table's gradient gets the sum of its rows of `gradient` added, in a fixed order."""
    if is_fused(gradient, table_gradient):
        from flopwise.engine.kernels import fused

        fused.embedding_backward(ids, gradient, table_gradient=table_gradient)
    else:
        plain.embedding_backward(ids, gradient, table_gradient=table_gradient)


def add_column_sums(values: Tensor, *, total: Tensor) -> None:
    """`total` gets the sum over the rows added, rounded once."""
    if is_fused(values, total):
        from flopwise.engine.kernels import fused

        fused.add_column_sums(values, total=total)
    else:
        plain.add_column_sums(values, total=total)


def sum_of_squares(values: Tensor, *, out: Tensor) -> None:
    """`out`, of no dimensions, gets Σ values² added."""
    if is_fused(values):
        from flopwise.engine.kernels import fused_update

        fused_update.sum_of_squares(values, out=out)
    else:
        plain.sum_of_squares(values, out=out)


def adamw(
    weights: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    master: Tensor | None,
    *,
    settings: UpdateSettings,
    offset: int,
) -> None:
    """One step of AdamW over a flat piece whose first number is number `offset` of all.

    It runs in float32 (float64 where weights or master are) from the master where there is one, else from the weights.
    Results are rounded to the nearest, or by chance where the settings have a seed and the target is bf16.
    """
    if is_fused(weights, gradients, first, second, master):
        from flopwise.engine.kernels import fused_update

        fused_update.adamw(weights, gradients, first, second, master, settings=settings, offset=offset)
    else:
        # In a trace its operators look like any others.
        with record_function("Optimizer.step#AdamW.step"):
            plain_adamw.adamw(weights, gradients, first, second, master, settings=settings, offset=offset)


def adamw_8bit(
    weights: Tensor, gradients: Tensor, codes: Codes, master: Tensor | None, *, settings: UpdateSettings, offset: int
) -> None:
    """The same with both moments in codes of 8 bits, over a flat piece that begins with a block of them."""
    if is_fused(weights, gradients, master):
        from flopwise.engine.kernels import fused_update

        fused_update.adamw_8bit(weights, gradients, codes, master, settings=settings, offset=offset)
    else:
        with record_function("Optimizer.step#AdamW8bit.step"):
            plain_adamw_8bit.adamw_8bit(weights, gradients, codes, master, settings=settings, offset=offset)


def lion(
    weights: Tensor, gradients: Tensor, first: Tensor, master: Tensor | None, *, settings: UpdateSettings, offset: int
) -> None:
    """The same of Lion, which remembers one moment."""
    if is_fused(weights, gradients, first, master):
        from flopwise.engine.kernels import fused_update

        fused_update.lion(weights, gradients, first, master, settings=settings, offset=offset)
    else:
        with record_function("Optimizer.step#Lion.step"):
            simple_updates.lion(weights, gradients, first, master, settings=settings, offset=offset)


def sgd(
    weights: Tensor,
    gradients: Tensor,
    first: Tensor | None,
    master: Tensor | None,
    *,
    settings: UpdateSettings,
    offset: int,
) -> None:
    """The same of SGD, with momentum where there is a moment."""
    if is_fused(weights, gradients, first, master):
        from flopwise.engine.kernels import fused_update

        fused_update.sgd(weights, gradients, first, master, settings=settings, offset=offset)
    else:
        with record_function("Optimizer.step#SGD.step"):
            simple_updates.sgd(weights, gradients, first, master, settings=settings, offset=offset)


def muon(piece: UpdatePiece, first: Tensor, *, settings: UpdateSettings, offset: int, room: Room) -> None:
    """One step of Muon of a tensor whose first number is number `offset` of all; `room`: for its products."""
    with record_function("Optimizer.step#Muon.step"):
        matrix_updates.muon(piece, first, settings=settings, offset=offset, room=room)


def adafactor(piece: UpdatePiece, row: Tensor, column: Tensor, *, settings: UpdateSettings, offset: int) -> None:
    """One step of Adafactor of a tensor of matrices."""
    with record_function("Optimizer.step#Adafactor.step"):
        matrix_updates.adafactor(piece, row, column, settings=settings, offset=offset)


def adafactor_vector(piece: UpdatePiece, second: Tensor, *, settings: UpdateSettings, offset: int) -> None:
    """The same of a vector."""
    with record_function("Optimizer.step#Adafactor.step"):
        matrix_updates.adafactor_vector(piece, second, settings=settings, offset=offset)
