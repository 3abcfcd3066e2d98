"""Time of collectives over a hierarchy of networks: islands of devices, islands of islands, and so on.

A group of n ranks, `stride` apart, meets the levels of the hierarchy in turn. At level l it spreads over f fan-out
islands of the level below, of which each holds m of its ranks (m = 1 at the nearest level; f multiplied over the
levels is n). With a step's latency α and the rate w that one device reaches at that level, a vector of B bytes takes

    flat ring           Σ (edges · α) + (n−1)/n · B / min(m·w)                  reduce-scatter, all-gather; n − 1 edges
    inside out          Σ over levels of  steps · α + (f−1)/f · (B/m)/w         the same two, where no level is a `tree`
    all-reduce          twice the better of these, or
      pipelined tree    (√(2·Σ steps·α) + √(2·B / min(m·w)))²                   pieces pass all levels at once
      one shot          α + (n−1)·B/w                                           one fully connected level only
    all-to-all          Σ exchange latencies + max of (what crosses the level)/w, or level after level; on a switch
                        tree f−1 messages each, or ⌈log2 f⌉ that carry B/2 (Bruck)
    point-to-point      α + B/w of the slowest level that lies between neighbours of the group

and the fastest counts, for each element by itself; sums over a level without `trees` go in rings alone. A group that
one level joins takes what was measured there, where the hardware's description has it (`reached`). m·w: every device
has an adapter of its own, so a flat ring over islands with m ranks enters and leaves each of them m times. Payloads:
the whole vector of a rank (all-reduce, reduce-scatter), the whole result (all-gather), all that a rank sends with its
own part (all-to-all), the message.

What the topologies mean here:

    fully-connected     any pair at full rate; a rank exchanges with all others at once: 1 step
    tree                a tree of switches, full rate to anyone. NCCL gathers and scatters over it in rings alone, in as
                        many steps as ranks. A sum may pass up and down a tree of ranks: ⌈log2 f⌉ steps each way
    ring                two links, half the rate each; f − 1 steps. Part of a ring is a line, on which a ring runs on
                        one link each way: half the rate. A stride of h links leaves 1/h of it to each of h groups.
                        All-to-all: a message passes f/4 links on average. Neighbours have one link
    torus               rings along 2 dimensions of equal length (3 above 1024 devices, as in the pods of TPU v4 and
                        v5p), each with its part of the rate. Ranks in a row form a square or a cube, strided ones lie
                        along the dimensions one after the other. A group has the rate of the dimensions that it
                        covers together; its steps are those of all the rings

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH" (2005),
for ring, halving and doubling, Bruck; P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009), for the bound 2·(n−1)/n·B/w; NVIDIA's nccl-tests, PERFORMANCE.md, for what bus bandwidth means;
P. Sanders, J. Speck, J. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009), for the
pipelined tree. The square of roots is a pipeline's time at its best number of pieces.

Left out: the start of a collective (7 to 14 µs in NCCL's own model), the arithmetic of a reduction, reductions inside
a switch (NVLink SHARP, SHARP), protocols that trade rate for latency (NCCL's LL, LL128), other traffic on the same
links, a tapered switch tree, and NCCL's gathers along trees of one rank a node (PAT, since 2.23). A fully connected
level is taken for a switch; of direct links (MI300X) half the group would have half the rate. A latency that the
hardware does not give counts as none. Ranks that fill islands unevenly (12 over nodes of 8) count as spread evenly
(6 and 6). A group that starts inside an island is taken for the one that starts with rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.setup.hardware import Network, Reached

Floats = NDArray[np.float64]
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point"]

LARGEST_FLAT_TORUS = 1024
"""Devices up to which a torus has two dimensions: TPU v2, v3 (1024), v5e, v6e (256) and Trainium do; v4, v5p do not."""


@dataclass(frozen=True, slots=True)
class _Span:
    """What the groups make of one level. Fan-out 1: this group does not use it, and its steps are 0."""

    network: Network
    latency_s: float
    fan_out: Floats
    inside: Floats
    """Ranks in each island of the level below."""
    edges: Floats
    """Those of a chain through the group that lie at this level."""
    steps: Floats
    """Latencies of one pass over the level, in or out."""
    seconds_per_byte: Floats
    """Of one device, when all of the group send at once."""
    exchange_s_per_byte: Floats
    """Of an all-to-all, for each byte that a device holds, its own part included."""
    neighbour_s_per_byte: Floats
    """Of one message to the next of the group."""


def collective_seconds(
    networks: tuple[Network, ...],
    kind: Collective,
    payload_bytes: ArrayLike,
    *,
    size: ArrayLike,
    stride: ArrayLike,
    bandwidth_share: ArrayLike = 1.0,
) -> Floats:
    """Seconds of a collective in groups of `size` ranks that are `stride` apart; every argument broadcasts.

    Ranks are numbered so that an island of each level holds consecutive ones. `bandwidth_share` is the share of the
    links' rate that is reached. A group of one takes 0. The outermost level is taken to reach as far as is needed:
    `check_reach` says whether it does.
    """
    ranks, apart = _floats(size), _floats(stride)
    moved_bytes = _floats(payload_bytes) / _floats(bandwidth_share)
    spans = _spans(networks, ranks, apart, kind)
    if not spans:
        return np.zeros(np.broadcast_shapes(ranks.shape, apart.shape, moved_bytes.shape))
    if kind == "point-to-point":
        seconds = _point_to_point(spans, moved_bytes)
    elif kind == "all-to-all":
        seconds = _all_to_all(spans, moved_bytes, ranks)
    else:
        seconds = _passes(spans, moved_bytes, ranks, both=kind == "all-reduce")
    for span in spans:
        if span.network.reached is not None:
            alone = (span.fan_out == ranks) & (ranks > 1.0)
            seconds = np.where(
                alone, _as_measured(span.network, span.network.reached, kind, moved_bytes, ranks), seconds
            )
    return np.asarray(seconds, dtype=np.float64)


def _as_measured(network: Network, reached: Reached, kind: Collective, payload_bytes: Floats, ranks: Floats) -> Floats:
    """Seconds of a group that one level joins, at the rate that was measured for a message of that size."""
    points = _curve(reached, kind)
    # A smaller message takes as long as the smallest that was measured.
    sized = np.maximum(payload_bytes, points[0][0])
    share = _between(points, sized)
    passes = {"all-reduce": 2.0, "point-to-point": 1.0}.get(kind, 1.0)
    part: Floats | float = 1.0
    if kind != "point-to-point":
        part = 1.0 - 1.0 / np.maximum(ranks, 2.0)
        share = share * (_between(reached.by_ranks, ranks) if reached.by_ranks else 1.0)
    return np.asarray(passes * part * sized / (network.bandwidth_bytes_per_s.value * share), dtype=np.float64)


def _curve(reached: Reached, kind: Collective) -> tuple[tuple[float, float], ...]:
    return {"all-reduce": reached.all_reduce, "all-to-all": reached.exchange}.get(kind, reached.one_way)


def _between(points: tuple[tuple[float, float], ...], at: Floats) -> Floats:
    """The value at a place, logarithms being linear between the points, and beyond them as at the ends."""
    places, values = np.log(np.array(points)).T
    return np.asarray(np.exp(np.interp(np.log(at), places, values)), dtype=np.float64)


def crossed(networks: tuple[Network, ...], size: ArrayLike, stride: ArrayLike) -> NDArray[np.intp]:
    """Index into `networks` of the outermost level that each group uses; −1 for a group of one, which uses none."""
    ranks, apart = np.broadcast_arrays(_floats(size), _floats(stride))
    levels = np.where(ranks > 1.0, 0, -1)
    for network in networks[:-1]:
        if network.devices is None:
            break
        levels = levels + (_islands(ranks, apart, network.devices) > 1.0)
    return np.asarray(levels, dtype=np.intp)


def islands(networks: tuple[Network, ...], size: ArrayLike, stride: ArrayLike) -> Floats:
    """How many islands of the nearest network each group stands in."""
    ranks, apart = np.broadcast_arrays(_floats(size), _floats(stride))
    nearest = networks[0].devices if len(networks) > 1 else None
    return np.ones_like(ranks) if nearest is None else _islands(ranks, apart, nearest)


def check_reach(hardware_name: str, networks: tuple[Network, ...], gpus: int) -> None:
    """Raise when `networks` cannot join that many devices."""
    if gpus <= 1:
        return
    if not networks:
        raise FlopwiseError(
            f"{hardware_name} has no network to join {gpus} devices",
            why="its description has no [[networks]]",
            hint="ask for 1 device, or add [[networks]] with a name and bandwidth_bytes_per_s to the description",
        )
    reach = [network.devices for network in networks if network.devices is not None]
    if len(reach) == len(networks) and max(reach) < gpus:
        outermost = networks[reach.index(max(reach))]
        raise FlopwiseError(
            f"{hardware_name} cannot join {gpus} devices",
            why=f"its outermost network, {outermost.name}, joins {max(reach)}",
            hint=f"ask for at most {max(reach)} devices, or add [[networks]] that reach farther to the description",
        )


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _islands(ranks: Floats, stride: Floats, devices: int) -> Floats:
    """How many islands of that many devices the groups stand in."""
    return np.minimum(ranks, np.ceil(((ranks - 1.0) * stride + 1.0) / devices))


def _spans(networks: tuple[Network, ...], ranks: Floats, stride: Floats, kind: Collective) -> list[_Span]:
    """The levels that any of the groups uses, the nearest first."""
    spans: list[_Span] = []
    below, devices_below = ranks, 1
    for index, network in enumerate(networks):
        if np.max(below, initial=1.0) <= 1.0:
            return spans
        if network.devices is None or index == len(networks) - 1:
            islands = np.ones_like(below)
        else:
            islands = np.minimum(below, _islands(ranks, stride, network.devices))
        fan_out = below / islands
        if np.max(fan_out) > 1.0:
            inside = ranks / below
            spans.append(_span(network, devices_below, stride, kind, fan_out=fan_out, inside=inside, below=below))
        below, devices_below = islands, network.devices or devices_below
    if np.max(below, initial=1.0) > 1.0:
        raise FlopwiseError(
            "no network joins the devices of a group",
            why="the hardware's description has no [[networks]]",
            hint="add [[networks]] with name, devices and bandwidth_bytes_per_s to the description",
        )
    return spans


def _span(
    network: Network,
    devices_below: int,
    stride: Floats,
    kind: Collective,
    *,
    fan_out: Floats,
    inside: Floats,
    below: Floats,
) -> _Span:
    """`below` counts the islands of the level below that each group stands in."""
    latency_s = network.latency_s.value if network.latency_s is not None else 0.0
    per_byte = 1.0 / _long_rate(network, kind, fan_out)
    if network.topology in ("ring", "torus"):
        steps, pass_s, exchange_s, neighbour_s = _rings(network, devices_below, fan_out, stride)
    else:
        used = _floats(fan_out > 1.0)
        steps = np.ceil(np.log2(fan_out)) if network.topology == "tree" else used
        pass_s = neighbour_s = used * per_byte
        exchange_s = (1.0 - 1.0 / fan_out) * per_byte
    return _Span(
        network=network,
        latency_s=latency_s,
        fan_out=fan_out,
        inside=inside,
        edges=below - below / fan_out,
        steps=steps,
        seconds_per_byte=pass_s,
        exchange_s_per_byte=exchange_s,
        neighbour_s_per_byte=neighbour_s,
    )


def _long_rate(network: Network, kind: Collective, fan_out: Floats) -> Floats:
    """What long messages reach of a level's rate, as a part of a group that reaches farther."""
    if network.reached is None:
        return np.full_like(fan_out, network.sustained_bytes_per_s)
    share = np.full_like(fan_out, _curve(network.reached, kind)[-1][1])
    if network.reached.by_ranks:
        share = share * _between(network.reached.by_ranks, np.maximum(fan_out, 1.0))
    return np.asarray(network.bandwidth_bytes_per_s.value * share, dtype=np.float64)


