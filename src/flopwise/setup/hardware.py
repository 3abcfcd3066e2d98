"""What a machine can do, as facts that each name their source.

A `Hardware` is one accelerator (`Device`), the host it sits in, the link between the two and the networks to
others. Numbers are facts (`Fact`): a value and the key of the `Source` that it comes from. Unknown is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from flopwise.base.errors import FlopwiseError
from flopwise.setup.efficiency import Efficiency

SourceKind = Literal["datasheet", "measured", "derived", "estimated"]
"""datasheet: the maker says so. measured: somebody timed it. derived: arithmetic on the two. estimated: a judgement."""

Topology = Literal["fully-connected", "ring", "tree", "torus"]

NUMBER_FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "mxfp4", "int8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a number comes from."""

    title: str
    kind: SourceKind
    url: str | None = None
    note: str | None = None
    """How the number follows from the source, when it is not printed there as such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A number and the key of its source in the description's `sources`."""

    value: float
    source: str

    def __post_init__(self) -> None:
        if not 1e-15 <= self.value <= 1e24:
            raise FlopwiseError(
                f"a fact must be a positive number of plausible size, got {self.value!r}",
                why="bytes, bytes per second, FLOP/s, hertz, watts and seconds all lie between 1e-15 and 1e24",
                hint="leave out what is not known",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLevel:
    """One level of the memory hierarchy, summed over the device."""

    name: str
    """`shared` (beside the arithmetic units), `l2` (chip-wide), `dram` (the device's main memory), …"""
    size_bytes: Fact
    bandwidth_bytes_per_s: Fact | None = None
    """Bytes read or written per second by the level below; None when nobody published it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator as a program sees it: one CUDA device, one NeuronCore pair, one TPU chip, one CPU."""

    vendor: str
    architecture: str
    kind: Literal["gpu", "accelerator", "cpu"]
    units: Fact
    """Independent processors that a kernel's tiles are dealt to: SMs, compute units, NeuronCores, cores."""
    peak_flops: dict[str, Fact]
    """Dense matrix FLOP/s by number format; a format that the device cannot multiply in is absent."""
    vector_flops: Fact | None = None
    """fp32 FLOP/s outside the matrix units."""
    clock_hz: Fact | None = None
    """The clock at which `peak_flops` holds."""
    memory: tuple[MemoryLevel, ...]
    """From the nearest to the units to the farthest; the last is `dram`."""
    power_w: Fact | None = None

    def __post_init__(self) -> None:
        for format_name in self.peak_flops:
            if format_name not in NUMBER_FORMATS:
                raise FlopwiseError(
                    f"unknown number format {format_name!r} in peak_flops",
                    hint=f"one of {', '.join(NUMBER_FORMATS)}",
                )
        if not self.memory or self.memory[-1].name != "dram":
            raise FlopwiseError("the last memory level must be `dram`, the device's main memory")
        if self.memory[-1].bandwidth_bytes_per_s is None:
            raise FlopwiseError("the `dram` level needs its bandwidth_bytes_per_s")
        if self.units.value < 1 or self.units.value % 1 or self.units.value > 1e6:
            raise FlopwiseError(
                f"a device has a whole number of units, got {self.units.value:g}",
                hint="132 SMs of an H100, for example",
            )
        if not self.peak_flops or min(fact.value for fact in self.peak_flops.values()) < 1e6:
            raise FlopwiseError(
                "peak_flops must give the dense matrix FLOP/s of at least one number format",
                why="a peak below 1e6 is not one of today's devices",
                hint='bf16 = { value = 989.5e12, source = "datasheet" }',
            )
        for level in self.memory:
            if level.size_bytes.value < 2**10 or (level.name == "dram" and level.size_bytes.value < 2**20):
                raise FlopwiseError(
                    f"the {level.name} memory of {level.size_bytes.value:g} bytes is too small to be one",
                    hint="sizes are in bytes: 80 GiB is 85899345920",
                )

    def level(self, name: str) -> MemoryLevel | None:
        """The memory level of that name, or None."""
        return next((level for level in self.memory if level.name == name), None)

    @property
    def dram(self) -> MemoryLevel:
        """The device's main memory."""
        return self.memory[-1]


SAME_MEMORY = 0.05
"""How far two descriptions of a device may be apart in its memory: drivers keep more or less of it to themselves."""


def same_device(one: Device, other: Device) -> bool:
    """Whether two descriptions can be of one device, be it measured or the catalogue's."""
    same = (one.kind, one.architecture, one.units.value) == (other.kind, other.architecture, other.units.value)
    if same and one.kind != "cpu":
        # A GPU's datasheet stands in both; a CPU's rates are measured, a little differently each time.
        bandwidths = (one.dram.bandwidth_bytes_per_s, other.dram.bandwidth_bytes_per_s)
        same = len({fact.value for fact in bandwidths if fact is not None}) == 1
    return same and abs(one.dram.size_bytes.value / other.dram.size_bytes.value - 1.0) <= SAME_MEMORY


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The path between device and host memory, each way."""

    name: str
    bandwidth_bytes_per_s: Fact
    both_ways_bytes_per_s: Fact | None = None
    """Rate of each direction while both are busy; None: not known to differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The machine around the device."""

    memory_bytes: Fact | None = None
    memory_bandwidth_bytes_per_s: Fact | None = None
    update_bytes_per_s: Fact | None = None
    """What an optimizer's update on its cores reads and writes, in fp32 and beside copies over the link."""
    cores: Fact | None = None
    launch_s: Fact | None = None
    """What a kernel takes of a host that does nothing but start kernels; None: `LAUNCH_S`."""
    call_s: Fact | None = None
    """What one takes that flopwise's own executor starts by itself, its Python included; None: `CALL_S`."""


LAUNCH_S, CALL_S = 10e-6, 40e-6
"""As measured on the host of an H200: what is estimated where nobody has measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """What a communication library reaches of a level's rate: (bytes, share) by rising bytes, for bus bandwidth.

    Between the points, logarithms are linear; below the first one a message takes as long as there. Latencies are in
    it.
    """

    source: str
    all_reduce: tuple[tuple[float, float], ...]
    one_way: tuple[tuple[float, float], ...]
    """All-gather and reduce-scatter; messages between neighbours too."""
    exchange: tuple[tuple[float, float], ...]
    """All-to-all."""
    by_ranks: tuple[tuple[float, float], ...] = ()
    """(ranks, factor) on all of these, for groups of fewer ranks than were measured."""

    def __post_init__(self) -> None:
        for name in ("all_reduce", "one_way", "exchange", "by_ranks"):
            points, most = getattr(self, name), MOST_FACTOR if name == "by_ranks" else MOST_REACHED
            rising = all(low[0] < high[0] for low, high in pairwise(points))
            if not rising or not all(number > 0 and 0 < share <= most for number, share in points):
                raise FlopwiseError(
                    f"reached.{name} must be positive points by rising first numbers, with values up to {most:g}",
                    hint="[[1e6, 0.16], [1e8, 0.9]]",
                )
            if name != "by_ranks" and not points:
                raise FlopwiseError(f"reached.{name} needs at least one point", hint="[[1e6, 0.16], [1e8, 0.9]]")
            if name != "by_ranks" and any(high[1] / low[1] > high[0] / low[0] for low, high in pairwise(points)):
                raise FlopwiseError(
                    f"reached.{name} has a message that is faster than a smaller one",
                    why="its share rises by more than its bytes",
                    hint="leave that point out",
                )


MOST_REACHED, MOST_FACTOR = 1.1, 100.0
"""Sums inside a switch move less than bus bandwidth counts; eight cards behind one bridge are far slower than two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """One level of connection between devices, the nearest first: inside a node, between nodes, beyond."""

    name: str
    bandwidth_bytes_per_s: Fact
    """Each way, for one device."""
    devices: int | None = None
    """How many devices this level joins; None: as many as are bought."""
    latency_s: Fact | None = None
    topology: Topology = "fully-connected"
    reached: Reached | None = None
    """Of groups that this level alone joins; None: its rate and its latency."""
    sustained: Fact | None = None
    """Share of the rate that long messages reach, where `reached` does not say; None: all of it."""
    trees: bool = True
    """False: sums over several islands were measured to run in rings alone."""

    def __post_init__(self) -> None:
        if self.devices is not None and self.devices < 2:
            raise FlopwiseError(
                f"the network {self.name!r} joins {self.devices} devices", hint="at least 2, or leave `devices` out"
            )
        if self.sustained is not None and self.sustained.value > 1:
            raise FlopwiseError(
                f"sustained of the network {self.name!r} is a share, got {self.sustained.value!r}", hint="0.94"
            )

    @property
    def sustained_bytes_per_s(self) -> float:
        """What long messages reach of the rate."""
        return self.bandwidth_bytes_per_s.value * (self.sustained.value if self.sustained else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A named device with its surroundings. `h100-sxm`, or a TOML of your own."""

    name: str
    title: str
    device: Device
    efficiency: Efficiency
    sources: dict[str, Source]
    link: Link | None = None
    host: Host | None = None
    networks: tuple[Network, ...] = ()
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for where, key in self.list_sources():
            if key not in self.sources:
                raise FlopwiseError(
                    f"{where} names the source {key!r}, which [sources] does not hold",
                    hint=f"add [sources.{key}] with a title and a kind, or use {' or '.join(self.sources)}",
                )

    @property
    def launch_s(self) -> float:
        """What starting a kernel takes of the host."""
        fact = None if self.host is None else self.host.launch_s
        return LAUNCH_S if fact is None else fact.value

    @property
    def call_s(self) -> float:
        """The same of flopwise's own executor, where it starts kernels one by one."""
        fact = None if self.host is None else self.host.call_s
        return CALL_S if fact is None else fact.value

    @property
    def host_is_measured(self) -> bool:
        """Whether somebody has timed how fast this host starts kernels."""
        fact = None if self.host is None else self.host.launch_s
        return fact is not None and self.sources[fact.source].kind == "measured"

    def list_sources(self) -> list[tuple[str, str]]:
        """(where, source key) of every fact below."""
        return _list_sources(self, "")


def _list_sources(value: object, where: str) -> list[tuple[str, str]]:
    if isinstance(value, Fact):
        return [(where, value.source)]
    if isinstance(value, dict):
        pairs = [(f"{where}.{key}", item) for key, item in value.items()]
    elif isinstance(value, tuple):
        pairs = [(f"{where}[{index}]", item) for index, item in enumerate(value)]
    elif hasattr(value, "__dataclass_fields__"):
        pairs = [(f"{where}.{key}".lstrip("."), getattr(value, key)) for key in value.__dataclass_fields__]
        own = getattr(value, "source", None)
        if isinstance(own, str):
            return [(where, own), *(pair for key, item in pairs for pair in _list_sources(item, key))]
    else:
        return []
    return [pair for key, item in pairs for pair in _list_sources(item, key)]
