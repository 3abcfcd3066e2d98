"""The catalogue for people and for programs: one row per model or device."""

from __future__ import annotations

from collections.abc import Sequence

from flopwise.core.describe import describe
from flopwise.core.hardware import Hardware
from flopwise.core.model import Model
from flopwise.core.transformer import Transformer
from flopwise.core.units import exact_tokens, show_bytes, show_count

MODEL_COLUMNS = ("model", "parameters", "layers", "hidden", "heads", "context", "title")
HARDWARE_COLUMNS = ("hardware", "bf16", "fp8", "memory", "bandwidth", "power", "title")
WORDS = {"model", "hardware", "title"}


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
        "efficiency": hardware.sources[hardware.efficiency.gemm.source].kind,
        "aliases": list(hardware.aliases),
        "title": hardware.title,
    }


def model_rows(models: Sequence[Model]) -> list[list[str]]:
    """Rows of words under `MODEL_COLUMNS`."""
    rows = []
    for model in models:
        heads = "-"
        if isinstance(model, Transformer):
            grouped = model.kv_heads != model.heads
            heads = f"{model.heads}/{model.kv_heads}" if grouped else str(model.heads)
        count = show_count(describe(model, model.context).parameters)
        rows.append(
            [
                model.name,
                count,
                str(model.layers),
                str(model.hidden),
                heads,
                exact_tokens(model.context),
                model.title,
            ]
        )
    return rows


def hardware_rows(devices: Sequence[Hardware]) -> list[list[str]]:
    """Rows of words under `HARDWARE_COLUMNS`; a format that the device lacks is a dash."""
    rows = []
    for hardware in devices:
        device = hardware.device
        peaks = [
            f"{show_count(device.peak_flops[name].value)}FLOP/s" if name in device.peak_flops else "-"
            for name in ("bf16", "fp8")
        ]
        bandwidth = device.dram.bandwidth_bytes_per_s
        rows.append(
            [
                hardware.name,
                *peaks,
                show_bytes(device.dram.size_bytes.value),
                f"{show_count(bandwidth.value)}B/s" if bandwidth else "-",
                f"{device.power_w.value:.0f} W" if device.power_w else "-",
                hardware.title,
            ]
        )
    return rows
