"""What the catalogue holds: a record and a row of words per model, device or training framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flopwise.base.units import exact_tokens, show_bytes, show_count
from flopwise.setup.hardware import NUMBER_FORMATS, Device, Hardware
from flopwise.setup.stack import Stack
from flopwise.work.describe import describe
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer

MODEL_COLUMNS = ("model", "parameters", "layers", "hidden", "heads", "context", "title")
HARDWARE_COLUMNS = ("hardware", "matrix peak", "fp8", "memory", "bandwidth", "power", "efficiency", "title")
STACK_COLUMNS = ("stack", "attention", "kernels", "constants", "title")
"""constants: how many differ from what kernels and network allow."""
GIVING_WAY = ("title", "power", "fp8", "bandwidth")
"""Columns that leave a narrow terminal's table, the first one first."""
WORDS = {"model", "hardware", "efficiency", "title", "stack", "attention", "kernels"}


def model_record(model: Model) -> dict[str, object]:
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


def hardware_record(hardware: Hardware) -> dict[str, object]:
    """What a listing says of a device, at full precision."""
    device = hardware.device
    bandwidth = device.dram.bandwidth_bytes_per_s
    return {
        "hardware": hardware.name,
        "peak_flops": {name: fact.value for name, fact in device.peak_flops.items()},
        "memory_bytes": int(device.dram.size_bytes.value),
        "bandwidth_bytes_per_s": bandwidth.value if bandwidth else None,
        "power_w": device.power_w.value if device.power_w else None,
        "efficiency": efficiency_kind(hardware),
        "aliases": list(hardware.aliases),
        "title": hardware.title,
    }


def stack_record(stack: Stack) -> dict[str, object]:
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


def efficiency_kind(hardware: Hardware) -> str:
    """How the efficiencies of the kernels came about: measured, estimated, or in part each."""
    efficiency = hardware.efficiency
    keys = (efficiency.gemm.source, efficiency.attention.source, efficiency.memory.source)
    estimated = [hardware.sources[key].kind == "estimated" for key in keys]
    return "estimated" if all(estimated) else "partly measured" if any(estimated) else "measured"


def flat_record(record: Mapping[str, object]) -> dict[str, object]:
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


def model_rows(models: Sequence[Model]) -> list[list[str]]:
    """Rows of words under `MODEL_COLUMNS`."""
    rows = []
    for model in models:
        heads = "-"
        if isinstance(model, Transformer):
            grouped = model.kv_heads != model.heads
            heads = f"{model.heads}/{model.kv_heads}" if grouped else str(model.heads)
        count = show_count(describe(model, model.context).parameters)
        context = exact_tokens(model.context)
        rows.append([model.name, count, str(model.layers), str(model.hidden), heads, context, model.title])
    return rows


def hardware_rows(devices: Sequence[Hardware]) -> list[list[str]]:
    """Rows of words under `HARDWARE_COLUMNS`; a format that the device lacks is a dash."""
    rows = []
    for hardware in devices:
        device = hardware.device
        bandwidth = device.dram.bandwidth_bytes_per_s
        rows.append(
            [
                hardware.name,
                _matrix_peak(device),
                _peak(device, "fp8") if "fp8" in device.peak_flops else "-",
                show_bytes(device.dram.size_bytes.value),
                f"{show_count(bandwidth.value)}B/s" if bandwidth else "-",
                f"{device.power_w.value:.0f} W" if device.power_w else "-",
                efficiency_kind(hardware),
                hardware.title,
            ]
        )
    return rows


def stack_rows(stacks: Sequence[Stack]) -> list[list[str]]:
    """Rows of words under `STACK_COLUMNS`."""
    return [
        [
            stack.name,
            stack.attention_kernel,
            stack.fusion,
            str(len(stack.constants)),
            stack.title,
        ]
        for stack in stacks
    ]


def _matrix_peak(device: Device) -> str:
    """The peak that training is measured against, with its format: bf16, or what an older device has instead."""
    name = next((name for name in ("bf16", "fp16", "fp32") if name in device.peak_flops), None)
    return f"{_peak(device, name)} {name}" if name else "-"


def _peak(device: Device, name: str) -> str:
    return f"{show_count(device.peak_flops[name].value)}FLOP/s"
