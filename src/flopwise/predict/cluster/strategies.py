"""Many strategies as arrays: one element for each, ready to be costed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.predict.cluster.pieces import Pieces, joined_pieces, pieces
from flopwise.predict.kernels.calls import Floats, kernels_key
from flopwise.setup.parallel import OVERLAPS, SCHEDULES, Parallel
from flopwise.setup.setup import SettledSetup
from flopwise.work.describe import describe
from flopwise.work.formats import OPERAND_BYTES, WIDTH_BYTES, Formats
from flopwise.work.model import Model
from flopwise.work.optimizers import Optimizer, update_work
from flopwise.work.traffic import weights_bytes
from flopwise.work.work import Work

MOST_LAYERS = 10_000
Integers = NDArray[np.intp]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategies:
    """Parallel set-ups with their micro-batches; every array has one element for each."""

    data: Floats
    tensor: Floats
    pipeline: Floats
    context: Floats
    expert: Floats
    sharing_experts: Floats
    """Devices that share each expert's matrices: the tensor ranks, or fewer."""
    once_a_node: Booleans
    sequence: Booleans
    zero: Integers
    shard: Floats
    reshard: Booleans
    prefetch: Integers
    schedule: Integers
    chunks: Floats
    by_time: Booleans
    """Layers are dealt out by time, not by number."""
    offload_optimizer: Booleans
    offload_activations: Booleans
    overlap_tensor: Booleans
    overlap_stages: Booleans
    overlap_weights: Booleans
    overlap_experts: Booleans
    row: Integers
    """Of the pieces: a whole micro-batch."""
    rest_row: Integers
    """The same for the last micro-batch, which may be smaller."""
    micro_batches: Floats
    """Of one replica, the last one counted."""
    weight_bytes: Floats
    """For each parameter, like the next four."""
    gradient_bytes: Floats
    optimizer_bytes: Floats
    gathered_bytes: Floats
    gathered_block_bytes: Floats
    cast_bytes: Floats
    update_bytes: Floats
    """Moved by the optimizer."""

    def __len__(self) -> int:
        return int(self.data.size)

    def taken(self, rows: NDArray[np.intp] | Booleans) -> Strategies:
        """Some of them."""
        return Strategies(**{field.name: getattr(self, field.name)[rows] for field in fields(Strategies)})

    @property
    def replicas(self) -> Floats:
        return self.data * self.context

    @property
    def dealt(self) -> Floats:
        """Data × context ranks that hold different experts together; of tensor ranks that do, parts of one."""
        return self.expert * self.sharing_experts / self.tensor


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes for each parameter, by owner."""

    weights: float
    """In the mean of all parameters: those that are not trained may be kept in a format of their own."""
    gradients: int
    """Of a parameter that is trained."""
    optimizer: float
    """In the mean of all that are trained."""
    gathered: float
    """Of a weight that is gathered from its shards, in the mean."""
    gathered_block: float
    """The same of the blocks' weights, which may have been cast before."""
    cast: float
    """Of a weight's copy in the products' format, where the weights themselves are wider, in the mean."""
    update: float
    """Moved by an update of a parameter, in the mean of all that are trained."""


def state_bytes(work: Work, formats: Formats, optimizer: Optimizer) -> StateBytes:
    """What a number-format policy and an optimizer spend on a parameter."""
    compute, update = formats.compute_bytes, update_work(work, optimizer, formats)

    def mean(each: Callable[[Fraction], Fraction]) -> float:
        """Of something that follows from the width a weight is kept in, over all parameters."""
        of_trained = each(Fraction(WIDTH_BYTES[formats.weights]))
        frozen = work.parameters - work.trained_parameters
        if not frozen:
            return float(of_trained)
        # What is quantised is gathered as it is, and dequantised where it is used.
        of_frozen = weights_bytes(work, formats) - work.trained_parameters * WIDTH_BYTES[formats.weights]
        kept = each(Fraction(of_frozen, frozen))
        return float((work.trained_parameters * of_trained + frozen * kept) / work.parameters)

    return StateBytes(
        weights=mean(lambda width: width),
        gradients=WIDTH_BYTES[formats.gradients],
        optimizer=float(update.share(update.state_bytes)),
        gathered=(gathered := mean(lambda width: min(width, Fraction(compute)))),
        gathered_block=OPERAND_BYTES[formats.gathered] if formats.gathered else gathered,
        cast=mean(lambda width: Fraction(compute if width > compute else 0)),
        update=float(update.share(update.moved_bytes)),
    )


def state_bytes_of(setup: SettledSetup) -> StateBytes:
    """Of a set-up's model."""
    return _state_bytes(setup.model, setup.sequence_tokens, setup.formats, setup.optimizer)


