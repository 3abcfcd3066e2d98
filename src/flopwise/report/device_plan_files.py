"""A plan for one device for programs and for tables: JSON, CSV, markdown."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.base.files import to_json, with_schema
from flopwise.base.units import show_bytes, show_seconds, show_share, significant
from flopwise.records.plan import Planned
from flopwise.report.device_plans import memory_rows, owners_of, size_words
from flopwise.report.tables import csv_text, markdown_table

OF_PLAN = (
    *("hardware", "rule", "precision", "optimizer", "device_memory_bytes", "host_memory_bytes", "sequence_tokens"),
    *("chunk_tokens", "chunks_per_round", "rounds_per_step", "head_chunk_tokens", "tokens_per_step"),
    *("attention", "update_place", "update_when", "activation_slots"),
)
OF_FORECAST = ("step_s", "tokens_per_s", "mfu", "hfu", "ceiling_share", "bound")
MORE_OF_FORECAST = (
    *("compute_s", "recompute_s", "update_s", "exposed_copy_s", "copy_in_bytes", "copy_out_bytes", "link_share"),
    *("peak_flops", "model_flops", "hardware_flops"),
)


def main_values(planned: Planned) -> dict[str, object]:
    """A plan's decisions and its figures at full precision, as every file of it names them."""
    plan, forecast = planned.plan, planned.forecast
    states = {"param": plan.weights, "grad": plan.gradients, "optimizer": plan.optimizer_state}
    return {
        "model": planned.model,
        **{name: getattr(plan, name) for name in OF_PLAN},
        **{f"{kind}_blocks": residency.on_device for kind, residency in states.items()},
        **{f"resident_{kind}_blocks": residency.blocks for kind, residency in states.items()},
        "host_saved": plan.saved("host"),
        "device_saved": plan.saved("device"),
        **{name: getattr(forecast, name) for name in OF_FORECAST},
        "device_bytes": forecast.device_total,
        "host_bytes": forecast.host_total,
        "device_bytes_by_owner": forecast.device_bytes,
        "host_bytes_by_owner": forecast.host_bytes,
    }


def device_plan_json(planned: Planned) -> str:
    """The whole plan: its main values, then the records that they come from."""
    records = ("plan", "forecast", "reasons", "helps", "interval", "notes", "searched", "simulated")
    whole = {**main_values(planned), **{name: getattr(planned, name) for name in records}}
    return to_json(with_schema(whole, "device-plan"))


def device_plan_csv(planneds: Sequence[Planned]) -> str:
    """One row a plan, full precision, the unit in the column's name."""
    return csv_text([_flat(planned, owners_of(planneds)) for planned in planneds])


def _flat(planned: Planned, owners: Sequence[str]) -> dict[str, object]:
    """Every figure in one row; what is a table in the JSON has a column for each of its entries."""
    forecast, interval = planned.forecast, planned.interval
    row: dict[str, object] = {}
    for name, value in main_values(planned).items():
        if name.endswith("_by_owner"):
            sizes = forecast.device_bytes if name.startswith("device") else forecast.host_bytes
            row |= {f"{name.removesuffix('_by_owner')}_{owner}": sizes.get(owner, 0) for owner in owners}
        elif isinstance(value, dict):
            row |= {f"{name}_{level}": count for level, count in value.items()}
        else:
            row[name] = value
    return {
        **row,
        **{name: getattr(forecast, name) for name in MORE_OF_FORECAST},
        "idle_s": sum(forecast.idle.values()),
        "low_s": interval.low_s if interval else None,
        "high_s": interval.high_s if interval else None,
        "searched": planned.searched,
        "simulated": planned.simulated,
    }


# -- several plans, one row each ------------------------------------------------------------------------------------

COLUMNS = (
    *("model", "hardware", "seq", "chunk", "chunks", "rounds", "device", "host"),
    *("step", "tok/s", "MFU", "HFU", "bound by"),
)
WORDS = {"model", "hardware", "bound by", "memory", "on device", "on host"}


def _cells(planned: Planned) -> list[str]:
    plan, forecast = planned.plan, planned.forecast
    counts = (plan.sequence_tokens, plan.chunk_tokens, plan.chunks_per_round, plan.rounds_per_step)
    return [
        *(planned.model, plan.hardware),
        *(f"{count:,}" for count in counts),
        _of_cap(forecast.device_total, plan.device_memory_bytes),
        _of_cap(forecast.host_total, plan.host_memory_bytes),
        *(show_seconds(forecast.step_s), significant(forecast.tokens_per_s)),
        *(show_share(forecast.mfu), show_share(forecast.hfu), forecast.bound),
    ]


def _of_cap(total: int, cap: int) -> str:
    return f"{'✓' if total <= cap else '✗'} {size_words(total)} of {show_bytes(cap)}"


def device_plan_markdown(planneds: Sequence[Planned]) -> str:
    """The rows as a markdown table that pastes into an issue; one plan brings its memory by owner too."""
    parts = [markdown_table(COLUMNS, [_cells(planned) for planned in planneds], WORDS)]
    if len(planneds) == 1:
        columns = ("memory", "device", "on device", "host", "on host")
        rows = [[str(cell) for cell in row] for row in memory_rows(planneds[0])]
        parts.append(markdown_table(columns, rows, WORDS))
    return "\n".join(parts)
