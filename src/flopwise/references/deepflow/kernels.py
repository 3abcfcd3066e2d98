"""The reference's kernels: roofline, matrix product with reloads, update, embedding, reduction over devices.

With θ and β the usable rates, λ the latency of a DRAM access and O the cost of a launch:

    roofline    f/θ when f/m ≥ θ/β, else m/β + λ + l/(L2 bandwidth), for f FLOPs, m DRAM bytes and l L2 bytes
    product     (m × k)·(k × n) at a level with tile X: the left operand comes ⌈n/X⌉ times (once if k ≤ X), the right
                one ⌈m/X⌉ times, the result once; 2mkn + mn·(15 + 5⌈k/X₂⌉) FLOPs; roofline + O
    update      of n elements of w bytes: clip 4n FLOPs and 3nw bytes, apply 3n FLOPs and 7nw bytes; no launch
    embedding   2w bytes an element at β, + λ + O
    reduction   over p devices in a ring: p − 1 rounds (twice that for an all-reduce) of a p-th of the bytes each,
                with a message's latency; where it sums, p − 1 local additions of 3 bytes moved a byte, + O each
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from flopwise.references.deepflow.configuration import Configuration
from flopwise.references.deepflow.machine import Machine, machine_of


class PrintedLine(NamedTuple):
    """What is printed, put into words only when it is asked for: a search computes thousands of steps."""

    template: str
    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Roofline:
    """A kernel held against the roofline."""

    flops: float
    dram_bytes: float
    seconds: float
    inflection: float

    @property
    def line(self) -> PrintedLine:
        intensity = self.flops / self.dram_bytes
        return PrintedLine("inflection_point: {:.2f}\ncomp_int: {:.2f}\n", (self.inflection, intensity))


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, and what is told of them."""

    seconds: float
    lines: tuple[PrintedLine, ...]


def lines_of(costs: Iterable[Cost]) -> tuple[PrintedLine, ...]:
    """The lines of several costs, one after the other."""
    return tuple(line for cost in costs for line in cost.lines)


DRAM_LATENCY_S = 50e-9
"""λ"""
BROADCAST_BYTES = 128
"""Less than this is sent to all at once instead of round by round."""


RELOADS = "{}: reload_AB: {{}}, reload_AC: {{}}, reload_BC: {{}}\n {} 1 {}\n"
STRAIGHT = "{0} GEMM_flop: {1:,}, GEMM_gmem: {2:,}, GEMM_l2mem: {3:,}\n{0} GEMM_time: {4:,}\n\n"
TRANSPOSED = "{0} GEMM_flop_t: {1:,}, GEMM_gmem_t: {2:,}\n{0} GEMM_time_t: {4:,}\n\n"
UPDATE = "({0}) {1}_flop: {2:,}, {1}_mem: {3:,}\n({0}) {1}_time: {4:,}\n\n"
REDUCTION = "(gr) allReduce_flop: {:,}, allReduce_mem: {:,}\n"


