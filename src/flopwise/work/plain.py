"""What operators take where nothing is fused: as flopwise's plain kernels run them on a CPU, call by call.

A call reads and writes its numbers in the caches, since work is cut into blocks that stay there, and costs its start.
The numbers below are those that the calls of `engine/kernels/plain.py` and its neighbours touch for each number of the
operator's own; `tests/engine/test_plain_passes.py` counts them in torch.
"""

from __future__ import annotations

from typing import NamedTuple

from flopwise.work.formats import Formats
from flopwise.work.op import Attention, Gemm, Op, Scan, Streaming
from flopwise.work.work import Work


class Passes(NamedTuple):
    """Calls, the numbers that they read and write, and the functions (an exponential counts 1) that they compute.

    As constants below the last two are for each number of an operator, elsewhere in all."""

    calls: float
    moved: float
    functions: float = 0.0

    def times(self, elements: float) -> Passes:
        """Of so many numbers."""
        return Passes(self.calls, self.moved * elements, self.functions * elements)

    def plus(self, other: Passes) -> Passes:
        return Passes(*(one + two for one, two in zip(self, other, strict=True)))


NOTHING = Passes(0, 0)
COPY = Passes(1, 0)
"""Of what is in main memory, and goes there."""
SUM = Passes(1, 3)
NORMS = {"rms": (Passes(9, 10), Passes(18, 29)), "layer": (Passes(14, 15), Passes(26, 37))}
"""Forward, and backward that makes the norm's result again."""
ACTIVATIONS = {
    "silu": (Passes(5, 12, 1), Passes(12, 30, 1)),
    "gelu": (Passes(6, 14, 1.5), Passes(14, 34, 2.5)),
    "gelu_tanh": (Passes(10, 23, 3), Passes(23, 54, 3)),
    "relu": (Passes(2, 5), Passes(6, 15)),
    "relu2": (Passes(3, 7), Passes(6, 15)),
    "relu6": (Passes(2, 5), Passes(8, 20)),
    "leaky_relu": (Passes(4, 11), Passes(10, 24)),
    "mish": (Passes(8, 20, 1), Passes(19, 47, 2)),
    "sigmoid": (Passes(5, 11, 1), Passes(9, 22, 1)),
    "tanh": (Passes(2, 5, 3), Passes(6, 15, 3)),
    "linear": (Passes(1, 3), Passes(5, 13)),
    "quick_gelu": (Passes(7, 16, 1), Passes(14, 34, 1)),
    "clamped_swiglu": (Passes(10, 22, 1), Passes(22, 52, 1)),
}
"""Without a gate: forward, and backward that makes the activation's result again. erf counts 1.5, tanh 3.

`clamped_swiglu`, which always has one, less what `GATED` adds."""
GATED = (Passes(1, 3), Passes(4, 12))
"""What a gate adds to that."""
ROTATION = Passes(12, 10.5)
"""Of queries or of keys, either way."""
ROTATION_ROWS, ROW = 4.0, 120.0
"""Calls of it that run along half of a head at a time, and what each such start costs, as numbers moved."""
CROSS_ENTROPY = (Passes(26, 21, 1), NOTHING)
CHOICE = (Passes(1, 2), Passes(2, 2))
"""Of rows that are read; of those that they are put back to, of which the others become zeros first."""
MAGNITUDES = (Passes(1, 2), Passes(4, 8))
"""Results times a factor for each row of a matrix; backward the same of gradients, and their sums with the results."""
MAGNITUDE_LENGTHS = Passes(17, 3)
"""Of the rows of a matrix with its adapter, for each number of it, whatever the tokens: forward and backward anew."""
DEQUANTISED = {"nf4": Passes(8, 15, 2.5), "int8": Passes(4, 7), "fp8": Passes(4, 7)}
"""For each number of a matrix; looking a code up in a table takes as long as two and a half exponentials."""
ROUTE = (Passes(9, 8, 16), Passes(18, 21))
"""For each score of a router; finding the largest takes as long as so many exponentials of each."""
SORT = Passes(7, 13, 30)
"""By expert, for each choice of a token."""
GATHERED = Passes(1, 2)
"""Rows of tokens that an expert reads."""
SUMMED = (Passes(3, 11.25), Passes(2, 9.25))
"""A token's rows, for each of its choices: their weighted sum, and backward that of their gradients."""
WEIGHED = Passes(11, 18)
"""An activation's backward that weighs rows, beyond what it is without."""
LOOK_UP = (Passes(2, 5), Passes(19, 15, 6))
"""Of a table of embeddings; torch sums segments number by number, which takes as long as six exponentials."""
SQUARE = Passes(5, 12, 1)
"""Of the pairs of a chunk's tokens: differences of decays, mask, exponential, and a product with the scores."""
COLUMN_SUM = Passes(5, 1)
"""A bias' gradient."""
UPDATE = Passes(15, 34)
"""AdamW, for each run of parameters that are treated alike."""
RUNS_OF_PART = 2
"""What decays, and what does not."""


