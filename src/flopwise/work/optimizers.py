"""Optimizers: what each remembers of a parameter, and what its update moves and multiplies.

This is the one place that says so: predictions, plans, both executors and checkpoints ask here. A parameter is updated
by a *rule* that follows from the optimizer and from what the parameter is:

    optimizer     matrices of blocks   tables, head   norms, biases   remembered of a parameter
    adamw         adamw                adamw          adamw           two moments
    adamw-8bit    adamw-8bit           adamw-8bit     adamw-fp32      two codes of 8 bits, and scales of blocks of 256
    muon          muon                 adamw          adamw           one moment; two of what AdamW updates
    lion          lion                 lion           lion            one moment
    sgd           sgd                  sgd            sgd             nothing
    sgd-momentum  sgd-momentum         …              …               one moment
    adafactor     adafactor            adafactor      adafactor       a number for each row and column; of vectors each

and every one of them its master copy and its mean over the steps, where there are such. `adamw-8bit` keeps tensors of
fewer than 4,096 numbers in fp32, as bitsandbytes does: they take no room, and norms suffer most. Muon and Adafactor
take queries, keys and values as the matrices that they are where one weight packs them; Muon's moves are as large as
AdamW's, so that one rate serves both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple, get_args

from flopwise.work.formats import WIDTH_BYTES, Formats
from flopwise.work.op import Op, Weight, product_flops
from flopwise.work.parameters import Parameter, Role, role_of
from flopwise.work.work import Work

Optimizer = Literal["adamw", "adamw-8bit", "muon", "lion", "sgd", "sgd-momentum", "adafactor"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)

Rule = Literal["adamw", "adamw-fp32", "adamw-8bit", "muon", "lion", "sgd", "sgd-momentum", "adafactor"]
"""How the numbers of one tensor are updated."""
BY_NUMBER: tuple[Rule, ...] = ("adamw", "adamw-fp32", "lion", "sgd", "sgd-momentum")
"""Rules that look at one number at a time, so that neighbours may be updated together and cut anywhere."""

WHOLE_TENSORS: tuple[Optimizer, ...] = ("muon", "adafactor")
"""Whose update of a number depends on all of its matrix."""

Moment = Literal["first", "second", "first_scale", "second_scale", "row", "column", "master", "average"]
"""What is remembered, as checkpoints call it: moments and the scales of their codes, what rows and columns have in the
mean, the exact copy of the weights."""

CODE_FORMAT = "uint8"
"""Of a moment in 8 bits: a place in a table of 256 values."""
QUANTISED_BLOCK = 256
"""Neighbours of a tensor that share a scale, as bitsandbytes has it."""
LEAST_QUANTISED = 4096
"""Numbers of a tensor whose moments are kept in 8 bits."""

MATRIX_BLOCK_NUMBERS = 2**22
"""Of a matrix, what an update that looks at all of it takes at once for what it does number by number."""
MATRIX_TEMPORARIES = 8
"""Tensors of so many numbers in fp32 that it makes on its way."""

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_FORMAT = "bf16"
"""What the iteration's products multiply in, whatever else there is."""


