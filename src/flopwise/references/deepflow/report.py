"""What the reference analytical model says, for people and for programs; its own print-out is `deepflow.printout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flopwise.base.files import to_json, with_schema
from flopwise.base.units import show_bytes, show_count, show_seconds, show_share, significant
from flopwise.references.deepflow import DeepflowParallel, DeepflowResult, DeepflowTimes
from flopwise.references.deepflow.machine import USABLE
from flopwise.references.deepflow.memory import MemoryRequirement
from flopwise.report.tables import csv_text, fitting_columns, markdown_table, text_table

ODDITIES = (
    "these are the formulas of DeepFlow as of June 2019 with their known oddities: memory holds neither gradients nor "
    "optimizer state, one hidden layer is updated whatever their number, the projection's time is in no total; "
    "`--method physical` shares none of them"
)
SEVERAL_DEVICES = (
    "no published output of that model for several devices is known; how it counted their links is reconstructed"
)
OVERFLOWS = "the time is that of a device with memory enough: the reference takes no notice of the overflow"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepflowRecord:
    """One step by the reference's formulas. The order of the fields is that of the columns."""

    method: str = "deepflow"
    model: str
    hardware: str
    """The technology and power that it was made of."""
    n_params: int
    sequence_tokens: int
    batch_sequences: int
    batch_tokens: int
    element_bytes: int
    step_s: float
    tokens_per_s: float
    power_w: float
    power_share: dict[str, float]
    parallel: dict[str, int]
    """Degrees of parallelism."""
    peak_flops: float
    usable_flops: float
    dram_bytes_per_s: float
    usable_dram_bytes_per_s: float
    dram_bytes: int
    l2_bytes_per_s: float
    l2_bytes: int
    shared_bytes: int
    network_bytes_per_s: float
    device_bytes: dict[str, int]
    """What one device needs, by part of the model."""
    device_overflow: float
    """What one device needs over what it has."""
    data_shard_bytes: dict[str, int]
    """What one copy of the model needs, by part and by kind."""
    data_shard_overflow: float
    fits: bool
    times: DeepflowTimes
    notes: tuple[str, ...]


def deepflow_record(result: DeepflowResult, *, model: str, hardware: str) -> DeepflowRecord:
    """The figures of a result under the names that predictions have."""
    configuration, machine, shape = result.configuration, result.machine, result.configuration.model
    shares = asdict(configuration.power)
    tokens = shape.batch_sequences * shape.sequence_tokens
    return DeepflowRecord(
        model=model,
        hardware=hardware,
        n_params=result.parameters,
        sequence_tokens=shape.sequence_tokens,
        batch_sequences=shape.batch_sequences,
        batch_tokens=tokens,
        element_bytes=shape.element_bytes,
        step_s=result.time_s,
        tokens_per_s=tokens / result.time_s,
        power_w=shares.pop("budget_w"),
        power_share=shares,
        parallel=_degrees(configuration.parallel),
        peak_flops=machine.flops_per_s / USABLE,
        usable_flops=machine.flops_per_s,
        dram_bytes_per_s=machine.dram_bytes_per_s / USABLE,
        usable_dram_bytes_per_s=machine.dram_bytes_per_s,
        dram_bytes=round(machine.dram_bytes),
        l2_bytes_per_s=machine.l2_bytes_per_s,
        l2_bytes=round(machine.l2_bytes),
        shared_bytes=round(machine.shared_bytes),
        network_bytes_per_s=machine.network_bytes_per_s,
        device_bytes={**_parts(result.device), "total": round(result.device.total)},
        device_overflow=result.device_overflow,
        data_shard_bytes={
            **_parts(result.data_shard),
            "weights": round(result.data_shard.weight),
            "activations": round(result.data_shard.activation),
            "pointwise": round(result.data_shard.pointwise),
            "total": round(result.data_shard.total),
        },
        data_shard_overflow=result.data_shard_overflow,
        fits=result.device_overflow <= 1,
        times=result.times,
        notes=_notes(result),
    )


def _degrees(parallel: DeepflowParallel) -> dict[str, int]:
    splits = {"hidden": parallel.hidden, "softmax": parallel.softmax, "embedding": parallel.embedding}
    return {
        "data": parallel.data,
        "layer": parallel.layer,
        "hidden_layer": parallel.hidden_layer,
        **{f"{name}_split": split.devices for name, split in {**splits, "projection": parallel.projection}.items()},
    }


