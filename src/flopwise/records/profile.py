"""`Profile`: where a run's time and memory went, under one set of names whoever measured it.

Base units (s, B, FLOP, J, Hz), shares between 0 and 1. A value says where it comes from; what is not known is absent,
never 0. Times, bytes, FLOPs and counts are those of one step on one device where the profile knows its steps, else of
the whole stretch that was profiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from flopwise.base.errors import FlopwiseError
from flopwise.base.shown import Shown
from flopwise.base.units import show_bytes, show_seconds, show_share
from flopwise.records.measurement import MemoryRow

ValueSource = Literal["measured", "counted", "modelled", "ingested"]
"""measured: timed or read from a counter here. counted: exact arithmetic on the work. modelled: an estimate.
ingested: as another tool's file says."""

Unit = Literal["s", "B", "FLOP", "FLOP/B", "1", "count", "share", "W", "J", "Hz", "degC", "1/s"]

KernelClass = Literal["gemm", "attention", "norm", "pointwise", "optimizer", "copy", "communication", "other"]
KERNEL_CLASSES: tuple[KernelClass, ...] = (
    *("gemm", "attention", "norm", "pointwise", "optimizer", "other", "communication", "copy"),
)
"""In the order in which they are charged for time in which several of them run: what computes comes first."""

ProfileFormat = Literal["neuron-text", "neuron-json", "kineto", "nsys", "ncu", "trainer", "memory-snapshot", "flopwise"]


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A number and where it comes from."""

    value: float
    source: ValueSource
    half_ulp: float = 0.0
    """How far the number that was printed may be off for its rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What a name stands for."""

    name: str
    unit: Unit
    group: str
    meaning: str


def _metrics(group: str, *rows: tuple[str, Unit, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name=name, unit=unit, group=group, meaning=meaning) for name, unit, meaning in rows)


METRICS: tuple[Metric, ...] = (
    *_metrics(
        "overall",
        ("step_wall_s", "s", "a step as the host sees it"),
        ("device_span_s", "s", "from first activity to last; of a CPU, the step itself"),
        ("device_busy_s", "s", "something ran or was copied on the device"),
        ("idle_s", "s", "nothing did"),
        ("idle_host_s", "s", "of the idle time: nothing was handed to the device yet"),
        ("idle_copy_s", "s", "of the idle time: the next kernel waited for a copy"),
        ("idle_communication_s", "s", "of the idle time: the next kernel waited for other devices"),
        ("model_flops", "FLOP", "what the model needs, nothing recomputed"),
        ("hardware_flops", "FLOP", "what was executed on the matrix unit"),
        ("layout_flops", "FLOP", "of those executed: transposes and other changes of layout"),
        ("intensity", "FLOP/B", "executed without changes of layout, over device-memory traffic"),
        ("ridge", "FLOP/B", "peak FLOP/s over peak bandwidth"),
        ("kernel_count", "count", "kernels or instructions"),
        ("tokens_per_s", "1/s", "of all devices together"),
        ("samples_per_s", "1/s", "of all devices together"),
    ),
    *_metrics(
        "matrix_engine",
        ("matrix_active_s", "s", "the matrix unit had work"),
        ("matrix_count", "count", "matrix products"),
        ("mfu", "share", "model FLOPs over what the peak could do meanwhile"),
        ("hfu", "share", "executed FLOPs over the same"),
        ("mfu_roof", "share", "the MFU at which device-memory bandwidth would be used up"),
    ),
    *_metrics(
        "other_engines",
        ("vector_active_s", "s", "the vector unit, or kernels that are no products"),
        ("scalar_active_s", "s", "the scalar unit"),
        ("special_active_s", "s", "units for what the others cannot do"),
        ("unit_share", "share", "processors with at least one block of threads"),
        ("occupancy", "share", "threads in flight over those that fit"),
    ),
    *_metrics(
        "mixture",
        ("router_s", "s", "scores of experts and the choice among them, forward and backward"),
        ("permutation_s", "s", "rows handed out to experts, and added up behind them"),
        ("experts_s", "s", "products of experts and their activation"),
        ("mixture_attention_s", "s", "attention in the blocks of a mixture, beside which the others stand"),
        ("busiest_expert", "1", "rows of a block's busiest expert over those of the mean one"),
        ("unused_experts", "share", "experts of a block without a token"),
    ),
    *_metrics(
        "data_movement",
        ("hbm_read_bytes", "B", "read from device memory"),
        ("hbm_write_bytes", "B", "written to device memory"),
        ("min_traffic_bytes", "B", "inputs, weights and state, each once"),
        ("mbu", "share", "device-memory traffic over what its bandwidth could move in the span"),
        ("mbu_min", "share", "the least traffic over the same"),
        ("spill_read_bytes", "B", "of the reads: on-chip memory that had overflowed"),
        ("spill_write_bytes", "B", "of the writes: the same"),
        ("copy_active_s", "s", "a copy engine had work"),
        ("copy_time_s", "s", "copies added up, overlaps counted each"),
        ("copy_exposed_s", "s", "copies with nothing else beside them"),
        ("copy_bytes", "B", "moved by copy engines"),
        ("copy_count", "count", "copies"),
        ("copy_packet_bytes", "B", "mean size of what one copy, or one of its packets, moves"),
    ),
    *_metrics(
        "communication",
        ("comm_active_s", "s", "a collective ran"),
        ("comm_time_s", "s", "collectives added up, overlaps counted each"),
        ("comm_exposed_s", "s", "collectives with no computation beside them"),
        ("comm_bytes", "B", "handed to collectives"),
        ("comm_count", "count", "collectives"),
    ),
    *_metrics(
        "power",
        ("throttle_share", "share", "time under a hardware limit"),
        ("util_limit", "share", "mean limit on the use of the unit"),
        ("throttle_loss", "share", "throughput that the limit took: time share times what was cut"),
        ("clock_mean_hz", "Hz", "mean clock"),
        ("clock_boost_hz", "Hz", "the highest clock of the device"),
        ("power_w", "W", "mean power"),
        ("power_limit_w", "W", "the cap that is set"),
        ("energy_j", "J", "energy"),
        ("temperature_c", "degC", "highest temperature"),
    ),
)
METRIC: dict[str, Metric] = {metric.name: metric for metric in METRICS}
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(metric.group for metric in METRICS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """What shares were divided by."""

    flops: float
    """Dense matrix FLOP/s."""
    bandwidth: float | None
    """Device-memory B/s."""
    number_format: str
    """That the FLOP/s are for."""
    source: str
    """`datasheet`, `measured`, or who says so."""

    def __post_init__(self) -> None:
        for value in (self.flops, self.bandwidth):
            if value is not None and not 1.0 <= value < 1e30:
                raise FlopwiseError(
                    f"a device's peak cannot be {value:g} a second", hint="leave out peaks that are not known"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Time of one kernel, operator or class of them."""

    name: str
    kind: KernelClass
    seconds: float
    """Added up; of a class, the busy time that it is charged for: classes add up to busy."""
    count: float
    flops: float | None = None
    bytes: float | None = None
    """Of device memory, the least that its operands need."""

    def roof_s(self, peaks: Peaks | None) -> float | None:
        """What it would take at the peaks; None where its work or they are not known."""
        if peaks is None or (self.flops is None and self.bytes is None):
            return None
        computing = (self.flops or 0.0) / peaks.flops
        moving = (self.bytes or 0.0) / peaks.bandwidth if peaks.bandwidth else 0.0
        return max(computing, moving)

    def lost_s(self, peaks: Peaks | None) -> float | None:
        """Seconds beyond the roof."""
        roof = self.roof_s(peaks)
        return None if roof is None else max(0.0, self.seconds - roof)


