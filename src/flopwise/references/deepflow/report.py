"""What the reference analytical model says, for people and for programs; its own print-out is `deepflow.printout`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from flopwise.base.units import show_bytes, show_count, show_seconds, show_share, significant
from flopwise.references.deepflow import DeepflowParallel, DeepflowResult, DeepflowTimes
from flopwise.references.deepflow.machine import USABLE
from flopwise.references.deepflow.memory import MemoryRequirement
from flopwise.report.document import Block, Document, Table, Words, beside_rows, facts, note_rows
from flopwise.report.tables import Styled
from flopwise.report.words import UNKNOWN
from flopwise.setup.written import WrittenSetup

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
class DeepflowRecord(WrittenSetup):
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


# -- the document ----------------------------------------------------------------------------------------------------


def deepflow_document(records: Sequence[DeepflowRecord]) -> Document:
    """One record whole, of several a row each."""
    one = records[0] if len(records) == 1 else None
    notes = [note for record in records for note in record.notes]
    compared = Table(
        columns=tuple(COMPARED),
        rows=[[words(record) for words in COMPARED.values()] for record in records],
        left={"model", "hardware"},
        giving_way=("power", "parameters", "bandwidth", "peak", "seq"),
        styles=["" if record.fits else "red" for record in records],
    )
    return Document(
        blocks=_blocks(one) if one else [compared],
        tables=[compared, *([_time_table(one), _device_memory(one)] if one else [])],
        rows=map(flat_row, records),
        told=beside_rows(notes, *(() if one else ("table",))),
    )


def _blocks(record: DeepflowRecord) -> Iterator[Block]:
    """The hardware, the memory by part, the times of the parts, the step."""
    degrees = [f"{name.replace('_', ' ')} {ways:,}" for name, ways in record.parallel.items() if ways > 1]
    yield Words(
        f"{record.model} · {record.hardware}, {show_count(record.power_w, 'W')} · sequence {record.sequence_tokens:,}"
        f" · numbers of {record.element_bytes} bytes\n"
        f"{show_count(record.n_params)} parameters · batch {record.batch_sequences:,} = {record.batch_tokens:,} tokens"
        f" · {'parallel: ' + ', '.join(degrees) if degrees else 'one device'} · method deepflow"
    )
    columns = ("hardware", "whole", "kernels reach", "size")
    yield Table(columns=columns, rows=_hardware_rows(record), left={"hardware"})
    yield _memory(record)
    yield _time_table(record)
    step = f"{show_seconds(record.step_s)} · {significant(record.tokens_per_s)} tok/s"
    printed = f"Time: {record.step_s:.8f} (`--print-out` prints every figure of the reference)"
    yield facts([("step", Styled(step, "bold")), ("printed", printed), *note_rows(record.notes)])


NO_L2 = ["L2", UNKNOWN, UNKNOWN, "none"]


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
    several = any(ways > 1 for ways in record.parallel.values())
    sizes = {"a copy of the model": record.data_shard_bytes} if several else {}
    sizes["device"] = record.device_bytes
    sign, verdict, style = ("✓", "fits", "green") if record.fits else ("✗", "does not fit", "red")
    rate = f"overflow rate {significant(record.device_overflow)}"
    told = Styled(f"{sign} {verdict} {show_bytes(record.dram_bytes)}: {rate}", style)
    parts = {"embedding": "", "hidden": "", "softmax": "", "projection": "", "total": told}
    return Table(
        columns=("memory", *sizes, ""),
        rows=[[part, *(show_bytes(size[part]) for size in sizes.values()), words] for part, words in parts.items()],
        left={"memory", ""},
        folded={"": 0},
    )


def _device_memory(record: DeepflowRecord) -> Table:
    rows = [[part, show_bytes(size)] for part, size in record.device_bytes.items()]
    return Table(columns=("memory", "device"), rows=rows, left={"memory"})


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


def _time_table(record: DeepflowRecord) -> Table:
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
    return Table(columns=("part", "once", "in the step", "share"), rows=rows, left={"part"})


# -- several, one row each -------------------------------------------------------------------------------------------

COMPARED: dict[str, Callable[[DeepflowRecord], str]] = {
    "model": lambda one: one.model,
    "hardware": lambda one: one.hardware,
    "power": lambda one: show_count(one.power_w, "W"),
    "seq": lambda one: f"{one.sequence_tokens:,}",
    "batch": lambda one: f"{one.batch_sequences:,}",
    "parameters": lambda one: show_count(one.n_params),
    "peak": lambda one: f"{show_count(one.peak_flops)}FLOP/s",
    "bandwidth": lambda one: f"{show_count(one.dram_bytes_per_s)}B/s",
    "memory": lambda one: f"{'✓' if one.fits else '✗'} {show_bytes(one.device_bytes['total'])}",
    "step": lambda one: show_seconds(one.step_s),
    "tok/s": lambda one: significant(one.tokens_per_s),
}
"""The sign before the memory says whether it fits."""


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