def _parts(memory: MemoryRequirement) -> dict[str, int]:
    return {name: round(getattr(memory, name).total) for name in ("embedding", "hidden", "softmax", "projection")}


def _notes(result: DeepflowResult) -> tuple[str, ...]:
    notes = [ODDITIES]
    if result.device_overflow > 1:
        notes.append(OVERFLOWS)
    if result.configuration.parallel.grid_dimensions:
        notes.append(SEVERAL_DEVICES)
    return tuple(notes)


# -- one page --------------------------------------------------------------------------------------------------------


def deepflow_page(record: DeepflowRecord) -> RenderableType:
    """The hardware, the memory by part, the times of the parts, the step."""
    hardware = text_table(("hardware", "whole", "kernels reach", "size"), _hardware_rows(record), {"hardware"})
    times = text_table(("part", "once", "in the step", "share"), _time_rows(record), {"part"})
    return Group(_heading(record), "", hardware, "", _memory(record), "", times, "", _answer(record))


def _heading(record: DeepflowRecord) -> Text:
    degrees = [f"{name.replace('_', ' ')} {ways:,}" for name, ways in record.parallel.items() if ways > 1]
    lines = (
        f"{record.model} · {record.hardware}, {show_count(record.power_w, 'W')} · sequence {record.sequence_tokens:,}"
        f" · numbers of {record.element_bytes} bytes",
        f"{show_count(record.n_params)} parameters · batch {record.batch_sequences:,} = {record.batch_tokens:,} tokens"
        f" · {'parallel: ' + ', '.join(degrees) if degrees else 'one device'} · method deepflow",
    )
    return Text("\n".join(lines))


NO_L2 = ["L2", "-", "-", "none"]


def _hardware_rows(record: DeepflowRecord) -> list[list[str]]:
    def rate(value: float) -> str:
        return f"{show_count(value)}B/s"

    dram = [rate(record.dram_bytes_per_s), rate(record.usable_dram_bytes_per_s), show_bytes(record.dram_bytes)]
    rows = [
        ["arithmetic", f"{show_count(record.peak_flops)}FLOP/s", f"{show_count(record.usable_flops)}FLOP/s", "-"],
        ["DRAM", *dram],
        ["L2", *([rate(record.l2_bytes_per_s)] * 2), show_bytes(record.l2_bytes)] if record.l2_bytes > 0 else NO_L2,
        ["shared memory", "-", "-", show_bytes(record.shared_bytes)],
    ]
    if record.network_bytes_per_s:
        rows.append(["network link", rate(record.network_bytes_per_s), rate(record.network_bytes_per_s), "-"])
    return rows


def _memory(record: DeepflowRecord) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("memory", no_wrap=True)
    several = any(ways > 1 for ways in record.parallel.values())
    for name in ("a copy of the model", "device") if several else ("device",):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    sizes = (record.data_shard_bytes, record.device_bytes) if several else (record.device_bytes,)
    for part in ("embedding", "hidden", "softmax", "projection"):
        table.add_row(part, *(show_bytes(size[part]) for size in sizes), "")
    rate = f"overflow rate {significant(record.device_overflow)}"
    verdict = (
        f"fits {show_bytes(record.dram_bytes)}" if record.fits else f"does not fit {show_bytes(record.dram_bytes)}"
    )
    sign, style = ("✓", "green") if record.fits else ("✗", "red")
    total = [show_bytes(size["total"]) for size in sizes]
    table.add_row("total", *total, Text(f"{sign} {verdict}: {rate}", style=style))
    return table


_AROUND = {
    "softmax forward": "softmax_forward_s",
    "softmax backward": "softmax_backward_s",
    "softmax update": "softmax_update_s",
    "embedding forward": "embedding_forward_s",
    "embedding backward": "embedding_backward_s",
}
_CELL = {
    "cell forward (Cf)": "cell_forward_s",
    "cell backward (Cb)": "cell_backward_s",
    "hidden update (R)": "hidden_update_s",
    "message (W)": "message_s",
}


