"""`Result`: one measurement, or one that could not be had, as a flat row with its unit in every name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Literal

from flopwise.base.shown import Shown
from flopwise.base.units import AUTO, show_count, show_share, significant
from flopwise.records.measurement import RunRecord
from flopwise.records.plan import save_words
from flopwise.records.profile import Profile
from flopwise.setup.written import CellSetup, WrittenBatch, words_of
from flopwise.store.cells import Attempt, Cell

Source = Literal["measured", "predicted", "imported"]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Result(Shown, WrittenBatch):
    """A row of `results.csv`. Unknown is None. Rates are those of all devices together unless a name says otherwise."""

    cell: str | None
    run: str | None = None
    attempt: int | None = None
    repeat: int | None = None
    state: str
    """A cell's state; `running`, `interrupted` or `unreadable` too for runs that no sweep has started."""
    reason: str | None = None
    source: Source = "measured"

    model: str | None = None
    batch_sequences: int | None = None
    micro_batch_sequences: int | None = None
    accumulation_steps: int | None = None
    batch_tokens: int | None = None
    recompute: str | None = None
    """What backward makes again: `none`, a policy's name, or how many of a plan's chunks are kept at which level."""
    sharding: str | None = None
    device_cap_bytes: int | None = None
    host_cap_bytes: int | None = None
    n_params: int | None = None

    steps: int | None = None
    """That were measured, those of the warm-up left out."""
    step_s: float | None = None
    """Median."""
    step_s_p20: float | None = None
    step_s_p80: float | None = None
    tokens_per_s: float | None = None
    """Padding left out."""
    padded_tokens_per_s: float | None = None
    tokens_per_s_p20: float | None = None
    tokens_per_s_p80: float | None = None
    tokens_per_s_per_device: float | None = None
    samples_per_s: float | None = None
    model_flops_per_s_per_device: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    convention: str | None = None
    peak_flops: float | None = None
    """Of all devices together."""
    peak_format: str | None = None
    last_loss: float | None = None

    device_bytes: int | None = None
    """The most that was taken on one device."""
    host_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_hz: float | None = None
    energy_j_per_token: float | None = None
    price_per_device_hour: float | None = None
    tokens_per_dollar: float | None = None

    predicted_fits: bool | None = None
    predicted_step_s: float | None = None
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None
    """Four of five measured steps lie between the two."""
    predicted_ceiling_s: float | None = None
    """What the kernels alone take, where the prediction is what frameworks reach."""
    predicted_tokens_per_s: float | None = None
    prediction_error: float | None = None
    """Of the predicted speed, relative to the measured one."""
    predicted_device_bytes: int | None = None
    predicted_host_bytes: int | None = None
    bound: str | None = None
    """What limits it: the profile's first verdict, else the prediction's."""

    seed: int | None = None
    started: str | None = None
    flopwise: str | None = None
    commit: str | None = None
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    card: str | None = None
    """The GPU, or the processor, as it calls itself."""

    @property
    def figures(self) -> dict[str, str]:
        told = {
            "result": f"{self.run or self.cell or '-'}, {self.state}" + (f": {self.reason}" if self.reason else ""),
            "model": f"{self.model} on {self.devices or 1:,} × {self.hardware}",
            "tokens/s": None if self.tokens_per_s is None else significant(self.tokens_per_s),
            "MFU": None if self.mfu is None else show_share(self.mfu),
            "bound by": self.bound,
        }
        return {name: words for name, words in told.items() if words is not None}


FIELDS = tuple(field.name for field in fields(Result))
"""The columns of `results.csv`, in their order."""


def result_of_run(record: RunRecord, profile: Profile | None = None) -> Result:
    """A run as a row: what it was asked for, and what it has measured."""
    request, environment, plan = record.request, record.environment, record.plan
    row = Result(
        cell=record.cell,
        attempt=record.attempt,
        run=record.id,
        state="ok" if record.state == "done" else record.state,
        reason=record.reason,
        model=str(record.model["name"]),
        hardware=record.hardware,
        devices=plan.get("devices") or 1,
        sequence_tokens=plan.get("sequence_tokens"),
        batch_sequences=request.get("batch_sequences"),
        precision=_word(plan.get("precision")),
        optimizer=_word(plan.get("optimizer")),
        recompute=recompute_words(plan),
        sharding=_sharding(plan),
        device_cap_bytes=request.get("device_memory_bytes"),
        host_cap_bytes=request.get("host_memory_bytes"),
        seed=record.training.seed,
        started=record.started,
        bound=record.bound,
        flopwise=environment.get("flopwise"),
        commit=environment.get("commit"),
        python=environment.get("python"),
        torch=environment.get("torch"),
        cuda=environment.get("cuda"),
        driver=None if _on_cpu(environment) else environment.get("driver"),
        card=_card(environment),
    )
    return _with_measurement(_with_expectation(row, plan), record, profile)