def plain_passes(work: Work, op: Op) -> tuple[Passes, Passes]:
    """One copy of an operator for one sequence, forward and backward; of products and attention what is beside them.

    Of uneven sequences for the mean one."""
    forward, backward = _passes(work, op)
    share = 1 / work.sequences
    return forward.times(share), backward.times(share)


def _passes(work: Work, op: Op) -> tuple[Passes, Passes]:
    """The same for all sequences that are described."""
    if isinstance(op, Gemm):
        return _beside_product(work, op)
    if isinstance(op, Attention):
        return _beside_attention(work, op)
    if isinstance(op, Scan):
        return _beside_scan(op)
    assert isinstance(op, Streaming)
    elements = float(work.tensors[op.outputs[0]].elements)
    found = _of_one(op)
    around = _around_experts(work, op)
    if around is not None:
        return around
    if op.kind == "embedding":
        tables = len(op.weights)
        found = tuple(Passes(tables * each.calls, tables * each.moved) for each in LOOK_UP)
    elif op.kind == "cross_entropy":
        elements = float(work.tensors[op.inputs[0]].elements)
    elif op.kind == "choose":
        return CHOICE[0].times(elements), CHOICE[1].times(float(work.tensors[op.inputs[0]].elements))
    elif op.normed:
        elements, found = float(sum(work.tensors[name].elements for name in op.outputs)), MAGNITUDES
    elif op.name == "rotary":
        elements = float(sum(work.tensors[name].elements for name in op.outputs))
        head_dim = next(other.head_dim for other in work.ops if isinstance(other, Attention))
        found = (Passes(2 * ROTATION.calls, ROTATION.moved + ROTATION_ROWS * ROW / head_dim),) * 2
    return found[0].times(elements), found[1].times(elements)


def _of_one(op: Streaming) -> tuple[Passes, ...]:
    """For each number of an operator's result."""
    if op.kind == "norm":
        return NORMS[op.function]
    if op.kind == "residual":
        return SUM, NOTHING
    if op.kind == "cross_entropy":
        return CROSS_ENTROPY
    if op.function in ACTIVATIONS:
        gate = GATED if len(op.inputs) > 1 else (NOTHING, NOTHING)
        return tuple(one.plus(more) for one, more in zip(ACTIVATIONS[op.function], gate, strict=True))
    each = Passes(op.eager_kernels, 3 * op.eager_kernels)
    return each, each


def _beside_product(work: Work, op: Gemm) -> tuple[Passes, Passes]:
    """Results that lie apart are products of their own, and so are those of experts, whose rows are gathered."""
    more = len(op.outputs) - 1
    forward, backward = Passes(more, 0), Passes(2 * more, 0)
    if op.name in EXPERTS and op.groups > 1:
        forward, backward = _beside_experts(op)
    if any(weight.kind == "bias" for weight in op.weights):
        sums = COLUMN_SUM.times(float(sum(work.tensors[name].elements for name in op.outputs)))
        backward = backward.plus(sums._replace(calls=len(op.outputs) * COLUMN_SUM.calls))
    return forward, backward


