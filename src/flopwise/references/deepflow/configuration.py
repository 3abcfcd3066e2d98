"""What the reference model is told: technology, power, the recurrent language model, the degrees of parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from flopwise.base.errors import FlopwiseError, shown
from flopwise.work.lstm import Lstm

SplitKind = Literal["none", "column-row", "row-column"]
"""column-row (CR): the depth of a product is shared out and the partial results are summed. row-column (RC): rows and
columns of the result are shared out and gathered."""

SPLIT_TYPES: dict[SplitKind, int] = {"none": -1, "column-row": 1, "row-column": 2}
"""The numbers that the reference's files use for them."""

LARGEST_COUNT = 2**40
"""No batch, vocabulary or layer count comes near; products of five of them still fit a float."""


def check_number(owner: str, name: str, value: object, *, zero: bool = False) -> None:
    """Refuse what is no positive number, or with `zero` no number of at least 0."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise FlopwiseError(
            f"{owner}: {name} must be a {'number of at least 0' if zero else 'positive number'}, got {shown(value)}",
            why="energies, areas, sizes, rates, watts and shares have no other values",
            hint=f"correct {name}",
        )


def _count(owner: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_COUNT:
        raise FlopwiseError(
            f"{owner}: {name} must be a whole number of at least 1, got {shown(value)}",
            why="it counts sequences, words, layers, bytes or devices",
            hint=f"{name} = 1 or more",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepflowTechnology:
    """What an operation costs, what a bank and a stack hold and deliver, and what a kernel costs to start."""

    core_energy_per_flop_j: float
    dram_energy_per_bit_j: float
    l2_energy_per_bit_j: float
    shared_energy_per_bit_j: float
    network_energy_per_bit_j: float
    dram_stack_bytes: float
    dram_stack_bytes_per_s: float
    l2_bank_bytes: float
    l2_bank_bytes_per_s: float
    shared_bank_bytes: float
    shared_bank_bytes_per_s: float
    line_latency_s: float
    """Of one message between devices. The latency of a DRAM access is another one, fixed in the model."""
    launch_s: float
    """What a kernel costs beside its work (O)."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            check_number("technology", name, getattr(self, name), zero=name in ("line_latency_s", "launch_s"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Power:
    """The power of one device and the shares of it that its parts get. They need not add up to 1."""

    budget_w: float
    core: float
    dram: float
    l2: float
    """May be 0 or less, as the reference's own search has it in places: every operand is then loaded once."""
    shared: float
    network: float = 0.0

    def __post_init__(self) -> None:
        check_number("power", "budget_w", self.budget_w)
        for name in ("core", "dram", "shared"):
            check_number("power", name, getattr(self, name))
        check_number("power", "network", self.network, zero=True)
        for name in ("core", "dram", "l2", "shared", "network"):
            share = getattr(self, name)
            if not -1 < share <= 1:
                raise FlopwiseError(
                    f"power: {name} = {shown(share)} is not a share",
                    why="a part gets at most the whole power",
                    hint=f"{name} = 0.25 gives it a quarter",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModel:
    """The recurrent language model and its batch."""

    batch_sequences: int
    """B, over all data-parallel devices."""
    vocab: int
    """V"""
    layers: int
    """L"""
    hidden: int
    """D, the width of a layer."""
    projection: int
    """P"""
    sequence_tokens: int
    """S"""
    gates: int = 4
    """G"""
    element_bytes: int = 4
    """w, of every number."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            _count("model", name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How the matrix products of one part of the model are shared out (kernel parallelism, kp)."""

    kind: SplitKind = "none"
    first: int = 1
    """dim1: of the depth (column-row) or of the rows (row-column)."""
    second: int = 1
    """dim2: of the columns, row-column only."""

    def __post_init__(self) -> None:
        if self.kind not in SPLIT_TYPES:
            raise FlopwiseError(
                f"{shown(self.kind)} is no way to split a product", hint=f"one of {', '.join(SPLIT_TYPES)}"
            )
        _count("split", "first", self.first)
        _count("split", "second", self.second)
        if self.kind == "none" and self.devices > 1:
            raise FlopwiseError(
                f"a split of {self.first} × {self.second} has no type",
                why="type -1 means that products are not split",
                hint="type 1 (column-row) or 2 (row-column), or both dimensions 1",
            )
        if self.kind == "column-row" and (self.first == 1 or self.second > 1):
            raise FlopwiseError(
                f"a column-row split of {self.first} × {self.second} is not possible",
                why="it shares out the depth of a product, which is its first dimension alone",
                hint="dim1 above 1 and dim2 = 1, or type 2 (row-column)",
            )
        if self.kind == "row-column" and self.devices == 1:
            raise FlopwiseError("a row-column split of 1 × 1 splits nothing", hint="type -1, or a dimension above 1")

    @property
    def devices(self) -> int:
        return self.first * self.second


UNSPLIT = Split()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepflowParallel:
    """Over how many devices the work is spread, and how."""

    data: int = 1
    """dp: copies of the model, each with its part of the batch."""
    layer: int = 1
    """lp: groups of layers on devices of their own."""
    hidden_layer: int = 1
    """hlp: how many of these groups the recurrent layers form; the wavefront runs over them."""
    hidden: Split = UNSPLIT
    softmax: Split = UNSPLIT
    embedding: Split = UNSPLIT
    projection: Split = UNSPLIT

    def __post_init__(self) -> None:
        for name in ("data", "layer", "hidden_layer"):
            _count("parallel", name, getattr(self, name))

    @property
    def splits(self) -> tuple[Split, ...]:
        return (self.hidden, self.softmax, self.embedding, self.projection)

    @property
    def grid_dimensions(self) -> int:
        """How many of data, layer and kernel parallelism are in use."""
        return (self.data > 1) + (self.layer > 1) + any(split.devices > 1 for split in self.splits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """Everything that the reference model reads."""

    technology: DeepflowTechnology
    power: Power
    model: LanguageModel
    parallel: DeepflowParallel = field(default_factory=DeepflowParallel)

    def __post_init__(self) -> None:
        parallel, model = self.parallel, self.model
        if parallel.grid_dimensions and self.power.network <= 0:
            raise FlopwiseError(
                "several devices need a network, and it gets no power",
                why=f"the share of the network (IB) is {self.power.network:g}",
                hint="IB = 0.2, or all parallel degrees 1",
            )
        if parallel.data > model.batch_sequences:
            raise FlopwiseError(
                f"{parallel.data} data-parallel devices cannot share {model.batch_sequences} sequences",
                hint=f"dp = {model.batch_sequences} or less, or a larger batch",
            )
        if parallel.hidden_layer > model.layers:
            raise FlopwiseError(
                f"{model.layers} layers cannot form {parallel.hidden_layer} groups",
                hint=f"hlp = {model.layers} or less",
            )
        self._check_splits()

    def _check_splits(self) -> None:
        """Only even splits are modelled; a cell's gates stay whole where it is split by gate."""
        model, parallel = self.model, self.parallel
        rows, tokens = self.shard_sequences, self.shard_sequences * model.sequence_tokens
        if parallel.hidden.kind != "none":
            across = parallel.hidden.first if parallel.hidden.kind == "column-row" else parallel.hidden.second
            if across % model.gates and across not in (1, 2):
                raise FlopwiseError(
                    f"the hidden layer cannot be split {across} ways",
                    why=f"a cell of {model.gates} gates is split in 2, or in a multiple of its gates",
                    hint=f"2 or {model.gates}",
                )
        _even("hidden", parallel.hidden, depth=2 * model.hidden, rows=rows, columns=model.gates * model.hidden)
        # The reference checks its softmax's columns by the hidden width, not by the vocabulary.
        _even("softmax", parallel.softmax, depth=model.hidden, rows=tokens, columns=model.hidden)
        _even("projection", parallel.projection, depth=model.hidden, rows=tokens, columns=model.projection)

    @property
    def shard_sequences(self) -> int:
        """Sequences of one data-parallel device (the mini-batch)."""
        return math.ceil(self.model.batch_sequences / self.parallel.data)


def for_model(
    configuration: Configuration,
    model: Lstm,
    *,
    batch_sequences: int | None = None,
    sequence_tokens: int | None = None,
) -> Configuration:
    """The same device and number format with a model of the catalogue; None: the configuration's batch, its context."""
    if not model.projection:
        raise FlopwiseError(
            f"{model.name} has no projection, and the reference model cannot do without",
            why="it counts the projection's parameters and memory whatever the softmax reads",
            hint="projection = 2048 in the model's description",
        )
    return replace(
        configuration,
        model=replace(
            configuration.model,
            batch_sequences=batch_sequences or configuration.model.batch_sequences,
            vocab=model.vocab,
            layers=model.layers,
            hidden=model.hidden,
            projection=model.projection,
            sequence_tokens=sequence_tokens or model.context,
        ),
    )


def _even(owner: str, split: Split, *, depth: int, rows: int, columns: int) -> None:
    if split.kind == "column-row":
        parts = [("depth", depth, split.first)]
    elif split.kind == "row-column":
        parts = [("rows", rows, split.first), ("columns", columns, split.second)]
    else:
        return
    for side, size, ways in parts:
        if size % ways:
            raise FlopwiseError(
                f"{owner}: {size:,} {side} cannot be split evenly {ways} ways",
                why="only even splits are modelled",
                hint=f"a divisor of {size:,}",
            )