@lru_cache(maxsize=256)
def _state_bytes(model: Model, sequence_tokens: int, formats: Formats, optimizer: Optimizer) -> StateBytes:
    return state_bytes(describe(model, sequence_tokens), formats, optimizer)


@dataclass(frozen=True, slots=True)
class Listed:
    """Strategies and the table of pieces that their rows point into."""

    strategies: Strategies
    table: Pieces


def listed(setups: Sequence[SettledSetup]) -> Listed:
    """Arrays of set-ups on one hardware; the pieces that several have in common are costed together."""
    check_depth([setup.model for setup in setups])
    wanted: dict[tuple[object, ...], tuple[SettledSetup, dict[tuple[int, bool], None]]] = {}
    needs = []
    for setup in setups:
        sizes, again = setup.micro_batches(), setup.accumulation_steps > 1
        whole, rest = (sizes[0][0], again), (sizes[-1][0], again)
        key = (setup.cuda_graphs, *kernels_key(setup))
        wanted.setdefault(key, (setup, {}))[1].update({whole: None, rest: None})
        needs.append((key, whole, rest))
    place: dict[tuple[tuple[object, ...], tuple[int, bool]], int] = {}
    tables = []
    for key, (setup, some) in wanted.items():
        for size in some:
            place[key, size] = len(place)
        tables.append(pieces(setup, setup.parallel.layout, *zip(*some, strict=True)))
    rows = np.array([place[key, whole] for key, whole, _ in needs], dtype=np.intp)
    rests = np.array([place[key, rest] for key, _, rest in needs], dtype=np.intp)
    counts = np.array([setup.accumulation_steps for setup in setups], dtype=np.float64)
    states = [state_bytes_of(setup) for setup in setups]
    strategies = set_ups([setup.parallel for setup in setups], states)
    return Listed(replace(strategies, row=rows, rest_row=rests, micro_batches=counts), joined_pieces(tables))


def check_depth(models: Sequence[Model]) -> None:
    """Refuse models so deep that playing them layer by layer would not end."""
    for model in models:
        if model.layers > MOST_LAYERS:
            raise FlopwiseError(
                f"{model.name} has {model.layers:,} layers",
                why=f"several devices are played layer by layer, up to {MOST_LAYERS:,}",
                hint="check the number for a digit too many",
            )


def set_ups(parallels: Sequence[Parallel], states: Sequence[StateBytes]) -> Strategies:
    """Parallel set-ups as arrays; their micro-batches and rows of pieces are still to be filled in."""
    nothing = np.zeros(len(parallels), dtype=np.intp)

    def floats(name: str) -> Floats:
        return np.array([getattr(parallel, name) for parallel in parallels], dtype=np.float64)

    def flags(name: str) -> Booleans:
        return np.array([getattr(parallel, name) for parallel in parallels], dtype=np.bool_)

    def each(name: str) -> Floats:
        return np.array([getattr(state, name) for state in states], dtype=np.float64)

    return Strategies(
        data=floats("data"),
        tensor=floats("tensor"),
        pipeline=floats("pipeline"),
        context=floats("context"),
        expert=floats("expert"),
        sharing_experts=floats("sharing_experts"),
        once_a_node=flags("once_a_node"),
        sequence=flags("sequence"),
        zero=np.array([parallel.zero for parallel in parallels], dtype=np.intp),
        shard=np.array([parallel.shard or parallel.replicas for parallel in parallels], dtype=np.float64),
        reshard=flags("reshard"),
        prefetch=np.array([parallel.prefetch for parallel in parallels], dtype=np.intp),
        # One stage has no schedule: each micro-batch goes forward and back.
        schedule=np.array(
            [SCHEDULES.index(parallel.schedule if parallel.pipeline > 1 else "1f1b") for parallel in parallels],
            dtype=np.intp,
        ),
        chunks=floats("chunks"),
        by_time=np.array([parallel.balance == "time" for parallel in parallels], dtype=np.bool_),
        offload_optimizer=flags("offload_optimizer"),
        offload_activations=flags("offload_activations"),
        **{f"overlap_{name}": np.array([name in parallel.overlap for parallel in parallels]) for name in OVERLAPS},
        row=nothing,
        rest_row=nothing,
        micro_batches=np.ones(len(parallels)),
        weight_bytes=each("weights"),
        gradient_bytes=each("gradients"),
        optimizer_bytes=each("optimizer"),
        gathered_bytes=each("gathered"),
        gathered_block_bytes=each("gathered_block"),
        cast_bytes=each("cast"),
        update_bytes=each("update"),
    )