MemoryOwner = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "code",
    "communication",
    "runtime",
    "profiler",
    "fragmentation",
    "other",
]

PLAN_OWNERS: dict[str, MemoryOwner] = {
    "weights": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "residual": "activations",
    "context": "activations",
    "head": "activations",
    "workspace": "runtime",
}
"""Whose memory a plan's owner is in a profile, of a step that ran and of one that was simulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Device memory of one owner."""

    owner: MemoryOwner
    bytes: float
    name: str = ""
    """What the tool that was read calls it."""
    half_ulp: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskTime:
    """One task of our own program: as predicted, and as it ran."""

    name: str
    stream: str
    predicted_start_s: float | None
    predicted_end_s: float | None
    measured_start_s: float | None
    measured_end_s: float | None


@dataclass(frozen=True, slots=True)
class RanTask:
    """Something that ran on the device, as another tool's trace has it."""

    name: str
    kind: KernelClass
    stream: str
    """`compute`, with a number where kernels ran on several streams; `copy`, `network`."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Profile(Shown):
    """One run, one rank of it, or one section of a document of runs."""

    name: str
    """What stands above its column."""
    format: ProfileFormat
    origin: tuple[str, ...] = ()
    """Files that it was read from."""
    device: str | None = None
    rank: int | None = None
    world: int | None = None
    batch_sequences: int | None = None
    """On one device, in one step."""
    sequence_tokens: int | None = None
    precision: str | None = None
    steps: int | None = None
    """That were profiled; None: not known, and nothing is divided by them."""
    peaks: Peaks | None = None
    values: dict[str, SourcedValue] = field(default_factory=dict)
    """By the names of `METRICS`."""
    classes: tuple[Spent, ...] = ()
    """Busy time by class."""
    kernels: tuple[Spent, ...] = ()
    """The longest first."""
    operators: tuple[Spent, ...] = ()
    """What the host called, the longest first."""
    memory: tuple[MemoryUse, ...] = ()
    memory_total_bytes: float | None = None
    memory_capacity_bytes: float | None = None
    memory_over_time: tuple[tuple[float, float], ...] = ()
    """(seconds, bytes in use), thinned out, peaks kept."""
    memory_planned: tuple[MemoryRow, ...] = ()
    """Of our own runs: as planned beside as it was."""
    tasks: tuple[TaskTime, ...] = ()
    """Of our own runs: one step of the window."""
    timeline: tuple[RanTask, ...] = ()
    """Of others' traces: one step as it ran, the longest of what was in it."""
    train_metrics: dict[str, float | str] = field(default_factory=dict)
    """The trainer's own figures, under its names."""
    system: dict[str, str] = field(default_factory=dict)
    """Versions, device, driver, throttle reasons."""
    notes: tuple[str, ...] = ()
    """What its author, or the tool, says of it."""
    warnings: tuple[str, ...] = ()
    """What is damaged, missing or cut off, so that this is only a part."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.values if name not in METRIC]
        if unknown:
            raise FlopwiseError(f"a profile has no value called {unknown[0]!r}", hint=f"one of {', '.join(METRIC)}")

    def get(self, name: str) -> float | None:
        """A value by its name; None: not known."""
        assert name in METRIC, name
        found = self.values.get(name)
        return None if found is None else found.value

    def share(self, name: str, of: str = "device_span_s") -> float | None:
        """One value over another; None where either is not known or the latter is 0."""
        part, whole = self.get(name), self.get(of)
        return None if part is None or not whole else part / whole

    @property
    def figures(self) -> dict[str, str]:
        wall, busy = self.get("step_wall_s"), self.share("device_busy_s", "step_wall_s")
        known_of = {
            "device": self.device,
            "steps": None if self.steps is None else f"{self.steps:,}",
            "step": None if wall is None else show_seconds(wall),
            "device busy": None if busy is None else show_share(busy),
            "memory": None if self.memory_total_bytes is None else show_bytes(self.memory_total_bytes),
            "longest kernel": self.kernels[0].name if self.kernels else None,
            "warnings": "; ".join(self.warnings) or None,
        }
        told = {name: words for name, words in known_of.items() if words is not None}
        return {"profile": self.name, "format": self.format, **told}


def known(source: ValueSource, values: Iterable[tuple[str, float | None]]) -> dict[str, SourcedValue]:
    """Values of one source by name; those that are None are left out."""
    return {name: SourcedValue(float(value), source) for name, value in values if value is not None}


VerdictKind = Literal[
    "host_bound",
    "memory_bound",
    "data_movement_bound",
    "spill_bound",
    "layout_overhead",
    "matrix_underfilled",
    "communication_bound",
    "throttled",
    "compute_bound",
    "capacity",
    "invalid",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clue:
    """A figure that a verdict rests on, and the bound that it is held against."""

    what: str
    """In words: `device busy of the step's wall time`."""
    value: float
    unit: Unit
    bound: float | None = None
    relation: Literal["<", "<=", ">", ">=", ""] = ""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Verdict(Shown):
    """What limits a run."""

    kind: VerdictKind
    share: float | None
    """Of the step's time, what is at stake at most; None: it cannot be told."""
    evidence: tuple[Clue, ...]
    advice: str
    detail: str = ""
    """Of `invalid`: which rule is broken."""

    @property
    def figures(self) -> dict[str, str]:
        at_stake = "not known" if self.share is None else show_share(self.share)
        return {"verdict": self.kind, "at stake": at_stake, "advice": self.advice or self.detail}


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """What a reader found in files."""

    profiles: tuple[Profile, ...]
    native: Any = None
    """The reader's own record where it has one, for printing in the tool's own layout."""
