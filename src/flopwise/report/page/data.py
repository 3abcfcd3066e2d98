"""What the page shows, as JSON: rows by column, and for each run its memory, its step, its operators and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import isfinite
from typing import Any

from numpy import quantile

from flopwise.base.units import show_bytes, show_seconds, show_share
from flopwise.catalog.load import hardware_names, model_names
from flopwise.records.measurement import MemoryRow, RunRecord, StepRecord
from flopwise.records.profile import METRIC, Profile, RanTask, Spent, TaskTime, Unit, Verdict
from flopwise.report.document import Table
from flopwise.report.page.about import Pairs, log_lines, setup_pairs, version_pairs
from flopwise.report.page.progress import RunProgress
from flopwise.report.profile_timeline import Span, kind_of, measured_span, predicted_span
from flopwise.report.profile_words import evidence_words, stake_words, title, why_paragraph
from flopwise.report.profiles import class_shares, engine_shares
from flopwise.report.runs import model_name
from flopwise.report.words import safe, scale_figure
from flopwise.store.results import FIELDS, Result
from flopwise.store.runs import to_text
from flopwise.store.statistics import steady_seconds, traced_steps
from flopwise.work.parameters import Place

MOST_TASKS = 12_000
"""That a timeline draws: the longest."""
MOST_OPERATORS = 200
MOST_STEPS = 300
MOST_DETAIL_BYTES = 16 * 2**20
"""Of the runs' details that a page carries; what is beyond is left out, and the page says so."""
UNACCOUNTED = "unaccounted"
EVALUATION = "eval_loss"

