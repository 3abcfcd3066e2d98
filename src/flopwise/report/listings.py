"""What the catalogue holds: a row for each model, device or training framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from flopwise.base.units import exact_tokens, show_bytes, show_count
from flopwise.report.document import Document, Table
from flopwise.report.words import UNKNOWN
from flopwise.setup.hardware import NUMBER_FORMATS, Device, Hardware
from flopwise.setup.stack import Stack
from flopwise.work.describe import describe
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer

Described = TypeVar("Described")

LEFT = {"model", "hardware", "efficiency", "title", "stack", "attention", "kernels"}
Listing = tuple[Document, list[dict[str, object]]]
"""For people, and for programs."""


def models_listing(models: Sequence[Model]) -> Listing:
    """Models of the catalogue."""
    return _listing(MODEL_COLUMNS, models, [_model_record(model) for model in models])


def hardware_listing(devices: Sequence[Hardware]) -> Listing:
    """Devices of the catalogue; a format that one lacks is a dash."""
    return _listing(HARDWARE_COLUMNS, devices, [_hardware_record(device) for device in devices])


def stacks_listing(stacks: Sequence[Stack]) -> Listing:
    """Training frameworks of the catalogue."""
    return _listing(STACK_COLUMNS, stacks, [_stack_record(stack) for stack in stacks])


def _listing(
    columns: Mapping[str, Callable[[Described], str]],
    described: Sequence[Described],
    records: list[dict[str, object]],
) -> Listing:
    table = Table(
        columns=tuple(columns),
        rows=[[words(each) for words in columns.values()] for each in described],
        left=LEFT,
        giving_way=("title", "power", "fp8", "bandwidth"),
    )
    return Document(blocks=[table], rows=map(_flat, records)), records


def _model_record(model: Model) -> dict[str, object]:
    """What a listing says of a model, at full precision. Parameters are those at the model's own sequence length."""
    return {
        "model": model.name,
        "parameters": describe(model, model.context).parameters,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads if isinstance(model, Transformer) else None,
        "kv_heads": model.kv_heads if isinstance(model, Transformer) else None,
        "context": model.context,
        "title": model.title,
        "source": model.source,
    }


def _hardware_record(hardware: Hardware) -> dict[str, object]:
    """What a listing says of a device, at full precision."""
    device = hardware.device
    bandwidth = device.dram.bandwidth_bytes_per_s
    return {
        "hardware": hardware.name,
        "peak_flops": {name: fact.value for name, fact in device.peak_flops.items()},
        "memory_bytes": int(device.dram.size_bytes.value),
        "bandwidth_bytes_per_s": bandwidth.value if bandwidth else None,
        "power_w": device.power_w.value if device.power_w else None,
        "efficiency": _efficiency_kind(hardware),
        "aliases": list(hardware.aliases),
        "title": hardware.title,
    }


def _stack_record(stack: Stack) -> dict[str, object]:
    """What a listing says of a training framework, at full precision."""
    return {
        "stack": stack.name,
        "attention": stack.attention_kernel,
        "fusion": stack.fusion,
        "constants": {name: constant.value for name, constant in stack.constants.items()},
        "aliases": list(stack.aliases),
        "title": stack.title,
        "source": stack.source,
    }


def _efficiency_kind(hardware: Hardware) -> str:
    """How the efficiencies of the kernels came about: measured, estimated, or in part each."""
    efficiency = hardware.efficiency
    keys = (efficiency.gemm.source, efficiency.attention.source, efficiency.memory.source)
    estimated = [hardware.sources[key].kind == "estimated" for key in keys]
    return "estimated" if all(estimated) else "partly measured" if any(estimated) else "measured"


def _flat(record: Mapping[str, object]) -> dict[str, object]:
    """A record as one line of CSV: a column for each number format, aliases in one cell."""
    flat: dict[str, object] = {}
    for key, value in record.items():
        if key == "peak_flops" and isinstance(value, dict):
            flat.update({f"peak_{name}_flops": value.get(name) for name in NUMBER_FORMATS})
        elif key == "constants" and isinstance(value, dict):
            flat[key] = " ".join(f"{name}={number:g}" for name, number in value.items())
        else:
            flat[key] = " ".join(value) if isinstance(value, list) else value
    return flat


def _matrix_peak(device: Device) -> str:
    """The peak that training is measured against, with its format: bf16, or what an older device has instead."""
    name = next((name for name in ("bf16", "fp16", "fp32") if name in device.peak_flops), None)
    return f"{_peak(device, name)} {name}" if name else UNKNOWN


def _peak(device: Device, name: str) -> str:
    return f"{show_count(device.peak_flops[name].value)}FLOP/s"


def _heads(model: Model) -> str:
    if not isinstance(model, Transformer):
        return UNKNOWN
    return str(model.heads) if model.kv_heads == model.heads else f"{model.heads}/{model.kv_heads}"


def _bandwidth(hardware: Hardware) -> str:
    bandwidth = hardware.device.dram.bandwidth_bytes_per_s
    return f"{show_count(bandwidth.value)}B/s" if bandwidth else UNKNOWN


MODEL_COLUMNS: dict[str, Callable[[Model], str]] = {
    "model": lambda model: model.name,
    "parameters": lambda model: show_count(describe(model, model.context).parameters),
    "layers": lambda model: str(model.layers),
    "hidden": lambda model: str(model.hidden),
    "heads": _heads,
    "context": lambda model: exact_tokens(model.context),
    "title": lambda model: model.title,
}
HARDWARE_COLUMNS: dict[str, Callable[[Hardware], str]] = {
    "hardware": lambda one: one.name,
    "matrix peak": lambda one: _matrix_peak(one.device),
    "fp8": lambda one: _peak(one.device, "fp8") if "fp8" in one.device.peak_flops else UNKNOWN,
    "memory": lambda one: show_bytes(one.device.dram.size_bytes.value),
    "bandwidth": _bandwidth,
    "power": lambda one: f"{one.device.power_w.value:.0f} W" if one.device.power_w else UNKNOWN,
    "efficiency": _efficiency_kind,
    "title": lambda one: one.title,
}
STACK_COLUMNS: dict[str, Callable[[Stack], str]] = {
    "stack": lambda stack: stack.name,
    "attention": lambda stack: stack.attention_kernel,
    "kernels": lambda stack: stack.fusion,
    # How many differ from what kernels and network allow.
    "constants": lambda stack: str(len(stack.constants)),
    "title": lambda stack: stack.title,
}
