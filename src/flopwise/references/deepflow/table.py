"""A configuration from a plain table: the reference's YAML in sections, or one row of a table, with the same names.

Sizes may carry units, as in `4 GB` and `225 GB/s`. The reference reads every prefix as a power of 1,024.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from flopwise.base.errors import FlopwiseError, nearest, shown
from flopwise.base.files import read_table
from flopwise.catalog.load import technology_file
from flopwise.references.deepflow.configuration import (
    SPLIT_TYPES,
    Configuration,
    DeepflowParallel,
    DeepflowTechnology,
    LanguageModel,
    Power,
    Split,
)

Section = Literal["technology", "power", "model", "parallel"]
ValueUnit = Literal["", "B", "B/s", "count"]

SECTIONS = ("model_param", "arch_param", "sw_param", "tech_param", "power_breakdown", "scheduling_param")
OUTPUTS = ("path", "time_s", "params_b", "tflops", "mem_gbs", "total_mem_gb", "overflow")
"""Columns of the shipped table that are results, passed over."""
UNUSED = ("num_non_linear", "num_add")
"""Named in the reference's files and in none of its formulas."""
SPLIT_PARTS = ("hidden", "softmax", "embedding", "projection")

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?:([KMGT]?)i?B(/s)?)?\s*", re.ASCII)
_PREFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _quantity(name: str, value: object, unit: ValueUnit) -> float:
    """A number, with or without the unit that the field has."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    given = "" if found is None or found[2] is None else f"B{found[3] or ''}"
    if found is None or given not in ("", unit):
        example = {"": "0.25 or 37e-6", "B": "4 GB", "B/s": "225 GB/s"}[unit]
        raise FlopwiseError(
            f"{name}: cannot read {shown(value)}",
            why=f"a number{f' of {unit}' if unit else ' without a unit'} is expected",
            hint=f"{name} = {example}",
        )
    return float(found[1]) * _PREFIXES[found[2] or ""]


def _whole(name: str, value: object) -> int:
    number = _quantity(name, value, "")
    if not math.isfinite(number) or number % 1:
        raise FlopwiseError(f"{name} must be a whole number, got {shown(value)}", hint=f"{name} = 4")
    return int(number)


FIELDS: dict[str, tuple[Section, str, ValueUnit]] = {
    "core_energy_per_flop": ("technology", "core_energy_per_flop_j", ""),
    "DRAM_energy_per_bit_trans": ("technology", "dram_energy_per_bit_j", ""),
    "L2_energy_per_bit": ("technology", "l2_energy_per_bit_j", ""),
    "shared_mem_energy_per_bit": ("technology", "shared_energy_per_bit_j", ""),
    "internode_energy_per_bit": ("technology", "network_energy_per_bit_j", ""),
    "HBM_stack_capacity": ("technology", "dram_stack_bytes", "B"),
    "HBM_stack_bw": ("technology", "dram_stack_bytes_per_s", "B/s"),
    "L2_bank_capacity": ("technology", "l2_bank_bytes", "B"),
    "L2_bank_bw": ("technology", "l2_bank_bytes_per_s", "B/s"),
    "shared_mem_bank_capacity": ("technology", "shared_bank_bytes", "B"),
    "shared_mem_bank_bw": ("technology", "shared_bank_bytes_per_s", "B/s"),
    "line_latency": ("technology", "line_latency_s", ""),
    "kernel_launch_overhead": ("technology", "launch_s", ""),
    "TDP": ("power", "budget_w", ""),
    "core": ("power", "core", ""),
    "DRAM": ("power", "dram", ""),
    "L2": ("power", "l2", ""),
    "shared_mem": ("power", "shared", ""),
    "IB": ("power", "network", ""),
    "batch_size": ("model", "batch_sequences", "count"),
    "vocab_size": ("model", "vocab", "count"),
    "num_layers": ("model", "layers", "count"),
    "layer_size": ("model", "hidden", "count"),
    "projection": ("model", "projection", "count"),
    "seq_len": ("model", "sequence_tokens", "count"),
    "num_gates": ("model", "gates", "count"),
    "precision": ("model", "element_bytes", "count"),
    "dp": ("parallel", "data", "count"),
    "lp": ("parallel", "layer", "count"),
    "hlp": ("parallel", "hidden_layer", "count"),
}
"""The reference's name → part of the configuration, its field there, its unit."""

SPLIT_FIELDS = {f"kp_{part}_{suffix}": (part, suffix) for part in SPLIT_PARTS for suffix in ("dim1", "dim2", "type")}