def _word(value: object) -> str | None:
    """Of a free table, where there is one."""
    return None if value is None else str(value)


def _on_cpu(environment: dict[str, str]) -> bool:
    return environment.get("device") == "cpu"


def _card(environment: dict[str, str]) -> str | None:
    """What it ran on: a machine with a GPU may have trained on its processor."""
    if _on_cpu(environment):
        return environment.get("cpu")
    return environment.get("device_name") or environment.get("gpu") or environment.get("cpu")


def _with_expectation(row: Result, plan: dict[str, Any]) -> Result:
    expected = plan.get("expected")
    if not isinstance(expected, dict):
        return row
    return replace(
        row,
        predicted_fits=True,
        predicted_step_s=expected.get("step_s"),
        predicted_tokens_per_s=expected.get("tokens_per_s"),
        predicted_device_bytes=expected.get("device_bytes"),
        predicted_host_bytes=expected.get("host_bytes"),
    )


def _with_measurement(row: Result, record: RunRecord, profile: Profile | None) -> Result:
    measured = record.measurement
    if measured is None:
        return row
    devices, batch = measured.devices, measured.batch_sequences
    if measured.predicted_step_s is None and record.plan.get("hardware") not in (None, measured.hardware):
        # What a plan promises of other hardware says nothing of this.
        row = replace(row, predicted_step_s=None, predicted_tokens_per_s=None)
    predicted = measured.predicted_tokens_per_s or row.predicted_tokens_per_s
    known = {name: profile.get(name) if profile else None for name in ("power_w", "power_limit_w", "clock_mean_hz")}
    # Without its steps a profile's energy is that of all it has seen, which no batch divides.
    energy = profile.get("energy_j") if profile and profile.steps else None
    # A GPU counts its own energy, a processor that of the whole machine. Padding is no token.
    all_energy = energy if energy is None or _on_cpu(record.environment) else energy * devices
    tokens = measured.tokens_per_s * measured.step_s
    same = {name: value for name in FIELDS if (value := getattr(measured, name, None)) is not None}
    further = {
        "model": row.model,
        "accumulation_steps": -(-batch // (measured.micro_batch_sequences * devices)),
        "tokens_per_s_per_device": measured.tokens_per_s / devices,
        "samples_per_s": batch / measured.step_s,
        "model_flops_per_s_per_device": measured.model_flops / measured.step_s / devices,
        "device_bytes": measured.device_total,
        "host_bytes": measured.host_total,
        "power_w": known["power_w"],
        "power_limit_w": known["power_limit_w"],
        "clock_hz": known["clock_mean_hz"],
        "energy_j_per_token": all_energy / tokens if all_energy is not None and tokens else None,
        "prediction_error": predicted / measured.tokens_per_s - 1 if predicted and measured.tokens_per_s else None,
    }
    return replace(row, **same | further)


def result_of_cell(cell: Cell, attempt: Attempt | None, run: Result | None = None) -> Result:
    """A cell as a row: as its attempt ended, with what its run measured; without an attempt, as it is foreseen."""
    return Result(**cell_values(cell, attempt, None if run is None else values_of(run)))


def values_of(row: Result) -> dict[str, Any]:
    """Field → value."""
    return {name: getattr(row, name) for name in FIELDS}


def cell_values(cell: Cell, attempt: Attempt | None, run: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields of `result_of_cell`, before they are a row; `run` holds those of its run, and is filled in."""
    settings, foreseen = cell.settings, cell.foreseen
    values = _settings_values(settings) if run is None else run
    if attempt is not None:
        _fill(values, {name: getattr(attempt, name) for name in ("batch_sequences", "micro_batch_sequences")})
    if foreseen is not None:
        _fill(values, {name: getattr(foreseen, given) for name, given in FORESEEN.items()})
        values["predicted_fits"] = foreseen.fits
        if foreseen.interval is not None:
            values.update(predicted_low_s=foreseen.interval.low_s, predicted_high_s=foreseen.interval.high_s)
    batch = values.get("batch_sequences")
    if batch is not None:
        _fill(values, {"batch_tokens": batch * settings.sequence_tokens})
    values["cell"] = cell.id
    if attempt is None:
        is_foreseen = foreseen is not None
        source: Source = "predicted" if is_foreseen else values.get("source", "measured")
        values.update(source=source, reason=foreseen.reason if foreseen else None)
        return values
    if attempt.pid is None and attempt.job is None and attempt.run is None and foreseen is not None:
        # No process was needed to tell.
        values["source"] = "predicted"
    values.update(
        attempt=attempt.number,
        repeat=attempt.repeat,
        state=attempt.state,
        reason=attempt.reason,
        started=values.get("started") or attempt.started,
    )
    return values


FORESEEN = {
    "predicted_step_s": "step_s",
    "predicted_ceiling_s": "ceiling_s",
    "predicted_tokens_per_s": "tokens_per_s",
    "predicted_device_bytes": "device_bytes",
    "predicted_host_bytes": "host_bytes",
    "batch_sequences": "batch_sequences",
    "micro_batch_sequences": "micro_batch_sequences",
    "recompute": "recompute",
    "bound": "bound",
}
"""Field of a row → that of a prediction."""


def _fill(values: dict[str, Any], given: dict[str, Any]) -> None:
    """What has been said already stands."""
    for name, value in given.items():
        if values.get(name) is None:
            values[name] = value


def _settings_values(settings: CellSetup) -> dict[str, Any]:
    return {name: None if value == AUTO else value for name, value in words_of(settings).items()} | {
        "state": "planned",
        "model": settings.model_name,
        "hardware": settings.hardware_name,
        "device_cap_bytes": settings.device_memory_bytes,
        "host_cap_bytes": settings.host_memory_bytes,
    }


def add_price(row: Result, per_device_hour: float) -> Result:
    """With what a dollar trains, where a device costs so much an hour."""
    # What was tried and is not ok trains nothing, whatever was predicted of it.
    rate = row.predicted_tokens_per_s if row.state == "planned" else row.tokens_per_s
    if not rate or not row.devices or per_device_hour <= 0:
        return replace(row, price_per_device_hour=per_device_hour, tokens_per_dollar=None)
    return replace(
        row,
        price_per_device_hour=per_device_hour,
        tokens_per_dollar=rate * 3600 / (per_device_hour * row.devices),
    )


ERROR = "error"
"""State of a row whose figures cannot be right."""


POSITIVE = ("devices", "sequence_tokens", "batch_sequences", "step_s", "tokens_per_s", "mfu", "hfu", "peak_flops")


def fastest(rows: Sequence[Result]) -> list[Result]:
    """Of each model, hardware, devices, sequence and precision the ok row with the most tokens/s."""
    found: dict[tuple[object, ...], Result] = {}
    for row in rows:
        if row.state != "ok" or row.tokens_per_s is None:
            continue
        key = (row.model, row.hardware, row.devices, row.sequence_tokens, row.lengths, row.precision)
        other = found.get(key)
        if other is None or row.tokens_per_s > (other.tokens_per_s or 0.0):
            found[key] = row
    return list(found.values())


def check_result(row: Result) -> Result:
    """The row itself, or one in the state `error` where it claims what cannot be: more than the device's peak."""
    if row.state == ERROR:
        return row
    figures = ((name, getattr(row, name)) for name in POSITIVE)
    odd = [f"{name} is {value}" for name, value in figures if value is not None and not 0 < value < inf]
    if odd:
        why = f"{', '.join(odd)}: no run has such figures"
        return replace(row, state=ERROR, reason=f"{why}; {row.reason}" if row.reason else why)
    beyond = [
        f"{name} {show_share(share)}" for name, share in (("MFU", row.mfu), ("HFU", row.hfu)) if share and share > 1
    ]
    if not beyond:
        return row
    divided = f"{show_count(row.peak_flops)}FLOP/s {row.peak_format or ''}".rstrip() if row.peak_flops else "the peak"
    why = f"{' and '.join(beyond)} of {divided}: the peak, its format or the FLOPs are wrong"
    return replace(row, state=ERROR, reason=f"{why}; {row.reason}" if row.reason else why)


def recompute_words(plan: dict[str, Any]) -> str | None:
    """`none`, a policy, or how many (layer, chunk) of a plan for one device save how much: `saves 24 full, 8 input`."""
    if isinstance(plan.get("recompute"), str):
        return str(plan["recompute"])
    saves = plan.get("saves")
    if not isinstance(saves, list | tuple) or not saves:
        return None
    return save_words(map(str, saves))


def _sharding(plan: dict[str, Any]) -> str | None:
    parallel = plan.get("parallel")
    if not isinstance(parallel, dict):
        return None
    return f"zero{parallel['zero']}" if parallel.get("zero") else "none"
