"""A model's numbers by name: which part each belongs to, whether it is trained, and where it lies among its like.

Both executors, checkpoints and the first values all go by this list. A name is the operator's weight with its layer in
front: `layers.3.qkv.weight`, `embedding.weight`, `final_norm.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from flopwise.work.adapters import DOWN, MAGNITUDE, UP
from flopwise.work.describe import describe
from flopwise.work.op import Attention, Gemm, Op, Streaming, Weight
from flopwise.work.state_ops import CONVOLUTION
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work

End = Literal["embedding", "head"]
ENDS: tuple[End, ...] = get_args(End)

Place = Literal["device", "host"]

Part = int | End
"""A layer, or one of the ends."""

Role = Literal["matrix", "table", "filter", "bias", "norm"]
"""What a parameter is: a product's matrix, a table of embeddings, a convolution's filters, a bias, or the scale of a
norm and what else is one number for a channel or a head."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model's weights."""

    weight: Weight
    part: Part
    first: int
    """Its first number's place among those of its part that are trained as well, or are not as well."""
    role: Role
    trained: bool = True

    @property
    def name(self) -> str:
        return f"layers.{self.part}.{self.local}" if isinstance(self.part, int) else self.local

    @property
    def local(self) -> str:
        """Its name within its layer: `qkv.weight`."""
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def elements(self) -> int:
        return self.weight.elements

    @property
    def decays(self) -> bool:
        """Whether weight decay is for it: matrices, tables and filters, not what scales or shifts a channel."""
        return self.role in ("matrix", "table", "filter")


def parameters_of(model: Transformer, sequence_tokens: int) -> tuple[Parameter, ...]:
    """Every tensor once, in the order embedding, layers, head; within a part those that decay, then the others.

    What is trained comes before what is not. A tied matrix is listed as the head's, and the part `head` then holds what
    comes before the blocks as well.
    """
    before, _, behind = op_groups(describe(model, sequence_tokens))
    inside = {kind: op_groups(describe(kind, sequence_tokens))[1] for kind in model.kinds}
    found: list[Parameter] = []
    if not model.tied:
        found += list_parameters(before, "embedding")
    frozen = model.frozen_layers
    for layer in range(model.layers):
        found += list_parameters(inside[model.kind_of(layer)], layer, frozen=layer in frozen)
    return (*found, *list_parameters((*before, *behind) if model.tied else behind, "head"))


def is_of_adapter(parameter: Parameter) -> bool:
    """Whether it is one of an adapter's two matrices, or its magnitudes."""
    return parameter.weight.module.endswith((f"_{DOWN}", f"_{UP}", f"_{MAGNITUDE}"))


def op_groups(work: Work) -> tuple[tuple[Op, ...], tuple[Op, ...], tuple[Op, ...]]:
    """Operators before the blocks, of a block, and behind them."""
    first = next(index for index, op in enumerate(work.ops) if op.in_block)
    last = max(index for index, op in enumerate(work.ops) if op.in_block)
    return work.ops[:first], work.ops[first : last + 1], work.ops[last + 1 :]


def split_at_attention(block: tuple[Op, ...]) -> tuple[tuple[Op, ...], Attention | None, tuple[Op, ...]]:
    """A block's operators before attention, attention itself, and those after it; without attention all are before."""
    found = next(((index, op) for index, op in enumerate(block) if isinstance(op, Attention)), None)
    if found is None:
        return block, None, ()
    place, attention = found
    return block[:place], attention, block[place + 1 :]


def list_parameters(ops: tuple[Op, ...], part: Part, *, frozen: bool = False) -> Iterator[Parameter]:
    """Of one part, whose operators these are."""
    first = {True: 0, False: 0}
    owned = [
        Parameter(weight, part, 0, role_of(op, weight), trained=not frozen and op.frozen < op.layers)
        for op in ops
        if not isinstance(part, int) or op.first_layer <= part
        for weight in op.weights
        if weight.owned
    ]
    # What decays lies in one piece, and what does not in another: each is one call of an update. A head's matrix comes
    # first, so that something lies behind it: see `engine.streaming.products.HeadProducts`.
    for parameter in sorted(owned, key=lambda each: (not each.trained, not each.decays, each.local != "head.weight")):
        yield replace(parameter, first=first[parameter.trained])
        first[parameter.trained] += parameter.elements


def role_of(op: Op, weight: Weight) -> Role:
    """What a weight of an operator is."""
    if weight.kind == "bias":
        return "bias"
    if isinstance(op, Gemm):
        return "matrix"
    if weight.module == CONVOLUTION:
        return "filter"
    return "table" if isinstance(op, Streaming) and op.kind == "embedding" else "norm"
