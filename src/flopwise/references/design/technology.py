"""A machine that is not built yet: from technology, budgets and shares to a `Hardware` that can be predicted on.

Every part (the core, the shared memory, the L2, the DRAM, the network) gets shares of a power and, if there is one, of
an area budget, and the fewer of what the two allow:

    core       FLOP/s = min(watts / energy per FLOP, mm² / area of a unit · FLOP/s of a unit)
    memory     bytes/s = min(watts / (8 · energy per bit), mm² / area of a bank · bytes/s of a bank)
               bytes   = bytes/s / bytes/s of a bank · bytes of a bank
    network    bytes/s = watts / (8 · energy per bit)

so a DRAM is bought in stacks, with the bandwidth comes the capacity. Stacks and banks are not rounded to whole ones,
which keeps a search over shares smooth; the number of units is, and the peak stays what the budgets allow.

The idea (energies and budgets to rates and sizes) is that of DeepFlow (Ardalani et al., arXiv 2211.03309). Left out:
voltage and frequency (the energies hold at one clock), leakage, the perimeter that links need, yield.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from flopwise.base.errors import FlopwiseError, shown
from flopwise.references.deepflow.configuration import Configuration, check_number
from flopwise.setup.efficiency import AttentionEfficiency, Efficiency, GemmEfficiency, MemoryEfficiency, Tile
from flopwise.setup.hardware import NUMBER_FORMATS, Device, Fact, Hardware, MemoryLevel, Network, Source

SUM_TOLERANCE = 1e-9
"""Shares that were divided by their sum may add up to a little more than 1."""
UNIT_FLOPS = 1e11
"""FLOP/s of one unit where the reference's configuration names none: about an SM of its time in fp32."""
DERIVED, ESTIMATED = "technology", "estimate"
"""Keys of the sources of what follows from the technology, and of what kernels are taken to reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreTechnology:
    """Arithmetic."""

    energy_per_flop_j: dict[str, float]
    """By number format, for a matrix product's multiplications and additions."""
    unit_flops: float
    """FLOP/s of one unit in the format that costs the most energy; a unit is what a tile of a product is given to."""
    unit_area_mm2: float | None = None

    def __post_init__(self) -> None:
        if not self.energy_per_flop_j:
            raise FlopwiseError("core: no energy per FLOP is given", hint="energy_per_flop_j = { bf16 = 0.5e-12 }")
        for name, energy in self.energy_per_flop_j.items():
            if name not in NUMBER_FORMATS:
                raise FlopwiseError(
                    f"core: unknown number format {shown(name)}", hint=f"one of {', '.join(NUMBER_FORMATS)}"
                )
            check_number("core", f"energy_per_flop_j.{name}", energy)
        check_number("core", "unit_flops", self.unit_flops)
        if self.unit_area_mm2 is not None:
            check_number("core", "unit_area_mm2", self.unit_area_mm2)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTechnology:
    """One level of memory, in banks (on the chip) or stacks (of DRAM)."""

    energy_per_bit_j: float
    bank_bytes: float
    bank_bytes_per_s: float
    bank_area_mm2: float | None = None
    """On the chip. A stack of DRAM beside it takes only its controller's."""

    def __post_init__(self) -> None:
        for name in ("energy_per_bit_j", "bank_bytes", "bank_bytes_per_s"):
            check_number("memory", name, getattr(self, name))
        if self.bank_area_mm2 is not None:
            check_number("memory", "bank_area_mm2", self.bank_area_mm2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Technology:
    """What can be built, and at what cost."""

    name: str
    core: CoreTechnology
    shared: MemoryTechnology
    l2: MemoryTechnology
    dram: MemoryTechnology
    network_energy_per_bit_j: float | None = None
    """None: a single device is meant, and the network's share is no use."""
    launch_s: float = 3e-6

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.name.isprintable():
            raise FlopwiseError(f"a technology cannot be called {shown(self.name)}", hint='name = "my-7nm"')
        if self.network_energy_per_bit_j is not None:
            check_number("technology", "network_energy_per_bit_j", self.network_energy_per_bit_j)
        if not 0 <= self.launch_s < 1:
            raise FlopwiseError(f"launch_s must lie between 0 and 1 s, got {shown(self.launch_s)}", hint="3e-6")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """How a budget is divided; what the parts leave is for everything else."""

    core: float
    shared: float
    l2: float
    dram: float
    network: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            share = getattr(self, item.name)
            least = 0.0 if item.name == "network" else math.ulp(0.0)
            if not least <= share <= 1 + SUM_TOLERANCE:
                raise FlopwiseError(
                    f"the share of {item.name} is {shown(share)}",
                    why="every part of a device needs some of the budget, and none can have more than all of it",
                    hint=f"{item.name} = 0.2",
                )
        if self.total > 1 + SUM_TOLERANCE:
            raise FlopwiseError(
                f"the shares add up to {self.total:.6g}",
                why="a budget can be spent once",
                hint="shares that add up to 1 or less",
            )

    @property
    def total(self) -> float:
        return self.core + self.shared + self.l2 + self.dram + self.network


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What a device may use."""

    power_w: float
    area_mm2: float | None = None
    """Of the chip; None: only power is short."""

    def __post_init__(self) -> None:
        check_number("budget", "power_w", self.power_w)
        if self.area_mm2 is not None:
            check_number("budget", "area_mm2", self.area_mm2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Allotment:
    """What the budgets buy."""

    peak_flops: dict[str, float]
    units: int
    banks: dict[str, float] = field(default_factory=dict)
    """By memory level: `shared`, `l2`, `dram`."""
    network_bytes_per_s: float | None = None
    area_mm2: dict[str, float] = field(default_factory=dict)
    """What the parts take on the chip, for those whose area is known."""


def allot(technology: Technology, budget: Budget, power: Shares, area: Shares | None = None) -> Allotment:
    """Spend the budgets. Without shares of the area each part takes what its power asks for, and all must fit."""
    if area is not None and budget.area_mm2 is None:
        raise FlopwiseError("shares of an area without an area", hint="Budget(power_w=700, area_mm2=814)")

    def place_mm2(name: str) -> float | None:
        return getattr(area, name) * budget.area_mm2 if area is not None else None

    peaks, cores = _core(technology.core, power.core * budget.power_w, place_mm2("core"))
    banks = {
        name: _banks(getattr(technology, name), getattr(power, name) * budget.power_w, place_mm2(name))
        for name in ("shared", "l2", "dram")
    }
    areas = {name: banks[name] * known for name in banks if (known := getattr(technology, name).bank_area_mm2)}
    if technology.core.unit_area_mm2:
        areas["core"] = cores * technology.core.unit_area_mm2
    _check_area(areas, budget)
    energy = technology.network_energy_per_bit_j
    return Allotment(
        peak_flops=peaks,
        units=max(1, round(cores)),
        banks=banks,
        network_bytes_per_s=power.network * budget.power_w / (8 * energy) if energy and power.network else None,
        area_mm2=areas,
    )


def hardware_from_technology(
    technology: Technology,
    budget: Budget,
    power: Shares,
    area: Shares | None = None,
    *,
    efficiency: Efficiency | None = None,
) -> Hardware:
    """The device that the budgets buy, for `flopwise.predict.step`. None: kernels as good as those of today's GPUs."""
    bought = allot(technology, budget, power, area)

    def fact(value: float) -> Fact:
        return Fact(value=value, source=DERIVED)

    levels = []
    for name, banks in bought.banks.items():
        memory: MemoryTechnology = getattr(technology, name)
        levels.append(
            MemoryLevel(
                name=name,
                size_bytes=fact(banks * memory.bank_bytes),
                bandwidth_bytes_per_s=fact(banks * memory.bank_bytes_per_s),
            )
        )
    device = Device(
        vendor="none",
        architecture=technology.name,
        kind="gpu",
        units=fact(bought.units),
        peak_flops={name: fact(peak) for name, peak in bought.peak_flops.items()},
        memory=tuple(levels),
        power_w=fact(budget.power_w),
    )
    rate = bought.network_bytes_per_s
    return Hardware(
        name=technology.name,
        title=f"{technology.name}, {budget.power_w:g} W",
        device=device,
        efficiency=efficiency or estimated_efficiency(technology.launch_s),
        sources=_sources(),
        networks=(Network(name="network", bandwidth_bytes_per_s=fact(rate), topology="ring"),) if rate else (),
    )


def estimated_efficiency(launch_s: float) -> Efficiency:
    """What kernels reach on the GPUs of the catalogue, roughly: nobody has written any for a device on paper."""
    return Efficiency(
        source=ESTIMATED,
        launch_s=launch_s,
        gemm=GemmEfficiency(
            source=ESTIMATED,
            sustained=0.75,
            fill_depth=100,
            quantisation=0.5,
            tiles=(
                Tile(rows=256, columns=128, share=1.0),
                Tile(rows=128, columns=128, share=0.95),
                Tile(rows=128, columns=64, share=0.85),
                Tile(rows=64, columns=64, share=0.75),
            ),
        ),
        attention=AttentionEfficiency(
            source=ESTIMATED,
            forward=((256.0, 0.25), (1024.0, 0.45), (8192.0, 0.6)),
            backward=((256.0, 0.15), (1024.0, 0.35), (8192.0, 0.5)),
        ),
        memory=MemoryEfficiency(source=ESTIMATED, dram=0.85),
    )


def from_deepflow(configuration: Configuration) -> tuple[Technology, Budget]:
    """The technology and power of a configuration of the reference model, for the physical method.

    Its numbers are 4 bytes wide unless it says otherwise; the FLOPs of a unit are ours, for it has none.
    """
    old = configuration.technology
    number_format = {8: "fp64", 4: "fp32", 2: "bf16", 1: "fp8"}.get(configuration.model.element_bytes)
    if number_format is None:
        raise FlopwiseError(
            f"there is no number format of {configuration.model.element_bytes} bytes", hint="precision = 4, 2 or 1"
        )

    def memory(name: str, bank: str) -> MemoryTechnology:
        return MemoryTechnology(
            energy_per_bit_j=getattr(old, f"{name}_energy_per_bit_j"),
            bank_bytes=getattr(old, f"{name}_{bank}_bytes"),
            bank_bytes_per_s=getattr(old, f"{name}_{bank}_bytes_per_s"),
        )

    technology = Technology(
        name="deepflow",
        core=CoreTechnology(energy_per_flop_j={number_format: old.core_energy_per_flop_j}, unit_flops=UNIT_FLOPS),
        shared=memory("shared", "bank"),
        l2=memory("l2", "bank"),
        dram=memory("dram", "stack"),
        network_energy_per_bit_j=old.network_energy_per_bit_j,
        launch_s=old.launch_s,
    )
    return technology, Budget(power_w=configuration.power.budget_w)


def _sources() -> dict[str, Source]:
    return {
        DERIVED: Source(
            title="Technology, budgets and shares",
            kind="derived",
            note="watts over energy per operation, or mm² over area per unit, whichever allows less",
        ),
        ESTIMATED: Source(
            title="Estimated",
            kind="estimated",
            note="typical of kernels on the GPUs of the catalogue; nothing is built",
        ),
    }


def _core(core: CoreTechnology, watts: float, area_mm2: float | None) -> tuple[dict[str, float], float]:
    """Peak by number format, and units. A format that costs less energy is as much faster in the same unit."""
    costliest = max(core.energy_per_flop_j.values())
    units = watts / costliest / core.unit_flops
    if area_mm2 is not None and core.unit_area_mm2:
        units = min(units, area_mm2 / core.unit_area_mm2)
    rate = units * core.unit_flops
    return {name: rate * (costliest / energy) for name, energy in core.energy_per_flop_j.items()}, units


def _banks(memory: MemoryTechnology, watts: float, area_mm2: float | None) -> float:
    banks = watts / (8 * memory.energy_per_bit_j) / memory.bank_bytes_per_s
    if area_mm2 is not None and memory.bank_area_mm2:
        banks = min(banks, area_mm2 / memory.bank_area_mm2)
    return banks


def _check_area(areas: dict[str, float], budget: Budget) -> None:
    total = sum(areas.values())
    if budget.area_mm2 is not None and total > budget.area_mm2 * (1 + SUM_TOLERANCE):
        parts = ", ".join(f"{name} {size:,.0f}" for name, size in sorted(areas.items(), key=lambda item: -item[1]))
        raise FlopwiseError(
            f"the parts take {total:,.0f} mm² of a chip of {budget.area_mm2:,.0f}",
            why=f"with all the power that they get: {parts}",
            hint="shares of the area too, less power to the largest, or a larger chip",
        )