class StateField(NamedTuple):
    """One kind of number that is remembered of some neighbours."""

    name: Moment
    elements: int
    format: str
    each: int
    """Neighbours that one of them is of: 1, or those of a block; 0: it is of the whole tensor."""

    @property
    def bytes(self) -> int:
        return self.elements * (1 if self.format == CODE_FORMAT else WIDTH_BYTES[self.format])


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring numbers of a part that one rule updates, whose state lies together."""

    first: int
    last: int
    rule: Rule
    parameters: tuple[Parameter, ...]
    """Whose numbers they are: one tensor, where a rule looks at more than single numbers."""
    fields: tuple[StateField, ...]


class UpdateProduct(NamedTuple):
    """A product of an update: (rows × depth)·(depth × columns), so many of them a step."""

    rows: int
    depth: int
    columns: int
    copies: int

    @property
    def flops(self) -> int:
        return self.copies * product_flops(self.rows, self.depth, self.columns)


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """What an update of some parameters holds, moves and multiplies."""

    numbers: int
    state_bytes: int
    moved_bytes: int
    products: tuple[UpdateProduct, ...] = ()

    @property
    def flops(self) -> int:
        """Of its products; what it does number by number is not counted, as nowhere."""
        return sum(product.flops for product in self.products)

    def share(self, total_bytes: int) -> Fraction:
        """Bytes for each of its numbers."""
        return Fraction(total_bytes, max(1, self.numbers))


# -- what is remembered -----------------------------------------------------------------------------------------------


def rule_of(optimizer: Optimizer, *, elements: int, role: Role, in_block: bool) -> Rule:
    """How a tensor is updated."""
    if optimizer == "muon":
        return "muon" if role == "matrix" and in_block else "adamw"
    if optimizer == "adamw-8bit":
        return "adamw-8bit" if elements >= LEAST_QUANTISED else "adamw-fp32"
    return optimizer


def state_fields(
    rule: Rule, shape: tuple[int, ...], formats: Formats, parts: tuple[int, ...] = ()
) -> tuple[StateField, ...]:
    """What a rule remembers of a tensor, or of neighbours that were cut from one; `parts`: rows of what it packs."""
    count = prod(shape)
    exact = "fp64" if formats.moments == "fp64" else "fp32"
    found: list[StateField] = []

    def remember(name: Moment, number_format: str, elements: int = count, each: int = 1) -> None:
        found.append(StateField(name, elements, number_format, each))

    if rule == "adamw-8bit":
        blocks = -(-count // QUANTISED_BLOCK)
        remember("first", CODE_FORMAT)
        remember("first_scale", "fp32", blocks, QUANTISED_BLOCK)
        remember("second", CODE_FORMAT)
        remember("second_scale", "fp32", blocks, QUANTISED_BLOCK)
    elif rule == "adafactor" and len(shape) > 1:
        matrices = matrices_in(shape, parts)
        remember("row", exact, sum(rows for rows, _ in matrices), 0)
        remember("column", exact, sum(columns for _, columns in matrices), 0)
    elif rule == "adafactor":
        remember("second", exact)
    elif rule != "sgd":
        kept = exact if rule == "adamw-fp32" else formats.moments
        remember("first", kept)
        if rule in ("adamw", "adamw-fp32"):
            remember("second", kept)
    if formats.master:
        remember("master", formats.master)
    if formats.average:
        remember("average", formats.average)
    return tuple(found)


def rule_of_parameter(optimizer: Optimizer, parameter: Parameter) -> Rule:
    """How a parameter is updated."""
    in_block = isinstance(parameter.part, int)
    return rule_of(optimizer, elements=parameter.elements, role=parameter.role, in_block=in_block)


def fields_of(optimizer: Optimizer, parameter: Parameter, formats: Formats) -> tuple[StateField, ...]:
    """What is remembered of a whole parameter."""
    return state_fields(rule_of_parameter(optimizer, parameter), parameter.shape, formats, parameter.weight.parts)


def stretches(
    parameters: Sequence[Parameter], optimizer: Optimizer, formats: Formats, first: int, count: int
) -> tuple[Stretch, ...]:
    """A part's trained numbers `first` …, cut where another rule or, for most rules, another tensor begins."""
    grouped: list[tuple[Rule, list[Parameter]]] = []
    for parameter in parameters:
        if parameter.first + parameter.elements <= first or parameter.first >= first + count:
            continue
        rule = rule_of_parameter(optimizer, parameter)
        if grouped and rule in BY_NUMBER and grouped[-1][0] == rule:
            grouped[-1][1].append(parameter)
        else:
            grouped.append((rule, [parameter]))
    found = []
    for rule, listed in grouped:
        begin = max(first, listed[0].first)
        end = min(first + count, listed[-1].first + listed[-1].elements)
        whole = len(listed) == 1 and end - begin == listed[0].elements
        shape = listed[0].shape if whole else (end - begin,)
        assert whole or rule in (*BY_NUMBER, "adamw-8bit"), f"{listed[0].name} is cut, which {rule} cannot have"
        fields = state_fields(rule, shape, formats, listed[0].weight.parts if whole else ())
        found.append(Stretch(begin, end, rule, tuple(listed), fields))
    return tuple(found)