def _rings(
    network: Network, devices_below: int, fan_out: Floats, stride: Floats
) -> tuple[Floats, Floats, Floats, Floats]:
    """Steps and the three seconds per byte of `_Span` on a ring, or on the rings along the dimensions of a torus."""
    devices = network.devices
    dimensions = 1 if network.topology == "ring" else 2 if devices and devices <= LARGEST_FLAT_TORUS else 3
    axis_rate = network.sustained_bytes_per_s / dimensions
    near_end = np.maximum(stride / devices_below, 1.0)
    far_end = near_end * fan_out
    # A torus of unknown size is as large as the group needs. Rounded, as the cube root of 4096 is not quite 16.
    length = np.round((devices / devices_below if devices else far_end) ** (1.0 / dimensions), 9)
    block = np.maximum(np.round(fan_out ** (1.0 / dimensions), 9), 2.0)
    side = np.where(near_end > 1.0, length, block)
    steps = rate = exchange_s = neighbour_s = np.zeros_like(far_end)
    for axis in range(dimensions):
        lowest = side**axis
        highest = side ** (axis + 1) if axis + 1 < dimensions else np.inf
        nearest = np.minimum(np.maximum(near_end, lowest), highest)
        extent = np.minimum(np.maximum(far_end, lowest), highest) / nearest
        links = nearest / lowest
        used = extent > 1.0
        whole = extent * links >= length * (1.0 - 1e-9)
        ring_rate = axis_rate / links * np.where(whole, 1.0, 0.5)
        steps = steps + extent - 1.0
        rate = rate + used * ring_rate
        exchange_s = np.maximum(exchange_s, used * (0.25 * extent / ring_rate))
        neighbour_s = np.maximum(neighbour_s, used * (2.0 * links / axis_rate))
    return steps, np.divide(1.0, rate, out=np.zeros_like(rate), where=rate > 0.0), exchange_s, neighbour_s