def from_table(table: Mapping[str, Any], base: Configuration | None = None) -> Configuration:
    """A configuration from the reference's names, in its sections or flat; what is missing comes from `base`.

    Without a `base` everything but the parallel degrees, the gates (4), the width of a number (4 bytes) and the
    network's share (0) has to be there.
    """
    flat = _flat(table)
    _check_names(flat)
    _check_choices(flat)
    parts = _base_fields(base)
    for name, (section, field, unit) in FIELDS.items():
        if name in flat:
            value = flat[name]
            parts[section][field] = _whole(name, value) if unit == "count" else _quantity(name, value, unit)
    parts["parallel"] |= {part: _split(part, flat, base) for part in SPLIT_PARTS}
    _check_complete(parts)
    return Configuration(
        technology=DeepflowTechnology(**parts["technology"]),
        power=Power(**parts["power"]),
        model=LanguageModel(**parts["model"]),
        parallel=DeepflowParallel(**parts["parallel"]),
    )


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if not isinstance(value, Mapping):
            flat[key] = value
        elif key in SECTIONS:
            flat |= value
        else:
            raise FlopwiseError(
                f"there is no section {shown(key)}",
                why="a configuration of the reference model is expected",
                hint=f"one of {', '.join(SECTIONS)}",
            )
    return flat


def _check_names(flat: Mapping[str, Any]) -> None:
    known = (*FIELDS, *SPLIT_FIELDS, *OUTPUTS, *UNUSED, "auto", "topology")
    for name in flat:
        if name not in known:
            close = nearest(str(name), known)
            raise FlopwiseError(
                f"there is no setting {shown(name)}",
                why=f"did you mean {' or '.join(close)}?" if close else "the reference model has none of that name",
                hint=f"known: {', '.join(FIELDS)}, kp_…",
            )


def _check_choices(flat: Mapping[str, Any]) -> None:
    if str(flat.get("auto", False)).lower() not in ("", "false", "none"):
        raise FlopwiseError(
            f"auto = {shown(flat['auto'])} is not supported",
            why="the reference's own search for parallel degrees never ran",
            hint="auto = false, and the degrees dp, lp, hlp and kp_… by hand",
        )
    if flat.get("topology", "ring") not in ("ring", "mesh"):
        raise FlopwiseError(
            f"topology = {shown(flat['topology'])} is not modelled",
            why="the reference has formulas for rings and meshes of rings alone",
            hint="topology = ring",
        )


def _base_fields(base: Configuration | None) -> dict[Section, dict[str, Any]]:
    sections: tuple[Section, ...] = ("technology", "power", "model", "parallel")
    if base is None:
        return {section: {} for section in sections}
    return {
        section: {name: getattr(getattr(base, section), name) for name in getattr(base, section).__dataclass_fields__}
        for section in sections
    }


def _split(part: str, flat: Mapping[str, Any], base: Configuration | None) -> Split:
    before = getattr(base.parallel, part) if base is not None else Split()
    kinds = {number: kind for kind, number in SPLIT_TYPES.items()}
    type_name = f"kp_{part}_type"
    number = _whole(type_name, flat.get(type_name, SPLIT_TYPES[before.kind]))
    if number not in kinds:
        raise FlopwiseError(
            f"{type_name} = {number} is no way to split a product",
            hint="-1 (not at all), 1 (column-row) or 2 (row-column)",
        )
    first, second = (
        _whole(f"kp_{part}_{suffix}", flat.get(f"kp_{part}_{suffix}", default))
        for suffix, default in (("dim1", before.first), ("dim2", before.second))
    )
    try:
        return Split(kind=kinds[number], first=first, second=second)
    except FlopwiseError as error:
        raise error.within(f"kp_{part}") from None


def _check_complete(parts: Mapping[Section, Mapping[str, Any]]) -> None:
    optional = ("gates", "element_bytes", "network")
    missing = [
        name
        for name, (section, field, _) in FIELDS.items()
        if section != "parallel" and field not in parts[section] and field not in optional
    ]
    if missing:
        raise FlopwiseError(
            f"the configuration lacks {', '.join(missing[:6])}{' …' if len(missing) > 6 else ''}",
            why=f"{len(missing)} of its settings are not there and have no default",
            hint=f"{missing[0]} = …",
        )


PUBLISHED = from_table(read_table(technology_file("deepflow-2019")))
"""What the reference's published searches start from: one device of 300 W, 38 billion parameters."""
