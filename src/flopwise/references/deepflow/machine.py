"""From technology and shares of power to a machine: rates, sizes, the tile that each memory level holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flopwise.references.deepflow.configuration import Configuration, DeepflowParallel

USABLE = 0.7
"""Share of the arithmetic and of the DRAM bandwidth that kernels reach. L2 and shared memory are taken whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One device as the kernels see it."""

    flops_per_s: float
    """θ, usable; what is printed is the whole rate."""
    dram_bytes_per_s: float
    """β, usable; what is printed is the whole rate."""
    dram_bytes: float
    l2_bytes_per_s: float
    l2_bytes: float
    shared_bytes: float
    network_bytes_per_s: float
    """Of one link; 0 with a single device."""
    l2_tile: int
    """X₁: edge of the square tile of which the L2 holds three; 0 where there is no L2."""
    shared_tile: int
    """X₂, the same for the shared memory."""

    @property
    def inflection(self) -> float:
        """FLOPs per DRAM byte above which a kernel is bound by arithmetic, by the usable rates."""
        return self.flops_per_s / self.dram_bytes_per_s


def machine_of(configuration: Configuration) -> Machine:
    """Divide each part's watts by its energy per operation or byte; capacity follows from bandwidth, by bank."""
    technology, power = configuration.technology, configuration.power
    watts = power.budget_w
    dram = power.dram * watts / (technology.dram_energy_per_bit_j * 8) * USABLE
    l2 = power.l2 * watts / (technology.l2_energy_per_bit_j * 8)
    shared = power.shared * watts / (technology.shared_energy_per_bit_j * 8)
    l2_bytes = l2 / technology.l2_bank_bytes_per_s * technology.l2_bank_bytes
    shared_bytes = shared / technology.shared_bank_bytes_per_s * technology.shared_bank_bytes
    links = link_count(configuration.parallel)
    element_bytes = configuration.model.element_bytes
    return Machine(
        flops_per_s=power.core * watts / technology.core_energy_per_flop_j * USABLE,
        dram_bytes_per_s=dram,
        dram_bytes=dram / USABLE / technology.dram_stack_bytes_per_s * technology.dram_stack_bytes,
        l2_bytes_per_s=l2,
        l2_bytes=l2_bytes,
        shared_bytes=shared_bytes,
        network_bytes_per_s=power.network * watts / (links * technology.network_energy_per_bit_j * 8) if links else 0.0,
        l2_tile=_tile(l2_bytes, element_bytes),
        shared_tile=_tile(shared_bytes, element_bytes),
    )


def link_count(parallel: DeepflowParallel) -> int:
    """Links that the power of the network is divided by; 0 with a single device.

    The public revision that lies nearest counts so for a mesh, with the hidden layer's first dimension for all of the
    kernel parallelism. How the seed's own revision counted a ring is not known; it is taken to be the same.
    """
    dimensions = parallel.grid_dimensions
    if dimensions == 0:
        return 0
    plane = parallel.data * parallel.hidden.first
    return dimensions * plane * (parallel.layer if dimensions == 3 else 1)


def _tile(size_bytes: float, element_bytes: int) -> int:
    """The largest power of two of which three squares fit; 1 when not even that does, 0 without memory."""
    if size_bytes <= 0:
        return 0
    edge = math.sqrt(size_bytes / element_bytes / 3)
    return int(2 ** max(0, math.floor(math.log2(edge))))
