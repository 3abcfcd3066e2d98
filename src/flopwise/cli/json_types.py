"""What every `-o json` prints, as types: records as they are, and the objects that commands put together of several."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict, get_type_hints

import msgspec

from flopwise.calibrate.report import CalibrationRecord
from flopwise.profile.explain.comparing import ProfileComparison
from flopwise.records.measurement import RunRecord
from flopwise.records.outcome import Interval
from flopwise.records.plan import Forecast, Help, Plan
from flopwise.records.prediction import Prediction
from flopwise.records.profile import Profile, Verdict
from flopwise.references.deepflow.report import DeepflowRecord
from flopwise.references.design.report import DesignRecord
from flopwise.references.validate.protocol import Skipped
from flopwise.references.validate.validation import Peer, ValidatedRow
from flopwise.report.device_plans import OF_FORECAST, OF_PLAN
from flopwise.report.run_comparison import SETTINGS
from flopwise.setup.hardware import Hardware
from flopwise.setup.parallel import Parallel
from flopwise.setup.stack import Stack
from flopwise.store.results import Result
from flopwise.work.lstm import Lstm
from flopwise.work.op import AttentionKernel
from flopwise.work.transformer import Transformer
from flopwise.work.work import Recompute

STATES = ("param", "grad", "optimizer")

# -- put together ----------------------------------------------------------------------------------------------------


def _kinds(record: type, names: tuple[str, ...]) -> dict[str, Any]:
    """Types of a record's fields and properties."""
    hints = get_type_hints(record)
    return {name: hints.get(name) or get_type_hints(getattr(record, name).fget)["return"] for name in names}


def _object(name: str, fields: dict[str, Any]) -> type:
    """An object whose keys follow from those of records."""
    return msgspec.defstruct(name, list(fields.items()))


DevicePlanValues = _object(
    "DevicePlanValues",
    {
        "model": str,
        **_kinds(Plan, OF_PLAN),
        **{f"{kind}_blocks": int for kind in STATES},
        **{f"resident_{kind}_blocks": int for kind in STATES},
        "host_saved": dict[str, int],
        "device_saved": dict[str, int],
        **_kinds(Forecast, OF_FORECAST),
        "device_bytes": int,
        "host_bytes": int,
        "device_bytes_by_owner": dict[str, int],
        "host_bytes_by_owner": dict[str, int],
    },
)
"""A plan's decisions and figures."""


class DevicePlanRecords(TypedDict):
    """The records that a plan's main values come from."""

    plan: Plan
    forecast: Forecast
    reasons: dict[str, str]
    helps: list[Help]
    interval: Interval | None
    notes: list[str]
    searched: int
    simulated: int


CappedPlan = _object(
    "CappedPlan",
    {
        "device_memory_bytes": int,
        "host_memory_bytes": int,
        "fits": bool,
        "best": bool,
        "why_not": str,
        "smallest_device_bytes": int | None,
        "hints": list[str],
        "plan": DevicePlanValues | None,
    },
)
"""One pair of caps of a grid; `plan` is null where nothing fits."""


class Strategy(TypedDict):
    """One way to spread the work."""

    parallel: Parallel
    micro_batch_sequences: int
    recompute: Recompute
    device_bytes: int
    step_s: float
    slower: float
    lost: dict[str, float]


class FigureChange(TypedDict):
    """The best way of a changed question; null where there is none."""

    devices: int
    capacity_bytes: int
    parallel: Parallel | None
    micro_batch_sequences: int | None
    recompute: Recompute | None
    speed: float | None


class ClusterPlanAnswer(TypedDict):
    """A plan for many devices: the best strategy in full, and what it was chosen from."""

    prediction: Prediction
    strategies: list[Strategy]
    what_if: list[FigureChange]
    evaluated: int
    fitting: int
    timed: int


Setting = TypedDict("Setting", {"value": Any, "from": str})


class ErrorWords(TypedDict):
    """What the error stream says too."""

    what: str
    why: str | None
    hint: str | None


class NoFit(TypedDict):
    """Nothing that was asked for fits; the exit code is 1."""

    fits: Literal[False]
    place: Literal["device", "host"]
    needed_bytes: int | None
    error: ErrorWords


class ValidationRecord(TypedDict):
    """How well a published table was predicted; errors are shares."""

    table: str
    n: int
    median_error: float | None
    mean_error: float | None
    p90_error: float | None
    max_error: float | None
    rank_correlation: float | None
    oom_accuracy: NotRequired[float]
    inside: float | None
    inside_without: float | None
    peers: list[Peer]
    anchored: list[Peer]
    protocol: str
    rows: list[ValidatedRow]
    skipped: list[Skipped]


class ModelEntry(TypedDict):
    """What a listing says of a model."""

    model: str
    parameters: int
    layers: int
    hidden: int
    heads: int | None
    kv_heads: int | None
    context: int
    title: str
    source: str


