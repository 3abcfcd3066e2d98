"""How large the things are that a plan for one device has to place, from the model's description alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from flopwise.base.errors import FlopwiseError
from flopwise.plan.program.workspace import workspace_bytes
from flopwise.predict.kernels.memory import LIBRARY_WORKSPACE_BYTES
from flopwise.records.plan import LETTERS, LEVELS, NO_BACKWARD, OWN_RULE, POLICY, Plan
from flopwise.records.program import LOGITS_ALIGNMENT_BYTES, Owner, aligned
from flopwise.work.adapters import (
    DOWN,
    GROUPS,
    MAGNITUDE,
    MAGNITUDE_PIECE,
    MAGNITUDE_VECTORS,
    RESULTS,
    UP,
)
from flopwise.work.describe import describe
from flopwise.work.formats import WIDTH_BYTES, Formats
from flopwise.work.fusion import kept_of_heads, sums_for_activations
from flopwise.work.held import attention_sums_bytes, carrying_room_bytes
from flopwise.work.model import Model
from flopwise.work.op import Gemm, Op, Streaming
from flopwise.work.optimizers import Optimizer, piece_bytes, piece_counts, update_blocks_bytes, update_workspace_bytes
from flopwise.work.parameters import End, Parameter, Part, list_parameters, op_groups, parameters_of
from flopwise.work.traffic import block_saved_bytes, frozen_bytes, tensor_bytes
from flopwise.work.transformer import Transformer
from flopwise.work.work import Work

MOST_LAYERS = 1024
"""The deepest models of today have under 200."""

LINES_BYTES = aligned(1 << 14)
"""For temporaries that begin at lines."""

INPUT_BYTES_PER_TOKEN = 12
"""Identifier, label and position."""
NUMBER_BYTES = 4
"""Of a token's number in the batch, which dropout draws its masks by, of its type, or of one that has a loss."""
LABEL_BYTES = 16
"""Of a token that the head is computed for, where not all are: its label, its place once more, and its weight."""
PREFERENCE_BYTES = 8
"""Of the number of a token's answer, and of what its gradient is weighed by."""


class StatePiece(NamedTuple):
    """As much of a part's optimizer state as passes at once."""

    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class State:
    """The numbers of a part of the model, and the bytes of what belongs to them."""

    numbers: int
    """With those that are not trained."""
    parameters: int
    """That are trained."""
    weights: int
    """Of all numbers: those that are not trained lie behind those that are."""
    trained: int
    """Of the weights' bytes, those of trained ones: what an update changes."""
    gradients: int
    optimizer: int
    pieces: tuple[StatePiece, ...] = ()
    """In which the optimizer's state passes: none larger than a block's, where it can be cut."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def counts(self) -> tuple[int, ...]:
        """Its figures, without the pieces."""
        return tuple(getattr(self, name) for name in FIGURES)


FIGURES = tuple(field.name for field in fields(State) if field.name != "pieces")


def _state_of(figures: Iterable[int]) -> State:
    numbers, parameters, weights, trained, gradients, optimizer = figures
    return State(numbers, parameters, weights, trained, gradients, optimizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes that do not depend on how the plan cuts the sequence, and per-token ones that scale with it."""

    sequence_tokens: int
    layers: int
    block: State
    """Of one that is trained, the largest."""
    blocks: tuple[State, ...]
    """Of each, from the lowest."""
    frozen_layers: frozenset[int]
    """Blocks of which nothing is trained."""
    first_reached: int
    """The lowest block that backward comes to."""
    embedding: State
    """Empty where the head's matrix is also the embedding's: it belongs to the head."""
    head: State
    saved: dict[str, int]
    """Save level → bytes a token and layer."""
    context: int
    """Keys and values, bytes a token and layer."""
    context_gradients: int
    """Their gradients, summed in fp32 over the chunks that look at them."""
    residual: int
    """Of the residual stream from layer to layer, bytes a token."""
    temporary: int
    """What lives only inside a layer's tasks, bytes a token."""
    sequence_attention: int
    """What attention over a whole sequence needs more, bytes a token of the sequence."""
    logits: int
    """Of the head, bytes a token."""
    fixed_workspace: int
    update_workspace: int
    """For the temporaries of an update, which runs when no layer does."""
    inputs: int
    """Of what is known of a token, bytes."""
    routing_sums: int
    """Of what the losses of a mixture's routing count in a round; of each of its sequences, where they ask for that."""
    routing_by_sequence: bool

    def of(self, part: Part) -> State:
        """A part's."""
        if isinstance(part, int):
            return self.blocks[part]
        return self.embedding if part == "embedding" else self.head

    @property
    def mean_block(self) -> State:
        """What a layer has in the mean."""
        if {*self.blocks} == {self.block}:
            return self.block
        return _state_of(ceil(Fraction(sum(sizes), self.layers)) for sizes in self._columns())

    @property
    def largest_block(self) -> State:
        """What a slot has to hold."""
        return self.block if {*self.blocks} == {self.block} else _state_of(map(max, self._columns()))

    def _columns(self) -> Iterator[tuple[int, ...]]:
        """Each figure of all blocks."""
        return zip(*(block.counts for block in self.blocks), strict=True)


