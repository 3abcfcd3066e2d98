"""Every legal strategy for a number of devices, as arrays.

Tried are all combinations of: tensor and context degrees up to 64, expert and pipeline degrees, as far as they divide
the devices and suit the model; experts over tensor ranks, shared by them or whole; data ranks for the rest; sequence
parallelism on and off; ZeRO 0 to 3, weights kept or
dropped between forward and backward, shards over all ranks or over one island of the nearest network; 1F1B with layers
dealt out by number and by time, and interleaved stages of 2, 3, 4, 6 and 8 chunks; micro-batches of powers of two,
three times such, and all at once; every recompute policy.

Left out: GPipe, which is as slow as 1F1B and larger; recompute `full`, as large as `input` and slower; other sizes of
micro-batch and of shard group, gathers farther ahead than one layer, and experts that tensor ranks share where they
could as well hold different ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from flopwise.predict.choose import micro_batch_sizes
from flopwise.predict.cluster.pieces import joined_pieces, pieces, taken
from flopwise.predict.cluster.stages import LAST, stage_shapes
from flopwise.predict.cluster.strategies import Listed, Strategies, set_ups, state_bytes_of
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Balance, Parallel, uneven
from flopwise.setup.setup import SettledSetup
from flopwise.setup.trained import trains_partly
from flopwise.work.layout import Layout, illegal_layout
from flopwise.work.lstm import Lstm
from flopwise.work.model import Model
from flopwise.work.work import Recompute

MOST_TENSOR = 64
MOST_CONTEXT = 64
CHUNKS = (2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Spread:
    """How state and stages are spread, given a layout: what of a strategy does not change a device's kernels."""

    data: int
    pipeline: int
    chunks: int
    zero: int
    shard: int
    reshard: bool
    balance: Balance = "layers"
    offload_optimizer: bool = False
    offload_activations: bool = False


@dataclass(frozen=True, slots=True)
class CandidateBatch:
    """The strategies of one layout, with what is needed to name any of them."""

    layout: Layout
    spreads: list[Spread]
    spread: NDArray[np.intp]
    """Of each strategy, its place in `spreads`."""
    policy: NDArray[np.intp]
    micro: NDArray[np.intp]
    policies: tuple[Recompute, ...]
    listed: Listed

    def __len__(self) -> int:
        return int(self.spread.size)


def divisors(number: int, most: int) -> list[int]:
    """Numbers up to `most` that divide `number`, rising."""
    return [candidate for candidate in range(1, min(number, most) + 1) if number % candidate == 0]