def piece_counts(parameters: Sequence[Parameter], optimizer: Optimizer, most: int) -> list[int]:
    """Numbers of the pieces, of about `most`, in which the state of what is around the blocks passes."""
    total = sum(parameter.elements for parameter in parameters)
    if not total:
        return []
    count = max(1, -(-total // max(1, most)))
    edges = [index * total // count for index in range(1, count)]
    edges = sorted({edge for edge in (_cut(parameters, optimizer, edge) for edge in edges) if 0 < edge < total})
    return [end - begin for begin, end in zip([0, *edges], [*edges, total], strict=True)]


def _cut(parameters: Sequence[Parameter], optimizer: Optimizer, place: int) -> int:
    """The next place, going down, where a tensor's state may be cut."""
    owner = next(each for each in reversed(parameters) if each.first <= place)
    rule = rule_of_parameter(optimizer, owner)
    if rule in BY_NUMBER:
        return place
    return owner.first + ((place - owner.first) // QUANTISED_BLOCK * QUANTISED_BLOCK if rule == "adamw-8bit" else 0)


def piece_bytes(parameters: Sequence[Parameter], optimizer: Optimizer, formats: Formats, first: int, count: int) -> int:
    """Bytes of the state of a part's numbers `first` …"""
    found = stretches(parameters, optimizer, formats, first, count)
    return sum(field.bytes for stretch in found for field in stretch.fields)


# -- what an update does ----------------------------------------------------------------------------------------------


def update_work(work: Work, optimizer: Optimizer, formats: Formats, *, in_block: bool | None = None) -> UpdateWork:
    """An update of all that is trained; `in_block`: of the blocks alone, or of what is around them."""
    numbers = state = moved = 0
    products: list[UpdateProduct] = []
    for op in work.ops:
        trained = op.layers - op.frozen
        if not trained or in_block not in (None, op.in_block):
            continue
        for weight in op.weights:
            if weight.owned:
                one = _weight_update(op, weight, optimizer, formats)
                numbers += trained * one.numbers
                state += trained * one.state_bytes
                moved += trained * one.moved_bytes
                products += [product._replace(copies=trained * product.copies) for product in one.products]
    return UpdateWork(numbers, state, moved, tuple(products))


@lru_cache(maxsize=4096)
def _weight_update(op: Op, weight: Weight, optimizer: Optimizer, formats: Formats) -> UpdateWork:
    """Of one copy of a weight.

    The gradient is read, what is remembered read and written, the weight written, and read where there is no master
    copy to start from. Muon writes and reads a matrix in bf16 beside its products; Adafactor reads gradients and
    weights again for their sums.
    """
    rule = rule_of(optimizer, elements=weight.elements, role=role_of(op, weight), in_block=op.in_block)
    state = sum(field.bytes for field in state_fields(rule, weight.shape, formats, weight.parts))
    gradient, stored = WIDTH_BYTES[formats.gradients], WIDTH_BYTES[formats.weights]
    each = gradient + stored + (0 if formats.master else stored)
    products: tuple[UpdateProduct, ...] = ()
    if rule == "muon":
        each += 2 * WIDTH_BYTES[NEWTON_SCHULZ_FORMAT]
        products = tuple(
            product for shape in matrices_in(weight.shape, weight.parts) for product in newton_schulz(*shape)
        )
    elif rule == "adafactor":
        each += 2 * gradient + stored
    return UpdateWork(weight.elements, state, weight.elements * each + 2 * state, products)


def matrices_in(shape: tuple[int, ...], parts: tuple[int, ...] = ()) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of the matrices that are packed into a weight: queries, keys and values; experts."""
    *lead, rows, columns = shape
    return tuple((part, columns) for part in parts or (rows,)) * prod(lead)


def newton_schulz(rows: int, columns: int) -> tuple[UpdateProduct, ...]:
    """The products that orthogonalise a matrix: of the shorter side with itself, squared, and times the matrix."""
    short, long = sorted((rows, columns))
    steps = NEWTON_SCHULZ_STEPS
    return (
        UpdateProduct(short, long, short, steps),
        UpdateProduct(short, short, short, steps),
        UpdateProduct(short, short, long, steps),
    )


def update_workspace_bytes(parameters: Sequence[Parameter], optimizer: Optimizer) -> tuple[int, ...]:
    """Bytes of the temporaries that are alive at once while a part is updated, beside registers and small vectors."""
    width = WIDTH_BYTES[NEWTON_SCHULZ_FORMAT]
    found: list[tuple[int, ...]] = [()]
    for parameter in parameters:
        if rule_of_parameter(optimizer, parameter) == "muon":
            for rows, columns in set(matrices_in(parameter.shape, parameter.weight.parts)):
                short = min(rows, columns)
                whole, square = width * rows * columns, width * short * short
                found.append((whole, whole, square, square))
    return max(found, key=sum)


def update_blocks_bytes(parameters: Sequence[Parameter], optimizer: Optimizer) -> int:
    """Of an update that looks at whole matrices, what it makes on its way of the rows that it takes at once."""
    largest = max((parameter.elements for parameter in parameters if parameter.trained), default=0)
    return MATRIX_TEMPORARIES * 4 * min(largest, MATRIX_BLOCK_NUMBERS) if optimizer in WHOLE_TENSORS else 0


def by_parameter(
    parameters: Sequence[Parameter], optimizer: Optimizer, formats: Formats
) -> Iterator[tuple[Parameter, StateField]]:
    """What is remembered of each trained parameter, as checkpoints list it."""
    for parameter in parameters:
        if parameter.trained:
            for field in fields_of(optimizer, parameter, formats):
                yield parameter, field