@dataclass(frozen=True, slots=True)
class _Traffic:
    """A product in one orientation."""

    flops: float
    dram_bytes: float
    l2_bytes: float
    reloads: tuple[PrintedLine, PrintedLine]
    """How often the operands come from DRAM and L2; the result always moves once."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of one configuration."""

    configuration: Configuration

    @cached_property
    def machine(self) -> Machine:
        return machine_of(self.configuration)

    @property
    def launch_s(self) -> float:
        return self.configuration.technology.launch_s

    def roofline(self, flops: float, dram_bytes: float, l2_bytes: float = 0.0) -> Roofline:
        """Only the DRAM decides what binds; the L2 adds to a kernel that the DRAM binds, and to no other."""
        machine = self.machine
        if flops / dram_bytes >= machine.inflection:
            seconds = flops / machine.flops_per_s
        else:
            l2_s = l2_bytes / machine.l2_bytes_per_s if machine.l2_bytes_per_s else 0.0
            seconds = dram_bytes / machine.dram_bytes_per_s + DRAM_LATENCY_S + l2_s
        return Roofline(flops, dram_bytes, seconds, machine.inflection)

    def product(self, name: str, rows: float, depth: float, columns: float) -> Cost:
        """The faster of (rows × depth)·(depth × columns) and its transpose, the first where they are equal."""
        ways = (self._traffic(rows, depth, columns), self._traffic(columns, depth, rows))
        rooflines = [self.roofline(way.flops, way.dram_bytes, way.l2_bytes) for way in ways]
        straight_s, transposed_s = (roofline.seconds + self.launch_s for roofline in rooflines)
        transposed = straight_s > transposed_s
        way = ways[1] if transposed else ways[0]
        # The straight time is named even where the transpose is faster.
        values = (name, int(way.flops), int(way.dram_bytes), int(way.l2_bytes), straight_s)
        told = PrintedLine(TRANSPOSED if transposed else STRAIGHT, values)
        lines = (*ways[0].reloads, *ways[1].reloads, *(roofline.line for roofline in rooflines), told)
        return Cost(min(straight_s, transposed_s), lines)

    def _traffic(self, rows: float, depth: float, columns: float) -> _Traffic:
        machine, width = self.machine, self.configuration.model.element_bytes

        def reloads(tile: int) -> tuple[int, int]:
            if tile == 0:
                return 1, 1
            return 1 if depth <= tile else math.ceil(columns / tile), math.ceil(rows / tile)

        def moved(left: int, right: int) -> float:
            return (rows * depth * left + depth * columns * right + rows * columns) * width

        dram, l2 = reloads(machine.l2_tile), reloads(machine.shared_tile)
        additions = 15 + 5 * math.ceil(depth / machine.shared_tile)
        return _Traffic(
            flops=2 * rows * depth * columns + rows * columns * additions,
            dram_bytes=moved(*dram),
            l2_bytes=moved(*l2),
            reloads=(PrintedLine(RELOADS, ("gmem", *dram)), PrintedLine(RELOADS, ("l2mem", *l2))),
        )

    def update(self, name: str, rows: int, columns: int) -> Cost:
        """Clip and apply the gradients of one matrix."""
        elements = rows * columns
        moved = elements * self.configuration.model.element_bytes
        apply, clip = self.roofline(3 * elements, 7 * moved), self.roofline(4 * elements, 3 * moved)
        told = [
            PrintedLine(UPDATE, (name, kind, kernel.flops, kernel.dram_bytes, kernel.seconds))
            for kind, kernel in (("gradclip", clip), ("applyGrad", apply))
        ]
        return Cost(apply.seconds + clip.seconds, (apply.line, clip.line, *told))

    def embedding(self, *, backward: bool) -> Cost:
        """Read the rows of a batch's words, or add to them; backward carries them around the data-parallel ring."""
        configuration, machine = self.configuration, self.machine
        model, copies = configuration.model, configuration.parallel.data
        rows_bytes = model.element_bytes * configuration.shard_sequences * model.hidden * model.sequence_tokens
        seconds = 2 * rows_bytes / machine.dram_bytes_per_s + DRAM_LATENCY_S + self.launch_s
        if backward and copies > 1:
            message_s = rows_bytes / machine.network_bytes_per_s + configuration.technology.line_latency_s
            seconds = message_s * 2 * (copies - 1) + seconds
        told = PrintedLine("{}Embedding_mem: {:,}\n", ("(gr) " if backward else "", int(2 * rows_bytes)))
        return Cost(seconds, (told,))

    def reduction(self, rows: float, columns: float, devices: int, *, sums: bool, scattered: bool = False) -> Cost:
        """Sum a matrix over devices (`scattered`: each keeps a part) or, without `sums`, gather it."""
        if devices == 1:
            return Cost(0.0, ())
        elements, width = rows * columns, self.configuration.model.element_bytes
        others = devices - 1
        if width * elements < BROADCAST_BYTES:
            kept = 1 / devices if scattered else 1
            local = self.roofline(elements * others * kept, 3 * width * elements * others * kept)
            # The reference adds these bytes to seconds as they are.
            transfer_s, local_s = width * elements * kept, local.seconds
        else:
            local = self.roofline(elements / devices, 3 * width * elements / devices)
            message_s = width * elements / devices / self.machine.network_bytes_per_s
            rounds = others if scattered or not sums else 2 * others
            transfer_s = (message_s + self.configuration.technology.line_latency_s) * rounds
            local_s = (local.seconds + self.launch_s) * others
        told = PrintedLine(REDUCTION, (int(local.flops), int(local.dram_bytes)))
        return Cost(transfer_s + (local_s if sums else 0.0), (local.line, told))
