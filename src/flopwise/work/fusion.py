"""Which operators of a block run as one: what the engine fuses, and planning counts on."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.work.adapters import DIRECTION
from flopwise.work.formats import Formats
from flopwise.work.op import Gemm, Op, Streaming
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work

SWIGLU_MULTIPLE = 64
"""Widths that products with SwiGLU in them take are multiples of this."""


def makers_for_one_product(ops: Sequence[Op]) -> dict[str, Op]:
    """Products whose input a norm or an activation made for them alone → that operator.

    Its backward makes the product's input again, in the place of its gradient, so that nobody else has to.
    """
    found: dict[str, Op] = {}
    for op in ops:
        if not isinstance(op, Gemm) or not op.needs:
            continue
        name = op.inputs[0]
        maker = next((other for other in ops if name in other.outputs), None)
        readers = [other for other in ops if name in other.inputs]
        # Frozen products beside an adapter's read it too, but not for their backward.
        alone = readers[0] is op and not any(other.needs or not isinstance(other, Gemm) for other in readers[1:])
        if alone and isinstance(maker, Streaming) and (maker.kind == "norm" or is_activation(maker)):
            found[op.name] = maker
    return found


def kept_of_heads(work: Work, *, normed: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the backward in front of attention reads, of queries, and of keys and values, beside the block's input.

    `normed`: whether queries and keys have norms of their own.
    """
    product = next((op for op in work.ops if op.name == "qkv"), None)
    found: dict[str, list[str]] = {"query": [], "key": [], "value": []}
    for part, made in zip(found, () if product is None else product.outputs, strict=False):
        has_norm = normed and part != "value"
        if has_norm or made.endswith(f"_{DIRECTION}"):
            found[part].append(made)
        if has_norm:
            found[part].append(f"{part}_norm.statistics")
    return tuple(found["query"]), (*found["key"], *found["value"])


def is_activation(op: Op) -> bool:
    """Whether an operator is the activation of a block's feed-forward part, or of one of its parts."""
    return isinstance(op, Streaming) and op.in_block and op.name.endswith("activation")


def sums_for_activations(ops: Sequence[Op]) -> dict[str, tuple[Gemm, ...]]:
    """Activations → what adapters add to what they read: one kernel, which reads and writes it once.

    Experts' products are none of these.
    """
    found = {}
    for op in filter(is_activation, ops):
        sums = [each for each in ops if isinstance(each, Gemm) and each.adds and each.groups == 1]
        added = tuple(each for each in sums if each.outputs[0] in op.inputs)
        if added:
            found[op.name] = added
    return found


def last_uses(ops: Sequence[Op]) -> dict[str, int]:
    """What operators read → the place of the last that does; sums for an activation are made where it stands."""
    found = {name: index for index, op in enumerate(ops) for name in op.inputs}
    sums = sums_for_activations(ops)
    for index, op in enumerate(ops):
        for name in (name for each in sums.get(op.name, ()) for name in each.inputs):
            found[name] = max(found[name], index)
    return found


def has_plain_swiglu(model: Transformer) -> bool:
    """Whether a feed-forward is one that two products with SwiGLU in them can run."""
    plain = not (model.ffn_bias or model.experts or model.adapters) and model.norm_place == "pre"
    return model.gated and model.activation == "silu" and plain


def swiglu_in_products(model: Transformer, formats: Formats) -> bool:
    """Whether a training runs such products, on a device that has them: by its formats and widths."""
    halves = formats.compute in ("bf16", "fp16") and formats.matrix == formats.compute
    sums = formats.gradients in ("fp32", formats.compute)
    aligned = model.hidden % SWIGLU_MULTIPLE == 0 and model.ffn % SWIGLU_MULTIPLE == 0 and model.head_dim % 8 == 0
    return has_plain_swiglu(model) and halves and sums and aligned


def is_sum_for_norm(op: Op, following: Op | None) -> bool:
    """Whether an operator is a sum of two, and the next one its norm."""
    summed = isinstance(op, Streaming) and op.kind == "residual" and len(op.inputs) == 2
    return summed and isinstance(following, Streaming) and following.kind == "norm" and following.inputs == op.outputs