EXPERTS = ("gate_up", "up", "down")
"""Products of a mixture."""


def _beside_experts(op: Gemm) -> tuple[Passes, Passes]:
    """One product after another; the first reads rows of tokens, the last one's gradients are rows of tokens.

    Backward what the first read is laid out once."""
    products, gathered = len(op.outputs) * op.groups, GATHERED.times(float(op.rows * op.depth))
    back = Passes(2 * op.groups - 2, 0)
    if op.name == "down":
        each = GATHERED.times(2.0 * op.rows * op.columns)._replace(calls=2 * op.groups)
        return Passes(products - 1, 0), back.plus(each)
    each = gathered.times(float(len(op.outputs)))._replace(calls=products)
    return Passes(products - 1, 0).plus(each), back.plus(gathered)


def _around_experts(work: Work, op: Streaming) -> tuple[Passes, Passes] | None:
    """Of what chooses a token's experts and brings its rows there and back; None: another operator."""
    if op.name == "routing":
        forward, backward = (each.times(float(work.tensors[op.inputs[0]].elements)) for each in ROUTE)
        return forward.plus(SORT.times(float(work.tensors[op.outputs[1]].elements))), backward
    rows = {"dispatch": op.outputs[0], "combine": op.inputs[0]}.get(op.name)
    if rows is None:
        return None
    elements = float(work.tensors[rows].elements)
    choices = elements / float(work.tensors[op.inputs[0] if op.name == "dispatch" else op.outputs[0]].elements)
    forward, backward = (each.times(elements)._replace(calls=2 + each.calls * choices) for each in SUMMED)
    if op.name == "dispatch":
        return NOTHING, backward
    activated = next(other for other in work.ops if other.name == "down").inputs[0]
    return forward, WEIGHED.times(float(work.tensors[activated].elements))


def plain_lengths(op: Op) -> Passes:
    """What an operator of magnitudes does to the matrices whose rows it brings to their lengths, in all."""
    sides = op.normed if isinstance(op, Streaming) else ()
    numbers = float(sum(width * depth for width, depth in sides))
    return MAGNITUDE_LENGTHS.times(numbers)._replace(calls=len(sides) * MAGNITUDE_LENGTHS.calls)


def plain_dequantised(op: Gemm, formats: Formats) -> Passes:
    """Of one copy of a quantised matrix, in all."""
    kept = formats.kept_as(in_block=op.in_block, matrix=True)
    return DEQUANTISED[kept].times(float(op.weights[0].elements)) if kept in DEQUANTISED else NOTHING


def _beside_attention(work: Work, op: Attention) -> tuple[Passes, Passes]:
    """Results and gradients are brought to their places; shared heads are repeated, and their gradients summed."""
    queries = float(work.tensors["query"].elements)
    keys = float(work.tensors["key"].elements)
    shared = op.kv_heads < op.heads
    repeated = Passes(2, 2 * (keys + queries)) if shared else NOTHING
    summed = Passes(4, 2 * (queries + 3 * keys)) if shared else Passes(4, 2 * 4 * keys)
    return Passes(2, 2 * queries).plus(repeated), Passes(2, 2 * queries).plus(repeated).plus(summed)


def _beside_scan(op: Scan) -> tuple[Passes, Passes]:
    """What is done to the squares of chunks, and to the states that go from one to the next."""
    forward = SQUARE.times(float(op.square_elements)).plus(SUM.times(float(op.state_elements)))
    return forward, forward.times(3)._replace(calls=3 * forward.calls)


def plain_update(parameters: float, parts: float = 1.0) -> Passes:
    """An update of parameters that lie in so many parts."""
    return UPDATE.times(parameters)._replace(calls=RUNS_OF_PART * parts * UPDATE.calls)