def layouts(model: Model, devices: int, sequence_tokens: int) -> Iterator[Layout]:
    """What a device's share of a layer may be, the simplest first."""
    if isinstance(model, Lstm) or trains_partly(model):
        # Of a model that is trained in part no layer is split (`setup.setup`).
        yield Layout()
        return
    for tensor, context in product(divisors(devices, MOST_TENSOR), divisors(devices, MOST_CONTEXT)):
        if devices % (tensor * context):
            continue
        for expert, sequence in product(divisors(max(1, model.experts), devices), (False, True)):
            if tensor == 1 and sequence:
                continue
            layout = Layout(tensor=tensor, sequence=sequence, context=context, expert=expert)
            # As many experts on each device, and less to send: whole ones, over the tensor ranks too.
            better = sequence and expert > 1 and model.experts % (expert * tensor) == 0
            fits = (devices // tensor) % expert == 0 and not better
            if fits and illegal_layout(model, sequence_tokens, layout) is None:
                yield layout
            folded = replace(layout, expert_tensor=1)
            if sequence and model.experts and illegal_layout(model, sequence_tokens, folded) is None:
                yield folded


OFFLOADS = ((False, False), (True, False), (False, True), (True, True))
"""Optimizer state and activations, each on the device or in host memory."""


def spreads(
    model: Model, hardware: Hardware, devices: int, batch: int, layout: Layout, *, offload: bool
) -> list[Spread]:
    """Every way to spread a layout over the devices, the simplest first; with `offload` also into host memory."""
    found: list[Spread] = []
    island = hardware.networks[0].devices if hardware.networks else None
    deepest = 1 if trains_partly(model) else model.layers
    for pipeline in divisors(devices // (layout.tensor * layout.context), deepest):
        data = devices // (layout.tensor * layout.context * pipeline)
        replicas = data * layout.context
        if data > batch or (replicas * layout.tensor // layout.sharing_experts) % layout.expert:
            continue
        orders: list[tuple[int, Balance]] = [(1, "layers")]
        if pipeline > 1:
            orders.append((1, "time"))
            orders += [(count, "layers") for count in CHUNKS if not uneven(model.layers, pipeline * count)]
        groups = [replicas]
        inside = (island or devices) // layout.tensor
        if 1 < inside < replicas and replicas % inside == 0:
            groups.append(inside)
        for count, balance in orders:
            found.append(Spread(data, pipeline, count, 0, replicas, True, balance))
            if replicas > 1:
                stages = [(1, True), (2, True), (3, True), (3, False)]
                found += [
                    Spread(data, pipeline, count, zero, group, reshard, balance)
                    for zero, reshard in stages
                    for group in groups
                ]
    if not offload or trains_partly(model):
        return found
    return [
        replace(spread, offload_optimizer=optimizer, offload_activations=activations)
        for optimizer, activations in OFFLOADS
        for spread in found
    ]


def batch_of(
    base: SettledSetup,
    layout: Layout,
    every: list[Spread],
    *,
    policies: tuple[Recompute, ...],
    micro: int | None,
) -> CandidateBatch:
    """All strategies of a layout: its spreads with every recompute policy and micro-batch."""
    places, policy, sizes = [], [], []
    for place, spread in enumerate(every):
        mine = -(-base.batch_sequences // spread.data)
        tried = [min(micro, mine)] if micro else micro_batch_sizes(mine)
        if spread.chunks > 1:
            # Interleaving wants whole rounds of as many micro-batches as there are stages.
            tried = [size for size in tried if -(-mine // size) % spread.pipeline == 0]
        for index in range(len(policies)):
            places += [place] * len(tried)
            policy += [index] * len(tried)
            sizes += tried
    spread_index = np.array(places, dtype=np.intp)
    policy_index, micro_index = np.array(policy, dtype=np.intp), np.array(sizes, dtype=np.intp)
    state = state_bytes_of(base)
    spread_over = set_ups([parallel_of(layout, spread) for spread in every], [state] * len(every)).taken(spread_index)
    setups = [replace(base, recompute=name) for name in policies]
    listed = _list(spread_over, setups, layout, policy=policy_index, micro=micro_index)
    own = _own_split(listed)
    return CandidateBatch(
        layout,
        every,
        spread_index[own],
        policy_index[own],
        micro_index[own],
        policies,
        Listed(listed.strategies.taken(own), listed.table),
    )


def _own_split(listed: Listed) -> NDArray[np.intp]:
    """Strategies that are not another one in other words: layers dealt out by time may fall as by number."""
    strategies = listed.strategies
    table = taken(listed.table, strategies.row)
    equal = np.floor(table.layers / strategies.pipeline)
    same = strategies.by_time & (stage_shapes(strategies, table)[LAST].layers == equal)
    return np.flatnonzero(~same)


def _list(
    strategies: Strategies,
    setups: list[SettledSetup],
    layout: Layout,
    *,
    policy: NDArray[np.intp],
    micro: NDArray[np.intp],
) -> Listed:
    """Fill in micro-batches and pieces; each policy has some that do not sum gradients up and some that do."""
    mine = -(-setups[0].batch_sequences // strategies.data.astype(np.intp))
    rest, counts = mine % micro, -(-mine // micro)
    sizes = np.unique(np.concatenate([micro, rest[rest > 0]]))
    again = np.repeat([False, True], sizes.size).tolist()
    table = joined_pieces([pieces(setup, layout, [*sizes.tolist()] * 2, again) for setup in setups])
    base = (policy * 2 + (counts > 1)) * sizes.size
    rests = base + np.searchsorted(sizes, np.where(rest > 0, rest, micro))
    rows = base + np.searchsorted(sizes, micro)
    return Listed(replace(strategies, row=rows, rest_row=rests, micro_batches=counts.astype(np.float64)), table)


def parallel_of(layout: Layout, spread: Spread) -> Parallel:
    """A strategy of a batch as a record."""
    replicas = spread.data * layout.context
    return Parallel(
        data=spread.data,
        tensor=layout.tensor,
        pipeline=spread.pipeline,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        sequence=layout.sequence,
        zero=spread.zero,
        shard=None if spread.shard == replicas else spread.shard,
        reshard=spread.reshard,
        schedule="interleaved" if spread.chunks > 1 else "1f1b",
        chunks=spread.chunks,
        balance=spread.balance,
        offload_optimizer=spread.offload_optimizer,
        offload_activations=spread.offload_activations,
    )
