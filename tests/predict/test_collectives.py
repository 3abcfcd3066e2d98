"""Collectives against closed forms computed by hand, and what must hold on any networks."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import ROOT, hardware_names, load_hardware
from flopwise.predict.cluster.collectives import Collective, check_reach, collective_seconds, crossed
from flopwise.setup.hardware import Fact, Network, Reached, Topology

KINDS: tuple[Collective, ...] = get_args(Collective)
GB = 1e9


def network(
    giga: float, devices: int | None = None, *, micro: float | None = None, topology: Topology = "fully-connected"
) -> Network:
    """A level with that many GB/s and microseconds a step."""
    return Network(
        name=f"{topology} of {devices}",
        bandwidth_bytes_per_s=Fact(value=giga * 1e9, source="test"),
        devices=devices,
        latency_s=None if micro is None else Fact(value=micro * 1e-6, source="test"),
        topology=topology,
    )


def seconds(
    networks: tuple[Network, ...], kind: Collective, payload: float, size: int, stride: int = 1, *, share: float = 1.0
) -> float:
    result = collective_seconds(networks, kind, payload, size=size, stride=stride, bandwidth_share=share)
    assert result.shape == ()
    return float(result)


NVLINK = network(450, 8, micro=1)
NODES = (NVLINK, network(50, micro=5, topology="tree"))


def test_large_all_reduce_over_eight_reaches_the_bandwidth_bound() -> None:
    # 2 · 7/8 · 1 GB at 450 GB/s, and two exchanges of 1 µs
    assert seconds((NVLINK,), "all-reduce", GB, 8) == pytest.approx(2 * 7 / 8 / 450 + 2e-6)
    assert seconds((NVLINK,), "all-reduce", GB, 8, share=0.8) == pytest.approx(2 * 7 / 8 / 360 + 2e-6)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_one_pass_is_half_an_all_reduce(kind: Collective) -> None:
    assert seconds((NVLINK,), kind, GB, 8) == pytest.approx(7 / 8 / 450 + 1e-6)
    # Over switches in rings alone.
    switches = (network(450, 8, micro=1, topology="tree"),)
    assert seconds(switches, kind, GB, 8) == pytest.approx(7 / 8 / 450 + 7e-6)
    ring = (network(450, 8, micro=1, topology="ring"),)
    assert seconds(ring, kind, GB, 8) == pytest.approx(7 / 8 / 450 + 7e-6)


def test_small_messages_take_the_fewest_latencies() -> None:
    # one shot of all to all; halving and doubling; a ring has no choice
    assert seconds((NVLINK,), "all-reduce", 1.0, 8) == pytest.approx(1e-6, rel=1e-3)
    assert seconds((network(450, 8, micro=1, topology="tree"),), "all-reduce", 1.0, 8) == pytest.approx(6e-6, rel=1e-2)
    assert seconds((network(450, 8, micro=1, topology="ring"),), "all-reduce", 1.0, 8) == pytest.approx(14e-6, rel=1e-3)
    assert seconds((network(450, 6, micro=1, topology="tree"),), "all-gather", 1.0, 6) == pytest.approx(5e-6, rel=1e-3)


def test_two_nodes_use_every_adapter() -> None:
    # A flat ring enters a node eight times: 8 · 50 GB/s, less than NVLink's 450. Of 15 edges one is between nodes.
    assert seconds(NODES, "all-gather", GB, 16) == pytest.approx(15 / 16 / 400 + 14e-6 + 5e-6)
    # Two of each node have two adapters; of three edges one is between nodes.
    assert seconds(NODES, "all-gather", GB, 4, stride=4) == pytest.approx(3 / 4 / 100 + 2e-6 + 5e-6)
    # Where no level is one of switches, inside out has fewer latencies: one exchange inside, one between two nodes, on
    # an eighth.
    small, direct = 1e5, (NVLINK, network(50, micro=5))
    assert seconds(direct, "all-gather", small, 16) == pytest.approx(
        7 / 8 * small / 450e9 + 1 / 2 * small / 8 / 50e9 + 1e-6 + 5e-6
    )


def test_pipelined_tree_wins_over_many_nodes() -> None:
    # 1024 ranks in 128 nodes: 1 step inside, 7 between, both there and back, at eight adapters' rate.
    latency_s, transfer_s = 2 * (1e-6 + 7 * 5e-6), 2 / 400
    expected = (math.sqrt(latency_s) + math.sqrt(transfer_s)) ** 2
    assert seconds(NODES, "all-reduce", GB, 1024) == pytest.approx(expected)
    ring_s = 2 * (1023 / 1024 / 400 + 896e-6 + 127 * 5e-6)
    inside_out_s = 2 * (7 / 8 / 450 + 127 / 128 / 400 + 36e-6)
    assert expected < min(ring_s, inside_out_s)


def test_strided_group_meets_only_the_outer_network() -> None:
    # One rank of each of 16 nodes, one adapter: a ring of 15 steps, or for small sums a tree of 4 each way.
    assert seconds(NODES, "all-reduce", GB, 16, stride=8) == pytest.approx(2 * (15 / 16 / 50 + 15 * 5e-6))
    assert seconds(NODES, "all-reduce", 1.0, 16, stride=8) == pytest.approx(2 * 4 * 5e-6, rel=1e-2)
    assert seconds(NODES, "reduce-scatter", GB, 16, stride=64) == pytest.approx(15 / 16 / 50 + 15 * 5e-6)


def test_rings_alone_where_trees_were_not_measured() -> None:
    rings = (NVLINK, replace(NODES[1], trees=False))
    # 512 ranks on 64 nodes: 448 steps inside and 63 between, twice.
    ring_s = 2 * (511 / 512 * 1e6 / 400e9 + 448e-6 + 63 * 5e-6)
    assert seconds(rings, "all-reduce", 1e6, 512) == pytest.approx(ring_s)
    assert seconds(NODES, "all-reduce", 1e6, 512) < 0.1 * ring_s


def test_what_a_level_was_measured_at_counts() -> None:
    reached = Reached(
        source="test",
        all_reduce=((1e6, 0.1), (1e8, 1.0)),
        one_way=((1e6, 0.1), (1e8, 0.5)),
        exchange=((1e6, 0.2), (1e8, 0.6)),
        by_ranks=((2, 0.5), (8, 1.0)),
    )
    level = (replace(NVLINK, reached=reached), NODES[1])
    assert seconds(level, "all-reduce", 1e8, 8) == pytest.approx(2 * 7 / 8 * 1e8 / 450e9)
    # Between the points logarithms are linear; what is smaller takes as long as the smallest.
    assert seconds(level, "all-reduce", 1e7, 8) == pytest.approx(2 * 7 / 8 * 1e7 / 450e9 / math.sqrt(0.1))
    assert seconds(level, "all-reduce", 1.0, 8) == seconds(level, "all-reduce", 1e6, 8)
    assert seconds(level, "all-gather", 1e9, 2) == pytest.approx(1 / 2 * 1e9 / 450e9 / 0.25)
    assert seconds(level, "all-to-all", 1e8, 8) == pytest.approx(7 / 8 * 1e8 / 450e9 / 0.6)
    assert seconds(level, "point-to-point", 1e8, 2) == pytest.approx(1e8 / 450e9 / 0.5)
    # A ring over several nodes passes this level too, at what long messages reach of it.
    assert seconds(level, "all-gather", GB, 16) == pytest.approx(15 / 16 / 225 + 14e-6 + 5e-6)
    with pytest.raises(FlopwiseError, match="faster than a smaller one"):
        replace(reached, exchange=((1e6, 0.1), (2e6, 0.9)))


def test_collectives_of_nanotrons_jobs() -> None:
    # Medians over some 300 jobs each, on 4 to 64 nodes of 8 H100 over EFA: the size of a message is not told (80 MB is
    # assumed), and all-reduces count twice as fast as the other two. In between lies what the description says.
    networks = load_hardware("h100-efa").networks
    table = ROOT / "tables" / "nanotron_collectives.csv"
    with table.open(encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if "Intra" not in row["collective"]]
    for nodes in (4, 8, 16, 32, 64):
        mine = {row["collective"]: row for row in rows if int(row["nodes_of_8_h100"]) == nodes}
        rate = 2 * 80e6 / seconds(networks, "all-reduce", 80e6, 8 * nodes) / GB
        assert float(mine["AllGather"]["median_gb_s"]) < rate < float(mine["AllReduce"]["median_gb_s"])


def test_all_to_all() -> None:
    assert seconds((NVLINK,), "all-to-all", GB, 8) == pytest.approx(7 / 8 / 450 + 1e-6)
    # Half of what a rank of two nodes sends leaves its node, in eight messages, while the rest goes over NVLink.
    assert seconds(NODES, "all-to-all", GB, 16) == pytest.approx(1 / 2 / 50 + 1e-6 + 8 * 5e-6)
    # Small: sorted inside the node first, then one message.
    assert seconds(NODES, "all-to-all", 1.0, 16) == pytest.approx(6e-6, rel=1e-3)
    # Bruck between 64 nodes: 6 messages instead of 63.
    assert seconds(NODES, "all-to-all", 1.0, 64, stride=8) == pytest.approx(30e-6, rel=1e-3)
    # On a ring of 8 a message passes 2 links on average, on a 16 × 16 torus 4 along each of the dimensions.
    assert seconds((network(150, 8, topology="ring"),), "all-to-all", GB, 8) == pytest.approx(2 / 150)
    assert seconds((network(200, 256, topology="torus"),), "all-to-all", GB, 256) == pytest.approx(4 / 100)


def test_message_between_neighbours_crosses_the_slowest_network_on_its_way() -> None:
    assert seconds(NODES, "point-to-point", GB, 8) == pytest.approx(1 / 450 + 1e-6)
    assert seconds(NODES, "point-to-point", GB, 4, stride=8) == pytest.approx(1 / 50 + 5e-6)
    # Stages of four devices: every other pair of neighbours shares a node, the others do not.
    assert seconds(NODES, "point-to-point", GB, 4, stride=4) == pytest.approx(1 / 50 + 5e-6)
    assert seconds(NODES, "point-to-point", GB, 2, stride=4) == pytest.approx(1 / 450 + 1e-6)
    # One link of two, one of four.
    assert seconds((network(150, 8, topology="ring"),), "point-to-point", GB, 8) == pytest.approx(1 / 75)
    assert seconds((network(200, 256, topology="torus"),), "point-to-point", GB, 256) == pytest.approx(1 / 50)


def test_torus() -> None:
    pod = (network(200, 256, micro=1, topology="torus"),)
    # The whole pod: rings of 16 along two dimensions. A column of it has one dimension's links.
    assert seconds(pod, "all-gather", GB, 256) == pytest.approx(255 / 256 / 200 + 30e-6)
    assert seconds(pod, "all-gather", GB, 16, stride=16) == pytest.approx(15 / 16 / 100 + 15e-6)
    # A square of 4 × 4 does not wrap around; two devices have one link of four.
    assert seconds(pod, "all-gather", GB, 16) == pytest.approx(15 / 16 / 100 + 6e-6)
    assert seconds(pod, "all-gather", GB, 2) == pytest.approx(1 / 2 / 50 + 1e-6)
    assert seconds(pod, "all-reduce", GB, 256) <= 2 * seconds(pod, "all-gather", GB, 256)
    # 16 × 16 × 16, whole and as one of its rings.
    cube = (network(600, 4096, micro=1, topology="torus"),)
    assert seconds(cube, "all-gather", GB, 4096) == pytest.approx(4095 / 4096 / 600 + 45e-6)
    assert seconds(cube, "all-gather", GB, 16, stride=256) == pytest.approx(15 / 16 / 200 + 15e-6)
    # Of unknown size: as large as the group.
    grown = (network(600, None, micro=1, topology="torus"),)
    assert seconds(grown, "all-gather", GB, 64) == pytest.approx(63 / 64 / 600 + 9e-6)


def test_part_of_a_ring_and_groups_that_share_it() -> None:
    ring = (network(150, 8, topology="ring"),)
    assert seconds(ring, "all-gather", GB, 8) == pytest.approx(7 / 8 / 150)
    assert seconds(ring, "all-gather", GB, 4) == pytest.approx(3 / 4 / 75)
    # Every other device: the whole ring, shared by two groups.
    assert seconds(ring, "all-gather", GB, 4, stride=2) == pytest.approx(3 / 4 / 75)


def test_three_levels() -> None:
    # Cards of two dies in a node of four cards on a ring, nodes on switches.
    levels = (network(200, 2), network(50, 8, topology="ring"), network(12.5, topology="tree"))
    # Flat: two dies' links between cards, eight adapters between nodes: 200, 100, 100 GB/s.
    assert seconds(levels, "all-gather", GB, 8) == pytest.approx(7 / 8 / 100)
    assert seconds(levels, "all-gather", GB, 32) == pytest.approx(31 / 32 / 100)
    assert list(crossed(levels, [1, 2, 4, 8, 9, 2, 2, 2], [1, 1, 1, 1, 1, 2, 4, 8])) == [-1, 0, 1, 1, 2, 1, 1, 2]


def test_unknown_latency_counts_as_none() -> None:
    assert seconds((network(100, 4),), "all-gather", GB, 4) == pytest.approx(3 / 4 / 100)


def test_reach() -> None:
    check_reach("nothing", (), 1)
    check_reach("nodes", NODES, 100_000)
    check_reach("one node", (NVLINK,), 8)
    with pytest.raises(FlopwiseError) as none:
        check_reach("card", (), 2)
    assert "card has no network to join 2 devices" in str(none.value)
    with pytest.raises(FlopwiseError) as short:
        check_reach("node", (network(100, 2), NVLINK), 9)
    assert "node cannot join 9 devices" in str(short.value)
    assert "joins 8" in str(short.value)
    assert "hint: ask for at most 8 devices" in str(short.value)


def test_group_without_a_network_is_an_error() -> None:
    assert seconds((), "all-reduce", GB, 1) == 0.0
    with pytest.raises(FlopwiseError, match="no network joins"):
        seconds((), "all-reduce", GB, 2)


def test_empty_arrays() -> None:
    assert collective_seconds(NODES, "all-reduce", np.zeros((0, 3)), size=8, stride=1).shape == (0, 3)
    assert collective_seconds(NODES, "all-reduce", 1.0, size=np.zeros(0), stride=1).shape == (0,)


# -- what must hold on any networks


@st.composite
def hierarchies(draw: st.DrawFn) -> tuple[Network, ...]:
    """One to three levels, the outermost without an end in most."""
    topologies: tuple[Topology, ...] = get_args(Topology)
    levels, devices = [], 1
    depth = draw(st.integers(1, 3))
    for level in range(depth):
        devices *= draw(st.integers(2, 9))
        levels.append(
            network(
                draw(st.floats(1, 1000)),
                None if level == depth - 1 and draw(st.booleans()) else devices,
                micro=draw(st.one_of(st.none(), st.floats(0.01, 50))),
                topology=draw(st.sampled_from(topologies)),
            )
        )
    return tuple(levels)


PAYLOADS = st.floats(0, 1e12)
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 512, 1000, 4096]))
STRIDES = st.one_of(st.just(1), st.integers(1, 70))
KIND = st.sampled_from(KINDS)


@given(hierarchies(), KIND, PAYLOADS, STRIDES)
def test_group_of_one_takes_no_time(
    networks: tuple[Network, ...], kind: Collective, payload: float, apart: int
) -> None:
    assert seconds(networks, kind, payload, 1, apart) == 0.0
    mixed = collective_seconds(networks, kind, payload, size=[1, 5], stride=apart)
    assert mixed[0] == 0.0
    assert int(crossed(networks, 1, apart)) == -1


@given(hierarchies(), KIND, st.lists(st.tuples(PAYLOADS, SIZES, STRIDES, st.floats(0.1, 1)), min_size=1, max_size=6))
def test_broadcasting_is_element_by_element(
    networks: tuple[Network, ...], kind: Collective, rows: list[tuple[float, int, int, float]]
) -> None:
    payload, size, stride, share = (np.array(column) for column in zip(*rows, strict=True))
    table = collective_seconds(networks, kind, payload[:, None], size=size, stride=stride, bandwidth_share=share)
    assert table.shape == (len(rows), len(rows))
    assert table.dtype == np.float64
    expected = [[seconds(networks, kind, row[0], other[1], other[2], share=other[3]) for other in rows] for row in rows]
    np.testing.assert_allclose(table, expected, rtol=1e-12)


@given(hierarchies(), KIND, PAYLOADS, st.tuples(SIZES, STRIDES), st.data())
def test_better_networks_and_smaller_payloads_are_never_slower(
    networks: tuple[Network, ...], kind: Collective, payload: float, group: tuple[int, int], data: st.DataObject
) -> None:
    base = seconds(networks, kind, payload, *group)
    factor, slack = data.draw(st.floats(1, 4)), 1 + 1e-12
    assert base >= 0.0
    assert seconds(networks, kind, payload * factor, *group) * slack >= base
    assert seconds(networks, kind, payload, *group, share=1 / factor) * slack >= base
    index = data.draw(st.integers(0, len(networks) - 1))
    level = networks[index]

    def with_level(changed: Network) -> float:
        return seconds((*networks[:index], changed, *networks[index + 1 :]), kind, payload, *group)

    rate = Fact(value=level.bandwidth_bytes_per_s.value * factor, source="test")
    assert with_level(replace(level, bandwidth_bytes_per_s=rate)) <= base * slack
    latency = Fact(value=1e-6 if level.latency_s is None else level.latency_s.value * factor, source="test")
    assert with_level(replace(level, latency_s=latency)) * slack >= base


@given(hierarchies(), PAYLOADS, SIZES, STRIDES)
def test_all_reduce_is_no_slower_than_its_two_halves(
    networks: tuple[Network, ...], payload: float, size: int, stride: int
) -> None:
    halves = sum(seconds(networks, kind, payload, size, stride) for kind in ("reduce-scatter", "all-gather"))
    assert seconds(networks, "all-reduce", payload, size, stride) <= halves * (1 + 1e-12)


@given(hierarchies(), PAYLOADS, SIZES, STRIDES)
def test_nothing_beats_the_bandwidth_of_a_level(
    networks: tuple[Network, ...], payload: float, size: int, stride: int
) -> None:
    level = networks[:1]
    bound = (size - 1) / size * payload / level[0].bandwidth_bytes_per_s.value * (1 - 1e-12)
    assert seconds(level, "all-reduce", payload, size, stride) >= 2 * bound
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        assert seconds(level, kind, payload, size, stride) >= bound
    # Over a hierarchy, the group's ranks of one island share what the outer level gives them.
    outer = int(crossed(networks, size, stride))
    if outer > 0:
        inside = int(np.sum(np.arange(size) * stride < (networks[outer - 1].devices or 1)))
        rate = networks[outer].bandwidth_bytes_per_s.value * inside
        assert seconds(networks, "all-reduce", payload, size, stride) >= payload / rate * (1 - 1e-12)


@given(SIZES, STRIDES)
def test_crossed_is_counted_rank_by_rank(size: int, stride: int) -> None:
    levels = (network(9, 2), network(8, 6), network(7, 24), network(6))
    last_rank = (size - 1) * stride
    expected = -1 if size == 1 else next(index for index, reach in enumerate((2, 6, 24, 1e9)) if last_rank < reach)
    assert int(crossed(levels, size, stride)) == expected


@pytest.mark.parametrize("name", hardware_names())
@pytest.mark.parametrize("kind", KINDS)
def test_catalogued_networks_give_plausible_rates(name: str, kind: Collective) -> None:
    networks = load_hardware(name).networks
    sizes = np.array([2, 4, 8])
    times = collective_seconds(networks, kind, GB, size=sizes, stride=1)
    # From 1 GB/s of a slow adapter to more than NVLink 5.
    assert np.all((times > 1e-4) & (times < 5.0))