def sizes_of(model: Model, sequence_tokens: int, formats: Formats, optimizer: Optimizer) -> Sizes:
    """Sizes of a transformer in the given formats."""
    if not isinstance(model, Transformer):
        raise FlopwiseError(
            f"{model.name} cannot be planned in chunks",
            why="its layers run time step by time step and keep their state between the steps",
            hint=f"`flopwise predict {model.name}` tells time and memory of a step with everything on the device",
        )
    if model.layers > MOST_LAYERS:
        raise FlopwiseError(
            f"{model.name} has {model.layers:,} layers",
            why=f"a step is played layer by layer, up to {MOST_LAYERS:,} of them",
            hint="check the number of layers for a digit too many",
        )
    return _sizes(model, sequence_tokens, formats, optimizer)


@lru_cache(maxsize=256)
def _sizes(model: Transformer, sequence_tokens: int, formats: Formats, optimizer: Optimizer) -> Sizes:
    work = describe(model, sequence_tokens)
    before, inside, behind = op_groups(work)
    chosen = work.tensors.get("chosen")
    works = {kind: describe(kind, sequence_tokens) for kind in model.kinds}
    insides = {kind: op_groups(each)[1] for kind, each in works.items()}
    listed = {kind: list(list_parameters(ops, 0)) for kind, ops in insides.items()}
    in_block, largest = max(
        (sum(weight.elements for op in ops if _passes(op, model) for weight in op.weights), number)
        for number, ops in enumerate(insides.values())
    )
    of_largest = list(listed.values())[largest]
    block_bytes = Fraction(_state_bytes(of_largest, optimizer, formats), max(1, in_block))

    def state(ops: tuple[Op, ...], parameters_listed: list[Parameter], *, frozen: bool = False) -> State:
        if frozen:
            return _state(ops, (), (), formats)
        trained = tuple(op for op in ops if op.frozen < op.layers)
        return _state(ops, trained, _pieces(parameters_listed, optimizer, formats, in_block, block_bytes), formats)

    def end(ops: tuple[Op, ...], part: End) -> State:
        return state(ops, list(list_parameters(ops, part)))

    def each(size: int) -> int:
        return -(-size // sequence_tokens)

    of_sequence = _of_a_sequence(model, work, formats)
    residual = tensor_bytes(work.tensors["input"], formats)
    head_rows = _head_bytes(model, sequence_tokens, formats)
    # Rows of logits begin where the matrix unit can read them at once: of 50,257 numbers seven are left free behind.
    unaligned = 0 if model.head == "classifier" else -(head_rows // sequence_tokens) % LOGITS_ALIGNMENT_BYTES
    temporary = max(workspace_bytes(kind, each, formats) for kind, each in works.items())
    temporary += attention_sums_bytes(model, formats) * sequence_tokens
    trained = {kind: state(ops, listed[kind]) for kind, ops in insides.items()}
    frozen = {kind: state(ops, listed[kind], frozen=True) for kind, ops in insides.items()}
    kinds = [model.kind_of(layer) for layer in range(model.layers)]
    copies, fixed_copies = _fp8_bytes(inside, formats)
    blocks_bytes = aligned(update_blocks_bytes(parameters_of(model, sequence_tokens), optimizer))
    return Sizes(
        sequence_tokens=sequence_tokens,
        layers=model.layers,
        block=max((trained[kind] for kind in _trained_kinds(model)), key=lambda each: each.total),
        blocks=tuple((frozen if layer in model.frozen_layers else trained)[kind] for layer, kind in enumerate(kinds)),
        frozen_layers=model.frozen_layers,
        first_reached=model.first_reached,
        embedding=end(() if model.tied else before, "embedding"),
        head=end((*before, *behind) if model.tied else behind, "head"),
        saved={
            name: max(each(block_saved_bytes(of_kind, POLICY[name], formats)) for of_kind in works.values())
            for name in LEVELS
        },
        context=each(of_sequence.context),
        context_gradients=each(of_sequence.context_gradients),
        residual=each(residual),
        temporary=each(temporary) + copies,
        sequence_attention=attention_sums_bytes(model, formats) + each(of_sequence.attention),
        logits=each(head_rows + 2 * residual) + unaligned + (0 if chosen is None else each(residual) + LABEL_BYTES),
        inputs=INPUT_BYTES_PER_TOKEN
        + NUMBER_BYTES
        * ((bool(model.dropout) or model.routing.has_losses) + (model.token_types > 1) + (chosen is not None))
        + PREFERENCE_BYTES * (model.objective == "preference"),
        routing_sums=model.routing.sums_bytes(model.layers, 1, model.experts),
        routing_by_sequence=model.routing.balance_over == "sequence",
        fixed_workspace=LIBRARY_WORKSPACE_BYTES
        + carrying_room_bytes(model, sequence_tokens, formats.statistics_bytes)
        + _cast_bytes(work, formats)
        + max(_magnitude_bytes(each, formats) for each in works.values())
        + fixed_copies
        + LINES_BYTES
        + blocks_bytes,
        update_workspace=blocks_bytes + max(_update_workspace(each, optimizer) for each in listed.values()),
    )


def _head_bytes(model: Transformer, sequence_tokens: int, formats: Formats) -> int:
    """What the head's widest result takes where all tokens of a sequence have a loss: a piece of it has so many."""
    work = describe(replace(model, loss_share=1.0), sequence_tokens)
    return max(tensor_bytes(work.tensors[name], formats) for op in op_groups(work)[2] for name in op.outputs)


def _state(ops: tuple[Op, ...], trained: tuple[Op, ...], pieces: tuple[StatePiece, ...], formats: Formats) -> State:
    """Of a part's operators, of which some are trained, with these pieces of the optimizer's state."""
    parameters = sum(op.parameters // op.layers for op in trained)
    kept = (
        frozen_bytes(op, weight, formats) for op in ops for weight in op.weights if op not in trained and weight.owned
    )
    of_trained = aligned(parameters * WIDTH_BYTES[formats.weights])
    return State(
        sum(op.parameters // op.layers for op in ops),
        parameters,
        of_trained + sum(map(aligned, kept)),
        of_trained,
        aligned(parameters * WIDTH_BYTES[formats.gradients]),
        sum(piece.bytes for piece in pieces),
        pieces,
    )


def _passes(op: Op, model: Transformer) -> bool:
    """Whether the numbers of a block's operator are among those whose state passes."""
    return op.frozen < op.layers or (model.frozen is not None and model.adapters is None)


def _trained_kinds(model: Transformer) -> list[Transformer]:
    """Kinds of blocks of which something is trained; all kinds where every block is frozen."""
    found = {model.kind_of(layer) for layer in range(model.layers) if layer not in model.frozen_layers}
    return [kind for kind in model.kinds if kind in found] or list(model.kinds)


KEYS = ("key", "value")


class _OfSequence(NamedTuple):
    """Bytes that belong to one whole sequence."""

    context: int
    """Keys and values."""
    context_gradients: int
    """Their gradients, in fp32."""
    attention: int
    """What attention over it all takes beside what its kernels sum up in."""


def _of_a_sequence(model: Transformer, work: Work, formats: Formats) -> _OfSequence:
    tensors = work.tensors
    if "query" not in tensors:
        return _OfSequence(0, 0, 0)
    query, keys = tensor_bytes(tensors["query"], formats), sum(tensor_bytes(tensors[name], formats) for name in KEYS)
    # Of latent attention, values of a whole sequence and their gradients once more, as wide as keys.
    widened = 0 if model.latent is None else 2 * query
    of_queries, of_keys = kept_of_heads(work, normed=model.qk_norm)
    others = ("logsumexp", *of_queries, *of_keys)
    return _OfSequence(
        keys,
        formats.statistics_bytes * sum(tensors[name].elements for name in KEYS) + widened,
        # Queries, attention's result and the gradients of both in one piece, the gradients of keys and values, the sums
        # of the softmax, and what norms of queries and keys, or magnitudes of all three, read.
        4 * query + keys + sum(tensor_bytes(tensors[name], formats) for name in others),
    )


def _trained(parameters: list[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.trained]


def _state_bytes(parameters: list[Parameter], optimizer: Optimizer, formats: Formats) -> int:
    trained = _trained(parameters)
    return piece_bytes(trained, optimizer, formats, 0, sum(parameter.elements for parameter in trained))


def _pieces(
    parameters: list[Parameter], optimizer: Optimizer, formats: Formats, in_block: int, block_bytes: Fraction
) -> tuple[StatePiece, ...]:
    """Pieces of a part's state, which a block's slot has room for: a number of it may take more than one of a block."""
    trained = _trained(parameters)
    count = sum(parameter.elements for parameter in trained)
    each = Fraction(_state_bytes(parameters, optimizer, formats), max(1, count))
    most = int(in_block * min(Fraction(1), block_bytes / each)) if each and block_bytes else in_block
    found, first = [], 0
    for numbers in piece_counts(trained, optimizer, most):
        found.append(StatePiece(numbers, aligned(piece_bytes(trained, optimizer, formats, first, numbers))))
        first += numbers
    return tuple(found)


def _update_workspace(parameters: list[Parameter], optimizer: Optimizer) -> int:
    """Room for what an update of a block makes on its way, behind what is known of the tokens."""
    temporaries = update_workspace_bytes(_trained(parameters), optimizer)
    return sum(map(aligned, temporaries)) + LIBRARY_WORKSPACE_BYTES + LINES_BYTES if temporaries else 0


def _cast_bytes(work: Work, formats: Formats) -> int:
    """Room for a matrix in the products' format, where weights are kept or gradients summed in another."""
    cast = formats.weights != formats.compute or formats.gradients != formats.compute
    largest = max(
        (
            weight.elements
            for op in work.ops
            if isinstance(op, Gemm)
            for weight in op.weights
            if (cast and op.frozen < op.layers)
            or (op.frozen and formats.kept_as(in_block=op.in_block, matrix=True) != formats.compute)
        ),
        default=0,
    )
    # An activation adds what adapters lead to gate and up, from the matrices of both.
    sums = sums_for_activations(work.ops).values() if cast else ()
    together = [sum(weight.elements for op in added for weight in op.weights) for added in sums]
    return aligned((max([largest, *together]) + _beside_experts(work)) * formats.compute_bytes)


def _beside_experts(work: Work) -> int:
    """Numbers of the narrow copies with which backward goes through an adapter of experts beside its matrix."""
    if not any(op.name == "combine" for op in work.ops):
        return 0
    names = {*(f"{product}_{DOWN}" for product in RESULTS), *(f"{target}_{UP}" for target in GROUPS["mlp"])}
    # The second matrix is scaled, in a copy of its own.
    sizes = {
        op.name: sum(weight.elements for weight in op.weights) * (2 if op.adds else 1)
        for op in work.ops
        if isinstance(op, Gemm) and op.name in names
    }
    together = sizes.get(f"down_{DOWN}", 0) + sizes.get(f"down_{UP}", 0)
    return max(together, *sizes.values()) if sizes else 0


def _magnitude_bytes(work: Work, formats: Formats) -> int:
    """Room for what DoRA's norms of one matrix' rows take, and for a piece of what its magnitudes' gradient sums.

    Of the rows their products with A in two formats, A itself, and four vectors (see `engine.streaming.magnitudes`).
    """
    most = 0
    for op in work.ops:
        if isinstance(op, Streaming) and op.normed:
            lows = next(other for other in work.ops if other.name == op.name.replace(MAGNITUDE, DOWN))
            assert isinstance(lows, Gemm)
            rank = lows.columns // len(lows.outputs)
            for rows, depth in op.normed:
                wide = formats.statistics_bytes
                parts = [numbers * rank * each for numbers in (rows, depth) for each in (formats.compute_bytes, wide)]
                parts.append(rows * rank * wide)
                most = max(most, sum(map(aligned, (*parts, *(rows * wide,) * MAGNITUDE_VECTORS))))
    return most + (aligned(MAGNITUDE_PIECE * formats.statistics_bytes) if most else 0)


SCALE_BYTES = 4
"""Of one row of an operand in fp8."""
FP8_PIECES = 8
"""Tensors that a product in fp8 takes at most beside its operands; each begins at a line."""


def _fp8_bytes(ops: tuple[Op, ...], formats: Formats) -> tuple[int, int]:
    """Room that a block's products in fp8 take: bytes a token, and those whatever the tokens.

    Copies of the input and of a gradient make the matrix' gradient; the input's is made of a gradient's copy, and where
    several operators or results add to it, a product lies beside it first. Going with them is the matrix' copy, or its
    gradient before it is added to the sum.
    """
    if formats.matrix != "fp8":
        return 0, 0
    token = fixed = 0
    for op in ops:
        if isinstance(op, Gemm):
            adds = len(op.outputs) > 1 or sum(op.inputs[0] in other.inputs for other in ops) > 1
            beside = op.depth * formats.compute_bytes if adds else op.depth
            token = max(token, op.columns + beside + SCALE_BYTES)
            product = op.columns * op.depth * formats.compute_bytes
            fixed = max(fixed, product + SCALE_BYTES * (op.columns + op.depth))
    return token, aligned(fixed) + FP8_PIECES * aligned(1)


def largest_piece(end: State) -> int:
    """Bytes of the slot that an end's optimizer state needs to pass."""
    return max((piece.bytes for piece in end.pieces), default=0)


# -- a plan's memory by owner, without compiling it ----------------------------------------------------------------


def slot_bytes(sizes: Sizes, chunk_tokens: int) -> int:
    """A slot for one (layer, chunk) at the level `full`."""
    return aligned(sizes.saved["full"] * chunk_tokens)


def level_bytes(sizes: Sizes, level: str, tokens: int) -> int:
    """What a (layer, chunk) takes where it is kept at a level."""
    return aligned(sizes.saved[level] * tokens)


def activation_bytes(sizes: Sizes, plan: Plan) -> dict[str, int]:
    """Place → bytes of everything that layers keep for backward: slots, and what is kept at lower levels."""
    found = {"device": plan.activation_slots * slot_bytes(sizes, plan.tokens_of(0)), "host": 0}
    for row in plan.saves:
        for chunk, letter in enumerate(row):
            if letter not in ("F", NO_BACKWARD):
                place = "device" if letter.isupper() else "host"
                found[place] += level_bytes(sizes, LETTERS[letter.lower()], plan.tokens_of(chunk))
    return found


SMALL_CONTEXT_BYTES = 2**28
"""Keys and values of a sequence that are worth having room for twice, so that the next layer's come early."""


def context_sets(sizes: Sizes, plan: Plan) -> int:
    """Rooms for the keys and values of a sequence: two where they are small. The rule `dataflow` has one."""
    small = sizes.context * plan.sequence_tokens <= SMALL_CONTEXT_BYTES
    return 2 if small and plan.rule == OWN_RULE else 1


def working_bytes(sizes: Sizes, plan: Plan) -> dict[Owner, int]:
    """Device memory of the owners that no residency changes: residual, context, head, workspace."""
    chunk, sequence = plan.tokens_of(0), plan.sequence_tokens
    cut = plan.chunks_per_sequence > 1
    round_tokens = sum(plan.tokens_of(index) for index in range(plan.chunks_per_sequence))
    whole = plan.attention == "sequence" and cut
    context = 0
    if cut:
        parts = (aligned(sizes.context * plan.tokens_of(index)) for index in range(plan.chunks_per_sequence))
        context = context_sets(sizes, plan) * sum(parts)
        context += 0 if whole else aligned(sizes.context_gradients * sequence)
    groups = plan.chunks_per_round // plan.chunks_per_sequence
    chunks = (aligned(sizes.residual * plan.tokens_of(index)) for index in range(plan.chunks_per_sequence))
    residual = groups * sum(chunks)
    workspace = sizes.fixed_workspace + aligned(sizes.temporary * chunk)
    workspace = max(workspace, sizes.update_workspace) + aligned(sizes.inputs * groups * round_tokens)
    workspace += aligned(sizes.routing_sums * (plan.sequences_per_round if sizes.routing_by_sequence else 1))
    if whole:
        # The inputs of the layer's chunks wait beside it for the backward of what comes before attention.
        workspace += aligned(sizes.sequence_attention * sequence) + residual // groups
    head = aligned(sizes.logits * min(plan.head_chunk_tokens, chunk))
    return {"residual": residual, "context": context, "head": head, "workspace": workspace}