def _point_to_point(spans: list[_Span], message_bytes: Floats) -> Floats:
    seconds: Floats = np.zeros(())
    for span in spans:
        crossing = (span.fan_out > 1.0) * span.latency_s + message_bytes * span.neighbour_s_per_byte
        seconds = np.maximum(seconds, crossing)
    return seconds


def _passes(spans: list[_Span], vector_bytes: Floats, ranks: Floats, *, both: bool) -> Floats:
    """A reduce-scatter or an all-gather; an all-reduce if `both`."""
    latency_s = edges_s = inside_out_s_per_byte = slowest_s_per_byte = np.zeros(())
    switched = wired = rings_alone = np.zeros((), dtype=np.bool_)
    for span in spans:
        latency_s = latency_s + span.steps * span.latency_s
        edges_s = edges_s + span.edges * span.latency_s
        level_s_per_byte = span.seconds_per_byte / span.inside
        inside_out_s_per_byte = inside_out_s_per_byte + (1.0 - 1.0 / span.fan_out) * level_s_per_byte
        slowest_s_per_byte = np.maximum(slowest_s_per_byte, level_s_per_byte)
        used = span.fan_out > 1.0
        switched = switched | (used & (span.network.topology == "tree"))
        wired = wired | (used & (span.network.topology in ("ring", "torus")))
        rings_alone = rings_alone | (used & (not span.network.trees))
    flat_s = edges_s + vector_bytes * ((1.0 - 1.0 / ranks) * slowest_s_per_byte)
    inside_out_s = latency_s + vector_bytes * inside_out_s_per_byte
    # Over switches NCCL gathers and scatters in flat rings alone; compilers for a torus go dimension by dimension.
    pass_s = np.where(switched & ~wired, flat_s, np.minimum(flat_s, inside_out_s))
    if not both:
        return pass_s
    # (√a + √b)² = a + b + 2·√(a·b), with the 2 of there and back taken out of both roots.
    transfer_s = vector_bytes * slowest_s_per_byte
    tree_s = 2.0 * (latency_s + transfer_s + 2.0 * np.sqrt(latency_s * transfer_s))
    seconds = np.where(rings_alone, 2.0 * pass_s, np.minimum(2.0 * pass_s, tree_s))
    for span in spans:
        if span.network.topology == "fully-connected":
            shot_s = span.latency_s + vector_bytes * ((ranks - 1.0) * span.seconds_per_byte)
            # A group that stands in several islands, or alone, has no single level to itself.
            seconds = np.where((span.fan_out == ranks) & (ranks > 1.0), np.minimum(seconds, shot_s), seconds)
    return seconds


def _all_to_all(spans: list[_Span], sent_bytes: Floats, ranks: Floats) -> Floats:
    direct_latency_s = levels_s = crossing_s_per_byte = np.zeros(())
    for span in spans:
        level_s = sent_bytes * span.exchange_s_per_byte
        if span.network.topology == "tree":
            messages = span.fan_out - 1.0
            bruck_s_per_byte = span.steps * span.seconds_per_byte * 0.5
            bruck_s = span.steps * span.latency_s + sent_bytes * np.maximum(bruck_s_per_byte, span.exchange_s_per_byte)
            level_s = np.minimum(messages * span.latency_s + level_s, bruck_s)
            direct_latency_s = direct_latency_s + messages * span.inside * span.latency_s
        else:
            level_s = span.steps * span.latency_s + level_s
            direct_latency_s = direct_latency_s + span.steps * span.latency_s
        levels_s = levels_s + level_s
        # Of what a rank sends, the share for ranks that this level joins and the one below does not.
        joined = span.inside * span.fan_out / ranks
        crossing_s_per_byte = np.maximum(crossing_s_per_byte, joined * span.exchange_s_per_byte)
    return np.minimum(levels_s, direct_latency_s + sent_bytes * crossing_s_per_byte)
