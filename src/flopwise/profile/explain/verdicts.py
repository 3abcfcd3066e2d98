"""What limits a run: one rule a limit, each with the share of time at stake, its evidence and what to do about it.

Shares are of the step's wall time where it is known, else of the device's span, and upper bounds: what is at stake
for two limits may be the same time. That a run lies below the ridge says only which roof is lower; it is bound by
memory when the bandwidth is really used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import ge, gt, lt
from pathlib import Path
from typing import Literal

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.base.files import decode, read_table
from flopwise.profile.explain.invariants import broken, without_impossible
from flopwise.records.profile import METRIC, Clue, Profile, Unit, Verdict, VerdictKind

Relation = Literal["<", ">", ">="]


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Where a figure begins to count."""

    host_device_share: float = 0.7
    """Device span over wall time, below which the host limits."""
    host_idle_share: float = 0.1
    """Idle time that waits for the host, of the span."""
    memory_use: float = 0.6
    """Share of the bandwidth from which on memory limits."""
    copy_active_share: float = 0.75
    """Copy engines' activity, of the span, where it is not known what of it was hidden."""
    copy_exposed_share: float = 0.1
    """Copies with no computation beside them, of the span."""
    spill_share: float = 0.25
    """Of the bytes read."""
    layout_share: float = 0.1
    """Of the executed FLOPs."""
    matrix_fill: float = 0.5
    """Model FLOPs over what the matrix unit's active time could do."""
    communication_exposed_share: float = 0.1
    communication_active_share: float = 0.2
    """Where it is not known what of it was hidden."""
    throttle_loss: float = 0.05
    compute_active_share: float = 0.8
    """Matrix unit's active time, of the span."""
    compute_of_roof: float = 0.6
    """MFU over the MFU that memory allows."""
    capacity_share: float = 0.9
    fragmentation_share: float = 0.15

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= 1:
                raise FlopwiseError(
                    f"the threshold {field.name} cannot be {value:g}",
                    why="it is a share",
                    hint=f"{field.name}={field.default}",
                )


def thresholds_of(words: dict[str, float]) -> Thresholds:
    """The usual ones, but for those that are named."""
    names = {field.name for field in fields(Thresholds)}
    for name in words:
        if name not in names:
            raise unknown_name("threshold", name, names, hint="--threshold host_device_share=0.6")
    return Thresholds(**words)


def verdicts(profile: Profile, thresholds: Thresholds | None = None) -> tuple[Verdict, ...]:
    """What limits the run, the most time at stake first; figures that cannot be right last."""
    chosen, sound = thresholds or Thresholds(), without_impossible(profile)
    found = [verdict for rule in RULES if (verdict := rule(sound, chosen)) is not None]
    found.sort(key=lambda verdict: -1.0 if verdict.share is None else -verdict.share - 1.0)
    return (*found, *_invalid(profile))


def first_verdict(profile: Profile) -> str | None:
    """What limits a run most, in a word."""
    return next((verdict.kind for verdict in verdicts(profile) if verdict.kind != "invalid"), None)


# -- what the rules ask --------------------------------------------------------------------------------------------


def device_share(profile: Profile) -> float | None:
    """The device's span over the step's wall time."""
    return profile.share("device_span_s", "step_wall_s")


def spill_share(profile: Profile) -> float | None:
    """Of the bytes read, those that had overflowed."""
    return profile.share("spill_read_bytes", "hbm_read_bytes")


def matrix_fill(profile: Profile) -> float | None:
    """Model FLOPs over what the peak could do while the matrix unit was active."""
    active, flops = profile.get("matrix_active_s"), profile.get("model_flops")
    if active is None or flops is None or profile.peaks is None:
        return None
    possible = active * profile.peaks.flops
    return flops / possible if possible > 0 else None


def fragmentation(profile: Profile) -> float | None:
    """Of the memory taken, what nobody can use."""
    if not profile.memory_total_bytes:
        return None
    lost = sum(use.bytes for use in profile.memory if use.owner == "fragmentation")
    return lost / profile.memory_total_bytes


def _of_wall(profile: Profile, share: float) -> float:
    """A share of the span as one of the wall time, where that is known."""
    return min(1.0, share) * min(1.0, device_share(profile) or 1.0)


# -- rules ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitWords:
    """What a verdict is called, what a run does that has it, and what to do about it."""

    title: str
    predicate: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _WordTable:
    limits: dict[VerdictKind, LimitWords]
    clauses: dict[str, str]


_WORDS = decode(read_table(Path(__file__).with_name("verdicts.toml")), _WordTable, "verdicts.toml")
LIMITS, CLAUSES = _WORDS.limits, _WORDS.clauses


def _host_bound(profile: Profile, limits: Thresholds) -> Verdict | None:
    device, waiting = device_share(profile), profile.share("idle_host_s")
    evidence = [
        *_clue("the device's share of the step's wall time", device, "<", limits.host_device_share),
        *_clue("the device's time without anything handed to it", waiting, ">", limits.host_idle_share),
    ]
    at_stake = 1 - device if device is not None and device < limits.host_device_share else 0.0
    if waiting is not None and waiting > limits.host_idle_share:
        at_stake = min(1.0, at_stake + _of_wall(profile, waiting))
    return _verdict("host_bound", at_stake, evidence)


def _memory_bound(profile: Profile, limits: Thresholds) -> Verdict | None:
    intensity, ridge, use = (profile.get(name) for name in ("intensity", "ridge", "mbu"))
    evidence = _clue("device-memory bandwidth in use", use, ">=", limits.memory_use)
    if intensity is not None and ridge is not None and evidence:
        evidence += _clue("FLOPs a byte, of the ridge's", intensity, "<", ridge, unit="FLOP/B")
        if len(evidence) == 1:
            return None
    return _verdict("memory_bound", _of_wall(profile, use or 0.0), evidence)