def recurrent_s(record: DeepflowRecord) -> float:
    """What the recurrent layers take: the step less the softmax and the embedding."""
    around: float = sum(getattr(record.times, name) for name in _AROUND.values())
    return record.step_s - around


def _time_rows(record: DeepflowRecord) -> list[list[str]]:
    times = record.times
    cells = [(name, seconds) for name, field in _CELL.items() if (seconds := getattr(times, field))]
    inside = recurrent_s(record)
    rows = [[name, show_seconds(seconds), "", ""] for name, seconds in cells]
    rows.append(["recurrent layers", "", show_seconds(inside), show_share(inside / record.step_s)])
    for name, field in _AROUND.items():
        seconds = getattr(times, field)
        rows.append([name, show_seconds(seconds), show_seconds(seconds), show_share(seconds / record.step_s)])
    for direction in ("forward", "backward"):
        seconds = getattr(times, f"projection_{direction}_s")
        rows.append([f"projection {direction}", show_seconds(seconds), "not counted", "-"])
    return rows


def _answer(record: DeepflowRecord) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("step", f"{show_seconds(record.step_s)} · {significant(record.tokens_per_s)} tok/s", style="bold")
    table.add_row("printed", f"Time: {record.step_s:.8f} (`--print-out` prints every figure of the reference)")
    for note in record.notes:
        table.add_row("note", note, style="cyan")
    return table


# -- several, one row each -------------------------------------------------------------------------------------------

COMPARED = ("model", "hardware", "power", "seq", "batch", "parameters", "peak", "bandwidth", "memory", "step", "tok/s")
GIVING_WAY = ("power", "parameters", "bandwidth", "peak", "seq")
WORDS = {"model", "hardware"}


def compared_rows(records: Sequence[DeepflowRecord]) -> list[list[str]]:
    """One row of words per record, under `COMPARED`; the sign before the memory says whether it fits."""
    return [
        [
            record.model,
            record.hardware,
            show_count(record.power_w, "W"),
            f"{record.sequence_tokens:,}",
            f"{record.batch_sequences:,}",
            show_count(record.n_params),
            f"{show_count(record.peak_flops)}FLOP/s",
            f"{show_count(record.dram_bytes_per_s)}B/s",
            f"{'✓' if record.fits else '✗'} {show_bytes(record.device_bytes['total'])}",
            show_seconds(record.step_s),
            significant(record.tokens_per_s),
        ]
        for record in records
    ]


def compared_table(records: Sequence[DeepflowRecord], width: int) -> RenderableType:
    """Several records in a table `width` wide."""
    rows = compared_rows(records)
    shown = fitting_columns(COMPARED, rows, width, GIVING_WAY)
    styles = ["" if record.fits else "red" for record in records]
    return text_table(COMPARED, rows, WORDS, shown=shown, styles=styles)


def deepflow_markdown(records: Sequence[DeepflowRecord]) -> str:
    """The rows as a markdown table; one record brings its memory and its times too."""
    parts = [markdown_table(COMPARED, compared_rows(records), WORDS)]
    if len(records) == 1:
        memory = [[part, show_bytes(size)] for part, size in records[0].device_bytes.items()]
        parts.append(markdown_table(("part", "once", "in the step", "share"), _time_rows(records[0]), {"part"}))
        parts.append(markdown_table(("memory", "device"), memory, {"memory"}))
    return "\n".join(parts)


def flat_row(record: DeepflowRecord) -> dict[str, object]:
    """Every figure in one row: `device_bytes_hidden`, `power_share_core`, the times under their own names."""
    flat: dict[str, object] = {}
    for name, value in asdict(record).items():
        if name == "times":
            flat.update(value)
        elif isinstance(value, Mapping):
            flat.update({f"{name}_{key}": item for key, item in value.items()})
        elif name != "notes":
            flat[name] = value
    return flat


def deepflow_csv(records: Sequence[DeepflowRecord]) -> str:
    """One row per record, full precision, the unit in the column's name."""
    return csv_text([flat_row(record) for record in records])


def deepflow_json(records: Sequence[DeepflowRecord]) -> str:
    """One object, or one with `rows` when several were asked for."""
    return to_json(with_schema(records[0] if len(records) == 1 else list(records), "deepflow-prediction"))
