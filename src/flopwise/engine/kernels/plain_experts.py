"""Products of experts in plain torch, expert by expert: what the fast ones are held against.

Matrices are (experts, outputs, inputs), biases (experts, outputs). Rows lie sorted by expert; with `gathers` a product
reads them where they lie among the tokens, so that nobody copies them. These forms ask the device how many rows an
expert has.

A token's weights do not multiply what its experts make but, in backward, what their down product read: ⟨gradient, W·a⟩
is ⟨gradient·W, a⟩, so that no expert's result has to be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from flopwise.engine.kernels import activations
from flopwise.engine.kernels.blocks import compute_type, row_blocks
from flopwise.engine.kernels.experts import Routed


def each_expert(routed: Routed) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, with those."""
    for expert, (first, last) in enumerate(pairwise(routed.starts.tolist())):
        if first < last:
            yield expert, slice(first, last)


def _rows(source: Tensor, routed: Routed, rows: slice, *, gathers: bool) -> Tensor:
    return source.index_select(0, routed.tokens[rows]) if gathers else source[rows]


def lay_out(source: Tensor, routed: Routed, *, out: Tensor) -> None:
    """`out` gets the tokens' rows, one for each row of the experts."""
    torch.index_select(source, 0, routed.tokens, out=out)


def product(
    source: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    routed: Routed,
    *,
    out: Tensor,
    gathers: bool = False,
    back: bool = False,
    add: bool = False,
) -> None:
    """`out` gets each row's product with its expert's matrix, transposed unless `back`; with `add` added to it."""
    for expert, rows in each_expert(routed):
        right = matrix[expert] if back else matrix[expert].t()
        left = _rows(source, routed, rows, gathers=gathers)
        if add:
            out[rows].addmm_(left, right)
        elif bias is not None:
            torch.addmm(bias[expert], left, right, out=out[rows])
        else:
            torch.mm(left, right, out=out[rows])


def gated_product(
    source: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    routed: Routed,
    *,
    kind: str,
    gate: Tensor,
    up: Tensor,
    activated: Tensor,
) -> None:
    """Gate and up of the tokens' rows, the halves of one matrix' outputs, and what an activation makes of them."""
    inner = gate.shape[1]
    for half, out in ((slice(0, inner), gate), (slice(inner, 2 * inner), up)):
        shift = None if bias is None else bias[:, half]
        product(source, matrix[:, half], shift, routed, out=out, gathers=True)
    activations.activation_forward(kind, gate, up, out=activated)


def weigh_backward(kind: str, made: Tensor, gate: Tensor | None, up: Tensor, weights: Tensor) -> Tensor:
    """An activation's backward, its rows weighted: from the gradient in `made`, not yet weighted, to the weights'.

    The gradients of gate and up take their places, the weighted result of the activation that of `made`.
    """
    wide = compute_type(made.dtype)
    found = torch.empty(made.shape[0], dtype=wide, device=made.device)
    for block in row_blocks(made.shape[0], made.shape[1] * wide.itemsize, 4):
        gates, ups, result = None if gate is None else gate[block], up[block], made[block]
        above = result.to(wide, copy=True)
        activations.activation_backward(kind, result, gates, ups, gate_out=gates, up_out=ups, recompute=True)
        found[block] = above.mul_(result).sum(-1)
        for each in (result, ups) if gates is None else (result, gates, ups):
            each.copy_(each.to(wide).mul_(weights[block, None]))
    return found


def wgrad(gradient: Tensor, source: Tensor, routed: Routed, *, total: Tensor, gathers: str) -> None:
    """`total`, the sum of the matrices' gradients, gets gradientᵀ · source of each expert's rows added.

    `gathers`: which of the two lies as the tokens do, "gradient" or "source"; "": neither.
    """
    for expert, rows in each_expert(routed):
        left = _rows(gradient, routed, rows, gathers=gathers == "gradient")
        right = _rows(source, routed, rows, gathers=gathers == "source")
        if total.dtype == left.dtype:
            total[expert].addmm_(left.t(), right)
        else:
            total[expert].add_((left.t() @ right).to(total.dtype))


def bias_gradient(gradient: Tensor, routed: Routed, *, weights: Tensor | None, total: Tensor) -> None:
    """`total` gets the sum of each expert's rows added; with `weights`, a number of each row, of the tokens' rows."""
    wide = compute_type(gradient.dtype)
    for expert, rows in each_expert(routed):
        own = _rows(gradient, routed, rows, gathers=weights is not None).to(wide)
        summed = own.sum(0) if weights is None else (own * weights[rows, None]).sum(0)
        total[expert] += summed.to(total.dtype)


def sum_rows(rows: Tensor, routed: Routed, weights: Tensor | None, *, out: Tensor, accumulate: bool) -> None:
    """`out` gets the weighted sum of each token's rows, in the order of its choices; with `accumulate` it is added."""
    wide = compute_type(rows.dtype)
    for block in row_blocks(out.shape[0], out.shape[1] * wide.itemsize, 3):
        places = routed.places[block]
        total = out[block].to(wide) if accumulate else torch.zeros_like(out[block], dtype=wide)
        for slot in range(places.shape[1]):
            picked = rows.index_select(0, places[:, slot]).to(wide)
            total += picked if weights is None else picked * weights[block, slot, None]
        out[block].copy_(total)