class HardwareEntry(TypedDict):
    """What a listing says of a device."""

    hardware: str
    peak_flops: dict[str, float]
    memory_bytes: int
    bandwidth_bytes_per_s: float | None
    power_w: float | None
    efficiency: str
    aliases: list[str]
    title: str


class StackEntry(TypedDict):
    """What a listing says of a training framework."""

    stack: str
    attention: AttentionKernel
    fusion: str
    constants: dict[str, float]
    aliases: list[str]
    title: str
    source: str


class RunEntry(TypedDict):
    """What a listing says of a run."""

    run: str
    state: str
    model: str | None
    task: str | None
    steps_done: int | None
    steps: int | None
    last_loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    predicted_tokens_per_s: float | None
    prediction_error: float | None
    started: str | None
    ended: str | None
    folder: str
    problem: str | None


class SweepEntry(TypedDict):
    """What a listing says of a sweep: its cells by state."""

    sweep: str
    cells: int
    planned: int
    running: int
    ok: int
    oom: int
    timeout: int
    failed: int
    skipped: int
    steps: int
    repeats: int
    created: str


ResultRow = msgspec.defstruct("ResultRow", [(name, kind, None) for name, kind in get_type_hints(Result).items()])
"""Every key may be missing: `--columns` chooses among them."""


class ComparedFigures(TypedDict):
    """What a cell of two sides has beside its set-up."""

    cell: str
    before_state: str
    after_state: str
    before_runs: int | None
    after_runs: int | None
    before_tokens_per_s: float | None
    after_tokens_per_s: float | None
    time_change: float | None
    time_change_low: float | None
    time_change_high: float | None
    interval_from: str | None
    verdict: str


RunComparison = _object(
    "RunComparison",
    {
        "before": str,
        "after": str,
        "threshold": float,
        "worse": bool,
        "counts": dict[str, int],
        "cells": list[_object("ComparedCell", {**_kinds(Result, SETTINGS), **get_type_hints(ComparedFigures)})],  # type: ignore[misc]
        "differences": dict[str, list[list[str]]],
        "notes": list[str],
    },
)
"""Two sets of runs, cell by cell."""


# -- what is printed by whom -----------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, ...]] = {
    "prediction": (Prediction,),
    "deepflow-prediction": (DeepflowRecord,),
    "settings": (dict[str, Setting],),
    "device-plan": (DevicePlanValues, DevicePlanRecords),
    "capped-plan": (CappedPlan,),
    "cluster-plan": (ClusterPlanAnswer,),
    "does-not-fit": (NoFit,),
    "run": (RunRecord,),
    "profile": (Profile, _object("Judged", {"verdicts": list[Verdict]})),
    "profile-comparison": (ProfileComparison, _object("Told", {"sentences": list[str]})),
    "result": (ResultRow,),
    "run-comparison": (RunComparison,),
    "design": (DesignRecord,),
    "validation": (ValidationRecord,),
    "calibration": (CalibrationRecord,),
    "model": (_object("Built", {"architecture": Literal["transformer", "lstm"]}),),
    "hardware": (Hardware,),
    "stack": (Stack,),
    "technology": (dict[str, Any],),
    "model-entry": (ModelEntry,),
    "hardware-entry": (HardwareEntry,),
    "stack-entry": (StackEntry,),
    "run-entry": (RunEntry,),
    "sweep-entry": (SweepEntry,),
    "environment": (dict[str, str | int | None],),
}
"""What an object says that it is → the types whose keys it has, all of them together."""
ALTERNATIVES = {"model": (Transformer, Lstm)}
"""Types of which an object has the keys of one."""

MEASURED = frozenset({"run", "run-entry", "profile", "profile-comparison", "result", "run-comparison"})
"""Kinds of objects whose numbers may be words, since what was measured need not be finite."""
PRINTED: dict[str, tuple[str, ...]] = {
    "predict": (
        *("prediction", "prediction-list", "device-plan", "settings", "settings-list"),
        *("deepflow-prediction", "deepflow-prediction-list"),
    ),
    "plan": ("device-plan", "capped-plan-list", "cluster-plan", "does-not-fit"),
    "train": ("run", "does-not-fit"),
    "profile show": ("profile", "profile-list"),
    "profile compare": ("profile-comparison",),
    "sweep": ("result-list",),
    "report": ("result-list",),
    "compare": ("run-comparison",),
    "design": ("design",),
    "validate": ("validation",),
    "calibrate": ("calibration",),
    "ls": ("model-entry-list", "hardware-entry-list", "stack-entry-list", "run-entry-list", "sweep-entry-list"),
    "show": ("model", "hardware", "stack", "technology", "run"),
    "env": ("environment",),
}
"""Command → kinds of objects that its `-o json` prints; `-list`: with `rows`."""
