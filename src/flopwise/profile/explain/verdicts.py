"""What limits a run: one rule a limit, each with the share of time at stake, its evidence and what to do about it.

Shares are of the step's wall time where it is known, else of the device's span, and upper bounds: what is at stake
for two limits may be the same time. That a run lies below the ridge says only which roof is lower; it is bound by
memory when the bandwidth is really used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from flopwise.base.errors import FlopwiseError, unknown_name
from flopwise.profile.explain.invariants import broken, without_impossible
from flopwise.records.profile import Clue, Profile, Verdict


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
    found = [verdict for rule in RULES for verdict in rule(sound, chosen)]
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


def _host_bound(profile: Profile, limits: Thresholds) -> Iterator[Verdict]:
    evidence = []
    at_stake = 0.0
    device = device_share(profile)
    if device is not None and device < limits.host_device_share:
        evidence.append(_less("the device's share of the step's wall time", device, limits.host_device_share))
        at_stake = 1 - device
    waiting = profile.share("idle_host_s")
    if waiting is not None and waiting > limits.host_idle_share:
        evidence.append(_more("the device's time without anything handed to it", waiting, limits.host_idle_share))
        at_stake = min(1.0, at_stake + _of_wall(profile, waiting))
    if evidence:
        yield Verdict(
            kind="host_bound",
            share=at_stake,
            evidence=tuple(evidence),
            advice="larger batches, data loaded ahead in the background, fewer synchronisations, compiled or captured "
            "graphs",
        )


def _memory_bound(profile: Profile, limits: Thresholds) -> Iterator[Verdict]:
    intensity, ridge, use = (profile.get(name) for name in ("intensity", "ridge", "mbu"))
    if use is None or use < limits.memory_use or (intensity is not None and ridge is not None and intensity >= ridge):
        return
    evidence = [_least("device-memory bandwidth in use", use, limits.memory_use)]
    if intensity is not None and ridge is not None:
        evidence.append(
            Clue(what="FLOPs a byte, of the ridge's", value=intensity, unit="FLOP/B", bound=ridge, relation="<")
        )
    yield Verdict(
        kind="memory_bound",
        share=_of_wall(profile, use),
        evidence=tuple(evidence),
        advice="fused kernels, narrower number formats, larger batches, attention that keeps its scores on the chip",
    )


def _data_movement_bound(profile: Profile, limits: Thresholds) -> Iterator[Verdict]:
    exposed, active, use = profile.share("copy_exposed_s"), profile.share("copy_active_s"), profile.get("mbu")
    if exposed is not None:
        if exposed <= limits.copy_exposed_share:
            return
        evidence, share = [_more("copies with no computation beside them", exposed, limits.copy_exposed_share)], exposed
    elif active is not None and active >= limits.copy_active_share and use is not None and use < limits.memory_use:
        evidence, share = [_least("copy engines' activity", active, limits.copy_active_share)], active
        evidence.append(_less("device-memory bandwidth in use", use, limits.memory_use))
    else:
        return
    packet = profile.get("copy_packet_bytes")
    if packet is not None:
        evidence.append(Clue(what="mean size of what is moved at a time", value=packet, unit="B"))
    yield Verdict(
        kind="data_movement_bound",
        share=_of_wall(profile, share),
        evidence=tuple(evidence),
        advice="larger transfers, earlier ones, fewer bytes: less that spills or is offloaded",
    )


def _spill_bound(profile: Profile, limits: Thresholds) -> Iterator[Verdict]:
    share = spill_share(profile)
    if share is None or share <= limits.spill_share:
        return
    moving = profile.share("copy_active_s")
    yield Verdict(
        kind="spill_bound",
        share=None if moving is None else _of_wall(profile, share * moving),
        evidence=(_more("reads of what had overflowed on-chip memory", share, limits.spill_share),),
        advice="smaller tiles or micro-batches, shorter sequences, values computed again instead of kept",
    )


def _layout_overhead(profile: Profile, limits: Thresholds) -> Iterator[Verdict]:
    share = profile.share("layout_flops", "hardware_flops")
    if share is None or share <= limits.layout_share:
        return
    active = profile.share("matrix_active_s")
    yield Verdict(
        kind="layout_overhead",
        share=None if active is None else _of_wall(profile, share * active),
        evidence=(_more("executed FLOPs that only change a layout", share, limits.layout_share),),
        advice="layouts in which products need no transposes; weights kept transposed",
    )


def _matrix_underfilled(profile: Profile, limits: Thresholds) -> Iterator[Verdict]:
    fill, active = matrix_fill(profile), profile.share("matrix_active_s")
    if fill is None or fill >= limits.matrix_fill:
        return
    yield Verdict(
        kind="matrix_underfilled",
        share=None if active is None else _of_wall(profile, active * (1 - fill)),
        evidence=(_less("the peak reached while the matrix unit is active", fill, limits.matrix_fill),),
        advice="larger products: longer sequences, larger batches, packed projections, sizes in multiples of the tile",
    )


def _communication_bound(profile: Profile, limits: Thresholds) -> Iterator[Verdict]:
    exposed, active = profile.share("comm_exposed_s"), profile.share("comm_active_s")
    if exposed is not None:
        if exposed > limits.communication_exposed_share:
            bound = limits.communication_exposed_share
            yield _communication(profile, exposed, _more("collectives with no computation beside them", exposed, bound))
    elif active is not None and active > limits.communication_active_share:
        bound = limits.communication_active_share
        yield _communication(profile, active, _more("collectives, hidden or not", active, bound))


def _communication(profile: Profile, share: float, evidence: Clue) -> Verdict:
    return Verdict(
        kind="communication_bound",
        share=_of_wall(profile, share),
        evidence=(evidence,),
        advice="gradients exchanged while others are still computed, in larger buckets, in fewer bits, or once for "
        "several micro-batches",
    )


def _throttled(profile: Profile, limits: Thresholds) -> Iterator[Verdict]:
    loss = profile.get("throttle_loss")
    if loss is None or loss <= limits.throttle_loss:
        return
    evidence = [_more("throughput that hardware limits took", loss, limits.throttle_loss)]
    for name, what in (("clock_mean_hz", "mean clock"), ("clock_boost_hz", "boost clock"), ("power_w", "mean power")):
        value = profile.get(name)
        if value is not None:
            evidence.append(Clue(what=what, value=value, unit="W" if name == "power_w" else "Hz"))
    yield Verdict(
        kind="throttled",
        share=_of_wall(profile, loss),
        evidence=tuple(evidence),
        advice="a higher power cap or better cooling where they can be had; else kernels that do more for a joule",
    )


def _compute_bound(profile: Profile, limits: Thresholds) -> Iterator[Verdict]:
    active, mfu, roof = profile.share("matrix_active_s"), profile.get("mfu"), profile.get("mfu_roof")
    evidence = []
    if active is not None and active > limits.compute_active_share:
        evidence.append(_more("the matrix unit's active time", active, limits.compute_active_share))
    of_roof = None if mfu is None else mfu / min(1.0, roof or 1.0)
    if of_roof is not None and of_roof > limits.compute_of_roof:
        evidence.append(_more("MFU over the MFU that memory allows", of_roof, limits.compute_of_roof))
    if evidence:
        yield Verdict(
            kind="compute_bound",
            share=_of_wall(profile, active if active is not None else mfu or 0.0),
            evidence=tuple(evidence),
            advice="narrower number formats, better kernels, less that is computed again; more hardware",
        )


def _capacity(profile: Profile, limits: Thresholds) -> Iterator[Verdict]:
    evidence = []
    total, capacity, lost = profile.memory_total_bytes, profile.memory_capacity_bytes, fragmentation(profile)
    if total is not None and capacity and total / capacity > limits.capacity_share:
        evidence.append(_more("the device's memory taken", total / capacity, limits.capacity_share))
    if lost is not None and lost > limits.fragmentation_share:
        evidence.append(_more("memory taken that is in pieces nobody can use", lost, limits.fragmentation_share))
    if evidence:
        yield Verdict(
            kind="capacity",
            share=None,
            evidence=tuple(evidence),
            advice="a smaller micro-batch, less that is kept for backward, or `flopwise plan` with the memory there is",
        )


def _invalid(profile: Profile) -> Iterator[Verdict]:
    for rule in broken(profile):
        yield Verdict(
            kind="invalid",
            share=None,
            evidence=(Clue(what=rule.rule, value=rule.found, unit="1", bound=rule.bound),),
            advice="conclude nothing from this figure; look at how it was measured",
            detail=rule.rule,
        )


Rule = Callable[[Profile, Thresholds], Iterator[Verdict]]
RULES: tuple[Rule, ...] = (
    _host_bound,
    _memory_bound,
    _data_movement_bound,
    _spill_bound,
    _layout_overhead,
    _matrix_underfilled,
    _communication_bound,
    _throttled,
    _compute_bound,
    _capacity,
)


def _less(what: str, value: float, bound: float) -> Clue:
    return Clue(what=what, value=value, unit="share", bound=bound, relation="<")


def _more(what: str, value: float, bound: float) -> Clue:
    return Clue(what=what, value=value, unit="share", bound=bound, relation=">")


def _least(what: str, value: float, bound: float) -> Clue:
    return Clue(what=what, value=value, unit="share", bound=bound, relation=">=")