Cell = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBar:
    """One place's memory by owner, as planned and as it was."""

    place: Place
    owners: tuple[str, ...]
    planned_bytes: tuple[int, ...] | None
    """None: nobody planned it."""
    measured_bytes: tuple[int, ...] | None
    """None: the run has not been measured."""
    cap_bytes: int | None
    """That was set, or all that the place has."""
    spare_bytes: int | None
    unaccounted_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """One step's tasks, a list for each of their fields; times are nanoseconds from the first task's start."""

    kinds: tuple[str, ...]
    streams: tuple[str, ...]
    name: tuple[str, ...]
    kind: tuple[int, ...]
    stream: tuple[int, ...]
    predicted_start_ns: tuple[int | None, ...]
    predicted_end_ns: tuple[int | None, ...]
    measured_start_ns: tuple[int | None, ...]
    measured_end_ns: tuple[int | None, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRows:
    """What took the time, the longest first, a list for each of their fields."""

    name: tuple[str, ...]
    kind: tuple[str, ...]
    seconds: tuple[float, ...]
    count: tuple[float, ...]
    flops: tuple[float | None, ...]
    bytes: tuple[float | None, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roof:
    """A peak: FLOP/s of `compute`, B/s of `memory`, `link` and `network`."""

    kind: str
    per_s: float
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A name, its seconds and its share of the device's time."""

    name: str
    seconds: float
    share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictWords:
    """A verdict as people read it."""

    title: str
    share: float | None
    stake: str
    evidence: str
    advice: str
    is_invalid: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDetail:
    """All that the page shows of one run beside its row; a part that is not known is empty."""

    run: str
    model: str
    state: str
    reason: str | None = None
    started: str | None = None
    ended: str | None = None
    is_profiled: bool = False
    memory: tuple[MemoryBar, ...] = ()
    tasks: Tasks | None = None
    operators: OperatorRows | None = None
    roofs: tuple[Roof, ...] = ()
    device: str | None = None
    span_s: float | None = None
    step_s: float | None = None
    """The median of the steps that count: not traced, and not of the warm-up. The one step time of the page."""
    step_s_p20: float | None = None
    step_s_p80: float | None = None
    traced: tuple[int, int] | None = None
    """The first and the last of the steps that were traced, which slows them down."""
    steps_asked: int | None = None
    setup: Pairs = ()
    versions: Pairs = ()
    log: tuple[str, ...] = ()
    will_be_profiled: bool = False
    """It goes on, and was asked to be."""
    classes: tuple[Share, ...] = ()
    engines: tuple[Share, ...] = ()
    idle: tuple[Share, ...] = ()
    traffic: tuple[tuple[str, str, str], ...] = ()
    """(what it is, the figure, what the name means)."""
    verdicts: tuple[VerdictWords, ...] = ()
    why: str = ""
    steps: dict[str, tuple[Cell, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    """Further tables, of a profile that is shown alone."""
    memory_over_time: tuple[tuple[float, float], ...] = ()
    memory_words: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedLine:
    """Device time over the batch, as a line through profiles."""

    words: str
    fixed_s: float
    per_sequence_s: float
    least_batch: int
    """From which on the line holds."""
    points: tuple[tuple[int, float, str], ...]
    """Batch, seconds and name of every profile, also of those that the line leaves out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageData:
    """A page: its rows, and the details of the runs among them by the runs' names."""

    title: str
    created: str
    """Local time with its offset, ISO 8601."""
    rows: Sequence[Result]
    details: Mapping[str, RunDetail] = field(default_factory=dict)
    live: bool = False
    """Served, and asked for again every few seconds."""
    progress: Mapping[str, RunProgress] = field(default_factory=dict)
    """Of runs that go on: how far they are."""
    foreseen: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Place of a row that nobody has run → what the planner shows of its prediction."""
    left_out: int = 0
    """Runs among the rows whose details are there and were not asked for: there are too many for a page."""
    of_profiles: bool = False
    """The rows are profiles and no runs: there is no sweep to look across."""
    said: Sequence[str] = ()
    """What follows from the rows together, before all else."""
    tables: Sequence[Table] = ()
    lines: Sequence[FittedLine] = ()
    opens: str = ""
    """The tab that it opens on; nothing: the first."""
    marked: Sequence[str] = ()
    """Runs that are compared to begin with."""
    planner: Mapping[str, Any] | None = None
    """What the planner begins with, and in a file all that it can answer; None: there is no planner."""


def now() -> str:
    """When a page is made."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


# -- JSON ------------------------------------------------------------------------------------------------------------


def page_json(page: PageData) -> str:
    """`data.json`: title, time, rows by column, and as many details as there is room for."""
    details, left_out = _with_room(page.details)
    head = {
        "title": page.title,
        "created": page.created,
        "live": page.live,
        "count": len(page.rows),
        "names": FIELDS,
        "columns": [column([getattr(row, name) for row in page.rows]) for name in FIELDS],
        "left_out": page.left_out + left_out,
        "progress": page.progress,
        "known": _known_names(page.rows),
        **({"foreseen": {str(place): view for place, view in page.foreseen.items()}} if page.foreseen else {}),
        **({"of_profiles": True} if page.of_profiles else {}),
        **({"said": page.said, "tables": page.tables, "lines": page.lines} if page.said or page.tables else {}),
        **({"opens": page.opens, "marked": page.marked} if page.opens else {}),
        **({"planner": page.planner} if page.planner is not None else {}),
    }
    listed = ",".join(f"{to_text(name, indent=0)}:{text}" for name, text in details.items())
    return f'{to_text(head, indent=0)[:-1]},"details":{{{listed}}}}}'


def _known_names(rows: Sequence[Result]) -> dict[str, list[str]]:
    """Of the rows' models and devices those that a command line knows by name anywhere."""
    return {
        "models": sorted({str(row.model) for row in rows} & set(model_names())),
        "hardware": sorted({str(row.hardware) for row in rows} & set(hardware_names())),
    }


def detail_json(detail: RunDetail) -> str:
    """`run/ID.json`: one run's details."""
    return to_text(detail, indent=0)


def _with_room(details: Mapping[str, RunDetail]) -> tuple[dict[str, str], int]:
    """Details as JSON until the room is used up, and how many were left out."""
    kept: dict[str, str] = {}
    room = MOST_DETAIL_BYTES
    for name, detail in details.items():
        text = detail_json(detail)
        if len(text) > room:
            continue
        room -= len(text)
        kept[name] = text
    return kept, len(details) - len(kept)


def column(values: Sequence[Cell]) -> dict[str, Any] | None:
    """Values of one column as shortly as they can be written: None where all are, one value for all, words once."""
    first = values[0] if values else None
    if all(value == first and type(value) is type(first) for value in values):
        return None if first is None else {"same": first}
    if all(value is None or isinstance(value, str) for value in values):
        words = list(dict.fromkeys(values))
        if 2 * len(words) <= len(values):
            places = {word: place for place, word in enumerate(words)}
            return {"words": words, "at": [places[value] for value in values]}
    return {"values": list(values)}


def inline_json(text: str) -> str:
    """JSON that may stand within a `script` element: nothing in it ends the element or begins a comment."""
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


# -- one run ---------------------------------------------------------------------------------------------------------


def run_detail(
    record: RunRecord,
    profile: Profile | None,
    verdicts: Sequence[Verdict],
    steps: Sequence[StepRecord] = (),
    log: str = "",
) -> RunDetail:
    """A run as the page shows it, from its record, and where they are known its profile, verdicts, steps and log."""
    low_s, step_s, high_s = _step_times(record, steps)
    traced = traced_steps(record)
    known = RunDetail(
        run=record.id,
        model=model_name(record),
        state="ok" if record.state == "done" else record.state,
        reason=record.reason,
        started=record.started,
        ended=record.ended,
        memory=_memory(record, profile),
        roofs=_roofs(record, profile),
        step_s=step_s,
        step_s_p20=low_s,
        step_s_p80=high_s,
        traced=(traced[0], traced[-1]) if traced else None,
        steps_asked=record.training.steps,
        setup=setup_pairs(record),
        versions=version_pairs(record),
        log=log_lines(log),
        will_be_profiled=record.state == "running" and bool(record.request.get("profile")),
        steps=_steps(steps),
    )
    return known if profile is None else with_profile(known, profile, verdicts)


def _step_times(record: RunRecord, steps: Sequence[StepRecord]) -> tuple[float, float, float] | tuple[None, None, None]:
    """p20, median and p80 of the steps that count, as the run's measurement has them, else as they are so far."""
    run = record.measurement
    if run is not None:
        return run.step_s_p20, run.step_s, run.step_s_p80
    times = steady_seconds(record, steps)
    if not len(times):
        return None, None, None
    low, middle, high = (float(value) for value in quantile(times, (0.2, 0.5, 0.8)))
    return low, middle, high


def with_profile(known: RunDetail, profile: Profile, verdicts: Sequence[Verdict]) -> RunDetail:
    """What is known, and where the time went."""
    return replace(
        known,
        is_profiled=True,
        tasks=_tasks(profile.tasks) or _timeline(profile.timeline),
        operators=_operators(profile.operators or profile.kernels),
        device=profile.device,
        span_s=_finite(profile.get("device_span_s")),
        step_s=known.step_s or _finite(profile.get("step_wall_s")),
        classes=_shares(class_shares(profile)),
        engines=_shares(engine_shares(profile)),
        idle=_idle(profile),
        traffic=_traffic(profile),
        verdicts=tuple(_verdict(verdict) for verdict in verdicts),
        why=why_paragraph(profile, verdicts),
        notes=(*profile.warnings, *profile.notes),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


# -- memory ----------------------------------------------------------------------------------------------------------


def _memory(record: RunRecord, profile: Profile | None) -> tuple[MemoryBar, ...]:
    rows = record.measurement.memory if record.measurement else profile.memory_planned if profile else ()
    if not rows:
        return _planned_in_all(record)
    caps: dict[Place, int | None] = {
        "device": _cap(record, "device_memory_bytes") or (cap_of(profile) if profile else None),
        "host": _cap(record, "host_memory_bytes"),
    }
    return planned_bars(rows, caps)


def planned_bars(rows: Sequence[MemoryRow], caps: Mapping[Place, int | None]) -> tuple[MemoryBar, ...]:
    """A bar for each place, as planned and as it was."""
    places: tuple[Place, ...] = ("device", "host")
    bars = [_bar(place, [row for row in rows if row.place == place], caps[place]) for place in places]
    return tuple(bar for bar in bars if bar.owners)


def _bar(place: Place, rows: Sequence[MemoryRow], cap: int | None) -> MemoryBar:
    used = [row for row in rows if row.planned_bytes or row.measured_bytes or row.owner == UNACCOUNTED]
    ordered = sorted(used, key=lambda row: row.owner == UNACCOUNTED)
    planned = [row.planned_bytes for row in ordered]
    return memory_bar(place, [row.owner for row in ordered], planned, [row.measured_bytes for row in ordered], cap)


def memory_bar(
    place: Place,
    owners: Sequence[str],
    planned: Sequence[int] | None,
    measured: Sequence[int] | None,
    cap: int | None,
) -> MemoryBar:
    """A place's memory; what is spare is told of what was measured, else of what was planned."""
    unaccounted = dict(zip(owners, measured, strict=True)).get(UNACCOUNTED) if measured is not None else None
    taken = sum(measured if measured is not None else planned or ())
    return MemoryBar(
        place=place,
        owners=tuple(safe(owner, 40) for owner in owners),
        planned_bytes=None if planned is None else tuple(planned),
        measured_bytes=None if measured is None else tuple(measured),
        cap_bytes=cap,
        spare_bytes=None if cap is None else cap - taken,
        unaccounted_bytes=unaccounted,
    )


def _planned_in_all(record: RunRecord) -> tuple[MemoryBar, ...]:
    """Of a run that was not measured: what its plan takes in all."""
    expected = record.plan.get("expected")
    if not isinstance(expected, dict):
        return ()
    places: tuple[Place, ...] = ("device", "host")
    bars = []
    for place in places:
        size, cap = expected.get(f"{place}_bytes"), _cap(record, f"{place}_memory_bytes")
        if isinstance(size, int | float) and size > 0:
            bars.append(memory_bar(place, ["planned in all"], [int(size)], None, cap))
    return tuple(bars)


def _cap(record: RunRecord, name: str) -> int | None:
    for table in (record.plan, record.request):
        value = table.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None


def cap_of(profile: Profile) -> int | None:
    """All that the device has."""
    size = profile.memory_capacity_bytes
    return int(size) if size is not None and isfinite(size) and size > 0 else None


# -- the step --------------------------------------------------------------------------------------------------------


def _tasks(tasks: Sequence[TaskTime]) -> Tasks | None:
    spans = [(task, predicted_span(task), measured_span(task)) for task in tasks]
    known = [(task, before, after) for task, before, after in spans if before or after]
    if not known:
        return None
    kept = known
    if len(known) > MOST_TASKS:
        longest = sorted(range(len(known)), key=lambda place: -max(map(_length, known[place][1:])))
        kept = [known[place] for place in sorted(longest[:MOST_TASKS])]
    kinds = list(dict.fromkeys(safe(kind_of(task), 40) for task, _, _ in kept))
    streams = list(dict.fromkeys(safe(task.stream, 20) for task, _, _ in kept))
    befores, afters = [before for _, before, _ in known if before], [after for _, _, after in known if after]
    begins = [min((span[0] for span in side), default=0.0) for side in (befores, afters)]
    left_out = len(known) - len(kept)
    return Tasks(
        kinds=tuple(kinds),
        streams=tuple(streams),
        name=tuple(safe(task.name, 60) for task, _, _ in kept),
        kind=tuple(kinds.index(safe(kind_of(task), 40)) for task, _, _ in kept),
        stream=tuple(streams.index(safe(task.stream, 20)) for task, _, _ in kept),
        predicted_start_ns=tuple(_nanoseconds(before, 0, begins[0]) for _, before, _ in kept),
        predicted_end_ns=tuple(_nanoseconds(before, 1, begins[0]) for _, before, _ in kept),
        measured_start_ns=tuple(_nanoseconds(after, 0, begins[1]) for _, _, after in kept),
        measured_end_ns=tuple(_nanoseconds(after, 1, begins[1]) for _, _, after in kept),
        note=f"The {len(kept):,} longest of {len(known):,} tasks are drawn." if left_out else "",
    )


def _timeline(ran: Sequence[RanTask]) -> Tasks | None:
    """What another tool saw run."""
    if not ran:
        return None
    kinds = list(dict.fromkeys(task.kind for task in ran))
    streams = list(dict.fromkeys(safe(task.stream, 20) for task in ran))
    none = (None,) * len(ran)
    return Tasks(
        kinds=tuple(kinds),
        streams=tuple(streams),
        name=tuple(safe(task.name, 60) for task in ran),
        kind=tuple(kinds.index(task.kind) for task in ran),
        stream=tuple(streams.index(safe(task.stream, 20)) for task in ran),
        predicted_start_ns=none,
        predicted_end_ns=none,
        measured_start_ns=tuple(round(task.start_s * 1e9) for task in ran),
        measured_end_ns=tuple(round(task.end_s * 1e9) for task in ran),
    )


def _length(span: Span | None) -> float:
    return 0.0 if span is None else span[1] - span[0]


def _nanoseconds(span: Span | None, side: int, begin: float) -> int | None:
    return None if span is None else round((span[side] - begin) * 1e9)


def _operators(spent: Sequence[Spent]) -> OperatorRows | None:
    sound = [each for each in spent if isfinite(each.seconds) and each.seconds > 0]
    kept = sound[:MOST_OPERATORS]
    if not kept:
        return None
    more = len(sound) - len(kept)
    return OperatorRows(
        name=tuple(safe(each.name) for each in kept),
        kind=tuple(each.kind for each in kept),
        seconds=tuple(each.seconds for each in kept),
        count=tuple(each.count for each in kept),
        flops=tuple(_finite(each.flops) for each in kept),
        bytes=tuple(_finite(each.bytes) for each in kept),
        note=f"{more:,} more are shorter." if more else "",
    )


def roofs_of(profile: Profile | None) -> tuple[Roof, ...]:
    """Peaks of one device; of the link and the network what was moved while they had work, where that was measured."""
    if profile is None:
        return ()
    roofs: list[Roof] = []
    peaks = profile.peaks
    if peaks is not None:
        form, source = safe(peaks.number_format, 20), safe(peaks.source, 40)
        roofs.append(Roof(kind="compute", per_s=peaks.flops, words=f"{form} peak, {source}"))
        if peaks.bandwidth:
            roofs.append(Roof(kind="memory", per_s=peaks.bandwidth, words=f"device memory, {source}"))
    for kind, moved, active in (("link", "copy_bytes", "copy_active_s"), ("network", "comm_bytes", "comm_active_s")):
        size, taken = profile.get(moved), profile.get(active)
        if size and taken and isfinite(size / taken):
            roofs.append(Roof(kind=kind, per_s=size / taken, words=f"{kind}, as used here"))
    return tuple(roofs)


def _roofs(record: RunRecord, profile: Profile | None) -> tuple[Roof, ...]:
    """The profile's; without its peaks, what the run was measured against."""
    found, run = roofs_of(profile), record.measurement
    if run is None or not run.peak_flops or (profile is not None and profile.peaks is not None):
        return found
    form = safe(run.peak_format or "", 20)
    return (Roof(kind="compute", per_s=run.peak_flops / run.devices, words=f"{form} peak".strip()), *found)


# -- where the time went ---------------------------------------------------------------------------------------------

IDLE = {
    "idle_host_s": "nothing was handed over yet",
    "idle_copy_s": "waited for a copy",
    "idle_communication_s": "waited for other devices",
}
TRAFFIC = {
    "mfu": "MFU",
    "hfu": "HFU",
    "mbu": "memory bandwidth used",
    "hbm_read_bytes": "read from device memory",
    "hbm_write_bytes": "written to device memory",
    "spill_read_bytes": "spilled and read again",
    "copy_bytes": "copied over the link",
    "copy_exposed_s": "copies in the open",
    "comm_bytes": "handed to collectives",
    "comm_exposed_s": "collectives in the open",
    "power_w": "mean power",
    "clock_mean_hz": "mean clock",
    "throttle_loss": "lost to hardware limits",
}


def _shares(rows: Sequence[tuple[str, float, float | None]]) -> tuple[Share, ...]:
    return tuple(
        Share(name=name, seconds=taken, share=_finite(share)) for name, taken, share in rows if isfinite(taken)
    )


def _idle(profile: Profile) -> tuple[Share, ...]:
    found = [(words, profile.get(name), profile.share(name)) for name, words in IDLE.items()]
    return _shares([(words, taken, share) for words, taken, share in found if taken])


def _traffic(profile: Profile) -> tuple[tuple[str, str, str], ...]:
    found = [(words, name, profile.get(name)) for name, words in TRAFFIC.items()]
    return tuple(
        (words, _figure(value, METRIC[name].unit), METRIC[name].meaning) for words, name, value in found if value
    )


def _figure(value: float, unit: Unit) -> str:
    writers: dict[Unit, Callable[[float], str]] = {"B": show_bytes, "s": show_seconds, "share": show_share}
    return writers[unit](value) if unit in writers and isfinite(value) else scale_figure(value, unit)


def _verdict(verdict: Verdict) -> VerdictWords:
    return VerdictWords(
        title=title(verdict),
        share=_finite(verdict.share),
        stake=stake_words(verdict),
        evidence=evidence_words(verdict),
        advice=safe(verdict.advice, 400),
        is_invalid=verdict.kind == "invalid",
    )


def _steps(steps: Sequence[StepRecord]) -> dict[str, tuple[Cell, ...]]:
    """Every n-th step so that there are not too many, and always the last."""
    if not steps:
        return {}
    stride = -(-len(steps) // MOST_STEPS)
    kept = [step for place, step in enumerate(steps) if place % stride == 0 or place == len(steps) - 1]
    names = ("step", "step_s", "predicted_s", "loss", "learning_rate", "gradient_norm", "exposed_copy_s")
    columns: dict[str, tuple[Cell, ...]] = {name: tuple(getattr(step, name) for step in kept) for name in names}
    # Evaluations are few, and none is left out.
    evaluated = [step for step in steps if step.evaluation and EVALUATION in step.evaluation][-MOST_STEPS:]
    columns["eval_step"] = tuple(step.step for step in evaluated)
    columns["eval_loss"] = tuple(step.evaluation[EVALUATION] for step in evaluated if step.evaluation)
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}