def _data_movement_bound(profile: Profile, limits: Thresholds) -> Verdict | None:
    exposed, active, use = profile.share("copy_exposed_s"), profile.share("copy_active_s"), profile.get("mbu")
    if exposed is not None:
        evidence = _clue("copies with no computation beside them", exposed, ">", limits.copy_exposed_share)
    else:
        evidence = _clue("copy engines' activity", active, ">=", limits.copy_active_share)
        unused = _clue("device-memory bandwidth in use", use, "<", limits.memory_use)
        evidence = [*evidence, *unused] if evidence and unused else []
    packet = profile.get("copy_packet_bytes")
    if packet is not None and evidence:
        evidence.append(Clue(what="mean size of what is moved at a time", value=packet, unit="B"))
    share = active if exposed is None else exposed
    return _verdict("data_movement_bound", _of_wall(profile, share or 0.0), evidence)


def _spill_bound(profile: Profile, limits: Thresholds) -> Verdict | None:
    share, moving = spill_share(profile), profile.share("copy_active_s")
    at_stake = None if moving is None else _of_wall(profile, (share or 0.0) * moving)
    clue = _clue("reads of what had overflowed on-chip memory", share, ">", limits.spill_share)
    return _verdict("spill_bound", at_stake, clue)


def _layout_overhead(profile: Profile, limits: Thresholds) -> Verdict | None:
    share, active = profile.share("layout_flops", "hardware_flops"), profile.share("matrix_active_s")
    at_stake = None if active is None else _of_wall(profile, (share or 0.0) * active)
    clue = _clue("executed FLOPs that only change a layout", share, ">", limits.layout_share)
    return _verdict("layout_overhead", at_stake, clue)


def _matrix_underfilled(profile: Profile, limits: Thresholds) -> Verdict | None:
    fill, active = matrix_fill(profile), profile.share("matrix_active_s")
    at_stake = None if active is None else _of_wall(profile, active * (1 - (fill or 0.0)))
    clue = _clue("the peak reached while the matrix unit is active", fill, "<", limits.matrix_fill)
    return _verdict("matrix_underfilled", at_stake, clue)


def _communication_bound(profile: Profile, limits: Thresholds) -> Verdict | None:
    share, bound = profile.share("comm_exposed_s"), limits.communication_exposed_share
    what = "collectives with no computation beside them"
    if share is None:
        share, bound = profile.share("comm_active_s"), limits.communication_active_share
        what = "collectives, hidden or not"
    return _verdict("communication_bound", _of_wall(profile, share or 0.0), _clue(what, share, ">", bound))


def _judge_throttling(profile: Profile, limits: Thresholds) -> Verdict | None:
    loss = profile.get("throttle_loss")
    evidence = _clue("throughput that hardware limits took", loss, ">", limits.throttle_loss)
    for name, what in (("clock_mean_hz", "mean clock"), ("clock_boost_hz", "boost clock"), ("power_w", "mean power")):
        value = profile.get(name)
        if value is not None and evidence:
            evidence.append(Clue(what=what, value=value, unit=METRIC[name].unit))
    return _verdict("throttled", _of_wall(profile, loss or 0.0), evidence)


def _compute_bound(profile: Profile, limits: Thresholds) -> Verdict | None:
    active, mfu, roof = profile.share("matrix_active_s"), profile.get("mfu"), profile.get("mfu_roof")
    of_roof = None if mfu is None else mfu / min(1.0, roof or 1.0)
    evidence = [
        *_clue("the matrix unit's active time", active, ">", limits.compute_active_share),
        *_clue("MFU over the MFU that memory allows", of_roof, ">", limits.compute_of_roof),
    ]
    return _verdict("compute_bound", _of_wall(profile, active if active is not None else mfu or 0.0), evidence)


def _capacity(profile: Profile, limits: Thresholds) -> Verdict | None:
    total, capacity, lost = profile.memory_total_bytes, profile.memory_capacity_bytes, fragmentation(profile)
    taken = total / capacity if total is not None and capacity else None
    evidence = [
        *_clue("the device's memory taken", taken, ">", limits.capacity_share),
        *_clue("memory taken that is in pieces nobody can use", lost, ">", limits.fragmentation_share),
    ]
    return _verdict("capacity", None, evidence)


def _invalid(profile: Profile) -> Iterator[Verdict]:
    for rule in broken(profile):
        clue = Clue(what=rule.rule, value=rule.found, unit="1", bound=rule.bound)
        yield Verdict(kind="invalid", share=None, evidence=(clue,), advice=LIMITS["invalid"].advice, detail=rule.rule)


Rule = Callable[[Profile, Thresholds], Verdict | None]
RULES: tuple[Rule, ...] = (
    *(_host_bound, _memory_bound, _data_movement_bound, _spill_bound, _layout_overhead, _matrix_underfilled),
    *(_communication_bound, _judge_throttling, _compute_bound, _capacity),
)


def _verdict(kind: VerdictKind, at_stake: float | None, evidence: Sequence[Clue]) -> Verdict | None:
    """None where there is no evidence for it."""
    if not evidence:
        return None
    return Verdict(kind=kind, share=at_stake, evidence=tuple(evidence), advice=LIMITS[kind].advice)


RELATIONS: dict[Relation, Callable[[float, float], bool]] = {"<": lt, ">": gt, ">=": ge}


def _clue(what: str, value: float | None, relation: Relation, bound: float, *, unit: Unit = "share") -> list[Clue]:
    """The figure, where it is known and stands in that relation to its bound."""
    if value is None or not RELATIONS[relation](value, bound):
        return []
    return [Clue(what=what, value=value, unit=unit, bound=bound, relation=relation)]
